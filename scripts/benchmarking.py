"""What the benchmarks share: opening what is run, the one form of result files, and how a spread is said.

Imports JAX only when a result is written, so that flags that cannot be used are refused at once.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from absl import app

if TYPE_CHECKING:
    import jax

    from vramjax.checkpoint.packed import Packed
    from vramjax.checkpoint.random_weights import RandomWeights

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def open_weights(model: str, geometry: str) -> tuple[str, Packed | RandomWeights]:
    """Weights by the flags that say what is run, exactly one of which is not empty; and a name for them."""
    if bool(model) == bool(geometry):
        raise app.UsageError("expected one of --model and --geometry")
    if model:
        from vramjax.checkpoint.resolve import open_model

        return Path(model).name, open_model(model)
    from vramjax.checkpoint.random_weights import GEOMETRIES, RandomWeights

    if geometry not in GEOMETRIES:
        raise app.UsageError(f"geometry is {geometry!r}; expected one of {', '.join(GEOMETRIES)}")
    return geometry, RandomWeights(GEOMETRIES[geometry])


def size_suffix(name: str) -> str:
    """What ends the names of figures of a model of this name."""
    return {"qwen3-vl-2b": "_2b", "qwen3-8b": "_8b", "qwen3-32b": "_32b"}.get(name, "")


def spread(values: Sequence[float]) -> str:
    """Median, and how far the values lie apart, in percent of it."""
    median = statistics.median(values)
    return f"{median:.2f} (+-{(max(values) - min(values)) / 2 / median * 100:.1f} %)"


def bits(row: Mapping[str, Any]) -> str:
    """Whether what was decoded is, bit for bit, what the reference decoded."""
    return "same" if row["ids_equal"] and row["logits_equal"] else "DIFFER"


class HighestSeen:
    """The largest value of `read` while a `with` block runs, looked at several times a millisecond, by a thread.

    What lies between two looks is missed.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.value = 0

    def _look(self) -> None:
        while not self._stop.wait(2e-4):
            self.value = max(self.value, self._read())

    def __enter__(self) -> Self:
        self.value = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.value = max(self.value, self._read())


def write_result(
    benchmark: str,
    device: jax.Device,
    *,
    ceilings: Mapping[str, float],
    metrics: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    out: str | None,
) -> Path:
    """Writes one result file and returns its path.

    It goes into the directory `out`, or else into that of results of this kind of device, which is made if need be.
    """
    import jax

    now = datetime.datetime.now(datetime.UTC)
    result = {
        "schema": 1,
        "benchmark": benchmark,
        "date": now.isoformat(timespec="seconds"),
        # But for where the file goes, which is a matter of one machine.
        "command": " ".join(["python", *(each for each in sys.argv if not each.startswith("--out="))]),
        # A copy of the tree without its history, or with an older one, is told its commit.
        "commit": os.environ.get("GIT_COMMIT") or _output("git", "-C", str(RESULTS.parent.parent), "rev-parse", "HEAD"),
        "device": device.device_kind,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "ceilings": dict(ceilings),
        "metrics": dict(metrics),
        "rows": list(rows),
    }
    directory = Path(out) if out else RESULTS / device.device_kind.lower().replace(" ", "-")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{benchmark}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def announce_result(path: Path, *, seconds: float) -> None:
    """Prints where a result file is, and, as the last line of a benchmark, what it says without its rows."""
    print(f"{path}, after {seconds:.0f} s")
    result = json.loads(path.read_text(encoding="utf-8"))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return (done.stdout.splitlines() or [None])[0]
