"""Who is decoded next: gives slots of the KV cache and rows of tiles to sequences. Needs no JAX, and does no maths.

Plans a sweep before the tokens of the one before it are known, which is what lets the host run ahead of the device;
or after, with drafts of what may follow.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramjax.decode.sweep_plan import Draw, Join, SweepPlan, TileRows, turns_in_a_row

if TYPE_CHECKING:  # which imports JAX
    from vramjax.decode.sampler import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence to decode."""

    prompt_ids: Sequence[int]
    limit: int  # tokens to draw at most
    stop_ids: frozenset[int] = frozenset()  # tokens after which nothing more is drawn
    sampling: Sampling | None = None  # how they are drawn; None: greedily


@dataclass(kw_only=True)
class _Sequence:
    """A sequence that has a slot."""

    request: Request
    request_idx: int
    slot: int
    num_drawn: int = 0  # tokens whose draw is planned


class Scheduler:
    """Plans sweeps over requests, which wait in a line until there is a slot for them.

    Invariant: a slot belongs to one sequence, from the sweep in which its prompt joins to the last one that draws a
    token for it; in each of these it draws one, and one more for each draft. Requests join in the order in which they
    were added; what is decoded goes on in the sweep of one that joins, which takes longer by its prompt. The prompts of
    one sweep take at most `max_chunks` blocks of `chunk_rows` rows.

    Example, 2 slots, and three requests of prompts of 5, 9 and 4 tokens, for 3, 1 and 2 new ones::

        sweep 1:  joins 0, 1                  draws 0 (at position 5), 1 (at 9)
        sweep 2:  joins 2, in the slot of 1   draws 0 (at 6), 2 (at 4)
        sweep 3:                              draws 0 (at 7), 2 (at 5)

    Whoever learns that a token was a stop id calls `finish`; by then more sweeps may have been planned, in which the
    sequence has a row for nothing. After a sweep with drafts, `accept` says how many of them were right.
    """

    def __init__(self, *, num_slots: int, tile_rows: int, chunk_rows: int, max_chunks: int) -> None:
        """A scheduler with nothing to do; a prompt must not take more than `max_chunks` chunks."""
        self._tile_rows, self._chunk_rows, self._max_chunks = tile_rows, chunk_rows, max_chunks
        self._free = list(range(num_slots))  # a heap: the lowest slot is taken first
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[int, _Sequence] = {}  # by request
        self._num_requests = 0

    def add(self, request: Request) -> int:
        """Puts a request at the end of the line and returns its number, counted from 0."""
        assert self._chunks_of(request) <= self._max_chunks
        request_idx = self._num_requests
        self._num_requests += 1
        if request.limit > 0:
            self._waiting.append((request_idx, request))
        return request_idx

    def next_sweep(self, known: Mapping[int, Sequence[int]] | None = None, *, max_turns: int = 1) -> SweepPlan | None:
        """The next sweep; None if there is nothing left to draw. Every call is one sweep on, or that many turns.

        Args:
          known: of requests whose tokens are all read: the last of them, and drafts of those that follow. Drafts must
            be fewer than the tokens that are left to draw. A request that is not here goes on from what the sweep
            before draws, whatever that will be; so if that one has drafts, all must be here.
          max_turns: how many sweeps it may be in a row. So many it is where all rows are of one tile, go on for as
            long, and nothing waits that would have to wait longer for a slot; else one.
        """
        for sequence in [s for s in self._running.values() if s.num_drawn == s.request.limit]:
            self.finish(sequence.request_idx)
        joining = self._join()
        if not self._running:
            return None
        rows, joins, draws = [], [], []
        nums_left = [sequence.request.limit - sequence.num_drawn for sequence in self._running.values()]
        most = 1 if known or joining or self._waiting else max_turns
        num_turns = turns_in_a_row(nums_left, most=most, tile_rows=self._tile_rows)
        for sequence in self._running.values():
            request, slot = sequence.request, sequence.slot
            draw = len(request.prompt_ids) + sequence.num_drawn
            position = draw - 1
            if sequence.request_idx in joining:
                position = -1  # a prompt's last row is in a block of its own
                tile_idx, row = divmod(len(rows), self._tile_rows)
                joins.append(Join(slot=slot, prompt_ids=request.prompt_ids, tile_idx=tile_idx, row=row))
            for i, token_id in enumerate((known or {}).get(sequence.request_idx, [-1])):
                assert i < request.limit - sequence.num_drawn
                tile_idx, row = divmod(len(rows), self._tile_rows)
                rows.append((slot, position + i, token_id, draw + i))
                draws.append(
                    Draw(request_idx=sequence.request_idx, slot=slot, tile_idx=tile_idx, row=row, is_draft=i > 0)
                )
            sequence.num_drawn += num_turns  # what drafts add is not known yet
        tiles = [
            TileRows.of(rows[first : first + self._tile_rows], self._tile_rows)
            for first in range(0, len(rows), self._tile_rows)
        ]
        return SweepPlan(joins=tuple(joins), tiles=tuple(tiles), draws=tuple(draws), num_turns=num_turns)

    @property
    def num_joining(self) -> int:
        """Requests that may join in the next sweep; it may be less."""
        return min(len(self._free), len(self._waiting))

    def accept(self, request_idx: int, num_right: int) -> None:
        """So many drafts of a request were right in the last sweep, which has drawn as many more tokens."""
        if num_right and request_idx in self._running:
            self._running[request_idx].num_drawn += num_right

    def finish(self, request_idx: int) -> None:
        """Draws nothing more for this request, which has joined; its slot is free from the next sweep on."""
        sequence = self._running.pop(request_idx, None)
        if sequence is not None:  # else the draw of its last token was planned
            heapq.heappush(self._free, sequence.slot)

    def _join(self) -> set[int]:
        """Gives slots to requests at the head of the line; those that have got one."""
        joining, chunks_left = set(), self._max_chunks
        while self._free and self._waiting and (num_chunks := self._chunks_of(self._waiting[0][1])) <= chunks_left:
            request_idx, request = self._waiting.popleft()
            slot = heapq.heappop(self._free)
            self._running[request_idx] = _Sequence(request=request, request_idx=request_idx, slot=slot)
            joining.add(request_idx)
            chunks_left -= num_chunks
        return joining

    def _chunks_of(self, request: Request) -> int:
        return -(-len(request.prompt_ids) // self._chunk_rows)
