"""Tests that child processes import no library from the working directory, but find jobs there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_train
import tiny_job

TESTS = Path(__file__).parent
# Modules that child processes import, before or after their first line; Python itself imports the last two.
LIBRARIES = (
    "csv",
    "json",
    "numpy",
    "pickle",
    "pydantic",
    "random",
    "runpy",
    "safetensors",
    "scipy",
    "select",
    "sklearn",
    "struct",
    "torch",
    "sitecustomize",
    "usercustomize",
)
ISOLATED = """
import sys
from autotune.engines.isolated_engine import IsolatedEngine

# Where the asker finds its jobs, the child does.
sys.path.append("jobs")
engine = IsolatedEngine("my_jobs:job")
assert engine.run(2).failure is None
engine.close()
"""
RANKS = """
from autotune.engines.rank_processes import run_on_ranks

assert run_on_ranks("gloo_rank", {}, ranks=2)["sum"] == 3
"""
PROFILED = """
from pathlib import Path
from autotune.profiling.profile_cache import profile_elsewhere

profile_elsewhere("jobs/my_jobs.py:job", Path("runs"), lean=True)
assert list(Path("runs/profiles").glob("*-lean.json"))
"""
FOLLOWED = """
import json, time
from pathlib import Path
from autotune.live.decision_log import LOG_NAME
from autotune.live.following_process import follow

folder = Path("runs/attached")
folder.mkdir(parents=True)
assert follow(folder, "mlflow")
(folder / LOG_NAME).write_text(json.dumps({"event": "detached", "step": 1, "reason": "done"}) + "\\n")
sent = folder / "tracking-sent.json"
while not sent.exists() or not json.loads(sent.read_text())["sent"]:
    time.sleep(0.2)
"""
TRAINED = """
from pathlib import Path

from autotune import commands

if __name__ == "__main__":
    commands.train(commands.TrainRequest(recipe=Path("recipe.toml"), processes=1), runs_dir="runs")
"""
SCRATCH = """
from autotune.io.scratch import ScratchFolder

with ScratchFolder() as folder:
    (folder / "file").touch()
assert not folder.exists()
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a folder with a job and a fake of each library that leaves a mark when imported."""
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "my_jobs.py").write_text(Path(tiny_job.__file__).read_text())
    (tmp_path / "recipe.toml").write_text(test_train.RECIPE.replace("seeds = [4, 9]", "seeds = [4]"))
    return tmp_path


@pytest.mark.parametrize(
    "script",
    [
        ISOLATED,
        *(pytest.param(script, marks=pytest.mark.slow) for script in (RANKS, PROFILED, FOLLOWED, TRAINED)),
        SCRATCH,
    ],
    ids=["isolated engine", "ranks", "profile", "follower", "seeds", "scratch folder"],
)
def test_child_processes_import_no_library_from_the_working_directory(script: str, hostile: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    (hostile / "elsewhere").mkdir()
    program = hostile / "elsewhere" / "program.py"
    program.write_text(script)
    done = subprocess.run(
        [sys.executable, str(program)], cwd=hostile, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()
