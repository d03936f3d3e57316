"""Drafts by prompt lookup, against a plain search of everything there is."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramjax.decode.drafting import BYTES_PER_TOKEN, HIT_RATES, HIT_WEIGHT, Drafter, NgramDrafter


def searched_match(ids: list[int], max_n: int) -> int | None:
    """The index after the last earlier occurrence of the longest suffix of at most `max_n`."""
    for n in range(min(max_n, len(ids)), 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                return end
    return None


def searched_draft(ids: list[int], max_n: int, max_tokens: int) -> list[int]:
    index, longer = searched_match(ids, max_n), list(ids)
    if index is None:
        return []
    for i in range(max_tokens):
        longer.append(longer[index + i])
    return longer[len(ids) :]


TOKENS = st.lists(st.integers(0, 3), max_size=60)


@given(prompt=TOKENS, parts=st.lists(TOKENS, max_size=5), max_n=st.integers(1, 5))
def test_drafts_are_those_of_a_search(prompt: list[int], parts: list[list[int]], max_n: int) -> None:
    drafter, ids = NgramDrafter(prompt, max_n=max_n), list(prompt)
    for part in [[], *parts]:
        drafter.append(part)
        ids += part
        for max_tokens in (0, 1, 15):
            assert drafter.draft(max_tokens) == searched_draft(ids, max_n, max_tokens)
            assert len(drafter.chances(max_tokens)) == len(drafter.draft(max_tokens))


def test_the_example() -> None:
    drafter = NgramDrafter([7, 8, 9, 4, 7, 8])
    assert drafter.draft(5) == [9, 4, 7, 8, 9]
    assert drafter.draft(5) == [9, 4, 7, 8, 9], "a draft is not part of the sequence"
    drafter.append([9, 5])
    assert drafter.draft(5) == []
    drafter.append([4])
    assert drafter.draft(3) == [7, 8, 9]


def test_nothing_to_look_up() -> None:
    drafter: Drafter = NgramDrafter()
    assert (drafter.draft(15), drafter.chances(15)) == ([], [])
    drafter.append([3])
    assert (drafter.draft(15), drafter.chances(15)) == ([], [])
    drafter.append([3])
    assert drafter.draft(4) == [3, 3, 3, 3]


def test_a_longer_match_goes_before_a_later_one() -> None:
    ids = [1, 2, 3, 10, 3, 20, 2, 3, 30, 1, 2, 3]
    assert [NgramDrafter(ids, max_n=n).draft(1) for n in (1, 2, 3)] == [[30], [30], [10]]


def test_of_equal_matches_the_last_one_counts() -> None:
    assert NgramDrafter([5, 1, 5, 2, 5, 3, 5]).draft(2) == [3, 5]


def test_chances_rise_with_the_length_of_the_match() -> None:
    once, twice = NgramDrafter([1, 9, 2, 1]), NgramDrafter([1, 9, 5, 1, 9])
    assert once.chances(2) == pytest.approx([HIT_RATES[0], HIT_RATES[0] * HIT_RATES[1]])
    assert twice.chances(1) == pytest.approx([HIT_RATES[1]])
    long = NgramDrafter([*range(40), 99, *range(40)])  # 40 that agree, of which 3 are looked up
    assert long.chances(3) == pytest.approx([HIT_RATES[-1] ** i for i in (1, 2, 3)])


def test_what_is_appended_moves_the_chances() -> None:
    drafter = NgramDrafter([7, 8, 9, 4, 7, 8])
    drafter.append([9, 5, 7, 8])  # right after 2, wrong after 3; no match for 5, and so nothing said of 7 and 8
    rate = HIT_RATES[1] + HIT_WEIGHT * (1 - HIT_RATES[1])
    assert drafter.chances(1) == pytest.approx([rate - HIT_WEIGHT * rate])


def test_it_learns_whether_drafts_are_right_without_any_being_used() -> None:
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(400)]
    copies, wanders = NgramDrafter(text), NgramDrafter(text)
    for i in range(300):
        copies.append([text[i]])
        wanders.append([rng.randrange(50)])
    assert copies.chances(15)[-1] > 0.9
    wanders.append(text[7:9])
    assert wanders.chances(1)[0] < 0.2
    # In parts of any size, as a sweep gives them, it learns the same of tokens that are copied.
    parts = NgramDrafter(text)
    i = 0
    while i < 300:
        size = min(rng.randrange(1, 17), 300 - i)
        parts.append(text[i : i + size])
        i += size
    assert parts.chances(15) == pytest.approx(copies.chances(15))


def test_a_token_costs_the_same_whatever_was_before() -> None:
    """No rescans: the worst text, in which everything matches, of a length at which a search would take minutes."""
    start = time.perf_counter()
    drafter = NgramDrafter([1] * 100_000)
    for _ in range(2000):
        assert drafter.draft(15) == [1] * 15
        drafter.append([1, 1])
    assert time.perf_counter() - start < 10


def test_memory_of_a_token() -> None:
    chosen = random.Random(0)
    ids = [chosen.randrange(150_000) for _ in range(20_000)]
    tracemalloc.start()
    try:
        drafter = NgramDrafter(ids)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(drafter.draft(1)) <= 1
    assert BYTES_PER_TOKEN / 2 < taken / len(ids) < BYTES_PER_TOKEN
