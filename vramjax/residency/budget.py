"""How many bytes a run takes at its peak, on the device and on the host, and how much of the model that lets stay.

Pure arithmetic, no JAX: what a layer or a KV cache takes is told, and so is what there is.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

from vramjax.units import gib

AUTO_RESERVE_BYTES = 512 << 20  # what "auto" leaves of what is free: for fragments, other programs, code on the device


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """The device memory of one run at its peak, by what it is for.

    Invariant: everything that the run puts on the device is in one of the parts, so that `total_bytes` bounds what the
    allocator hands out, and is what a budget is compared with.

    Example, SmolLM2-135M under a window with a peak of 8 layers: 8 x 3.7 MB of layers, 32 MB of embedding, which never
    leaves, 12 MB of KV cache for 256 positions in bfloat16, and a workspace for activations.
    """

    layer_bytes: int  # of one layer
    peak_layers: int  # on the device at once, those in transit too
    head_bytes: int  # embedding, lm_head, final norm
    kv_bytes: int
    workspace_bytes: int  # an upper estimate
    draft_bytes: int = 0  # all of a model that drafts

    @property
    def fixed_bytes(self) -> int:
        """What no window changes."""
        return self.head_bytes + self.kv_bytes + self.workspace_bytes + self.draft_bytes

    @property
    def total_bytes(self) -> int:
        return self.peak_layers * self.layer_bytes + self.fixed_bytes

    def at_peak(self, num_layers: int) -> DeviceBytes:
        """The same with `num_layers` on the device at once."""
        return replace(self, peak_layers=num_layers)

    def __str__(self) -> str:
        layers, head = gib(self.peak_layers * self.layer_bytes), gib(self.head_bytes)
        kv, workspace = gib(self.kv_bytes), gib(self.workspace_bytes)
        draft = f", draft model {gib(self.draft_bytes)}" if self.draft_bytes else ""
        return f"layers {layers}, embedding and lm_head {head}, KV cache {kv}, workspace {workspace}{draft}"


def largest_context(bytes_at: Callable[[int], int], budget_bytes: int, below: int) -> int:
    """The largest context in 1 ... below - 1 whose `bytes_at`, which never falls, fits; 0 if none does."""
    return bisect.bisect_right(range(1, below), budget_bytes, key=bytes_at)
