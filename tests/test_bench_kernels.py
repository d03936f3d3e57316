"""The benchmark of kernels runs from end to end on tiny shapes; what it times with is right where one can tell."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_benchmarks import result_of, run_script, script, tiny

from vramjax.checkpoint.packed import open_packed
from vramjax.decode.spec import EngineSpec
from vramjax.layout import MatrixSpec
from vramjax.planning import engine_spec

__all__ = ["tiny"]  # a fixture

MATRIX = MatrixSpec(n=256, k=500, group=64)


def spec_of(model: Path) -> EngineSpec:
    """What the device here runs of a model."""
    packed = open_packed(model)
    return engine_spec(packed.config, packed.groups, context=None, device=jax.devices()[0])


def test_kernels(tiny: Path, tmp_path: Path) -> None:
    output = run_script(
        "bench_kernels.py",
        f"--model={tiny}",
        *("--rows=3", "--contexts=40", "--repeats=2", "--distinct_mib=0", "--only=gate_up,attention"),
        f"--out={tmp_path}",
    )
    result = result_of(tmp_path, output)
    product, *tiles = result["rows"]
    assert result["benchmark"] == "kernels-tiny" and len(tiles) == 2
    assert (product["k"], product["n"], product["rows"], product["flops"]) == (64, 320, 3, 2 * 3 * 64 * 320)
    assert product["bytes"] == 320 * 64 + 4 * 320 * 2
    assert {key for key in product if key.startswith("us_")} == {"us_alone", "us_q8", "us_kernel", "us_xla"}
    spec = spec_of(tiny)
    # In float32 what is left is its rounding; kernels take activations in steps of 3e-5 of the largest of a group.
    bound = 1e-6 if spec.backend == "reference" else 5e-5
    assert 0 < product["error_kernel"] == product["error_q8"] < bound < product["error_xla"] < 1e-2
    assert [row["shape"] for row in tiles] == ["1 x 40 positions", f"{spec.tile_rows} x 40 positions"]
    position_bytes = 2 * 2 * 32 * spec.kv_dtype.itemsize
    assert [row["bytes"] for row in tiles] == [40 * position_bytes, spec.tile_rows * 40 * position_bytes]
    for row in result["rows"]:
        assert row["calls"] == 12
        rate = row["bytes"] / row["us_alone"] / 1e3 / result["ceilings"]["device_read_gb_per_s"]
        assert row["read_frac_alone"] == pytest.approx(rate)
        assert row["shape"] in output.splitlines()[-2 - len(result["rows"]) :][result["rows"].index(row)]
    assert result["metrics"]["q8_matmul_error_max"] == product["error_q8"]
    assert script("results_table").table(result).count("\n| tiny ") == 3


def test_error_of_a_product() -> None:
    """A result that is wrong in one of many columns is seen, and so is the padding."""
    case = script("kernel_cases").product_case("x", MATRIX, 4, backend="reference")
    arguments = case.make(jax.random.key(0))
    inputs, values, scales = arguments
    assert values.shape == (256, 512) and not np.asarray(values)[:, 500:].any() and scales.shape == (8, 256)
    right = case.arms["q8"](*arguments)
    assert case.error(arguments, right) < 1e-6
    assert case.error(arguments, right.at[2, 77].add(1.0)) > 1e-3
    assert case.error(arguments, case.arms["xla"](*arguments)) < 1e-2
    assert case.error(arguments, case.arms["kernel"](*arguments)) == case.error(arguments, right)
    assert set(case.arms) == {"q8", "kernel", "xla"}
    assert inputs["x"].shape == (4, 500)


def test_headlines() -> None:
    report = script("kernel_report")
    rows = [
        {
            "kernel": "q8_matmul",
            "name": "qwen3-8b gate_up",
            "k": 4096,
            "n": 24576,
            "rows": 16,
            "bytes": 100,
            "flops": 30,
        },
        {"kernel": "q8_matmul", "name": "qwen3-8b o", "k": 4096, "n": 4096, "rows": 16, "bytes": 10, "flops": 3},
        {"kernel": "attention", "name": "qwen3-8b attention", "context": 32768, "rows": 1, "bytes": 40, "flops": 9},
    ]
    rows[0] |= {"us_q8": 20.0, "us_kernel": 10.0, "us_jax_triton": 11.0, "us_xla": 80.0, "error_q8": 1e-6}
    rows[1] |= {"us_q8": 4.0, "us_xla": 8.0, "error_q8": 1e-5, "failed_kernel": "no memory"}
    rows[2] |= {"us_attention": 8.0, "error_attention": 1e-4}
    ceilings = {"device_read_gb_per_s": 0.02, "bf16_matmul_tflop_per_s": 1e-5}
    rows = [report.with_rates(row, ceilings) for row in rows]
    assert rows[0]["read_frac_kernel"] == 0.5 and rows[0]["matmul_frac_kernel"] == pytest.approx(0.3)
    assert report.metrics_of(rows) == {
        "q8_matmul_frac_4096x24576": 0.5,
        "q8_matmul_whole_frac_4096x24576": 0.25,
        "attention_frac_32k": 0.25,
        "q8_over_xla_max_16_rows": 0.5,
        "jax_triton_over_pallas_median": 1.1,
        "jax_triton_over_pallas_range": [1.1, 1.1],
        "q8_matmul_error_max": 1e-5,
        "attention_error_max": 1e-4,
    }


def test_int8_activations_lose_more() -> None:
    """The kernels themselves, interpreted, on the rows of a prompt."""
    case = script("kernel_cases").product_case(
        "x", MatrixSpec(n=64, k=128, group=64), 20, backend="interpret", arms=("kernel", "int8")
    )
    arguments = case.make(jax.random.key(0))
    errors = {arm: case.error(arguments, function(*arguments)) for arm, function in case.arms.items()}
    assert errors["kernel"] < 5e-5 < 1e-3 < errors["int8"] < 1e-2


def test_chains_call_what_they_are_given() -> None:
    """Every call of a chain is computed, from its own data, in all turns."""
    chains = script("chains")
    links = [(jnp.full(3, float(i)), jnp.float32(10 * i)) for i in range(7)]
    one, several = (chains.lower_chain(lambda x, y: x + y, links, turns).compile() for turns in (1, chains.LONG))
    assert [result.tolist() for result in one(links)] == [[11.0 * i] * 3 for i in range(7)]
    first, total = several(links)
    assert first.tolist() == [0.0] * 3 and float(total) == sum(11.0 * i for i in range(7))
    num_runs = [0]

    def counted(links: object) -> object:
        num_runs[0] += 1
        return one(links)

    assert chains.repeated(counted, 4)(links)[0].tolist() == [0.0] * 3 and num_runs == [4]


def test_kernels_of_a_program_run_one_after_the_other() -> None:
    """As they are compiled: XLA has an option for it, which it knows by this name."""
    chains = script("chains")
    with chains.CompilerPool() as pool:
        assert pool.compile(jax.jit(jnp.sin).lower(jnp.ones(3))).result()(jnp.zeros(3)).tolist() == [0.0] * 3
        lowered = Lowered()
        pool.compile(lowered).result()
    assert lowered.options == {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


class Lowered:
    """A program that remembers how it was compiled."""

    def compile(self, options: dict[str, str]) -> None:
        self.options = options


@pytest.mark.gpu
@pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="on a CPU a loop computes once what is the same in all turns"
)
def test_turns_of_a_loop_take_their_time() -> None:
    chains, w = script("chains"), jnp.ones((4096, 4096), jnp.bfloat16)
    links = [(jnp.full((4096, 4096), i, jnp.bfloat16), w) for i in range(6)]
    few, many = (chains.lower_chain(jnp.dot, links, turns).compile() for turns in (chains.SHORT, 4 * chains.SHORT))
    seconds = chains.shortest([lambda: few(links), lambda: many(links)], repeats=5)
    assert seconds[1] > 3 * seconds[0]


def test_time_of_a_call_is_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What starting a program takes is in both programs, and cancels."""
    chains = script("chains")
    clock = [0.0]
    monkeypatch.setattr(chains.time, "perf_counter", lambda: clock[0])

    def program(num_calls: int):
        def run(_: object) -> None:
            clock[0] += 100 + 3 * num_calls

        return run

    links = [()] * 6
    both = chains.Chains(short=program(6 * chains.SHORT), long=program(6 * chains.LONG))
    assert both.seconds_per_call(links, repeats=2) == 3.0
    assert chains.seconds_alone(lambda: program(1)(None), links, repeats=1) == 103.0
