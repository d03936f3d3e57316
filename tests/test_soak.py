"""Thousands of tokens through a window of one layer: memory, threads and open files stay what they were.

VRAMJAX_SOAK_TOKENS makes it longer.
"""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import pytest
from own_process import resident_bytes
from tiny import tiny_model, write_model

import vramjax
from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf
from vramjax.residency import mapped_buffers

NUM_TOKENS = int(os.environ.get("VRAMJAX_SOAK_TOKENS", "2000"))
NUM_FIRST = 300  # until then allocators and caches fill
MAX_GROWTH_BYTES = 4 << 20  # of host memory in all tokens after these; 40 times a layer's
PROMPT = [1, 40, 50, 60, 70]


@dataclass(frozen=True)
class Taken:
    """What this process has."""

    arrays: int
    array_bytes: int
    threads: int
    files: int
    rss_bytes: int


def taken() -> Taken:
    gc.collect()
    # Scalars tell that a copy has ended: some, or none.
    arrays = [array for array in jax.live_arrays() if array.ndim > 0]
    return Taken(
        arrays=len(arrays),
        array_bytes=sum(array.nbytes for array in arrays),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        rss_bytes=resident_bytes(),
    )


def assert_flat(before: Taken, after: Taken) -> None:
    assert (after.arrays, after.array_bytes) == (before.arrays, before.array_bytes)
    # A file that is being read, or a thread more for it, may be caught now or then.
    assert after.threads <= before.threads + 4 and after.files <= before.files + 4
    assert after.rss_bytes - before.rss_bytes < MAX_GROWTH_BYTES, (before, after)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for a long answer."""
    tiny = tiny_model("qwen3")
    tiny.config["max_position_embeddings"] = 1 << 16
    directory = tmp_path_factory.mktemp("soak")
    return convert(open_hf(write_model(directory / "hf", tiny)), directory / "packed", progress=False)


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[int]:
    """The answer where every layer stays on the device."""
    with vramjax.load(model_path, context=len(PROMPT) + NUM_TOKENS, progress=False) as model:
        ids = model.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_stop=True).finish().token_ids
        assert model.stats()["uploads_per_token"] == 0
    assert len(ids) == NUM_TOKENS
    return ids


@pytest.mark.parametrize("host", ["pinned", "mapped"])
def test_memory_is_flat(model_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
    """One long answer; then everything is given back."""
    monkeypatch.setattr(mapped_buffers, "MAX_BUFFERS", 2)  # so that the model does not fit into all of them
    before = taken()
    settings: dict[str, Any] = {"context": len(PROMPT) + NUM_TOKENS, "speculate": "off", "progress": False}
    with vramjax.load(model_path, keep=1, host=host, **settings) as model:
        assert (model.plan.host.tier, model.schedule.uploads_per_sweep) == (host, model.config.num_layers)
        model_bytes = model.config.num_layers * model.spec.layout.num_bytes
        assert (model.plan.host.num_bytes < model_bytes) == (host == "mapped")
        tokens = model.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_stop=True)
        ids = [token.id for token in islice(tokens, NUM_FIRST)]
        at_first, uploads = taken(), model.residency.uploads
        ids += [token.id for token in islice(tokens, NUM_TOKENS - NUM_FIRST - 1)]
        assert_flat(at_first, taken())
        ids += [token.id for token in tokens]
        assert ids == expected
        # The last token, and so its sweep, is asked for after the last look.
        assert model.residency.uploads - uploads >= (NUM_TOKENS - NUM_FIRST - 1) * model.config.num_layers
        assert model.residency.peak_resident_layers <= 2
    del model, tokens
    after = taken()
    assert (after.arrays, after.array_bytes, after.threads) == (before.arrays, before.array_bytes, before.threads)
    assert after.files <= before.files
