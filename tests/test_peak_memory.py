"""What a run takes of memory: what was planned bounds it, on the host and on a device that counts."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest
from own_process import run_python

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


def printed_by(script: str, *arguments: str, **environment: str) -> list[int]:
    """What a process of its own prints last, as JSON."""
    return json.loads(run_python(script, *arguments, **environment).splitlines()[-1])


def test_host_memory_is_that_of_the_layers() -> None:
    """Loading and decoding take at most 1.05 times the Q8 bytes, and a constant, beyond a process with JAX in it.

    On a CPU what is on the device is host memory too, and allowed for.
    """
    script = """
        import json
        import jax
        from own_process import peak_bytes
        from test_peak_memory import CONFIG
        from vramjax.checkpoint.random_weights import RandomWeights
        from vramjax.language_model import LanguageModel

        jax.block_until_ready(jax.numpy.ones(8) + 1)
        before = peak_bytes()
        weights = RandomWeights(CONFIG)
        with LanguageModel(weights, None, keep=1, context=256, progress=False) as model:
            model.generate([1, 2, 3], max_new_tokens=4).finish()
        q8_bytes = CONFIG.num_layers * weights.layout.num_bytes + weights.head_nbytes
        on_device = model.plan.device.total_bytes if model.device.platform == "cpu" else 0
        print(json.dumps([peak_bytes() - before, q8_bytes, on_device]))
    """
    taken, q8_bytes, on_device = printed_by(script)
    assert 2 * q8_bytes > 1.05 * q8_bytes + on_device + HOST_CONSTANT_BYTES, (
        "too small a model to show that there is one copy"
    )
    assert taken <= 1.05 * q8_bytes + on_device + HOST_CONSTANT_BYTES, (taken, q8_bytes, on_device)


def test_host_memory_stays_within_its_budget() -> None:
    """The smallest one that is accepted, of the whole process, for a model that is larger."""
    script = """
        import dataclasses, json, re
        import jax
        from own_process import peak_bytes
        from test_peak_memory import CONFIG
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
        print(json.dumps([peak_bytes() - made_up_bytes, budget, 160 * weights.layout.num_bytes]))
    """
    peak, budget, q8_bytes = printed_by(script)
    assert budget < q8_bytes
    assert peak <= budget


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="only a GPU's allocator counts")
@pytest.mark.parametrize(
    "asked",
    [
        *({"keep": 2}, {"device_budget": "smallest"}, {"device_budget": "half"}, {"keep": 40}),
        *({"keep": 2, "batch": 5}, {"keep": 2, "batch": 40}),
        *({"device_budget": "smallest", "speculate": 15, "drafts": True}, {"keep": 40, "speculate": 4, "drafts": True}),
        {"keep": 2, "batch": 5, "speculate": 15, "drafts": True},
        *({"keep": 2, "prompt": 2300}, {"keep": 40, "prompt": 2300}),  # in blocks of 2048 rows
    ],
)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}])
def test_the_planned_bytes_bound_the_allocators_peak(asked: dict[str, Any], settings: dict[str, float]) -> None:
    """For greedy decoding and for every way of drawing, which copy all logits; so the smallest budget really runs."""
    script = """
        import dataclasses, json, re, sys
        import jax
        from test_peak_memory import CONFIG
        from vramjax.checkpoint.random_weights import RandomWeights
        from vramjax.decode.sampler import Sampling
        from vramjax.draft_model import DraftModelShape
        from vramjax.errors import BudgetError
        from vramjax.language_model import LanguageModel
        from vramjax.memory_request import MemoryRequest
        from vramjax.planning import plan_run
        from vramjax.units import parse_bytes

        asked, settings = map(json.loads, sys.argv[1:])
        weights = RandomWeights(dataclasses.replace(CONFIG, vocab_size=151936))
        length = asked.pop("prompt", 700)
        shapes, context = (weights.config, weights.groups), {"context": length + 324, "devices": jax.devices()[:1]}
        draft = None
        if asked.pop("drafts", False):
            draft = RandomWeights(dataclasses.replace(weights.config, num_layers=8, hidden_size=512))
            context["draft"] = DraftModelShape(config=draft.config, groups=draft.groups)
        if asked.get("device_budget") == "half":
            asked["device_budget"] = plan_run(*shapes, MemoryRequest(keep=20), **context)[1][0].device.total_bytes
        if asked.get("device_budget") == "smallest":
            try:
                plan_run(*shapes, MemoryRequest(device_budget=1, speculate=asked.get("speculate", "auto")), **context)
            except BudgetError as error:
                asked["device_budget"] = parse_bytes(re.search("at least (.*?) for", str(error))[1])
        with LanguageModel(weights, None, context=length + 324, draft=draft, progress=False, **asked) as model:
            prompts = [[1] * length] * (asked["batch"] + 5 if "batch" in asked else 1)
            sampling = Sampling(**settings)
            for _ in model.generate_many(prompts, max_new_tokens=8, sampling=sampling, ignore_stop=True):
                pass
            stats = model.stats()
        assert draft is None or (stats["num_drafts"] > 0 and stats["draft_bytes"] > 0)
        names = ("allocator_peak_bytes", "planned_peak_bytes", "uploads", "num_layers", "peak_resident_layers")
        print(json.dumps([*(stats[name] for name in names), stats["device_budget"] or 0]))
    """
    # An allocator that grows as it needs to is charged with what it takes at once, not with what it hands out.
    pool = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".02"}
    peak, planned, uploads, num_layers, peak_layers, budget = printed_by(
        script, json.dumps(asked), json.dumps(settings), **pool
    )
    assert 0 < peak <= planned
    assert "device_budget" not in asked or planned <= budget
    assert peak_layers == asked.get("keep", 1 if asked.get("device_budget") == "smallest" else 20)
    num_sweeps = 2 if "drafts" in asked else 8  # at least
    assert uploads >= (num_sweeps * (num_layers - peak_layers) if peak_layers < num_layers else num_layers)
