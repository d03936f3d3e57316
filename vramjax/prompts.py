"""Files of prompts, and files of answers that can be added to after an interruption."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vramjax.checkpoint.json_object import parse_object
from vramjax.errors import ConfigError

if TYPE_CHECKING:
    from vramjax.generation import Generation


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a file: a text, chat messages, or token ids."""

    index: int  # among the prompts of the file
    where: str  # file:line
    content: str | list[int] | list[dict[str, Any]]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a text file, one a line and empty lines left out, or of a .jsonl file.

    Lines end in LF or CRLF. One of a .jsonl file is an object with one of `prompt` (a text), `messages` (chat messages)
    and `prompt_ids`.

    Raises:
      ConfigError: the file cannot be read, has no prompts, or a line is none of these.
    """
    if path.suffix.lower() in (".json", ".ndjson"):  # which nobody means as plain text
        raise ConfigError(
            f"prompts file {path} ends in {path.suffix}; expected .jsonl (an object a line), or a text file"
        )
    try:
        # Neither splitlines, which also cuts at characters (U+2028 and others) that texts and JSON strings may hold,
        # nor universal newlines, which cut at a lone \r.
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [line.removesuffix("\r") for line in file.read().split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"prompts file {path} cannot be read: {reason}") from error
    parse = _parse_json if path.suffix.lower() == ".jsonl" else lambda line, where: line
    numbered = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts file {path} has no prompts; expected one a line")
    return [
        Prompt(index=index, where=where, content=parse(line, where)) for index, (where, line) in enumerate(numbered)
    ]


class AnswerFile:
    """A .jsonl file of answers: each is appended as soon as it is finished, and what is there is not done again.

    Prompts that are answered at the same time are not finished in their order; `sort` brings it about in the end, so
    that the file does not depend on which run has answered what.

    Invariant: every line but perhaps the last is whole. A last line that was cut off by a crash is removed on opening;
    a file that ends in anything else was not written by us, and is refused as it is.
    Each line holds the prompt's `index`, the `prompt` and the `settings` that it was answered with; a file with other
    prompts or other settings is refused, as its answers would be mixed with different ones.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> None:
        """Opens or creates `path`.

        Raises:
          ConfigError: the file cannot be read or written, or is not the answers to these prompts.
        """
        self._path, self._settings = path, dict(settings)
        by_index = {prompt.index: prompt for prompt in prompts}
        self.done: set[int] = set()
        if path.exists() and not path.is_file():
            raise ConfigError(f"--out {path} is no regular file; expected one, which a later run can add to")
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be written: {error.strerror}; choose another --out") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
            self._file.seek(0)
            content = self._file.read()
            whole = content.rfind(b"\n") + 1
            for number, line in enumerate(content[:whole].splitlines(), 1):
                self._take_over(_parse_object(line, f"{path}:{number}"), by_index, f"{path}:{number}")
            self._check_torn(content[whole:], prompts)
            self._file.truncate(whole)
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ConfigError(
                    f"another run is writing --out {path}; expected none: wait until it is done"
                ) from None
            if isinstance(error, OSError):
                raise ConfigError(
                    f"--out {path} cannot be read, or locked against other runs: {error.strerror}; choose another --out"
                ) from error
            raise

    def append(self, prompt: Prompt, generation: Generation) -> None:
        """Writes one line, or nothing if that fails or is interrupted.

        Raises:
          ConfigError: there is no room for it.
        """
        record = {
            **_record_head(prompt),
            "text": generation.text,
            "token_ids": generation.token_ids,
            "finish_reason": generation.finish_reason,
            "settings": self._settings,
        }
        rest = memoryview(_to_json(record) + b"\n")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException as error:
            self._file.truncate(end)
            if isinstance(error, OSError):
                raise ConfigError(
                    f"--out {self._path} cannot be written: {error.strerror}; expected room for all answers, of which "
                    f"it has {len(self.done)}: make room and run this again, which goes on from there"
                ) from error
            raise
        self.done.add(prompt.index)

    def sort(self) -> None:
        """Puts the answers into the order of their prompts, at one stroke; only to be done when nothing will follow."""
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        ordered = sorted(lines, key=lambda line: json.loads(line)["index"])
        if ordered == lines:
            return
        path = self._path.resolve()  # a link stays one
        descriptor, other = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(descriptor, "wb") as file:
                file.writelines(ordered)
                file.flush()
                os.fsync(descriptor)
            shutil.copymode(path, other)
            os.replace(other, path)
        except BaseException:
            os.unlink(other)
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_torn(self, tail: bytes, prompts: Sequence[Prompt]) -> None:
        """Checks that what follows the last whole line is the beginning of an answer, and so may be removed."""
        heads = (_to_json(_record_head(prompt))[:-1] + b", " for prompt in prompts)
        if not any(tail.startswith(head) or head.startswith(tail) for head in heads):
            raise ConfigError(
                f"{self._path} does not end like the answers of an earlier run; expected those, or a new file: choose "
                "another --out"
            )

    def _take_over(self, record: Mapping[str, Any], by_index: Mapping[int, Prompt], where: str) -> None:
        """Counts an answer of an earlier run as done, if it is one to these prompts."""
        index = record.get("index")
        prompt = by_index.get(index) if isinstance(index, int) else None
        if prompt is None or record.get("prompt") != prompt.content:
            raise ConfigError(
                f"{where} does not answer a prompt of this --prompts_file; expected answers of an earlier run like "
                "this one: choose another --out"
            )
        settings = record.get("settings")
        if not isinstance(settings, dict):
            settings = {}
        for name, wanted in self._settings.items():
            if name not in settings or settings[name] != wanted:
                raise ConfigError(
                    f"{where} was answered with {name} {settings.get(name)!r}; expected {wanted!r} as now: choose "
                    "another --out"
                )
        self.done.add(prompt.index)


def _record_head(prompt: Prompt) -> dict[str, Any]:
    """What an answer's record begins with."""
    return {"index": prompt.index, "prompt": prompt.content}


def _to_json(record: Mapping[str, Any]) -> bytes:
    """As UTF-8. A lone surrogate, which JSON has but UTF-8 has not, stays the escape that it came as."""
    return json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace")


def _parse_json(line: str, where: str) -> str | list[int] | list[dict[str, Any]]:
    record = _parse_object(line, where)
    if len(given := [key for key in ("prompt", "prompt_ids", "messages") if key in record]) > 1:
        raise ConfigError(f"{where} has {' and '.join(given)}; expected one of them")
    if isinstance(text := record.get("prompt"), str):
        return text
    ids = record.get("prompt_ids")
    if isinstance(ids, list) and all(type(i) is int for i in ids):
        return ids
    messages = record.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return messages
    raise ConfigError(f"{where} has keys {sorted(record)}; expected prompt (a text), prompt_ids or messages")


def _parse_object(line: str | bytes, where: str) -> dict[str, Any]:
    try:
        return parse_object(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not a JSON object: {error}") from error
