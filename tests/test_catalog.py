"""The catalog: a job is found by its name, in a module or in a file, or one line says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import Job, JobError, load_job
from autotune.catalog import catalog, content_folder

JOB_FILE = """
from autotune import Job

def nothing(*_):
    raise NotImplementedError

job = Job(name="from-file", model=nothing, batches=nothing, loss=nothing, optimizer=nothing,
          evaluate=nothing, target=1.0, batch_size=8)
other = Job(name="other", model=nothing, batches=nothing, loss=nothing, optimizer=nothing,
            evaluate=nothing, target=1.0, batch_size=8)
not_a_job = 3
__all__ = ["job"]

def make():
    return other

def make_nothing():
    return None

def make_with(argument):
    return other

def broken():
    raise KeyError("two\\nlines")
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_job.py"
    path.write_text(JOB_FILE)
    return path


@pytest.mark.parametrize("name", ["charlm", "charlm_ragged", "digits"])
def test_every_reference_job_can_be_loaded_by_its_name(name):
    assert name in catalog()
    assert load_job(name).name == name


def test_each_file_of_the_jobs_folder_is_a_job_of_its_name():
    for name, path in catalog().items():
        assert path.parent == content_folder("envs")
        assert load_job(name).name == name


def test_a_job_is_loaded_from_a_file_and_its_attribute_is_job_if_left_out(job_file: Path):
    assert load_job(f"{job_file}:job").name == "from-file"
    assert load_job(str(job_file)).name == "from-file"
    assert load_job(f"{job_file}:other").name == "other"


def test_a_function_that_returns_a_job_is_called(job_file: Path):
    assert load_job(f"{job_file}:make").name == "other"


def test_a_file_is_run_once_however_often_its_job_is_loaded(job_file: Path):
    assert load_job(f"{job_file}:job") is load_job(f"{job_file}:job")


def test_a_job_is_loaded_from_an_importable_module(job_file: Path, monkeypatch: pytest.MonkeyPatch):
    job_file.rename(job_file.with_name("importable_job_of_a_user.py"))
    monkeypatch.syspath_prepend(job_file.parent)
    assert load_job("importable_job_of_a_user:other").name == "other"


def test_a_job_is_returned_as_it_is(job_file: Path):
    job = load_job(str(job_file))
    assert isinstance(job, Job)
    assert load_job(job) is job


@pytest.mark.parametrize("reference", ["nothing", "", "charlm2", ":"])
def test_an_unknown_name_is_refused_with_the_known_ones(reference):
    with pytest.raises(
        JobError, match=r"no job has the name .* \(allowed: charlm, charlm_long, charlm_ragged, charlm_zero, digits, "
    ):
        load_job(reference)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("missing", r"'missing' is no autotune.Job \(allowed: a Job, or a function that returns one\)"),
        ("not_a_job", r"'not_a_job' is no autotune.Job"),
        ("make_nothing", r"'make_nothing' is no autotune.Job"),
        ("make_with", r"make_with.*argument"),
        ("broken", r"broken.*KeyError"),
    ],
)
def test_an_attribute_that_gives_no_job_is_refused_in_one_line(job_file: Path, attribute, message):
    with pytest.raises(JobError, match=message) as raised:
        load_job(f"{job_file}:{attribute}")
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_refused_by_its_path():
    with pytest.raises(JobError, match=r"no file nowhere/job.py \(allowed: an existing .py file\)"):
        load_job("nowhere/job.py:job")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def (", "raised SyntaxError"),
        ("raise ValueError('two\\nlines')", "raised ValueError: two lines when it was loaded"),
        ("import a_module_that_nobody_has", "raised ModuleNotFoundError"),
        ("from autotune import Job\njob = Job(name='x')", "raised TypeError"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_in_one_line_each_time(tmp_path: Path, content, message):
    path = tmp_path / "broken.py"
    path.write_text(content)
    for _ in range(2):
        with pytest.raises(JobError, match=message) as raised:
            load_job(str(path))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("reference", ["a_module_that_nobody_has:job", ".relative:job", ":job", "a b:job"])
def test_a_module_that_cannot_be_imported_is_refused_in_one_line(reference):
    with pytest.raises(JobError, match=r"importing .* raised") as raised:
        load_job(reference)
    assert "\n" not in str(raised.value)
