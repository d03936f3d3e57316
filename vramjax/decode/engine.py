"""The decode engine: sweeps of rows, which begin as token ids, go through all layers, and end in token ids.

Which rows a sweep has is told by a plan, how they go through the layers is the business of `layer_loop.py`, and what
becomes of the tokens is up to `decoding.py`. Both ends of the model are on the first device.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from vramjax.decode.decoding import Decoding
from vramjax.decode.layer_loop import Block, LayerLoop
from vramjax.decode.sampler import RowSampling, Sampling
from vramjax.decode.scheduler import Request
from vramjax.decode.spec import EngineSpec
from vramjax.decode.speculation import Speculation
from vramjax.decode.sweep_plan import Join, SweepPlan, TileRows
from vramjax.decode.tile_programs import Tile, TileEnd, begin_tile, draw_tile, embed_step, end_tile, take_row
from vramjax.errors import VramjaxError, raise_if_interrupt
from vramjax.model.head import HeadWeights
from vramjax.residency.controller import Controller
from vramjax.residency.multi import MultiController

_SHORT_SWEEPS_AHEAD = 3


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What a sweep ends in, on the device."""

    last_ids: jax.Array  # int32 [B]: the token last drawn for each slot; anything where it had drafts
    ids: tuple[jax.Array, ...]  # int32 [W] of each tile: what was drawn from its rows; of several turns [turns, W]
    logits: tuple[jax.Array, ...]  # float32 [W, V] of each tile: what tokens were drawn from; () if not asked for

    def read_ids(self) -> list[np.ndarray]:  # int32 [turns, W] of each tile
        """Waits for what was drawn."""
        return [np.atleast_2d(tile) for tile in self.ids]


class Engine:
    """Sweeps over weights that a residency controller provides, for as many sequences at once as the cache has slots.

    Invariant: a row's bits depend on its own sequence alone, never on the other rows of a sweep, on which row or slot
    it has, or on how many slots there are. Between two sweeps the KV cache of every layer is whole, and positions past
    a row's own are never read, so that a sequence leaves nothing behind for the next one in its slot, nor a draft that
    was wrong for the token that comes in its place.

    Example: with tile_rows=8 and chunk_rows=128 a prompt of 300 tokens crosses layer 0 in three chunks, then layer 1,
    and so on: one sweep, through which a tile of the sequences that are being decoded goes too. Each new token of these
    is one more sweep of 8 rows, of which as many are in use as there are sequences; with more than 8, of two tiles.
    """

    def __init__(
        self,
        *,
        spec: EngineSpec,
        head: HeadWeights,
        controller: Controller | MultiController,
        device: jax.Device | Sequence[jax.Device],
        speculation: Speculation | None = None,
        gives_logits: bool = True,
    ) -> None:
        """Makes the KV cache of every layer on the layer's device.

        Args:
          spec: what to compile.
          head: both ends of the model, on the first device.
          controller: provides the layers.
          device: the controller's device; those of a `MultiController`, in the order of its controllers.
          speculation: drafts for all that is decoded; None: a token a sweep.
          gives_logits: whether there are any for `run` to return; sweeps that are queued without them take less memory.
        """
        self.spec, self.speculation = spec, speculation
        self._gives_logits, self._end_tile = gives_logits, end_tile if gives_logits else draw_tile
        self._head = head
        self._device, *_ = devices = list(device) if isinstance(device, Sequence) else [device]
        layers = controller if isinstance(controller, MultiController) else MultiController([controller])
        self._loop = LayerLoop(spec, layers, devices)
        self._lock = threading.Lock()  # held while a decoding works; between two of its tokens another may begin
        self._current: object | None = None  # the decoding whose keys and values the cache holds
        self._closed = False

    def compile(self) -> None:
        """Runs every program of greedy decoding once, on zeros, so that no prompt has to wait for a compiler.

        Where a sweep is one program, those that draw in another way, or whose logits are asked for, are compiled when
        they are first needed.

        Takes the memory of two more layers while it runs. What it leaves in the cache no sequence sees.
        """
        spec, last_ids = self.spec, self.no_ids()
        tile = begin_tile(self._head, last_ids, TileRows.of([], spec.tile_rows).table, spec=spec.head)
        h = tile.h
        for num_rows in spec.block_sizes:
            block = embed_step(self._head, self._put(np.zeros(num_rows, np.int32)), spec=spec.head)
            h = take_row(h, 0, block, 0)
        greedy = RowSampling.of([Sampling()] * spec.tile_rows)
        jax.block_until_ready(self._end_tile(self._head, h, tile.slots, tile.draws, last_ids, greedy, spec=spec.head))
        self._loop.compile(self._head, last_ids, greedy)

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop_ids: frozenset[int] = frozenset(),
        on_logits: Callable[[np.ndarray], None] | None = None,
    ) -> Iterator[int]:
        """An iterator of one sequence's new token ids; see `decode`. `on_logits` gets float32 logits [V] of each."""
        limit = self.spec.max_new_tokens(len(prompt_ids), max_new_tokens)
        request = Request(prompt_ids=prompt_ids, limit=limit, stop_ids=stop_ids, sampling=sampling)
        decoding = self.decode([request], on_logits=on_logits and (lambda _, row: on_logits(row)))
        return (token.id for token in decoding)

    def decode(
        self, requests: Sequence[Request], *, on_logits: Callable[[int, np.ndarray], None] | None = None
    ) -> Decoding:
        """An iterator of new tokens, as they come; work begins with the first `next`.

        The cache belongs to one decoding: one that is asked for more after another one has begun raises VramjaxError.

        Args:
          requests: the sequences, each of which ends in a stop id or at its limit.
          on_logits: gets the place of a request and the float32 logits [V] of each of its tokens, before sampling; it
            costs a copy to the host.

        Raises:
          ConfigError: a prompt is empty, has an id out of range, or leaves no room in the context.
          VramjaxError: the engine is closed.
        """
        self._check_open()
        return Decoding(self, requests, on_logits=on_logits)

    def close(self) -> None:
        """Gives all device memory back."""
        self._closed = True
        self._loop.close()
        for array in self._head.values():
            array.delete()

    @contextlib.contextmanager
    def work(self, decoding: object, *, begins: bool) -> Iterator[None]:
        """Whatever a decoding does with this engine it does in here, one at a time; the last that began has the cache.

        After a failure neither the cache nor what was uploaded is trusted. A step that failed has used its cache up;
        and one that fails on the device, long after it was called, leaves arrays behind that fail whoever is given
        them.

        Raises:
          VramjaxError: the engine is closed, or another decoding has begun since this one did.
        """
        with self._lock:
            self._check_open()
            if begins:
                self._current = decoding
            if self._current is not decoding:
                raise VramjaxError(
                    "another generation has begun on this model, which works on one at a time; finish one before you "
                    "start the next, or give generate_many all prompts"
                )
            try:
                yield
            except BaseException as error:
                self._loop.forget()
                raise_if_interrupt(error)
                raise

    def no_ids(self) -> jax.Array:
        """The last token of every slot where none was drawn: anything."""
        return self._put(np.zeros(self.spec.num_slots, np.int32))

    @property
    def turns_per_call(self) -> int:
        """Sweeps in a row that one plan may be of."""
        return self.spec.turns_per_call if self._loop.has_tile_sweeps else 1

    def plans_ahead_of(self, plan: SweepPlan) -> int:
        """How many plans may be queued after this one, which is not waited for.

        One is enough where the host queues it in far less time than it takes. Sweeps in one program are short, and hold
        no memory in the queue; there a host that is late once must not leave the device idle.
        """
        return _SHORT_SWEEPS_AHEAD if self._is_one_tile(plan) and plan.num_turns == 1 else 1

    def run(
        self,
        plan: SweepPlan,
        last_ids: jax.Array,
        sampling: Sequence[RowSampling],
        *,
        keep_logits: bool = False,
    ) -> Drawn:
        """Queues the sweeps of a plan.

        Args:
          plan: its rows.
          last_ids: int32 [B], from the sweep before.
          sampling: how tokens are drawn, for each tile.
          keep_logits: whether logits are returned.
        """
        assert len(sampling) == len(plan.tiles) and (self._gives_logits or not keep_logits)
        if self._is_one_tile(plan):
            (tile,), (of_tile,) = plan.tiles, sampling
            assert plan.num_turns == 1 or np.array_equal(tile.positions < 0, tile.draws < 0), (
                "rows go on from their draws"
            )
            end = self._loop.sweep_tile(
                self._head, tile, last_ids, of_tile, num_turns=plan.num_turns, gives_logits=keep_logits
            )
            ends = [end]
        else:
            assert plan.num_turns == 1, "several sweeps in a row are of one tile, and one program"
            ends = self._sweep_blocks(plan, last_ids, sampling)
        for end in ends:
            end.ids.copy_to_host_async()
        logits = tuple(end.logits for end in ends if end.logits is not None) if keep_logits else ()
        return Drawn(last_ids=ends[-1].last_ids, ids=tuple(end.ids for end in ends), logits=logits)

    def _sweep_blocks(
        self, plan: SweepPlan, last_ids: jax.Array, sampling: Sequence[RowSampling]
    ) -> list[TileEnd]:  # of each tile
        """Any sweep."""
        prompts = [self._blocks(join) for join in plan.joins]
        # A tile from which only first tokens are drawn has nothing for the layers to do, and begins after them: the
        # device waits for the first layer of a prompt.
        decoding = [tile.num_decoded > 0 for tile in plan.tiles]
        tiles = {i: self._begin(plan.tiles[i], last_ids) for i, decodes in enumerate(decoding) if decodes}
        decoded = {i: self._loop.tile_block(tile) for i, tile in tiles.items()}
        self._loop.sweep([*itertools.chain(*prompts), *decoded.values()])
        tiles |= {i: self._begin(plan.tiles[i], last_ids) for i, decodes in enumerate(decoding) if not decodes}
        rows = {i: decoded[i].h if i in decoded else tile.h for i, tile in tiles.items()}
        for join, blocks in zip(plan.joins, prompts, strict=True):
            last_row = len(join.prompt_ids) - 1 - sum(len(block.h) for block in blocks[:-1])
            rows[join.tile_idx] = take_row(rows[join.tile_idx], join.row, blocks[-1].h, last_row)
        ends: list[TileEnd] = []
        for i, rows_sampling in enumerate(sampling):
            last_ids = ends[-1].last_ids if ends else last_ids
            slots, draws = tiles[i].slots, tiles[i].draws
            ends.append(self._end_tile(self._head, rows[i], slots, draws, last_ids, rows_sampling, spec=self.spec.head))
        return ends

    def _begin(self, rows: TileRows, last_ids: jax.Array) -> Tile:
        return begin_tile(self._head, last_ids, rows.table, spec=self.spec.head)

    def _is_one_tile(self, plan: SweepPlan) -> bool:
        """Whether a sweep is one program."""
        return self._loop.has_tile_sweeps and not plan.joins and len(plan.tiles) == 1

    def _check_open(self) -> None:
        if self._closed:
            raise VramjaxError("the model is closed and off the device; load it again")

    def _blocks(self, join: Join) -> list[Block]:
        """A prompt, in blocks that all cross a layer before the next."""
        size, count = self.spec.chunk_rows, len(join.prompt_ids)
        num_chunks = -(-count // size)
        ids, positions = np.zeros(num_chunks * size, np.int32), np.full(num_chunks * size, -1, np.int32)
        ids[:count] = join.prompt_ids
        positions[:count] = np.arange(join.first, join.first + count)
        ends = np.cumsum(self.spec.blocks(num_chunks))[:-1] * size
        embedded = [embed_step(self._head, self._put(each), spec=self.spec.head) for each in np.split(ids, ends)]
        return self._loop.prompt_blocks(join.slot, embedded, np.split(positions, ends))

    def _put(self, array: np.ndarray | np.generic) -> jax.Array:
        return jax.device_put(array, self._device)
