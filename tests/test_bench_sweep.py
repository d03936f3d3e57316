"""The benchmark of sweeps runs from end to end on a tiny model, and says what is the case."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_benchmarks import result_of, run_script, script, tiny

__all__ = ["tiny"]  # a fixture


def test_batches_and_drafts(tiny: Path, tmp_path: Path) -> None:
    output = run_script(
        "bench_sweep.py",
        f"--model={tiny}",
        *("--batches=1,3", "--chances=0,1", "--tokens=20", "--rounds=1", f"--draft_model={tiny}", f"--out={tmp_path}"),
    )
    result = result_of(tmp_path, output)
    one, three, wrong, right, *drafts = result["rows"]
    arms = ["batch 1", "batch 3", "drafts right 0%", "drafts right 100%", *(f"draft model, batch {n}" for n in (1, 3))]
    assert [row["arm"] for row in result["rows"]] == arms
    assert [row["tokens_per_sweep"] for row in result["rows"][:4]] == [1, 3, 1, 19 / 2]
    assert [row["depth"] for row in drafts] == [15, 15] and drafts[0]["ms_per_draft"] > 0
    assert right["accepted_by_depth"] == right["drafts_by_depth"] and sum(right["drafts_by_depth"]) == 17
    assert sum(wrong["accepted_by_depth"]) == 0 < sum(wrong["drafts_by_depth"])
    metrics = result["metrics"]
    assert metrics["ids_equal"] is True
    assert metrics["batch3_gain"] == pytest.approx(three["tok_per_s"] / one["tok_per_s"])
    assert metrics["spec_wall_over_sweeps"] > 0
    assert result["benchmark"] == f"sweep-tiny-draft-{tiny.name}" and result["ceilings"]["pinned_copy_gb_per_s"] > 0


def test_prompts(packed: Path, tmp_path: Path) -> None:
    """Figures of a model that drafts have names of their own."""
    output = run_script(
        "bench_sweep.py",
        f"--model={packed}",
        f"--draft_model={packed}",
        *("--batches=1", "--chances=1", "--tokens=8", "--rounds=1", "--prompts_per_kind=1", "--answer_tokens=12"),
        f"--out={tmp_path}",
    )
    result = result_of(tmp_path, output)
    rows = {kind: row for row in result["rows"] for name, _, kind in [row["arm"].partition(": ")] if name == "prompts"}
    assert list(rows) == ["chat", "code", "extract", "edit", "translate"]
    assert all(row["num_prompts"] == 1 and 0 < row["num_tokens"] <= 12 for row in rows.values())
    metrics = result["metrics"]
    copying = (rows["extract"]["tokens_per_sweep"] + rows["edit"]["tokens_per_sweep"]) / 2
    assert metrics["tokens_per_sweep_copy_draft_model"] == pytest.approx(copying) and metrics["ids_equal"] is True
    assert not {"tokens_per_sweep_mean", "tokens_per_sweep_copy"} & metrics.keys()


def test_a_drafter_that_is_right_as_often_as_it_is_told() -> None:
    told = script("sweep_subject").Told
    ids = list(range(1000))
    sometimes = told(ids, chance=0.7, vocab_size=1000).draft(1000)
    assert 0.65 < sum(a == b for a, b in zip(sometimes, ids, strict=True)) / 1000 < 0.75
    drafter = told(ids, chance=1.0, vocab_size=1000)
    drafter.append([0, 1])
    assert drafter.draft(3) == [2, 3, 4] and drafter.chances(2) == [1.0, 1.0]
