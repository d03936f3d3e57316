"""How many bytes a run takes on the device at its peak, and whether that fits. Pure arithmetic, no JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vramjax.errors import BudgetError
from vramjax.units import gib


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """The device memory of one run at its peak, by what it is for.

    Example, SmolLM2-135M under a window with a peak of 8 layers: 8 x 3.7 MB of layers, 32 MB of embedding, which never
    leaves, 12 MB of KV cache for 256 positions in bfloat16, and a workspace for activations.
    """

    layer_bytes: int  # of one layer
    peak_layers: int  # on the device at once
    head_bytes: int  # embedding, lm_head, final norm
    kv_bytes: int
    workspace_bytes: int  # an upper estimate

    @property
    def fixed_bytes(self) -> int:
        """What no window changes."""
        return self.head_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        return self.peak_layers * self.layer_bytes + self.fixed_bytes

    def check(self, free_bytes: int, num_layers: int, peak_of: Callable[[int], int]) -> None:
        """Raises BudgetError if this is more than `free_bytes`, naming the largest `keep` that would fit.

        `peak_of(keep)` is the number of layers that a window of `keep` holds at its peak.
        """
        if self.total_bytes <= free_bytes:
            return
        fitting = [k for k in range(1, num_layers) if self.fixed_bytes + peak_of(k) * self.layer_bytes <= free_bytes]
        if fitting:
            advice = f"--keep {max(fitting)} would fit"
        else:
            smallest = self.fixed_bytes + peak_of(1) * self.layer_bytes
            advice = f"the smallest window, --keep 1, needs {gib(smallest)}: free memory or lower --context"
        raise BudgetError(
            f"{self.peak_layers} of {num_layers} layers at once, the embedding and the KV cache need "
            f"{gib(self.total_bytes)} of device memory; {gib(free_bytes)} are free: {advice}"
        )
