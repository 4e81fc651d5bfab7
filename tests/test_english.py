"""Docstrings say what something is or does, in plain English."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("autotune", "tests") for path in (ROOT / folder).rglob("*.py"))
# A class is something: it does not hold, be or say it.
CODED = ("Hold", "Be", "Say")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_begins_with_an_order_to_be_something(path: Path) -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented))
    first = [(ast.get_docstring(node) or "").partition(" ")[0] for node in nodes]
    assert not set(first) & set(CODED)
