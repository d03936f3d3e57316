"""From logits to the next token id, on the device.

A row's draw depends on its own logits, settings, seed and position, never on the other rows nor on their settings: the
random numbers of position p are those of the seed's key folded with p.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

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


GREEDY = Sampling()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "seed"],
    meta_fields=["all_greedy"],
)
@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """The settings of every row of a tile, as arrays, so that another mix of settings compiles nothing.

    Invariant: a row's draw is the same whatever the others are. There are two programs: an argmax and nothing else for
    rows that are all greedy, and one for all others, whether they are cut or not.

    Example: `RowSampling.of([Sampling(), Sampling(temperature=0.7, seed=3)])` has temperature [0, 0.7] and seed [0, 3];
    row 0 is drawn as under `RowSampling.of([Sampling()])`.
    """

    temperature: jax.Array | np.ndarray  # float32 [T]: 0 in greedy rows
    top_k: jax.Array | np.ndarray  # int32 [T]: 0 keeps all
    top_p: jax.Array | np.ndarray  # float32 [T]: 1 keeps all
    seed: jax.Array | np.ndarray  # uint32 [T]
    all_greedy: bool

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> Self:
        """The settings of each row; those of rows not in use do not matter, greedy ones (`Sampling()`) cost nothing."""
        smallest = float(np.finfo(np.float32).tiny)  # what is less would be taken for 0, which is something else
        temperature = [0.0 if row.is_greedy else max(float(row.temperature), smallest) for row in rows]
        return cls(
            temperature=np.minimum(temperature, np.finfo(np.float32).max).astype(np.float32),
            top_k=np.array([min(row.top_k, np.iinfo(np.int32).max) for row in rows], np.int32),
            top_p=np.array([max(float(row.top_p), smallest) for row in rows], np.float32),
            seed=np.array([row.seed for row in rows], np.uint32),
            all_greedy=all(row.is_greedy for row in rows),
        )


@functools.lru_cache(maxsize=64)
def sampling_of(rows: tuple[Sampling, ...]) -> RowSampling:
    """`RowSampling.of`, which is mostly the same from sweep to sweep."""
    return RowSampling.of(rows)


def sample_rows(
    logits: jax.Array,  # float32 [T, V]
    positions: jax.Array,  # int32 [T]: where the tokens that are drawn will stand
    rows: RowSampling,
) -> jax.Array:  # int32 [T]
    """The next token of every row. Ties go to the smallest id."""
    with jax.named_scope("sample"):
        return jnp.argmax(perturbed(logits, positions, rows), axis=-1).astype(jnp.int32)


def perturbed(
    logits: jax.Array,  # float32 [T, V]
    positions: jax.Array,  # int32 [T]
    rows: RowSampling,
) -> jax.Array:  # float32 [T, V]
    """What a row's token is the argmax of: the logits where it is greedy, else scores and noise, -inf where cut."""
    if rows.all_greedy:
        return logits
    temperature = jnp.asarray(rows.temperature)[:, None]
    # The likeliest token's score is 0, whatever it is divided by. Greedy rows are not looked at.
    scores = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)
    scores = jnp.where(_is_kept(scores, jnp.asarray(rows.top_k), jnp.asarray(rows.top_p)), scores, -jnp.inf)
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(rows.seed, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[-1:]))(keys)
    # The largest of score + Gumbel noise is a draw from the softmax of the scores (Gumbel, 1954).
    return jnp.where(temperature > 0, scores + noise, logits)


def _is_kept(
    scores: jax.Array,  # float32 [T, V]: 0 or less, a row's largest is 0
    top_k: jax.Array,  # int32 [T]
    top_p: jax.Array,  # float32 [T]
) -> jax.Array:  # bool [T, V]
    """Which tokens may be drawn: exactly as many as asked for, so that of equal ones the smallest ids are kept."""
    k, p = top_k[:, None].astype(jnp.float32), top_p[:, None]
    in_k = _likeliest(scores, jnp.ones_like(scores), jnp.where(k > 0, k, jnp.inf))
    mass = jnp.where(in_k, jnp.exp(scores), 0)
    return in_k & _likeliest(scores, mass, jnp.where(p < 1, p * mass.sum(axis=-1, keepdims=True), jnp.inf))


def _likeliest(
    scores: jax.Array,  # float32 [T, V]: 0 or less
    weights: jax.Array,  # float32 [T, V]: 0 or more, alike for equal scores
    limit: jax.Array,  # float32 [T, 1]: more than 0
) -> jax.Array:  # bool [T, V]
    """The tokens before which, by score and then by id, others of less weight than `limit` stand.

    Nothing is sorted: the score of the last of them is found bit by bit, in 31 passes.
    """
    level = jax.lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)  # ordered like the numbers, as none is negative

    def weight_before(bound: jax.Array) -> jax.Array:  # [T, 1] -> [T, 1]
        return jnp.sum(jnp.where(level < bound, weights, 0), axis=-1, keepdims=True)

    def set_bit(i: jax.Array, last: jax.Array) -> jax.Array:
        further = last | (1 << (30 - i))
        return jnp.where(weight_before(further) < limit, further, last)

    last = jax.lax.fori_loop(0, 31, set_bit, jnp.zeros((len(scores), 1), jnp.int32))
    equal = level == last
    rank = jnp.cumsum(equal, axis=-1) - 1  # among the equal ones
    return (level < last) | (equal & (weight_before(last) + rank * weights < limit))
