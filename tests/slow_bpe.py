"""Byte-level and SentencePiece-style BPE the slow and obvious way, without `tokenizers` or regular expressions.

What the tests of rebuilt tokenizers compare with, and the texts that they compare on.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Mapping
from itertools import pairwise

from tiny_tokenizers import LINES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACES = {*"\t\n\v\f\r\x85 \xa0\u1680\u2028\u2029\u202f\u205f\u3000", *map(chr, range(0x2000, 0x200B))}


def is_letter(char: str) -> bool:
    return unicodedata.category(char)[0] == "L"


def is_number(char: str) -> bool:
    return unicodedata.category(char)[0] == "N"


def is_other(char: str) -> bool:
    return char not in SPACES and not is_letter(char) and not is_number(char)


def run_end(text: str, start: int, belongs: Callable[[str], bool], limit: int | None = None) -> int:
    end = start
    while end < len(text) and belongs(text[end]) and (limit is None or end - start < limit):
        end += 1
    return end


def contraction_end(text: str, start: int) -> int:
    for suffix in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        if text.startswith(suffix, start):
            return start + len(suffix)
    return start


def spaces_end(text: str, start: int) -> int:
    """Spaces up to the last one, which goes with the word that follows."""
    end = run_end(text, start, SPACES.__contains__)
    return end - 1 if end < len(text) and end - start > 1 else end


def gpt2_words(text: str) -> list[str]:
    words, start = [], 0
    while start < len(text):
        end = contraction_end(text, start)
        if end == start:
            first = start + (text[start] == " ")
            for kind in (is_letter, is_number, is_other):
                if (end := run_end(text, first, kind)) > first:
                    break
            else:
                end = spaces_end(text, start)
        words.append(text[start:end])
        start = end
    return words


def smollm_words(text: str) -> list[str]:
    words, start = [], 0
    for idx, char in enumerate(text):
        if is_number(char):
            words += [*gpt2_words(text[start:idx]), char]
            start = idx + 1
    return words + gpt2_words(text[start:])


def cl100k_words(text: str, digits: int) -> list[str]:
    """Llama 3 (three digits at a time) and Qwen2 (one)."""
    words, start = [], 0
    while start < len(text):
        char = text[start]
        end = contraction_end(text.lower(), start)
        if end == start:
            after = start + (not is_letter(char) and not is_number(char) and char not in "\r\n")
            end = run_end(text, after, is_letter)
            end = start if end == after else end
        if end == start:
            end = run_end(text, start, is_number, digits)
        if end == start:
            after = start + (char == " ")
            end = run_end(text, after, is_other)
            end = run_end(text, end, "\r\n".__contains__) if end > after else start
        if end == start:
            spaces = text[start : run_end(text, start, SPACES.__contains__)]
            newline = max(spaces.rfind("\n"), spaces.rfind("\r"))
            end = start + newline + 1 if newline >= 0 else spaces_end(text, start)
        words.append(text[start:end])
        start = end
    return words


def byte_characters() -> list[str]:
    shown = [byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


class Oracle:
    """Byte-level BPE the slow way: always the best-ranked pair, leftmost first."""

    def __init__(self, metadata: Mapping[str, object], words: Callable[[str], list[str]], *, whole: bool = False):
        tokens, merges, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges", "token_type"))
        assert isinstance(tokens, list) and isinstance(merges, list) and isinstance(types, list)
        self.ids = {token: idx for idx, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.added = [t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
        self.added.sort(key=len, reverse=True)
        self.characters = byte_characters()
        self.words, self.whole = words, whole

    def encode(self, text: str) -> list[int]:
        ids, start, idx = [], 0, 0
        while idx < len(text):
            token = next((t for t in self.added if text.startswith(t, idx)), None)
            if token is None:
                idx += 1
                continue
            ids += [*self.encode_plain(text[start:idx]), self.ids[token]]
            start = idx = idx + len(token)
        return ids + self.encode_plain(text[start:])

    def encode_plain(self, text: str) -> list[int]:
        return [i for word in self.words(text) for i in self.encode_word(word)]

    def encode_word(self, word: str) -> list[int]:
        parts = [self.characters[byte] for byte in word.encode()]
        if self.whole and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        parts = [part for part in parts if part in self.ids]
        while True:
            pairs = [(self.ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in self.ranks]
            if not pairs:
                return [self.ids[part] for part in parts]
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


def many_texts(count: int, special: list[str]) -> list[str]:
    """Texts of all that goes wrong: scripts, digits, runs of whitespace, code, emoji, contractions, special tokens."""
    rng = random.Random(20250101)
    # Characters that Unicode has had for long: newer ones depend on the age of each library's tables.
    old = unicodedata.ucd_3_2_0
    stable = [
        char
        for char in map(chr, range(1, 0x2FA1E))
        if old.category(char) == unicodedata.category(char) and old.category(char) not in ("Cn", "Cs", "Co")
    ]
    pieces = [
        *" \n\t\r\x0b\x0c\xa0\u2003\u3000\x85\x1c\u200b\u200d\ufeff",
        *["  ", "    ", "\n\n", "\r\n", "\n\n\n", " \n ", "\t\t", "        ", "\n    "],
        *["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'", "''", "\u2019s"],
        *["don't", "WE'VE", "I'm", "y'all'd've", "it's'"],
        *["0", "7", "42", "007", "1999", "3.14", "1,000,000", "12345678", "½", "²", "Ⅷ", "٣", "一", "2nd", "x86"],
        *["the", " the", "The", " and", "Once upon a time", "Hello, world!", "straße", "naïve", "İstanbul", "A"],
        *["日本語", "中文", "한국어", "Привет", "Ελληνικά", "العربية", "हिन्दी", "ไทย"],
        *["e\u0301", "n\u0303o", "\u1100\u1161", "\U0001d54f", "\ufffd", "\x00", "\x04", "\x7f", "\xad"],
        *["🙂", "👨‍👩‍👧‍👦", "🇫🇷", "👋🏽", "❤️", "🏴‍☠️"],
        *["def f(x):\n    return x**2\n", "for(i=0;i<n;i++){", "<html>&amp;</html>", "a->b", "://", "...", "!?", "—"],
        *["_", "__init__", "a_b", "CamelCase", "SELECT * FROM t;", "\\n", "$100", "50%", "C++", "foo@bar.com", "#!"],
        *special,
        *(token[:-1] for token in special),
        *LINES,
    ]  # fmt: skip
    texts = ["", *pieces]
    while len(texts) < count:
        parts = [
            rng.choice(pieces) if rng.random() < 0.8 else "".join(rng.choices(stable, k=rng.randint(1, 4)))
            for _ in range(rng.randint(1, 8))
        ]
        texts.append("".join(parts))
    return texts


def llama_oracle(metadata: Mapping[str, object], text: str, *, prefix: str = "▁") -> list[int]:
    """What SentencePiece does: join the two neighbours that make the best-scored token, leftmost first."""
    tokens, scores, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    assert isinstance(tokens, list) and isinstance(scores, list) and isinstance(types, list)
    ids = {token: idx for idx, token in enumerate(tokens) if types[idx] == NORMAL}
    parts = list((prefix if text else "") + text.replace(" ", "▁"))
    while True:
        joined = [(ids[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joined:
            break
        _, i = min((-scores[idx], i) for idx, i in joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    result = []
    for part in parts:
        result += [ids[part]] if part in ids else [tokens.index(f"<0x{byte:02X}>") for byte in part.encode()]
    return result
