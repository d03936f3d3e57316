"""Bytes of device memory, and how many layers and how long a context they are enough for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramjax.residency.budget import DeviceBytes, largest_context, largest_keep
from vramjax.residency.policy import POLICIES, window

NEEDED = DeviceBytes(layer_bytes=10, peak_layers=1, head_bytes=5, kv_bytes=7, workspace_bytes=13)


def test_bytes_of_everything() -> None:
    assert NEEDED.fixed_bytes == 25
    assert NEEDED.total_bytes == 35
    assert NEEDED.at_peak(4).total_bytes == 65
    assert str(NEEDED.at_peak(1 << 20)) == (
        "layers 10.0 MiB, embedding and lm_head 0.0 MiB, KV cache 0.0 MiB, workspace 0.0 MiB"
    )


@pytest.mark.parametrize(
    ("policy", "budget", "keep"),
    [
        ("pinned_ring", 34, None),
        ("pinned_ring", 35, 1),
        ("pinned_ring", 84, 5),
        ("pinned_ring", 85, 6),
        ("pinned_ring", 1000, 6),
        ("past", 44, None),  # a window of 1 layer has a peak of 2
        ("past", 45, 1),
        ("past", 65, 2),
        ("past", 84, 2),  # a window of 3 layers has a peak of 6: all
        ("past", 85, 6),
        ("both_sides", 65, 4),
    ],
)
def test_the_largest_window_that_fits(policy: str, budget: int, keep: int | None) -> None:
    assert largest_keep(NEEDED, budget, 6, lambda k: window(6, k, policy).peak_resident_layers) == keep


@given(st.integers(1, 12), st.integers(0, 200), st.sampled_from(sorted(POLICIES)))
def test_no_larger_window_fits(num_layers: int, budget: int, policy: str) -> None:
    def peak_of(keep: int) -> int:
        return window(num_layers, keep, policy).peak_resident_layers

    keep = largest_keep(NEEDED, budget, num_layers, peak_of)
    fits = [k for k in range(1, num_layers + 1) if 25 + 10 * peak_of(k) <= budget]
    assert keep == (fits[-1] if fits else None)


@given(st.integers(1, 50), st.integers(0, 600))
def test_the_largest_context_that_fits(below: int, budget: int) -> None:
    """Bytes grow in steps, like those of a cache that is allocated in whole pieces."""

    def bytes_at(context: int) -> int:
        return 20 + 40 * -(-context // 4)

    fits = [context for context in range(1, below) if bytes_at(context) <= budget]
    assert largest_context(bytes_at, budget, below) == max(fits, default=0)
