"""The programs of a sweep, each compiled once: from token ids to rows, from rows to token ids, and all of it at once.

Ids stay on the device: a tile begins with the tokens last drawn for its slots, and ends in those that are drawn next.
Which row is whose comes as numbers, so that no mix of sequences compiles anything.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vramjax.decode.sampler import RowSampling, sample_rows
from vramjax.model.head import HeadSpec, HeadWeights, embed, logits
from vramjax.model.layer import LayerSpec, Weights, layer_steps


@functools.partial(jax.tree_util.register_dataclass, data_fields=["h", "slots", "positions", "draws"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class Tile:
    """The rows of a tile on the device; see `TileRows`."""

    h: jax.Array  # float32 [W, D]: what goes into the first layer; zeros in rows that are not decoded
    slots: jax.Array  # int32 [W]
    positions: jax.Array  # int32 [W]
    draws: jax.Array  # int32 [W]


class TileEnd(NamedTuple):
    """What a tile ends in."""

    last_ids: jax.Array  # int32 [B]: the tokens last drawn for each slot, those drawn from this tile included
    ids: jax.Array  # int32 [W]: those of all rows; anything in rows that nothing is drawn from
    logits: jax.Array | None  # float32 [W, V], if asked for; anything in rows that nothing is drawn from


@functools.partial(jax.jit, static_argnames="spec")
def embed_step(head: HeadWeights, ids: jax.Array, *, spec: HeadSpec) -> jax.Array:  # int32 [T] -> float32 [T, D]
    return embed(head, ids, spec)


@functools.partial(jax.jit, static_argnames="spec")
def begin_tile(
    head: HeadWeights,
    last_ids: jax.Array,  # int32 [B]: the token last drawn for each slot
    table: jax.Array,  # int32 [4, W]: `TileRows.table`
    *,
    spec: HeadSpec,
) -> Tile:
    """The rows that go into the first layer."""
    slots, positions, ids, draws = table
    ids = jnp.where(ids < 0, last_ids[slots], ids)
    h = jnp.where((positions >= 0)[:, None], embed(head, ids, spec), 0.0)
    return Tile(h=h, slots=slots, positions=positions, draws=draws)


@jax.jit
def take_row(
    h: jax.Array,  # float32 [W, D]
    row: jax.Array | int,  # []
    chunk: jax.Array,  # float32 [T, D]
    chunk_row: jax.Array | int,  # []
) -> jax.Array:  # float32 [W, D]
    """A tile with one row taken from a chunk of a prompt: its last one, from which the first token is drawn."""
    return h.at[row].set(chunk[chunk_row])


@functools.partial(jax.jit, static_argnames="spec")
def end_tile(
    head: HeadWeights,
    h: jax.Array,  # float32 [W, D]: the last layer's output
    slots: jax.Array,  # int32 [W]
    draws: jax.Array,  # int32 [W]
    last_ids: jax.Array,  # int32 [B]
    sampling: RowSampling,  # of the W rows
    *,
    spec: HeadSpec,
) -> TileEnd:
    """From the last layer's output to tokens.

    Of a slot that several rows are of, any of their tokens may be the last one here.
    """
    scores = logits(head, h, spec, positions=draws)
    # A loop whose turns are counted on a GPU would have the host wait for it.
    one_by_one = spec.backend == "reference" and not sampling.all_greedy
    ids = _draw_one_by_one(scores, draws, sampling) if one_by_one else sample_rows(scores, draws, sampling)
    no_slot = len(last_ids)  # an index out of range is dropped
    last_ids = last_ids.at[jnp.where(draws < 0, no_slot, slots)].set(ids, mode="drop")
    return TileEnd(last_ids, ids, scores)


@functools.partial(jax.jit, static_argnames="spec")
def draw_tile(
    head: HeadWeights,
    h: jax.Array,  # float32 [W, D]
    slots: jax.Array,  # int32 [W]
    draws: jax.Array,  # int32 [W]
    last_ids: jax.Array,  # int32 [B]
    sampling: RowSampling,  # of the W rows
    *,
    spec: HeadSpec,
) -> TileEnd:
    """`end_tile` whose logits nobody gets: of many sweeps that are queued, each would hold memory for them."""
    return end_tile(head, h, slots, draws, last_ids, sampling, spec=spec)._replace(logits=None)


@functools.partial(jax.jit, static_argnames=("layer", "ends", "gives_logits"), donate_argnums=2)
def tile_sweep(
    head: HeadWeights,
    weights: Sequence[Weights],  # of all layers
    kv: Sequence[jax.Array],  # [B, S, 2, KvH, Hd] of all layers
    last_ids: jax.Array,  # int32 [B]
    table: jax.Array,  # int32 [4, W]
    sampling: RowSampling,  # of the W rows
    *,
    layer: LayerSpec,
    ends: HeadSpec,
    gives_logits: bool,
) -> tuple[TileEnd, list[jax.Array]]:  # and kv of all layers
    """A sweep of one tile through layers that are all on the device: `begin_tile`, `layer_steps`, and `end_tile`.

    To a GPU it is one graph of kernels, most of whose arguments are the same in every call. As three programs it takes
    the host two to three times as long to queue, which is longer than the GPU computes.
    """
    tile = begin_tile(head, last_ids, table, spec=ends)
    h, kv = layer_steps(weights, kv, tile.h, tile.slots, tile.positions, spec=layer)
    end = end_tile if gives_logits else draw_tile
    return end(head, h, tile.slots, tile.draws, last_ids, sampling, spec=ends), kv


@functools.partial(jax.jit, static_argnames=("layer", "ends", "num_turns"), donate_argnums=2)
def tile_turns(
    head: HeadWeights,
    weights: Sequence[Weights],  # of all layers
    kv: Sequence[jax.Array],  # [B, S, 2, KvH, Hd] of all layers
    last_ids: jax.Array,  # int32 [B]
    table: jax.Array,  # int32 [4, W]: of the first turn
    sampling: RowSampling,  # of the W rows
    *,
    layer: LayerSpec,
    ends: HeadSpec,
    num_turns: int,
) -> tuple[TileEnd, list[jax.Array]]:  # of the last turn, but for ids: int32 [turns, W]; and kv of all layers
    """So many sweeps in a row, as `SweepPlan` says: each is `tile_sweep` without logits.

    All of them are the same graph of kernels, over the same memory, so that it takes the host hardly longer than one.
    """

    def turn(
        carry: tuple[list[jax.Array], jax.Array, jax.Array], _: None
    ) -> tuple[tuple[list[jax.Array], jax.Array, jax.Array], jax.Array]:
        kv, last_ids, table = carry
        end, kv = tile_sweep(head, weights, kv, last_ids, table, sampling, layer=layer, ends=ends, gives_logits=False)
        slots, positions, _, draws = table
        positions, draws = (jnp.where(stands >= 0, stands + 1, -1) for stands in (positions, draws))
        return (kv, end.last_ids, jnp.stack([slots, positions, jnp.full_like(slots, -1), draws])), end.ids

    (kv, last_ids, _), ids = jax.lax.scan(turn, (list(kv), last_ids, table), length=num_turns)
    return TileEnd(last_ids, ids, logits=None), kv


def _draw_one_by_one(
    scores: jax.Array,  # float32 [W, V]
    draws: jax.Array,  # int32 [W]
    sampling: RowSampling,
) -> jax.Array:  # int32 [W]; anything in rows not in use
    """`sample_rows` of the rows in use, which are mostly few; the bits of a row are the same."""

    def draw_row(i: jax.Array, ids: jax.Array) -> jax.Array:
        row_scores, row_draw, row_sampling = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(jnp.asarray(array), i, 1), (scores, draws, sampling)
        )
        return jax.lax.dynamic_update_slice_in_dim(ids, sample_rows(row_scores, row_draw, row_sampling), i, 0)

    return jax.lax.fori_loop(0, jnp.sum(draws >= 0), draw_row, jnp.zeros(len(draws), jnp.int32))
