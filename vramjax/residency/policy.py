"""Policies: functions that decide which layers are on the device when, and say so as a `Schedule`.

The controller executes a schedule and decides nothing itself. `window` and `window_within` are the front doors: so many
layers, or whatever fits into so many bytes. Knows layers by index, and at most their bytes and kinds (layers of one
kind have the same shapes, so that the memory of one can serve another): no arrays, no devices. Standard library only;
never imports JAX.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from vramjax.errors import BudgetError, ConfigError
from vramjax.residency.schedule import Load, Op, Release, Schedule, Use
from vramjax.units import gib

DEFAULT_POLICY = "pinned_ring"
_FEW_STREAMED = 8  # layers: as many as this, or fewer, pass through a ring of one slot
_MAX_PLANS = 4096  # that are compared after each kind of layer


def window(num_layers: int, keep: int | None, policy: str = DEFAULT_POLICY, *, warm: bool | None = None) -> Schedule:
    """The schedule that a window by name asks for; everything is resident when there is none, or it holds all layers.

    Args:
      num_layers: layers of a sweep.
      keep: layers of the window; None: no window.
      policy: "pinned_ring", "past" or "both_sides".
      warm: whether to upload before the first sweep what it begins with; None: if any layer stays for good, be it that
        everything is resident or under "pinned_ring".

    Raises:
      ConfigError: `keep` is not a whole number of at least 1, or there is no such policy.
    """
    make = _policy(policy)
    if keep is None or _positive("keep", keep) >= _positive("num_layers", num_layers):
        return resident(num_layers, warm=warm is not False)
    return make(num_layers, keep, warm=warm if policy == "pinned_ring" else bool(warm))


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
    _policy(policy)
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


def resident(num_layers: int, *, warm: bool = True) -> Schedule:
    """Every layer is uploaded once and stays: before the first sweep (`warm`) or as the first sweep comes to it."""
    return _rings(_positive("num_layers", num_layers), [], warm=warm)


def past_window(num_layers: int, keep: int, *, warm: bool = False) -> Schedule:
    """At layer `cur` every layer below `cur - keep + 1` goes; `cur` and every layer still to come stay.

    "Still to come" includes the last `keep` layers of the sweep before, which stay until this sweep reaches them:
    they save `keep` uploads (`num_layers - keep` are left), and they make the peak `min(num_layers, 2 * keep)`.

    Args:
      num_layers: layers of a sweep.
      keep: size of the window, at least 1. A window that holds every layer is `resident`, and named so.
      warm: load the last `keep` layers before the first sweep, which then equals every later one.

    Raises:
      ConfigError: `num_layers` or `keep` is not a whole number of at least 1.
    """
    return _window("past", num_layers, keep, warm, lambda layer_idx, cur, keep: layer_idx < cur - keep + 1)


def both_sides_window(num_layers: int, keep: int, *, warm: bool = False) -> Schedule:
    """At layer `cur` every layer outside `cur - keep + 1 ... cur` goes, also those still to come.

    A trap, kept so that it can be measured: sweeps only move forward, so each layer that goes early is uploaded
    again later. Every sweep costs `num_layers` uploads whatever `keep` is (below `num_layers`); the peak is `keep`.
    Arguments and errors are those of `past_window`.
    """
    return _window("both_sides", num_layers, keep, warm, lambda layer_idx, cur, keep: not cur - keep < layer_idx <= cur)


def pinned_ring(num_layers: int, keep: int, *, ring: int | None = None, warm: bool | None = False) -> Schedule:
    """`keep` layers on the device and never more: most of them pinned for good, the others passing through a ring.

    The layers that are streamed lie evenly between the pinned ones. As soon as one of them has been used, its memory
    is given to the streamed layer that comes `ring` later, also over the end of a sweep, so that uploads run while
    other layers compute. A sweep costs `num_layers - keep + ring` uploads; a past window with the same peak costs
    `num_layers - keep / 2`.

    A ring of one slot saves one upload a sweep, but no upload runs while its own slot's layer computes. What that
    costs is the computation of each streamed layer, 3 to 10 % of its upload on the link of an H200, so it is the
    shorter way while few layers are streamed, and two slots are when many are.

    Example, 4 layers, `keep` 3, a ring of 2: layer 3 is pinned, 0, 1 and 2 are streamed, and a steady sweep is
    use 0, release 0, load 2, use 1, release 1, load 0, use 2, release 2, load 1, use 3. It begins and ends with layers
    0, 1 and 3 on the device.

    Args:
      num_layers: layers of a sweep.
      keep: layers on the device, ring and all. What holds every layer is `resident`, and named so.
      ring: slots that streamed layers pass through, at most `keep`; None: 1 where that makes at most 8 uploads a sweep,
        else 2.
      warm: load what a steady sweep begins with before the first sweep, which then equals every later one; None: if any
        layer is pinned.

    Raises:
      ConfigError: a number is not whole, or less than 1.
    """
    num_layers, keep = _positive("num_layers", num_layers), _positive("keep", keep)
    if ring is None:
        ring = 1 if num_layers - keep + 1 <= _FEW_STREAMED else 2
    return _rings(num_layers, [_ring(range(num_layers), keep, _positive("ring", ring))], warm=warm)


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
        if short.uploads_per_sweep <= _FEW_STREAMED:
            return short
        ring = 2
    ring, bytes_of = _positive("ring", ring), _bytes_of(layer_bytes, kinds)
    layers_of: dict[Hashable, list[int]] = {kind: [] for kind in bytes_of}
    for layer_idx, kind in enumerate(kinds):
        layers_of[kind].append(layer_idx)
    counts = {kind: len(layers) for kind, layers in layers_of.items()}
    for length in range(min(ring, max(counts.values())), 0, -1):
        slots = _slots_within(bytes_of, counts, budget_bytes, length)
        if slots is not None:
            rings = [
                _ring(layers, num_slots, length) for layers, num_slots in zip(layers_of.values(), slots, strict=True)
            ]
            return _rings(len(kinds), rings, warm=warm)
    room = "for one layer" if len(bytes_of) == 1 else f"for one layer of each of the {len(bytes_of)} kinds"
    raise BudgetError(_too_small(name, budget_bytes, sum(bytes_of.values()), room))


POLICIES: Mapping[str, Callable[..., Schedule]] = {
    "past": past_window,
    "both_sides": both_sides_window,
    "pinned_ring": pinned_ring,
}


def _window(name: str, num_layers: int, keep: int, warm: bool, leaves: Callable[[int, int, int], bool]) -> Schedule:
    """The window in which layer `i` goes at layer `cur` when `leaves(i, cur, keep)`."""
    num_layers, keep = _positive("num_layers", num_layers), _positive("keep", keep)
    if keep >= num_layers:
        return resident(num_layers, warm=warm)

    def sweep(present: frozenset[int]) -> Iterator[Op]:
        here = set(present)
        for cur in range(num_layers):
            # Releases first: the memory that they give back is what the load of `cur` goes into.
            gone = sorted(layer_idx for layer_idx in here if leaves(layer_idx, cur, keep))
            yield from map(Release, gone)
            here.difference_update(gone)
            if cur not in here:
                yield Load(cur)
                here.add(cur)
            yield Use(cur)

    # Both windows end a sweep with its last `keep` layers.
    return _schedule(name, num_layers, range(num_layers - keep, num_layers), sweep, warm=warm)


def _rings(num_layers: int, rings: Iterable[tuple[Sequence[int], int]], *, warm: bool | None) -> Schedule:
    """The layers of each ring pass through its slots, so many; all other layers are pinned. Warm if None: if any is."""
    later: dict[int, int] = {}  # of each streamed layer: the one that gets its slot
    first: list[int] = []
    for layers, num_slots in rings:
        later |= zip(layers, (*layers[num_slots:], *layers[:num_slots]), strict=True)
        first += layers[:num_slots]
    first.sort()
    pinned = [layer_idx for layer_idx in range(num_layers) if layer_idx not in later]

    def sweep(present: frozenset[int]) -> Iterator[Op]:
        yield from (Load(layer_idx) for layer_idx in first if layer_idx not in present)
        for cur in range(num_layers):
            if cur not in later and cur not in present:
                yield Load(cur)
            yield Use(cur)
            if cur in later:
                yield from (Release(cur), Load(later[cur]))

    name, is_warm = "pinned_ring" if later else "resident", bool(pinned) if warm is None else warm
    return _schedule(name, num_layers, [*pinned, *first], sweep, warm=is_warm)


def _ring(layers: Sequence[int], num_slots: int, length: int) -> tuple[Sequence[int], int]:
    """Those of `layers`, all of one kind, that are streamed when there are slots for so many, and the ring's slots."""
    if num_slots >= len(layers):
        return (), 0
    length = min(length, num_slots)
    num_streamed = len(layers) - num_slots + length
    return [layers[i * len(layers) // num_streamed] for i in range(num_streamed)], length


def _schedule(
    name: str,
    num_layers: int,
    begins_with: Iterable[int],
    sweep: Callable[[frozenset[int]], Iterable[Op]],
    *,
    warm: bool,
) -> Schedule:
    """The schedule of sweeps that `sweep(present)` makes; a steady one begins, and ends, with `begins_with`."""
    loads, present = tuple(map(Load, begins_with)), frozenset(begins_with)
    return Schedule(
        name=name,
        num_layers=num_layers,
        keep=len(present),
        warm_up=loads if warm else (),
        first_sweep=tuple(sweep(present if warm else frozenset())),
        steady_sweep=tuple(sweep(present)),
    )


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


def _policy(name: str) -> Callable[..., Schedule]:
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}; expected one of {', '.join(POLICIES)}")
    return POLICIES[name]


def _positive(name: str, value: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1") from None
    if number < 1:
        raise ConfigError(f"{name} is {number}; expected at least 1 layer")
    return number
