"""Layers dealt out over several devices, so that each streams its own share over its own link, all at the same time.

Layer i is on device i % N. Were the layers cut into N blocks instead, only the device whose block is being computed
would give slots free, and all links but one would soon be idle.

What limits such a sweep, with u the time of a layer's upload, c that of its computation and e that of the hop of what
a layer hands to the next one, for N layers in turn, one on each device:

- A device computes its layer and uploads another one. That takes u + c if the two are programs of their own, as
  `DeviceTransfer` has them, and u if the upload hides the computation, for which there is `TurnTransfer`. All devices
  do so at once, and none waits for a link but its own.
- What is computed goes from device to device, which takes N (c + e); the links are busy as long as this is less than
  u. The results of a program can be used when all of it has ended: an upload that travels whole in a layer step, as
  with `FusedTransfer`, makes it N (u + e), and N links are no better than one.
- A hop waits for what it copies, and for what has been queued on the device that it goes to. So a device's uploads are
  queued as late as possible: not when its layer has been used, but when its next one is asked for, by when the consumer
  has queued the hop.

Knows controllers and in which order to ask them; not what a device is, and not what a layer is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from vramjax.errors import ConfigError
from vramjax.residency.controller import Controller
from vramjax.residency.run import Run
from vramjax.residency.stats import ResidencyStats


def layers_of_device(device_idx: int, num_layers: int, num_devices: int) -> range:
    """The layers that a device has, in order: of 7 layers the second of 3 devices has 1 and 4."""
    return range(device_idx, num_layers, num_devices)


class MultiController:
    """Sweeps over all layers of several controllers, each of which has every N-th layer, on a device of its own.

    Invariant: layer i is layer i // N of controller i % N. A sweep begins on all controllers and ends on all of them;
    one that fails on one, or is left early, is aborted on all that have not ended it, and the next one is right.

    Example, 3 layers on 2 devices, the first of which has layers 0 and 2::

        layers = MultiController([Controller(store_0, schedule_0, transfer_0),   # of 2 layers
                                  Controller(store_1, schedule_1, transfer_1)])  # of 1
        with layers:
            for layer_idx, weights in layers.sweep():                            # 0, 1, 2
                x = layer_step[layer_idx % 2](weights, x)
                x = jax.device_put(x, devices[(layer_idx + 1) % 2])              # before the next layer is asked for

    Not thread-safe: one thread, one sweep at a time.
    """

    def __init__(self, controllers: Sequence[Controller]) -> None:
        """Sweeps over these controllers' layers, which are theirs no more: nobody else runs or closes them.

        Raises:
          ConfigError: there is no controller, or one has another number of layers than is its share.
        """
        self.controllers = tuple(controllers)
        self.num_layers = sum(controller.num_layers for controller in self.controllers)
        shares = [len(layers_of_device(i, self.num_layers, self.num_devices)) for i in range(self.num_devices)]
        counts = [controller.num_layers for controller in self.controllers]
        if not counts or counts != shares:
            raise ConfigError(
                f"the controllers have {counts} layers; expected at least one controller, and each to have every "
                f"{self.num_devices}th layer of all {self.num_layers}: {shares}"
            )
        self._run = Run()  # the last sweep over all
        self._sweeps: list[Any] = []  # those over each device that are part of it

    @property
    def num_devices(self) -> int:
        return len(self.controllers)

    @property
    def stats(self) -> ResidencyStats:
        """The counters of all devices, added up; peaks are sums of the devices' own. Sweeps are those over all layers.

        A sweep is steady if it is on every device.
        """
        each = [controller.stats for controller in self.controllers]
        sums: dict[str, Any] = {
            field.name: sum(getattr(stats, field.name) for stats in each)
            for field in dataclasses.fields(ResidencyStats)
        }
        # The first controller begins every sweep first and ends it last: no other has seen more of them.
        return dataclasses.replace(
            ResidencyStats(**sums),
            sweeps=each[0].sweeps,
            sweeps_aborted=each[0].sweeps_aborted,
            last_sweep_is_steady=all(stats.last_sweep_is_steady for stats in each),
        )

    def warm_up(self) -> None:
        """Starts the uploads that come before the first sweep, on every device; see `Controller.warm_up`."""
        self._end_what_is_over()
        for controller in self.controllers:
            controller.warm_up()

    def sweep(self) -> Iterator[tuple[int, Any]]:
        """Yields (layer_idx, weights) for each layer in order; see `Controller.sweep`.

        Weights are on the layer's device, and good until the next layer is asked for.

        Raises:
          VramjaxError: it is closed, or another sweep is not finished.
        """
        self._end_what_is_over()
        run = Run()
        return run.of(self._sweep(run, [controller.sweep() for controller in self.controllers]))

    def sweep_at_once(self, num_sweeps: int = 1) -> list[Any]:
        """The weights of all layers, on one device; see `Controller.sweep_at_once`."""
        (controller,) = self.controllers
        self._end_what_is_over()
        return controller.sweep_at_once(num_sweeps)

    def forget(self) -> None:
        """Drops all layers of every device; see `Controller.forget`."""
        self._end_what_is_over()
        for controller in self.controllers:
            controller.forget()

    def close(self) -> None:
        """Closes every controller. Should that fail on one, the others are still closed, and the first error raised."""
        first_error: Exception | None = None
        for controller in self.controllers:
            try:
                controller.close()
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _end_what_is_over(self) -> None:
        """Ends each device's part of a sweep that has ended, but that an interrupt has kept from ending those."""
        if not self._run.is_under_way:
            for sweep in self._sweeps:
                sweep.close()

    def _sweep(self, run: Run, sweeps: list[Any]) -> Generator[tuple[int, Any], None, None]:
        if not self._run.is_under_way:  # else the first of `sweeps` says so
            self._end_what_is_over()
            self._run, self._sweeps = run, sweeps
        with contextlib.ExitStack() as leaving:
            for sweep in sweeps:
                leaving.enter_context(contextlib.closing(sweep))  # which aborts it, unless it has ended
            begun = [itertools.chain([next(sweep)], sweep) for sweep in sweeps]
            for layer_idx in range(self.num_layers):
                _, weights = next(begun[layer_idx % self.num_devices])
                yield layer_idx, weights
            for sweep in reversed(sweeps):
                rest = next(sweep, None)  # which ends it
                assert rest is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
