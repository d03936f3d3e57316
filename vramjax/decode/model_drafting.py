"""Drafts of a small model that stays on the device: what it thinks comes next, several tokens for every sequence.

It has an engine of its own, in whose sweeps nothing is uploaded. Those of one draft are queued one behind the other, as
a token goes from one to the next on the device, and all tokens are read at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vramjax.decode.acceptance import num_right
from vramjax.decode.engine import Drawn, Engine
from vramjax.decode.sampler import GREEDY, Sampling, sampling_of
from vramjax.decode.sweep_plan import Join, SweepPlan, TileRows, turns_in_a_row

HIT_RATE = 0.7  # how often a draft is right if those before it were, before anything is known of that
_WEIGHT = 1 / 16  # of one more draft in a sequence's rate
_COMMON_WEIGHT = 1 / 64  # and in that of all sequences, with which the next one begins
_RETURNING = 1 / 64  # of the way to `HIT_RATE`, for each sweep without drafts: so that they are tried again
_MEASURED_DEPTH = 4


class DraftedSequence:
    """A sequence for which a model drafts, as far as that has it in its cache.

    Invariant: the first `num_cached` positions of its slot hold keys and values of the sequence's own tokens. What
    stands after them is of guesses that were wrong, and is written anew before it is read.

    Example: 10 tokens are known, and the draft is [6, 7, 8]; after it all 10 are in the cache, and behind them 6 and
    7, as nothing had to follow 8. If [6, 9] is appended, 11 tokens are right there, and the 9 goes in first when the
    next draft is made; if [6, 7, 8, 4] is, then 12 are right, and the 8 and the 4 go in.
    """

    def __init__(self, model: DraftModel, prompt_ids: Sequence[int], slot: int, sampling: Sampling | None) -> None:
        """Nothing of the prompt is in the cache yet."""
        self.ids = list(prompt_ids)
        self.num_cached = 0
        self.slot, self.sampling = slot, sampling or GREEDY
        self._model, self._hit_rate = model, model.hit_rate
        self._drafted: list[int] = []  # since the last token was appended

    def append(self, ids: Sequence[int]) -> None:
        """Adds tokens that are certain to the sequence, and learns from them how good the last draft was."""
        drafted, self._drafted = self._drafted, []
        if drafted:
            num_hits = num_right(drafted, ids)
            self.num_cached = len(self.ids) + min(num_hits, len(drafted) - 1)
            for is_hit in [*[True] * num_hits, *[False] * (num_hits < len(drafted))]:
                self._hit_rate += _WEIGHT * (is_hit - self._hit_rate)
                self._model.hit_rate += _COMMON_WEIGHT * (is_hit - self._model.hit_rate)
        else:
            self._hit_rate += _RETURNING * (HIT_RATE - self._hit_rate)
        self.ids += ids

    def chances(self, max_tokens: int) -> list[float]:
        """How likely the first, the first two, ... of the next draft are all right: at most `max_tokens`, falling."""
        return [self._hit_rate**i for i in range(1, 1 + min(max_tokens, self.room))]

    def note(self, drafted: list[int]) -> None:
        """This was drafted; so all tokens that are known are in the cache."""
        self.num_cached, self._drafted = len(self.ids), drafted

    @property
    def room(self) -> int:
        """Tokens that the model's context has room to draft: the last of them takes no position."""
        return max(0, self._model.context - len(self.ids) + 1)


class DraftModel:
    """What a small model thinks comes next in the sequences of a large one, whose slots it has too.

    A token is drawn as the large model will draw it, with the same noise (`acceptance.py` says why).

    Invariant: nothing outside depends on how a draft was made but the time that it takes. A draft that failed or was
    interrupted leaves nothing behind: sequences that were begun before are over then, and others begin with a prompt.

    Example: 2 sequences, of which 8 and 11 tokens are known, and all but the last are in the cache. `draft(both,
    [3, 1])` queues three sweeps of a tile: with the last token of each, then with what was drafted for the first
    sequence, twice; and reads 3 + 1 tokens.
    """

    def __init__(self, engine: Engine, *, vocab_size: int) -> None:
        """Drafts of an engine that has at least as many slots as sequences will be decoded.

        Args:
          engine: all of its layers stay on the device; its logits are not asked for.
          vocab_size: of the large model. The small one may have names for tokens that the large one has none for,
            as both may have some that no text has.
        """
        self._engine, self._vocab_size = engine, vocab_size
        self.context = engine.spec.context
        self.hit_rate = HIT_RATE  # of all sequences
        self._is_compiled_for_all = False  # for greedy decoding it is
        self.draft_s = self._measure()

    def begin(self, prompt_ids: Sequence[int], slot: int, sampling: Sampling | None) -> DraftedSequence:
        """Drafts for a sequence that has this slot until it ends; its prompt is read when there is something to draft.

        What another sequence has left in the slot does not matter.
        """
        if sampling is not None and not sampling.is_greedy and not self._is_compiled_for_all:
            self._is_compiled_for_all = True
            # Or a draft's time would be that of a compiler.
            self.draft([DraftedSequence(self, [0], slot, sampling)], [1 + self._engine.turns_per_call])
        return DraftedSequence(self, prompt_ids, slot, sampling)

    def draft(self, sequences: Sequence[DraftedSequence], depths: Sequence[int]) -> list[list[int]]:
        """So many tokens for each sequence, or as many as the context has room for; waits for them."""
        depths = [min(depth, each.room) for each, depth in zip(sequences, depths, strict=True)]
        drafting = [each for each, depth in zip(sequences, depths, strict=True) if depth]
        if not drafting:
            return [[] for _ in sequences]
        with self._engine.work(self, begins=True):
            sweeps = _Sweeps(self._engine)
            sweeps.catch_up(drafting)
            step = 1
            while step < max(depths):
                step += sweeps.go_on(
                    [(each, depth - step) for each, depth in zip(sequences, depths, strict=True) if depth > step], step
                )
            drawn = sweeps.read()
        drafts = []
        for each, depth in zip(sequences, depths, strict=True):
            ids = drawn[each.slot] if depth else []
            if ids:
                each.note(ids)
            drafts.append(ids[: next((i for i, token_id in enumerate(ids) if token_id >= self._vocab_size), depth)])
        return drafts

    def _measure(self) -> float:
        """Seconds of one more token, for one sequence."""
        begun = self.begin([0], 0, None)
        depth = min(max(_MEASURED_DEPTH, 1 + self._engine.turns_per_call), begun.room)
        self.draft([begun], [depth])  # whatever is done once
        began_at = time.perf_counter()
        self.draft([begun], [depth])
        return (time.perf_counter() - began_at) / depth


class _Sweeps:
    """Sweeps of a draft: each goes on from what the one before has drawn, which stays on the device until `read`."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._spec = engine, engine.spec
        self._last_ids = engine.no_ids()
        self._drawn: list[Drawn] = []  # of each call
        self._places: dict[int, list[tuple[int, int, int, int]]] = {}  # by slot: call, tile, turn and row of its tokens

    def catch_up(self, sequences: Sequence[DraftedSequence]) -> None:
        """Brings all that is known of each sequence into its slot, and draws what follows."""
        # What is longer than a tile, a prompt as a rule, goes through the layers in chunks.
        long = [each for each in sequences if len(each.ids) - self._first(each) > self._spec.tile_rows]
        for i, some in enumerate(self._that_join_together(long)):
            if i:  # chunks of more than two sweeps would have no room
                self._last_ids.block_until_ready()
            joins, rows = [], []
            for row, each in enumerate(some):
                first = self._first(each)
                joins.append(Join(slot=each.slot, prompt_ids=each.ids[first:], tile_idx=0, row=row, first=first))
                rows.append((each, -1, -1))
            self._run([rows], joins)
        short = [each for each in sequences if each not in long]
        before = [
            (each, position, each.ids[position])
            for each in short
            for position in range(self._first(each), len(each.ids) - 1)
        ]
        # Those before the last of a sequence are in an earlier tile or in the same one.
        last = [(each, len(each.ids) - 1, each.ids[-1]) for each in short]
        self._run_tiles(before, last)

    def go_on(self, left: Sequence[tuple[DraftedSequence, int]], step: int) -> int:
        """Draws the token after the last that was drawn, which stands `step` places behind those that are known.

        Of sequences that each have so many tokens left to draw; several, if all of them have. How many it drew.
        """
        most, tile_rows = self._engine.turns_per_call, self._spec.tile_rows
        num_turns = turns_in_a_row([number for _, number in left], most=most, tile_rows=tile_rows)
        self._run_tiles([], [(each, len(each.ids) - 1 + step, -1) for each, _ in left], num_turns=num_turns)
        return num_turns

    def read(self) -> dict[int, list[int]]:
        """The tokens that were drawn for each slot; waits for them."""
        ids = [drawn.read_ids() for drawn in self._drawn]
        return {
            slot: [int(ids[call][tile][turn, row]) for call, tile, turn, row in places]
            for slot, places in self._places.items()
        }

    def _first(self, sequence: DraftedSequence) -> int:
        """The first position that is not in the cache; or the last one, from which the next token is drawn."""
        return min(sequence.num_cached, len(sequence.ids) - 1)

    def _that_join_together(self, sequences: Sequence[DraftedSequence]) -> list[list[DraftedSequence]]:
        """Cut so that no sweep has more chunks or rows than one of this engine may have."""
        sweeps: list[list[DraftedSequence]] = []
        chunks_left = 0
        for each in sequences:
            num_chunks = -(-(len(each.ids) - self._first(each)) // self._spec.chunk_rows)
            if not sweeps or num_chunks > chunks_left or len(sweeps[-1]) == self._spec.tile_rows:
                sweeps.append([])
                chunks_left = self._spec.max_chunks
            sweeps[-1].append(each)
            chunks_left -= num_chunks
        return sweeps

    def _run_tiles(
        self,
        before: Sequence[tuple[DraftedSequence, int, int]],
        drawing: Sequence[tuple[DraftedSequence, int, int]],
        *,
        num_turns: int = 1,
    ) -> None:
        """Rows (sequence, position, id), from the latter of which tokens are drawn; in as many sweeps as it takes."""
        size, rows = self._spec.tile_rows, [*before, *drawing]
        tiles = [rows[first : first + size] for first in range(0, len(rows), size)]
        most = self._spec.max_rows // size
        for first in range(0, len(tiles), most):
            self._run(tiles[first : first + most], [], num_before=len(before) - first * size, num_turns=num_turns)

    def _run(
        self,
        tiles: Sequence[Sequence[tuple[DraftedSequence, int, int]]],
        joins: Sequence[Join],
        *,
        num_before: int = 0,
        num_turns: int = 1,
    ) -> None:
        """Queues a plan; from its first `num_before` rows nothing is drawn."""
        tables, sampling, call_idx = [], [], len(self._drawn)
        for tile_idx, tile in enumerate(tiles):
            num_undrawn = min(max(0, num_before - tile_idx * self._spec.tile_rows), len(tile))
            # Rows that are drawn from come first; attention goes by positions.
            rows = []
            for row, (each, position, token_id) in enumerate(drawn := tile[num_undrawn:]):
                places = self._places.setdefault(each.slot, [])
                rows.append((each.slot, position, token_id, len(each.ids) + len(places)))
                places += [(call_idx, tile_idx, turn, row) for turn in range(num_turns)]
            rows += [(each.slot, position, token_id, -1) for each, position, token_id in tile[:num_undrawn]]
            tables.append(TileRows.of(rows, self._spec.tile_rows))
            free = [GREEDY] * (self._spec.tile_rows - len(drawn))
            sampling.append(sampling_of((*(each.sampling for each, _, _ in drawn), *free)))
        plan = SweepPlan(joins=tuple(joins), tiles=tuple(tables), draws=(), num_turns=num_turns)
        drawn = self._engine.run(plan, self._last_ids, sampling)
        self._last_ids = drawn.last_ids
        self._drawn.append(drawn)
