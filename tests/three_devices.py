"""Decoding on one, two and three devices. `test_devices.py` runs this in a process that has three."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from commands import IDS
from packed_dirs import pack_tiny
from tiny import load_golden

from vramjax.checkpoint.packed import Packed, open_packed
from vramjax.decode import layer_loop
from vramjax.decode.engine import Engine
from vramjax.decode.sampler import Sampling
from vramjax.decode.scheduler import Request
from vramjax.decode.speculation import Speculation
from vramjax.devices import choose_devices
from vramjax.errors import BudgetError, ConfigError
from vramjax.language_model import LanguageModel
from vramjax.memory_request import MemoryRequest
from vramjax.planning import engine_spec, plan_run
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.host_store import HostStore
from vramjax.residency.multi import MultiController, layers_of_device
from vramjax.residency.policy import window
from vramjax.residency.transfer import DeviceTransfer
from vramjax.residency.turn_transfer import TurnTransfer

SMOLLM2_PROMPT = (6403, 1980, 253, 655)  # "Once upon a time"
TRANSFERS: dict[str, Callable[[jax.Device, int], DeviceTransfer]] = {
    "alone": lambda device, num_devices: DeviceTransfer(device),
    "fused": lambda device, num_devices: FusedTransfer(device),
    "turns": lambda device, num_devices: TurnTransfer(device, num_devices=num_devices),
}


@dataclass
class Answer:
    ids: list[int]
    logits: bytes  # of all tokens


@contextlib.contextmanager
def engine_on(
    packed: Packed,
    num_devices: int,
    *,
    keep: int | None,
    policy: str = "pinned_ring",
    transfer: str = "turns",
    num_slots: int = 1,
) -> Iterator[tuple[Engine, MultiController]]:
    """An engine on the first `num_devices` devices, each with a window of `keep` of its layers."""
    devices, num_layers = jax.devices()[:num_devices], packed.config.num_layers
    controllers, transfers = [], [TRANSFERS[transfer](device, num_devices) for device in devices]
    for i, device in enumerate(devices):
        share = layers_of_device(i, num_layers, num_devices)
        store = HostStore((packed.load_layer(layer_idx) for layer_idx in share), device)
        controllers.append(Controller(store, window(len(share), keep, policy), transfers[i]))
    with MultiController(controllers) as layers:
        spec = engine_spec(packed.config, packed.groups, context=256, device=devices[0], num_slots=num_slots)
        head = transfers[0].upload(packed.load_head(), None)
        engine = Engine(spec=spec, head=head, controller=layers, device=devices)
        engine.compile()
        yield engine, layers
        engine.close()


def answer(engine: Engine, prompt: tuple[int, ...], num_tokens: int, sampling: Sampling | None = None) -> Answer:
    rows: list[bytes] = []
    ids = list(
        engine.generate(
            prompt,
            max_new_tokens=num_tokens,
            sampling=sampling or Sampling(),
            on_logits=lambda row: rows.append(row.tobytes()),
        )
    )
    return Answer(ids, b"".join(rows))


@functools.cache
def answer_of_one(path: Path, prompt: tuple[int, ...], num_tokens: int, sampling: Sampling | None = None) -> Answer:
    with engine_on(open_packed(path), 1, keep=None) as (engine, _):
        return answer(engine, prompt, num_tokens, sampling)


def check(packed: Packed, prompt: tuple[int, ...], num_tokens: int, num_devices: int, **arm: Any) -> None:
    expected = answer_of_one(packed.path, prompt, num_tokens)
    with engine_on(packed, num_devices, **arm) as (engine, layers):
        assert answer(engine, prompt, num_tokens) == expected
        for controller in layers.controllers:  # every device has streamed what its schedule says
            stats, schedule = controller.stats, controller.schedule
            assert stats.sweeps == num_tokens
            assert stats.last_sweep_uploads == schedule.uploads_per_sweep > 0
            assert stats.last_sweep_bytes_uploaded == schedule.uploads_per_sweep * packed.layer_nbytes
            assert stats.peak_resident_layers == schedule.peak_resident_layers
        first_uploads = sum(c.schedule.warm_up_uploads + c.schedule.first_sweep_uploads for c in layers.controllers)
        per_sweep = sum(controller.schedule.uploads_per_sweep for controller in layers.controllers)
        assert layers.stats.uploads == first_uploads + (num_tokens - 1) * per_sweep
        assert answer(engine, prompt, num_tokens) == expected


@pytest.fixture(scope="module", params=["llama", "qwen3", "smollm2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Packed, tuple[int, ...]]:
    packed = pack_tiny(tmp_path_factory.mktemp("tiny"), request.param)
    return packed, tuple(load_golden(request.param)["tokens"][:40].tolist())


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_smollm2(smollm2: Packed, num_devices: int) -> None:
    check(smollm2, SMOLLM2_PROMPT, 8, num_devices, keep=2)


@pytest.mark.parametrize("depth", [None, 7])
def test_many_sequences_on_several_devices(tiny: tuple[Packed, tuple[int, ...]], depth: int | None) -> None:
    """Prompts join beside rows of two tiles or more, all of which hop; each sequence has the bits that it has alone."""
    packed, prompt = tiny
    prompts = [prompt[: 1 + 3 * i] for i in range(12)]
    expected = [answer_of_one(packed.path, p, 6) for p in prompts]
    for num_devices in (2, 3):
        with engine_on(packed, num_devices, keep=1, num_slots=10) as (engine, _):
            if depth is not None:
                engine.speculation = Speculation(tile_rows=8, max_rows=80, is_streamed=True, depth=depth)
            found = [Answer([], b"") for _ in prompts]

            def on_logits(i: int, row: Any, found: list[Answer] = found) -> None:
                found[i].logits += row.tobytes()

            decoding = engine.decode([Request(prompt_ids=p, limit=6) for p in prompts], on_logits=on_logits)
            for token in decoding:
                found[token.request_idx].ids.append(token.id)
            assert found == expected
            if depth is None:
                assert decoding.stats.num_sweeps == 12
            else:
                assert sum(decoding.stats.drafts_by_depth) > 0


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_how_layers_are_uploaded_changes_nothing(smollm2: Packed, transfer: str) -> None:
    check(smollm2, SMOLLM2_PROMPT, 4, 2, keep=6, transfer=transfer)
    check(smollm2, SMOLLM2_PROMPT, 4, 2, keep=1, policy="past", transfer=transfer)


def test_tiny_models(tiny: tuple[Packed, tuple[int, ...]]) -> None:
    packed, prompt = tiny
    num_layers = packed.config.num_layers
    for num_devices in (2, 3):
        if num_layers // num_devices > 1:  # or what a device has is resident
            check(packed, prompt, 12, num_devices, keep=1)
    expected = answer_of_one(packed.path, prompt, 12)
    for num_devices in range(1, min(3, num_layers) + 1):
        with engine_on(packed, num_devices, keep=None) as (engine, layers):
            assert answer(engine, prompt, 12) == expected
            assert layers.stats.last_sweep_uploads == 0


def test_a_prompt_of_several_chunks_and_sampled_tokens(tiny: tuple[Packed, tuple[int, ...]]) -> None:
    packed, prompt = tiny
    prompt, sampling = (prompt * 4)[:150], Sampling(temperature=1.0, top_k=20, seed=3)
    expected = answer_of_one(packed.path, prompt, 6, sampling)
    with engine_on(packed, 2, keep=1) as (engine, layers):
        assert answer(engine, prompt, 6, sampling) == expected
        assert layers.stats.last_sweep_bytes_uploaded > 0


def test_every_layer_is_on_its_device(smollm2: Packed) -> None:
    devices = jax.devices()
    with engine_on(smollm2, 3, keep=2) as (engine, layers):
        sweep = layers.sweep

        def watched() -> Iterator[tuple[int, Any]]:
            for layer_idx, weights in sweep():
                for array in (engine._loop._kv[layer_idx], *weights.values()):
                    assert array.devices() == {devices[layer_idx % 3]}
                seen.append(layer_idx)
                yield layer_idx, weights

        seen: list[int] = []
        layers.sweep = watched
        answer(engine, SMOLLM2_PROMPT, 3)
        assert seen == [*range(30)] * 3


def test_a_hop_is_queued_before_what_its_device_uploads(smollm2: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hop that was queued behind an upload would wait for it."""
    log: list[str] = []
    hop = layer_loop._on

    def watched_hop(device: jax.Device, array: jax.Array) -> jax.Array:
        if device not in array.devices() and array.ndim == 2:
            log.append(f"hop {device.id}")
        return hop(device, array)

    class Watched(DeviceTransfer):
        def upload(self, *args: Any, **kwargs: Any) -> Any:
            log.append(f"upload {self.device.id}")
            return super().upload(*args, **kwargs)

    monkeypatch.setattr(layer_loop, "_on", watched_hop)
    monkeypatch.setitem(TRANSFERS, "watched", lambda device, num_devices: Watched(device))
    with engine_on(smollm2, 2, keep=2, transfer="watched") as (engine, _):
        answer(engine, SMOLLM2_PROMPT, 2)
        log.clear()
        answer(engine, SMOLLM2_PROMPT, 2)
    # Before layers 0 and 1 there is nothing to upload: what comes behind the last layer of each device was for them.
    sweep = [f"{what} {layer_idx % 2}" for layer_idx in range(2, 30) for what in ("hop", "upload")]
    assert log == ["hop 1", *sweep, "hop 0", "upload 1", "upload 0"] * 2


def test_a_failure_on_one_device_does_not_spoil_the_next_answer(
    smollm2: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer_of_one(smollm2.path, SMOLLM2_PROMPT, 4)
    with engine_on(smollm2, 3, keep=2) as (engine, layers):
        for at in (0, 1, 9, 10, 11):  # in the warm-up of the second device, in the first sweep, and in a steady one
            store, calls = layers.controllers[1]._store, []
            layer = store.layer

            def failing(layer_idx: int, at: int = at, calls: list = calls, layer: Any = layer) -> Any:
                calls.append(layer_idx)
                if len(calls) == at + 1:
                    raise OSError("disk on fire")
                return layer(layer_idx)

            aborted = [controller.stats.sweeps_aborted for controller in layers.controllers]
            with monkeypatch.context() as patch, pytest.raises(OSError, match="disk on fire"):
                patch.setattr(store, "layer", failing)
                answer(engine, SMOLLM2_PROMPT, 4)
            num_aborted = [c.stats.sweeps_aborted - n for c, n in zip(layers.controllers, aborted, strict=True)]
            assert num_aborted[:2] == [1, 1]
            assert answer(engine, SMOLLM2_PROMPT, 4) == expected


def test_nothing_is_left_on_any_device(tiny: tuple[Packed, tuple[int, ...]]) -> None:
    packed, prompt = tiny
    before = {id(array) for array in jax.live_arrays()}
    with engine_on(packed, 2, keep=1) as (engine, _):
        answer(engine, prompt, 4)
        # The engine is closed here, and everything with it.
    left = [a for a in jax.live_arrays() if id(a) not in before and a.nbytes > 1024 and not a.is_deleted()]
    assert not [a for a in left if a.sharding.memory_kind == "device"], left


def test_a_language_model_on_several_devices(smollm2: Packed) -> None:
    prompt = [1, *SMOLLM2_PROMPT]
    with LanguageModel(smollm2, None, keep=2, context=256, progress=False) as model:
        expected = model.generate(prompt, max_new_tokens=8, ignore_stop=True).finish().token_ids
        one = model.stats()
    with LanguageModel(smollm2, None, keep=2, context=256, devices=[0, jax.devices()[2]], progress=False) as model:
        assert model.devices == [jax.devices()[0], jax.devices()[2]]
        assert model.generate(prompt, max_new_tokens=8, ignore_stop=True).finish().token_ids == expected
        stats = model.stats()
    # Of one device's 30 layers all are streamed, through a ring of two; and so are 15 of each of two devices.
    assert one["uploads_per_token"] == stats["uploads_per_token"] == 30
    assert stats["bytes_streamed_per_token"] == 30 * smollm2.layer_nbytes
    assert (stats["num_layers"], stats["keep"], stats["peak_resident_layers"]) == (30, 4, 4)
    assert (stats["policy"], stats["host"], stats["head_bytes"]) == ("pinned_ring", "pinned", one["head_bytes"])
    assert (stats["kv_bytes"], stats["host_bytes"]) == (one["kv_bytes"], one["host_bytes"])
    assert [device["uploads_per_token"] for device in stats["devices"]] == [15, 15]
    assert [device["device"] for device in stats["devices"]] == [str(model.devices[0]), str(model.devices[1])]
    assert [device["uploads_per_token"] for device in one["devices"]] == [30]


@pytest.mark.parametrize("host", ["pinned", "mapped"])
def test_every_device_has_a_budget_of_its_own(smollm2: Packed, host: Any) -> None:
    """The first one holds the embedding too; so the others have more layers in the same budget."""
    shapes, devices = (smollm2.config, smollm2.groups), jax.devices()
    _, plans = plan_run(*shapes, MemoryRequest(keep=3), context=128, devices=devices)
    budget = plans[0].device.total_bytes
    expected = answer_of_one(smollm2.path, SMOLLM2_PROMPT, 4)
    arm: dict[str, Any] = {"devices": [0, 1, 2], "context": 128, "host": host, "progress": False}
    with LanguageModel(smollm2, None, device_budget=budget, **arm) as model:
        assert all(plan.device.total_bytes <= budget for plan in model.plans)
        assert [plan.schedule.keep for plan in model.plans] == [3, 10, 10]
        assert [plan.host.tier for plan in model.plans] == [host, "none", "none"]
        ids = model.generate(SMOLLM2_PROMPT, max_new_tokens=4, ignore_stop=True).finish().token_ids
        assert ids == expected.ids
        uploads = [device["uploads_per_token"] for device in model.stats()["devices"]]
        assert uploads == [plan.num_streamed for plan in model.plans]
        assert uploads[0] > 0 == uploads[1] == uploads[2]
        assert (model.stats()["policy"], model.stats()["host"]) == ("pinned_ring", host)
    smallest = plan_run(*shapes, MemoryRequest(keep=1), context=128, devices=devices)[1][0].device.total_bytes
    with pytest.raises(BudgetError, match="with 10 of 30 layers and 1/3 of the host memory: device_budget is"):
        LanguageModel(smollm2, None, device_budget=smallest - 1, **arm)


def test_more_devices_than_layers(tiny: tuple[Packed, tuple[int, ...]]) -> None:
    packed, prompt = tiny
    packed.config = dataclasses.replace(packed.config, num_layers=2)
    with LanguageModel(packed, None, keep=1, progress=False) as model:
        expected = model.generate(prompt, max_new_tokens=4, ignore_stop=True).finish().token_ids
    with LanguageModel(packed, None, keep=1, devices=[2, 1, 0], progress=False) as model:
        assert model.devices == [jax.devices()[2], jax.devices()[1]]
        assert model.generate(prompt, max_new_tokens=4, ignore_stop=True).finish().token_ids == expected


def test_the_command(run: Any, packed: Path) -> None:
    ids = f"--prompt_ids={IDS}"
    expected = run(f"--model={packed}", ids, "--max_new_tokens=6", "--noprogress", "--keep=1")
    done = run(f"--model={packed}", ids, "--max_new_tokens=6", "--noprogress", "--keep=1", "--devices=1,0")
    assert (done.code, done.out) == (0, expected.out)
    assert "2 x cpu, jax" in done.err
    plan = run("plan", f"--model={packed}", "--keep=1", "--devices=0,1,2").out
    assert "device 1 of 3, with layers 0, 3, which are numbered from 0 here" in plan
    assert "device 3 of 3, with layers 2, which" in plan
    assert "all devices: 4 uploads a token" in plan
    for flag, message in (
        ("0,0", f"--devices names {jax.devices()[0]} twice; expected each device once"),
        ("0,3", "--devices names device 3; expected 0 .. 2"),
        ("-1", "--devices names device -1; expected 0 .. 2"),
        ("gpu", "--devices is 'gpu'; expected whole numbers, such as 0,1"),
        ("", "--devices is empty; expected whole numbers, such as 0,1"),
    ):
        assert run(f"--model={packed}", ids, f"--devices={flag}").error() == message


def test_devices_that_are_none() -> None:
    first, second, _ = jax.devices()
    assert choose_devices(None) == [first]
    assert choose_devices([1, first]) == [second, first]
    for devices, message in (
        ([], "devices is empty; expected at least one place"),
        ([0, True], "devices has True; expected a place in jax.devices"),
        ("01", "devices is '01'; expected a list of places"),
        ([0, 0.5], r"devices has 0\.5; expected a place"),
        ([first, 0], "twice; expected each device once"),
        ([7], r"devices names device 7; expected 0 \.\. 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_devices(devices)  # pyright: ignore[reportArgumentType]


def test_devices_of_several_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda devices=jax.devices(): [*devices, Other()])  # noqa: B008
    with pytest.raises(ConfigError, match="devices are cpu and NVIDIA H200; expected devices of one kind"):
        choose_devices([0, 3])
