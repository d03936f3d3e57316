"""What a run takes of memory: what was planned bounds it, on the host and on a device that counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

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
        import json, resource
        import jax
        from test_memory import CONFIG
        from vramjax.checkpoint.random_weights import RandomWeights
        from vramjax.language_model import LanguageModel

        def peak_bytes():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        jax.block_until_ready(jax.numpy.ones(8) + 1)
        before = peak_bytes()
        weights = RandomWeights(CONFIG)
        with LanguageModel(weights, None, keep=1, context=256, progress=False) as model:
            model.generate([1, 2, 3], max_new_tokens=4).finish()
        q8_bytes = CONFIG.num_layers * weights.layout.num_bytes + weights.head_nbytes
        on_device = model.device_bytes.total_bytes if model.device.platform == "cpu" else 0
        print(json.dumps([peak_bytes() - before, q8_bytes, on_device]))
    """
    taken, q8_bytes, on_device = _run(script)
    assert 2 * q8_bytes > 1.05 * q8_bytes + on_device + HOST_CONSTANT_BYTES, (
        "too small a model to show that there is one copy"
    )
    assert taken <= 1.05 * q8_bytes + on_device + HOST_CONSTANT_BYTES, (taken, q8_bytes, on_device)


def _run(script: str, *arguments: str) -> list[int]:
    """What `script` prints last, from a process of its own: peaks are those of a process."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="only a GPU's allocator counts")
def test_the_planned_bytes_bound_the_allocators_peak() -> None:
    """For greedy decoding and for every way of drawing, which sort all logits."""
    script = """
        import json, sys
        from test_memory import CONFIG
        from vramjax.checkpoint.random_weights import RandomWeights
        from vramjax.decode.sampler import Sampling
        from vramjax.language_model import LanguageModel
        import dataclasses
        config = dataclasses.replace(CONFIG, vocab_size=151936)
        sampling = Sampling(**json.loads(sys.argv[1]))
        with LanguageModel(RandomWeights(config), None, keep=2, context=1024, progress=False) as model:
            model.generate([1] * 700, max_new_tokens=8, sampling=sampling, ignore_stop=True).finish()
            stats = model.stats()
        print(json.dumps([stats["allocator_peak_bytes"], stats["planned_peak_bytes"]]))
    """
    for settings in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}):
        peak, planned = _run(script, json.dumps(settings))
        assert 0 < peak <= planned, (settings, peak, planned)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB\n"}
    monkeypatch.setattr(memory, "_read", lambda path: files.get(path, ""))
    assert memory.free_host_bytes() == 2048 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "7\n"}
    assert memory.free_host_bytes() == 2048 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "1000\n"}
    assert memory.free_host_bytes() == 993
    files.clear()
    assert memory.free_host_bytes() == sys.maxsize
