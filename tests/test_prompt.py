"""What a prompt may be: a text, token ids, chat messages, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vramjax.errors import TextError
from vramjax.text.prompt import encode_prompt
from vramjax.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "ids", [[5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.uint8), [np.int64(5), 6], range(5, 7)]
)
def test_token_ids(ids: Any) -> None:
    found = encode_prompt(None, ids)
    assert found == [5, 6] and all(type(i) is int for i in found)


def test_no_token_ids() -> None:
    assert encode_prompt(None, []) == encode_prompt(None, np.zeros(0, np.int32)) == []


def test_a_text_is_a_message(packed: Path) -> None:
    tokenizer = Tokenizer.from_dir(packed)
    messages = [{"role": "user", "content": "Hi"}]
    assert (
        encode_prompt(tokenizer, "Hi") == encode_prompt(tokenizer, messages) == encode_prompt(tokenizer, (*messages,))
    )
    assert encode_prompt(tokenizer, "Hi", chat=False) == tokenizer.encode("Hi")


def test_what_is_far_too_long_is_refused_unread(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what only its template makes so; and nothing that might fit."""
    tokenizer = Tokenizer.from_dir(packed)
    longest = "a" * tokenizer.longest_token
    assert encode_prompt(tokenizer, 8 * longest, chat=False, context=2)
    monkeypatch.setattr(tokenizer, "encode", lambda _: pytest.fail("it was encoded"))
    for chat in (False, True):
        with pytest.raises(TextError, match=r"the prompt has more characters than 2 tokens can .* at most \d+: "):
            encode_prompt(tokenizer, 9 * longest, chat=chat, context=2)


def _generator() -> Iterator[int]:
    yield 5


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (b"Hello", "of type bytes"),
        (bytearray(b"Hello"), "of type bytearray"),
        (None, "of type NoneType"),
        (5, "of type int"),
        ({5, 6}, "of type set"),
        ({"role": "user", "content": "Hi"}, "of type dict"),
        (_generator(), "of type generator"),
        ([True, False], "a list of bool"),
        ([5, True], "a list of int and bool"),
        ((1.0, 2), "a tuple of float and int"),
        (["Hi"], "a list of str"),
        ([{"role": "user", "content": "Hi"}, 5], "a list of dict and int"),
        (np.zeros((1, 2), np.int32), "an array of int32 [1, 2]"),
        (np.zeros(2), "an array of float64 [2]"),
        (np.array([True]), "an array of bool [1]"),
    ],
)
def test_anything_else_is_named(packed: Path, prompt: Any, what: str) -> None:
    for tokenizer in (None, Tokenizer.from_dir(packed)):
        with pytest.raises(TextError) as error:
            encode_prompt(tokenizer, prompt)
        assert str(error.value) == f"the prompt is {what}; expected a text, token ids or chat messages"
