"""What the kernel benchmark says: rates beside the ceilings, a line for each case as it is done, and headlines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def with_rates(row: Row, ceilings: Mapping[str, float]) -> Row:
    """The row with bytes and FLOPs per second of each of its arms, and the parts of the ceilings that these are."""
    rates: Row = {}
    for key, us in row.items():
        arm = key.removeprefix("us_")
        if key.startswith("us_"):
            rates[f"gb_per_s_{arm}"] = row["bytes"] / us / 1e3
            rates[f"read_frac_{arm}"] = rates[f"gb_per_s_{arm}"] / ceilings["device_read_gb_per_s"]
            rates[f"tflop_per_s_{arm}"] = row["flops"] / us / 1e6
            rates[f"matmul_frac_{arm}"] = rates[f"tflop_per_s_{arm}"] / ceilings["bf16_matmul_tflop_per_s"]
    return row | rates


def line(row: Row) -> str:
    """One case."""
    shape = f"{row['name']:<24}{row['shape']:<28}{row['bytes'] / 1e6:>8.1f} MB"
    arms = [key.removeprefix("us_") for key in row if key.startswith("us_")]
    parts = [f"{arm} {row[f'us_{arm}']:.1f} us {_fraction(row, arm)}{_error(row, arm)}" for arm in arms]
    parts += [f"{key.removeprefix('failed_')}: {text}" for key, text in row.items() if key.startswith("failed_")]
    return f"{shape}  {'; '.join(parts)}"


def metrics_of(rows: Sequence[Row]) -> Row:
    """The headlines: the kernel of one large product, attention over a long context, and others' times beside ours."""
    metrics: Row = {}
    for row in rows:
        if row["kernel"] == "q8_matmul" and (row["k"], row["n"], row["rows"]) == (4096, 24576, 16):
            for arm, name in (("kernel", "q8_matmul_frac_4096x24576"), ("q8", "q8_matmul_whole_frac_4096x24576")):
                if f"read_frac_{arm}" in row:
                    metrics[name] = row[f"read_frac_{arm}"]
        if row["kernel"] == "attention" and row["context"] == 32768 and "qwen3-8b" in row["name"]:
            metrics[f"attention_frac_32k{'' if row['rows'] == 1 else '_tile'}"] = row["read_frac_attention"]
    for row in rows:
        if "us_q8" in row and "us_xla" in row:
            name = f"q8_over_xla_max_{row['rows']}_rows"
            metrics[name] = max(metrics.get(name, 0.0), row["us_q8"] / row["us_xla"])
    if both := [row["us_jax_triton"] / row["us_kernel"] for row in rows if {"us_jax_triton", "us_kernel"} <= set(row)]:
        metrics["jax_triton_over_pallas_median"] = statistics.median(both)
        metrics["jax_triton_over_pallas_range"] = [min(both), max(both)]
    for kernel, arm in (("q8_matmul", "q8"), ("attention", "attention")):
        errors = [row[f"error_{arm}"] for row in rows if row["kernel"] == kernel and f"error_{arm}" in row]
        if errors:
            metrics[f"{kernel}_error_max"] = max(errors)
    return metrics


def _fraction(row: Row, arm: str) -> str:
    if row["kernel"] == "q8_matmul" and row["rows"] > 16:
        return f"({row[f'tflop_per_s_{arm}']:.0f} TFLOP/s, {row[f'matmul_frac_{arm}']:.0%})"
    return f"({row[f'gb_per_s_{arm}'] / 1e3:.2f} TB/s, {row[f'read_frac_{arm}']:.0%})"


def _error(row: Row, arm: str) -> str:
    error = row.get(f"error_{arm}")
    return "" if error is None else f" error {error:.0e}"
