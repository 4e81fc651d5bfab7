"""Tests of README.md: its Python blocks run in order, and its commands exist."""

import re
from pathlib import Path

import pytest

from autotune.cli.main import run

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [code for language, code in BLOCKS if language == "python"]
    assert len(blocks) >= 3
    names: dict = {"__name__": "__main__"}
    for code in blocks:
        exec(compile(code, "README.md", "exec"), names)
    assert names["result"]["against_baseline"]
    assert names["found"]["measured"]["peak_bytes"] <= names["found"]["measured"]["memory_budget_bytes"]


def test_commands_in_the_readme_exist(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(
        r"^autotune (\w+)((?: --[\w-]+| [^\s-]\S*)*)", "\n".join(c for _, c in BLOCKS), flags=re.MULTILINE
    )
    assert {verb for verb, _ in shown} >= {"tune", "explain", "compare"}
    for verb, rest in shown:
        assert run([verb, "--help"]) == 0
        known = capsys.readouterr().out
        for option in re.findall(r"--[\w-]+", rest):
            assert option in known


def test_files_named_in_the_readme_exist() -> None:
    root = Path(__file__).parent.parent
    for name in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (root / name).exists(), name
    for name in ("runs/README.md", "autotune/cost_model", ".github"):
        assert name in README
        assert (root / name).exists()
