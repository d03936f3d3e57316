"""The benchmarks run from end to end, on a tiny model, and their result files say what happened."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vramjax.checkpoint.packed import open_packed
from vramjax.checkpoint.random_weights import GEOMETRIES, RandomWeights
from vramjax.residency.policy import window

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NUM_LAYERS = 12  # so many that a ring of two layers streams them all
FORM = {
    *("schema", "benchmark", "date", "command", "commit", "device", "driver", "jax", "python"),
    *("ceilings", "metrics", "rows"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed directory of random weights, as the benchmark of what is on disk writes it."""
    config = dataclasses.replace(
        GEOMETRIES["qwen3-8b"],
        num_layers=NUM_LAYERS,
        hidden_size=64,
        intermediate_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=256,
        max_positions=512,
    )
    path = tmp_path_factory.mktemp("packed") / "tiny"
    write_random_packed = script("random_packed").write_random_packed
    write_random_packed(RandomWeights(config, group=32), path, num_threads=2)
    return path


def script(name: str) -> Any:
    """A module of scripts/, whose modules import each other by name, as Python lets them when one is run."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)


def run_script(name: str, *args: str, num_devices: int = 1) -> str:
    """What a script prints."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *args], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def result_of(directory: Path, output: str) -> dict[str, Any]:
    """The one result file in `directory`, which is in the agreed form and whose headlines are the last line."""
    (path,) = directory.glob("*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert set(result) == FORM and result["schema"] == 1
    assert path.name.startswith(f"{result['benchmark']}-20")
    assert json.loads(output.splitlines()[-1]) == {key: value for key, value in result.items() if key != "rows"}
    return result


def test_random_weights_are_a_packed_directory(tiny: Path) -> None:
    packed = open_packed(tiny)
    assert packed.config.num_layers == NUM_LAYERS
    first, second = packed.load_layer(0), packed.load_layer(1)
    assert (first["qkv"] != second["qkv"]).any() and set(packed.load_head()) >= {"embed", "head", "final_norm"}


def test_residency(tiny: Path, tmp_path: Path) -> None:
    lists = (
        "--keep=off,11,4",
        "--both_sides=1,2",
        "--pinned_ring=1",
        "--budgets=50,84",
        "--device_budgets=smallest",
        "--free=1",
    )
    output = run_script(
        "bench_residency.py",
        f"--model={tiny}",
        *lists,
        *("--check_tokens=6", "--tokens=4", "--rounds=2", "--prompt_tokens=5"),
        f"--out={tmp_path}",
    )
    result = result_of(tmp_path, output)
    rows = {row["arm"]: row for row in result["rows"]}
    uploads = {arm: row["uploads_per_token"] for arm, row in rows.items()}
    smallest = next(arm for arm in rows if arm.endswith(" GiB"))
    assert uploads == {
        "resident": 0,
        "past 11": 1,
        "past 4": 8,
        "past 1": 11,
        "pinned_ring 1": 12,
        "both_sides 1": 12,
        "both_sides 2": 12,
        "pinned_ring 2": 12,
        "pinned_ring 2, separate copies": 12,
        "pinned_ring 2, new memory": 12,
        "pinned_ring 6, 50 % of weights": window(12, 6).uploads_per_sweep,
        "past 3, 50 % of weights": 9,
        "pinned_ring 10, 84 % of weights": window(12, 10).uploads_per_sweep,
        "past 5, 84 % of weights": 7,
        smallest: 12,
        "past 1, platform allocator": 11,
        "past 1, really freed, platform allocator": 11,
    }
    layer_bytes, link = open_packed(tiny).layer_nbytes, result["ceilings"]["pinned_copy_gb_per_s"] * 1e6
    for row in rows.values():
        assert row["bytes_per_token"] == row["uploads_per_token"] * layer_bytes
        assert row["ids_equal"] and row["logits_equal"] and row["tokens"] == 6
        assert len(row["ms_per_token_rounds"]) == 2
        assert row["ms_per_token"] == pytest.approx(row["ms_over_link"] + row["bytes_per_token"] / link)
        assert row["peak_layers"] * layer_bytes <= (row["budget_bytes"] or row["planned_bytes"])
    assert rows[smallest]["budget_bytes"] == rows["pinned_ring 1"]["planned_bytes"]
    assert rows["past 3, 50 % of weights"]["peak_layers"] == rows["pinned_ring 6, 50 % of weights"]["peak_layers"] == 6
    metrics = result["metrics"]
    assert metrics["ids_equal"] and metrics["tokens_compared"] == 6
    assert metrics["past_over_ring_84_predicted"] == 7 / uploads["pinned_ring 10, 84 % of weights"]
    all_streamed = rows["pinned_ring 2"]
    fraction = all_streamed["bytes_per_token"] / link / all_streamed["ms_per_token"]
    assert metrics["stream_link_frac"] == pytest.approx(fraction)
    assert metrics["budget_ratio_50"] == pytest.approx(1 / rows["pinned_ring 6, 50 % of weights"]["link_frac"])
    freed, pooled = rows["past 1, really freed, platform allocator"], rows["past 1, platform allocator"]
    assert metrics["free_over_pool_same_allocator"] == freed["ms_per_token"] / pooled["ms_per_token"]
    assert metrics["free_over_pool"] == freed["ms_per_token"] / rows["past 1"]["ms_per_token"]
    assert len(re.findall(r"\bsame\b", output)) == len(rows) and "DIFFER" not in output
    assert script("results_table").table(result).count("| same |") == len(rows)


def test_one_other_bit_is_seen() -> None:
    """Digests are of all logits up to a token, so that a run of fewer tokens is compared as far as it goes."""
    report = script("residency_report")
    reference = SimpleNamespace(token_ids=[5, 6, 7], digests=["a", "b", "c"])
    for token_ids, digest, ids_equal, logits_equal in (
        ([5, 6, 7], "c", True, True),
        ([5, 6], "b", True, True),
        ([5, 6], "c", True, False),
        ([5, 7], "b", False, True),
    ):
        row = {"tokens": len(token_ids), "logits_sha256": digest, "ms_per_token": 4.0, "bytes_per_token": 6_000_000}
        (row,) = report.completed([(row, token_ids)], reference, link_gb_per_s=2)
        assert (row["ids_equal"], row["logits_equal"]) == (ids_equal, logits_equal)
        assert (row["gb_per_s"], row["link_frac"], row["ms_over_link"]) == (1.5, 0.75, 1)


def test_mapped(tiny: Path, tmp_path: Path) -> None:
    output = run_script(
        "bench_mapped.py",
        f"--model={tiny}",
        *("--host_budget=4GiB", "--tokens=5", "--prompt_tokens=5", "--threads=2"),
        f"--out={tmp_path}",
    )
    result = result_of(tmp_path, output)
    mapped, resident = result["rows"]
    assert (mapped["arm"], resident["arm"]) == ("mapped", "resident")
    assert (mapped["uploads_per_token"], resident["uploads_per_token"]) == (NUM_LAYERS, 0)
    assert mapped["bytes_per_token"] == NUM_LAYERS * open_packed(tiny).layer_nbytes
    assert 0 < mapped["host_peak_bytes"] <= mapped["host_budget_bytes"] == 4 << 30
    assert mapped["cached_frac_before"] in (None, 0.0)
    assert len(mapped["ms_per_token_rounds"]) == 4
    fraction = mapped["gb_per_s"] / result["ceilings"]["disk_read_gb_per_s"]
    assert result["metrics"]["mapped_disk_frac"] == fraction and result["metrics"]["ids_equal"]
    assert script("results_table").table(result).count("| same |") == 2


def test_devices(tiny: Path, tmp_path: Path) -> None:
    output = run_script(
        "bench_devices.py",
        f"--model={tiny}",
        *("--devices=1,0", "--check_tokens=5", "--tokens=4", "--rounds=2", "--prompt_tokens=5", "--keep=1"),
        f"--out={tmp_path}",
        num_devices=2,
    )
    result = result_of(tmp_path, output)
    one, two, separate = rows = result["rows"]
    assert [row["num_devices"] for row in rows] == [1, 2, 2]
    assert [row["copies"] for row in rows] == ["fused", "turns", "separate"]
    assert {row["uploads_per_token"] for row in rows} == {NUM_LAYERS}
    assert all(row["ids_equal"] and row["logits_equal"] for row in rows) and result["metrics"]["ids_equal"]
    assert result["metrics"]["two_gpu_speedup"] == one["ms_per_token"] / two["ms_per_token"]
    assert result["metrics"]["two_gpu_speedup_separate"] == one["ms_per_token"] / separate["ms_per_token"]
    assert script("results_table").table(result).count("| same |") == 3


def test_what_is_run_must_be_said() -> None:
    for args in ((), ("--geometry=qwen3-8b", "--model=demo"), ("--geometry=no-such-model",)):
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "bench_residency.py"), *args], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0 and "expected one of" in done.stderr + done.stdout
