"""Drawing the next token, against plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vramjax.decode.sampler import RowSampling, Sampling, _is_kept, perturbed, sample_rows
from vramjax.errors import ConfigError

# As the engine runs them: compiled.
_sample_rows = jax.jit(sample_rows)
_perturbed = jax.jit(perturbed)

MIXED = (
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.3, top_k=40, seed=2),
    Sampling(temperature=1.0, top_p=0.9, seed=2),
    Sampling(temperature=0.5, top_k=20, top_p=0.8, seed=2**32 - 1),
    Sampling(temperature=2.0, top_k=1, seed=4),
    Sampling(temperature=1e-45, top_p=1e-50, seed=5),
    Sampling(temperature=1e300, top_k=10**12, seed=6),
)


def draw(logits: np.ndarray, positions: np.ndarray, **settings: float) -> np.ndarray:
    sampling = Sampling(**settings)  # pyright: ignore[reportArgumentType]
    return draw_rows(logits, positions, [sampling] * len(logits))


def draw_rows(logits: np.ndarray, positions: np.ndarray, rows: Sequence[Sampling]) -> np.ndarray:
    """One setting a row."""
    ids = _sample_rows(jnp.asarray(logits, jnp.float32), jnp.asarray(positions, jnp.int32), RowSampling.of(rows))
    assert ids.dtype == jnp.int32
    return np.asarray(ids)


def kept_mask(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The tokens that the sampler may draw, bool [T, V]."""
    scores = (logits - logits.max(-1, keepdims=True)) / temperature
    rows = RowSampling.of([Sampling(temperature=temperature, top_k=top_k, top_p=top_p)] * len(logits))
    mask = _is_kept(jnp.asarray(scores, jnp.float32), jnp.asarray(rows.top_k), jnp.asarray(rows.top_p))
    return np.asarray(mask)


def reference_draw(logits: np.ndarray, position: int, sampling: Sampling) -> int:
    """The token of one row [V]: all that is kept, sorted on the host, and the noise of its seed and position."""
    if sampling.is_greedy:
        return int(logits.argmax())
    temperature = max(sampling.temperature, 1.2e-38)
    keep = sorted(kept(logits, temperature=temperature, top_k=sampling.top_k, top_p=sampling.top_p))
    key = jax.random.fold_in(jax.random.key(np.uint32(sampling.seed)), position)
    noise = np.asarray(jax.random.gumbel(key, logits.shape), np.float64)
    scores = (logits.astype(np.float64) - logits.max()) / temperature + noise
    return keep[int(scores[keep].argmax())]


def many_draws(logits: list[float] | np.ndarray, count: int, **settings: float) -> np.ndarray:
    """How often each token is drawn from the same logits at `count` positions."""
    row = np.asarray(logits, np.float32)
    ids = draw(np.tile(row, (count, 1)), np.arange(count), **settings)
    return np.bincount(ids, minlength=len(row))


def kept(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The tokens that may be drawn, in float64: ordered by score, then by id."""
    scores = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-scores, kind="stable")
    if 0 < top_k < len(order):
        order = order[:top_k]
    p = np.exp(scores[order] - scores[order[0]])
    p /= p.sum()
    before = np.cumsum(p) - p
    return set(order[before < top_p].tolist()) if top_p < 1 else set(order.tolist())


def random_logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


def test_greedy_is_argmax() -> None:
    logits = random_logits(8, 1000)
    np.testing.assert_array_equal(draw(logits, np.arange(8)), logits.argmax(1))


def test_ties_go_to_the_smallest_id() -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[1, [77, 201]] = 5.0
    logits[2, :] = -np.inf
    logits[2, [200, 299]] = -3.0
    for settings in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}):
        np.testing.assert_array_equal(draw(logits, np.arange(3), **settings), [0, 77, 200])


def test_a_seed_gives_the_same_draws() -> None:
    logits, positions = np.zeros((64, 500), np.float32), np.arange(64)
    first = draw(logits, positions, temperature=1.0, seed=5)
    np.testing.assert_array_equal(first, draw(logits, positions, temperature=1.0, seed=5))
    for other in (6, 2**32 - 1):
        compiled = _sample_rows._cache_size()  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        assert (first != draw(logits, positions, temperature=1.0, seed=other)).mean() > 0.9
        assert _sample_rows._cache_size() == compiled, "a new seed compiles nothing"  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    assert len(set(first.tolist())) > 50  # and positions differ from each other


def test_a_row_depends_on_nothing_but_itself() -> None:
    logits, positions = random_logits(16, 700), np.arange(100, 116)
    settings = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 1}
    whole = draw(logits, positions, **settings)
    others = random_logits(16, 700, seed=9)
    for row in range(16):
        changed, moved = others.copy(), np.full(16, -1)
        changed[row], moved[row] = logits[row], positions[row]
        assert draw(changed, moved, **settings)[row] == whole[row]
    for tile in (1, 2, 8):
        parts = [draw(logits[i : i + tile], positions[i : i + tile], **settings) for i in range(0, 16, tile)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    # Nor on where in the tile it stands.
    np.testing.assert_array_equal(draw(logits[::-1], positions[::-1], **settings)[::-1], whole)


@pytest.mark.parametrize("vocab", [90, 3000])
def test_each_row_is_drawn_by_its_own_settings(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for turn in range(8):
        rows = [MIXED[(i + turn) % 8] for i in range(16)]
        logits, positions = random_logits(16, vocab, seed=turn), rng.integers(0, 5000, 16)
        expected = [reference_draw(*row) for row in zip(logits, positions.tolist(), rows, strict=True)]
        assert draw_rows(logits, positions, rows).tolist() == expected


def test_settings_of_other_rows_change_no_bit() -> None:
    logits, positions = random_logits(16, 3000), np.arange(40, 56, dtype=np.int32)
    rows = [MIXED[i % 8] for i in range(16)]
    mixed = np.asarray(_perturbed(logits, positions, RowSampling.of(rows)))
    for i, sampling in enumerate(rows):
        alike = np.asarray(_perturbed(logits, positions, RowSampling.of([sampling] * 16)))
        assert alike[i].tobytes() == mixed[i].tobytes()


def test_settings_of_rows_compile_two_programs() -> None:
    program = jax.jit(lambda *args: sample_rows(*args))  # a function of its own, and so a cache of its own
    logits, positions = random_logits(2, 50), np.arange(2, dtype=np.int32)
    for first in MIXED:
        for second in MIXED:
            program(logits, positions, RowSampling.of([first, second]))
    assert program._cache_size() == 2  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    greedy = program.lower(logits, positions, RowSampling.of([Sampling(), Sampling(top_k=5, seed=9)])).as_text()
    assert not any(word in greedy for word in ("while", "sort", "exponential", "log", "shift"))


def test_rows_not_in_use_do_no_harm() -> None:
    logits = np.stack([np.full(50, np.nan), random_logits(1, 50)[0], np.full(50, -np.inf)]).astype(np.float32)
    for settings in ({}, {"temperature": 1.0, "top_k": 5, "top_p": 0.5}):
        alone = draw(logits[1:2], np.array([3]), **settings)
        assert draw(logits, np.array([-1, 3, -1]), **settings)[1] == alone[0]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits, count = np.array([0.0, 1.0, 2.0, -1.0, 0.5, -2.0, 1.5]), 8000
    p = np.exp(logits / temperature)
    expected = p / p.sum() * count
    counts = many_draws(logits, count, temperature=temperature, seed=11)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 22.5  # 6 degrees of freedom: one seed in a thousand is above


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.8), (4, 0.7)])
def test_draws_from_what_is_kept_follow_the_softmax(top_k: int, top_p: float) -> None:
    logits, count = np.array([0.0, 1.0, 2.0, -1.0, 0.5, -2.0, 1.5]), 8000
    keep = sorted(kept(logits, temperature=1.0, top_k=top_k, top_p=top_p))
    counts = many_draws(logits, count, temperature=1.0, top_k=top_k, top_p=top_p, seed=12)
    assert np.flatnonzero(counts).tolist() == keep
    p = np.exp(logits[keep])
    expected = p / p.sum() * count
    assert ((counts[keep] - expected) ** 2 / expected).sum() < 16.3  # at most 3 degrees of freedom


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 20, 1000])
def test_what_is_kept(top_k: int, top_p: float) -> None:
    logits = random_logits(100, 20) / 3
    for temperature in (0.7, 1.5):
        mask = kept_mask(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        for row, scores in zip(mask, logits, strict=True):
            expected = kept(scores, temperature=temperature, top_k=top_k, top_p=top_p)
            assert set(np.flatnonzero(row).tolist()) == expected
            assert len(expected) == top_k or top_p < 1 or not 0 < top_k <= 20


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, {0, 1, 2, 3, 4}),
        (2, 1.0, {1, 2}),
        (3, 1.0, {1, 2, 4}),
        (4, 1.0, {0, 1, 2, 4}),
        (0, 0.25, {1}),
        (0, 0.5, {1, 2}),
    ],
)
def test_of_equal_tokens_the_smallest_ids_are_kept(top_k: int, top_p: float, expected: set[int]) -> None:
    logits = [0.0, 3.0, 3.0, 0.0, 3.0]
    mask = kept_mask(np.array([logits]), temperature=1.0, top_k=top_k, top_p=top_p)
    assert (
        set(np.flatnonzero(mask[0]).tolist())
        == expected
        == kept(np.array(logits), temperature=1.0, top_k=top_k, top_p=top_p)
    )


@pytest.mark.parametrize("temperature", [1e-3, 1e-45])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(8, 100) * 10
    for cut in ({}, {"top_k": 5, "top_p": 0.9}):
        np.testing.assert_array_equal(draw(logits, np.arange(8), temperature=temperature, **cut), logits.argmax(1))


def test_huge_logits_and_a_huge_temperature() -> None:
    logits = np.array([[3e38, -3e38, 1e38]], np.float32)
    assert draw(logits, np.zeros(1), temperature=1.0)[0] == 0
    counts = many_draws([1.0, 2.0, 3.0], 600, temperature=1e30)
    assert counts.min() > 150  # all alike


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1; expected 0"),
        ({"top_p": 0.0}, "top_p is 0.0; expected more than 0"),
        ({"top_p": -1.0}, "top_p is -1.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"seed": -1}, "seed is -1; expected 0"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": 2.5}, "seed is 2.5; expected a whole number"),
        ({"seed": None}, "seed is None; expected a whole number"),
        ({"top_k": True}, "top_k is True; expected a whole number"),
        ({"temperature": "1"}, "temperature is '1'; expected a number"),
        ({"temperature": False}, "temperature is False; expected a number"),
        ({"top_p": [0.5]}, "top_p is [0.5]; expected a number"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sampling(**settings)
    assert str(error.value).startswith(message)


def test_numbers_of_numpy_are_numbers() -> None:
    numbers: Any = (np.float32(0.5), np.int64(3), np.float64(0.5), np.uint32(7))
    temperature, top_k, top_p, seed = numbers
    assert Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed) == Sampling(
        temperature=0.5, top_k=3, top_p=0.5, seed=7
    )
