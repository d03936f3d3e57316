"""What is planned for what was asked, on machines that are made up."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import pytest

from vramjax import planning
from vramjax.checkpoint.packed import group_names, head_bytes
from vramjax.checkpoint.random_weights import GEOMETRIES
from vramjax.decode.spec import EngineSpec
from vramjax.errors import BudgetError, ConfigError
from vramjax.host_tier import OVERHEAD_BYTES
from vramjax.memory import FreeMemory
from vramjax.memory_request import MemoryRequest
from vramjax.planning import MemoryPlan, engine_spec, plan_memory
from vramjax.report import plan_tables
from vramjax.residency.budget import AUTO_RESERVE_BYTES
from vramjax.units import gib_or_more, parse_bytes

GIB = 1 << 30


def spec_of(name: str, context: int) -> tuple[EngineSpec, int]:
    config = GEOMETRIES[name]
    groups = dict.fromkeys(group_names(config), 128)
    spec = engine_spec(config, groups, context=context, device=jax.devices("cpu")[0])
    gpu = replace(spec, kv_dtype=jax.numpy.dtype("bfloat16"), tile_rows=16, chunk_rows=256)
    return gpu, head_bytes(config, groups)


def plan(name: str, *, context: int = 4096, gpu: int = 141 * GIB, ram: int = 256 * GIB, **asked: Any) -> MemoryPlan:
    free = FreeMemory(device_bytes=gpu, host_bytes=ram, is_shared=False)
    return plan_memory(*spec_of(name, context), MemoryRequest(**asked), free)


def test_only_kernels_in_layers_are_chained() -> None:
    """XLA takes what comes out of the head."""
    spec, _ = spec_of("qwen3-8b", 4096)
    chained = replace(spec, backend="triton_chained")
    assert (chained.layer.backend, chained.head.backend) == ("triton_chained", "triton")
    assert (spec.layer.backend, spec.head.backend) == ("reference", "reference")


def test_sweeps_in_a_row_are_short_ones() -> None:
    """By the bytes of layers and cache."""
    small, large = (replace(spec_of(name, 4096)[0], fuses_tile=True) for name in ("qwen3-vl-2b", "qwen3-8b"))
    assert (small.turns_per_call, large.turns_per_call) == (4, 1)
    assert replace(small, num_slots=16).turns_per_call == 1, "the cache has 7 GiB"
    assert (replace(small, max_turns=1).turns_per_call, replace(large, max_turns=3).turns_per_call) == (1, 3)
    assert replace(small, fuses_tile=False, max_turns=3).turns_per_call == 1


@pytest.mark.parametrize(
    ("asked", "rows"),
    [({}, 2048), ({"device_budget": "8.7GiB"}, 512), ({"device_budget": "8.64GiB"}, 256), ({"keep": 35}, 2048)],
)
def test_blocks_are_as_long_as_take_the_place_of_no_layer(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], rows: int
) -> None:
    spec, planned = planned_run(monkeypatch, **asked)
    assert spec.block_sizes[-1] == rows and planned.num_streamed == (2 if "keep" in asked else 0)
    assert planned.device.workspace_bytes == spec.workspace_bytes


def test_long_blocks_within_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left beside the layers decides, which are as many as with short blocks alone."""
    seen = set()
    for budget in range(3000, 5000, 40):
        asked = {"device_budget": f"{budget}MiB"}
        spec, planned = planned_run(monkeypatch, **asked)
        with monkeypatch.context() as patch:
            patch.setattr(planning, "LONG_BLOCKS", ())
            _, short = planned_run(patch, **asked)
        assert planned.num_streamed == short.num_streamed > 0
        assert planned.device.total_bytes <= budget << 20
        seen.add(spec.chunks_per_block)
    assert seen == {1, 2, 4}  # blocks of 8 chunks take more than a layer


def test_long_blocks_keep_what_is_to_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, planned = planned_run(monkeypatch, batch=16, batch_or_fewer=True, device_budget="10GiB")
    assert spec.num_slots < 16 and spec.chunks_per_block > 1
    assert [note for note in planned.notes if f"{spec.num_slots} of 16 prompts are decoded at a time" in note]


def planned_run(monkeypatch: pytest.MonkeyPatch, **asked: Any) -> tuple[EngineSpec, MemoryPlan]:
    """An 8B model on an H200 that is made up."""
    gpu, _ = spec_of("qwen3-8b", 4096)
    free = FreeMemory(device_bytes=141 * GIB, host_bytes=256 * GIB, is_shared=False)
    monkeypatch.setattr(planning, "engine_spec", lambda *_, **__: replace(gpu, backend="triton"))
    monkeypatch.setattr(planning, "_free_memory", lambda _: [free])
    spec, (planned,) = planning.plan_run(
        gpu.config, dict(gpu.groups), MemoryRequest(**asked), context=4096, devices=jax.devices()[:1]
    )
    return spec, planned


@pytest.mark.parametrize("budget", ["2.5GiB", "4GiB", "6GiB", "7.5GiB"])
@pytest.mark.parametrize("policy", ["pinned_ring", "past", "both_sides"])
def test_a_budget_holds_as_much_as_it_can(budget: str, policy: str) -> None:
    planned = plan("qwen3-8b", context=1024, device_budget=budget, policy=policy)
    num_bytes = parse_bytes(budget)
    assert planned.device_budget == num_bytes and not planned.is_auto and not planned.notes
    assert planned.schedule.releases
    assert planned.device.total_bytes <= num_bytes
    step = 2 if policy == "past" else 1  # layers of the peak that a window larger by one takes
    assert planned.device.total_bytes + step * planned.device.layer_bytes > num_bytes
    assert planned.num_pinned + planned.num_streamed == planned.schedule.num_layers == 36
    if policy == "pinned_ring":
        assert planned.num_pinned == planned.schedule.keep - (1 if planned.num_streamed <= 8 else 2)


def test_the_smallest_budget() -> None:
    """An error names it; it is accepted, and one byte less is not."""
    with pytest.raises(BudgetError) as caught:
        plan("qwen3-32b", context=1024, device_budget="1GiB")
    smallest = plan("qwen3-32b", context=1024, keep=1).device.total_bytes
    assert f"device_budget is 1.00 GiB; expected at least {gib_or_more(smallest)} for a context of 1024" in str(
        caught.value
    )
    assert str(caught.value).endswith(": raise it to that")
    assert plan("qwen3-32b", context=1024, device_budget=smallest).schedule.keep == 1
    assert plan("qwen3-32b", context=1024, device_budget=gib_or_more(smallest)).schedule.keep == 1
    with pytest.raises(BudgetError):
        plan("qwen3-32b", context=1024, device_budget=smallest - 1)


def test_a_shorter_context_that_would_fit() -> None:
    with pytest.raises(BudgetError) as caught:
        plan("qwen3-8b", context=40960, device_budget="4GiB")
    match = re.search(r"raise it to that, or lower the context to (\d+), which fits$", str(caught.value))
    assert match
    context = int(match[1])
    assert plan("qwen3-8b", context=context, device_budget="4GiB").device.total_bytes <= 4 * GIB
    with pytest.raises(BudgetError):
        plan("qwen3-8b", context=context + 1, device_budget="4GiB")


@pytest.mark.parametrize("num_slots", [1, 2, 16, 17, 64])
def test_every_slot_is_counted(num_slots: int) -> None:
    spec, head = spec_of("qwen3-8b", 1024)
    free = FreeMemory(device_bytes=141 * GIB, host_bytes=256 * GIB, is_shared=False)

    def planned(n: int, **asked: Any) -> MemoryPlan:
        return plan_memory(replace(spec, num_slots=n), head, MemoryRequest(**asked), free)

    one, many = planned(1, keep=4).device, planned(num_slots, keep=4).device
    assert one.kv_bytes == 36 * 1024 * 2 * 8 * 128 * 2
    assert many.kv_bytes == num_slots * one.kv_bytes
    rows = 16 * -(-num_slots // 16)
    assert many.workspace_bytes - one.workspace_bytes >= 4 * 2 * (rows - 16) * spec.config.vocab_size
    budget = planned(num_slots, device_budget="12GiB")
    assert budget.device.total_bytes <= 12 * GIB and (budget.num_streamed > 0) == (num_slots > 17)


def test_a_smaller_batch_that_would_fit() -> None:
    spec, head = spec_of("qwen3-8b", 4096)
    free = FreeMemory(device_bytes=141 * GIB, host_bytes=256 * GIB, is_shared=False)
    request = MemoryRequest(device_budget="8GiB")

    def planned(n: int) -> MemoryPlan:
        return plan_memory(replace(spec, num_slots=n), head, request, free)

    with pytest.raises(BudgetError, match="for 16 contexts of 4096 ") as caught:
        planned(16)
    match = re.search(r"raise it to that, or lower the batch to (\d+), which fits$", str(caught.value))
    assert match
    assert planned(int(match[1])).device.total_bytes <= 8 * GIB
    with pytest.raises(BudgetError):
        planned(int(match[1]) + 1)
    with pytest.raises(BudgetError, match=r"keep=1, needs .*: free memory, or lower the batch or the context$"):
        plan_memory(replace(spec, num_slots=400), head, MemoryRequest(keep=36), free)


def batch_of(
    monkeypatch: pytest.MonkeyPatch, *, gpu: int = 141 * GIB, **asked: Any
) -> tuple[EngineSpec, list[MemoryPlan]]:
    """What `plan_run` makes of a request on one made-up device."""
    config = GEOMETRIES["qwen3-8b"]
    monkeypatch.setattr(planning, "free_device_bytes", lambda device: gpu)
    monkeypatch.setattr(planning, "free_host_bytes", lambda: 256 * GIB)
    groups = dict.fromkeys(group_names(config), 128)
    return planning.plan_run(config, groups, MemoryRequest(**asked), context=4096, devices=jax.devices("cpu")[:1])


def test_fewer_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are worth their memory up to a point: they take the place of layers, which are then streamed."""
    spec, (planned,) = batch_of(monkeypatch, batch=16, batch_or_fewer=True)
    assert (spec.num_slots, planned.num_streamed, planned.notes) == (16, 0, ())
    sizes = []
    for budget in ("6GiB", "9GiB", "12GiB", "14GiB", "18GiB"):
        asked: dict[str, Any] = {"device_budget": budget, "batch": 16, "batch_or_fewer": True}
        spec, (planned,) = batch_of(monkeypatch, **asked)
        assert planned.device.total_bytes <= parse_bytes(budget)
        assert (spec.num_slots < 16) == any(
            f"{spec.num_slots} of 16 prompts are decoded at a time" in n for n in planned.notes
        )
        sizes.append((spec.num_slots, planned.num_streamed))
        one, (alone,) = batch_of(monkeypatch, device_budget=budget)
        assert one.num_slots == 1 and planning._tokens_per_time(spec, [planned]) >= planning._tokens_per_time(
            one, [alone]
        )
    # Where most layers are streamed anyway more slots pay; where nearly none is, slots would begin it.
    assert sizes[0][0] > 1 and sizes[0][1] > 30 and sizes[1][0] == 1 and sizes[-1][0] > 4 and sizes[-1][1] == 0
    with pytest.raises(BudgetError, match="for a context of 4096"):
        batch_of(monkeypatch, device_budget="2GiB", batch=16, batch_or_fewer=True)
    spec, _ = batch_of(monkeypatch, gpu=14 * GIB, keep=20, batch=16, batch_or_fewer=True)
    assert 1 < spec.num_slots < 16


def test_32b_within_8_gib() -> None:
    planned = plan("qwen3-32b", context=1024, device_budget="8GiB")
    assert planned.device.total_bytes <= 8 * GIB
    assert planned.num_pinned >= 5


@pytest.mark.parametrize("asked", [{}, {"device_budget": "auto"}])
def test_auto_takes_what_is_free_less_a_reserve(asked: dict[str, Any]) -> None:
    resident = plan("qwen3-8b", **asked)
    assert (resident.schedule.name, resident.num_streamed, resident.host.tier) == ("resident", 0, "none")
    assert (resident.is_auto, resident.notes) == (True, ())
    whole = resident.device.total_bytes + AUTO_RESERVE_BYTES
    assert plan("qwen3-8b", gpu=whole, **asked).schedule.name == "resident"
    streamed = plan("qwen3-8b", gpu=whole - 1, **asked)
    assert (streamed.schedule.name, streamed.schedule.keep) == ("pinned_ring", 35)
    assert streamed.device_budget == whole - 1 - AUTO_RESERVE_BYTES >= streamed.device.total_bytes
    (note,) = streamed.notes
    assert "2 of them are streamed for each token" in note
    with pytest.raises(BudgetError, match=r"1\.00 GiB of device memory are free, of which 512\.0 MiB stay in reserve"):
        plan("qwen3-8b", gpu=GIB, **asked)


def test_a_budget_is_no_promise_of_memory() -> None:
    """What is asked for may be more than there is, as long as what it is used for is not."""
    resident = plan("qwen3-8b").device.total_bytes
    assert plan("qwen3-8b", device_budget="1TiB", gpu=resident).schedule.name == "resident"
    with pytest.raises(BudgetError, match="are free: device_budget=auto takes what is free"):
        plan("qwen3-8b", device_budget="1TiB", gpu=resident - 1)
    with pytest.raises(BudgetError, match=r"36 of 36 layers at once.* are free: keep=35 would fit"):
        plan("qwen3-8b", keep=36, gpu=resident - 1)
    with pytest.raises(BudgetError, match=r"the smallest window, keep=1, needs .*: free memory, or lower the context$"):
        plan("qwen3-8b", keep=36, gpu=GIB)


def test_tables_of_several_devices() -> None:
    """The slowest link sets the time; nothing is said of it where one was not measured."""
    asked: dict[str, Any] = {"context": 1024, "device_budget": "4GiB"}
    plans = [plan("qwen3-8b", **asked), plan("qwen3-8b", **asked), plan("qwen3-8b")]
    num_bytes = plans[0].num_streamed * plans[0].device.layer_bytes
    assert num_bytes > 0 == plans[2].num_streamed

    def together(*links: float | None, planned: list[MemoryPlan] = plans) -> str:
        return plan_tables(planned, 1024, where="a GPU", links_bytes_per_s=links).splitlines()[-1]

    assert f"expected: {num_bytes / 4e10 * 1e3:.1f} ms a token" in together(5e10, 4e10, None)
    assert together(5e10, None, None).endswith("; link not measured")
    mapped = [plans[0], plan("qwen3-8b", **asked, host="mapped"), plans[2]]
    assert "expected: at least" in together(5e10, 4e10, None, planned=mapped)
    assert "expected" not in together(None, None, None, planned=[plans[2]] * 3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"keep": 1, "device_budget": 5}, "keep is 1 and device_budget is 5; expected one of the two"),
        ({"keep": 1, "device_budget": "auto"}, "keep is 1 and device_budget is 'auto'"),
        ({"device_budget": "6G"}, "device_budget is '6G'"),
        ({"device_budget": True}, "device_budget is True"),
        ({"host_budget": "auto"}, "host_budget is 'auto'"),
        ({"host": "disk"}, "host is 'disk'; expected one of auto, "),
        ({"keep": 0}, "keep is 0"),
        ({"policy": "ahead"}, "policy is 'ahead'"),
        ({"policy": "ahead", "keep": 1}, "policy is 'ahead'"),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan("qwen3-vl-2b", **asked)


def test_host_memory_is_looked_at_when_the_allocator_has_taken_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator's records of a GPU's memory are host memory, gigabytes of it, that nobody plans."""
    taken = [GIB]
    monkeypatch.setattr(planning, "start_allocator", lambda _: taken.append(3 * GIB))
    monkeypatch.setattr(planning, "process_host_bytes", lambda: sum(taken))
    (free,) = planning._free_memory(jax.devices()[:1])
    assert free.process_bytes == 4 * GIB


def test_what_drafts_take_of_the_host_is_counted() -> None:
    """As long as there may be any: for every token of every sequence."""
    asked: dict[str, Any] = {"context": 32768, "keep": 1, "host": "mapped"}
    one = plan("qwen3-8b", **asked, host_budget="2GiB").host
    exactly = OVERHEAD_BYTES + 7 * one.num_bytes // one.num_buffers
    hosts = (plan("qwen3-8b", **asked, host_budget=exactly, speculate=depth).host for depth in ("auto", "off"))
    assert [host.num_buffers for host in hosts] == [6, 7]
