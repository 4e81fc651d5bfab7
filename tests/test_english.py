"""Tests that docstrings say what something is or does."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("autotune", "tests") for path in (ROOT / folder).rglob("*.py"))
# A docstring that begins with one of these describes a class as an order.
CODED = ("Hold", "Be", "Say")


def test_no_docstring_begins_with_hold_be_or_say() -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{path.relative_to(ROOT)}: {text:.60}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node) or "").partition(" ")[0] in CODED
    ]
    assert found == []
