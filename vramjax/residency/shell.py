"""A layer as its owner has it, taken apart into its arrays, which are streamed, and everything else, which is not.

Knows pytrees: dicts and lists of arrays, Flax NNX modules and Equinox modules are all the same here.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vramjax.errors import ConfigError
from vramjax.residency.geometry import PyTree

Array = np.ndarray | np.generic | jax.Array
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype)


@dataclass(frozen=True)
class Shell:
    """What a tree is without its arrays: its containers, and the leaves that are none, such as activation functions.

    Invariant: `around` the arrays that were taken out is a tree equal to the one they were taken out of. Shells of
    trees that differ in their arrays only are equal.

    Example: `take_apart({"w": w, "act": gelu})` is ([w], shell), and `shell.around([v])` is {"w": v, "act": gelu}.
    """

    treedef: Hashable
    others: tuple[Any, ...]  # a leaf that is no array, in its place; None where there is an array
    places: tuple[tuple[int, int], ...]  # (index of a leaf, index of the array that belongs there)

    def around(self, arrays: Sequence[Any]) -> PyTree:
        """The tree with these arrays in place of those that were taken out."""
        leaves = list(self.others)
        for leaf_idx, array_idx in self.places:
            leaves[leaf_idx] = arrays[array_idx]
        return jax.tree.unflatten(self.treedef, leaves)


def take_apart(tree: PyTree) -> tuple[list[Any], Shell]:
    """All arrays of a tree, also of random keys, and the rest of it."""
    return _take_apart(tree, lambda leaf: isinstance(leaf, Array), once=False)


def take_layer_apart(layer: PyTree, layer_idx: int) -> tuple[list[Any], Shell]:
    """The arrays of a layer that can be streamed, and its shell, which holds random keys too.

    An array that stands in the layer several times (tied weights) is taken out once.

    Raises:
      ConfigError: there is no array, or a leaf may hold arrays that would be missed (its path is named).
    """
    arrays, shell = _take_apart(layer, _can_be_streamed, once=True)
    if len(shell.places) < len(shell.others):
        for path, leaf in jax.tree.leaves_with_path(layer):
            if not _can_be_streamed(leaf) and not _may_stay(leaf):
                what = f"an array of {leaf.dtype}" if isinstance(leaf, Array) else f"of type {type(leaf).__name__}"
                raise ConfigError(
                    f"layers[{layer_idx}]{jax.tree_util.keystr(path)} is {what}; expected an array of numbers, or a "
                    f"number, a text or a function (a class of your own that holds arrays must be a registered pytree)"
                )
    if not arrays:
        raise ConfigError(f"layers[{layer_idx}] has no arrays; expected a pytree with at least one")
    return arrays, shell


def call_around(arrays: Sequence[Any], *, shell: Shell) -> Any:
    """Calls a function that was taken apart with its arguments, as `take_apart((function, args, kwargs))`."""
    function, args, kwargs = shell.around(arrays)
    return function(*args, **kwargs)


def _take_apart(tree: PyTree, is_array: Callable[[Any], bool], *, once: bool) -> tuple[list[Any], Shell]:
    leaves, treedef = jax.tree.flatten(tree)
    arrays, others, places = [], [], []
    array_idx_of: dict[int, int] = {}
    for leaf_idx, leaf in enumerate(leaves):
        if not is_array(leaf):
            others.append(leaf)
            continue
        others.append(None)
        array_idx = array_idx_of.setdefault(id(leaf), len(arrays)) if once else len(arrays)
        places.append((leaf_idx, array_idx))
        if array_idx == len(arrays):
            arrays.append(leaf)
    return arrays, Shell(treedef, tuple(others), tuple(places))


def _can_be_streamed(leaf: object) -> bool:
    return isinstance(leaf, Array) and any(jnp.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_))


def _may_stay(leaf: object) -> bool:
    """Whether a leaf surely holds no weights."""
    if isinstance(leaf, jax.Array):
        return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return isinstance(leaf, _PLAIN) or (callable(leaf) and not _holds_arrays(leaf))


def _holds_arrays(thing: object, depth: int = 4) -> bool:
    """Whether there are arrays among the attributes of an object, and of those; what a closure holds is not seen."""
    if isinstance(thing, functools.partial):
        attributes: list[Any] = [thing.func, thing.args, thing.keywords]
    elif isinstance(thing, types.MethodType):
        attributes = [thing.__self__]
    elif isinstance(thing, type | types.ModuleType):
        return False
    else:
        attributes = list(getattr(thing, "__dict__", {}).values())
    leaves = jax.tree.leaves(attributes)
    return any(isinstance(leaf, Array) or (depth > 0 and _holds_arrays(leaf, depth - 1)) for leaf in leaves)
