"""What a run takes of memory: what was planned bounds it, on the host and on a device that counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from vramjax import memory
from vramjax.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    family="qwen3",
    num_layers=40,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=8192,
    max_positions=4096,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
)
HOST_CONSTANT_BYTES = 192 << 20  # libraries, compiled programs, and one layer on its way


def test_host_memory_is_that_of_the_layers() -> None:
    """Loading and decoding take at most 1.05 times the Q8 bytes, and a constant, beyond a process with JAX in it.

    On a CPU what is on the device is host memory too, and allowed for.
    """
    script = """
        import json
        import jax
        from test_memory import CONFIG
        from vramjax.checkpoint.random_weights import RandomWeights
        from vramjax.language_model import LanguageModel

        def peak_bytes():
            return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

        jax.block_until_ready(jax.numpy.ones(8) + 1)
        before = peak_bytes()
        weights = RandomWeights(CONFIG)
        with LanguageModel(weights, None, keep=1, context=256, progress=False) as model:
            model.generate([1, 2, 3], max_new_tokens=4).finish()
        q8_bytes = CONFIG.num_layers * weights.layout.num_bytes + weights.head_nbytes
        on_device = model.plan.device.total_bytes if model.device.platform == "cpu" else 0
        print(json.dumps([peak_bytes() - before, q8_bytes, on_device]))
    """
    taken, q8_bytes, on_device = _run(script)
    assert 2 * q8_bytes > 1.05 * q8_bytes + on_device + HOST_CONSTANT_BYTES, (
        "too small a model to show that there is one copy"
    )
    assert taken <= 1.05 * q8_bytes + on_device + HOST_CONSTANT_BYTES, (taken, q8_bytes, on_device)


def test_host_memory_stays_within_its_budget() -> None:
    """The smallest one that is accepted, of the whole process, for a model that is larger."""
    script = """
        import dataclasses, json, re
        import jax
        from test_memory import CONFIG
        from vramjax.checkpoint.random_weights import RandomWeights
        from vramjax.errors import BudgetError
        from vramjax.language_model import LanguageModel
        from vramjax.units import parse_bytes

        jax.block_until_ready(jax.numpy.ones(8) + 1)
        weights = RandomWeights(dataclasses.replace(CONFIG, num_layers=160))
        made_up_bytes = sum(array.nbytes for array in weights.load_layer(0).values())  # in place of a file
        asked = {"keep": 1, "context": 256, "progress": False}
        try:
            LanguageModel(weights, None, host_budget=1, **asked)
        except BudgetError as error:
            budget = parse_bytes(re.search("at least (.*?): ", str(error))[1])
        with LanguageModel(weights, None, host_budget=budget, **asked) as model:
            model.generate([1, 2, 3], max_new_tokens=4).finish()
            stats = model.stats()
        assert (stats["host"], stats["uploads_per_token"]) == ("mapped", 160)
        peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
        print(json.dumps([peak - made_up_bytes, budget, 160 * weights.layout.num_bytes]))
    """
    peak, budget, q8_bytes = _run(script)
    assert budget < q8_bytes
    assert peak <= budget


def _run(script: str, *arguments: str, **environment: str) -> list[int]:
    """What `script` prints last, from a process of its own: peaks are those of a process.

    Scripts read the high-water mark of /proc: that of getrusage begins with the memory of the process they come from.
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    variables = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="only a GPU's allocator counts")
@pytest.mark.parametrize("asked", [{"keep": 2}, {"device_budget": "smallest"}, {"device_budget": "half"}, {"keep": 40}])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}])
def test_the_planned_bytes_bound_the_allocators_peak(asked: dict[str, Any], settings: dict[str, float]) -> None:
    """For greedy decoding and for every way of drawing, which sort all logits; so the smallest budget really runs."""
    script = """
        import dataclasses, json, re, sys
        import jax
        from test_memory import CONFIG
        from vramjax.checkpoint.random_weights import RandomWeights
        from vramjax.decode.sampler import Sampling
        from vramjax.errors import BudgetError
        from vramjax.language_model import LanguageModel
        from vramjax.memory_request import MemoryRequest
        from vramjax.planning import plan_run
        from vramjax.units import parse_bytes

        asked, settings = map(json.loads, sys.argv[1:])
        weights = RandomWeights(dataclasses.replace(CONFIG, vocab_size=151936))
        shapes, context = (weights.config, weights.groups), {"context": 1024, "devices": jax.devices()[:1]}
        if asked.get("device_budget") == "half":
            asked["device_budget"] = plan_run(*shapes, MemoryRequest(keep=20), **context)[1][0].device.total_bytes
        if asked.get("device_budget") == "smallest":
            try:
                plan_run(*shapes, MemoryRequest(device_budget=1), **context)
            except BudgetError as error:
                asked["device_budget"] = parse_bytes(re.search("at least (.*?) for", str(error))[1])
        with LanguageModel(weights, None, context=1024, progress=False, **asked) as model:
            prompt = [1] * 700
            model.generate(prompt, max_new_tokens=8, sampling=Sampling(**settings), ignore_stop=True).finish()
            stats = model.stats()
        names = ("allocator_peak_bytes", "planned_peak_bytes", "uploads", "num_layers", "peak_resident_layers")
        print(json.dumps([*(stats[name] for name in names), stats["device_budget"] or 0]))
    """
    # An allocator that grows as it needs to is charged with what it takes at once, not with what it hands out.
    pool = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".02"}
    peak, planned, uploads, num_layers, peak_layers, budget = _run(
        script, json.dumps(asked), json.dumps(settings), **pool
    )
    assert 0 < peak <= planned
    assert "device_budget" not in asked or planned <= budget
    assert peak_layers == asked.get("keep", 1 if asked.get("device_budget") == "smallest" else 20)
    assert uploads >= (8 * (num_layers - peak_layers) if peak_layers < num_layers else num_layers)


class FakeCuda:
    """libcuda for one device with 1000 bytes, of which 600 are free. Each call may be made to fail."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.calls = failing, []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == self.failing:
                return 999
            if name == "cuDeviceGet":
                args[0]._obj.value = 10 + args[1]
            elif name == "cuDevicePrimaryCtxRetain":
                assert args[1].value == 13
                args[0]._obj.value = 77
            elif name == "cuCtxPushCurrent_v2":
                assert args[0].value == 77
            elif name == "cuMemGetInfo_v2":
                args[0]._obj.value, args[1]._obj.value = 600, 1000
            return 0

        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(memory, "_load_cuda", lambda: fake)
    return fake


RETAIN, RELEASE = "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"
PUSH, POP = "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"


def test_the_driver_is_asked_about_one_device(cuda: FakeCuda) -> None:
    assert memory.driver_free_bytes(3) == 600
    assert cuda.calls == ["cuInit", "cuDeviceGet", RETAIN, PUSH, "cuMemGetInfo_v2", POP, RELEASE]
    assert memory.driver_free_bytes(None) is None


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", RETAIN, PUSH, "cuMemGetInfo_v2"])
def test_a_driver_that_fails(cuda: FakeCuda, failing: str) -> None:
    """Whatever was taken is given back."""
    cuda.failing = failing
    assert memory.driver_free_bytes(3) is None
    assert (RETAIN in cuda.calls and failing != RETAIN) == (RELEASE in cuda.calls)
    assert (PUSH in cuda.calls and failing != PUSH) == (POP in cuda.calls)


@pytest.mark.parametrize(
    ("stats", "free"),
    [
        ({"bytes_limit": 900, "bytes_in_use": 100, "pool_bytes": 900}, 800),  # a pool that is all there already
        ({"bytes_limit": 900, "bytes_in_use": 100, "pool_bytes": 150}, 650),  # one that grows: others left 600 bytes
        ({"bytes_limit": 500, "bytes_in_use": 100, "pool_bytes": 150}, 400),  # or its own limit comes first
        ({"bytes_limit": 900, "bytes_in_use": 100}, 800),
        ({"bytes_limit": 100, "bytes_in_use": 200, "pool_bytes": 200}, 0),
        ({}, 600),  # no pool at all
        (None, 600),
    ],
)
def test_free_device_memory(cuda: FakeCuda, stats: dict[str, int] | None, free: int) -> None:
    device: Any = SimpleNamespace(platform="gpu", local_hardware_id=3, memory_stats=lambda: stats)
    assert memory.free_device_bytes(device) == free


def test_free_device_memory_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(memory, "_load_cuda", no_driver)
    stats = {"bytes_limit": 900, "bytes_in_use": 100, "pool_bytes": 150}
    device: Any = SimpleNamespace(platform="gpu", local_hardware_id=0, memory_stats=lambda: stats)
    assert memory.free_device_bytes(device) == 800
    device.memory_stats = lambda: None
    assert memory.free_device_bytes(device) == sys.maxsize


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no driver to ask")
def test_what_another_program_takes_is_not_free() -> None:
    """JAX's own figure does not know of it."""
    script = """
        import json, subprocess, sys
        import jax
        from vramjax.memory import free_device_bytes

        device = jax.devices()[0]
        jax.block_until_ready(jax.numpy.ones(8))
        other = "import jax, sys; x = jax.numpy.ones(1 << 30, 'int8').block_until_ready(); print(1); sys.stdin.read()"
        before, own = free_device_bytes(device), device.memory_stats()["bytes_limit"]
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "1\\n"
        print(json.dumps([before, free_device_bytes(device), own, device.memory_stats()["bytes_limit"]]))
        process.communicate("")
    """
    growing = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "1"}
    before, after, *own = _run(script, **growing)
    assert own[0] == own[1]
    assert after <= before - (1 << 30)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB\n"}
    monkeypatch.setattr(memory, "_read", lambda path: files.get(path, ""))
    assert memory.free_host_bytes() == 2048 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "7\n"}
    assert memory.free_host_bytes() == 2048 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "1000\n"}
    assert memory.free_host_bytes() == 993
    # What the system holds of files that were read is in use only until somebody needs it.
    files |= {"/sys/fs/cgroup/memory.current": "900\n"}
    files |= {"/sys/fs/cgroup/memory.stat": "anon 100\nfile 800\ninactive_file 700\nactive_file 100\n"}
    assert memory.free_host_bytes() == 800
    files.clear()
    v1 = "/sys/fs/cgroup/memory/memory"
    files |= {f"{v1}.limit_in_bytes": "1000\n", f"{v1}.usage_in_bytes": "900\n"}
    assert memory.free_host_bytes() == 100
    files |= {f"{v1}.stat": "inactive_file 1\ntotal_inactive_file 30\n"}  # its own, and with that of groups in it
    assert memory.free_host_bytes() == 130
    files.clear()
    assert memory.free_host_bytes() == sys.maxsize
