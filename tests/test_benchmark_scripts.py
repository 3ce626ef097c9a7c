"""Scripts in ``tests/benchmarks``, which pytest does not run: what they import from this repository exists."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    path.relative_to(ROOT) for folder in ("tests/benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)


def imported(source: str) -> list[tuple[str, str]]:
    """Module and name of each import of a name from this repository."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and not node.level]
    of_ours = [node for node in found if str(node.module).partition(".")[0] in ("fxqat", "tests")]
    return [(str(node.module), alias.name) for node in of_ours for alias in node.names]


def is_there(module: str, name: str) -> bool:
    """Whether a module has a name, or is a package with a module of this name."""
    owner = importlib.import_module(module)
    inner = [Path(folder) / name for folder in getattr(owner, "__path__", ())]
    return hasattr(owner, name) or any(path.with_suffix(".py").exists() or path.is_dir() for path in inner)


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_what_a_script_imports_exists(path):
    names = imported((ROOT / path).read_text(encoding="utf-8"))
    assert [(module, name) for module, name in names if not is_there(module, name)] == []


def test_a_name_that_does_not_exist_is_found():
    assert imported("from fxqat.onnx.verify import gone, verify\nimport os\nfrom os import path") == [
        ("fxqat.onnx.verify", "gone"),
        ("fxqat.onnx.verify", "verify"),
    ]
    assert is_there("fxqat.onnx", "verify")
    assert not is_there("fxqat.onnx.verify", "gone")
