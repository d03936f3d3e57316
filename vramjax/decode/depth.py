"""How many drafts each sequence gets in a sweep: as many as make the most tokens a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_DEPTH = 15
SLACK = 0.02  # of the time without drafts: what is allowed is 0.03, but times are not known to the last
_KEPT = 1 - 1 / 256  # of what was spent and saved before, after a sweep: what was gained long ago is not there to spend


@dataclass(frozen=True, kw_only=True)
class SweepCost:
    """What a sweep takes, in seconds: measured or planned.

    Example: with tile_rows=16, streaming_s=0.13 and tile_s=0.005 a sweep takes 0.13 s with 1 row and with 400; with
    streaming_s=0, one of 16 rows takes 0.005 s and one of 17 takes 0.01. With measured_s={1: 0.13, 2: 0.133} too, one
    of 17 rows takes 0.133 s, and so does one of 400.
    """

    tile_rows: int  # a tile counts the same whether one of its rows is in use or all are, which takes a little longer
    tile_s: float  # one tile through all layers and the head, all weights being there
    streaming_s: float = 0.0  # the uploads of a sweep, during which tiles are computed
    measured_s: Mapping[int, float] = field(default_factory=dict)  # by number of tiles, and not falling: goes before
    waiting_s: float = 0.0  # a sweep with drafts: until the tokens of the one before are read
    draft_s: float = 0.0  # drafting one more token for all sequences

    def seconds(self, num_rows: int, depth: int) -> float:
        """Of a sweep of so many rows, of which the longest draft has `depth`."""
        num_tiles = -(-num_rows // self.tile_rows)
        drafting_s = self.waiting_s + depth * self.draft_s if depth else 0.0
        return self._tiles_s(num_tiles) + drafting_s

    def _tiles_s(self, num_tiles: int) -> float:
        if num_tiles in self.measured_s:
            return self.measured_s[num_tiles]
        fewer_s = (seconds for n, seconds in self.measured_s.items() if n < num_tiles)
        return max(self.streaming_s, num_tiles * self.tile_s, *fewer_s)


def expected_rate(chances: Sequence[Sequence[float]], depths: Sequence[int], cost: SweepCost) -> float:
    """Tokens a second of a sweep in which each sequence has a draft of such a depth."""
    num_tokens = sum(1 + sum(of_draft[:depth]) for of_draft, depth in zip(chances, depths, strict=True))
    return num_tokens / cost.seconds(len(depths) + sum(depths), max(depths))


class DepthPlanner:
    """Deals rows out to the drafts of all sequences of a sweep.

    Of each depth and number of rows that is possible, the one is taken that promises the most tokens a second; rows go
    to the drafts that are likeliest right, whose sequence ever they are of. To draft nothing is among the choices.

    Invariant: by the costs that were given, all sweeps so far took at most 1 + `slack` times what their tokens would
    have taken without drafts. A sweep that would break this if all its drafts were wrong is not taken; so where drafts
    cost something, the first sweeps have none.

    Example: two sequences, a tile of 4 rows, chances [0.9, 0.8, 0.7] and [0.5, 0.2]. Two rows are the sequences' own,
    the other two go to 0.9 and 0.8: depths [2, 0], and 3.7 tokens are expected of the sweep. A second tile would bring
    1.4 more, and is worth it where it makes a sweep less than 1.38 times as long.
    """

    def __init__(self, *, max_rows: int, max_depth: int = MAX_DEPTH, slack: float = SLACK) -> None:
        """Plans sweeps of at most `max_rows` rows, or as many as there are sequences."""
        self._max_rows, self._max_depth, self._slack = max_rows, max_depth, slack
        self._spent_s = self._plain_s = 0.0

    def plan(self, chances: Sequence[Sequence[float]], cost: SweepCost) -> list[int]:
        """The depth of each sequence's draft, given how likely its first, its first two, ... tokens are all right."""
        num_sequences = len(chances)
        # Depth by depth, so that of equal chances the first are those of a draft's beginning.
        by_depth = np.zeros((self._max_depth, num_sequences))
        for i, of_sequence in enumerate(chances):
            of_draft = of_sequence[: self._max_depth]
            by_depth[: len(of_draft), i] = of_draft
        best, best_rate = [0] * num_sequences, num_sequences / cost.seconds(num_sequences, 0)
        for depth in self._depths(by_depth, cost):
            likely = np.argsort(-by_depth[:depth], axis=None, kind="stable")
            likely = likely[: np.count_nonzero(by_depth[:depth])]
            for num_rows in self._numbers_of_rows(num_sequences, len(likely), cost):
                seconds = cost.seconds(num_rows, depth)
                taken = likely[: num_rows - num_sequences]
                rate = (num_sequences + by_depth.flat[taken].sum()) / seconds
                if rate > best_rate and self._may_spend(seconds, cost.seconds(num_sequences, 0)):
                    best, best_rate = np.bincount(taken % num_sequences, minlength=num_sequences).tolist(), rate
        return best

    def record(
        self,
        depths: Sequence[int],
        num_tokens: Sequence[int],
        cost: SweepCost,
        *,
        has_waited: bool = False,
        more_s: float = 0.0,
    ) -> None:
        """Takes note of a sweep.

        Args:
          depths: each sequence's.
          num_tokens: how many it gave, drafts and the one after.
          cost: of sweeps.
          has_waited: the one before was read first, which costs the same if there was nothing to draft then.
          more_s: what its drafts have taken beyond their cost.
        """
        num_sequences = len(depths)
        self._spent_s, self._plain_s = self._spent_s * _KEPT, self._plain_s * _KEPT
        self._spent_s += cost.seconds(num_sequences + sum(depths), max(depths)) + more_s
        if has_waited and not any(depths):
            self._spent_s += cost.waiting_s
        self._plain_s += cost.seconds(num_sequences, 0) * sum(num_tokens) / num_sequences

    def _may_spend(self, seconds: float, plain_s: float) -> bool:
        """Whether a sweep may take so long, even if it gives one token a sequence."""
        return self._spent_s + seconds <= (1 + self._slack) * (self._plain_s + plain_s)

    def _depths(self, by_depth: np.ndarray, cost: SweepCost) -> Sequence[int]:
        deepest = int(np.count_nonzero(by_depth.any(axis=1)))
        return range(1, deepest + 1) if cost.draft_s else [deepest] if deepest else []

    def _numbers_of_rows(self, num_sequences: int, num_drafts: int, cost: SweepCost) -> list[int]:
        """Whole tiles, and the most that there can be: one row less costs the same."""
        most = min(self._max_rows, num_sequences + num_drafts)
        first = num_sequences // cost.tile_rows + 1
        tiles = [n * cost.tile_rows for n in range(first, most // cost.tile_rows + 1)]
        return sorted({n for n in (*tiles, most) if n > num_sequences})
