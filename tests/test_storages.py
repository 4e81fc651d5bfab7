"""A third storage needs a member, an act and an entry; everything else reads the facts of its member."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from autotune.choices import STORAGES, Storage
from autotune.mechanics.storage_acts import ACTS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
# Files that may name a storage other than ``save``: its facts, its act, plans with some units recomputed, and an export
# whose format has a mode that is called like one.
NAMING = {"choices.py", "mechanics/storage_acts.py", "plan.py", "report/launchers.py"}
# Estimates for many devices, which speak of the modes of other programs; some are called like a storage.
ELSEWHERE = (
    "cost_model/cluster/",
    "bench/bench_published.py",
    "bench/published_",
    "cli/plan_",
    "report/layout_export.py",
)


def test_every_storage_but_save_has_an_act() -> None:
    assert set(ACTS) == set(STORAGES) - {Storage.SAVE}


def test_no_other_file_names_a_storage() -> None:
    others = {storage.name for storage in STORAGES[1:]}
    naming = set()
    for path in (ROOT / "autotune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in others and ast.unparse(node.value) == "Storage"
            if named or (isinstance(node, ast.Constant) and node.value in set(STORAGES[1:])):
                naming.add(path.relative_to(ROOT / "autotune").as_posix())
    assert {name for name in naming if not name.startswith(ELSEWHERE)} <= NAMING


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package, to which the page's storage was added as the page says."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("autotune", "envs", "policies"):
        shutil.copytree(ROOT / name, folder / name)
    blocks = re.findall(r"^ *```py\n(.*?)^ *```", PAGE, flags=re.DOTALL | re.MULTILINE)
    member, act, entry = (textwrap.dedent(block).strip("\n") for block in blocks)
    choices, acts = folder / "autotune" / "choices.py", folder / "autotune" / "mechanics" / "storage_acts.py"
    (acts.parent / "copies_of_activations.py").write_text(act)
    before = "    RECOMPUTE = "
    choices.write_text(choices.read_text().replace(before, f"    {member}\n{before}"))
    before = "    Storage.RECOMPUTE: "
    text = acts.read_text().replace(before, f"    {entry}\n{before}")
    before = "from autotune.mechanics.activations"
    acts.write_text(text.replace(before, f"from autotune.mechanics.copies_of_activations import copied\n{before}"))
    return folder


def in_copy(folder: Path, *command: str) -> str:
    """Return what a command prints that uses the copy of the package."""
    paths = os.pathsep.join([str(folder), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "AUTOTUNE_STORAGES": "copy,recompute"}
    ran = subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_storage_added_as_the_page_says_is_profiled_predicted_solved_and_told(extended: Path) -> None:
    found = json.loads(in_copy(extended, str(ROOT / "tests" / "third_storage.py"), "copy"))
    assert found["storages"] == ["save", "copy", "recompute"]
    assert found["exact"]
    assert min(found["kept"]) > 0
    for predicted, measured in found["peaks"]:
        assert abs(predicted / measured - 1) < 0.02
    assert found["solved"][0] <= found["solved"][1]
    assert all(found["simulated"])
    assert found["bounded"] == ["fp32/recompute", "fp32/save"]
    text = "\n".join(found["told"])
    assert "1 recomputed, 1 copied" in text
    assert "1 of 3 copied, 1 of 3 recomputed, k = 1" in text
    assert re.search(r"copying saves .* for .* ms; recomputing saves .* for", text)
    assert "1 units are copied (blocks.1) and 1 units are recomputed (blocks.2)" in text


@pytest.mark.slow
def test_a_storage_added_as_the_page_says_is_tuned_and_compared(extended: Path) -> None:
    job, runs = f"{ROOT / 'tests' / 'tiny_job.py'}:job", str(extended / "runs")
    plan = {
        "version": 1,
        "accumulation_steps": 1,
        "precision": {},
        "storage": {f"blocks.{number}": "copy" for number in range(3)},
    }
    (extended / "copied.json").write_text(json.dumps(plan))
    arms = ["compare", job, "--arms", "baseline,copied.json,random", "--steps", "45", "--seeds", "2"]
    told = json.loads(in_copy(extended, "-m", "autotune", *arms, "--runs-dir", runs, "--json"))
    copied = next(arm for arm in told["arms"] if arm["name"] == "copied")
    assert set(copied["plan"]["storage"].values()) == {"copy"}
    assert {run["final_metric"] for run in copied["runs"]} == {
        run["final_metric"] for arm in told["arms"] if arm["name"] == "baseline" for run in arm["runs"]
    }
    trials = next(Path(runs).glob("*-compare-*")) / "trials.jsonl"
    tried = [json.loads(line)["plan"]["storage"].values() for line in trials.read_text().splitlines()]
    assert any("copy" in storages for storages in tried)
    in_copy(extended, "-m", "autotune", "report", str(trials.parent))
    assert "3 copied" in (trials.parent / "report.html").read_text()
