"""The prompts on which speculation is measured and tested."""

from __future__ import annotations

import collections
import json
from pathlib import Path

from vramjax.prompts import read_prompts

PATH = Path(__file__).resolve().parent.parent / "scripts" / "data" / "prompts-40.jsonl"


def test_forty_prompts_of_all_kinds() -> None:
    prompts = read_prompts(PATH)
    texts = [prompt.content for prompt in prompts]
    assert len(texts) == len({str(text) for text in texts}) == 40
    kinds = collections.Counter(json.loads(line)["kind"] for line in PATH.read_text(encoding="utf-8").splitlines())
    assert kinds == {"chat": 10, "code": 10, "extract": 10, "edit": 6, "translate": 4}
