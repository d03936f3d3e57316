"""The benchmark of kernels runs from end to end on tiny shapes; what it times with is right where one can tell."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import lower_for_cuda, needs_cuda_lowering
from test_benchmarks import result_of, run_script, script, tiny

from vramjax.layout import MatrixSpec

__all__ = ["tiny"]  # a fixture

MATRIX = MatrixSpec(n=256, k=500, group=64)


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
    assert {key for key in product if key.startswith("us_")} == {"us_alone", "us_q8", "us_parts", "us_xla"}
    assert 0 < product["error_q8"] < 1e-6 < product["error_xla"] < 1e-2
    assert [row["shape"] for row in tiles] == ["1 x 40 positions", "8 x 40 positions"]
    assert [row["bytes"] for row in tiles] == [2 * 2 * 32 * 4 * 40, 8 * 2 * 2 * 32 * 4 * 40]
    for row in result["rows"]:
        assert row["calls"] == 6
        rate = row["bytes"] / row["us_alone"] / 1e3 / result["ceilings"]["device_read_gb_per_s"]
        assert row["read_frac_alone"] == pytest.approx(rate)
        assert row["shape"] in output.splitlines()[-2 - len(result["rows"]) :][result["rows"].index(row)]
    assert result["metrics"]["q8_matmul_error_max"] == product["error_q8"]
    assert script("results_table").table(result).count("\n| tiny ") == 3


def test_sweep(tiny: Path, tmp_path: Path) -> None:
    """On a CPU every tiling is the reference; but all the rest is there."""
    output = run_script(
        "bench_kernels.py",
        f"--model={tiny}",
        *("--sweep", "--rows=1", "--repeats=1", "--distinct_mib=0", "--only=down"),
        f"--out={tmp_path}",
    )
    (row,) = result_of(tmp_path, output)["rows"]
    times = [result["us"] for result in row["results"]]
    assert len(times) == row["num_tried"] > 1 and times == sorted(times) and row["num_failed"] == 0
    assert {result["difference"] for result in row["results"]} == {0.0}
    assert all(result["tiling"]["block_columns"] == 64 for result in row["results"])  # the matrix has no more


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
    np.testing.assert_array_equal(case.arms["parts"](*arguments).sum(0), right)
    assert inputs["x"].shape == (4, 500)


def test_chains_call_what_they_are_given() -> None:
    """Every call of a chain is computed, from its own data; programs of all lengths take the same arguments."""
    chains = script("chains")
    links = [(jnp.full(3, float(i)), jnp.float32(10 * i)) for i in range(7)]
    assert chains.Chains.lengths(links) == (2, 7)
    short, long = (chains.lower_chain(lambda x, y: x + y, links, n).compile() for n in (2, 7))
    assert [float(result[0]) for result in short(links)] == [0.0, 11.0]
    assert [float(result[2]) for result in long(links)] == [11.0 * i for i in range(7)]
    seconds = chains.Chains(short=short, long=long).seconds_per_call(links, repeats=3)
    assert abs(seconds) < 0.1


def test_time_of_a_call_is_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What starting a program takes is in both chains, and cancels."""
    chains = script("chains")
    clock = [0.0]
    monkeypatch.setattr(chains.time, "perf_counter", lambda: clock[0])

    def program(num_calls: int):
        def run(_: object) -> None:
            clock[0] += 100 + 3 * num_calls

        return run

    both = chains.Chains(short=program(2), long=program(6))
    assert both.seconds_per_call([()] * 6, repeats=2) == 3.0
    assert chains.seconds_alone(lambda: program(1)(None), [()] * 6, repeats=1) == 103.0


@needs_cuda_lowering
def test_a_tiling_is_what_the_kernel_gets() -> None:
    tilings = script("tilings")
    matrix = MatrixSpec(n=256, k=512, group=128)
    case = script("kernel_cases").product_case("x", matrix, 16, backend="triton", arms=("parts",))
    inputs, values, scales = case.example()
    texts = set()
    for tiling in tilings.tilings(matrix, 16):
        kernel = tilings.partial_sums_with(tiling)
        call = lambda operand, values, scales, kernel=kernel: kernel(operand, values, scales, num_rows=16, group=128)  # noqa: E731
        text = lower_for_cuda(call, inputs["operand"], values, scales)
        assert f"num_warps = {tiling.num_warps} : i32" in text and f"num_stages = {tiling.num_stages} : i32" in text
        texts.add(text)
    assert len(texts) == len(tilings.tilings(matrix, 16)) > 10
