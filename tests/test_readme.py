"""What the README shows is true: its Python runs, and its numbers are those of the committed result files."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
README = (PROJECT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
RESULTS = sorted((PROJECT / "benchmarks" / "results").glob("*/*.json"))


@pytest.mark.parametrize(
    ("snippet", "printed"),
    zip(
        SNIPPETS,
        [
            "The capital of France is Paris.28\n1 The capital of France is Paris.\n"
            "0 The answer to this classic math problem is 4.\n20 tokens of 2 answers",
            "6 789504",
            "(4, 256) 9",
        ],
        strict=True,
    ),
)
def test_python_of_the_readme(snippet: str, printed: str, capsys: pytest.CaptureFixture[str], smollm2):
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == printed


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_tables_of_the_readme(path: Path):
    table = runpy.run_path(str(PROJECT / "scripts" / "results_table.py"))["table"]
    assert table(json.loads(path.read_text(encoding="utf-8"))) in README


def test_the_jax_that_is_supported():
    """The oldest and the newest are the same wherever JAX is asked for; with an extra it may be less new."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    ranges = [
        re.fullmatch(r"jax(?:\[\w+\])?>=([\d.]+),<0\.(\d+)", each) for each in asked if re.match(r"jax\b(?!-)", each)
    ]
    assert len(ranges) == 4 and all(ranges)
    oldest, ends = zip(*(found.groups() for found in ranges if found), strict=True)
    assert len(set(oldest)) == 1
    assert ends[0] == max(ends, key=int) and f"| JAX | {oldest[0]} to 0.{int(ends[0]) - 1}, " in README


def test_there_are_results():
    assert RESULTS
