"""Where layers wait on the host, on machines that are made up."""

from __future__ import annotations

import mmap
import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from vramjax import host_tier
from vramjax.checkpoint.packed import group_names
from vramjax.checkpoint.random_weights import GEOMETRIES, RandomWeights
from vramjax.errors import BudgetError
from vramjax.host_tier import OVERHEAD_BYTES, HostPlan, plan_host
from vramjax.layout import LayerLayout
from vramjax.memory import FreeMemory
from vramjax.memory_request import MemoryRequest
from vramjax.residency.budget import DeviceBytes
from vramjax.residency.host_memory import PinningError
from vramjax.residency.mapped_buffers import MAX_BUFFERS
from vramjax.residency.policy import pinned_ring, resident
from vramjax.residency.schedule import Schedule
from vramjax.residency.transfer import DeviceTransfer
from vramjax.units import parse_bytes

CONFIG = GEOMETRIES["qwen3-vl-2b"]
LAYOUT = LayerLayout.of(CONFIG, dict.fromkeys(group_names(CONFIG), 128))
LAYER_BYTES = -(-LAYOUT.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
ALL_STREAMED, HALF_STREAMED = pinned_ring(28, 2), pinned_ring(28, 16)


def plan(
    schedule: Schedule,
    ram: int,
    *,
    taken: int = 0,
    head: int = 0,
    is_shared: bool = False,
    num_devices: int = 1,
    **asked: Any,
) -> HostPlan:
    needed = DeviceBytes(
        layer_bytes=LAYOUT.num_bytes, peak_layers=2, head_bytes=head, kv_bytes=10**6, workspace_bytes=0
    )
    free = FreeMemory(
        device_bytes=1 << 40, host_bytes=ram, is_shared=is_shared, process_bytes=taken, num_devices=num_devices
    )
    return plan_host(schedule, LAYOUT, needed, MemoryRequest(**asked), free)


def test_nothing_waits_where_all_is_resident() -> None:
    assert plan(resident(28), 0) == HostPlan(tier="none")


@pytest.mark.parametrize("head", [0, 1 << 30])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_budget_counts_where_all_is_resident_too(head: int, is_shared: bool) -> None:
    """Whatever goes to the device comes by way of the host: both ends of the model, then one layer after the other."""
    needed = OVERHEAD_BYTES + max(2 * LAYER_BYTES, head)
    needed += 2 * LAYOUT.num_bytes + head + 10**6 if is_shared else 0
    arm: dict[str, Any] = {"taken": 1 << 30, "head": head, "is_shared": is_shared}
    assert plan(resident(28), 1 << 40, host_budget=(1 << 30) + needed, **arm) == HostPlan(tier="none")
    what = "the embedding and lm_head" if head else "2 layers of"
    with pytest.raises(BudgetError, match=f"no room for {what}.*expected at least .*: raise it to that$"):
        plan(resident(28), 1 << 40, host_budget=(1 << 30) + needed - 1, **arm)


@pytest.mark.parametrize("schedule", [ALL_STREAMED, resident(28)])
def test_devices_share_a_budget(schedule: Schedule) -> None:
    """An error speaks of the budget that was given, and names one that is enough for all of them."""
    arm: dict[str, Any] = {"taken": 2 << 30, "num_devices": 4}
    with pytest.raises(BudgetError, match=r"host_budget is 2\.50 GiB, of which .* taken 2\.00 GiB already") as caught:
        plan(schedule, 1 << 40, host_budget="2.5GiB", **arm)
    named = re.search(r"for each device; expected at least ([\d.]+ GiB): raise it to that", str(caught.value))
    assert named
    assert plan(schedule, 1 << 40, host_budget=named[1], **arm).num_buffers in (0, 2)
    smallest = (2 << 30) + 4 * (OVERHEAD_BYTES + 2 * LAYER_BYTES)
    assert smallest <= parse_bytes(named[1]) < smallest + (80 << 20)
    with pytest.raises(BudgetError):
        plan(schedule, 1 << 40, host_budget=smallest - 1, **arm)


def test_devices_share_what_is_free() -> None:
    needed = 2 * (OVERHEAD_BYTES + 28 * LAYER_BYTES)
    assert plan(ALL_STREAMED, needed, num_devices=2).tier == "pinned"
    assert plan(ALL_STREAMED, needed - 2, num_devices=2).tier == "mapped"


@pytest.mark.parametrize("by_budget", [False, True])
@pytest.mark.parametrize(("schedule", "kept", "passing"), [(ALL_STREAMED, 28, 0), (HALF_STREAMED, 14, 2)])
def test_layers_are_pinned_if_they_fit(schedule: Schedule, kept: int, passing: int, by_budget: bool) -> None:
    """What stays on the device for good is not kept. A budget is for the whole process, what it has taken included."""
    needed = OVERHEAD_BYTES + (kept + passing) * LAYER_BYTES

    def planned(num_bytes: int, **asked: Any) -> HostPlan:
        if by_budget:
            return plan(schedule, 1 << 40, taken=1 << 30, host_budget=num_bytes + (1 << 30), **asked)
        return plan(schedule, num_bytes, taken=1 << 30, **asked)

    pinned = HostPlan(tier="pinned", num_layers=kept, num_buffers=passing, num_bytes=(kept + passing) * LAYER_BYTES)
    assert planned(needed) == planned(needed, host="pinned") == pinned
    mapped = HostPlan(tier="mapped", num_buffers=MAX_BUFFERS, num_bytes=MAX_BUFFERS * LAYER_BYTES)
    assert planned(needed - 1) == planned(needed, host="mapped") == mapped
    with pytest.raises(
        BudgetError, match=f"no room for {kept} pinned layers of .*, or choose host=mapped, which needs less$"
    ):
        planned(needed - 1, host="pinned")


@pytest.mark.parametrize("num_buffers", [2, 3, MAX_BUFFERS, MAX_BUFFERS + 1])
def test_as_many_buffers_as_fit(num_buffers: int) -> None:
    ram = OVERHEAD_BYTES + num_buffers * LAYER_BYTES
    for planned in (plan(ALL_STREAMED, ram), plan(ALL_STREAMED, ram + LAYER_BYTES - 1)):
        assert planned.num_buffers == min(num_buffers, MAX_BUFFERS)
        assert planned.num_bytes == planned.num_buffers * LAYER_BYTES


@pytest.mark.parametrize("host", ["auto", "pinned", "mapped"])
@pytest.mark.parametrize("head", [0, 5 << 30])
def test_the_smallest_budget(host: str, head: int) -> None:
    """An error names it, and it is enough; the embedding and lm_head pass through host memory too."""
    with pytest.raises(BudgetError) as caught:
        plan(HALF_STREAMED, 1 << 40, taken=1 << 30, head=head, host=host, host_budget=1)
    named = re.search(r"expected at least ([\d.]+ GiB): raise it to that", str(caught.value))
    assert named
    assert plan(HALF_STREAMED, 1 << 40, taken=1 << 30, head=head, host=host, host_budget=named[1]).tier in (
        "pinned" if host == "pinned" or head else "mapped",
        host,
    )
    with pytest.raises(BudgetError):
        plan(
            HALF_STREAMED, 1 << 40, taken=1 << 30, head=head, host=host, host_budget=parse_bytes(named[1]) - (80 << 20)
        )


def test_too_little_is_free() -> None:
    with pytest.raises(
        BudgetError, match=r"of host memory are free, no room for 2 buffers of .*; expected at least .*: free some"
    ):
        plan(ALL_STREAMED, OVERHEAD_BYTES)
    # A budget that would do does not help then.
    with pytest.raises(BudgetError, match="of host memory are free"):
        plan(ALL_STREAMED, OVERHEAD_BYTES, host_budget="100GiB")


def test_on_a_cpu_what_is_on_the_device_is_host_memory_too() -> None:
    needed = OVERHEAD_BYTES + 28 * LAYER_BYTES
    on_device = 2 * LAYOUT.num_bytes + 10**6
    assert plan(ALL_STREAMED, needed, is_shared=True).tier == "mapped"
    assert plan(ALL_STREAMED, needed + on_device, is_shared=True).tier == "pinned"


@pytest.mark.parametrize("is_pinned", [True, False])
def test_both_ends_of_the_model_are_uploaded_as_they_are(is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From pinned memory of their own, which is given back; or from ordinary memory where that is refused."""

    def refuse(*args: object) -> None:
        raise PinningError("no pinned memory today")

    weights, transfer = RandomWeights(replace(CONFIG, vocab_size=500, hidden_size=64)), DeviceTransfer()
    if not is_pinned:
        monkeypatch.setattr(host_tier, "HostArrays", refuse)
    head = host_tier.upload_head(weights, transfer)
    expected = weights.load_head()
    assert head.keys() == expected.keys()
    for name, array in head.items():
        np.testing.assert_array_equal(array, expected[name])
        assert array.sharding.memory_kind == "device"
    assert not [a for a in jax.live_arrays() if a.sharding.memory_kind == "pinned_host"]
