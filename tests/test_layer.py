"""The layer step as a whole: kernels against the reference, and several layers as one program."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import lower_for_cuda, needs_cuda_lowering
from kernels import KERNELS
from packed_dirs import pack_tiny

from pallas_kernels import Backend
from vramjax.checkpoint.packed import Packed
from vramjax.model.kv_cache import make_cache
from vramjax.model.layer import LayerSpec, Weights, layer_steps

NUM_ROWS, NUM_IN_USE = 16, 5
TOLERANCE = 1e-3  # of activations of order 1; the kernels take them in steps of 3e-5 of the largest of a group

# What is no arithmetic, beside calls of kernels.
NO_ARITHMETIC = {"custom_call", "constant", "reshape", "broadcast_in_dim", "mesh", "output_operand_alias"}

run = jax.jit(layer_steps, static_argnames="spec")


@pytest.fixture(params=["qwen2", "qwen3"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Packed:
    return pack_tiny(tmp_path, request.param)


def rows(packed: Packed, *, is_chunk: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """h, slots and positions of a chunk of a prompt, or of a tile with rows of two sequences."""
    h = jnp.asarray(np.random.default_rng(0).standard_normal((NUM_ROWS, packed.config.hidden_size), np.float32))
    in_use, index = jnp.arange(NUM_ROWS) < NUM_IN_USE, jnp.arange(NUM_ROWS, dtype=jnp.int32)
    positions = jnp.where(in_use, index if is_chunk else index // 2, -1)
    return h, jnp.int32(1) if is_chunk else index % 2, positions


def layers_of(
    packed: Packed, num_layers: int, device: jax.Device | None = None
) -> tuple[list[Weights], list[jax.Array]]:
    """Their weights, and empty caches."""
    device = device or jax.devices()[0]
    weights = [jax.device_put(packed.load_layer(i), device) for i in range(num_layers)]
    return weights, [make_cache(packed.config, 2, 128, jnp.float32, device) for _ in range(num_layers)]


def spec_of(packed: Packed, backend: Backend, num_digits: int = 2) -> LayerSpec:
    return LayerSpec(config=packed.config, layout=packed.layout, backend=backend, prompt_digits=num_digits)


@pytest.mark.parametrize(("is_chunk", "num_digits"), [(True, 2), (True, 1), (False, 2)])
def test_kernels_agree_with_the_reference(packed: Packed, is_chunk: bool, num_digits: int) -> None:
    results, tolerance = [], TOLERANCE if num_digits == 2 else 0.2
    for backend in (KERNELS, "reference"):
        weights, kv = layers_of(packed, 1)
        results.append(run(weights, kv, *rows(packed, is_chunk=is_chunk), spec=spec_of(packed, backend, num_digits)))
    (h, (kv,)), (expected_h, (expected_kv,)) = results
    np.testing.assert_allclose(h[:NUM_IN_USE], expected_h[:NUM_IN_USE], atol=tolerance)
    np.testing.assert_allclose(kv, expected_kv, atol=tolerance)
    written = np.asarray((kv != 0).any(axis=(2, 3, 4)))
    assert written.sum() == NUM_IN_USE and written[0].any() == (not is_chunk)


@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_layers_as_one_program_have_the_same_bits(packed: Packed, backend: Backend) -> None:
    """Of the kernels anywhere; of the reference on a CPU, as XLA fuses it for a GPU in each program in its own way."""
    spec = spec_of(packed, backend)
    num_layers = 3 if backend == "reference" else 2  # a layer between others is wired alike for both, and compiles long
    device = jax.devices("cpu")[0] if backend == "reference" else jax.devices()[0]
    h, slots, positions = jax.device_put(rows(packed, is_chunk=False), device)
    together = run(*layers_of(packed, num_layers, device), h, slots, positions, spec=spec)
    expected_kv = []
    for weights, kv in zip(*layers_of(packed, num_layers, device), strict=True):
        h, written = run([weights], [kv], h, slots, positions, spec=spec)
        expected_kv += written
    np.testing.assert_array_equal(together[0][:NUM_IN_USE], h[:NUM_IN_USE])
    np.testing.assert_array_equal(together[1], expected_kv)


@pytest.mark.parametrize("is_chunk", [True, False])
def test_rows_that_are_not_in_use_stay_as_they_are(packed: Packed, is_chunk: bool) -> None:
    """Even where they are nothing that one could compute with, and also if none is in use."""
    h, slots, positions = rows(packed, is_chunk=is_chunk)
    spec, unused = spec_of(packed, KERNELS), jnp.arange(NUM_ROWS) >= NUM_IN_USE
    whole, whole_kv = run(*layers_of(packed, 1), h, slots, positions, spec=spec)
    odd = jnp.where(unused[:, None], jnp.inf, h)
    changed, changed_kv = run(*layers_of(packed, 1), odd, slots, positions, spec=spec)
    np.testing.assert_array_equal(changed, jnp.where(unused[:, None], odd, whole))
    np.testing.assert_array_equal(changed_kv, whole_kv)
    none, (none_kv,) = run(*layers_of(packed, 1), h, slots, jnp.full_like(positions, -1), spec=spec)
    np.testing.assert_array_equal(none, h)
    assert not none_kv.any()


@needs_cuda_lowering
@pytest.mark.parametrize(("is_chunk", "compiled"), [(True, "triton"), (False, "triton"), (False, "triton_chained")])
def test_for_a_gpu_all_of_it_is_kernels(packed: Packed, is_chunk: bool, compiled: Backend) -> None:
    """What is not, XLA could fuse in its own way in each program that has the layer in it, and give it other bits."""

    def operations(backend: Backend) -> set[str]:
        step = functools.partial(layer_steps, spec=spec_of(packed, backend))
        text = lower_for_cuda(step, *layers_of(packed, 2), *rows(packed, is_chunk=is_chunk))
        return set(re.findall(r"stablehlo\.([a-z_]+)", text))

    assert "custom_call" in operations(compiled) <= NO_ARITHMETIC
    assert "dot_general" in operations("reference")


@needs_cuda_lowering
def test_the_last_kernel_of_layers_lets_nothing_be_launched_early(packed: Packed) -> None:
    """What comes after a layer need not be a kernel of ours, and only those may be launched early."""
    step = functools.partial(layer_steps, spec=spec_of(packed, "triton_chained"))
    text = lower_for_cuda(step, *layers_of(packed, 2), *rows(packed, is_chunk=False))
    calls = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    last = [line for line in calls if '"add_rows"' in line]
    assert len(last) == 1 and "griddepcontrol" not in last[0]
    assert len(calls) > 8 and all("griddepcontrol" in line for line in calls if line not in last)
