"""Policies within a budget of bytes, for layers that may be of several kinds; `policy.py` has them by number of layers.

Layers of one kind have the same shapes, so that the memory of one can serve another. Knows layers by index, bytes and
kind. Standard library only; never imports JAX.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Mapping, Sequence

from vramjax.errors import BudgetError, ConfigError
from vramjax.residency.policy import (
    DEFAULT_POLICY,
    FEW_STREAMED,
    make_ring,
    make_rings,
    policy_named,
    positive,
    resident,
    window,
)
from vramjax.residency.schedule import Schedule
from vramjax.units import gib

_MAX_PLANS = 4096  # that are compared after each kind of layer


def window_within(
    layer_bytes: Sequence[int],
    budget_bytes: int,
    policy: str = DEFAULT_POLICY,
    *,
    kinds: Sequence[Hashable],
    warm: bool | None = None,
    name: str = "budget_bytes",
) -> Schedule:
    """The schedule of a policy that streams least within a budget; everything is resident when all layers fit.

    Args:
      layer_bytes: bytes of every layer; layers of one kind have the same.
      budget_bytes: what the layers on the device may take at the peak, those that are being uploaded included.
      policy: "pinned_ring" (see `pinned_ring_within`), "past" or "both_sides".
      kinds: the kind of every layer. Memory serves only layers of the kind that it was made for.
      warm: as in `window`.
      name: what an error calls the budget.

    Raises:
      ConfigError: there is no such policy, no layer, or layers of one kind differ in bytes.
      BudgetError: not even the smallest window fits; the message names the smallest budget that works.
    """
    policy_named(policy)
    _bytes_of(layer_bytes, kinds)
    if sum(layer_bytes) <= budget_bytes:
        return resident(len(layer_bytes), warm=warm is not False)
    if policy == "pinned_ring":
        return pinned_ring_within(layer_bytes, budget_bytes, kinds=kinds, warm=warm, name=name)
    for keep in range(len(layer_bytes) - 1, 0, -1):
        schedule = window(len(layer_bytes), keep, policy, warm=warm)
        if schedule.peak_bytes(layer_bytes, kinds) <= budget_bytes:
            return schedule
    smallest = window(len(layer_bytes), 1, policy).peak_bytes(layer_bytes, kinds)
    raise BudgetError(_too_small(name, budget_bytes, smallest, f"for a {policy} window of 1 layer"))


def pinned_ring_within(
    layer_bytes: Sequence[int],
    budget_bytes: int,
    *,
    kinds: Sequence[Hashable],
    ring: int | None = None,
    warm: bool | None = False,
    name: str = "budget_bytes",
) -> Schedule:
    """A pinned ring for layers of several kinds: of what fits into a budget, that which streams the fewest bytes.

    Each kind that is streamed has a ring of its own, of `ring` slots; where that leaves no room, all rings are shorter.
    The streamed layers of a kind lie evenly among those of their kind. What layers take on the device is the bytes of
    those that are pinned and of the rings' slots, all of which are in use from the first sweep on.

    Example, kinds "aabbbb" of 10 and 4 bytes, a budget of 30, rings of 2: both of a are pinned (20 bytes) and b is
    streamed through 2 slots (8 bytes), 16 bytes a sweep. With 14 bytes there is one slot for each kind, and every sweep
    uploads all 36 bytes.

    Args:
      layer_bytes: bytes of every layer; layers of one kind have the same.
      budget_bytes: what the layers on the device may take at the peak, those that are being uploaded included.
      kinds: the kind of every layer. Memory serves only layers of the kind that it was made for.
      ring: slots that the streamed layers of a kind pass through, if there is room; None: 1 where that makes at most 8
        uploads a sweep, else 2 (see `pinned_ring`).
      warm: as in `pinned_ring`.
      name: what an error calls the budget.

    Raises:
      ConfigError: there is no layer, layers of one kind differ in bytes, or `ring` is not a whole number of at least 1.
      BudgetError: there is no room for one layer of each kind; the message names the smallest budget that works.
    """
    if ring is None:
        short = pinned_ring_within(layer_bytes, budget_bytes, kinds=kinds, ring=1, warm=warm, name=name)
        if short.uploads_per_sweep <= FEW_STREAMED:
            return short
        ring = 2
    ring, bytes_of = positive("ring", ring), _bytes_of(layer_bytes, kinds)
    layers_of: dict[Hashable, list[int]] = {kind: [] for kind in bytes_of}
    for layer_idx, kind in enumerate(kinds):
        layers_of[kind].append(layer_idx)
    counts = {kind: len(layers) for kind, layers in layers_of.items()}
    for length in range(min(ring, max(counts.values())), 0, -1):
        slots = _slots_within(bytes_of, counts, budget_bytes, length)
        if slots is not None:
            each = zip(layers_of.values(), slots, strict=True)
            rings = [make_ring(layers, num_slots, length) for layers, num_slots in each]
            return make_rings(len(kinds), rings, warm=warm)
    room = "for one layer" if len(bytes_of) == 1 else f"for one layer of each of the {len(bytes_of)} kinds"
    raise BudgetError(_too_small(name, budget_bytes, sum(bytes_of.values()), room))


def _slots_within(
    bytes_of: Mapping[Hashable, int], counts: Mapping[Hashable, int], budget_bytes: int, length: int
) -> tuple[int, ...] | None:
    """Of each kind, the slots that let the fewest bytes be streamed with rings of this length; None if none do.

    Plans for the kinds so far are compared: only one that streams less than all that take no more can be part of the
    best. So there are few, and the result is the best one, unless many kinds have many layers each: then of plans that
    take nearly the same one is gone on with.
    """
    to_come = sum(min(length, counts[kind]) * num_bytes for kind, num_bytes in bytes_of.items())
    if to_come > budget_bytes:
        return None
    plans: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]  # bytes taken, bytes streamed, slots of each kind
    for kind, num_bytes in bytes_of.items():
        count = counts[kind]
        to_come -= min(length, count) * num_bytes
        choices = [(count, 0), *((slots, count - slots + length) for slots in range(length, count))]  # slots, streamed
        extended = sorted(
            (taken + num_slots * num_bytes, streamed + num_streamed * num_bytes, (*slots, num_slots))
            for taken, streamed, slots in plans
            for num_slots, num_streamed in choices
            if taken + num_slots * num_bytes + to_come <= budget_bytes
        )
        fewest = itertools.accumulate((streamed for _, streamed, _ in extended), min, initial=sys.maxsize)
        plans = [plan for plan, before in zip(extended, fewest, strict=False) if plan[1] < before]
        if len(plans) > _MAX_PLANS:  # of those in each of so many equal ranges of bytes, the one that takes least
            plans = list({plan[0] * _MAX_PLANS // budget_bytes: plan for plan in reversed(plans)}.values())
    return min(plans, key=lambda plan: plan[1])[2]


def _bytes_of(layer_bytes: Sequence[int], kinds: Sequence[Hashable]) -> dict[Hashable, int]:
    """The bytes of a layer of each kind, in the order in which kinds come."""
    if len(layer_bytes) != len(kinds) or not kinds:
        raise ConfigError(
            f"{len(layer_bytes)} sizes and {len(kinds)} kinds of layers were given; expected one of each "
            f"for every layer, and at least one layer"
        )
    bytes_of: dict[Hashable, int] = {}
    for layer_idx, (num_bytes, kind) in enumerate(zip(layer_bytes, kinds, strict=True)):
        if bytes_of.setdefault(kind, num_bytes) != num_bytes:
            raise ConfigError(
                f"layer {layer_idx} has {num_bytes} bytes and another layer of its kind {bytes_of[kind]}; expected the "
                f"same, as one's memory is to serve the other"
            )
    return bytes_of


def _too_small(name: str, budget_bytes: int, smallest_bytes: int, room: str) -> str:
    return f"{name} is {_exactly(budget_bytes)}; expected at least {_exactly(smallest_bytes)}, room {room}"


def _exactly(num_bytes: int) -> str:
    return f"{num_bytes} bytes" + (f" ({gib(num_bytes)})" if num_bytes >= 1 << 20 else "")
