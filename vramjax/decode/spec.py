"""What an engine is compiled for, and an estimate of the memory that its programs take. Makes nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from pallas_kernels.attention import attention_scratch_bytes
from pallas_kernels.backend import COMPILED, Backend, unchained
from pallas_kernels.operand import OperandSpec
from pallas_kernels.q8_kernel import scratch_bytes
from vramjax.config import ModelConfig
from vramjax.decode.depth import MAX_DEPTH
from vramjax.layout import LayerLayout
from vramjax.model.head import HeadSpec
from vramjax.model.kv_cache import cache_bytes, capacity
from vramjax.model.layer import LayerSpec

SPARE_BYTES = 32 << 20  # what a compiler and an allocator take that nobody can see
_SHORT_SWEEP_BYTES = 4 << 30  # of layers and cache, which a fast GPU reads in 1 to 2 ms
MAX_JOINING = 16  # prompts of one chunk that may go through the layers in one sweep, if there are as many slots


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything that decides which programs are compiled; it does not grow with layers, prompts or tokens.

    Example: with 40 slots and 16 rows a tile, a sweep has up to 3 tiles; with a context of 1000 and chunks of 256 rows,
    prompts of up to 16 chunks may join in it, as 40 slots are more than 16, and the longest prompt takes 4.
    """

    config: ModelConfig
    layout: LayerLayout
    groups: tuple[tuple[str, int], ...]  # matrix name -> inputs per group
    backend: Backend
    kv_dtype: np.dtype
    context: int  # positions a sequence may take
    num_slots: int = 1  # sequences that are decoded at the same time
    depth: int = 0  # drafts that each of them must have rows for in a sweep
    tile_rows: int = 16  # rows of a decode step, in use or not
    chunk_rows: int = 256  # rows of a prefill step
    chunks_per_block: int = 1  # of a prompt, that take one prefill step together at most
    prompt_digits: int = 2  # of the activations of a prompt's rows: 1 is int8, and faster
    max_layers_per_call: int | None = None  # None: 12 on a GPU, if so many are there to stay; else 1
    fuses_tile: bool | None = None  # whether a sweep of one tile is one program, if all layers stay; None: on a GPU
    max_turns: int | None = None  # sweeps in a row that go into one program, if one does; None: 4 if they are short

    @functools.cached_property
    def layer(self) -> LayerSpec:
        return LayerSpec(config=self.config, layout=self.layout, backend=self.backend, prompt_digits=self.prompt_digits)

    @functools.cached_property
    def head(self) -> HeadSpec:
        groups = dict(self.groups)
        return HeadSpec(
            config=self.config,
            embed_group=groups["embed"],
            head_group=groups.get("head", groups["embed"]),
            backend=unchained(self.backend),  # XLA draws from the logits
        )

    @property
    def layers_per_call(self) -> int:
        """Layers that go into one program where all of them are on the device: best if they divide the model's.

        To a GPU a program is a graph of kernels, and it takes the host long to queue a large one. The layers of a
        prompt go in a few programs, so that the GPU is busy with the first while the others are queued.
        """
        most = self.max_layers_per_call or (12 if self.backend in COMPILED else 1)
        most = min(most, self.config.num_layers)
        largest = max(size for size in range(1, most + 1) if self.config.num_layers % size == 0)
        return largest if 2 * largest > most else most

    @property
    def is_one_program(self) -> bool:
        """Whether a sweep of one tile is one program where all layers are on the device (`tile_sweep`)."""
        return self.backend in COMPILED if self.fuses_tile is None else self.fuses_tile

    @property
    def turns_per_call(self) -> int:
        """Sweeps in a row that go into one program, where a sweep is one.

        The host takes most of a millisecond to queue a program of all layers, and two or three where memory that the
        program takes is not where it was. A GPU that is done with a small model in less than that would wait for it.
        """
        if not self.is_one_program:
            return 1
        is_short = self.config.num_layers * self.layout.num_bytes + self.kv_bytes < _SHORT_SWEEP_BYTES
        return (4 if is_short else 1) if self.max_turns is None else self.max_turns

    def max_new_tokens(self, num_prompt_tokens: int, asked: int) -> int:
        """New tokens that fit. The last one needs no position of its own: nothing is decoded from it."""
        return min(asked, self.context - num_prompt_tokens + 1)

    @property
    def decodes_one_tile(self) -> bool:
        """Whether no sweep has more than one tile, nor a prompt that joins beside rows that are decoded."""
        return self.num_slots == 1 and self.tile_rows > MAX_DEPTH

    @property
    def num_tiles(self) -> int:
        """Tiles of a sweep in which every slot is decoded."""
        return -(-self.num_slots // self.tile_rows)

    @property
    def max_rows(self) -> int:
        """Rows of a sweep with drafts. It is read before the next is queued, so it may take the tiles of two."""
        return self.tile_rows * max(2 * self.num_tiles, -(-self.num_slots * (1 + self.depth) // self.tile_rows))

    @property
    def max_chunks(self) -> int:
        """Chunks of prompts that one sweep may take: those of the longest prompt, or of as many short ones."""
        return max(-(-self.context // self.chunk_rows), min(self.num_slots, MAX_JOINING))

    def blocks(self, num_chunks: int) -> list[int]:
        """The chunks of a prompt that go through a layer together: as many as may, while there are so many.

        Example: with chunks_per_block=8, 13 chunks go as 8, 2, 2 and 1.
        """
        blocks = []
        for size in reversed(self._block_chunks):
            blocks += [size] * (num_chunks // size)
            num_chunks %= size
        return blocks

    @property
    def block_sizes(self) -> list[int]:
        """Rows of each prefill step there is."""
        return [self.chunk_rows * num_chunks for num_chunks in self._block_chunks]

    @property
    def _block_chunks(self) -> list[int]:
        """A step of two chunks is for prompts that are shorter than the longest block, and for what is left of one."""
        return sorted({1, min(2, self.chunks_per_block), self.chunks_per_block})

    @property
    def kv_bytes(self) -> int:
        """The KV cache, all slots and layers."""
        return cache_bytes(self.config, self.num_slots, self.context, self.kv_dtype)

    @property
    def workspace_bytes(self) -> int:
        """An upper estimate of what activations, attention splits, logits and sampling take at once."""
        config, most_rows = self.config, self.block_sizes[-1]
        layer = max(self._layer_bytes(rows) for rows in (self.tile_rows, most_rows))
        attended = attention_scratch_bytes(
            self.tile_rows, most_rows, config.num_heads, config.head_dim, capacity(self.context)
        )
        # Two sweeps may be queued, and prompts join in both if there are slots for more than the first one's. (More
        # than two only if each is one program, with neither prompts nor logits that are kept.)
        prompts = min(2, self.num_slots) * self.max_chunks * self.chunk_rows * config.hidden_size
        # Tiles of two sweeps: the next one is queued before this one has ended; or of one with drafts. So are their
        # logits, if asked for.
        tiles = self.max_rows
        # Drawing takes about five times the logits of a tile.
        head = tiles * config.hidden_size + (tiles + 5 * self.tile_rows) * config.vocab_size
        return SPARE_BYTES + layer + attended + 4 * (prompts + head)

    def _layer_bytes(self, rows: int) -> int:
        """What a layer's step makes for so many rows, but for attention's parts."""
        config, matrices = self.config, [matrix for _, matrix in self.layout]
        queries = config.num_heads * config.head_dim
        product = max(scratch_bytes(rows, matrix.values_shape, matrix.group) for matrix in matrices)
        if self.backend in COMPILED:  # between two products there is one kernel, which makes the next one's operand
            operand = max(OperandSpec(k_padded=each.k_padded, group=each.group).num_bytes(rows) for each in matrices)
            return product + operand + 4 * rows * (2 * config.hidden_size + queries)
        widest = max(matrix.n_padded + matrix.k_padded for matrix in matrices)
        return product + 4 * rows * (3 * widest + 2 * queries)
