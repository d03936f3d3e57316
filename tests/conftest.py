"""Fixtures that many tests share: the real demo model, as a GGUF file and packed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Several processes may share a GPU here; JAX would give three quarters of its memory to the first.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from vramjax.checkpoint.demo import fetch_demo
from vramjax.checkpoint.packed import Packed
from vramjax.checkpoint.resolve import default_cache_dir, open_model


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf, downloaded once into the cache of vramjax."""
    return fetch_demo(default_cache_dir())


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Packed:
    """The same model, packed once in the cache."""
    return open_model("demo", progress=False)
