"""What the residency benchmark says: its table as text, and its headlines. Knows rows, not how they came about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarking import bits, size_suffix, spread

if TYPE_CHECKING:
    from decoding import Run

Row = dict[str, Any]


def completed(results: Iterable[tuple[Row, list[int]]], reference: Run, *, link_gb_per_s: float) -> list[Row]:
    """Rows, each given with its token ids, with what they come to beside the link and beside the bits of `reference`.

    A row of fewer tokens than the reference is compared as far as it goes.
    """
    rows = []
    for row, token_ids in results:
        streamed_ms = row["bytes_per_token"] / link_gb_per_s / 1e6
        row |= {
            "gb_per_s": row["bytes_per_token"] / row["ms_per_token"] / 1e6,
            "link_frac": streamed_ms / row["ms_per_token"],
            "ms_over_link": row["ms_per_token"] - streamed_ms,
            "ids_equal": token_ids == reference.token_ids[: row["tokens"]],
            "logits_equal": row["logits_sha256"] == reference.digests[row["tokens"] - 1],
        }
        rows.append(row)
    return rows


def print_table(rows: Sequence[Row]) -> None:
    """One line for each arm."""
    header = f"{'arm':<40}{'ms/token':>18}{'over link':>10}{'uploads':>9}{'MB/token':>10}{'GB/s':>7}{'link':>6}"
    print(f"{header}{'entries':>9}{'peak layers':>13}{'peak GiB':>10}{'of budget':>11}{'bits':>8}{'tokens':>8}")
    for row in rows:
        peak, fraction = row["allocator_peak_bytes"], peak_over_budget(row)
        print(
            f"{row['arm']:<40}{spread(row['ms_per_token_rounds']):>18}{row['ms_over_link']:>10.2f}"
            f"{row['uploads_per_token']:>9}{row['bytes_per_token'] / 1e6:>10.0f}{row['gb_per_s']:>7.1f}"
            f"{row['link_frac']:>6.0%}{row['entries']:>9}{row['peak_layers']:>13}"
            f"{'-' if peak is None else f'{peak / 2**30:.2f}':>10}{'-' if fraction is None else f'{fraction:.1%}':>11}"
            f"{bits(row):>8}{row['tokens']:>8}"
        )


def peak_over_budget(row: Row) -> float | None:
    """The allocator's peak over what the arm may take: its budget, or what is planned for its window."""
    peak = row["allocator_peak_bytes"]
    return None if peak is None else peak / (row["budget_bytes"] or row["planned_bytes"])


def metrics_of(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The headlines of one run: shares of the link, time against the link's for budgets, peaks, traps."""
    metrics: dict[str, Any] = {
        "ids_equal": all(row["ids_equal"] and row["logits_equal"] for row in rows),
        "tokens_compared": min(row["tokens"] for row in rows),
    }
    return metrics | _streaming(size_suffix(name), rows) | _peaks(rows) | _traps(rows)


def _streaming(size: str, rows: Sequence[Row]) -> dict[str, float]:
    headlines = {}
    for row in rows:
        is_all_streamed = row["uploads_per_token"] == row["num_layers"] and row["allocator"] == "default"
        if is_all_streamed and row["policy"] == "pinned_ring" and row["keep"] == 2 and not row["budget_bytes"]:
            way = "" if row["copies"] == "fused" else f"_{row['copies']}"
            headlines[f"stream_link_frac{size}{way}"] = row["link_frac"]
    for ring in rows:
        share = ring["share"]
        if ring["policy"] == "pinned_ring" and share:
            headlines[f"budget_ratio{size}_{share}"] = 1 / ring["link_frac"]
            for past in rows:
                if past["policy"] == "past" and past["share"] == share:
                    headlines[f"past_over_ring_{share}"] = past["ms_per_token"] / ring["ms_per_token"]
                    predicted = past["uploads_per_token"] / ring["uploads_per_token"]
                    headlines[f"past_over_ring_{share}_predicted"] = predicted
    return headlines


def _peaks(rows: Sequence[Row]) -> dict[str, float]:
    """Arms with new memory for each layer are apart: their memory has no bound, which is what they show."""
    bounded = [(row["copies"] != "eager", peak_over_budget(row)) for row in rows]
    headlines = {}
    for name, wanted in (("peak_over_budget_max", True), ("eager_peak_over_planned", False)):
        fractions = [fraction for is_bounded, fraction in bounded if is_bounded is wanted and fraction is not None]
        if fractions:
            headlines[name] = max(fractions)
    return headlines


def _traps(rows: Sequence[Row]) -> dict[str, float]:
    """Time with both-sides windows of any size, and real frees against the pool.

    The second figure of the latter has the pool under the same, freeing, allocator, which also frees what XLA needs
    for a moment, and so costs much whatever becomes of the layers.
    """
    headlines = {}
    both_sides = [row["ms_per_token"] for row in rows if row["policy"] == "both_sides"]
    if both_sides:
        headlines["both_sides_slowest_over_fastest"] = max(both_sides) / min(both_sides)
    by_arm = {(row["policy"], row["keep"], row["copies"], row["allocator"]): row["ms_per_token"] for row in rows}
    for (policy, keep, copies, allocator), freed in by_arm.items():
        pooled, pooled_alike = (by_arm.get((policy, keep, "fused", a)) for a in ("default", allocator))
        if copies == "eager" and allocator == "platform" and pooled and pooled_alike:
            headlines |= {"free_over_pool": freed / pooled, "free_over_pool_same_allocator": freed / pooled_alike}
    return headlines
