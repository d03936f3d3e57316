"""Ctrl-C at every step of a sweep at which Python looks for signals: the next sweep is right."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interrupting import described, interrupt, places_of
from waiting import in_time

from vramjax.residency import Controller, HostStore, geometry_of, pinned_ring
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.mapped_store import MappedStore
from vramjax.residency.turn_transfer import TurnTransfer

OURS = ("/vramjax/residency/", "/threading.py")
MAPPED = ("/mapped_store.py", "/serial_calls.py", "/threading.py")
SCHEDULE = pinned_ring(5, 3)
LAYERS = [{"w": np.full((16, 16), i + 1.0, np.float32), "b": np.full(16, i + 0.5, np.float32)} for i in range(5)]
GEOMETRIES = [geometry_of(layer) for layer in LAYERS]


def read_into(layer_idx: int, views: dict[str, np.ndarray]) -> None:
    for name, view in views.items():
        view[...] = LAYERS[layer_idx][name]


STORES: dict[str, Callable[[], Any]] = {
    "pinned": lambda: HostStore(LAYERS),
    "mapped": lambda: MappedStore(read_into, GEOMETRIES, num_buffers=3),
}


@jax.jit
def total(weights: dict[str, jax.Array]) -> jax.Array:
    return jnp.sum(weights["w"]) + jnp.sum(weights["b"])


def layer_step(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return 2 * x + total(weights)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    assert [thread for thread in threading.enumerate() if thread not in before] == []


# An interrupt that comes as Python finalizes something is lost.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Sweeps:
    """A controller over the layers, and what two sweeps give."""

    def __init__(self, store: str, transfer: Callable[[], FusedTransfer]) -> None:
        self.store = STORES[store]()
        self.controller = Controller(self.store, SCHEDULE, transfer())
        self._step = self.controller.jit(layer_step)

    def __call__(self) -> list[float]:
        results = []
        for _ in range(2):
            x = jnp.zeros(())
            for _, weights in self.controller.sweep():
                x = self._step(weights, x)
            results.append(float(x))
        return results

    def check(self, place: Any = None) -> None:
        x = 0.0
        for layer in LAYERS:
            x = 2 * x + float(layer["w"].sum() + layer["b"].sum())
        assert self() == [x, x], place and described(place)

    def close(self) -> None:
        assert self.controller.stats.last_sweep_uploads == SCHEDULE.uploads_per_sweep > 0
        self.controller.close()
        self.store.close()


@pytest.mark.parametrize(
    ("store", "transfer", "names"),
    [
        ("pinned", FusedTransfer, OURS),
        ("pinned", functools.partial(TurnTransfer, num_devices=2), OURS),
        ("mapped", FusedTransfer, MAPPED),
    ],
    ids=["pinned", "in turns", "mapped"],
)
def test_an_interrupt_at_every_step_of_a_sweep(
    store: str, transfer: Callable[[], FusedTransfer], names: Sequence[str]
) -> None:
    sweeps = Sweeps(store, transfer)
    for _ in range(2):
        sweeps.check()

    def begin_anew() -> None:
        sweeps.controller.forget()
        sweeps()

    places = places_of(begin_anew, *names)  # of a first sweep, and of a steady one
    num_interrupted = 0
    for place in places:
        num_interrupted += interrupt(begin_anew, place, *names)
        sweeps.controller.forget()
        in_time(functools.partial(sweeps.check, place))
    assert num_interrupted > 0.8 * len(places) > 20  # how often a layer is waited for is never the same
    sweeps.close()
