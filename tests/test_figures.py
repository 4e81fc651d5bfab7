"""Tests that README.md and docs/ state the benchmark figures of the recorded files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".github" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_contain_every_benchmark_figure() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    told = "\n".join(" ".join(page.read_text().split()) for page in pages)
    found = loaded("figures").figures()
    assert len(found) > 20
    missing = [line for line in found if " ".join(line.split()) not in told]
    assert not missing


def test_results_page_is_made_from_the_benchmark_files() -> None:
    results = loaded("results")
    assert results.page() == results.PAGE.read_text()


def test_every_benchmark_file_names_its_device() -> None:
    files = sorted((ROOT / "runs" / "benchmarks").glob("*/*.json"))
    assert len(files) >= 10
    for path in files:
        document = json.loads(path.read_text())
        assert document["device"], path
    assert not list((ROOT / "runs" / "benchmarks").glob("*.json"))
