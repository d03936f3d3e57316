"""Layers that do not fit on the device together, brought there one after the other.

Useful alone: a layer is any pytree of arrays, and nothing here knows of transformers or of quantisation. `stream` is
the front door; the parts behind it (a policy makes a `Schedule`, a `Controller` runs it with a store, a `Transfer`
and a `Pool`, and a `MultiController` runs one of those for each device) are public too. Names are imported when they
are first used, so that `vramjax.residency.policy` can be used without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vramjax.residency.byte_policy import pinned_ring_within, window_within
    from vramjax.residency.controller import Controller
    from vramjax.residency.fused_transfer import FusedTransfer
    from vramjax.residency.geometry import Geometry, geometry_of
    from vramjax.residency.host_memory import HostArrays
    from vramjax.residency.host_store import HostStore, LazyStore, Store
    from vramjax.residency.jit_options import JitOptions
    from vramjax.residency.mapped_store import MappedStore
    from vramjax.residency.multi import MultiController, layers_of_device
    from vramjax.residency.policy import (
        both_sides_window,
        past_window,
        pinned_ring,
        resident,
        window,
    )
    from vramjax.residency.pool import Pool
    from vramjax.residency.present_layers import LayerState
    from vramjax.residency.schedule import Load, Release, Schedule, Use
    from vramjax.residency.stats import ResidencyStats
    from vramjax.residency.streaming import LayerStream, stream
    from vramjax.residency.transfer import DeviceTransfer, Transfer
    from vramjax.residency.turn_transfer import TurnTransfer

_MODULE_OF = {
    "Controller": "controller",
    "LayerState": "present_layers",
    "Geometry": "geometry",
    "geometry_of": "geometry",
    "HostArrays": "host_memory",
    "HostStore": "host_store",
    "LazyStore": "host_store",
    "Store": "host_store",
    "JitOptions": "jit_options",
    "MappedStore": "mapped_store",
    "MultiController": "multi",
    "layers_of_device": "multi",
    "both_sides_window": "policy",
    "past_window": "policy",
    "pinned_ring": "policy",
    "pinned_ring_within": "byte_policy",
    "resident": "policy",
    "window": "policy",
    "window_within": "byte_policy",
    "Pool": "pool",
    "Load": "schedule",
    "Release": "schedule",
    "Schedule": "schedule",
    "Use": "schedule",
    "ResidencyStats": "stats",
    "LayerStream": "streaming",
    "stream": "streaming",
    "DeviceTransfer": "transfer",
    "FusedTransfer": "fused_transfer",
    "Transfer": "transfer",
    "TurnTransfer": "turn_transfer",
}

__all__ = [
    "Controller",
    "DeviceTransfer",
    "FusedTransfer",
    "Geometry",
    "HostArrays",
    "HostStore",
    "JitOptions",
    "LayerState",
    "LayerStream",
    "LazyStore",
    "Load",
    "MappedStore",
    "MultiController",
    "Pool",
    "Release",
    "ResidencyStats",
    "Schedule",
    "Store",
    "Transfer",
    "TurnTransfer",
    "Use",
    "both_sides_window",
    "geometry_of",
    "layers_of_device",
    "past_window",
    "pinned_ring",
    "pinned_ring_within",
    "resident",
    "stream",
    "window",
    "window_within",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
