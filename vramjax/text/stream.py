"""Ids to text one id at a time, equal to decoding them all at once.

A tokenizer's decoder is a chain of small rules (undo the byte alphabet, glue byte tokens, drop the first space, ...).
Here each rule is a transducer: it takes one piece, gives back what can no longer change, and keeps the rest. So no
text is ever decoded twice, what a rule keeps does not grow with the text, and nothing has to be guessed from how a
window of ids happens to decode. Knows the decoders of `tokenizers`; knows nothing of models.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder

from vramjax.errors import TextError

Spec = Mapping[str, object]  # one decoder as tokenizer.json writes it: {"type": ..., its options}


class StreamDecoder:
    """Turns ids into text as they come; the pieces joined are exactly `Tokenizer.decode` of all ids.

    A piece never ends inside a character: bytes that may still become one are kept back, and `finish` gives them out
    as U+FFFD, as decoding the whole does. (A character is a code point: a family emoji joined by ZWJ comes in parts.)
    With byte-fallback tokenizers a run of byte tokens comes out when the run ends, because one bad byte turns all of
    the run into U+FFFD.

    Example: "é" is the bytes C3 A9. With a byte-level tokenizer `push(id of C3)` is "", `push(id of A9)` is "é"; had
    the text ended after C3, `finish()` would be U+FFFD.
    """

    def __init__(self, backend: Backend, *, skip_special_tokens: bool = True) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values() if skip_special_tokens else ()
        self._skipped = {token.content for token in added if token.special}
        self._stages = _stages(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        self._finished = False

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: "" inside a character, and for special and unknown ids.

        Raises:
          RuntimeError: `finish` was called before.
          TextError: the id is negative or does not fit in 32 bits.
        """
        if self._finished:
            raise RuntimeError("StreamDecoder.push was called after finish; start a new stream for a new text")
        token = self._backend.id_to_token(check_token_id(token_id))
        if token is None or token in self._skipped:
            return ""
        pieces = [token]
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.push(piece)]
        return "".join(pieces)

    def finish(self) -> str:
        """Ends the text and gives out what was kept back; "" when nothing was, or when called again."""
        if self._finished:
            return ""
        self._finished = True
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.push(piece)] + stage.finish()
        return "".join(pieces)


def check_token_id(token_id: int) -> int:
    """`token_id` (also a numpy or JAX scalar) as an int that the library takes, or a TextError."""
    if not 0 <= int(token_id) < 2**32:
        raise TextError(f"token id {token_id} cannot be decoded; expected an id of the vocabulary")
    return int(token_id)


class _Stage(Protocol):
    def push(self, piece: str) -> list[str]: ...
    def finish(self) -> list[str]: ...


class _Spaced:
    """No decoder at all: tokens with a space between them."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, piece: str) -> list[str]:
        out = self._separator + piece
        self._separator = " "
        return [out]

    def finish(self) -> list[str]:
        return []


class _EachToken:
    """A rule for single tokens, which may treat the first one in its own way (the space before the first word)."""

    def __init__(self, decoder: Decoder, *, first_differs: bool) -> None:
        self._decoder = decoder
        self._context = [""] if first_differs else []  # an empty token in front makes a token a later one
        self._is_first = True

    def push(self, piece: str) -> list[str]:
        context = [] if self._is_first else self._context
        self._is_first = False
        return [self._decoder.decode([*context, piece])]

    def finish(self) -> list[str]:
        return []


class _LastDiffers:
    """A rule for single tokens that treats the last one in its own way: each waits for the next."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._held: str | None = None

    def push(self, piece: str) -> list[str]:
        held, self._held = self._held, piece
        return [] if held is None else [self._decoder.decode([held, ""])]

    def finish(self) -> list[str]:
        return [] if self._held is None else [self._decoder.decode([self._held])]


class _ByteLevel:
    """Tokens written in the printable byte alphabet; the bytes of all tokens are one UTF-8 text."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> list[str]:
        try:
            data = bytes([_BYTE_OF[char] for char in piece])
        except KeyError:  # an added token that is plain text
            data = piece.encode("utf-8", "surrogatepass")
        return [self._utf8.decode(data)]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _ByteFallback:
    """Tokens such as <0xE2>: each run of them is a UTF-8 text, or one U+FFFD per byte if it is not valid."""

    _BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> list[str]:
        byte = self._BYTE_TOKEN.fullmatch(piece)
        if byte is None:
            return [*self.finish(), piece]
        self._run.append(int(byte[1], 16))
        return []

    def finish(self) -> list[str]:
        run, self._run = self._run, bytearray()
        if not run:
            return []
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _StripText:
    """At most `start` leading and `stop` trailing characters `content` taken off the whole text."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._held = ""

    def push(self, piece: str) -> list[str]:
        while self._start and piece.startswith(self._content):
            piece = piece[1:]
            self._start -= 1
        if piece:
            self._start = 0
        text = self._held + piece
        cut = max(0, len(text) - self._stop)
        self._held = text[cut:]
        return [text[:cut]]

    def finish(self) -> list[str]:
        return [self._held.rstrip(self._content)]


class _ReplaceText:
    """A literal replaced in the whole text; the end waits while it may be the beginning of the literal."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""

    def push(self, piece: str) -> list[str]:
        *done, rest = (self._held + piece).split(self._pattern)
        keep = min(len(rest), len(self._pattern) - 1)
        while not self._pattern.startswith(rest[len(rest) - keep :]):
            keep -= 1
        cut = len(rest) - keep
        self._held = rest[cut:]
        return [*(part + self._content for part in done), rest[:cut]]

    def finish(self) -> list[str]:
        return [self._held]


class _AtTheEnd:
    """Any rule that may look at all of the text: everything waits for the end. No language model needs it."""

    def __init__(self, decoder: Decoder, *, fused: bool) -> None:
        self._decoder, self._fused = decoder, fused
        self._held: list[str] = []

    def push(self, piece: str) -> list[str]:
        self._held.append(piece)
        return []

    def finish(self) -> list[str]:
        return [self._decoder.decode(["".join(self._held)] if self._fused else self._held)]


def _stages(spec: Spec | None) -> list[_Stage]:
    """The transducers of a decoder (None: a tokenizer without one)."""
    if spec is None:
        return [_Spaced()]
    specs = _flatten(spec)
    stages: list[_Stage] = []
    fused = False  # whether the pieces are parts of one text (True) or tokens (False)
    for idx, one in enumerate(specs):
        stage = _text_stage(one) if fused else _token_stage(one)
        if stage is None and one["type"] != "Fuse":
            rest = _build({"type": "Sequence", "decoders": specs[idx:]})
            return [*stages, _AtTheEnd(rest, fused=fused)]
        if stage is not None:
            stages.append(stage)
        fused = fused or one["type"] in ("Fuse", "ByteLevel")
    return stages


def _token_stage(spec: Spec) -> _Stage | None:
    match spec["type"]:
        case "Metaspace" | "WordPiece":
            return _EachToken(_build(spec), first_differs=True)
        case "Replace" | "Strip":
            return _EachToken(_build(spec), first_differs=False)
        case "BPEDecoder":
            return _LastDiffers(_build(spec))
        case "ByteLevel":
            return _ByteLevel()
        case "ByteFallback":
            return _ByteFallback()
    return None


def _text_stage(spec: Spec) -> _Stage | None:
    match spec:
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": int(stop)}:
            return _StripText(content, start, stop)
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return _ReplaceText(pattern, content)
    return None


def _flatten(spec: Spec) -> list[Spec]:
    if spec["type"] != "Sequence":
        return [spec]
    decoders = spec["decoders"]
    assert isinstance(decoders, Sequence)
    return [one for inner in decoders for one in _flatten(inner)]


def _build(spec: Spec) -> Decoder:
    """The library's own decoder for `spec`; it only takes one as part of a tokenizer."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    decoder = Backend.from_str(json.dumps({"added_tokens": [], "model": model, "decoder": spec})).decoder
    assert decoder is not None
    return decoder


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte 0..255 in byte-level tokens: itself where printable, else 256 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_OF = {char: byte for byte, char in enumerate(_byte_alphabet())}
