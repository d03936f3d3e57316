"""Policies: functions that decide which layers are on the device when, and say so as a `Schedule`.

The controller executes a schedule and decides nothing itself. `window` is the front door: so many layers; that to
whatever fits into so many bytes is `window_within`, in `byte_policy.py`. Knows layers by index: no bytes, no arrays, no
devices. Standard library only; never imports JAX.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from vramjax.errors import ConfigError
from vramjax.residency.schedule import Load, Op, Release, Schedule, Use

DEFAULT_POLICY = "pinned_ring"
FEW_STREAMED = 8  # layers: as many as this, or fewer, pass through a ring of one slot


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
    make = policy_named(policy)
    if keep is None or positive("keep", keep) >= positive("num_layers", num_layers):
        return resident(num_layers, warm=warm is not False)
    return make(num_layers, keep, warm=warm if policy == "pinned_ring" else bool(warm))


def resident(num_layers: int, *, warm: bool = True) -> Schedule:
    """Every layer is uploaded once and stays: before the first sweep (`warm`) or as the first sweep comes to it."""
    return make_rings(positive("num_layers", num_layers), [], warm=warm)


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
    num_layers, keep = positive("num_layers", num_layers), positive("keep", keep)
    if ring is None:
        ring = 1 if num_layers - keep + 1 <= FEW_STREAMED else 2
    return make_rings(num_layers, [make_ring(range(num_layers), keep, positive("ring", ring))], warm=warm)


POLICIES: Mapping[str, Callable[..., Schedule]] = {
    "past": past_window,
    "both_sides": both_sides_window,
    "pinned_ring": pinned_ring,
}


def _window(name: str, num_layers: int, keep: int, warm: bool, leaves: Callable[[int, int, int], bool]) -> Schedule:
    """The window in which layer `i` goes at layer `cur` when `leaves(i, cur, keep)`."""
    num_layers, keep = positive("num_layers", num_layers), positive("keep", keep)
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


def make_rings(num_layers: int, rings: Iterable[tuple[Sequence[int], int]], *, warm: bool | None) -> Schedule:
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


def make_ring(layers: Sequence[int], num_slots: int, length: int) -> tuple[Sequence[int], int]:
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


def policy_named(name: str) -> Callable[..., Schedule]:
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}; expected one of {', '.join(POLICIES)}")
    return POLICIES[name]


def positive(name: str, value: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1") from None
    if number < 1:
        raise ConfigError(f"{name} is {number}; expected at least 1 layer")
    return number
