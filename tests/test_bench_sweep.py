"""The benchmark of sweeps runs from end to end on a tiny model, and says what is the case."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from absl import app
from test_benchmarks import NUM_LAYERS, SCRIPTS, result_of, run_script, script, tiny

from vramjax.checkpoint.packed import open_packed

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
    assert result["benchmark"] == "sweep-tiny" and result["ceilings"]["pinned_copy_gb_per_s"] > 0


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
    metrics = result["metrics"]
    for name, prefix in (("prompts", ""), ("prompts, draft model", "draft_")):
        rows = {kind: row for row in result["rows"] for arm, _, kind in [row["arm"].partition(": ")] if arm == name}
        assert list(rows) == ["chat", "code", "extract", "edit", "translate"]
        assert all(row["num_prompts"] == 1 and 0 < row["num_tokens"] <= 12 for row in rows.values())
        copying = (rows["extract"]["tokens_per_sweep"] + rows["edit"]["tokens_per_sweep"]) / 2
        assert metrics[f"{prefix}tokens_per_sweep_copy"] == pytest.approx(copying)
        assert metrics[f"{prefix}tokens_per_sweep_mean"] >= 1
    assert metrics["ids_equal"] is True


def test_a_drafter_that_is_right_as_often_as_it_is_told() -> None:
    told = script("sweep_subject").Told
    ids = list(range(1000))
    sometimes = told(ids, chance=0.7, vocab_size=1000).draft(1000)
    assert 0.65 < sum(a == b for a, b in zip(sometimes, ids, strict=True)) / 1000 < 0.75
    drafter = told(ids, chance=1.0, vocab_size=1000)
    drafter.append([0, 1])
    assert drafter.draft(3) == [2, 3, 4] and drafter.chances(2) == [1.0, 1.0]


def test_bits(tiny: Path, tmp_path: Path) -> None:
    output = run_script(
        "bench_sweep.py",
        f"--model={tiny}",
        *("--batches=", "--chances=", "--answer_tokens=16", "--draft_layers=11"),
        *("--bits_batches=1-3,9", "--bits_depths=0,3,15,7", "--bits_prompts=9", f"--out={tmp_path}"),
    )
    result = result_of(tmp_path, output)
    rows = result["rows"]
    assert [row["arm"] for row in rows] == [
        "bits: batch 1, no drafts, streamed",
        "bits: batch 2, depth 3, draft model, streamed",
        "bits: batch 3, depth 15, n-gram, resident",
        "bits: batch 9, depth 7, draft model, resident",
    ]
    assert [row["uploads_per_sweep"] for row in rows] == [12, 12, 0, 0]
    assert all(row["ids_equal"] and row["logits_equal"] and row["num_tokens"] == 9 * 16 for row in rows)
    for row in rows[1:]:
        assert 0 < row["num_accepted_drafts"] < row["num_drafts"]
    metrics = result["metrics"]
    assert metrics["bits_equal"] is metrics["ids_equal"] is True
    assert (metrics["bits_arms"], metrics["bits_arms_with_drafts"]) == (4, 3)
    assert metrics["bits_tokens_compared"] == 4 * 9 * 16
    table = script("results_table").table(result)
    assert table.count("| same |") == 4 and "bits: draft model, resident, batches 9, depths 7 |" in table
    rows[2]["logits_equal"] = False
    assert script("results_table").table(result).count("| DIFFER |") == 1


@pytest.fixture(scope="module")
def bit_arms(tiny: Path) -> Any:
    """A few random prompts, each answered by itself."""
    packed, device = open_packed(tiny), jax.devices()[0]
    decoding, prompts = script("decoding"), script("bits_arms").random_prompts(5, packed.config.vocab_size, longest=20)
    decoder = decoding.Decoder(packed, [device], prompt_tokens=1, max_tokens=1)
    store = decoding.pinned_store(packed, device)
    return script("sweep_bits").BitArms(decoder, store, prompts, tokens=12, keep=2, tells=True)


def one_arm(**changes: Any) -> Any:
    arm = {"batch": 3, "depth": 5, "drafter": "n-gram", "is_streamed": True, "ends_early": False} | changes
    return script("bits_arms").Arm(**arm)


@pytest.mark.parametrize("what", ["id", "logits", "length"])
def test_one_other_bit_of_one_token_is_seen(
    bit_arms: Any, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bit_arms.reference[4]
    ids, digests = list(right.ids), list(right.digests)
    if what == "id":
        ids[7] ^= 1
    elif what == "logits":
        digests[7] = bytes([digests[7][0] ^ 1]) + digests[7][1:]
    else:
        ids, digests = ids[:7], digests[:7]
    wrong = dataclasses.replace(right, ids=ids, digests=digests)
    monkeypatch.setattr(bit_arms, "reference", [*bit_arms.reference[:4], wrong])
    (row,) = bit_arms.run([one_arm()])
    assert row["ids_equal"] is (what == "logits") and row["logits_equal"] is (what == "id")
    assert not script("sweep_bits").bits_metrics([row])["bits_equal"]
    said = {
        "id": f"prompt 4, token 7: the id is {right.ids[7]}; by itself {right.ids[7] ^ 1}",
        "logits": "prompt 4, token 7: the logits differ",
        "length": "prompt 4 has 12 tokens; by itself 7",
    }
    assert capsys.readouterr().out == f"bits: batch 3, depth 5, n-gram, streamed: {said[what]}\n"


def test_a_decoder_that_takes_every_draft_is_found_out(bit_arms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramjax.decode.decoding.new_tokens", lambda drafts, ids: [*drafts, ids[-1]])
    (row,) = bit_arms.run([one_arm(is_streamed=False)])
    assert not row["ids_equal"] and not row["logits_equal"] and row["uploads_per_sweep"] == 0


def test_answers_that_end_early_end_where_they_should(bit_arms: Any) -> None:
    (row,) = bit_arms.run([one_arm(ends_early=True)])
    assert row["ids_equal"] and row["logits_equal"] and 5 <= row["num_tokens"] < 5 * 12


def test_what_is_not_streamed_is_not_said_to_be(bit_arms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_arms, "_keep", NUM_LAYERS)
    with pytest.raises(AssertionError, match="0 uploads per sweep with keep=12"):
        list(bit_arms.run([one_arm()]))


def test_arms_have_every_batch_and_depth_in_every_way() -> None:
    make_arms = script("bits_arms").make_arms
    arms = make_arms(range(1, 41), range(16), has_model=True)
    assert [arm.batch for arm in arms] == list(range(1, 41)) and {arm.depth for arm in arms} == set(range(16))
    for depth in range(16):
        own = [arm for arm in arms if arm.depth == depth]
        assert len({arm.is_streamed for arm in own}) == len({arm.ends_early for arm in own}) == 2
        assert {arm.drafter for arm in own} == ({"n-gram", "draft model"} if depth else {"no drafts"})
    assert len({(arm.drafter, arm.is_streamed, arm.ends_early) for arm in arms}) == 8 + 2  # two without drafts
    assert len(make_arms([1, 40], range(16), has_model=False)) == 16
    assert make_arms([], range(16), has_model=True) == []


def test_numbers_of_a_flag() -> None:
    numbers = script("bits_arms").numbers
    assert numbers("n", ["1-3", "8", "2"], least=1, most=8) == [1, 2, 3, 8, 2]
    for item in ("x", "0", "9", "3-1", "1-", "-1", "7-9"):
        with pytest.raises(app.UsageError, match=r"n has .*; expected numbers 1 \.\. 8, and ranges such as 1-8"):
            numbers("n", [item], least=1, most=8)


def test_first_layers_are_a_model(tiny: Path) -> None:
    packed = open_packed(tiny)
    first = script("first_layers").FirstLayers(packed, 3)
    assert first.config == dataclasses.replace(packed.config, num_layers=3)
    for own, whole in ((first.load_layer(2), packed.load_layer(2)), (first.load_head(), packed.load_head())):
        assert all((own[name] == whole[name]).all() for name in whole) and set(own) == set(whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft_layers=13"], "draft_layers is 13; expected 1 .. 12"),
        (
            ["--draft_layers=3", "--draft_model=demo"],
            "expected one of --draft_model, --draft_geometry and --draft_layers",
        ),
        (["--bits_batches=41"], "bits_batches has '41'; expected numbers 1 .. 40"),
        (["--bits_depths=16"], "bits_depths has '16'; expected numbers 0 .. 15"),
    ],
)
def test_flags_that_cannot_be_used(tiny: Path, flags: list[str], message: str) -> None:
    command = [sys.executable, str(SCRIPTS / "bench_sweep.py"), f"--model={tiny}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and message in " ".join((done.stderr + done.stdout).split())
