"""Runs a schedule: the one place where layers come to the device and leave it.

Knows the order of operations (from the policy) and what is left of a sweep that failed; takes no decision, and leaves
it to `PresentLayers` how a layer comes and goes. It never waits for the device, if the transfer does not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from vramjax.errors import ConfigError, VramjaxError
from vramjax.residency.jit_options import JitOptions
from vramjax.residency.pool import Pool
from vramjax.residency.present_layers import LayerState, PresentLayers
from vramjax.residency.run import Run
from vramjax.residency.schedule import Load, Op, Release, Schedule, Use
from vramjax.residency.stats import ResidencyStats

if TYPE_CHECKING:  # neither is needed to run, and both import JAX
    from vramjax.residency.host_store import Store
    from vramjax.residency.transfer import Transfer

ReleaseMode = Literal["pool", "free"]


class Controller:
    """Layers of a store, on the device one after the other as the schedule says.

    Invariant: a layer that is in use or still loading is never released; no more layers are present than the
    schedule's peak; between two sweeps exactly those are present that the next sweep begins with. A sweep that fails
    or is left early drops all layers, their memory goes back to the pool, and the next sweep begins like the first,
    whatever interrupts this. (Where the schedule never releases a layer, layers that have arrived stay: they are right,
    and needed.)

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
        self._stats = ResidencyStats()
        recycles = release == "pool" and store.is_pinned
        self._layers = PresentLayers(store, transfer, self._pool, self._stats, recycles=recycles)
        self._warmed_up = self._first_sweep_done = self._closed = False
        self._all: list[Any] | None = None  # the weights of all layers, while nothing has changed since a whole sweep
        self._run: Run | None = None  # a sweep or a warm-up that has begun and was neither ended nor aborted
        self._uploaded_this_sweep: set[int] = set()

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
        return self._layers.state(layer_idx)

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
        if steps and self._layers.recycles:
            for geometry in {self._store.geometry(i) for i in range(self.num_layers)}:
                self._transfer.rehearse(geometry, sorted(steps) if spread else [1], call)

    def warm_up(self) -> None:
        """Starts the uploads that come before the first sweep, if the schedule has any and they are not done.

        The first sweep would do it. Called earlier, it takes them out of the first sweep's time.
        """
        self._begin(run := Run())
        try:
            self._warm_up()
            self._layers.note_end()
            self._run = None
        except BaseException:
            self._abort(run)
            raise

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
        run = Run()
        return run.of(self._sweep(run))

    def sweep_at_once(self, num_sweeps: int = 1) -> list[Any]:
        """A sweep of a schedule that never releases a layer, or so many in a row: the weights of all of them.

        It costs the host next to nothing. The list and what is in it are the same from call to call, and must not be
        changed.

        Raises:
          VramjaxError: as for `sweep`.
        """
        assert not self.schedule.releases
        self._end_what_is_over()
        if self._all is None:
            weights = [each for _, each in self.sweep()]
            self._all = weights
            num_sweeps -= 1
        for _ in range(num_sweeps):
            self._stats.hits += self.num_layers
            self._count_sweep(uploads=0, num_bytes=0)
        return self._all

    def forget(self) -> None:
        """Drops all layers between two sweeps, so that the next one begins like the first; for after a failure.

        What failed on the device long after it was called may have left arrays behind that cannot be used. Layers of a
        schedule that never releases one stay.
        """
        if not self._closed and not self._is_busy:
            self._drop()

    def close(self) -> None:
        """Gives all device memory back; a sweep that is under way is over. Closing again does nothing.

        Should freeing fail, everything else is still freed and forgotten, and the first error is raised at the end.
        """
        self._closed = True
        self._all = None
        self._stats.sweeps_aborted += self._run is not None
        self._run = None
        self._layers.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_busy(self) -> bool:
        return self._run is not None and self._run.is_under_way

    def _check_idle(self) -> None:
        if self._closed:
            raise VramjaxError("the controller is closed and its layers are off the device; make a new one")
        if self._is_busy:
            raise VramjaxError(
                "another sweep of this controller is not finished; run it to its end or close() its iterator first"
            )

    def _begin(self, run: Run) -> None:
        self._end_what_is_over()
        self._run = run

    def _end_what_is_over(self) -> None:
        self._check_idle()
        if self._run is not None:
            self._abort(self._run)  # an interrupt has kept it from doing that itself

    def _count_sweep(self, *, uploads: int, num_bytes: int) -> None:
        self._stats.last_sweep_is_steady = self._first_sweep_done
        self._stats.sweeps += 1
        self._stats.last_sweep_uploads = uploads
        self._stats.last_sweep_bytes_uploaded = num_bytes

    def _sweep(self, run: Run) -> Generator[tuple[int, Any], None, None]:
        self._begin(run)
        try:
            self._warm_up()
            self._uploaded_this_sweep.clear()
            uploads, num_bytes = self._stats.uploads, self._stats.bytes_uploaded
            for op in self.schedule.steady_sweep if self._first_sweep_done else self.schedule.first_sweep:
                if isinstance(op, Use):
                    yield op.layer_idx, self._use(op.layer_idx)
                    self._layers.end_use()
                    if self._run is not run:
                        raise VramjaxError("the controller was closed in the middle of a sweep")
                else:
                    self._execute(op)
            self._count_sweep(uploads=self._stats.uploads - uploads, num_bytes=self._stats.bytes_uploaded - num_bytes)
            self._layers.note_end()
            self._first_sweep_done = True
            self._run = None
        except BaseException:  # also GeneratorExit, which is what a consumer's break or exception is seen as here
            self._abort(run)
            raise

    def _use(self, layer_idx: int) -> Any:
        """What a sweep hands out for a layer: its weights."""
        weights = self._layers.acquire(layer_idx)
        self._stats.hits += layer_idx not in self._uploaded_this_sweep
        return weights

    def _warm_up(self) -> None:
        if not self._warmed_up:
            self._reserve()
            self._store.expect(_loads_of(self.schedule, present=self._layers.indices))
            for op in self.schedule.warm_up:
                self._execute(op)
            self._warmed_up = True

    def _reserve(self) -> None:
        """Makes every slot that the schedule needs at its peak, if they are to be recycled.

        So the pool is closed before the first upload: no device memory is made later, and memory that is not there is
        missed before any work.
        """
        if self._layers.recycles and self.schedule.releases:
            geometries = [self._store.geometry(i) for i in range(self.num_layers)]
            self._layers.reserve(self.schedule.peak_slots(geometries))

    def _execute(self, op: Op) -> None:
        if isinstance(op, Release):
            self._layers.release(op.layer_idx)
        elif isinstance(op, Load) and self.state(op.layer_idx) is LayerState.ABSENT:
            self._layers.load(op.layer_idx, steps=op.steps)
            self._uploaded_this_sweep.add(op.layer_idx)
        else:
            assert not self.schedule.releases  # it has stayed through an aborted sweep

    def _abort(self, run: Run) -> None:
        """Leaves nothing half-done after a failure of `run`, if that is still to be done."""
        if self._run is run:
            self._drop()
            self._stats.sweeps_aborted += 1
            self._run = None  # not before: the next run aborts this one again, should an interrupt come in between

    def _drop(self) -> None:
        self._warmed_up = self._first_sweep_done = False
        self._all = None
        self._layers.drop(keep_arrived=not self.schedule.releases)


def _loads_of(schedule: Schedule, present: frozenset[int]) -> Iterator[int]:
    """The layers that will be loaded, in order, without end unless the steady sweep loads nothing.

    `present` is what has stayed through an aborted sweep, which a schedule that releases nothing does not load again.
    """
    for op in itertools.chain(schedule.warm_up, schedule.first_sweep):
        if isinstance(op, Load) and op.layer_idx not in present:
            yield op.layer_idx
    yield from itertools.cycle(op.layer_idx for op in schedule.steady_sweep if isinstance(op, Load))
