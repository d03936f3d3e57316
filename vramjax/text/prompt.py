"""From what a user asks to the token ids that decoding starts from."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from vramjax.errors import TextError
from vramjax.text.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


def encode_prompt(
    tokenizer: Tokenizer | None, prompt: str | Sequence[int] | Sequence[Message], *, chat: bool | None = None
) -> list[int]:
    """Token ids of a text, of chat messages, or the ids themselves.

    Args:
      tokenizer: None if the model has none; then only ids can be used.
      prompt: a text, messages ({"role": ..., "content": ...}), or token ids.
      chat: whether a text is put into the chat template as a user's message; None: if the model has one.

    Raises:
      TextError: the prompt is none of these, or the model lacks what it needs.
    """
    if not isinstance(prompt, str) and not any(isinstance(item, Mapping) for item in prompt):
        try:
            return [operator.index(item) for item in prompt]  # pyright: ignore[reportArgumentType]
        except TypeError:
            raise TextError("the prompt is neither a text, nor a list of token ids, nor chat messages") from None
    if tokenizer is None:
        raise TextError(
            "this model has no tokenizer.json, only weights; expected the prompt as token ids (--prompt_ids)"
        )
    template = tokenizer.chat_template
    if isinstance(prompt, str):
        if not (template is not None if chat is None else chat):
            return tokenizer.encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    if template is None:
        raise TextError("this model has no chat template; expected a plain prompt (--nochat, chat=False)")
    return tokenizer.encode(template.render(prompt))  # pyright: ignore[reportArgumentType]
