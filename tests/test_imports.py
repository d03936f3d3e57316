"""Which parts import which: what the layers of the project rest on."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
# Packages of vramjax, each with those that it may not import: data flows from a checkpoint to text, through residency.
FORBIDDEN = {
    "residency": ("vramjax.model", "vramjax.decode", "vramjax.text", "vramjax.checkpoint", "vramjax.quantize"),
    "checkpoint": ("vramjax.decode", "vramjax.residency"),
    "model": ("vramjax.decode", "vramjax.text", "vramjax.checkpoint", "vramjax.residency"),
    "decode": ("vramjax.text", "vramjax.checkpoint", "vramjax.language_model", "vramjax.cli"),
    "text": ("vramjax.decode", "vramjax.residency", "vramjax.checkpoint", "vramjax.model", "jax"),
}


@pytest.mark.parametrize(
    "module",
    [
        *("vramjax", "vramjax.config", "vramjax.errors", "vramjax.flags", "vramjax.prompts", "vramjax.report"),
        *("vramjax.residency", "vramjax.residency.policy", "vramjax.residency.budget", "vramjax.residency.stats"),
        *("vramjax.cli", "vramjax.quantize", "vramjax.text.tokenizer", "vramjax.checkpoint.demo"),
    ],
)
def test_imports_no_jax(module: str) -> None:
    assert not python(f"import sys, {module}; print(*(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')))")


@pytest.mark.parametrize("module", ["policy", "budget", "stats"])
def test_plans_need_only_the_standard_library(module: str) -> None:
    for name in imports(PROJECT / "vramjax" / "residency" / f"{module}.py"):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or name in ("vramjax.errors.ConfigError", "vramjax.errors.BudgetError")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_layers(package: str) -> None:
    files = sorted((PROJECT / "vramjax" / package).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            assert not any(f"{name}.".startswith(f"{bad}.") for bad in FORBIDDEN[package]), f"{file} imports {name}"


def test_kernels_know_nothing_of_models() -> None:
    for file in sorted((PROJECT / "pallas_kernels").rglob("*.py")):
        for name in imports(file):
            top = name.split(".")[0]
            assert top in ("jax", "numpy", "pallas_kernels") or top in sys.stdlib_module_names, f"{file} imports {name}"


def test_every_module_can_be_imported_first() -> None:
    """No import is a circle that works only from one side."""
    modules = [
        ".".join(file.relative_to(PROJECT).with_suffix("").parts)
        for package in ("vramjax", "pallas_kernels")
        for file in sorted((PROJECT / package).rglob("*.py"))
        if file.name not in ("__init__.py", "__main__.py")
    ]
    # One process for all: what an import added is taken away again, JAX and other packages stay.
    code = """
import importlib, sys
for module in sys.argv[1:]:
    for name in [n for n in sys.modules if n.split(".")[0] in ("vramjax", "pallas_kernels")]:
        del sys.modules[name]
    importlib.import_module(module)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def python(code: str, *args: str) -> str:
    """What `code` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imports(file: Path) -> Iterator[str]:
    """Full names of everything that `file` imports, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import; expected absolute ones"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
