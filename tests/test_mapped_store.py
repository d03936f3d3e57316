"""A store of layers that come from disk through a few host buffers: what it reads when, and what it raises."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from waiting import Copy, eventually, in_time

from vramjax.errors import BudgetError, CheckpointError, ConfigError, VramjaxError
from vramjax.residency import (
    geometry_of,
    mapped_buffers,
)
from vramjax.residency.mapped_buffers import host_buffers
from vramjax.residency.mapped_store import MappedStore

GEOMETRY = geometry_of({"w": np.zeros((8, 16), np.int8), "s": np.zeros(8, np.float32)})


def simple_store(num_layers: int = 6, **options: Any) -> tuple[MappedStore, list[int]]:
    reads: list[int] = []

    def read_into(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        reads.append(layer_idx)
        for view in views.values():
            view[...] = layer_idx

    options = {"num_buffers": 3, "num_threads": 2} | options
    return MappedStore(read_into, [GEOMETRY] * num_layers, **options), reads


def test_it_reads_ahead_as_far_as_there_are_buffers() -> None:
    announced: list[int] = []
    store, reads = simple_store(will_need=announced.append)
    assert not reads
    store.expect(itertools.cycle([0, 2, 4]))
    assert eventually(lambda: sorted(reads) == [0, 2, 4])
    assert eventually(lambda: announced == [0]), "the layer that no buffer is free for is announced, once"
    time.sleep(0.02)
    assert len(reads) == 3 and announced == [0]
    assert (np.asarray(store.layer(0)["w"]) == 0).all()
    time.sleep(0.02)
    assert len(reads) == 3, "its upload is not even queued"
    copied = Copy()
    store.uploaded(0, copied)
    time.sleep(0.02)
    assert len(reads) == 3, "its upload has not ended"
    copied.end()
    assert eventually(lambda: len(reads) == 4) and reads[3] == 0
    store.close()


def test_threads_read_at_the_same_time() -> None:
    together = threading.Barrier(3)

    def read_into(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        together.wait(10)

    store = MappedStore(read_into, [GEOMETRY] * 6, num_buffers=3, num_threads=3)
    store.expect(iter(range(6)))

    def run() -> None:
        for layer_idx in range(3):
            store.layer(layer_idx)  # raises what the barrier raised, if nobody else came
        store.close()

    in_time(run)


def test_two_uploads_of_one_layer_are_reported_in_their_order() -> None:
    store, reads = simple_store()
    store.expect(itertools.repeat(2))
    first = store.layer(2)["w"].unsafe_buffer_pointer()
    store.layer(2)
    store.uploaded(2, Copy(has_ended=True))
    assert eventually(lambda: len(reads) == 4)
    store.layer(2)  # the third buffer
    assert store.layer(2)["w"].unsafe_buffer_pointer() == first
    store.close()


def test_a_layer_that_could_not_be_read_may_be_asked_for_again() -> None:
    attempts: list[int] = []

    def read_into(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        attempts.append(layer_idx)
        if attempts == [0, 1]:
            raise CheckpointError("once")

    store = MappedStore(read_into, [GEOMETRY] * 3, num_buffers=2, num_threads=1)
    store.expect(iter([0, 1, 2]))
    store.layer(0)
    with pytest.raises(CheckpointError, match="once"):
        store.layer(1)
    store.layer(1)
    assert attempts == [0, 1, 1]
    store.close()


def test_memory_is_that_of_the_buffers() -> None:
    store, _ = simple_store(num_layers=40, num_buffers=3)
    addresses: set[int] = set()
    ready = Copy(has_ended=True)
    store.expect(itertools.cycle(range(40)))
    for layer_idx in range(40):
        addresses |= {array.unsafe_buffer_pointer() for array in store.layer(layer_idx).values()}
        store.uploaded(layer_idx, ready)
    assert len(addresses) == 2 * 3 and store.num_host_bytes == 3 * 4096
    store.close()
    assert simple_store(num_layers=1, num_buffers=5)[0].num_host_bytes == 2 * 4096, "more would never be used"


def test_what_was_not_announced_is_read_all_the_same() -> None:
    ready = Copy(has_ended=True)
    store, reads = simple_store()
    for layer_idx in (3, 3, 1):  # nothing was announced at all
        assert (np.asarray(store.layer(layer_idx)["w"]) == layer_idx).all()
        store.uploaded(layer_idx, ready)
    assert reads == [3, 3, 1]
    store.expect(iter([0, 1, 2]))
    for layer_idx in (0, 5, 2):
        assert (np.asarray(store.layer(layer_idx)["w"]) == layer_idx).all()
        store.uploaded(layer_idx, ready)
    store.uploaded(4, ready)  # nobody has asked for it: no effect
    store.close()


def test_one_layer_over_and_over() -> None:
    store, reads = simple_store()
    store.expect(itertools.repeat(2))
    copies = [Copy() for _ in range(20)]
    for i, copied in enumerate(copies):
        assert (np.asarray(store.layer(2)["w"]) == 2).all()
        store.uploaded(2, copied)
        if i:
            copies[i - 1].end()
    copies[-1].end()
    store.close()
    assert len(reads) >= 20


def test_buffers_that_are_all_lent_are_an_error_and_no_deadlock() -> None:
    store, _ = simple_store()
    store.expect(iter(range(6)))

    def run() -> None:
        for layer_idx in range(3):
            store.layer(layer_idx)
        with pytest.raises(BudgetError, match="layer 3 finds all 3 host buffers taken by uploads"):
            store.layer(3)
        store.expect(iter(range(6)))  # what was never reported is waited for, and free again
        for layer_idx in range(3):
            assert (np.asarray(store.layer(layer_idx)["w"]) == layer_idx).all()
        store.close()

    in_time(run)


def test_an_upload_that_failed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        def block_until_ready(self) -> None:
            raise jax.errors.JaxRuntimeError("INTERNAL: cable pulled")

    waits: list[Any] = []
    monkeypatch.setattr(mapped_buffers, "wait_for", waits.append)
    store, reads = simple_store()
    store.expect(iter(range(4)))
    store.layer(0)
    store.uploaded(0, Failed())
    assert eventually(lambda: len(reads) == 4) and waits == [jax.devices()[0]]
    store.close()


def test_an_order_that_breaks_is_an_error_and_no_deadlock() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise RuntimeError("a bug")

    def run() -> None:
        store, _ = simple_store()
        store.expect(broken())
        with pytest.raises(RuntimeError, match="a bug"):
            store.layer(0)
            store.layer(1)
        store.close()

    in_time(run)


def test_closing_ends_the_threads_in_the_middle_of_anything() -> None:
    before = threading.active_count()
    for busy in range(3):
        store, _ = simple_store()
        store.expect(itertools.cycle(range(6)))
        for layer_idx in range(busy):
            store.layer(layer_idx)
        store.close()
        store.close()
        store.uploaded(0, Copy())  # a transfer may be late
        with pytest.raises(VramjaxError, match="the store of layers is closed; make a new one"):
            store.layer(0)
        with pytest.raises(VramjaxError, match="the store of layers is closed; make a new one"):
            store.expect(iter([]))
    assert threading.active_count() == before


def test_a_store_that_is_forgotten_goes() -> None:
    before = threading.active_count()
    store, reads = simple_store()
    store.expect(itertools.cycle(range(6)))
    assert eventually(lambda: len(reads) == 3)
    del store
    gc.collect()
    assert eventually(lambda: threading.active_count() == before)


@pytest.mark.parametrize("num_buffers", [-1, 0, 1])
def test_bad_arguments(num_buffers: int) -> None:
    with pytest.raises(ConfigError, match=f"num_buffers is {num_buffers}; expected at least 2"):
        simple_store(num_buffers=num_buffers)
    with pytest.raises(ConfigError, match="there are no layers"):
        simple_store(num_layers=0)


def test_how_many_buffers_a_budget_holds() -> None:
    assert host_buffers(10 << 20, 5 << 20) == 2
    assert host_buffers((15 << 20) - 1, 5 << 20) == 2
    assert host_buffers(17 << 20, 5 << 20) == 3
    assert host_buffers(1 << 40, 5 << 20) == 8
    message = r"host_budget leaves 9\.0 MiB for .*; expected at least 10\.0 MiB, 2 layers: raise it by 1\.0 MiB"
    with pytest.raises(BudgetError, match=message):
        host_buffers(9 << 20, 5 << 20)


def test_who_keeps_the_error_of_a_store_does_not_keep_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[jax.Array] = []

    def limited(geometry: Any, device: Any) -> Any:
        if len(made) == 2 * 3:
            raise BudgetError("there is no host memory for a layer")
        host = host_arrays(geometry, device)
        made.extend(host.arrays.values())
        return host

    host_arrays = mapped_buffers.HostArrays
    monkeypatch.setattr(mapped_buffers, "HostArrays", limited)
    with pytest.raises(BudgetError) as kept:
        simple_store(num_buffers=4)
    assert len(made) == 6 and all(array.is_deleted() for array in made)
    assert kept.value.__traceback__ is not None
