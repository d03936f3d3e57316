"""Guesses of what a sequence goes on with, which are checked by a sweep of the model: what makes them, and n-grams.

A wrong guess costs rows of a sweep and changes no token (`acceptance.py`). How many are worth a row: `depth.py`. A
model that makes them: `model_drafting.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # which imports JAX
    from vramjax.decode.model_drafting import DraftedSequence

# How often the next token was the drafted one after 1, 2 - 3, 4 - 7, 8 - 15, and 16 or more that were: answers of a
# small chat model to all kinds of prompts. Where a sequence begins; its own tokens move it.
HIT_RATES = (0.25, 0.55, 0.8, 0.94, 0.98)
HIT_WEIGHT = 1 / 16  # of one more token in the average
BYTES_PER_TOKEN = 400  # of a sequence, in an `NgramDrafter`


class Drafter(Protocol):
    """Drafts for one sequence. It learns from what is appended how good its drafts were."""

    def append(self, ids: Sequence[int]) -> None:
        """Adds tokens that are certain to the sequence."""
        ...

    def chances(self, max_tokens: int) -> list[float]:
        """How likely the first, the first two, ... of the next draft are all right: at most `max_tokens`, falling."""
        ...

    def draft(self, max_tokens: int) -> list[int]:
        """What may come next; at most `max_tokens`, none if there is no guess. The sequence stays as it is."""
        ...


@dataclass(frozen=True, kw_only=True)
class Drafters:
    """All that drafts for one sequence, and learns from all of its tokens. Whoever knows what each costs chooses."""

    lookup: Drafter
    model: DraftedSequence | None = None

    def append(self, ids: Sequence[int]) -> None:
        """Adds tokens that are certain to the sequence."""
        self.lookup.append(ids)
        if self.model is not None:
            self.model.append(ids)


class NgramDrafter:
    """Guesses that what followed the same words before follows them again ("prompt lookup"); it needs no model.

    The draft is what followed the most recent earlier occurrence of the longest possible suffix, of `max_n` tokens or
    less; where it runs into the end it goes on with itself.

    Invariant: `_following` has every n-gram of the sequence but those at its very end, with the index of what came
    after its last occurrence. A token costs `max_n` entries, less than `BYTES_PER_TOKEN`; nothing is ever searched.

    Example: after [7, 8, 9, 4, 7, 8] the longest suffix that was there before is (7, 8), index 2 came after it, and the
    draft of 5 tokens is [9, 4, 7, 8, 9]. When [9, 5] is appended, two tokens are counted: one after two that agreed,
    which was right, and one after three, which was not.
    """

    def __init__(self, ids: Sequence[int] = (), *, max_n: int = 3) -> None:
        """Begins with a prompt, from whose repetitions nothing is learnt about those of the answer."""
        assert max_n > 0
        self._max_n = max_n
        self._ids: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}
        self._hit_rates = list(HIT_RATES)
        for token_id in ids:
            self._push(token_id)
        self._match = self._find()

    def append(self, ids: Sequence[int]) -> None:
        index, length = self._match
        for token_id in ids:
            if length:
                is_hit = self._ids[index] == token_id
                bucket = _bucket(length)
                self._hit_rates[bucket] += HIT_WEIGHT * (is_hit - self._hit_rates[bucket])
                index, length = (index + 1, length + 1) if is_hit else (0, 0)
            self._push(token_id)
        self._match = self._find()

    def chances(self, max_tokens: int) -> list[float]:
        _, length = self._match
        chances, chance = [], 1.0
        for i in range(max_tokens if length else 0):
            chance *= self._hit_rates[_bucket(length + i)]
            chances.append(chance)
        return chances

    def draft(self, max_tokens: int) -> list[int]:
        index, length = self._match
        if not length:
            return []
        period = len(self._ids) - index  # after so many tokens it would draft what it has just drafted
        return [self._ids[index + i % period] for i in range(max_tokens)]

    def _push(self, token_id: int) -> None:
        for n in range(1, min(self._max_n, len(self._ids)) + 1):
            self._following[tuple(self._ids[-n:])] = len(self._ids)
        self._ids.append(token_id)

    def _find(self) -> tuple[int, int]:
        """Where the draft begins, and how many tokens before it are those at the end; none: (0, 0)."""
        ids = self._ids
        for n in range(min(self._max_n, len(ids)), 0, -1):
            index = self._following.get(tuple(ids[-n:]))
            if index is not None:
                length = n
                while length < min(index, _LONGEST) and ids[index - 1 - length] == ids[-1 - length]:
                    length += 1
                return index, length
        return 0, 0


_LONGEST = 1 << (len(HIT_RATES) - 1)  # matches that are longer are all the same


def _bucket(length: int) -> int:
    return min(length.bit_length(), len(HIT_RATES)) - 1
