"""Which layers are on the device when: pure data, made before the first upload.

A policy is a function that returns a `Schedule`: the exact order of `Load`, `Use` and `Release` for a sweep over the
layers. The controller executes that order and decides nothing itself, so what a run will cost (uploads per sweep,
layers at the peak) is known here, by simulation, and can be printed before any weight is read.

Knows layer indices only: no bytes, no arrays, no devices. Standard library only; never imports JAX.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from vramjax.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """Start to upload a layer that is absent."""

    layer_idx: int

    def __str__(self) -> str:
        return f"load {self.layer_idx}"


@dataclass(frozen=True)
class Use:
    """Hand a layer to the consumer; it is in use until the consumer asks for the next one."""

    layer_idx: int

    def __str__(self) -> str:
        return f"use {self.layer_idx}"


@dataclass(frozen=True)
class Release:
    """Take a layer off the device; its memory is free for the next `Load`."""

    layer_idx: int

    def __str__(self) -> str:
        return f"release {self.layer_idx}"


Op = Load | Use | Release
KindT = TypeVar("KindT", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens before the first sweep, in the first sweep, and in every sweep after it.

    Invariant: each sweep uses layers 0, 1, ..., num_layers - 1 once and in this order; a layer is present when it is
    used or released and absent when it is loaded; `steady_sweep` ends with the layers that it began with, so that it
    can be repeated for ever. A schedule that breaks this cannot be built.

    Example, the past window of 1 over 3 layers, cold::

        first_sweep   load 0, use 0,   release 0, load 1, use 1,   release 1, load 2, use 2
        steady_sweep  load 0, use 0,   release 0, load 1, use 1,   release 1, use 2

    Layer 2 is still there when the second sweep begins and is not uploaded again: 2 uploads per sweep, and 2 layers
    at the peak (layer 2 beside layer 0, then beside layer 1).
    """

    name: str  # "resident", "past", "both_sides" or "pinned_ring"; what `describe` and statistics call it
    num_layers: int
    keep: int  # layers of the window, or of the ring and what is pinned; num_layers when everything is resident
    warm_up: tuple[Op, ...]  # once, before the first sweep; again after a sweep that was broken off
    first_sweep: tuple[Op, ...]
    steady_sweep: tuple[Op, ...]

    def __post_init__(self) -> None:
        for part in ("warm_up", "first_sweep", "steady_sweep"):
            used = [op.layer_idx for op in getattr(self, part) if isinstance(op, Use)]
            expected = [] if part == "warm_up" else list(range(self.num_layers))
            if used != expected:
                raise ValueError(f"{part} uses layers {used}, expected {expected}")
        begin, end = self._after_first_sweep, self._present[-1]
        if begin != end:
            raise ValueError(
                f"the steady sweep begins with layers {sorted(begin)} and ends with {sorted(end)}, expected the "
                f"same layers, or it could not be repeated"
            )

    @property
    def uploads_per_sweep(self) -> int:
        """Uploads in every sweep but the first."""
        return _num_loads(self.steady_sweep)

    @property
    def first_sweep_uploads(self) -> int:
        """Uploads in the first sweep, those of the warm-up not counted."""
        return _num_loads(self.first_sweep)

    @property
    def warm_up_uploads(self) -> int:
        return _num_loads(self.warm_up)

    @cached_property
    def peak_resident_layers(self) -> int:
        """The most layers that are present (loading or loaded) at any moment of any sweep."""
        return max(map(len, self._present))

    @property
    def end_resident_layers(self) -> int:
        """Layers that are present between two sweeps."""
        return len(self._after_first_sweep)

    @cached_property
    def releases(self) -> bool:
        """Whether any layer ever leaves the device."""
        return any(isinstance(op, Release) for op in (*self.warm_up, *self.first_sweep, *self.steady_sweep))

    def peak_slots(self, kinds: Sequence[KindT]) -> dict[KindT, int]:
        """The most layers of each kind that are present at once, given the kind of every layer.

        A layer's memory can serve only layers of the same kind (the same shapes), so this is also the number of
        slots that a pool must hold or have lent: with 6 layers of kinds "aabbbb", all resident, {"a": 2, "b": 4}.
        """
        if len(kinds) != self.num_layers:
            raise ValueError(f"{len(kinds)} kinds were given for {self.num_layers} layers; expected one each")
        peaks: Counter[KindT] = Counter()
        for present in self._present:
            peaks |= Counter(kinds[layer_idx] for layer_idx in present)  # the larger of the two, kind by kind
        return dict(peaks)

    def describe(self) -> str:
        """One line of numbers, then the steady sweep, one line per layer."""
        lines = [
            f"{self.name}, keep {self.keep} of {self.num_layers} layers: {self.uploads_per_sweep} uploads per sweep "
            f"({self.warm_up_uploads + self.first_sweep_uploads} up to the end of the first), "
            f"at most {self.peak_resident_layers} layers on the device, {self.end_resident_layers} between sweeps"
        ]
        line: list[str] = []
        for op in self.steady_sweep:
            line.append(str(op))
            if isinstance(op, Use):
                lines.append("  " + ", ".join(line))
                line = []
        return "\n".join([*lines, "  " + ", ".join(line)] if line else lines)

    @cached_property
    def _present(self) -> list[frozenset[int]]:
        """The layers that are present at first and after each operation up to the end of the second sweep."""
        ops = (*self.warm_up, *self.first_sweep, *self.steady_sweep)
        return _simulate(ops, frozenset(), self.num_layers)

    @property
    def _after_first_sweep(self) -> frozenset[int]:
        return self._present[len(self.warm_up) + len(self.first_sweep)]


def window(num_layers: int, keep: int | None, policy: str = "past", *, warm: bool | None = None) -> Schedule:
    """The schedule that a window by name asks for; everything is resident when there is none, or it holds all layers.

    Args:
      num_layers: layers of a sweep.
      keep: layers of the window; None: no window.
      policy: "past", "both_sides" or "pinned_ring".
      warm: whether to upload before the first sweep what it begins with; None: only when everything is resident.

    Raises:
      ConfigError: `keep` is not a whole number of at least 1, or there is no such policy.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}; expected one of {', '.join(POLICIES)}")
    if keep is None or POLICIES[policy](num_layers, keep).name == "resident":
        return resident(num_layers, warm=warm is not False)
    return POLICIES[policy](num_layers, keep, warm=bool(warm))


def resident(num_layers: int, *, warm: bool = True) -> Schedule:
    """Every layer is uploaded once and stays: before the first sweep (`warm`) or as the first sweep comes to it."""
    num_layers = _positive("num_layers", num_layers)
    loads = tuple(Load(layer_idx) for layer_idx in range(num_layers))
    uses = tuple(Use(layer_idx) for layer_idx in range(num_layers))
    return Schedule(
        name="resident",
        num_layers=num_layers,
        keep=num_layers,
        warm_up=loads if warm else (),
        first_sweep=uses if warm else tuple(op for pair in zip(loads, uses, strict=True) for op in pair),
        steady_sweep=uses,
    )


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


def pinned_ring(num_layers: int, keep: int, *, ring: int = 2, warm: bool = False) -> Schedule:
    """`keep` layers on the device and never more: most of them pinned for good, the others passing through a ring.

    The layers that are streamed lie evenly between the pinned ones. As soon as one of them has been used, its memory
    is given to the streamed layer that comes `ring` later, also over the end of a sweep, so that uploads run while
    other layers compute. A sweep costs `num_layers - keep + ring` uploads; a past window with the same peak costs
    `num_layers - keep / 2`.

    Example, 4 layers, `keep` 3, a ring of 2: layer 3 is pinned, 0, 1 and 2 are streamed, and a steady sweep is
    use 0, release 0, load 2, use 1, release 1, load 0, use 2, release 2, load 1, use 3. It begins and ends with layers
    0, 1 and 3 on the device.

    Args:
      num_layers: layers of a sweep.
      keep: layers on the device, ring and all. What holds every layer is `resident`, and named so.
      ring: slots that streamed layers pass through; with `keep` 1 there is one, and nothing is uploaded ahead.
      warm: load what a steady sweep begins with before the first sweep, which then equals every later one.

    Raises:
      ConfigError: a number is not whole, or less than 1.
    """
    num_layers, keep = _positive("num_layers", num_layers), _positive("keep", keep)
    ring = min(_positive("ring", ring), keep)
    if keep >= num_layers:
        return resident(num_layers, warm=warm)
    num_streamed = num_layers - keep + ring
    streamed = [i * num_layers // num_streamed for i in range(num_streamed)]
    later = dict(zip(streamed, streamed[ring:] + streamed[:ring], strict=True))
    pinned = [Load(layer_idx) for layer_idx in range(num_layers) if layer_idx not in later]
    first_of_ring = [Load(layer_idx) for layer_idx in streamed[:ring]]

    def sweep(present: frozenset[int]) -> tuple[Op, ...]:
        ops: list[Op] = [] if present else list(first_of_ring)
        for cur in range(num_layers):
            if cur not in later and cur not in present:
                ops.append(Load(cur))
            ops.append(Use(cur))
            if cur in later:
                ops += [Release(cur), Load(later[cur])]
        return tuple(ops)

    steady_start = frozenset(op.layer_idx for op in (*pinned, *first_of_ring))
    return Schedule(
        name="pinned_ring",
        num_layers=num_layers,
        keep=keep,
        warm_up=(*pinned, *first_of_ring) if warm else (),
        first_sweep=sweep(steady_start if warm else frozenset()),
        steady_sweep=sweep(steady_start),
    )


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

    def sweep(present: frozenset[int]) -> tuple[Op, ...]:
        here, ops = set(present), []
        for cur in range(num_layers):
            # Releases first: the memory that they give back is what the load of `cur` goes into.
            gone = sorted(layer_idx for layer_idx in here if leaves(layer_idx, cur, keep))
            ops += [Release(layer_idx) for layer_idx in gone]
            here.difference_update(gone)
            if cur not in here:
                ops.append(Load(cur))
                here.add(cur)
            ops.append(Use(cur))
        return tuple(ops)

    # Both windows end a sweep with its last `keep` layers, so that is what a warm start begins with.
    tail = tuple(Load(layer_idx) for layer_idx in range(num_layers - keep, num_layers))
    start = frozenset(op.layer_idx for op in tail) if warm else frozenset()
    first_sweep = sweep(start)
    return Schedule(
        name=name,
        num_layers=num_layers,
        keep=keep,
        warm_up=tail if warm else (),
        first_sweep=first_sweep,
        steady_sweep=sweep(_simulate(first_sweep, start, num_layers)[-1]),
    )


def _simulate(ops: Iterable[Op], present: frozenset[int], num_layers: int) -> list[frozenset[int]]:
    """The layers that are present at first and after each operation; raises where an operation is impossible."""
    history = [present]
    for op in ops:
        if not 0 <= op.layer_idx < num_layers:
            raise ValueError(f"'{op}' names a layer outside 0 ... {num_layers - 1}")
        if isinstance(op, Load) == (op.layer_idx in present):
            state = "already present" if isinstance(op, Load) else "absent"
            raise ValueError(f"'{op}' comes when layer {op.layer_idx} is {state}")
        if isinstance(op, Load):
            present |= {op.layer_idx}
        elif isinstance(op, Release):
            present -= {op.layer_idx}
        history.append(present)
    return history


def _num_loads(ops: Iterable[Op]) -> int:
    return sum(isinstance(op, Load) for op in ops)


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
