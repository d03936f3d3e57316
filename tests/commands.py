"""What tests of the command line share: a tiny model that chats, and running a command in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import random_matrix, tiny_model, write_model
from tiny_tokenizers import byte_level_json
from tokenizers import Tokenizer

from vramjax.cli import main

PROJECT = Path(__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}reply: {% endif %}"
)
STOP_ID = 2  # "</s>"; a second one, "<|eot_id|>", is 3
NUM_LAYERS = 5
MAX_POSITIONS = 4096
IDS = "1,40,50,60,70"  # a prompt


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """What is said of a failure: one line, which is all of stderr."""
        assert self.code == 1, self
        assert self.out == "", self
        lines = self.err.splitlines()
        assert len(lines) == 1, self
        assert lines[0].startswith("error: "), self
        return lines[0].removeprefix("error: ")


Run = Callable[..., Done]


def run_here(capsys: pytest.CaptureFixture[str], *args: object) -> Done:
    """Runs the command in this process, which has compiled the tiny model already."""
    capsys.readouterr()
    try:
        main([str(arg) for arg in args])
        code = 0
    except SystemExit as error:
        assert isinstance(error.code, int), error.code
        code = error.code
    captured = capsys.readouterr()
    return Done(code, captured.out, captured.err)


def start(*args: object, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts `python -m vramjax` as a process of its own."""
    command = [sys.executable, "-u", "-m", "vramjax", *map(str, args)]
    return subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | (env or {})
    )


def finish(process: subprocess.Popen[bytes], timeout: float = 60) -> Done:
    out, err = process.communicate(timeout=timeout)
    return Done(process.returncode, out.decode(), err.decode())


def write_chat_model(directory: Path, *, chat: bool = True, tokenizer: bool = True) -> Path:
    """A Hugging Face directory with random weights whose vocabulary is that of a byte-level tokenizer."""
    vocab_size = Tokenizer.from_str(byte_level_json()).get_vocab_size()
    tiny = tiny_model("smollm2")
    hidden = tiny.config["hidden_size"]
    tiny.config |= {"vocab_size": vocab_size, "eos_token_id": STOP_ID, "max_position_embeddings": MAX_POSITIONS}
    tiny.generation_config |= {"eos_token_id": [STOP_ID, 3]}
    tiny.tensors["model.embed_tokens.weight"] = random_matrix("chat/embed", vocab_size, hidden, 7)
    write_model(directory, tiny)
    if tokenizer:
        settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
        (directory / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        if chat:
            (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
