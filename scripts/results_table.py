"""A result file of a benchmark as a Markdown table: `python scripts/results_table.py FILE`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str]]


def table(result: dict[str, Any]) -> str:
    """The rows of one result, below a line that says what it was run on."""
    kind, _, name = result["benchmark"].partition("-")
    ceilings, rows = result["ceilings"], result["rows"]
    kinds = {"residency": _residency, "mapped": _mapped, "devices": _devices, "decode": _decode}
    kinds |= {"kernels": _kernels, "perplexity": _perplexity, "sweep": _sweep}
    if kind == "sweep":
        rows = _with_bits_together(rows)
    said, columns = kinds[kind](ceilings, rows)
    columns = {name: cell for name, cell in columns.items() if any(cell(row) != "-" for row in rows)}
    driver = f"driver {result['driver']}, " if result["driver"] else ""
    lines = [
        f"{name} on {result['device']} ({driver}jax {result['jax']}, {result['date'][:10]}); "
        f"{said}{_rounds(kind, rows)}:",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    lines += [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows]
    return "\n".join(lines)


def _residency(ceilings: dict[str, float], rows: list[Row]) -> tuple[str, Columns]:
    columns = {
        "window": lambda row: row["arm"],
        "ms/token": lambda row: _spread(row["ms_per_token_rounds"]),
        "uploads/token": lambda row: str(row["uploads_per_token"]),
        "MB/token": lambda row: f"{row['bytes_per_token'] / 1e6:.0f}",
        "GB/s (of link)": lambda row: _rate(row, row["link_frac"]),
        "entries": lambda row: str(row["entries"]),
        "peak layers": lambda row: str(row["peak_layers"]),
        "peak GiB": lambda row: _gib(row["allocator_peak_bytes"]),
        "bits": _bits,
    }
    if any(row.get("budget_bytes") for row in rows):
        columns["budget GiB"] = lambda row: _gib(row["budget_bytes"])
    return f"pinned copy {ceilings['pinned_copy_gb_per_s']:.1f} GB/s", columns


def _mapped(ceilings: dict[str, float], rows: list[Row]) -> tuple[str, Columns]:
    columns = {
        "layers wait": lambda row: "on disk" if row["arm"] == "mapped" else row["arm"],
        "ms/token": lambda row: f"{row['ms_per_token']:.0f}",
        "MB/token": lambda row: f"{row['bytes_per_token'] / 1e6:.0f}",
        "GB/s (of disk)": lambda row: _rate(row, row["disk_frac"]),
        "host peak GiB": lambda row: _gib(row["host_peak_bytes"]),
        "host budget GiB": lambda row: _gib(row.get("host_budget_bytes")),
        "model GiB": lambda row: _gib(row.get("model_bytes")),
        "bits": _bits,
    }
    return f"sequential read {ceilings['disk_read_gb_per_s']:.2f} GB/s", columns


def _devices(ceilings: dict[str, float], rows: list[Row]) -> tuple[str, Columns]:
    columns = {
        "on": lambda row: row["arm"],
        "ms/token": lambda row: _spread(row["ms_per_token_rounds"]),
        "speedup": lambda row: f"{rows[0]['ms_per_token'] / row['ms_per_token']:.2f}",
        "uploads/token": lambda row: str(row["uploads_per_token"]),
        "MB/token": lambda row: f"{row['bytes_per_token'] / 1e6:.0f}",
        "GB/s (of links)": lambda row: _rate(row, row["link_frac"]),
        "bits": _bits,
    }
    one, together = ceilings["pinned_copy_gb_per_s"], ceilings["pinned_copies_together_gb_per_s"]
    return f"pinned copy {one:.1f} GB/s, together {together:.1f} GB/s", columns


def _decode(ceilings: dict[str, float], rows: list[Row]) -> tuple[str, Columns]:
    def rate(row: Row) -> str:
        if "read_frac" in row:
            return f"{row['gb_per_s'] / 1e3:.2f} TB/s ({row['read_frac']:.0%})"
        return f"{row['tflop_per_s']:.0f} TFLOP/s ({row['matmul_frac']:.0%})"

    columns = {
        "what": lambda row: row["arm"],
        "ms": lambda row: _spread(row["ms_per_sweep_rounds"], digits=2),
        "tokens/s": lambda row: f"{row['tok_per_s']:.1f}",
        "rate (of ceiling)": rate,
        "ms in kernels": lambda row: _ms(row.get("kernels_ms")),
        "ms of the host": lambda row: _ms(row.get("dispatch_ms")),
    }
    return _read_and_products(ceilings), columns


def _kernels(ceilings: dict[str, float], rows: list[Row]) -> tuple[str, Columns]:
    def cell(row: Row, arm: str) -> str:
        if f"us_{arm}" not in row:
            return "-"
        of_reads, of_products = row[f"read_frac_{arm}"], row[f"matmul_frac_{arm}"]
        fraction = f"{of_reads:.0%}" if of_reads > of_products else f"{of_products:.0%} of products"
        return f"{row[f'us_{arm}']:.1f} us ({fraction})"

    def own(row: Row) -> str:
        return "attention" if row["kernel"] == "attention" else "q8"

    columns = {
        "kernel": lambda row: row["name"],
        "shape": lambda row: row["shape"],
        "MB": lambda row: f"{row['bytes'] / 1e6:.1f}",
        "in a program (of reads)": lambda row: cell(row, own(row)),
        "the kernel by itself": lambda row: cell(row, "kernel"),
        "through jax_triton": lambda row: cell(row, "jax_triton"),
        "with int8 activations": lambda row: cell(row, "int8"),
        "XLA": lambda row: cell(row, "xla"),
        "own program": lambda row: f"{row['us_alone']:.1f} us" if "us_alone" in row else "-",
        "error": lambda row: f"{row[f'error_{own(row)}']:.0e}" if f"error_{own(row)}" in row else "-",
    }
    return f"{_read_and_products(ceilings)}; shortest times", columns


def _sweep(ceilings: dict[str, float], rows: list[Row]) -> tuple[str, Columns]:
    def ms(row: Row) -> str:
        each = row.get("ms_per_sweep_rounds") or row.get("ms_per_draft_rounds")
        return _spread(each) if each else "-"

    def right(row: Row) -> str:
        if "drafts_by_depth" in row:
            row = {"num_drafts": sum(row["drafts_by_depth"]), "num_accepted_drafts": sum(row["accepted_by_depth"])}
        if row.get("num_drafts"):
            return f"{row['num_accepted_drafts'] / row['num_drafts']:.0%}"
        return f"{row['acceptance']:.0%}" if row.get("acceptance") is not None else "-"

    columns = {
        "what": lambda row: row["arm"],
        "ms/sweep": ms,
        "tokens/sweep": lambda row: f"{row['tokens_per_sweep']:.2f}" if "tokens_per_sweep" in row else "-",
        "tokens/s": lambda row: f"{row['tok_per_s']:.1f}" if "tok_per_s" in row else "-",
        "drafts right": right,
        "bits": lambda row: _bits(row) if "logits_equal" in row else "-",
    }
    return f"pinned copy {ceilings['pinned_copy_gb_per_s']:.1f} GB/s", columns


def _with_bits_together(rows: list[Row]) -> list[Row]:
    """Of the arms that compare bits, a row for each way to draft and each place where layers are."""
    rows, arms = [row for row in rows if "logits_equal" not in row], [row for row in rows if "logits_equal" in row]
    groups: dict[str, list[Row]] = {}
    for row in arms:
        where = "streamed" if row["uploads_per_sweep"] else "resident"
        groups.setdefault(f"{row['drafter']}, {where}", []).append(row)
    for name, group in sorted(groups.items()):
        batches, depths = ", ".join(str(row["batch"]) for row in group), {row["depth"] for row in group}
        depths = f", depths {', '.join(map(str, sorted(depths)))}" if depths != {0} else ""
        together = {
            "arm": f"bits: {name}, batches {batches}{depths}",
            "num_drafts": sum(row["num_drafts"] for row in group),
            "num_accepted_drafts": sum(row["num_accepted_drafts"] for row in group),
            "ids_equal": all(row["ids_equal"] for row in group),
            "logits_equal": all(row["logits_equal"] for row in group),
        }
        rows.append(together)
    return rows


def _perplexity(ceilings: dict[str, float], rows: list[Row]) -> tuple[str, Columns]:
    columns = {
        "computed by": lambda row: row["arm"],
        "perplexity": lambda row: f"{row['perplexity']:.4f}",
        "mean loss": lambda row: f"{row['mean_loss']:.6f}",
        "largest difference of a token's loss": lambda row: f"{row['largest_difference']:.1e}",
    }
    return "differences are from the first row", columns


def _read_and_products(ceilings: dict[str, float]) -> str:
    read, matmul = ceilings["device_read_gb_per_s"], ceilings["bf16_matmul_tflop_per_s"]
    return f"device read {read / 1e3:.2f} TB/s, bfloat16 products {matmul:.0f} TFLOP/s"


def _rounds(kind: str, rows: list[Row]) -> str:
    times = next((times for name, times in rows[0].items() if name.endswith("_rounds")), None)
    if times is None:
        return ""
    return (
        f"; mean of {len(times)} tokens"
        if kind == "mapped"
        else f"; median of {len(times)} rounds and half their range"
    )


def _rate(row: Row, fraction: float) -> str:
    return f"{row['gb_per_s']:.1f} ({fraction:.0%})" if row["bytes_per_token"] else "-"


def _gib(num_bytes: int | None) -> str:
    return f"{num_bytes / 2**30:.2f}" if num_bytes else "-"


def _bits(row: Row) -> str:
    return "same" if row["ids_equal"] and row["logits_equal"] else "DIFFER"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(times: list[float], *, digits: int = 1) -> str:
    """Median and half of what lies between the fastest and the slowest."""
    return f"{statistics.median(times):.{digits}f} ± {(max(times) - min(times)) / 2:.{digits}f}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
