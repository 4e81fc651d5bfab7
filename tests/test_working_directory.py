"""Tests of the working directory: only jobs import from it, and it never replaces a library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_job

from autotune import load_job

ROOT = Path(__file__).parent.parent
LIBRARIES = ["csv", "json", "pydantic", "deepspeed", "ray", "zeus", "pynvml", "triton", "opt_einsum", "numpy", "optuna"]
# The installed command starts this way, without Python's own entry for the working directory.
PROGRAM = [sys.executable, "-P", "-c", "from autotune.cli.main import main; main()"]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a folder with a package of jobs and a fake of each library that leaves a mark when imported."""
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "jobs.py").write_text(Path(tiny_job.__file__).read_text())
    return tmp_path


def started(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*PROGRAM, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        pytest.param(["doctor"], marks=pytest.mark.slow),
        ["explain", "sqrt", "--job", "pkg.jobs:job", "--json"],
        pytest.param(["tune", "digits", "--method", "random", "--steps", "60"], marks=pytest.mark.slow),
        pytest.param(["tune", "pkg.jobs:job", "--method", "planner", "--steps", "60"], marks=pytest.mark.slow),
    ],
    ids=["help", "doctor", "explain", "catalog", "module"],
)
def test_files_in_the_working_directory_do_not_replace_libraries(arguments: list[str], hostile: Path) -> None:
    done = started(arguments, hostile)
    assert done.returncode == 0, done.stderr
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()


def test_version_option_imports_nothing_from_the_working_directory(hostile: Path) -> None:
    assert "Traceback" not in started(["--version"], hostile).stderr
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()


NEIGHBOURS = """
import early
from autotune.catalog import load_job
import tiny_job


def job():
    import in_factory

    def model():
        import in_model.part
        import importlib_of_a_user

        assert importlib_of_a_user.HERE
        return tiny_job.Network()

    return tiny_job.make(model=model)
"""
LOAD = """
import os, sys
before = list(sys.path)
from autotune import load_job
job = load_job(sys.argv[1])
os.chdir("/")
job.model()
assert sys.path == before
try:
    import early_of_early
except ImportError:
    print("hidden")
"""


def lay(folder: Path) -> None:
    """Write modules that a job imports on loading, in its factory and later, and their imports."""
    for name in ("in_factory", "by_name", "early_of_early"):
        (folder / f"{name}.py").write_text("HERE = True\n")
    by_name = "import importlib\nHERE = importlib.import_module('by_name').HERE\n"
    (folder / "importlib_of_a_user.py").write_text(by_name)
    (folder / "early.py").write_text("import early_of_early\n")
    (folder / "in_model").mkdir()
    (folder / "in_model" / "part.py").write_text("import in_model.other, in_factory\n")
    (folder / "in_model" / "other.py").touch()


@pytest.mark.parametrize(
    ("job", "beside", "reference"),
    [
        pytest.param("my_job.py", ".", "my_job:job", marks=pytest.mark.slow),
        pytest.param("my_job.py", ".", "my_job.py:job", marks=pytest.mark.slow),
        pytest.param("jobs/my_job.py", ".", "jobs.my_job:job", marks=pytest.mark.slow),
        pytest.param("jobs/my_job.py", ".", "jobs/my_job.py:job", marks=pytest.mark.slow),
        pytest.param("jobs/my_job.py", "jobs", "jobs/my_job.py", marks=pytest.mark.slow),
        ("jobs/my.odd job.py", "jobs", "jobs/my.odd job.py"),
    ],
)
def test_only_the_job_can_import_its_neighbour_modules(job: str, beside: str, reference: str, tmp_path: Path) -> None:
    (tmp_path / job).parent.mkdir(exist_ok=True)
    (tmp_path / job).write_text(NEIGHBOURS)
    lay(tmp_path / beside)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    # Code of the program gets modules that are already loaded, and imports the others itself.
    program = LOAD.replace("early_of_early", "not_yet_loaded")
    (tmp_path / beside / "not_yet_loaded.py").touch()
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, reference],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "hidden\n"), done.stderr


def test_catalog_job_has_no_neighbour_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "not_installed.py").touch()
    monkeypatch.chdir(tmp_path)
    # As in the installed command, the working directory itself is not on the path.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    load_job("digits")
    module = next(module for name, module in sys.modules.items() if name.startswith("autotune_job_digits_"))
    with pytest.raises(ImportError):
        exec("import not_installed", vars(module))


@pytest.mark.slow
def test_working_directory_precedes_the_folder_of_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "my_job.py").write_text("import helper\nraise SystemExit(helper.WHERE)\n")
    (tmp_path / "jobs" / "helper.py").write_text("WHERE = 'beside the file'\n")
    said = started(["explain", "sqrt", "--job", "jobs/my_job.py"], tmp_path)
    assert "SystemExit: beside the file" in said.stderr
    (tmp_path / "helper.py").write_text("WHERE = 'working directory'\n")
    said = started(["explain", "sqrt", "--job", "jobs/my_job.py"], tmp_path)
    assert "SystemExit: working directory" in said.stderr
    assert said.returncode == 2
    assert len(said.stderr.strip().splitlines()) == 1


TWO = """
import sys
from autotune import JobError, load_job
for reference in sys.argv[1:]:
    try:
        print(load_job(reference).name)
    except JobError as error:
        print(error)
"""


def test_neighbour_modules_of_the_same_name_are_kept_apart(tmp_path: Path) -> None:
    source = "import tiny_job\nimport parts\njob = tiny_job.make(name=parts.NAME)\n"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_job.py").write_text(source)
        (tmp_path / name / "parts.py").write_text(f"NAME = {name!r}\n")
    (tmp_path / "fourth").mkdir()
    (tmp_path / "fourth" / "my_job.py").write_text("import tiny_job\njob = tiny_job.make(name='fourth')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    references = [f"{name}/my_job.py" for name in ("first", "second", "fourth", "first")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", TWO, *references],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    first, second, fourth, again = done.stdout.splitlines()
    assert (first, fourth, again) == ("first", "fourth", "first"), done.stderr
    assert (
        "second/my_job.py: the module 'parts' is next to it, and another job has its own module of that name" in second
    )


GONE = """
import os, sys
os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
from autotune import JobError, load_job
for reference in sys.argv[1:]:
    try:
        load_job(reference)
    except JobError as error:
        print(error.problem)
"""


def test_missing_working_directory_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(7)")
    done = subprocess.run(
        [sys.executable, "-P", "-c", GONE, "nowhere:job", "nowhere.py", str(tmp_path / "ends.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    module, file, ends = done.stdout.splitlines()
    assert "importing 'nowhere' raised ModuleNotFoundError" in module
    assert (file, ends) == ("no file nowhere.py", "raised SystemExit: 7 when it was loaded")
