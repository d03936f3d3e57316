"""What is read before the first prompt, which is what the bar shows, and what is left to the first prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import NUM_LAYERS

import vramjax
from vramjax import language_model
from vramjax.checkpoint.packed import Packed, open_packed
from vramjax.errors import ConfigError
from vramjax.language_model import LanguageModel

PROMPT = [1, 40, 50, 60, 70]


class Bar:
    """Stands in for a progress bar."""

    def __init__(self) -> None:
        self.total = self.done = 0

    @contextmanager
    def __call__(self, description: str, *, total: int, enabled: bool) -> Iterator[Any]:
        assert description == "Loading" and enabled == (total > 0)
        self.total = total
        yield self.advance

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes


class Counting(Packed):
    """Packed weights that count reads of each layer."""

    reads: Counter[int]

    def load_layer(self, layer_idx: int) -> Any:
        self.reads[layer_idx] += 1
        return super().load_layer(layer_idx)

    def read_layer_into(self, layer_idx: int, *args: Any, **kwargs: Any) -> None:
        self.reads[layer_idx] += 1
        super().read_layer_into(layer_idx, *args, **kwargs)


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> Bar:
    bar = Bar()
    monkeypatch.setattr(language_model, "progress_bar", bar)
    return bar


@pytest.fixture
def weights(packed: Path) -> Counting:
    opened = open_packed(packed)
    opened.__class__, opened.reads = Counting, Counter()  # pyright: ignore[reportAttributeAccessIssue]
    return opened  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("asked", "num_first"),
    [
        ({"keep": 3}, NUM_LAYERS),  # 3 streamed ones for the host, and the 2 that stay on the device
        ({"keep": 3, "warm_up": False}, 3),
        ({"keep": 1}, NUM_LAYERS),
        ({"keep": 3, "host": "mapped"}, 3),  # those that stay, and what is in the ring
        ({"keep": 1, "host": "mapped"}, 0),
        ({"keep": 2, "policy": "past"}, 3),
        ({"keep": 2, "policy": "past", "warm_up": True}, NUM_LAYERS),
        ({"keep": NUM_LAYERS}, NUM_LAYERS),
        ({"keep": NUM_LAYERS, "warm_up": False}, 0),
    ],
)
def test_the_bar_is_full_when_the_model_is_loaded(
    weights: Counting, bar: Bar, asked: dict[str, Any], num_first: int
) -> None:
    with LanguageModel(weights, None, **asked) as model:
        assert bar.done == bar.total == num_first * weights.layer_nbytes
        # A store whose memory layers pass through has begun to read what comes after those.
        reads_ahead = num_first < NUM_LAYERS and any(store.reuses_memory for store in model._stores)
        num_read = weights.reads.total()
        assert num_read >= num_first if reads_ahead else num_read == num_first
        model.generate(PROMPT, max_new_tokens=3, ignore_stop=True).finish()
        # Layers that have stayed are loaded once more after a sweep that was broken off, but not shown again.
        with pytest.raises(RuntimeError, match="on the way"):
            for layer_idx, _ in model._controller.sweep():
                if layer_idx == 3:
                    raise RuntimeError("on the way")
        model.generate(PROMPT, max_new_tokens=3, ignore_stop=True).finish()
        assert bar.done == bar.total
        if asked.get("host") != "mapped" and asked.get("policy") != "past" and asked["keep"] == 3:
            assert max(weights.reads.values()) == 2


def test_what_stays_is_not_left_to_the_first_prompt(weights: Counting) -> None:
    with LanguageModel(weights, None, keep=3, progress=False) as model:
        before = weights.reads.copy()
        assert model.residency.uploads == 3
        model.generate(PROMPT, max_new_tokens=1, ignore_stop=True).finish()
        assert model.residency.uploads == 3 + 3 and weights.reads == before


def test_a_cache_in_a_users_directory(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    vramjax.load(checkpoint, cache_dir="~/cache", context=64, progress=False).close()
    assert list((tmp_path / "cache" / "packed").glob("chat-*"))
    with pytest.raises(ConfigError, match="cache_dir is 5; expected the path of a directory"):
        vramjax.load(checkpoint, cache_dir=5, progress=False)  # pyright: ignore[reportArgumentType]
