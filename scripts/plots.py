"""A result file of bench_residency.py as a plot beside it: `python scripts/plots.py FILE`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from vramjax.residency.policy import window

_MARKERS = {"past": "o", "pinned_ring": "^", "resident": "s", "both_sides": "x"}
_COLORS = {"past": "tab:blue", "pinned_ring": "tab:green", "resident": "black", "both_sides": "tab:red"}


def draw(path: Path) -> None:
    """ms per token against device memory at the peak: every arm, and the time that the link alone needs.

    Does nothing but say so where there is no matplotlib.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        print(f"no plot: there is no matplotlib here; where there is: python scripts/plots.py {path}", file=sys.stderr)
        return
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = result["rows"]
    figure, axes = plt.subplots(figsize=(8, 5))
    for policy, (x, y) in link_floors(result).items():
        axes.plot(x, y, "--", color=_COLORS[policy], linewidth=1, label=f"link alone, {policy}")
    for policy, marker in _MARKERS.items():
        points = [row for row in rows if row["policy"] == policy and _is_usual(row)]
        x, y = [_peak_gib(row) for row in points], [row["ms_per_token"] for row in points]
        label = f"{policy} (trap: layers ahead go too)" if policy == "both_sides" else policy
        axes.plot(x, y, marker, color=_COLORS[policy], linestyle="none", label=label)
        for row, at in zip(points, x, strict=True):
            if policy != "resident":
                axes.annotate(
                    str(row["keep"]), (at, row["ms_per_token"]), xytext=(4, 4), textcoords="offset points", fontsize=8
                )
    for copies, allocator, marker, label in (
        ("separate", "default", "v", "separate copies"),
        ("eager", "default", "D", "new memory for each layer: no bound"),
        ("fused", "platform", "P", "freeing allocator, pool"),
        ("eager", "platform", "*", "freeing allocator, really freed (trap)"),
    ):
        points = [row for row in rows if (row["copies"], row["allocator"]) == (copies, allocator)]
        x, y = [_peak_gib(row) for row in points], [row["ms_per_token"] for row in points]
        if points:
            axes.plot(x, y, marker, linestyle="none", markerfacecolor="none", color="tab:orange", label=label)
    axes.set_xlabel("device memory at the peak (GiB): the allocator's, or else planned")
    axes.set_ylabel("ms per token")
    link = result["ceilings"]["pinned_copy_gb_per_s"]
    name = result["benchmark"].removeprefix("residency-")
    axes.set_title(f"{name} on {result['device']}, link {link:.1f} GB/s; numbers are keep", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path.parent / f"{result['benchmark']}.png", dpi=150)
    plt.close(figure)


def link_floors(result: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Policy -> (GiB, ms per token): what the link alone needs for the uploads of a window, at its planned peak."""
    row = result["rows"][0]
    num_layers, layer_bytes = row["num_layers"], row["layer_bytes"]
    # What is beside the layers is the same for all: the median of measured peaks less their layers.
    usual = [r for r in result["rows"] if _is_usual(r)]
    beside = statistics.median(_peak_gib(r) * 2**30 - r["peak_layer_bytes"] for r in usual)
    ms_per_layer = layer_bytes / result["ceilings"]["pinned_copy_gb_per_s"] / 1e6
    floors = {}
    for policy in ("past", "pinned_ring"):
        schedules = [window(num_layers, keep, policy) for keep in range(1, num_layers)]
        gib = [(beside + schedule.peak_resident_layers * layer_bytes) / 2**30 for schedule in schedules]
        floors[policy] = (gib, [schedule.uploads_per_sweep * ms_per_layer for schedule in schedules])
    return floors


def _is_usual(row: dict[str, Any]) -> bool:
    return row["copies"] == "fused" and row["allocator"] == "default"


def _peak_gib(row: dict[str, Any]) -> float:
    return (row["allocator_peak_bytes"] or row["planned_bytes"]) / 2**30


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
