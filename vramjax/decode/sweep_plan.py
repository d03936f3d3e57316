"""What one sweep computes: which token of which sequence is in which row of which tile. Numbers only; needs no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TileRows:
    """The rows of a decode tile in one sweep, an int32 of each kind for each of its W rows.

    A row is one token of one sequence. Several rows may be of one sequence, at different positions: each sees the keys
    and values of those before it, which are written first. What a sequence's slot holds past a row's own position is
    never read, and so need not be right.

    Invariant: rows in use come first.

    Example, a tile of 4. The sequence in slot 0 decodes the token at position 7, and draws the one at 8. That in slot 2
    joins in this sweep: its prompt of 5 tokens is no row of a tile, but the token at position 5 is drawn from one::

        slots      0  2  0  0
        positions  7 -1 -1 -1
        ids       -1 -1 -1 -1
        draws      8  5 -1 -1
    """

    slots: np.ndarray  # whose keys and values a row adds to and sees
    positions: np.ndarray  # where the row's token stands; -1: the layers do not compute this row
    ids: np.ndarray  # the row's token; -1: the one that was last drawn for its slot
    draws: np.ndarray  # where the token will stand that is drawn from the row's logits; -1: none, nor logits of the row

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]], tile_rows: int) -> TileRows:
        """The tile with these rows (slot, position, id, draw); those that are left are not in use."""
        table = np.tile(np.array([[0], [-1], [-1], [-1]], np.int32), tile_rows)
        table[:, : len(rows)] = np.array(rows, np.int32).reshape(-1, 4).T
        slots, positions, ids, draws = table
        return cls(slots=slots, positions=positions, ids=ids, draws=draws)

    @property
    def table(self) -> np.ndarray:  # int32 [4, W]
        """All of it in one array, in the order of the fields: one copy to the device."""
        return np.stack([self.slots, self.positions, self.ids, self.draws])

    @property
    def num_decoded(self) -> int:
        """Rows that go through the layers."""
        return int(np.sum(self.positions >= 0))


def turns_in_a_row(nums_left: Sequence[int], *, most: int, tile_rows: int) -> int:
    """How many sweeps rows with so many tokens left to draw go on for in one plan: all that one may be of, or one."""
    return most if len(nums_left) <= tile_rows and min(nums_left) >= most else 1


@dataclass(frozen=True, kw_only=True)
class Join:
    """A sequence whose prompt goes through the layers in this sweep, and whose next token is drawn at its end."""

    slot: int
    prompt_ids: Sequence[int]
    tile_idx: int  # where its token is drawn
    row: int
    first: int = 0  # position of the first of `prompt_ids`; what stands before it is in the cache already


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A token that a sweep draws, and whose it is."""

    request_idx: int
    slot: int
    tile_idx: int
    row: int
    is_draft: bool = False  # the row's own token is a guess: it is a row of the same sequence as the one before


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """One sweep: prompts that join, tiles of rows, and what is drawn at its end.

    Or several, of the same rows: in each turn after the first a row's token is the one that it drew in the turn before,
    and stands one position on.
    """

    joins: tuple[Join, ...]
    tiles: tuple[TileRows, ...]
    draws: tuple[Draw, ...]  # in the order of rows; of each turn
    num_turns: int = 1  # more than one only without joins and drafts, and with one tile

    @property
    def has_drafts(self) -> bool:
        """Whether it takes this sweep's tokens to know where the next one begins."""
        return any(draw.is_draft for draw in self.draws)

    @property
    def num_decoded(self) -> int:
        """Rows of tiles that go through the layers."""
        return sum(tile.num_decoded for tile in self.tiles)
