"""Drafts change no token: of toy models whose every logit is known, drafted well, badly, and maliciously."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from vramjax.decode.acceptance import new_tokens
from vramjax.decode.sampler import RowSampling, Sampling, sample_rows

TILE_ROWS, V = 16, 6
_sample = jax.jit(sample_rows)

Guess = Callable[[list[int], int], list[int]]  # a sequence and a depth -> drafts


def logits_after(ids: Sequence[int]) -> np.ndarray:
    """A toy model of two tokens of context, float32 [V]."""
    last, before = ids[-1], ids[-2] if len(ids) > 1 else 0
    return np.random.default_rng([last, before]).normal(0, 1.5, V).astype(np.float32)


def sweep(rows: Sequence[tuple[Sequence[int], Sampling]]) -> list[int]:
    """What is drawn at rows that each see a sequence."""
    logits = np.full((TILE_ROWS, V), np.nan, np.float32)  # rows not in use hold anything
    positions = np.full(TILE_ROWS, -1, np.int32)
    for i, (sequence, _) in enumerate(rows):
        logits[i], positions[i] = logits_after(sequence), len(sequence)
    settings = [sampling for _, sampling in rows] + [Sampling()] * (TILE_ROWS - len(rows))
    drawn = _sample(logits, positions, RowSampling.of(settings))
    assert drawn.dtype == np.int32
    return np.asarray(drawn).tolist()


def decode(
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    num_tokens: int,
    guesses: Sequence[Guess],
    depth: int,
) -> tuple[list[list[int]], int]:
    """New tokens of sequences that share a tile, each with drafts of `depth`; and how many drafts were right."""
    sequences, num_right = [list(prompt) for prompt in prompts], 0
    wanted = [len(prompt) + num_tokens for prompt in prompts]
    while any(len(s) < n for s, n in zip(sequences, wanted, strict=True)):
        rows, drafts = [], [guess(sequence, depth) for sequence, guess in zip(sequences, guesses, strict=True)]
        for sequence, sampling, of_sequence in zip(sequences, samplings, drafts, strict=True):
            rows += [([*sequence, *of_sequence[:i]], sampling) for i in range(len(of_sequence) + 1)]
        drawn = iter(sweep(rows))
        for sequence, of_sequence in zip(sequences, drafts, strict=True):
            new = new_tokens(of_sequence, list(itertools.islice(drawn, len(of_sequence) + 1)))
            num_right += len(new) - 1
            sequence += new
    return [s[len(p) : n] for s, p, n in zip(sequences, prompts, wanted, strict=True)], num_right


def nothing(sequence: list[int], depth: int) -> list[int]:
    return []


def likeliest(sequence: list[int], depth: int) -> list[int]:
    """What greedy decoding gives: often right, not always."""
    drafts: list[int] = []
    for _ in range(depth):
        drafts.append(int(logits_after([*sequence, *drafts]).argmax()))
    return drafts


def unlikeliest(sequence: list[int], depth: int) -> list[int]:
    drafts: list[int] = []
    for _ in range(depth):
        drafts.append(int(logits_after([*sequence, *drafts]).argmin()))
    return drafts


def always_2(sequence: list[int], depth: int) -> list[int]:
    return [2] * (len(sequence) % (depth + 1))  # now more, now fewer


SETTINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.6, top_k=4, seed=4),
    Sampling(temperature=1.5, top_p=0.8, seed=5),
)


@pytest.mark.parametrize(
    ("drafts", "drawn", "new"),
    [
        ([], [4], [4]),
        ([6, 7, 8], [6, 7, 9, 1], [6, 7, 9]),  # the example
        ([4, 4], [3, 4, 4], [3]),  # the second would be right, but for the first
        ([9, 9], [9, 9, 0], [9, 9, 0]),
    ],
)
def test_new_tokens(drafts: list[int], drawn: list[int], new: list[int]) -> None:
    assert new_tokens(drafts, drawn) == new


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_change_no_token(depth: int) -> None:
    prompts = [[0], [3, 1], [2, 2, 2], [5]]
    plain, num_right = decode(prompts, SETTINGS, 24, [nothing] * 4, depth)
    assert num_right == 0
    for guesses in ([likeliest] * 4, [unlikeliest] * 4, [always_2] * 4, [likeliest, always_2, nothing, unlikeliest]):
        ids, num_right = decode(prompts, SETTINGS, 24, guesses, depth)
        assert ids == plain
        assert num_right > 0 or guesses[0] is unlikeliest
    # And a sequence alone, with as many drafts as a tile takes, gives what it gives beside the others.
    for i, sampling in enumerate(SETTINGS):
        (ids,), num_right = decode([prompts[i]], [sampling], 24, [likeliest], 15)
        assert ids == plain[i]
        assert num_right > 0


def test_perfect_drafts_all_stand() -> None:
    sampling = Sampling(temperature=1.0, seed=8)
    (plain,), _ = decode([[1]], [sampling], 33, [nothing], 0)

    def oracle(sequence: list[int], depth: int) -> list[int]:
        return plain[len(sequence) - 1 :][:depth]

    (ids,), num_right = decode([[1]], [sampling], 33, [oracle], 10)
    assert ids == plain
    assert num_right == 30  # three sweeps of 11 tokens


def test_what_is_drawn_with_drafts_follows_the_distribution() -> None:
    """Three tokens in a row, over many seeds, against their probabilities in float64."""
    count, num_right = 2000, 0
    counts = dict.fromkeys(itertools.product(range(V), repeat=3), 0)
    for first in range(0, count, 4):
        samplings = [Sampling(temperature=1.2, top_p=0.9, seed=first + i) for i in range(4)]
        ids, right = decode([[1]] * 4, samplings, 3, [likeliest] * 4, 3)
        num_right += right
        for of_seed in ids:
            counts[tuple(of_seed)] += 1
    assert num_right > count / 2

    chi_square, num_cells, seen, rest = 0.0, 0, 0, 0.0
    for triple, times in counts.items():
        expected = count * np.prod([probabilities([1, *triple[:i]], 1.2, 0.9)[triple[i]] for i in range(3)])
        if expected >= 5:
            chi_square, num_cells, seen = chi_square + (times - expected) ** 2 / expected, num_cells + 1, seen + times
        else:
            assert expected > 0 or times == 0
            rest += expected
    chi_square += (count - seen - rest) ** 2 / rest
    assert num_cells > 30
    # With so many degrees of freedom chi-square is about normal: its cube root is, after Wilson and Hilferty (1931).
    score = ((chi_square / num_cells) ** (1 / 3) - (1 - 2 / (9 * num_cells))) / (2 / (9 * num_cells)) ** 0.5
    assert score < 3.1  # one seed in a thousand is above


def probabilities(ids: Sequence[int], temperature: float, top_p: float) -> np.ndarray:
    """Of the next token, float64 [V]: cut and made to sum to 1 again."""
    scores = logits_after(ids).astype(np.float64) / temperature
    p = np.exp(scores - scores.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()
