"""An engine one sweep at a time: what `Engine.generate` does not show, for benchmarks.

The only file outside the engine that calls what is the engine's own; when the engine changes inside, so does this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from vramjax.decode.engine import Drawn, Engine
from vramjax.decode.sampler import RowSampling, Sampling
from vramjax.decode.sweep_plan import Join, SweepPlan, TileRows

Row = tuple[int, int, int, int]  # slot, position, id (-1: the one last drawn for the slot), where the next one stands


class Stepper:
    """Greedy sweeps of an engine, queued one after the other and not waited for.

    Invariant: `last_ids` are the tokens last drawn for each slot, those of the last sweep that was queued included.

    Example: after `stepper.prefill([5, 6, 7])`, `stepper.decode(3)` decodes the token that was drawn for position 3.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._greedy = RowSampling.of([Sampling()] * engine.spec.tile_rows)
        self.last_ids = engine.no_ids()  # int32 [B]

    def prefill(self, prompt: Sequence[int], *, slot: int = 0) -> Drawn:
        """The sweep of a prompt, at the end of which its first token is drawn."""
        join = Join(slot=slot, prompt_ids=prompt, tile_idx=0, row=0)
        return self.tile([(slot, -1, -1, len(prompt))], joins=(join,))

    def decode(self, position: int, *, slot: int = 0, num_turns: int = 1) -> Drawn:
        """The sweep of the token last drawn, which stands at `position`; or several in a row."""
        return self.tile([(slot, position, -1, position + 1)], num_turns=num_turns)

    def tile(
        self, rows: Sequence[Row], *, joins: tuple[Join, ...] = (), num_turns: int = 1, keep_logits: bool = False
    ) -> Drawn:
        """A sweep of one tile with these rows in use."""
        tile = TileRows.of(rows, self._engine.spec.tile_rows)
        plan = SweepPlan(joins=joins, tiles=(tile,), draws=(), num_turns=num_turns)
        drawn = self._engine.run(plan, self.last_ids, [self._greedy], keep_logits=keep_logits)
        self.last_ids = drawn.last_ids
        return drawn


def dispatch_ms(stepper: Stepper, positions: Sequence[int], *, num_turns: int = 1) -> list[float]:
    """How long the host takes to queue the work of a token, for tokens at these positions, which follow a prompt.

    So many of them go into one program, and have an equal share each. The device is idle before, and is not waited for.
    Where it falls behind by all that may be queued (32 programs), the host waits for it, and that counts.
    """
    times = []
    for position in positions[: len(positions) - num_turns + 1 : num_turns]:
        jax.block_until_ready(stepper.last_ids)
        start = time.perf_counter()
        stepper.decode(position, num_turns=num_turns)
        times.append((time.perf_counter() - start) * 1e3 / num_turns)
    jax.block_until_ready(stepper.last_ids)
    return times


def forced_logits(engine: Engine, ids: Sequence[int], *, rows: int) -> Iterator[np.ndarray]:
    """The logits of a given text, so many of its tokens in each sweep, side by side in a tile; float32 [W, V] each.

    The cache is overwritten from position 0 on. The last block's rows past the text mean nothing.
    """
    stepper = Stepper(engine)
    # A token is drawn from each row, though nobody takes it: kernels make no logits of others.
    for first in range(0, len(ids), rows):
        forced = [(0, i, token_id, i + 1) for i, token_id in enumerate(ids[first : first + rows], first)]
        (logits,) = stepper.tile(forced, keep_logits=True).logits
        yield np.asarray(logits)


def forced_prefill(engine: Engine, ids: Sequence[int]) -> list[jax.Array]:
    """The last layer's output of each chunk of a given text, float32 [T, D], of one sweep.

    The cache is overwritten from position 0 on. The last chunk's rows past the text mean nothing.
    """
    blocks = engine._blocks(Join(slot=0, prompt_ids=ids, tile_idx=0, row=0))
    engine._loop.sweep(blocks)
    return [block.h for block in blocks]
