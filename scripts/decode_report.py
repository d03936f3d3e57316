"""What the decode benchmark says: its rates beside the ceilings, its lines of text, and its headlines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarking import size_suffix, spread
from profiling import print_kernels

Row = dict[str, Any]


def with_rates(rows: Sequence[Row], ceilings: Mapping[str, float]) -> list[Row]:
    """The rows with tokens per second and the part of a ceiling that they reach: of reads, or of products."""
    done = []
    for row in rows:
        seconds = row["ms_per_sweep"] / 1e3
        rates: Row = {"tok_per_s": row["num_tokens"] / seconds}
        if "bytes_per_sweep" in row:
            rates["gb_per_s"] = row["bytes_per_sweep"] / seconds / 1e9
            rates["read_frac"] = rates["gb_per_s"] / ceilings["device_read_gb_per_s"]
        else:
            rates["tflop_per_s"] = row["flops_per_sweep"] / seconds / 1e12
            rates["matmul_frac"] = rates["tflop_per_s"] / ceilings["bf16_matmul_tflop_per_s"]
        done.append(row | rates)
    return done


def print_rows(rows: Sequence[Row]) -> None:
    """One line for each row, then the kernels of each that was profiled."""
    rates = f"{'tokens/s':>10}{'GB/s':>8}{'TFLOP/s':>9}{'of ceiling':>12}"
    print(f"{'':<26}{'ms':>18}{rates}{'host ms':>9}{'kernels ms':>12}")
    for row in rows:
        host, kernels = row.get("dispatch_ms"), row.get("kernels_ms")
        print(
            f"{row['arm']:<26}{spread(row['ms_per_sweep_rounds']):>18}{row['tok_per_s']:>10.1f}"
            f"{_number(row.get('gb_per_s'), 0):>8}{_number(row.get('tflop_per_s'), 1):>9}{ceiling_frac(row):>12.1%}"
            f"{_number(host, 2):>9}{_number(kernels, 2):>12}"
        )
    for row in rows:
        if "kernels" in row:
            print_kernels(row["arm"], row["kernels"])


def ceiling_frac(row: Row) -> float:
    """The part of the ceiling that belongs to a row."""
    return row["read_frac"] if "read_frac" in row else row["matmul_frac"]


def metrics_of(name: str, rows: Sequence[Row], checked: Row, *, is_resident: bool) -> Row:
    """The headlines of one run."""
    size = size_suffix(name)
    where = "resident" if is_resident else "streamed"
    decode, one, every, *_, prefill = rows
    metrics = {
        f"{where}_mbu{size}": decode["read_frac"],
        f"{where}_tok_per_s{size}": decode["tok_per_s"],
        f"{where}_dispatch_ms{size}": decode["dispatch_ms"],
        f"tile_over_one_row{size}": every["ms_per_sweep"] / one["ms_per_sweep"],
        f"prefill_frac{size}": prefill["matmul_frac"],
        f"prefill_tok_per_s{size}": prefill["tok_per_s"],
    }
    if every.get("kernels_ms") and one.get("kernels_ms"):
        metrics[f"tile_over_one_row_kernels{size}"] = every["kernels_ms"] / one["kernels_ms"]
    return metrics | checked | {"ids_equal": checked["ids_equal"] and checked["logits_equal"]}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
