"""How a function that is called between two layers is compiled. Standard library only; never imports JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

from vramjax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class JitOptions:
    """The options of `Controller.jit`, which says what they mean.

    Invariant: equal options make the same program of a function; whether its calls take parts of uploads along, or all
    of one, makes none another.

    Example: `JitOptions.of("scale", 1, spread=True)` has the static_argnames ("scale",) and the donate_argnums (1,).
    """

    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    spread: bool = dataclasses.field(default=True, compare=False)

    @classmethod
    def of(cls, static_argnames: str | Sequence[str], donate_argnums: int | Sequence[int], *, spread: bool) -> Self:
        """Options as users give them: one name, or one position, may stand for itself, as for `jax.jit`.

        Raises:
          ConfigError: a position is negative.
        """
        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        positions = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        if any(position < 0 for position in positions):
            raise ConfigError(
                f"donate_argnums is {donate_argnums}; expected positions counted from the first argument, 0"
            )
        return cls(static_argnames=names, donate_argnums=positions, spread=spread)
