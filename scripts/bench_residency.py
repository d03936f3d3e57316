"""What a window costs: time per token against layers on the device, with both traps beside it.

    python scripts/bench_residency.py --geometry=qwen3-vl-2b
    python scripts/bench_residency.py --model=demo

Runs every arm once for its bits and its peak, measures the link, then times every arm several times over, in turn, on
the same weights: the same prompt, the same number of greedy tokens. Token ids and logits of every arm are compared bit
by bit with those of the resident run.
The "free" arms, and a pool arm to compare them with, run in a process whose allocator really frees.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from vramjax.residency import Schedule

_GEOMETRY = flags.DEFINE_string("geometry", "", "random weights of a model's shapes, such as qwen3-vl-2b")
_MODEL = flags.DEFINE_string("model", "", "real weights instead: anything that `vramjax --model` takes")
_KEEP = flags.DEFINE_list(
    "keep", ["off", "27", "26", "20", "12", "4", "1"], "windows of the past policy; off: resident"
)
_BOTH_SIDES = flags.DEFINE_list("both_sides", ["1", "2", "4", "8", "16"], "windows of the both-sides policy")
_PINNED_RING = flags.DEFINE_list("pinned_ring", ["2", "8", "16", "24"], "layers on the device of the pinned ring")
_FREE = flags.DEFINE_list("free", ["1"], "windows of the past policy whose layers are really freed")
_TOKENS = flags.DEFINE_integer("tokens", 64, "tokens to decode in each run", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "timed runs of each arm", lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 32, "tokens of the prompt", lower_bound=1)
_PLOT = flags.DEFINE_bool("plot", True, "draw a plot beside the result file; needs matplotlib")
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")
_ARMS = flags.DEFINE_string(
    "arms_as_json", None, "run only these arms and print their rows (used by the program itself)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of the residency controller."""

    policy: str  # resident, or a name that `window` knows
    keep: int
    release: str  # pool, free
    allocator: str = "default"  # default, platform: really gives memory back to the driver

    @property
    def name(self) -> str:
        if self.policy == "resident":
            return "resident"
        extra = "" if self.allocator == "default" else f", {self.allocator} allocator"
        return f"{self.policy} {self.keep}, {self.release}{extra}"


class Bench:
    """Weights in pinned memory and on the device what every arm shares; one engine per run."""

    def __init__(self) -> None:
        import jax

        from vramjax.checkpoint.random_weights import GEOMETRIES, RandomWeights
        from vramjax.checkpoint.resolve import open_model
        from vramjax.decode.self_test import check_kernels
        from vramjax.language_model import engine_spec
        from vramjax.progress import progress_bar
        from vramjax.residency import DeviceTransfer, HostStore

        self.device = jax.devices()[0]
        self.name = _MODEL.value or _GEOMETRY.value
        weights = open_model(self.name) if _MODEL.value else RandomWeights(GEOMETRIES[self.name])
        check_kernels(self.device)
        self.num_layers, self.layer_bytes = weights.config.num_layers, weights.layout.num_bytes
        context = _PROMPT_TOKENS.value + _TOKENS.value
        self.spec = engine_spec(weights.config, weights.groups, context=context, device=self.device)
        self.transfer = DeviceTransfer(self.device)
        with progress_bar("Making weights", total=self.num_layers, unit="items") as advance:

            def layer(layer_idx: int) -> dict[str, Any]:
                advance(1)
                return weights.load_layer(layer_idx)

            self.store = HostStore((layer(i) for i in range(self.num_layers)), self.device)
        self.head = self.transfer.upload(weights.load_head(), None)
        self.head_bytes = weights.head_nbytes
        self.prompt = [(7919 * i) % weights.config.vocab_size for i in range(1, _PROMPT_TOKENS.value + 1)]

    def schedule(self, arm: Arm) -> Schedule:
        from vramjax.residency.policy import window

        if arm.policy == "resident":
            return window(self.num_layers, None)
        return window(self.num_layers, arm.keep, arm.policy)

    def run(self, arm: Arm, *, check: bool) -> dict[str, Any]:
        """One generation. `check` hashes all logits, which costs a copy per token; else tokens are timed."""
        from vramjax.decode.engine import Engine
        from vramjax.decode.sampler import Sampling
        from vramjax.language_model import device_bytes
        from vramjax.residency import Controller

        schedule = self.schedule(arm)
        controller = Controller(
            self.store, schedule, self.transfer, release="free" if arm.release == "free" else "pool"
        )
        engine = Engine(spec=self.spec, head=self.head, controller=controller, device=self.device)
        digest, times, ids = hashlib.sha256(), [], []
        with controller:
            controller.warm_up()
            generated = engine.generate(
                self.prompt,
                max_new_tokens=_TOKENS.value,
                sampling=Sampling(),
                on_logits=(lambda row: digest.update(row.tobytes())) if check else None,
            )
            for token_id in generated:
                ids.append(token_id)
                times.append(time.perf_counter())
            stats = controller.stats
        # The first token is waited for, and so is the last: between them are as many sweeps as tokens.
        needed = device_bytes(self.spec, schedule, self.head_bytes)
        return {
            "arm": arm.name,
            **dataclasses.asdict(arm),
            "ms_per_token": (times[-1] - times[0]) / (len(times) - 1) * 1e3,
            "uploads_per_token": stats.last_sweep_uploads,
            "bytes_per_token": stats.last_sweep_bytes_uploaded,
            "peak_layers": stats.peak_resident_layers,
            "end_layers": stats.resident_layers_end,
            "entries": 7 * stats.resident_layers_end + 1,
            "peak_layer_bytes": stats.peak_device_bytes,
            "planned_peak_bytes": needed.total_bytes,
            "pool_hits": stats.pool_hits,
            "pool_misses": stats.pool_misses,
            "slots_freed": stats.slots_freed,
            "allocator_peak_bytes": (self.device.memory_stats() or {}).get("peak_bytes_in_use"),
            "token_ids": ids,
            "logits_sha256": digest.hexdigest() if check else None,
        }


def all_arms(num_layers: int) -> tuple[list[Arm], list[Arm]]:
    """The arms of this process, and those of a process with an allocator that frees."""
    arms = []
    for text in _KEEP.value:
        keep = num_layers if text == "off" else int(text)
        arms.append(
            Arm(policy="resident" if keep >= num_layers else "past", keep=min(keep, num_layers), release="pool")
        )
    for policy, keeps in (("pinned_ring", _PINNED_RING.value), ("both_sides", _BOTH_SIDES.value)):
        arms += [Arm(policy=policy, keep=int(k), release="pool") for k in keeps if int(k) < num_layers]
    freeing = [
        Arm(policy="past", keep=int(k), release=release, allocator="platform")
        for k in _FREE.value
        for release in ("pool", "free")
    ]
    return list(dict.fromkeys(arms)), freeing


def check_arms(bench: Bench, arms: list[Arm]) -> dict[Arm, dict[str, Any]]:
    """Each arm once: its bits, its counters and its peak.

    The allocator's peak only ever rises: with the smallest arm first, it is each arm's own right after that arm.
    """
    from vramjax.progress import progress_bar

    with progress_bar("Checking", total=len(arms), unit="items") as advance:
        rows = {}
        for arm in sorted(arms, key=lambda arm: bench.schedule(arm).peak_resident_layers):
            rows[arm] = bench.run(arm, check=True)
            advance(1)
    return {arm: rows[arm] for arm in arms}


def time_arms(bench: Bench, rows: dict[Arm, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each arm `--rounds` times, in random order each round; the rows with their times."""
    from vramjax.progress import progress_bar

    times: dict[Arm, list[float]] = {arm: [] for arm in rows}
    with progress_bar("Timing", total=len(rows) * _ROUNDS.value, unit="items") as advance:
        for round_idx in range(_ROUNDS.value):
            for arm in random.Random(round_idx).sample(list(rows), len(rows)):
                row = bench.run(arm, check=False)
                assert row["token_ids"] == rows[arm]["token_ids"], arm
                times[arm].append(row["ms_per_token"])
                advance(1)
    for arm, row in rows.items():
        row["ms_per_token"] = statistics.median(times[arm])
        row["ms_per_token_rounds"] = times[arm]
    return list(rows.values())


def run_elsewhere(arms: list[Arm]) -> list[dict[str, Any]]:
    """The rows of arms that need an allocator which is chosen when JAX starts."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    arms_as_json = json.dumps([dataclasses.asdict(arm) for arm in arms])
    command = [sys.executable, *sys.argv, f"--arms_as_json={arms_as_json}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(_: list[str]) -> None:
    if bool(_MODEL.value) == bool(_GEOMETRY.value):
        raise app.UsageError("expected one of --model and --geometry")
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    bench = Bench()
    if _ARMS.value is not None:
        arms = [Arm(**arm) for arm in json.loads(_ARMS.value)]
        print(json.dumps(time_arms(bench, check_arms(bench, arms))))
        return

    from benchmarking import RESULTS, device_read_gb_per_s, pinned_copy_gb_per_s, spread, write_result

    here, elsewhere = all_arms(bench.num_layers)
    checked = check_arms(bench, here)
    # After the arms' own peaks are known, which its buffers would hide, and before any arm is timed.
    ceilings = {
        "pinned_copy_gb_per_s": pinned_copy_gb_per_s(bench.device),
        "device_read_gb_per_s": device_read_gb_per_s(bench.device),
    }
    print(f"{bench.name} on {bench.device.device_kind}: {bench.num_layers} layers of {bench.layer_bytes / 1e6:.1f} MB")
    print(", ".join(f"{name} {rate:.1f}" for name, rate in ceilings.items()), flush=True)
    rows = time_arms(bench, checked)
    if elsewhere:
        rows += run_elsewhere(elsewhere)

    reference = rows[0]
    for row in rows:
        row["gb_per_s"] = row["bytes_per_token"] / row["ms_per_token"] / 1e6
        row["link_frac"] = row["gb_per_s"] / ceilings["pinned_copy_gb_per_s"]
        row["ids_equal"] = row["token_ids"] == reference["token_ids"]
        row["logits_equal"] = row["logits_sha256"] == reference["logits_sha256"]
    header = f"{'arm':<38}{'ms/token':>18}{'uploads':>9}{'MB/token':>10}{'GB/s':>7}{'link':>6}{'entries':>9}"
    print(header + f"{'peak layers':>13}{'peak GiB':>10}{'bits':>7}")
    for row in rows:
        peak_bytes = row["allocator_peak_bytes"] or row["peak_layer_bytes"] + bench.head_bytes
        print(
            f"{row['arm']:<38}{spread(row['ms_per_token_rounds']):>18}{row['uploads_per_token']:>9}"
            f"{row['bytes_per_token'] / 1e6:>10.0f}{row['gb_per_s']:>7.1f}{row['link_frac']:>6.0%}{row['entries']:>9}"
            f"{row['peak_layers']:>13}{peak_bytes / 2**30:>10.2f}"
            f"{'same' if row['ids_equal'] and row['logits_equal'] else 'DIFFER':>7}"
        )
    metrics: dict[str, Any] = {"ids_equal": all(row["ids_equal"] and row["logits_equal"] for row in rows)}
    metrics |= _headlines(bench, rows) | _cost_of_freeing(rows)
    directory = Path(_OUT.value) if _OUT.value else RESULTS / bench.device.device_kind.lower().replace(" ", "-")
    directory.mkdir(parents=True, exist_ok=True)
    name = f"residency-{bench.name}"
    if _PLOT.value:
        plot(bench, rows, ceilings["pinned_copy_gb_per_s"], directory / f"{name}.png")
    write_result(name, bench.device, ceilings=ceilings, metrics=metrics, rows=rows, directory=directory)


def _headlines(bench: Bench, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The share of the link with every layer streamed, and the largest measured peak over what was planned."""
    headlines = {}
    all_streamed = [row["link_frac"] for row in rows if row["uploads_per_token"] == bench.num_layers]
    size = {"qwen3-vl-2b": "2b", "qwen3-8b": "8b"}.get(bench.name)
    if size and all_streamed:
        headlines[f"stream_link_frac_{size}"] = max(all_streamed)
    peaks = [row["allocator_peak_bytes"] / row["planned_peak_bytes"] for row in rows if row["allocator_peak_bytes"]]
    if peaks:
        headlines["peak_over_budget_max"] = max(peaks)
    return headlines


def _cost_of_freeing(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Real frees against the pool; the second figure has the pool under the same, freeing, allocator.

    That allocator also frees what XLA needs for a moment, so it costs much whatever becomes of the layers.
    """
    by_arm = {(row["policy"], row["keep"], row["release"], row["allocator"]): row["ms_per_token"] for row in rows}
    for (policy, keep, release, allocator), freed in by_arm.items():
        pooled, pooled_alike = (by_arm.get((policy, keep, "pool", a)) for a in ("default", allocator))
        if release == "free" and pooled and pooled_alike:
            return {"free_over_pool": freed / pooled, "free_over_pool_same_allocator": freed / pooled_alike}
    return {}


def plot(bench: Bench, rows: list[dict[str, Any]], link_gb_per_s: float, path: Path) -> None:
    """ms per token against layer bytes at the peak, and the time that the link alone needs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for policy, marker in (("past", "o"), ("pinned_ring", "^"), ("both_sides", "x"), ("resident", "s")):
        points = [row for row in rows if row["policy"] == policy and row["allocator"] == "default"]
        x = [row["peak_layer_bytes"] / 2**30 for row in points]
        axes.plot(x, [row["ms_per_token"] for row in points], marker, label=policy.replace("_", " "))
        for row, at in zip(points, x, strict=True):
            if policy != "resident":
                offset = (4, 4)
                axes.annotate(str(row["keep"]), (at, row["ms_per_token"]), xytext=offset, textcoords="offset points")
    windows = sorted((row for row in rows if row["policy"] == "past"), key=lambda row: row["keep"])
    floor = [row["bytes_per_token"] / link_gb_per_s / 1e6 for row in windows]
    axes.plot([row["peak_layer_bytes"] / 2**30 for row in windows], floor, "--", label="link alone (past)")
    axes.set_xlabel("layers on the device at the peak (GiB)")
    axes.set_ylabel("ms per token")
    axes.set_title(f"{bench.name} on {bench.device.device_kind}; numbers are keep")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    app.run(main)
