"""A checkpoint that is nowhere but in memory, to be converted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from tiny import tiny_model
from tiny_tokenizers import byte_level_json

from vramjax.checkpoint.names import expected_tensors
from vramjax.checkpoint.source import TensorInfo
from vramjax.config import ModelConfig
from vramjax.quantize import Q8Matrix


class FakeSource:
    """A checkpoint in memory. `q8` are stored as Q8; reading `fail_at` raises `failure`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        q8: dict[str, Q8Matrix] | None = None,
        fail_at: str = "",
        failure: BaseException | None = None,
    ) -> None:
        self.path = Path("fake")
        self.config = config
        self.notes = ["a note"]
        self.q8 = q8 or {}
        self.fail_at, self.failure = fail_at, failure
        self.tensors = {
            name: TensorInfo(
                name=name,
                stored_name=name,
                shape=shape,
                dtype="F32",
                file=Path(__file__),
                q8_group=self.q8[name].group if name in self.q8 else None,
            )
            for name, shape in expected_tensors(config).items()
        }

    def read(self, name: str) -> np.ndarray | Q8Matrix:
        if name == self.fail_at and self.failure is not None:
            raise self.failure
        if name in self.q8:
            return self.q8[name]
        rng = np.random.default_rng(sum(name.encode()))
        return rng.standard_normal(self.tensors[name].shape, np.float32)

    def write_text_files(self, dst: Path) -> None:
        (dst / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")


def small_config(**updates) -> ModelConfig:
    config = ModelConfig.from_hf(tiny_model("llama").config | {"vocab_size": 150, "max_position_embeddings": 128}, None)
    return dataclasses.replace(config, **updates)
