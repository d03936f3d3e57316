"""What a model costs that host memory does not hold: its layers come from disk, for every token.

    python scripts/bench_mapped.py --geometry=qwen3-8b --host_budget=5GiB
    python scripts/bench_mapped.py --model=~/models/packed --host_budget=5GiB

Writes random weights as a packed directory, unless there is one. Measures how fast as many threads read those files in
order, with the system's page cache dropped (posix_fadvise; mincore says how much is left), then decodes with every
layer streamed from disk within a budget of host memory, and measures the files again; the better rate is the ceiling.
Ids and logits are compared with those of the same model with all layers on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from vramjax.checkpoint.packed import Packed

_GEOMETRY = flags.DEFINE_string("geometry", "", "random weights of a model's shapes, such as qwen3-8b")
_LAYERS = flags.DEFINE_integer("layers", 0, "so many layers of them only; 0: all", lower_bound=0)
_MODEL = flags.DEFINE_string("model", "", "a packed directory instead")
_DIR = flags.DEFINE_string("dir", None, "where random weights are written for the time being; default: as for any file")
_HOST_BUDGET = flags.DEFINE_string("host_budget", "5GiB", "host memory of the whole process")
_KEEP = flags.DEFINE_integer("keep", 2, "layers on the device", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 4, "threads that read, as many as decoding has", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 8, "tokens to decode", lower_bound=3)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 32, "tokens of the prompt", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")


@contextlib.contextmanager
def packed_weights() -> Iterator[tuple[str, Packed]]:
    """The name of what is run, and its packed directory; one that was written for the purpose goes at the end."""
    from random_packed import write_random_packed

    from vramjax.checkpoint.packed import open_packed
    from vramjax.checkpoint.random_weights import GEOMETRIES, RandomWeights
    from vramjax.progress import progress_bar

    if _MODEL.value:
        path = Path(_MODEL.value).expanduser()
        yield path.name, open_packed(path)
        return
    config, name = GEOMETRIES[_GEOMETRY.value], _GEOMETRY.value
    if _LAYERS.value and _LAYERS.value != config.num_layers:
        config, name = dataclasses.replace(config, num_layers=_LAYERS.value), f"{name}-{_LAYERS.value}-layers"
    directory = Path(tempfile.mkdtemp(prefix="vramjax-", dir=_DIR.value))
    try:
        weights = RandomWeights(config)
        num_bytes = weights.head_nbytes + config.num_layers * weights.layout.num_bytes
        with progress_bar("Writing", total=num_bytes) as advance:
            write_random_packed(weights, directory / name, progress=advance)
        del weights
        yield name, open_packed(directory / name)
    finally:
        shutil.rmtree(directory)


def decode(packed: Packed, **arguments: Any) -> dict[str, Any]:
    """One generation of a model that is loaded for it, as a row; host memory is that of all this."""
    from benchmarking import HighestSeen
    from decoding import make_prompt

    from vramjax.language_model import LanguageModel
    from vramjax.memory import process_host_bytes

    digest, ids, times, from_disk = hashlib.sha256(), [], [], []
    context = _PROMPT_TOKENS.value + _TOKENS.value
    arguments |= {"context": context, "speculate": "off"}  # a token a sweep
    with HighestSeen(process_host_bytes) as host, LanguageModel(packed, None, **arguments) as model:
        for token in model.generate(
            make_prompt(_PROMPT_TOKENS.value, packed.config.vocab_size),
            max_new_tokens=_TOKENS.value,
            ignore_stop=True,
            on_logits=lambda row: digest.update(row.tobytes()),
        ):
            ids.append(token.id)
            times.append(time.perf_counter())
            from_disk.append(storage_bytes())
        stats = model.stats()
    # What is read ahead and what is queued is not of one token alone: only the mean says something.
    rounds = [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
    return {
        "arm": stats["host"] if arguments.get("host") else "resident",
        "ms_per_token": statistics.mean(rounds),
        "ms_per_token_rounds": rounds,
        "uploads_per_token": stats["uploads_per_token"],
        "bytes_per_token": stats["bytes_streamed_per_token"],
        "storage_bytes_per_token": (from_disk[-1] - from_disk[0]) / len(rounds),
        "host_peak_bytes": host.value,
        "host_buffers": stats["host_buffers"],
        "tokens": len(ids),
        "ids_sha256": hashlib.sha256(str(ids).encode()).hexdigest(),
        "logits_sha256": digest.hexdigest(),
    }


def storage_bytes() -> int:
    """Bytes that this process has had fetched from storage so far; 0 where the system does not count."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])
    return 0


def main(_: list[str]) -> None:
    if bool(_MODEL.value) == bool(_GEOMETRY.value):
        raise app.UsageError("expected one of --model and --geometry")
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    start = time.perf_counter()
    with packed_weights() as (name, packed):
        bench(name, packed, start)


def bench(name: str, packed: Packed, start: float) -> None:
    import jax
    from benchmarking import announce_result, bits, write_result
    from disk import cached_fraction, drop_page_cache, read_gb_per_s

    from vramjax.units import gib, parse_bytes

    layers = sorted(packed.path.glob("layer-*.safetensors"))
    device, host_budget = jax.devices()[0], parse_bytes(_HOST_BUDGET.value, name="host_budget")
    model_bytes = packed.head_nbytes + packed.config.num_layers * packed.layer_nbytes
    rate = read_gb_per_s(layers, num_threads=_THREADS.value)
    seconds = (_TOKENS.value + 2) * len(layers) * packed.layer_nbytes / rate / 1e9
    print(
        f"{name} on {device.device_kind}: {gib(model_bytes)}, ready after {time.perf_counter() - start:.0f} s; "
        f"disk {rate:.2f} GB/s with {_THREADS.value} threads; about {seconds + 30:.0f} s",
        flush=True,
    )
    drop_page_cache(layers)
    cached = cached_fraction(layers)
    if cached:
        print(f"note: {cached:.0%} of the files stay in memory: what is measured is not the disk alone")
    row = decode(packed, host="mapped", host_budget=host_budget, keep=_KEEP.value)
    assert row["arm"] == "mapped", row
    reference = decode(packed, keep=packed.config.num_layers)
    disk = max(rate, read_gb_per_s(layers, num_threads=_THREADS.value, repeats=1))
    for each in (row, reference):
        each["gb_per_s"] = each["bytes_per_token"] / each["ms_per_token"] / 1e6
        each["disk_frac"] = each["gb_per_s"] / disk
        each["ids_equal"] = each["ids_sha256"] == reference["ids_sha256"]
        each["logits_equal"] = each["logits_sha256"] == reference["logits_sha256"]
    row |= {"host_budget_bytes": host_budget, "model_bytes": model_bytes}
    row |= {"cached_frac_before": cached, "num_threads": _THREADS.value}
    print(
        f"mapped: {row['ms_per_token']:.0f} ms/token, {row['bytes_per_token'] / 1e6:.0f} MB/token, "
        f"{row['gb_per_s']:.2f} GB/s, {row['disk_frac']:.1%} of {disk:.2f} GB/s; host memory "
        f"{gib(row['host_peak_bytes'])} of {gib(host_budget)}; "
        f"{row['storage_bytes_per_token'] / row['bytes_per_token']:.0%} from storage; "
        f"bits {bits(row)}"
    )
    path = write_result(
        f"mapped-{name}",
        device,
        ceilings={"disk_read_gb_per_s": disk},
        metrics={
            "mapped_disk_frac": row["disk_frac"],
            "host_peak_over_budget": row["host_peak_bytes"] / host_budget,
            "model_over_host_budget": model_bytes / host_budget,
            "ids_equal": row["ids_equal"] and row["logits_equal"],
        },
        rows=[row, reference],
        out=_OUT.value,
    )
    announce_result(path, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    app.run(main)
