"""Runs a schedule: the one place where layers come to the device and leave it.

Knows the order of operations (from the policy), what a layer's memory is (from the store) and how to move it (from
the transfer); takes no decision. It never waits for the device, if the transfer does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from vramjax.errors import ConfigError, VramjaxError
from vramjax.residency.geometry import PyTree
from vramjax.residency.jit_options import JitOptions
from vramjax.residency.pool import Pool, Slot
from vramjax.residency.schedule import Load, Op, Release, Schedule, Use
from vramjax.residency.stats import ResidencyStats

if TYPE_CHECKING:  # neither is needed to run, and both import JAX
    from vramjax.residency.host_store import Store
    from vramjax.residency.transfer import Transfer

ReleaseMode = Literal["pool", "free"]


class LayerState(enum.Enum):
    """Where a layer is. It moves down this list and back to the top."""

    ABSENT = "absent"
    LOADING = "loading"  # its upload has been started
    RESIDENT = "resident"


class Controller:
    """Layers of a store, on the device one after the other as the schedule says.

    Invariant: a layer that is in use or still loading is never released; no more layers are present than the
    schedule's peak; between two sweeps exactly those are present that the next sweep begins with. A sweep that fails
    or is left early drops all layers, their memory goes back to the pool, and the next sweep begins like the first.
    (Where the schedule never releases a layer, layers that have arrived stay: they are right, and needed.)

    Example, 3 layers under a cold past window of 1::

        with Controller(store, past_window(3, 1), transfer) as controller:
            for token in range(2):
                for layer_idx, weights in controller.sweep():  # run it to its end
                    x = layer_step(weights, x)                 # weights are good until the next round
        # uploads of the first sweep: 0, 1, 2; of the second: 0, 1, as layer 2 had stayed

    With `layer_step = controller.jit(layer_step)` uploads that the schedule starts ahead of their layer run while
    the step computes.

    Not thread-safe: one thread, one sweep at a time.
    """

    def __init__(
        self,
        store: Store,
        schedule: Schedule,
        transfer: Transfer,
        pool: Pool | None = None,
        *,
        release: ReleaseMode = "pool",
    ) -> None:
        """A controller with nothing on the device yet.

        Args:
          store: the layers on the host.
          schedule: what to do, from `vramjax.residency.policy`.
          transfer: how to do it.
          pool: the pool for released slots, this controller's own; None is a pool of the default cap.
          release: "pool" recycles the memory of a released layer; "free" really frees it, each time, which is also
            what is done with layers of a store that is not pinned: JAX copies into given memory from pinned arrays
            only.

        Raises:
          ConfigError: the schedule is for another number of layers, or `release` is neither of the two.
        """
        if store.num_layers != schedule.num_layers:
            raise ConfigError(
                f"the schedule is for {schedule.num_layers} layers and the store has {store.num_layers}; "
                f"expected the same number"
            )
        if release not in get_args(ReleaseMode):
            raise ConfigError(f"release is {release!r}; expected 'pool' or 'free'")
        self.schedule = schedule
        self._store = store
        self._transfer = transfer
        self._pool = pool if pool is not None else Pool()
        self._release_mode: ReleaseMode = release if store.is_pinned else "free"
        self._slots: dict[int, Slot] = {}  # of the layers that are present
        self._loading: set[int] = set()  # those of them that have not arrived
        self._in_use: int | None = None
        self._warmed_up = self._first_sweep_done = self._closed = False
        self._running: object | None = None  # the identity of the sweep or warm-up that is under way
        self._uploaded_this_sweep: set[int] = set()
        self._stats = ResidencyStats()

    @property
    def num_layers(self) -> int:
        return self.schedule.num_layers

    @property
    def stats(self) -> ResidencyStats:
        """The counters as they are now; a copy."""
        return dataclasses.replace(
            self._stats,
            pool_hits=self._pool.hits,
            pool_misses=self._pool.misses,
            pool_fallback_frees=self._pool.fallback_frees,
        )

    def state(self, layer_idx: int) -> LayerState:
        if layer_idx not in self._slots:
            return LayerState.ABSENT
        return LayerState.LOADING if layer_idx in self._loading else LayerState.RESIDENT

    def jit(
        self,
        function: Callable[..., Any],
        *,
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
        spread: bool = True,
    ) -> Callable[..., Any]:
        """`jax.jit(function, ...)` for the loop over `sweep()`: its calls take along uploads that are under way.

        So uploads run while the device computes. What `function` computes is not changed. It is compiled a few times
        more, once for each different part of an upload, as calls come to take it along; `rehearse` does that in
        advance. Weights must not be donated. Called inside another jit it is as `jax.jit(function, ...)` there.

        Args:
          function: a layer step, or anything else that is called between two layers.
          static_argnames: static arguments, which must be given by name.
          donate_argnums: positions of arguments to donate, counted from the first.
          spread: whether a call takes a part of an upload along (for a function that is called once for each layer),
            or all of it.

        Raises:
          ConfigError: a position is negative.
        """
        return self._transfer.jit(function, JitOptions.of(static_argnames, donate_argnums, spread=spread))

    def rehearse(self, call: Callable[[], Any], *, spread: bool = True) -> None:
        """Compiles what steady sweeps will need for uploads to travel in the calls of a step; before any layer comes.

        Takes the memory of one more layer while it runs. `call` runs the step once, a function from `jit` with the
        same `spread`.
        """
        steps = {op.steps for op in self.schedule.steady_sweep if isinstance(op, Load)} - {0}
        if steps and self._release_mode == "pool":
            for geometry in {self._store.geometry(i) for i in range(self.num_layers)}:
                self._transfer.rehearse(geometry, sorted(steps) if spread else [1], call)

    def warm_up(self) -> None:
        """Starts the uploads that come before the first sweep, if the schedule has any and they are not done.

        The first sweep would do it. Called earlier, it takes them out of the first sweep's time.
        """
        token = self._begin()
        try:
            self._warm_up()
        except BaseException:
            self._abort(token)
            raise
        self._running = None
        self._note_end()

    def sweep(self) -> Iterator[tuple[int, Any]]:
        """Yields (layer_idx, weights) for each layer in order; `weights` is the layer's pytree on the device.

        Weights are good until the next layer is asked for; then their memory may be given to another layer, also
        while the device still computes with them (what was dispatched is safe). They must not be donated to a jit.
        A sweep is complete when the iterator has run to its end; one that is left before, by `break` or by an
        exception, is aborted as soon as the iterator is closed, which Python does when nothing refers to it.

        Raises:
          VramjaxError: the controller is closed, or another sweep is not finished.
        """
        self._check_idle()
        return self._sweep()

    def forget(self) -> None:
        """Drops all layers between two sweeps, so that the next one begins like the first; for after a failure.

        What failed on the device long after it was called may have left arrays behind that cannot be used. Layers of a
        schedule that never releases one stay.
        """
        if not self._closed and self._running is None:
            self._drop()

    def close(self) -> None:
        """Gives all device memory back; a sweep that is under way is over. Closing again does nothing.

        Should freeing fail, everything else is still freed and forgotten, and the first error is raised at the end.
        """
        self._closed = True
        self._stats.sweeps_aborted += self._running is not None
        self._running = self._in_use = None
        first_error: Exception | None = None
        while self._slots:
            layer_idx = next(iter(self._slots))
            self._arrives(layer_idx)  # memory is not freed under a copy
            _, slot = self._detach(layer_idx)
            first_error = self._try_to_free(slot) or first_error
        for slot in self._pool.drain():
            first_error = self._try_to_free(slot) or first_error
        if first_error is not None:
            raise first_error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Sweeps

    def _check_idle(self) -> None:
        if self._closed:
            raise VramjaxError("the controller is closed and its layers are off the device; make a new one")
        if self._running is not None:
            raise VramjaxError(
                "another sweep of this controller is not finished; run it to its end or close() its iterator first"
            )

    def _begin(self) -> object:
        self._check_idle()
        self._running = token = object()
        return token

    def _sweep(self) -> Generator[tuple[int, Any], None, None]:
        token = self._begin()
        try:
            self._warm_up()
            self._uploaded_this_sweep.clear()
            uploads, num_bytes = self._stats.uploads, self._stats.bytes_uploaded
            for op in self.schedule.steady_sweep if self._first_sweep_done else self.schedule.first_sweep:
                if isinstance(op, Use):
                    yield op.layer_idx, self._acquire(op.layer_idx)
                    self._in_use = None
                    if self._running is not token:
                        raise VramjaxError("the controller was closed in the middle of a sweep")
                else:
                    self._execute(op)
        except BaseException:  # also GeneratorExit, which is what a consumer's break or exception is seen as here
            self._abort(token)
            raise
        self._running = None
        self._stats.last_sweep_is_steady = self._first_sweep_done
        self._first_sweep_done = True
        self._stats.sweeps += 1
        self._stats.last_sweep_uploads = self._stats.uploads - uploads
        self._stats.last_sweep_bytes_uploaded = self._stats.bytes_uploaded - num_bytes
        self._note_end()

    def _warm_up(self) -> None:
        if not self._warmed_up:
            self._reserve()
            self._store.expect(_loads_of(self.schedule, present=frozenset(self._slots)))
            for op in self.schedule.warm_up:
                self._execute(op)
            self._warmed_up = True

    def _reserve(self) -> None:
        """Makes every slot that the schedule needs at its peak, if they are to be recycled.

        So the pool is closed before the first upload: no device memory is made later, and memory that is not there is
        missed before any work.
        """
        if self._release_mode == "free" or not self.schedule.releases:
            return
        geometries = [self._store.geometry(i) for i in range(self.num_layers)]
        for geometry, num_slots in self.schedule.peak_slots(geometries).items():
            held = self._pool.count(geometry) + sum(self._store.geometry(i) == geometry for i in self._slots)
            for _ in range(min(num_slots - held, self._pool.cap - self._pool.num_slots)):
                self._pool.stock(geometry, self._transfer.make_slot(geometry))
        self._note_peak()

    def _abort(self, token: object) -> None:
        """Leaves nothing half-done after a failure of the sweep `token`, if that is still the one under way."""
        if self._running is not token:
            return
        self._running = None
        self._stats.sweeps_aborted += 1
        self._drop()

    def _drop(self) -> None:
        self._in_use = None
        self._warmed_up = self._first_sweep_done = False
        for layer_idx in list(self._slots):
            arrived = self._arrives(layer_idx)
            if arrived and not self.schedule.releases:
                continue
            geometry, slot = self._detach(layer_idx)
            # Memory that a copy failed into, or that is gone, is not trusted with another one.
            is_good = arrived and self._transfer.is_alive(slot)
            if not (is_good and self._release_mode == "pool" and self._pool.give(geometry, slot)):
                self._try_to_free(slot)

    # Operations

    def _execute(self, op: Op) -> None:
        if isinstance(op, Load):
            self._load(op.layer_idx, op.steps)
        elif isinstance(op, Release):
            self._release(op.layer_idx)

    def _load(self, layer_idx: int, steps: int) -> None:
        if layer_idx in self._slots:
            assert not self.schedule.releases
            return  # it has stayed through an aborted sweep
        host = self._store.layer(layer_idx)
        geometry = self._store.geometry(layer_idx)
        slot = self._pool.take(geometry)
        uploaded = functools.partial(self._store.uploaded, layer_idx) if self._store.reuses_memory else None
        try:
            self._loading.add(layer_idx)
            self._slots[layer_idx] = self._transfer.upload(host, slot, steps=steps, uploaded=uploaded)
        except BaseException:
            self._loading.remove(layer_idx)
            # The slot may or may not have been used up by then.
            if slot is None or not self._transfer.is_alive(slot):
                self._stats.slots_lost += 1
            elif not self._pool.give(geometry, slot):
                self._try_to_free(slot)
            raise
        self._uploaded_this_sweep.add(layer_idx)
        stats = self._stats
        stats.uploads += 1
        stats.bytes_uploaded += geometry.num_bytes
        stats.peak_resident_layers = max(stats.peak_resident_layers, len(self._slots))
        self._note_peak()

    def _note_end(self) -> None:
        self._stats.resident_layers_end = len(self._slots)
        self._stats.resident_arrays_end = sum(self._store.geometry(i).num_arrays for i in self._slots)

    def _note_peak(self) -> None:
        layer_bytes = sum(self._store.geometry(i).num_bytes for i in self._slots)
        self._stats.peak_device_bytes = max(self._stats.peak_device_bytes, layer_bytes + self._pool.num_bytes)

    def _acquire(self, layer_idx: int) -> PyTree:
        self._arrive(layer_idx)
        self._in_use = layer_idx
        self._stats.hits += layer_idx not in self._uploaded_this_sweep
        return self._transfer.view(self._slots[layer_idx])

    def _release(self, layer_idx: int) -> None:
        assert layer_idx != self._in_use
        self._arrive(layer_idx)  # a copy in transit must not find its memory given to another
        geometry, slot = self._detach(layer_idx)
        self._stats.evictions += 1
        if self._release_mode == "free" or not self._pool.give(geometry, slot):
            self._free(slot)

    def _arrive(self, layer_idx: int) -> None:
        """Loading -> resident; raises what the copy failed with."""
        if layer_idx in self._loading:
            self._transfer.wait(self._slots[layer_idx])
            self._loading.remove(layer_idx)

    def _arrives(self, layer_idx: int) -> bool:
        """Whether the layer's copy ended well; for the ways out, where a second error would hide the first."""
        with contextlib.suppress(Exception):
            self._arrive(layer_idx)
        return layer_idx not in self._loading

    def _detach(self, layer_idx: int) -> tuple[Any, Slot]:
        """Anything -> absent: the layer's geometry and its slot, which is the caller's now."""
        self._loading.discard(layer_idx)
        return self._store.geometry(layer_idx), self._slots.pop(layer_idx)

    def _free(self, slot: Slot) -> None:
        self._stats.slots_freed += 1  # whatever comes of it: nobody has the slot any more
        self._transfer.free(slot)

    def _try_to_free(self, slot: Slot) -> Exception | None:
        try:
            self._free(slot)
        except Exception as error:
            return error
        return None


def _loads_of(schedule: Schedule, present: frozenset[int]) -> Iterator[int]:
    """The layers that will be loaded, in order, without end unless the steady sweep loads nothing.

    `present` is what has stayed through an aborted sweep, which a schedule that releases nothing does not load again.
    """
    for op in itertools.chain(schedule.warm_up, schedule.first_sweep):
        if isinstance(op, Load) and op.layer_idx not in present:
            yield op.layer_idx
    yield from itertools.cycle(op.layer_idx for op in schedule.steady_sweep if isinstance(op, Load))
