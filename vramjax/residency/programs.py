"""The programs that copy layers: each reads pinned host memory, and writes into device memory that it was given.

The only ones of the project that do. Knows what JAX must be told for that; not which layer goes where, or when.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vramjax.residency.geometry import PyTree
from vramjax.residency.jit_options import JitOptions


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def copy_into(slot: PyTree, host: PyTree) -> PyTree:
    """`host` (pinned arrays), on the device, in the memory of `slot`.

    Donation pairs each result with the argument of equal shape and dtype, but only for an argument that survives
    into the compiled program: nothing reads `slot`, so `keep_unused` it must be. One program for each geometry.
    """
    del slot
    return _on_device(host)


@functools.partial(jax.jit, keep_unused=True)
def when_ready(arrays: PyTree) -> jax.Array:
    """A scalar that is ready when all of `arrays` are; they may be donated or deleted in the meantime."""
    del arrays
    return jnp.zeros((), jnp.bool)


def jitted(function: Callable[..., Any], options: JitOptions):
    """`jax.jit(function)`."""
    return jax.jit(function, static_argnames=options.static_argnames, donate_argnums=options.donate_argnums)


def carrying(function: Callable[..., Any], options: JitOptions):
    """`function` and a copy of `hosts` into the memory of `slots`, as one program: XLA runs the two at once.

    The same for all who ask for the same, as JAX compiles for each function object anew; but it keeps neither the
    function nor what that refers to alive: whoever calls it does.
    """
    key = id(function)  # not its equal: of two objects for one method, one may be gone while the other is in use
    get_function, programs = _CARRYING.get(key, (lambda: None, {}))
    if get_function() is not function:
        get_function, programs = _CARRYING[key] = weakref.ref(function, lambda _: _CARRYING.pop(key, None)), {}

    def carrying(slots: list[jax.Array], hosts: list[jax.Array], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        del slots
        function = get_function()
        assert function is not None  # its caller refers to it
        return _on_device(hosts), function(*args, **kwargs)

    if options not in programs:
        programs[options] = jax.jit(
            carrying,
            static_argnames=options.static_argnames,
            donate_argnums=(0, *(argnum + 2 for argnum in options.donate_argnums)),
            keep_unused=True,  # see `copy_into`
        )
    return programs[options]


_CARRYING: dict[int, tuple[Callable[[], Any], dict[JitOptions, Any]]] = {}  # by the id of the function, and with it


def _on_device(host: PyTree) -> PyTree:
    """Inside a jit: pinned arrays, copied to the device."""
    with jax.named_scope("upload"):
        return jax.tree.map(lambda array: jax.device_put(array, jax.memory.Space.Device), host)
