"""What a window or a budget costs: time per token against memory on the device, with both traps beside it.

    python scripts/bench_residency.py --geometry=qwen3-vl-2b
    python scripts/bench_residency.py --geometry=qwen3-8b --keep=off --both_sides= --free=
    python scripts/bench_residency.py --model=demo

Runs every arm once for its bits and its peak, measures the link, then times every arm several times over, in random
order, and measures the link again. All arms have the same weights and the same prompt, and decode greedily; token ids
and logits of each are compared bit by bit with those of the first. The link is not measured at the very beginning
because its buffers would hide the smaller peaks; the better of its two rates is the ceiling.
The "really freed" arms, and a pool arm to compare them with, run in a process whose allocator really frees.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from decoding import Run
    from residency_arms import Arm, Subject

_GEOMETRY = flags.DEFINE_string("geometry", "", "random weights of a model's shapes, such as qwen3-vl-2b")
_MODEL = flags.DEFINE_string("model", "", "real weights instead: anything that `vramjax --model` takes")
_KEEP = flags.DEFINE_list(
    "keep", ["off", "27", "26", "20", "12", "4", "1"], "windows of the past policy; off: resident"
)
_BOTH_SIDES = flags.DEFINE_list("both_sides", ["1", "4", "16"], "windows of the both-sides policy")
_PINNED_RING = flags.DEFINE_list("pinned_ring", [], "layers on the device of the pinned ring")
_BUDGETS = flags.DEFINE_list(
    "budgets", ["25", "50", "75"], "percent of the weights: the pinned ring, and the past window of no higher peak"
)
_DEVICE_BUDGETS = flags.DEFINE_list(
    "device_budgets", ["smallest"], "budgets for everything on the device, such as 8GiB, or smallest: what is accepted"
)
_TRANSFERS = flags.DEFINE_list(
    "transfers", ["fused", "separate", "eager"], "ways to copy, with two layers on the device and all streamed"
)
_FREE = flags.DEFINE_list("free", ["1"], "windows of the past policy whose layers are really freed")
_CHECK_TOKENS = flags.DEFINE_integer("check_tokens", 256, "tokens whose ids and logits are compared", lower_bound=3)
_TOKENS = flags.DEFINE_integer("tokens", 16, "tokens to decode in each timed run", lower_bound=3)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "timed runs of each arm", lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 32, "tokens of the prompt", lower_bound=1)
_PLOT = flags.DEFINE_bool("plot", True, "draw a plot beside the result file, if there is matplotlib")
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")
_ARMS = flags.DEFINE_string(
    "arms_as_json", None, "run only these arms and print their rows (used by the program itself)"
)


def open_subject() -> tuple[str, Subject]:
    """The name of what is run, and its weights, ready for all arms."""
    from benchmarking import open_weights

    name, weights = open_weights(_MODEL.value, _GEOMETRY.value)

    import jax
    from decoding import Decoder, pinned_store
    from residency_arms import Subject

    device, max_tokens = jax.devices()[0], max(_CHECK_TOKENS.value, _TOKENS.value)
    store = pinned_store(weights, device)
    return name, Subject(store, Decoder(weights, [device], prompt_tokens=_PROMPT_TOKENS.value, max_tokens=max_tokens))


def all_arms(subject: Subject) -> tuple[list[Arm], list[Arm]]:
    """The arms of this process, and those of a process with an allocator that frees."""
    from residency_arms import budget_arms, freeing_arms, share_arms, transfer_arms, window_arms

    arms = [
        # What is freed elsewhere is compared with the same window here.
        *window_arms(subject.num_layers, [*_KEEP.value, *_FREE.value], _BOTH_SIDES.value, _PINNED_RING.value),
        *transfer_arms(subject.num_layers, _TRANSFERS.value),
        *share_arms(subject, _BUDGETS.value),
        *budget_arms(subject, _DEVICE_BUDGETS.value),
    ]
    return list(dict.fromkeys(arms)), list(freeing_arms(_FREE.value))


def run_arms(subject: Subject, arms: list[Arm], ceilings: dict[str, float]) -> dict[Arm, Run]:
    """All arms: checked, then timed; the link before and after goes into `ceilings`."""
    from ceilings import device_read_gb_per_s, pinned_copy_gb_per_s
    from residency_arms import check_arms, time_arms

    def measure_link() -> None:
        layers = [subject.store.layer(i) for i in range(subject.num_layers)]
        rate = pinned_copy_gb_per_s(subject.device, layers)
        ceilings["pinned_copy_gb_per_s"] = max(rate, ceilings.get("pinned_copy_gb_per_s", 0.0))
        print(f"link: {rate:.2f} GB/s from pinned memory", flush=True)

    runs = check_arms(subject, arms, _CHECK_TOKENS.value)
    measure_link()
    ceilings["device_read_gb_per_s"] = device_read_gb_per_s(subject.device)
    orders = [random.Random(i).sample(arms, len(arms)) for i in range(_ROUNDS.value)]
    time_arms(subject, runs, _TOKENS.value, orders)
    measure_link()
    return runs


def run_elsewhere(arms: list[Arm]) -> list[tuple[dict[str, Any], list[int]]]:
    """Rows and token ids of arms that need an allocator which is chosen when JAX starts."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    arms_as_json = json.dumps([dataclasses.asdict(arm) for arm in arms])
    command = [sys.executable, *sys.argv, f"--arms_as_json={arms_as_json}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def estimated_seconds(subject: Subject, here: list[Arm], elsewhere: list[Arm]) -> float:
    """What all runs should take from here on; ways to copy and allocators that are slower make it more."""
    from ceilings import quick_copy_gb_per_s

    gb_per_s = quick_copy_gb_per_s(subject.device, subject.store.layer(0))

    def seconds(arm: Arm) -> float:
        ms = subject.schedule(arm).uploads_per_sweep * subject.layer_bytes / gb_per_s / 1e6 + 4
        # Each run begins with a sweep for the prompt, after the layers that a sweep begins with.
        sweeps = _CHECK_TOKENS.value + _ROUNDS.value * _TOKENS.value + 2 * (1 + _ROUNDS.value)
        return sweeps * ms / 1e3 * (1 if arm.allocator == "default" else 2.2)

    return sum(map(seconds, [*here, *elsewhere])) + 20 + 20 * bool(elsewhere)


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    start = time.perf_counter()
    name, subject = open_subject()
    if _ARMS.value is not None:
        from residency_arms import Arm, check_arms, time_arms

        arms = [Arm(**arm) for arm in json.loads(_ARMS.value)]
        runs = check_arms(subject, arms, _CHECK_TOKENS.value)
        time_arms(subject, runs, _TOKENS.value, [arms] * _ROUNDS.value)
        print(json.dumps([(run.row, run.token_ids) for run in runs.values()]))
        return

    from benchmarking import announce_result, write_result
    from plots import draw
    from residency_report import completed, metrics_of, print_table

    here, elsewhere = all_arms(subject)
    seconds = estimated_seconds(subject, here, elsewhere)
    print(
        f"{name} on {subject.device.device_kind}: {subject.num_layers} layers of {subject.layer_bytes / 1e6:.1f} MB, "
        f"ready after {time.perf_counter() - start:.0f} s; {len(here)} arms here and {len(elsewhere)} in a process of "
        f"their own: about {seconds:.0f} s",
        flush=True,
    )
    ceilings: dict[str, float] = {}
    runs = list(run_arms(subject, here, ceilings).values())
    results = [(run.row, run.token_ids) for run in runs]
    if elsewhere:
        results += run_elsewhere(elsewhere)
    rows = completed(results, runs[0], link_gb_per_s=ceilings["pinned_copy_gb_per_s"])
    print_table(rows)
    path = write_result(
        f"residency-{name}",
        subject.device,
        ceilings=ceilings,
        metrics=metrics_of(name, rows),
        rows=rows,
        out=_OUT.value,
    )
    if _PLOT.value:
        draw(path)
    announce_result(path, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    app.run(main)
