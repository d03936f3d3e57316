"""Files of prompts as they are read: text and JSON lines, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vramjax.errors import ConfigError
from vramjax.prompts import read_prompts


def contents(path: Path) -> list[Any]:
    found = read_prompts(path)
    assert [prompt.index for prompt in found] == list(range(len(found)))
    return [prompt.content for prompt in found]


def test_text_file(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    # Empty lines are left out; only line ends end a line.
    path.write_bytes("\ufeffone\r\n\n  two \u2028 still two\x0c\x1c\x85\n\t\nthree".encode())
    assert contents(path) == ["one", "  two \u2028 still two\x0c\x1c\x85", "three"]
    assert [prompt.where for prompt in read_prompts(path)] == [f"{path}:1", f"{path}:3", f"{path}:5"]


def test_a_lone_carriage_return_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"one\rstill one\r\ntwo\r")
    assert contents(path) == ["one\rstill one", "two"]


@pytest.mark.parametrize("name", ["p.jsonl", "P.JSONL"])
def test_jsonl_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines: list[dict[str, Any]] = [{"prompt": "a\nb \u2028 c", "id": 7}, {"messages": messages}, {"prompt_ids": [1, 2]}]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    assert contents(path) == ["a\nb \u2028 c", messages, [1, 2]]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["has no prompts"]),
        (b"\n \n", ["has no prompts"]),
        (b'{"prompt": "a"}\n{"prompt": \n', ["p.jsonl:2 is not a JSON object"]),
        (b'{"prompt": "a"}\n\n"a"', ["p.jsonl:3 is not a JSON object", "str"]),
        (b"[1]", ["p.jsonl:1 is not a JSON object", "list"]),
        (b'{"text": "a"}', ["p.jsonl:1", "['text']", "prompt"]),
        (b'{"prompt": 3}', ["p.jsonl:1", "a text"]),
        (b'{"prompt_ids": [1, "2"]}', ["p.jsonl:1"]),
        (b'{"prompt_ids": [1, true]}', ["p.jsonl:1"]),
        (b'{"prompt_ids": 1}', ["p.jsonl:1"]),
        (b'{"messages": []}', ["p.jsonl:1"]),
        (b'{"messages": [{"content": "a"}]}', ["p.jsonl:1"]),
        (b'{"prompt": "\xff"}', ["p.jsonl cannot be read", "utf-8"]),
        (b'{"prompt": "a"}\n' + b"[" * 100_000, ["p.jsonl:2 is not a JSON object", "nested too deeply"]),
        (b'{"prompt": "a", "prompt_ids": [1]}', ["p.jsonl:1 has prompt and prompt_ids", "one of them"]),
    ],
)
def test_bad_prompts_file(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_prompts(path)
    assert all(part in str(error.value) for part in parts), error.value


def test_prompts_file_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("p.json", "p.ndjson"):
        (tmp_path / name).write_text('{"prompt": "Hi"}')
        with pytest.raises(ConfigError, match=rf"ends in \{Path(name).suffix}; expected \.jsonl"):
            read_prompts(tmp_path / name)
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError, match=reason):
            read_prompts(path)
