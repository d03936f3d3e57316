"""Bytes of device memory, and how many layers and how long a context they are enough for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vramjax.residency.budget import DeviceBytes, largest_context

NEEDED = DeviceBytes(layer_bytes=10, peak_layers=1, head_bytes=5, kv_bytes=7, workspace_bytes=13)


def test_bytes_of_everything() -> None:
    assert NEEDED.fixed_bytes == 25
    assert NEEDED.total_bytes == 35
    assert NEEDED.at_peak(4).total_bytes == 65
    assert str(NEEDED.at_peak(1 << 20)) == (
        "layers 10.0 MiB, embedding and lm_head 0.0 MiB, KV cache 0.0 MiB, workspace 0.0 MiB"
    )


@given(st.integers(1, 50), st.integers(0, 600))
def test_the_largest_context_that_fits(below: int, budget: int) -> None:
    """Bytes grow in steps, like those of a cache that is allocated in whole pieces."""

    def bytes_at(context: int) -> int:
        return 20 + 40 * -(-context // 4)

    fits = [context for context in range(1, below) if bytes_at(context) <= budget]
    assert largest_context(bytes_at, budget, below) == max(fits, default=0)
