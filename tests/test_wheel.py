"""Tests of the wheel: one import package that contains the jobs and policies."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_wheel_installs_one_import_package_only(wheel: Path) -> None:
    assert wheel.name.startswith("autotune_rl-")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"autotune"}


def test_wheel_contains_jobs_policies_types_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"autotune/_envs/charlm.py", "autotune/_envs/digits.py", "autotune/py.typed"} <= names
    assert any(name.startswith("autotune/_policies/") for name in names)
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "autotune/report/templates").iterdir()}
    assert templates
    assert templates <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_catalog_job_loads_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import autotune; job = autotune.load_job('digits'); print(autotune.__file__, job.name)"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert str(tmp_path) in answer.stdout
    assert answer.stdout.strip().endswith("digits")
