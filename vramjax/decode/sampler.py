"""From logits to the next token id, on the device.

A row's draw depends on its own logits, its settings and its seed and position, never on the other rows: the random
numbers of position p are those of the key folded with p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from vramjax.errors import ConfigError
from vramjax.whole_number import is_whole


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: greedy at temperature 0, else from softmax(logits / temperature), cut to the likeliest.

    `top_k` keeps the k likeliest tokens (0: all); `top_p` then keeps the fewest whose probabilities reach p (Holtzman
    et al., 2020, arXiv:1904.09751). The same seed gives the same tokens.

    Raises:
      ConfigError: a value is no number, or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not is_whole(value) and not isinstance(value, float | np.floating):
                raise ConfigError(f"{name} is {value!r}; expected a number")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if not is_whole(value):
                raise ConfigError(f"{name} is {value!r}; expected a whole number")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; expected 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; expected more than 0 and at most 1 (off)")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; expected 0 .. 2**32 - 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def without_seed(self) -> Sampling:
        """The same rule, for programs that take the seed as an argument."""
        return replace(self, seed=0)

    @property
    def is_cut(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


def sample(
    logits: jax.Array,  # float32 [T, V]
    positions: jax.Array,  # int32 [T]: where the tokens that are drawn will stand
    seed: jax.Array,  # uint32 []
    sampling: Sampling,
) -> jax.Array:  # int32 [T]
    """The next token of every row. Ties go to the smallest id.

    `sampling` is static, so that greedy decoding compiles to an argmax and nothing else; its seed is not looked at, as
    every new one would be compiled anew.
    """
    with jax.named_scope("sample"):
        if sampling.is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # The likeliest token's score is 0, and a temperature too small for float32 still does not divide 0 by 0.
        scores = (logits - logits.max(axis=-1, keepdims=True)) / max(sampling.temperature, jnp.finfo(jnp.float32).tiny)
        if sampling.is_cut:
            scores = jnp.where(_is_kept(scores, sampling), scores, -jnp.inf)
        key = jax.random.key(seed)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, positions)
        noise = jax.vmap(lambda k: jax.random.gumbel(k, scores.shape[-1:]))(keys)
        # The largest of score + Gumbel noise is a draw from the softmax of the scores (Gumbel, 1954).
        return jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)


def _is_kept(scores: jax.Array, sampling: Sampling) -> jax.Array:  # [T, V] -> bool [T, V]
    """Which tokens may be drawn: exactly as many as asked for, so that of equal ones the smallest ids are kept."""
    ordered = jnp.sort(scores, axis=-1, descending=True)
    if 0 < sampling.top_k < scores.shape[-1]:
        ordered = ordered[:, : sampling.top_k]
    num_kept = jnp.full((len(scores), 1), ordered.shape[-1])
    if sampling.top_p < 1.0:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # what likelier tokens hold together
        num_kept = jnp.sum(before < sampling.top_p, axis=-1, keepdims=True)
    threshold = jnp.take_along_axis(ordered, num_kept - 1, axis=-1)
    above, level = scores > threshold, scores == threshold
    room = num_kept - jnp.sum(above, axis=-1, keepdims=True)
    return above | (level & (jnp.cumsum(level, axis=-1) <= room))
