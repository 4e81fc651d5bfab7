"""Tests of README.md and the pages in docs/: their Python blocks run in order, and their commands and links exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.cli.main import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
# Pages that use each other's names, in the order in which they are read.
GUIDE = ("tune", "live", "gymnasium", "compare")
# Made of the docstrings, which only the built site shows.
BUILT = ("python.md",)


def blocks(text: str, language: str = "") -> list[str]:
    found = re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)
    return [code for given, code in found if given == language]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def script() -> dict[str, Any]:
    """Return what the README takes from a training script of the reader's own."""
    torch.manual_seed(0)
    inputs = torch.randn(1024, 32)
    model = nn.Sequential(*(Residual() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "model": model,
        "loader": DataLoader(TensorDataset(inputs, inputs.cumsum(1).tanh()), batch_size=256, shuffle=True),
        "loss": nn.MSELoss(),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=200),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("measuring_precisions")
def test_the_blocks_of_the_readme_run_in_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__", **script()}
    found = blocks(README, "python")
    assert len(found) == 3
    for code in found:
        exec(compile(code, "README.md", "exec"), names)
    assert names["found"]["measured"]["peak_bytes"] <= names["found"]["measured"]["memory_budget_bytes"]
    assert [entry["arm"] for entry in names["result"]["against_baseline"]] == ["sqrt", "plan"]


@pytest.mark.slow
@pytest.mark.usefixtures("measuring_precisions")
def test_the_blocks_of_the_guide_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for page in GUIDE:
        for code in blocks(PAGES[ROOT / "docs" / f"{page}.md"], "python"):
            exec(compile(code, page, "exec"), names)
    assert names["result"]["against_baseline"]
    assert names["found"]["measured"]["peak_bytes"] <= names["found"]["measured"]["memory_budget_bytes"]


def test_commands_in_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(code for page in PAGES.values() for code in blocks(page))
    shown = re.findall(r"^autotune (\w+)((?: --[\w-]+| [^\s-]\S*)*)", text, flags=re.MULTILINE)
    assert {verb for verb, _ in shown} >= {"tune", "explain", "compare"}
    known = {}
    for verb in {verb for verb, _ in shown}:
        assert run([verb, "--help"]) == 0
        known[verb] = capsys.readouterr().out
    for verb, rest in shown:
        for option in re.findall(r"--[\w-]+", rest):
            assert option in known[verb]


def test_links_and_files_in_the_pages_exist() -> None:
    for page, text in PAGES.items():
        for name in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
            assert (page.parent / name).exists(), (page, name)
    for name in ("runs/README.md", "autotune/cost_model", ".github"):
        assert name in README
        assert (ROOT / name).exists()


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert README.count("\n") <= 150
    assert [
        path.name
        for path in PAGES
        if path.parent.name == "docs" and path.name not in BUILT and f"(docs/{path.name})" not in README
    ] == []
