"""The tuner of the Q8 product: what it tries and chooses, and that what it times has the settings that it tries."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from cuda_lowering import lower_for_cuda, needs_cuda_lowering
from test_benchmarks import SCRIPTS, script

from pallas_kernels import q8_partial_sums, tuning
from pallas_kernels.tuning import DEFAULT_FEW, DEFAULT_MANY, Q8Config
from vramjax.checkpoint.packed import group_names
from vramjax.checkpoint.random_weights import GEOMETRIES
from vramjax.config import ModelConfig
from vramjax.decode.spec import EngineSpec
from vramjax.layout import MatrixSpec
from vramjax.planning import LONG_BLOCKS, engine_spec

CONFIG = dataclasses.replace(
    GEOMETRIES["qwen3-8b"],
    num_layers=2,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=256,
    max_positions=1024,
)
MATRIX = MatrixSpec(n=4096, k=4096, group=128)


def spec_of(config: ModelConfig) -> EngineSpec:
    return engine_spec(config, dict.fromkeys(group_names(config), 128), context=None, device=jax.devices()[0])


def shape_of(name: str, num_rows: int, matrix: MatrixSpec = MATRIX) -> Any:
    return script("autotune").Shape(model="m", name=name, matrix=matrix, num_rows=num_rows)


def test_wants_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "autotune.py")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "expected a GPU" in done.stdout + done.stderr


def test_shapes_are_tuned_once() -> None:
    """Of two models that share one; the output projection is in no layer."""
    specs = {"a": spec_of(CONFIG), "b": spec_of(dataclasses.replace(CONFIG, intermediate_size=768))}
    shapes_of = script("autotune").shapes_of
    few, many = specs["a"].tile_rows, specs["a"].chunk_rows * LONG_BLOCKS[0]
    names = [("a", name) for name in ("qkv", "o", "gate_up", "down")], [("b", "gate_up"), ("b", "down")]
    assert [(shape.model, shape.name, shape.num_rows) for shape in shapes_of(specs, [])] == [
        (*name, num_rows) for some in names for num_rows in (few, many) for name in some
    ]
    assert {shape.key for shape in shapes_of(specs, ["b gate", "a down"])} == {
        f"{shape}/128 {rows}" for shape in ("1536x256", "256x512") for rows in ("few", "many")
    }


def test_the_best_settings_are_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round two looks around the best of round one; what follows is timed with what was found."""
    autotune = script("autotune")
    wanted = Q8Config(block_columns=128, num_programs=264, joined=True, num_warps=8, num_stages=5)
    calls: list[tuple[str, dict[str, Q8Config], list[Q8Config]]] = []

    def time_settings(shape: Any, table: Mapping[str, Q8Config], tried: Sequence[Q8Config]) -> dict[Q8Config, float]:
        calls.append((shape.name, dict(table), list(tried)))
        fields = [field.name for field in dataclasses.fields(Q8Config)]
        wrong = {config: sum(getattr(config, f) != getattr(wanted, f) for f in fields) for config in tried}
        # Those without joined digits fail.
        return {config: 40.0 + wrong[config] for config in tried if config.joined}

    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    now = Q8Config(num_stages=4, joined=True)
    other = {"64x128/32 few": Q8Config(num_warps=8)}
    table = other | {"4096x4096/128 few": now}
    first, second = (shape_of(name, 16, dataclasses.replace(MATRIX, n=n)) for name, n in (("o", 4096), ("down", 2048)))
    lines = []
    for text in autotune.tune([first, second], table, time_settings):
        lines.append(text)
        tuning.write_table("some", table)
        assert tuning.read_table("some") == table
    assert table == other | {first.key: wanted, second.key: wanted}
    assert [name for name, _, _ in calls] == ["o", "o", "down", "down"]
    assert calls[0][2][0] == now and calls[2][2][0] == DEFAULT_FEW
    assert first.key not in other and calls[2][1] == other | {first.key: wanted}
    for round_1, round_2 in (calls[:2], calls[2:]):
        assert len({*round_1[2], *round_2[2]}) == len(round_1[2]) + len(round_2[2]) <= 32
        assert wanted in round_2[2]
    num_tried = len(calls[0][2]) + len(calls[1][2])
    num_failed = sum(not config.joined for _, _, tried in calls[:2] for config in tried)
    assert num_failed > 0
    assert (
        f"{autotune.brief(now)} 44.00 us, becomes c128r64w8s5p264j; best of {num_tried}, {num_failed} failed: "
        in (lines[0])
    )
    assert f"{autotune.brief(DEFAULT_FEW)} failed, becomes" in lines[1]


def test_a_gain_that_may_be_noise_is_none() -> None:
    best = script("autotune").best
    now, fast, slow = Q8Config(), Q8Config(num_stages=4), Q8Config(num_stages=5)
    assert best(now, {now: 100.0, slow: 99.9, fast: 99.6}) == now
    assert best(now, {now: 100.0, slow: 99.9, fast: 99.4}) == fast
    assert best(now, {slow: 200.0, fast: 150.0}) == fast  # those of now cannot be compiled
    assert best(now, {}) == now


def test_settings_that_stay_are_told() -> None:
    autotune = script("autotune")
    table: dict[str, Q8Config] = {}
    (text,) = autotune.tune([shape_of("o", 2048)], table, lambda _, __, tried: dict.fromkeys(tried, 7.0))
    assert table == {"4096x4096/128 many": DEFAULT_MANY}
    assert text.startswith("m o 4096x4096/128 many: a layer with c64r64w4s3p1 7.00 us, stays; best of ")
    assert "failed" not in text


@needs_cuda_lowering
def test_settings_that_are_tried_are_different_programs() -> None:
    tilings, matrix = script("tilings"), MatrixSpec(n=256, k=512, group=128)
    case = script("kernel_cases").product_case("x", matrix, 16, backend="triton", arms=("kernel",))
    inputs, values, scales = case.example()
    tried = tilings.cuts(matrix, 16, now=DEFAULT_FEW)
    tried += tilings.runs(matrix, 16, best=[tried[-1]], tried=tried)
    texts = set()
    for config in tried:
        kernel = functools.partial(q8_partial_sums, num_rows=16, group=128, config=config)
        texts.add(lower_for_cuda(kernel, inputs["operand"], values, scales))
    assert len(texts) == len(tried) > 8


@pytest.fixture
def interpreted() -> EngineSpec:
    """What a GPU would run of a tiny model, as far as a CPU can."""
    return dataclasses.replace(spec_of(CONFIG), backend="interpret", tile_rows=16)


@pytest.mark.parametrize("num_rows", [16, 128])
def test_layers_have_the_settings_that_are_tried(interpreted: EngineSpec, num_rows: int) -> None:
    """`down` [256, 512] in one part, in two, and in one again, which JAX has traced before."""
    timing = script("layer_timing")
    layers = [{name: jax.ShapeDtypeStruct(*form) for name, form in interpreted.layout.shapes.items()} for _ in range(2)]
    timer = timing.LayerTimer(interpreted, layers, num_rows=num_rows)
    key = tuning.table_key(256, 512, 128, num_rows)
    found = []
    for num_programs in (1, 8, 1):
        text = str(timer.trace({key: Q8Config(num_programs=num_programs)}).jaxpr)
        assert text.count("name=q8_partial_sums") == 4 * len(layers)
        found.append(f"f32[2,{num_rows},256]" in text)
    assert found == [False, True, False]


def test_a_layer_is_timed_by_its_kernels(interpreted: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, where no kernel is recorded: what is recorded is made up, after the program has run."""
    timing, profiling = script("layer_timing"), script("profiling")
    for name, value in (("_TOKENS", 1), ("_TOKEN_POSITION", 3), ("_DISTINCT_BYTES", 1)):
        monkeypatch.setattr(timing, name, value)
    weights = timing.random_layers(interpreted.layout)
    assert len(weights) == 2 and weights[0]["down"].dtype == np.int8
    assert not np.array_equal(weights[0]["down"], weights[1]["down"])
    results, calls = [], iter([3, 4, 4])

    def kernel_times(work: Any, device: jax.Device) -> list[Any]:
        results.append(np.asarray(work()))
        assert device == jax.devices()[0]
        return [
            profiling.KernelTime(program="p", kernel="q8_matmul__2", calls=next(calls), us=4.0 * len(results)),
            profiling.KernelTime(program="p", kernel="add_norm_rows", calls=8, us=8.0),
        ]

    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    timer = timing.LayerTimer(interpreted, weights[:1], num_rows=16)
    tried = [Q8Config(num_programs=1), Q8Config(num_programs=8)]
    # The first profile lacks a call, and is taken once more.
    assert timer.us({}, "256x512/128 few", tried) == {tried[0]: 8 + 8.0, tried[1]: 12 + 8.0}
    one_part, again, two_parts = results
    assert np.array_equal(one_part, again) and np.isfinite(one_part).all()
    assert not one_part[1:].any() and one_part[0].all()  # of one row in use
    np.testing.assert_allclose(two_parts, one_part, rtol=0, atol=1e-3 * np.abs(one_part).max())


def test_a_layer_that_cannot_be_timed(interpreted: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not run is left out; a profile without the kernels that ran is an error."""
    timing = script("layer_timing")
    timer = timing.LayerTimer(interpreted, [{}, {}], num_rows=16)
    lowered = SimpleNamespace(compile=lambda options: lambda *_: np.zeros(1))
    monkeypatch.setattr(timer, "trace", lambda _: SimpleNamespace(lower=lambda: lowered))

    def fails(*_: object) -> list[Any]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: shared memory")

    monkeypatch.setattr(timing, "kernel_times", fails)
    assert timer.us({}, "256x512/128 few", [Q8Config()]) == {}
    monkeypatch.setattr(timing, "kernel_times", lambda *_: [])
    with pytest.raises(RuntimeError, match="the profile of 96 products has 0 of them"):
        timer.us({}, "256x512/128 few", [Q8Config()])


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="only a GPU's kernels are in a profile")
def test_layers_of_a_gpu_are_timed() -> None:
    timing, spec = script("layer_timing"), spec_of(CONFIG)
    tried = [Q8Config(), Q8Config(num_programs=8)]
    for num_rows in (spec.tile_rows, spec.chunk_rows):
        timer = timing.LayerTimer(spec, timing.random_layers(spec.layout), num_rows=num_rows)
        times = timer.us({}, tuning.table_key(256, 512, 128, num_rows), tried)
        assert list(times) == tried and all(1 < us < 10_000 for us in times.values())
