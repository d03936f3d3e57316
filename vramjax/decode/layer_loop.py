"""The layers of a model with their KV caches, and the only loop over them, through which prefill and decode both go.

At every layer boundary the residency controller moves on by one step of its schedule; the loop only uses the weights
that it is handed. Within a sweep nothing waits for the device.

Layers may lie on several devices in turns, each with its KV cache beside it: what goes from layer to layer hops from
device to device, which the host does not wait for either. Rows begin and end on the first one. Knows neither what rows
mean nor where they come from.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from vramjax.decode.rehearsal import rehearse_layers, stand_in_layer
from vramjax.decode.sampler import RowSampling
from vramjax.decode.spec import EngineSpec
from vramjax.decode.sweep_plan import TileRows
from vramjax.decode.tile_programs import Tile, TileEnd, tile_sweep, tile_turns
from vramjax.model.head import HeadWeights
from vramjax.model.kv_cache import make_cache
from vramjax.model.layer import Weights, layer_steps
from vramjax.residency.multi import MultiController
from vramjax.residency.transfer import out_of_memory_is_a_budget_error


@dataclass(kw_only=True)
class Block:
    """Rows that go through the layers together; `h` is replaced at each of them."""

    steps: list[Callable[..., Any]]  # each device's layer step for such a block
    h: jax.Array  # float32 [T, D]
    slots: list[jax.Array]  # on each device, int32 [T], or [] where all rows are one sequence's
    positions: list[jax.Array]  # on each device, int32 [T]


class LayerLoop:
    """All layers of a model, through which rows go in blocks, or a whole tile in one program.

    Invariant: between two sweeps the KV cache of every layer is whole. A sweep that failed has used up those that it
    was given; `forget` drops the others, and the next sweep begins with new ones.

    Example, 3 layers on 2 devices: `sweep([a, b])` takes both blocks through layer 0 on device 0, where their hidden
    states are copied to device 1 from, then through layer 1 there, and through layer 2 on device 0 again.
    """

    def __init__(self, spec: EngineSpec, layers: MultiController, devices: Sequence[jax.Device]) -> None:
        """Makes the KV cache of every layer on the layer's device.

        Args:
          spec: what to compile.
          layers: provides the weights; this loop's own.
          devices: those of the controllers of `layers`, in their order.
        """
        self.layers = layers
        self._spec, self._devices = spec, list(devices)
        assert len(self._devices) == layers.num_devices
        self._kv = [self._make_cache(i) for i in range(spec.config.num_layers)]
        # Uploads run inside these. A prompt's chunks take long enough for one to carry all that is to be uploaded.
        self.decode_steps = self._jit_layer_step(spread=True)
        self.prefill_steps = self._jit_layer_step(spread=False)
        # Layers that never leave may go into one call, and a sweep of one tile into one program: less for the host to
        # do, and the same bits.
        stay = layers.num_devices == 1 and not layers.controllers[0].schedule.releases
        self._layers_per_call = spec.layers_per_call if stay else 1
        self.has_tile_sweeps = stay and spec.is_one_program
        self._ways_to_draw: set[bool] = set()  # all greedily, or not, that programs of a sweep are compiled for

    def compile(self, head: HeadWeights, last_ids: jax.Array, sampling: RowSampling) -> None:
        """Runs every program of the layers once, on zeros.

        Of sweeps in one program it is those that draw as `sampling` says, and give no logits. Takes the memory of two
        more layers while it runs. What it leaves in the cache no sequence sees.
        """
        spec = self._spec
        if self.has_tile_sweeps:
            weights = [stand_in_layer(spec.layout, self._devices[0])] * spec.config.num_layers
            tile = TileRows.of([], spec.tile_rows)
            self.sweep_tile(head, tile, last_ids, sampling, weights=weights)
        decodes_in_blocks = not (self.has_tile_sweeps and spec.decodes_one_tile)
        for i, (device, controller) in enumerate(zip(self._devices, self.layers.controllers, strict=True)):
            # With the caches of the device's first layers; where these go in groups, the last group may be smaller.
            for size in sorted({self._layers_per_call, spec.config.num_layers % self._layers_per_call} - {0}):
                borrowed = list(range(i, i + size))
                decode = self.decode_steps[i] if decodes_in_blocks else None
                rehearse_layers(spec, controller, device, self.prefill_steps[i], decode, self._kv, borrowed)

    def prompt_blocks(self, slot: int, hs: Sequence[jax.Array], positions: Sequence[np.ndarray]) -> list[Block]:
        """A prompt: of each block float32 [T, D] on the first device, and int32 [T]."""
        slots = self._everywhere(jax.device_put(np.int32(slot), self._devices[0]))
        return [
            Block(
                steps=self.prefill_steps,
                h=h,
                slots=slots,
                positions=self._everywhere(jax.device_put(of_block, self._devices[0])),
            )
            for h, of_block in zip(hs, positions, strict=True)
        ]

    def tile_block(self, tile: Tile) -> Block:
        """A tile: of each of several sequences one row, and its drafts."""
        return Block(
            steps=self.decode_steps,
            h=tile.h,
            slots=self._everywhere(tile.slots),
            positions=self._everywhere(tile.positions),
        )

    def sweep(self, blocks: Sequence[Block]) -> None:
        """Queues every block of rows through every layer."""
        self._replace_lost_caches()
        with out_of_memory_is_a_budget_error(self._devices[0], "a layer step"):
            for group in _grouped(self.layers.sweep(), self._layers_per_call):
                indices, weights = [layer_idx for layer_idx, _ in group], [each for _, each in group]
                here = indices[-1] % len(self._devices)
                following = (indices[-1] + 1) % self.layers.num_layers % len(self._devices)
                for block in blocks:
                    h, written = block.steps[here](
                        weights,
                        [self._kv[i] for i in indices],
                        block.h,
                        block.slots[here],
                        block.positions[here],
                        spec=self._spec.layer,
                    )
                    for i, kv in zip(indices, written, strict=True):
                        self._kv[i] = kv
                    # Queued before the next layer is asked for, and so before what its device is going to upload.
                    block.h = _on(self._devices[following], h)

    def sweep_tile(
        self,
        head: HeadWeights,
        tile: TileRows,
        last_ids: jax.Array,  # int32 [B]
        sampling: RowSampling,
        *,
        num_turns: int = 1,
        gives_logits: bool = False,
        weights: Sequence[Weights] | None = None,
    ) -> TileEnd:
        """Queues a sweep of one tile and both ends of the model in one program; only if it `has_tile_sweeps`.

        Or several in a row, without logits, whose ids are int32 [turns, W] then. `weights` are those of all layers;
        None are the layers' own.
        """
        assert num_turns == 1 or not gives_logits
        self._replace_lost_caches()
        layer, ends = self._spec.layer, self._spec.head
        if num_turns == 1:
            sweep = functools.partial(tile_sweep, layer=layer, ends=ends, gives_logits=gives_logits)
        else:
            sweep = functools.partial(tile_turns, layer=layer, ends=ends, num_turns=num_turns)
        with out_of_memory_is_a_budget_error(self._devices[0], "a sweep"):
            if weights is None:
                weights = self.layers.sweep_at_once(num_turns)
            end, self._kv = sweep(head, weights, self._kv, last_ids, tile.table, sampling)
        if not gives_logits and sampling.all_greedy not in self._ways_to_draw:
            self._ways_to_draw.add(sampling.all_greedy)
            # The other program too: so an answer waits for a compiler once, and not in its middle.
            empty = TileRows.of([], self._spec.tile_rows)
            for other in {1, self._spec.turns_per_call} - {num_turns}:
                self.sweep_tile(head, empty, last_ids, sampling, num_turns=other, weights=weights)
        return end

    def forget(self) -> None:
        """Drops what was uploaded, if it may leave, and all caches; after a failure neither is trusted."""
        self.layers.forget()
        self._delete_caches()

    def close(self) -> None:
        """Gives all device memory back."""
        self.layers.close()
        self._delete_caches()

    def _jit_layer_step(self, *, spread: bool) -> list[Callable[..., Any]]:
        """Each device's layer step, whose calls take that device's uploads along."""
        return [
            controller.jit(layer_steps, static_argnames=("spec",), donate_argnums=(1, 2), spread=spread)
            for controller in self.layers.controllers
        ]

    def _replace_lost_caches(self) -> None:
        for lost in [i for i, kv in enumerate(self._kv) if kv.is_deleted()]:
            self._kv[lost] = self._make_cache(lost)

    def _delete_caches(self) -> None:
        for kv in self._kv:
            kv.delete()

    def _make_cache(self, layer_idx: int) -> jax.Array:
        spec, device = self._spec, self._devices[layer_idx % len(self._devices)]
        return make_cache(spec.config, spec.num_slots, spec.context, spec.kv_dtype, device)

    def _everywhere(self, array: jax.Array) -> list[jax.Array]:
        """An array of the first device, on each."""
        return [_on(device, array) for device in self._devices]


def _grouped(sweep: Iterator[tuple[int, Any]], size: int) -> Iterator[list[tuple[int, Any]]]:
    """The layers of a sweep, so many at a time; the next one is asked for when a group is done with."""
    while group := list(itertools.islice(sweep, size)):
        yield group


def _on(device: jax.Device, array: jax.Array) -> jax.Array:
    """The array on another device: a copy, which is queued and not waited for; itself if it is there already."""
    return array if device in array.devices() else jax.device_put(array, device)
