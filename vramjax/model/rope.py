"""Rotary position embedding: the frequencies of every supported kind.

RoPE: Su et al., 2021, arXiv:2104.09864. Linear scaling: positions divided by a factor. YaRN: Peng et al., 2023,
arXiv:2309.00071. The `llama3` kind is the smooth cut of low frequencies that Llama 3.1 was released with.
"""

from __future__ import annotations

import math

import numpy as np

from vramjax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions, float32 [Hd / 2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.theta**-exponents
    if rope.freq_factors is not None:
        plain = plain / np.asarray(rope.freq_factors, np.float64)
    if rope.kind == "linear":
        plain = plain / rope.factor
    elif rope.kind == "llama3":
        plain = _llama3(rope, plain)
    elif rope.kind == "yarn":
        plain = _yarn(rope, plain, head_dim)
    return plain.astype(np.float32)


def amplitude(rope: RopeConfig) -> float:
    """What cosine and sine are multiplied by: 1, but for YaRN, which sharpens attention on long contexts."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Wavelengths above the original context are stretched by `factor`, short ones kept, a smooth ramp between."""
    assert rope.original_max_positions and rope.low_freq_factor and rope.high_freq_factor
    turns = rope.original_max_positions * plain / (2 * math.pi)  # full turns within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """Dimensions that turn often within the original context are kept, those that turn less than once stretched."""
    assert rope.original_max_positions
    context = rope.original_max_positions

    def dimension_of(num_turns: float) -> float:
        positions_per_turn = context / (num_turns * 2 * math.pi)
        return head_dim * math.log(positions_per_turn) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    stretch = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return (1.0 - stretch) * plain + stretch * plain / rope.factor
