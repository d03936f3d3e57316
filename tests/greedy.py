"""Decoding one prompt greedily."""

from __future__ import annotations

import numpy as np

from vramjax.checkpoint.packed import Packed
from vramjax.language_model import LanguageModel


def decode(packed: Packed, prompt: np.ndarray, num_new: int, **kwargs) -> tuple[list[int], np.ndarray]:
    """Greedy ids and the logits [num_new, V] that they came from."""
    rows: list[np.ndarray] = []
    with LanguageModel(packed, None, progress=False, **kwargs) as model:
        generation = model.generate(
            prompt.tolist(), max_new_tokens=num_new, ignore_stop=True, on_logits=lambda row: rows.append(row.copy())
        ).finish()
    return generation.token_ids, np.stack(rows)
