"""The benchmark of decoding runs from end to end on a tiny model, and its parts say what is the case."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_benchmarks import NUM_LAYERS, SCRIPTS, result_of, run_script, script, tiny

from vramjax.checkpoint.packed import open_packed
from vramjax.checkpoint.random_weights import RandomWeights

__all__ = ["tiny"]  # a fixture


def test_decode(tiny: Path, tmp_path: Path) -> None:
    output = run_script(
        "bench_decode.py",
        f"--model={tiny}",
        *("--context=20", "--tokens=4", "--rounds=2", "--prefill_tokens=150"),
        f"--out={tmp_path}",
    )
    result = result_of(tmp_path, output)
    metrics, ceilings = result["metrics"], result["ceilings"]
    decode, one, every, sequence, prefill = result["rows"]
    arms = ["decode", "1 row of 8", "8 rows, 8 sequences", "8 rows, one sequence", "prefill 150"]
    assert [row["arm"] for row in result["rows"]] == arms
    assert [row["num_tokens"] for row in result["rows"]] == [1, 1, 8, 8, 150]
    assert result["benchmark"] == "decode-tiny" and decode["uploads_per_sweep"] == 0
    for key in ("ids_equal", "logits_equal", "logits_finite"):
        assert metrics[key] is True
    assert metrics["tokens_compared"] == 4

    packed = open_packed(tiny)
    weights = NUM_LAYERS * packed.layer_nbytes + 256 * 64 + 4 * 256 * 64 // 32  # and the output projection
    position = NUM_LAYERS * 2 * 2 * 32 * 4  # keys and values of one: 2 heads of 32 floats
    assert decode["bytes_per_sweep"] == weights + 22 * position
    assert one["bytes_per_sweep"] == sequence["bytes_per_sweep"] == weights + 20 * position
    assert every["bytes_per_sweep"] == weights + 8 * 20 * position
    layer = 64 * (128 + 2 * 64) + 128 * 64 + 64 * 320 + 160 * 64
    assert prefill["flops_per_sweep"] == 2 * NUM_LAYERS * layer * 150

    for row in result["rows"]:
        assert len(row["ms_per_sweep_rounds"]) == 2
        assert row["tok_per_s"] == pytest.approx(1e3 * row["num_tokens"] / row["ms_per_sweep"])
    rate = decode["bytes_per_sweep"] / decode["ms_per_sweep"] / 1e6
    assert metrics["resident_mbu"] == pytest.approx(rate / ceilings["device_read_gb_per_s"])
    rate = prefill["flops_per_sweep"] / prefill["ms_per_sweep"] / 1e9
    assert metrics["prefill_frac"] == pytest.approx(rate / ceilings["bf16_matmul_tflop_per_s"])
    assert metrics["tile_over_one_row"] == every["ms_per_sweep"] / one["ms_per_sweep"]
    assert 0 < metrics["resident_dispatch_ms"] == decode["dispatch_ms"]
    assert script("results_table").table(result).count("\n| ") == len(arms) + 1


def test_decode_that_streams(tiny: Path, tmp_path: Path) -> None:
    output = run_script(
        "bench_decode.py",
        f"--model={tiny}",
        *("--keep=2", "--context=5", "--tokens=3", "--rounds=1", "--prefill_tokens=9"),
        f"--out={tmp_path}",
    )
    result = result_of(tmp_path, output)
    assert result["benchmark"] == "decode-tiny-keep-2" and "resident_mbu" not in result["metrics"]
    assert result["rows"][0]["uploads_per_sweep"] == NUM_LAYERS and result["metrics"]["ids_equal"]


def test_what_is_no_number_of_layers_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_decode.py"), "--geometry=qwen3-8b", "--keep=most"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "keep is 'most'; expected a number" in done.stdout + done.stderr


def test_error_beside_the_reference() -> None:
    """Tokens after the first that differs come from other prompts, and are not compared."""
    reference_error = script("decode_subject").reference_error
    theirs = [np.array([3.0, 4.0]), np.array([0.0, 1.0]), np.array([1.0, 0.0])]
    ours = [np.array([3.0, 4.5]), np.array([0.0, 1.0]), np.array([1.0, 0.0])]
    assert reference_error(ours, theirs) == {
        "reference_error_max": 0.1,
        "reference_tokens_compared": 3,
        "reference_ids_equal": True,
    }
    ours[1] = np.array([1.0, 0.0])
    error = reference_error(ours, theirs)
    assert error["reference_tokens_compared"] == 2 and not error["reference_ids_equal"]
    assert error["reference_error_max"] == pytest.approx(math.sqrt(2))


def test_kernels_are_compared_with_the_reference(tiny: Path) -> None:
    """As on a GPU, where two backends run; here one interprets kernels."""
    config = dataclasses.replace(open_packed(tiny).config, num_layers=1)
    subject = script("decode_subject").Subject(
        RandomWeights(config, group=32), jax.devices()[0], keep=None, context=10, tokens=3
    )
    assert subject.compare_with_reference(1) == {}
    subject.decoder.spec = dataclasses.replace(subject.decoder.spec, backend="interpret", chunk_rows=16)
    compared = subject.compare_with_reference(1)
    assert 1e-7 < compared["reference_error_max"] < 1e-4
    assert compared["reference_tokens_compared"] == 1 and compared["reference_ids_equal"]


def test_a_token_is_drawn_from_every_row_of_a_tile(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the output projection would have less to do than where drafts are checked."""
    decode_subject, tiles = script("decode_subject"), []
    tile = decode_subject.Stepper.tile

    def noted(self: Any, rows: list[tuple[int, int, int, int]], **settings: Any) -> Any:
        tiles.append(rows)
        return tile(self, rows, **settings)

    monkeypatch.setattr(decode_subject.Stepper, "tile", noted)
    subject = decode_subject.Subject(open_packed(tiny), jax.devices()[0], keep=None, context=10, tokens=3)
    arms = subject.time_tiles(1, profile=False)
    decoded = [rows for rows in tiles if rows[0][1] >= 0]  # not of prompts
    assert {len(rows) for rows in decoded} == {arm["num_tokens"] for arm in arms} == {1, 8}
    assert all(draw == position + 1 for rows in decoded for _, position, _, draw in rows)


def test_kernels_of_a_trace() -> None:
    """Only the streams of the GPU that was asked for count: its other lines tell of the same time again.

    And of a kernel that was launched before the last one had ended, only what comes after that.
    """
    profiling = script("profiling")

    def name(kind: str, pid: int, tid: int, text: str) -> dict:
        return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": text}}

    def call(pid: int, tid: int, kernel: str, ts: float, us: float, module: str = "jit_layer_step") -> dict:
        return {"ph": "X", "name": kernel, "pid": pid, "tid": tid, "ts": ts, "dur": us, "args": {"hlo_module": module}}

    events = [
        *(name("process", 1, 0, "/device:GPU:0 (pid 1)"), name("thread", 1, 7, "Stream #14(Compute,MemcpyD2D)")),
        *(name("thread", 1, 8, "XLA Modules"), name("process", 2, 0, "/host:CPU"), name("thread", 2, 7, "Stream #1")),
        *(name("process", 3, 0, "/device:GPU:01"), name("thread", 3, 7, "Stream #14(Compute)")),
        *(call(1, 7, "q8", 100.0, 30.0), call(1, 7, "q8", 110.0, 54.0), call(1, 7, "add", 170.0, 2.0)),
        *(call(1, 7, "q8", 90.0, 5.0, "jit_token"), call(1, 8, "jit_layer_step", 100.0, 66.0)),
        *(call(2, 7, "q8", 0.0, 1000.0), call(3, 7, "q8", 0.0, 1000.0)),
    ]
    times = profiling.parse_trace(events, 0)
    rows = profiling.kernel_rows(times, 2)
    assert [(row["program"], row["kernel"], row["us_per_sweep"]) for row in rows] == [
        ("jit_layer_step", "q8", 32.0),
        ("jit_token", "q8", 2.5),
        ("jit_layer_step", "add", 1.0),
    ]
    assert rows[0]["calls_per_sweep"] == 1 and rows[0]["us_each"] == 32.0


def test_a_trace_of_a_cpu_has_no_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    import jax.numpy as jnp

    profiling = script("profiling")
    times = profiling.kernel_times(lambda: jnp.arange(4) + 1, next(iter(jnp.zeros(1).devices())))
    assert times == []
    profiling.print_kernels("decode", [])
    assert capsys.readouterr().out == "decode: no kernels in the trace\n"
