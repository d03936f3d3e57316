"""Streamed text is the text of the whole, and never shows half a character."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import LINES, backends
from tokenizers import Tokenizer, decoders, models

from vramjax.text.stream import StreamDecoder

BACKENDS = backends()
TEXTS = [
    *LINES,
    " leading and trailing ",
    "   three spaces",
    "",
    "🙂",
    "👨‍👩‍👧‍👦👨‍👩‍👧‍👦",
    "漢字かな交じり文、한국어",
    "e\u0301 combining, \u200f rtl, nul \x00, tab \t, \ufffd itself",
    "𠮷 is beyond the BMP, 🇫🇷🇯🇵 👩🏾‍🚀",
]


def _streamed(backend: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    stream = StreamDecoder(backend, skip_special_tokens=skip)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_give_the_text_of_the_whole(kind: str, data: st.DataObject, skip: bool):
    backend = BACKENDS[kind]
    num_ids = backend.get_vocab_size() + 3  # the last three have no token
    # The last ids are the pieces that rules look at, so that they meet.
    one = st.integers(0, num_ids - 1) | st.integers(num_ids - 30, num_ids - 1)
    ids = data.draw(st.lists(one, max_size=40))
    assert "".join(_streamed(backend, ids, skip=skip)) == backend.decode(ids, skip_special_tokens=skip)


def _byte_ids(backend: Tokenizer, data: bytes) -> list[int]:
    alphabet = BACKENDS["byte-level"].get_vocab()
    if backend is BACKENDS["byte-level"]:
        byte_of = dict(zip(range(256), _alphabet(), strict=True))
        return [alphabet[byte_of[byte]] for byte in data]
    return [backend.get_vocab()[f"<0x{byte:02X}>"] for byte in data]


def _alphabet() -> list[str]:
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "byte-fallback without prefix"])
@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=3).map(lambda t: t.encode()))))
@example([b"\xf0\x9f\x99\x82"])
@example([b"\xf0\x9f", b"a", b"\x99\x82"])
@example([b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5", b"\xe2\x82"])
@example(["👨‍👩‍👧‍👦".encode(), b"\xf0\x9f\x91"])
def test_any_bytes_give_the_text_of_the_whole(kind: str, chunks: list[bytes]):
    backend = BACKENDS[kind]
    ids = _byte_ids(backend, b"".join(chunks))
    assert "".join(_streamed(backend, ids)) == backend.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "byte-fallback without prefix"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_in_whole_characters(kind: str, text: str):
    backend = BACKENDS[kind]
    ids = backend.encode(text, add_special_tokens=False).ids
    pieces = _streamed(backend, ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == "" or kind != "byte-level"


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_byte_level_text_comes_as_soon_as_it_is_known(text: str):
    backend = BACKENDS["byte-level"]
    stream = StreamDecoder(backend)
    data, shown = b"", ""
    for byte in text.encode():
        shown += stream.push(_byte_ids(backend, bytes([byte]))[0])
        data += bytes([byte])
        assert shown == data.decode("utf-8", "ignore")
    assert stream.finish() == ""


def test_bytes_that_never_become_a_character_come_out_at_the_end():
    for kind in ("byte-level", "byte-fallback"):
        backend = BACKENDS[kind]
        stream = StreamDecoder(backend)
        ids = _byte_ids(backend, b"\xf0\x9f\x99")
        assert [stream.push(i) for i in ids] == ["", "", ""]
        last = stream.finish()
        assert last == backend.decode(ids)
        assert set(last) == {"\ufffd"}
        assert stream.finish() == ""
        with pytest.raises(RuntimeError, match="after finish"):
            stream.push(ids[0])


def test_a_run_of_byte_tokens_waits_for_its_end():
    backend = BACKENDS["byte-fallback"]
    smile = _byte_ids(backend, "🙂".encode())
    space = backend.get_vocab()["▁"]
    assert _streamed(backend, [*smile, space]) == ["", "", "", "", "🙂 ", ""]
    # Why it waits: a byte too many takes the whole run with it.
    broken = [*smile, smile[0]]
    assert _streamed(backend, broken)[-1] == backend.decode(broken) == "\ufffd" * 5


def test_only_the_very_first_space_is_taken_away():
    backend = BACKENDS["byte-fallback"]
    vocab = backend.get_vocab()
    special, space, dot = vocab["<s>"], vocab["▁"], vocab["."]
    assert _streamed(backend, [special, space, special, space, dot, space]) == ["", "", "", " ", ".", " ", ""]
    assert _streamed(backend, [dot, space]) == [".", " ", ""]


def test_special_tokens_are_skipped_inside_a_character():
    backend = BACKENDS["byte-level"]
    first, *rest = _byte_ids(backend, "é".encode())
    eos = backend.get_vocab()["</s>"]
    assert _streamed(backend, [first, eos, *rest, eos]) == ["", "", "é", "", ""]
    assert "".join(_streamed(backend, [first, eos, *rest], skip=False)) == "\ufffd</s>\ufffd"


def test_no_tokens_give_no_text():
    for backend in BACKENDS.values():
        assert StreamDecoder(backend).finish() == ""


def test_trailing_strip_waits_for_the_end():
    backend = Tokenizer(models.BPE(vocab={" ": 0, "a": 1}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 2)])
    for ids in ([1, 0, 0, 0], [1, 0, 1], [1, 1, 1, 0, 1, 0]):
        assert "".join(_streamed(backend, ids)) == backend.decode(ids)


def test_a_replacement_in_the_whole_text_spans_tokens():
    backend = Tokenizer(models.BPE(vocab={"<": 0, "|": 1, ">": 2, "<|": 3, "a": 4}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("<|>", "!")])
    assert _streamed(backend, [4, 0, 1, 2, 3, 4, 3]) == ["a", "", "", "!", "", "<|a", "", "<|"]
    assert _streamed(backend, [0, 0, 1, 2]) == ["", "<", "", "!", ""]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace", "wordpiece"])
def test_cost_per_token_does_not_grow_with_the_text(kind: str):
    backend = BACKENDS[kind]
    num_ids = backend.get_vocab_size()
    stream = StreamDecoder(backend)
    seconds = []
    for block in range(40):
        start = time.perf_counter()
        for i in range(500):
            stream.push((block * 500 + i * 7) % num_ids)
        seconds.append(time.perf_counter() - start)
    # Decoding all again for each token would make the last blocks over ten times as slow as blocks 1 to 3.
    assert min(seconds[-5:]) < 4 * max(seconds[:5])
