"""Which parts import which: what the layers of the project rest on."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from own_process import run_python

PROJECT = Path(__file__).parent.parent
# What a package may not import although it stands above it; CONTRIBUTING.md says so.
LOWER = ("vramjax.config", "vramjax.quantize", "vramjax.layout", "vramjax.progress", "pallas_kernels")
FORBIDDEN = {
    "pallas_kernels": ("vramjax",),
    "vramjax/text": ("jax", *LOWER),
    "vramjax/residency": ("vramjax.text", "vramjax.checkpoint", *LOWER),
    "vramjax/model": ("vramjax.text", "vramjax.checkpoint", "vramjax.residency"),
    "vramjax/decode": ("vramjax.text", "vramjax.checkpoint"),
}


def layers() -> list[list[str]]:
    """The lines of CONTRIBUTING.md's list of layers, each as patterns of paths."""
    text = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"stands above it.*?```\n(.*?)```", text, re.DOTALL)
    assert block
    lines = []
    for line in block[1].splitlines():
        path = line.split("  ")[0]
        names = re.search(r"{(.*)}", path)
        paths = [path.replace(names[0], name) for name in names[1].split(",")] if names else [path]
        lines.append([f"{path}*" if path.endswith("/") else path for path in paths])
    return lines


def layer_of(file: Path) -> int:
    path = file.relative_to(PROJECT).as_posix()
    (found,) = (i for i, patterns in enumerate(layers()) if any(fnmatch(path, pattern) for pattern in patterns))
    return found


def file_of(name: str) -> Path | None:
    """The file of a module, or of the module that has `name`; None for what is not of this project."""
    path = PROJECT / name.replace(".", "/")
    for file in (
        path.with_suffix(".py"),
        path / "__init__.py",
        path.parent.with_suffix(".py"),
        path.parent / "__init__.py",
    ):
        if file.is_file() and file.parent != PROJECT and "." in name:
            return file
    return None


@pytest.mark.parametrize(
    "module",
    [
        *("vramjax", "vramjax.config", "vramjax.errors", "vramjax.flags", "vramjax.prompts", "vramjax.report"),
        *(
            "vramjax.residency",
            "vramjax.residency.schedule",
            "vramjax.residency.policy",
            "vramjax.residency.byte_policy",
            "vramjax.residency.budget",
            "vramjax.residency.stats",
        ),
        *("vramjax.cli", "vramjax.quantize", "vramjax.text.tokenizer", "vramjax.checkpoint.demo"),
        *("vramjax.decode.scheduler", "vramjax.decode.drafting", "vramjax.decode.depth"),
    ],
)
def test_imports_no_jax(module: str) -> None:
    code = f"import sys, {module}; print(*(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')))"
    assert run_python(code) == "\n"


@pytest.mark.parametrize("module", ["schedule", "policy", "budget", "stats"])
def test_plans_need_only_the_standard_library(module: str) -> None:
    for name in imports(PROJECT / "vramjax" / "residency" / f"{module}.py"):
        top = name.split(".")[0]
        ours = ("vramjax.errors.", "vramjax.units.", "vramjax.residency.schedule.")
        assert top in sys.stdlib_module_names or name.startswith(ours)


@pytest.mark.parametrize("package", ["pallas_kernels", "vramjax", "scripts"])
def test_a_module_imports_only_what_stands_above_it(package: str) -> None:
    for file, name in imports_of_all(package):
        other = file_of(name)
        assert other is None or layer_of(other) <= layer_of(file), f"{file} imports {name}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_what_a_package_does_not_know(package: str) -> None:
    for file, name in imports_of_all(package):
        assert not any(f"{name}.".startswith(f"{bad}.") for bad in FORBIDDEN[package]), f"{file} imports {name}"


def test_kernels_know_nothing_of_models() -> None:
    # The extra `triton` is no dependency.
    extra = {"backend.py": "jax_triton", "q8_triton.py": "triton"}
    for file, name in imports_of_all("pallas_kernels"):
        top = name.split(".")[0]
        known = ("jax", "numpy", "pallas_kernels", extra.get(file.name))
        assert top in known or top in sys.stdlib_module_names, f"{file} imports {name}"


def test_every_module_can_be_imported_first() -> None:
    """No import is a circle that works only from one side."""
    modules = [
        ".".join(file.relative_to(PROJECT).with_suffix("").parts)
        for package in ("vramjax", "pallas_kernels")
        for file in sorted((PROJECT / package).rglob("*.py"))
        if file.name not in ("__init__.py", "__main__.py")
        and (file.name != "q8_triton.py" or importlib.util.find_spec("triton"))
    ]
    # One process for all: what an import added is taken away again, JAX and other packages stay.
    code = """
import importlib, sys
for module in sys.argv[1:]:
    for name in [n for n in sys.modules if n.split(".")[0] in ("vramjax", "pallas_kernels")]:
        del sys.modules[name]
    importlib.import_module(module)
"""
    run_python(code, *modules)


def imports_of_all(package: str) -> list[tuple[Path, str]]:
    """Each file of a package with each name that it imports."""
    found = [(file, name) for file in sorted((PROJECT / package).rglob("*.py")) for name in imports(file)]
    assert found
    return found


def imports(file: Path) -> Iterator[str]:
    """Full names of everything that `file` imports, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import; expected absolute ones"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
