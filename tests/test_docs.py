"""Tests of the pages in docs/: their code runs, and the files that they name exist."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotune
from autotune.cli.main import run
from autotune.mechanics.known_precisions import PRECISIONS_VARIABLE

ROOT = Path(__file__).parent.parent
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
TINY = f"{Path(__file__).parent / 'tiny_job.py'}:job"
EXAMPLES = {
    *("plain_loop.py", "trainer_lora.py", "lightning_module.py", "own_agent.py", "ranks.py", "transformers_jobs.py"),
}


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", EXTENDING, flags=re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the page's module and entry points as a package."""
    metadata = tmp_path / "packages" / "my_tuning-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata.parent / "my_tuning.py").write_text(block("python"))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-tuning\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        block("toml").replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    )
    monkeypatch.syspath_prepend(metadata.parent)
    yield
    sys.modules.pop("my_tuning", None)


@pytest.mark.usefixtures("installed")
def test_extending_page_adds_a_working_search_rule_policy_and_export_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ["every-second", "fewest", "lean-under-pressure"]
    more = ["--steps", "45", "--seeds", "2", "--runs-dir", str(tmp_path / "runs"), "--json"]
    assert run(["compare", TINY, "--arms", ",".join(arms), *more]) == 0
    found = {arm["name"]: arm for arm in json.loads(capsys.readouterr().out)["arms"]}
    assert list(found) == ["baseline", *arms]
    assert set(found["every-second"]["plan"]["storage"].values()) == {"recompute", "save"}
    assert found["fewest"]["tuning_steps"] > 0
    (tmp_path / "mine.json").write_text(json.dumps(found["every-second"]["plan"]))
    written = ["--to", "shell", "--out", str(tmp_path)]
    assert run(["export", str(tmp_path / "mine.json"), "--job", TINY, *written]) == 0
    assert (tmp_path / "train.sh").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("measuring_precisions")
def test_page_on_your_own_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "your-job.md").read_text()
    names: dict = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(code, "docs/your-job.md", "exec"), names)
    measured = names["found"]["measured"]
    assert measured["peak_bytes"] <= measured["memory_budget_bytes"]
    assert names["document"]["metric"]["target"] is None
    assert names["document"]["against_baseline"][0]["memory_ratio"] < 1


@pytest.mark.slow
@pytest.mark.usefixtures("measuring_precisions")
def test_quick_start_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), flags=re.DOTALL):
        exec(compile(code, "docs/index.md", "exec"), names)
    assert names["tuner"].plan.storage.keys() == names["plan"].storage.keys()


def test_reference_page_has_every_public_name() -> None:
    found = re.findall(r"^::: autotune\.[\w.]*?(\w+)$", (ROOT / "docs" / "python.md").read_text(), flags=re.MULTILINE)
    assert sorted(found) == sorted(set(autotune.__all__) - {"__version__"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [*sorted(EXAMPLES - {"ranks.py"}), "ranks.py ddp", "ranks.py fsdp"],
)
def test_examples_run(line: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name, *rest = line.split()
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if rest else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), *rest]
    # In fp32: 16 bits take minutes where the processor emulates them.
    fast = {"OMP_NUM_THREADS": "1", PRECISIONS_VARIABLE: "fp32"}
    environment = {**os.environ, **fast, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout or "reward" in done.stdout


def test_every_example_is_listed_and_tested() -> None:
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    listed = set(re.findall(r"\]\((\w+\.py)\)", (ROOT / "examples" / "README.md").read_text()))
    assert names == listed == EXAMPLES


def test_files_named_in_the_pages_exist() -> None:
    named = [
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"`((?:autotune|tests)/[\w./]+)`", page.read_text())
    ]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
