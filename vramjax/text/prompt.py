"""From what a user asks to the token ids that decoding starts from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vramjax.errors import TextError
from vramjax.text.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}

_SLACK = 4  # times as many characters as the longest tokens have: tokenizers may drop some, such as spaces


def encode_prompt(
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int] | np.ndarray | Sequence[Message],
    *,
    chat: bool | None = None,
    context: int | None = None,
) -> list[int]:
    """Token ids of a text, of chat messages, or the ids themselves.

    Args:
      tokenizer: None if the model has none; then only ids can be used.
      prompt: a text, messages ({"role": ..., "content": ...}), or token ids (a sequence of whole numbers or
        an array [T] of them).
      chat: whether a text is put into the chat template as a user's message; None: if the model has one.
      context: tokens that there is room for. A text that is far too long for it is refused unread, where to count
        its tokens could take minutes, and a chat template that makes one is stopped; None: any length is encoded.

    Raises:
      TextError: the prompt is none of these, it is far too long, or the model lacks what it needs.
    """
    items = list(prompt) if isinstance(prompt, np.ndarray) and prompt.ndim == 1 else prompt
    if _is_all(items, (int, np.integer)):
        return [int(item) for item in items]  # pyright: ignore[reportArgumentType]
    if not isinstance(prompt, str) and not _is_all(prompt, Mapping):
        raise TextError(f"the prompt is {_describe(prompt)}; expected a text, token ids or chat messages")
    if tokenizer is None:
        raise TextError(
            "this model has no tokenizer.json, only weights; expected the prompt as token ids (--prompt_ids)"
        )
    template = tokenizer.chat_template
    if isinstance(prompt, str):
        if not (template is not None if chat is None else chat):
            return _encode(tokenizer, prompt, context)
        prompt = [{"role": "user", "content": prompt}]
    if template is None:
        raise TextError("this model has no chat template; expected a plain prompt (--nochat, chat=False)")
    most = _most_characters(tokenizer, context)
    text = template.render(prompt, most_characters=most)  # pyright: ignore[reportArgumentType]
    return _encode(tokenizer, text, context)


def _encode(tokenizer: Tokenizer, text: str, context: int | None) -> list[int]:
    if len(text) > (most := _most_characters(tokenizer, context)):
        raise TextError(
            f"the prompt has more characters than {context} tokens can stand for; expected at most {most}: shorten it, "
            "or raise the context"
        )
    return tokenizer.encode(text)


def _most_characters(tokenizer: Tokenizer, context: int | None) -> float:
    return math.inf if context is None else _SLACK * context * tokenizer.longest_token


def _is_all(prompt: object, types: type | tuple[type, ...]) -> bool:
    """Whether `prompt` is a sequence of nothing but `types`; bytes are no sequence of numbers, nor bools numbers."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes, bytearray, memoryview))
        and all(isinstance(item, types) and not isinstance(item, bool) for item in prompt)
    )


def _describe(prompt: object) -> str:
    if isinstance(prompt, np.ndarray):
        return f"an array of {prompt.dtype} {list(prompt.shape)}"
    if isinstance(prompt, (list, tuple)):
        kinds = dict.fromkeys(type(item).__name__ for item in prompt)
        return f"a {type(prompt).__name__} of {' and '.join(kinds)}"
    return f"of type {type(prompt).__name__}"
