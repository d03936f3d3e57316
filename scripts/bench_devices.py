"""What more devices gain when every layer is streamed: each brings its share of the layers over a link of its own.

    python scripts/bench_devices.py --geometry=qwen3-8b --devices=0,1

Decodes on the first device alone and on all of them, with two layers on each and every layer uploaded for every token;
on all of them in two ways, with uploads in programs of their own and with some of each upload inside the layer step.
Ids and logits are compared bit by bit; then all are timed in random order. The ceilings are the rate of the first link,
and of all links at the same time, each measured before and after, of which the better counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from decoding import Decoder, Run

    from vramjax.checkpoint.packed import Packed
    from vramjax.checkpoint.random_weights import RandomWeights

_GEOMETRY = flags.DEFINE_string("geometry", "", "random weights of a model's shapes, such as qwen3-8b")
_MODEL = flags.DEFINE_string("model", "", "real weights instead: anything that `vramjax --model` takes")
_DEVICES = flags.DEFINE_list("devices", ["0", "1"], "devices, by their place in jax.devices(), at least two")
_KEEP = flags.DEFINE_integer("keep", 2, "layers on each device", lower_bound=1)
_CHECK_TOKENS = flags.DEFINE_integer("check_tokens", 256, "tokens whose ids and logits are compared", lower_bound=4)
_TOKENS = flags.DEFINE_integer("tokens", 16, "tokens to decode in each timed run", lower_bound=3)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "timed runs on each number of devices", lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 32, "tokens of the prompt", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")


class Subject:
    """A model in host memory that is pinned for the first of the devices, each of which has every N-th layer."""

    def __init__(self, weights: Packed | RandomWeights, decoder: Decoder, num_devices: int) -> None:
        from decoding import pinned_store

        from vramjax.residency.multi import layers_of_device

        self.decoder, self.devices = decoder, decoder.devices[:num_devices]
        self.num_layers, self.layer_bytes = weights.config.num_layers, weights.layout.num_bytes
        self.stores = [
            pinned_store(weights, device, layers_of_device(i, self.num_layers, num_devices))
            for i, device in enumerate(self.devices)
        ]

    def gb_per_s(self) -> float:
        """The rate of all links of these devices at the same time."""
        from ceilings import together_gb_per_s

        layers = [[store.layer(i) for i in range(store.num_layers)] for store in self.stores]
        return together_gb_per_s(self.devices, layers)

    def run(self, copies: str, num_tokens: int, *, check: bool) -> Run:
        """One generation, all layers streamed, as `Decoder.run` has it, with the arm and its peaks in its row."""
        from vramjax.residency.controller import Controller
        from vramjax.residency.fused_transfer import FusedTransfer
        from vramjax.residency.policy import window
        from vramjax.residency.transfer import DeviceTransfer
        from vramjax.residency.turn_transfer import TurnTransfer

        make_transfer = {
            "fused": FusedTransfer,
            "separate": DeviceTransfer,
            "turns": lambda device: TurnTransfer(device, num_devices=len(self.devices)),
        }[copies]
        controllers = [
            Controller(store, window(store.num_layers, _KEEP.value), make_transfer(device))
            for device, store in zip(self.devices, self.stores, strict=True)
        ]
        run = self.decoder.run(controllers, num_tokens, check=check)
        row = {
            "copies": copies,
            "num_devices": len(self.devices),
            "keep": _KEEP.value,
            **run.row,
            "allocator_peak_bytes": [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in self.devices],
        }
        return dataclasses.replace(run, row=row)

    def close(self) -> None:
        """Gives back the host memory of the layers."""
        for store in self.stores:
            store.close()


def main(_: list[str]) -> None:
    if len(_DEVICES.value) < 2:
        raise app.UsageError("expected at least two devices")
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    start = time.perf_counter()
    from benchmarking import open_weights

    name, weights = open_weights(_MODEL.value, _GEOMETRY.value)

    import jax
    from decoding import Decoder

    devices = [jax.devices()[int(index)] for index in _DEVICES.value]
    max_tokens = max(_CHECK_TOKENS.value, _TOKENS.value)
    decoder = Decoder(weights, devices, prompt_tokens=_PROMPT_TOKENS.value, max_tokens=max_tokens)
    with (
        contextlib.closing(Subject(weights, decoder, 1)) as one,
        contextlib.closing(Subject(weights, decoder, len(devices))) as every,
    ):
        bench(name, one, every, start)


def bench(name: str, one: Subject, every: Subject, start: float) -> None:
    from benchmarking import announce_result, bits, size_suffix, spread, write_result

    from vramjax.progress import progress_bar

    subjects = (one, every)
    links = [subject.gb_per_s() for subject in subjects]
    arms = {"1 device": (one, "fused")}
    arms |= {f"{len(every.devices)} devices, {copies}": (every, copies) for copies in ("turns", "separate")}
    sweeps = _CHECK_TOKENS.value + _ROUNDS.value * _TOKENS.value + 2 * (1 + _ROUNDS.value)
    seconds = sweeps * one.num_layers * one.layer_bytes * (1 / links[0] + 2 / links[1]) / 1e9
    print(
        f"{name} on {len(every.devices)} x {one.devices[0].device_kind}: {one.num_layers} layers of "
        f"{one.layer_bytes / 1e6:.1f} MB, ready after {time.perf_counter() - start:.0f} s; links {links[0]:.1f} and, "
        f"together, {links[1]:.1f} GB/s; about {seconds + 25:.0f} s",
        flush=True,
    )
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    with progress_bar("Decoding", total=len(arms) * (1 + _ROUNDS.value), unit="items") as advance:
        runs = {}
        for arm, (subject, copies) in arms.items():
            runs[arm] = subject.run(copies, _CHECK_TOKENS.value, check=True)
            advance(1)
        for i in range(_ROUNDS.value):
            for arm, (subject, copies) in random.Random(i).sample(list(arms.items()), len(arms)):
                run = subject.run(copies, _TOKENS.value, check=False)
                assert all(map(operator.eq, run.token_ids, runs[arm].token_ids))  # as far as both go
                times[arm].append(run.row["ms_per_token"])
                advance(1)
    links = [max(link, subject.gb_per_s()) for link, subject in zip(links, subjects, strict=True)]
    rows: list[dict[str, Any]] = []
    reference = runs["1 device"]
    for arm, (subject, _) in arms.items():
        run, rounds, link = runs[arm], times[arm], links[subjects.index(subject)]
        row = {"arm": arm, **run.row, "ms_per_token": statistics.median(rounds), "ms_per_token_rounds": rounds}
        row["gb_per_s"] = row["bytes_per_token"] / row["ms_per_token"] / 1e6
        row["link_frac"] = row["gb_per_s"] / link
        row["ids_equal"] = run.token_ids == reference.token_ids
        row["logits_equal"] = run.digests == reference.digests
        rows.append(row)
        print(
            f"{row['arm']}: {spread(rounds)} ms/token, {row['uploads_per_token']} uploads, {row['gb_per_s']:.1f} GB/s, "
            f"{row['link_frac']:.1%} of {link:.1f}; bits {bits(row)}"
        )
    speedup = f"{'two' if len(every.devices) == 2 else len(every.devices)}_gpu_speedup{size_suffix(name)}"
    path = write_result(
        f"devices-{name}",
        one.devices[0],
        ceilings={"pinned_copy_gb_per_s": links[0], "pinned_copies_together_gb_per_s": links[1]},
        metrics={
            speedup: rows[0]["ms_per_token"] / rows[1]["ms_per_token"],
            f"{speedup}_separate": rows[0]["ms_per_token"] / rows[2]["ms_per_token"],
            "links_together_over_one": links[1] / links[0],
            "ids_equal": all(row["ids_equal"] and row["logits_equal"] for row in rows),
            "tokens_compared": _CHECK_TOKENS.value,
        },
        rows=rows,
        out=_OUT.value,
    )
    announce_result(path, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    app.run(main)
