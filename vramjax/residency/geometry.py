"""The shape of a layer: what two layers must share for one's device memory to serve the other.

Knows arrays by shape and dtype only, not where they are. Does not import JAX until a layer is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

PyTree = Any  # nested dicts, lists, tuples, registered dataclasses ... of arrays


@dataclass(frozen=True)
class Geometry:
    """The tree structure of a layer, and the shape and dtype of each of its arrays, in the tree's order.

    Invariant: layers of equal geometry need the same bytes in the same arrays, so that one may be copied over the
    other. A layer {"w": int8 [64, 32], "s": float32 [64]} has `arrays` (((64,), float32), ((64, 32), int8)) (a dict's
    keys are sorted) and `num_bytes` 64 * 4 + 64 * 32 = 2304.
    """

    treedef: Hashable = field(repr=False)
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @property
    def num_arrays(self) -> int:
        return len(self.arrays)

    @cached_property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays)


def geometry_of(layer: PyTree) -> Geometry:
    """The geometry of a pytree of numpy or JAX arrays, wherever they are."""
    import jax

    leaves, treedef = jax.tree.flatten(layer)
    return Geometry(treedef, tuple((tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves))
