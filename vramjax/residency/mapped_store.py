"""Layers that stay on disk and pass through a few buffers of pinned host memory on their way to the device.

Knows in which order layers will be asked for and reads ahead in it; not what a file is. For models that
host memory does not hold: they run at the rate of the disk.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from vramjax.errors import BudgetError, ConfigError, VramjaxError
from vramjax.residency.geometry import Geometry, PyTree
from vramjax.residency.host_store import PageableArrays
from vramjax.residency.mapped_buffers import MIN_BUFFERS, AllWork, Buffer, BufferState, make_memories, wait_until_read
from vramjax.residency.serial_calls import SerialCalls


class MappedStore:
    """Layers that are read from disk when they are about to be uploaded, by threads, ahead of the uploads.

    Invariant: what `layer` hands out is that layer's bytes, and nothing is written over it until its `done` is ready,
    or, should `uploaded` never be called for it, until `expect` was called anew and the device has run all that was
    queued before. Host memory is that of the buffers: `num_buffers` for each geometry, made once.

    Example, layers 0 1 2 of one geometry, two buffers A and B: `expect(iter([0, 1, 2, 0, ...]))` begins to read 0
    into A and 1 into B; `layer(0)` is A's arrays as soon as they are there; `uploaded(0, done)`; when `done` is ready,
    2 is read into A, while layer 1 is on its way to the device.

    One thread calls this, as it does a controller; an interrupt there breaks off nothing (see `SerialCalls`). `close`
    it: threads end with it.
    """

    reuses_memory = True

    def __init__(
        self,
        read_into: Callable[[int, PyTree], None],
        geometries: Sequence[Geometry],
        device: jax.Device | None = None,
        *,
        num_buffers: int,
        num_threads: int = 4,
        will_need: Callable[[int], None] | None = None,
    ) -> None:
        """Takes the memory; reads nothing yet.

        Args:
          read_into: `read_into(layer_idx, views)` fills the numpy arrays of a layer; from any thread.
          geometries: of every layer, at least one.
          device: the device that the layers will be uploaded to; None is JAX's first device.
          num_buffers: buffers for each geometry, at least 2.
          num_threads: layers that are read at the same time, at most.
          will_need: told which layer comes next while no buffer is free for it.

        Raises:
          ConfigError: there are no layers, or fewer than 2 buffers.
          BudgetError: there is no such memory.
        """
        if not geometries:
            raise ConfigError("there are no layers; expected at least one")
        if num_buffers < MIN_BUFFERS:
            raise ConfigError(f"num_buffers is {num_buffers}; expected at least {MIN_BUFFERS}")
        self._read_into, self._will_need = read_into, will_need
        self._geometries = list(geometries)
        self._device = device if device is not None else jax.devices()[0]
        self._num_threads = num_threads
        memories = make_memories(self._geometries, self._device, num_buffers)
        self.is_pinned = not any(isinstance(memory, PageableArrays) for memory in memories)
        self._buffers = [Buffer(memory) for memory in memories]
        self._calls = SerialCalls()
        self._lock = self._calls.lock  # guards all that follows, and the buffers; the caller's thread never takes it
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # something has changed since it was empty
        self._threads: set[threading.Thread] = set()  # that read, and some that have ended
        self._num_readers = 0  # threads that will look for something to read once more
        self._order: Iterator[int] = iter(())
        self._upcoming: int | None = None  # taken from `_order`, and not yet being read
        self._num_tickets = 0  # given to reads since the store was made; the next read gets this one
        self._next_ticket = 0  # of the layer that will be asked for next
        self._announced_ticket = -1  # the last that `_will_need` was told
        self._broken: BaseException | None = None
        self._closed = False

    @property
    def num_layers(self) -> int:
        return len(self._geometries)

    @property
    def num_host_bytes(self) -> int:
        """Host memory of all buffers."""
        return sum(buffer.memory.num_bytes for buffer in self._buffers)

    def geometry(self, layer_idx: int) -> Geometry:
        return self._geometries[layer_idx]

    def expect(self, order: Iterable[int]) -> None:
        """Layers will be asked for in this order, which may be endless; reading begins at once.

        Whatever was expected before is not, and whatever was handed out may be read by copies that are queued already,
        but by no later one.
        """
        self._calls.result_of(functools.partial(self._expect, order))

    def layer(self, layer_idx: int) -> PyTree:
        """The layer's arrays: JAX arrays in pinned memory, or numpy arrays where that was refused.

        Waits until the layer is read. A layer that is not the next one expected ends what was expected and is read now.

        Raises:
          Exception: whatever `read_into` raised for this layer. Asked for again, the layer is read again.
          BudgetError: all buffers are lent; what was uploaded from them was not reported.
        """
        while not self._news.empty():
            self._news.get()
        while (arrays := self._calls.result_of(functools.partial(self._lend, layer_idx))) is None:
            self._news.get()
        return arrays

    def uploaded(self, layer_idx: int, done: Any) -> None:
        """All copies of a layer that `layer` handed out are queued; its memory may be used when `done` is ready.

        `done` is a JAX array, or anything else with `block_until_ready()`. Of several uploads of one layer the first
        that was not reported is meant.
        """
        self._calls.make(functools.partial(self._note_upload, layer_idx, done))  # not waited for

    def close(self) -> None:
        """Ends reading, waits for uploads under way, and gives the memory back. Closing again does nothing."""
        for thread in self._calls.result_of(self._end):
            thread.join()
        while self._buffers:
            self._buffers.pop().memory.close()

    # With the lock

    def _expect(self, order: Iterable[int]) -> None:
        self._check_usable()
        for buffer in self._buffers:
            if buffer.state is BufferState.LENT:
                buffer.free(AllWork(self._device), self._num_tickets)
        self._begin(order)

    def _lend(self, layer_idx: int) -> PyTree | None:
        """The layer's arrays, or None if it is not read yet."""
        self._check_usable()
        if self._next_layer() != layer_idx:
            self._begin((layer_idx,))
        buffer = self._next_read()
        if buffer is None:
            self._check_not_stuck(layer_idx)
            self._wake_a_thread()
            return None
        if buffer.error is not None:
            error = buffer.error
            self._begin(())
            raise error
        self._next_ticket += 1
        buffer.state = BufferState.LENT
        return buffer.memory.arrays

    def _note_upload(self, layer_idx: int, done: Any) -> None:
        lent = [b for b in self._buffers if b.state is BufferState.LENT and b.layer_idx == layer_idx]
        if lent and not self._closed:
            min(lent, key=lambda buffer: buffer.ticket).free(done, self._num_tickets)
            self._wake_a_thread()

    def _end(self) -> list[threading.Thread]:
        """Closed; returns threads that may not have ended yet."""
        self._closed = True
        self._news.put(None)
        return list(self._threads)

    def _check_usable(self) -> None:
        if self._closed:
            raise VramjaxError("the store of layers is closed; make a new one")
        if self._broken is not None:
            raise self._broken

    def _begin(self, order: Iterable[int]) -> None:
        """Reads ahead in another order. What is lent stays so."""
        for buffer in self._buffers:
            if buffer.state is BufferState.READING:
                buffer.ticket = -1
            elif buffer.state is BufferState.READ:
                buffer.free(None, 0)
        self._order = iter(order)
        self._upcoming = None
        self._next_ticket = self._num_tickets
        self._wake_a_thread()

    def _peek(self) -> int | None:
        """The layer that will be read next, or None at the end of the order."""
        if self._upcoming is None:
            self._upcoming = next(self._order, None)
        return self._upcoming

    def _next_layer(self) -> int | None:
        """The layer that should be asked for next."""
        for buffer in self._buffers:
            if buffer.ticket == self._next_ticket:
                return buffer.layer_idx
        return self._peek()

    def _next_read(self) -> Buffer | None:
        """The buffer of the layer that should be asked for next, if it is read."""
        for buffer in self._buffers:
            if buffer.state is BufferState.READ and buffer.ticket == self._next_ticket:
                return buffer
        return None

    def _check_not_stuck(self, layer_idx: int) -> None:
        ours = [b for b in self._buffers if b.memory.geometry == self._geometries[layer_idx]]
        if all(buffer.state is BufferState.LENT for buffer in ours):
            raise BudgetError(
                f"layer {layer_idx} finds all {len(ours)} host buffers taken by uploads that are not queued; expected "
                "one to be free: make the store with more buffers"
            )

    def _free_buffer(self, layer_idx: int) -> Buffer | None:
        """Of the free buffers that fit, the one whose upload began first."""
        geometry = self._geometries[layer_idx]
        fitting = [b for b in self._buffers if b.state is BufferState.FREE and b.memory.geometry == geometry]
        return min(fitting, key=lambda buffer: buffer.freed_at, default=None)

    # Reading

    def _wake_a_thread(self) -> None:
        """With the lock: one more thread looks for something to read, if there may be one more."""
        if self._num_readers < self._num_threads:
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            thread = threading.Thread(target=self._work, name="vramjax-read", daemon=False)  # Python waits for it
            try:
                thread.start()
            except RuntimeError as error:  # Python is about to exit, or the system has no more threads
                if self._num_readers == 0:
                    self._broken = error
            else:
                self._threads.add(thread)
                self._num_readers += 1

    def _work(self) -> None:
        try:
            while (buffer := self._claim()) is not None:
                self._fill(buffer)
                self._announce()
        except BaseException as error:  # a bug, also of who made the order: better than to wait for ever
            with self._lock:
                self._broken = error
                self._num_readers -= 1
                self._news.put(None)

    def _claim(self) -> Buffer | None:
        """The next read, or None if there is nothing to read or nowhere to read it to."""
        with self._lock:
            if self._closed or (layer_idx := self._peek()) is None or (buffer := self._free_buffer(layer_idx)) is None:
                self._num_readers -= 1
                return None
            self._upcoming = None
            buffer.state, buffer.layer_idx, buffer.ticket = BufferState.READING, layer_idx, self._num_tickets
            self._num_tickets += 1
            self._wake_a_thread()  # there may be more to do
            return buffer

    def _fill(self, buffer: Buffer) -> None:
        error = None
        try:
            if buffer.done is not None:
                wait_until_read(buffer.done, self._device)
                buffer.done = None
            if buffer.ticket >= 0 and not self._closed:
                self._read_into(buffer.layer_idx, buffer.memory.views)
        except BaseException as caught:
            error = caught
        with self._lock:
            buffer.error = error
            if buffer.ticket < 0:
                buffer.free(None, 0)
                self._wake_a_thread()
            else:
                buffer.state = BufferState.READ
            self._news.put(None)

    def _announce(self) -> None:
        """While every buffer is taken the disk would rest; the system can read ahead without one."""
        if self._will_need is None:
            return
        with self._lock:
            layer_idx = self._peek()
            is_new = self._announced_ticket != self._num_tickets
            if self._closed or layer_idx is None or not is_new or self._free_buffer(layer_idx) is not None:
                return
            self._announced_ticket = self._num_tickets
        self._will_need(layer_idx)
