"""When which layer is uploaded, used and dropped: a schedule, which is data, and what it costs.

A `Schedule` is the exact order of `Load`, `Use` and `Release` for a sweep over the layers. Which order is a good one is
the business of `policy`; here it is checked and simulated, so that what a run will cost (uploads per sweep, bytes at
the peak) is known, and can be printed, before any weight is read.

Knows layer indices, and bytes where it is told them: no arrays, no devices. Standard library only; never imports JAX.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar


@dataclass(frozen=True)
class Load:
    """Start to upload a layer that is absent."""

    layer_idx: int
    # Uses before the next `Load` and before that of its own layer: time for the upload in which the link is free. It
    # follows from the order, so a schedule fills it in; in a warm-up, in which nothing is used, it stays 0.
    steps: int = field(default=0, compare=False)

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
        for part in ("first_sweep", "steady_sweep"):
            object.__setattr__(self, part, _with_steps(getattr(self, part), self.steady_sweep))

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
    def streamed_layers(self) -> tuple[int, ...]:
        """The layers that every sweep uploads, in the order of their index; all others stay for good."""
        return tuple(sorted({op.layer_idx for op in self.steady_sweep if isinstance(op, Load)}))

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

    def peak_bytes(self, layer_bytes: Sequence[int], kinds: Sequence[Hashable]) -> int:
        """Bytes of the slots of `peak_slots`: what layers take on the device, at most, where memory is recycled.

        Args:
          layer_bytes: bytes of every layer, the same for all of a kind.
          kinds: the kind of every layer.
        """
        bytes_of = dict(zip(kinds, layer_bytes, strict=True))
        return sum(num_slots * bytes_of[kind] for kind, num_slots in self.peak_slots(kinds).items())

    def bytes_per_sweep(self, layer_bytes: Sequence[int]) -> int:
        """Bytes uploaded in every sweep but the first, given the bytes of every layer."""
        return sum(layer_bytes[op.layer_idx] for op in self.steady_sweep if isinstance(op, Load))

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
        return _simulate(ops, self.num_layers)

    @property
    def _after_first_sweep(self) -> frozenset[int]:
        return self._present[len(self.warm_up) + len(self.first_sweep)]


def _simulate(ops: Iterable[Op], num_layers: int) -> list[frozenset[int]]:
    """The layers that are present at first (none) and after each operation; raises where an operation is impossible."""
    present: frozenset[int] = frozenset()
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


def _with_steps(ops: Sequence[Op], following: Sequence[Op]) -> tuple[Op, ...]:
    """The same operations, each `Load` with its steps; `following` is the sweep that comes after `ops`.

    For the sweep use 0, release 0, load 2, use 1, use 2 over and over, the upload of layer 2 starts one use ahead of
    its own, three ahead of the next load: 1.
    """
    filled_in: list[Op] = []
    for i, op in enumerate(ops):
        if isinstance(op, Load):
            until = itertools.takewhile(
                lambda later, op=op: not isinstance(later, Load) and later != Use(op.layer_idx),
                itertools.chain(ops[i + 1 :], following),
            )
            op = replace(op, steps=sum(isinstance(later, Use) for later in until))
        filled_in.append(op)
    return tuple(filled_in)


def _num_loads(ops: Iterable[Op]) -> int:
    return sum(isinstance(op, Load) for op in ops)
