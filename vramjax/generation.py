"""The answer to one prompt: tokens as they come, and afterwards the whole with its timings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from vramjax.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class Token:
    """One new token. `text` is what can be shown now: nothing while a character is incomplete."""

    id: int
    text: str


class Generation:
    """An iterator of tokens, one for each id, that remembers what it has given.

    Invariant: the texts of the tokens, joined, are `text`; their ids are `token_ids`. Work is done as tokens are asked
    for; `finish_reason` is None until the last one has come.
    """

    def __init__(
        self,
        ids: Iterator[int],
        *,
        limit: int,
        max_new_tokens: int,
        num_prompt_tokens: int,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        index: int = 0,
    ) -> None:
        """Wraps `ids`, which ends after `limit` tokens or with one of `stop_ids`; or nothing, if tokens are added."""
        self.index = index  # the prompt's place among those given
        self.token_ids: list[int] = []
        self.text = ""
        self.num_prompt_tokens = num_prompt_tokens
        self.prefill_s: float | None = None  # from when it was first asked for to the first token
        self.finish_reason: FinishReason | None = None
        self._ids, self._limit, self._max_new_tokens, self._stop_ids = ids, limit, max_new_tokens, stop_ids
        self._stream = tokenizer.stream() if tokenizer else None
        self._began_at: float | None = None
        self._first_at = self._last_at = 0.0
        if limit == 0:
            self.finish_reason = "length"

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        self.begin()
        return self.add(next(self._ids))

    def begin(self) -> None:
        """The time of the first token counts from here."""
        if self._began_at is None:
            self._began_at = time.perf_counter()

    def add(self, token_id: int) -> Token:
        """Adds a new token, which has just come."""
        assert self._began_at is not None and self.finish_reason is None
        self._last_at = time.perf_counter()
        if self.prefill_s is None:
            self.prefill_s, self._first_at = self._last_at - self._began_at, self._last_at
        self.token_ids.append(token_id)
        self.finish_reason = self._reason_to_finish()
        text = ""
        if self._stream is not None:
            text = self._stream.push(token_id)
            if self.finish_reason is not None:
                text += self._stream.finish()  # what an incomplete character leaves
        self.text += text
        return Token(id=token_id, text=text)

    @property
    def ms_per_token(self) -> float | None:
        """The mean over all tokens but the first, whose time is the prompt's; None if there is no other."""
        if len(self.token_ids) < 2:
            return None
        return (self._last_at - self._first_at) / (len(self.token_ids) - 1) * 1e3

    def finish(self) -> Self:
        """Runs to the end."""
        for _ in self:
            pass
        return self

    def _reason_to_finish(self) -> FinishReason | None:
        if self.token_ids[-1] in self._stop_ids:
            return "stop"
        if len(self.token_ids) == self._limit:
            return "length" if self._limit == self._max_new_tokens else "context"
        return None
