"""A result file of a benchmark as a Markdown table: `python scripts/results_table.py FILE`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

COLUMNS = (
    "window",
    "ms/token",
    "uploads/token",
    "MB/token",
    "GB/s (of link)",
    "entries",
    "peak layers",
    "peak GiB",
    "bits",
)


def table(result: dict[str, Any]) -> str:
    """The rows of one result, below a line that says what it was run on."""
    link = result["ceilings"]["pinned_copy_gb_per_s"]
    rounds = len(result["rows"][0]["ms_per_token_rounds"])
    lines = [
        f"{result['benchmark'].removeprefix('residency-')} on {result['device']} (driver {result['driver']}, jax "
        f"{result['jax']}, {result['date'][:10]}); pinned copy {link:.1f} GB/s; median of {rounds} "
        "rounds and half their range:",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in result["rows"]]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    streamed = row["bytes_per_token"] > 0
    return (
        row["arm"],
        _spread(row["ms_per_token_rounds"]),
        str(row["uploads_per_token"]),
        f"{row['bytes_per_token'] / 1e6:.0f}",
        f"{row['gb_per_s']:.1f} ({row['link_frac']:.0%})" if streamed else "-",
        str(row["entries"]),
        str(row["peak_layers"]),
        f"{row['allocator_peak_bytes'] / 2**30:.2f}" if row["allocator_peak_bytes"] else "-",
        "same" if row["ids_equal"] and row["logits_equal"] else "DIFFER",
    )


def _spread(times: list[float]) -> str:
    """Median and half of what lies between the fastest and the slowest round."""
    return f"{statistics.median(times):.1f} ± {(max(times) - min(times)) / 2:.1f}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
