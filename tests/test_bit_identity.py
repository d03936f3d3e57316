"""What is kept on the device changes no bit of what is decoded, and bytes really are streamed all the same.

Every arm decodes the same tokens, 64 of a tiny model and 24 of a real one; ids and logits must equal those of the
resident run. In the same run the counters must show what the policy promises, and the device addresses of all weights
must be those of the first sweep.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest
from packed_dirs import pack_tiny
from tiny import load_golden

from vramjax.checkpoint.packed import Packed, open_packed
from vramjax.language_model import LanguageModel

NUM_TOKENS = 64  # of tiny models
NUM_REAL_TOKENS = 24  # uploads are the same in each sweep from the second on, so more would be more of the same
POLICIES: tuple[Literal["past", "both_sides", "pinned_ring"], ...] = ("past", "both_sides", "pinned_ring")
RELEASES: tuple[Literal["pool", "free"], ...] = ("pool", "free")
SMOLLM2_PROMPT = (6403, 1980, 253, 655)  # "Once upon a time"


@dataclass
class Run:
    ids: list[int]
    logits: np.ndarray  # float32 [num_tokens, V]
    stats: dict[str, Any]
    addresses: list[set[int]]  # of all weights of each sweep


def run(packed: Packed, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS, **arm: Any) -> Run:
    rows: list[np.ndarray] = []
    addresses: list[set[int]] = []
    # A token a sweep, so that as much is streamed as can be.
    with LanguageModel(packed, None, context=256, speculate="off", progress=False, **arm) as model:
        controller = model._controller
        sweep = controller.sweep

        def watched_sweep():
            addresses.append(set())
            for layer_idx, weights in sweep():
                addresses[-1] |= {array.unsafe_buffer_pointer() for array in jax.tree.leaves(weights)}
                yield layer_idx, weights

        controller.sweep = watched_sweep
        generation = model.generate(
            list(prompt), max_new_tokens=num_tokens, ignore_stop=True, on_logits=lambda row: rows.append(row.copy())
        ).finish()
        return Run(generation.token_ids, np.stack(rows), model.stats(), addresses)


@functools.lru_cache
def resident_run(path: Path, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> Run:
    return run(open_packed(path), prompt, num_tokens)


def check_arm(packed: Packed, prompt: tuple[int, ...], arm: dict[str, Any], num_tokens: int = NUM_TOKENS) -> None:
    reference, actual = resident_run(packed.path, prompt, num_tokens), run(packed, prompt, num_tokens, **arm)
    assert actual.ids == reference.ids
    assert actual.logits.tobytes() == reference.logits.tobytes()

    num_layers, keep, stats = packed.config.num_layers, arm["keep"], actual.stats
    ring = 1 if num_layers - keep < 8 else min(2, keep)
    uploads, peak = {
        "past": (num_layers - keep, min(num_layers, 2 * keep)),
        "both_sides": (num_layers, keep),
        "pinned_ring": (num_layers - keep + ring, keep),
    }[arm["policy"]]
    assert stats["uploads_per_token"] == uploads
    assert stats["bytes_streamed_per_token"] == uploads * packed.layer_nbytes > 0
    assert stats["peak_resident_layers"] == peak
    assert stats["end_resident_layers"] == keep
    assert stats["resident_entries_end"] == 7 * keep + 1
    num_sweeps = len(actual.addresses)
    assert num_sweeps == num_tokens  # the prompt's, and one for each token but the last
    ahead = ring if arm["policy"] == "pinned_ring" else 0  # uploads of a sweep for the next one
    first_uploads = keep + uploads if arm["warm_up"] else num_layers + ahead
    assert stats["uploads"] == first_uploads + (num_sweeps - 1) * uploads
    assert stats["bytes_uploaded"] == stats["uploads"] * packed.layer_nbytes
    if arm["release"] == "pool":  # closed: every slot was made before the first upload, and no other is ever seen
        assert stats["pool_misses"] == stats["peak_resident_layers"]
        assert stats["pool_hits"] == stats["uploads"]
        assert stats["peak_layer_bytes"] == stats["peak_resident_layers"] * packed.layer_nbytes
        assert len(set().union(*actual.addresses)) == 5 * stats["peak_resident_layers"]
    else:
        assert stats["pool_hits"] == 0
    assert stats["pool_fallback_frees"] == 0


def arms(keeps: list[int]) -> list[Any]:
    """Everything, but for a warm start with real frees and most of the pinned ring: the tiny models have those."""
    combinations = (c for c in itertools.product(keeps, POLICIES, RELEASES, (False, True)) if c[2:] != ("free", True))
    combinations = (c for c in combinations if c[1] != "pinned_ring" or c[2:] == ("pool", False))
    return [
        pytest.param(
            {"keep": keep, "policy": policy, "release": release, "warm_up": warm},
            id=f"keep{keep}-{policy}-{release}-{'warm' if warm else 'lazy'}",
        )
        for keep, policy, release, warm in combinations
    ]


@pytest.mark.parametrize("arm", arms([1, 2, 4, 12, 20, 29]))
def test_smollm2(smollm2: Packed, arm: dict[str, Any]):
    check_arm(smollm2, SMOLLM2_PROMPT, arm, NUM_REAL_TOKENS)


def test_smollm2_is_the_real_model(smollm2: Packed):
    """The resident run that all arms are compared with gives the ids of the float32 reference."""
    expected = [28, 260, 2240, 282, 23324, 27108, 436, 253, 15114, 39228, 28, 351, 25854, 41658, 284, 14055, 9018, 30]
    expected += [1249, 347, 260, 929, 3514, 411]
    reference = resident_run(smollm2.path, SMOLLM2_PROMPT, NUM_REAL_TOKENS)
    assert reference.ids == expected
    assert reference.stats["uploads_per_token"] == reference.stats["bytes_streamed_per_token"] == 0
    assert reference.stats["resident_entries_end"] == 211
    lazy = run(smollm2, SMOLLM2_PROMPT, NUM_REAL_TOKENS, warm_up=False)
    assert (lazy.ids, lazy.logits.tobytes()) == (reference.ids, reference.logits.tobytes())


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "qwen3_vl"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Packed, tuple[int, ...]]:
    packed = pack_tiny(tmp_path_factory.mktemp("tiny"), request.param)
    return packed, tuple(load_golden(request.param)["tokens"][:40].tolist())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("release", RELEASES)
def test_tiny_models(tiny: tuple[Packed, tuple[int, ...]], policy: str, release: str):
    packed, prompt = tiny
    for keep in range(1, packed.config.num_layers):
        for warm in (False, True):
            check_arm(packed, prompt, {"keep": keep, "policy": policy, "release": release, "warm_up": warm})


def test_a_window_that_holds_every_layer_is_resident(tiny: tuple[Packed, tuple[int, ...]]):
    packed, prompt = tiny
    reference, actual = resident_run(packed.path, prompt), run(packed, prompt, keep=packed.config.num_layers)
    assert (actual.ids, actual.logits.tobytes()) == (reference.ids, reference.logits.tobytes())
    assert actual.stats["policy"] == "resident"
    assert actual.stats["uploads_per_token"] == 0
