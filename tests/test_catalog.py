"""Tests of the catalog: a job is found by name, module or file, or an error of one line says why not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import InputError, Job, JobError, load_job
from autotune.catalog import catalog, content_folder, is_catalog_reference
from autotune.launching import plain, split

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
def test_every_reference_job_can_be_loaded_by_name(name):
    assert name in catalog()
    assert load_job(name).name == name


def test_each_file_of_the_jobs_folder_defines_a_job_of_its_name():
    for name, path in catalog().items():
        assert path.parent == content_folder("envs")
        assert load_job(name).name == name


def test_job_file_without_an_attribute_defaults_to_job(job_file: Path):
    assert load_job(f"{job_file}:job").name == "from-file"
    assert load_job(str(job_file)).name == "from-file"
    assert load_job(f"{job_file}:other").name == "other"


def test_function_that_returns_a_job_is_called(job_file: Path):
    assert load_job(f"{job_file}:make").name == "other"


def test_job_file_is_executed_once_however_often_it_is_loaded(job_file: Path):
    assert load_job(f"{job_file}:job") is load_job(f"{job_file}:job")


def test_job_is_loaded_from_an_importable_module(job_file: Path, monkeypatch: pytest.MonkeyPatch):
    job_file.rename(job_file.with_name("importable_job_of_a_user.py"))
    monkeypatch.syspath_prepend(job_file.parent)
    assert load_job("importable_job_of_a_user:other").name == "other"


def test_job_object_is_returned_unchanged(job_file: Path):
    job = load_job(str(job_file))
    assert isinstance(job, Job)
    assert load_job(job) is job


@pytest.mark.parametrize("reference", ["nothing", "", "charlm2", ":"])
def test_unknown_name_is_rejected_with_the_known_ones(reference):
    with pytest.raises(
        JobError, match=r"no job has the name .* \(allowed: charlm, charlm_long, charlm_ragged, charlm_zero, digits, "
    ):
        load_job(reference)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("missing", r"'missing' does not exist \(allowed: job, other\)"),
        ("not_a_job", r"'not_a_job' is not an autotune.Job"),
        ("make_nothing", r"'make_nothing' is not an autotune.Job"),
        ("make_with", r"make_with.*argument"),
        ("broken", r"broken.*KeyError"),
    ],
)
def test_attribute_that_is_not_a_job_is_rejected_in_one_line(job_file: Path, attribute, message):
    with pytest.raises(JobError, match=message) as raised:
        load_job(f"{job_file}:{attribute}")
    assert "\n" not in str(raised.value)


def test_missing_file_is_rejected_by_its_path():
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
def test_file_that_fails_to_execute_is_rejected_in_one_line_each_time(tmp_path: Path, content, message):
    path = tmp_path / "broken.py"
    path.write_text(content)
    for _ in range(2):
        with pytest.raises(JobError, match=message) as raised:
            load_job(str(path))
        assert "\n" not in str(raised.value)


def test_module_that_cannot_be_imported_is_rejected_in_one_line():
    with pytest.raises(JobError, match=r"importing 'a_module_that_nobody_has' raised ModuleNotFound") as raised:
        load_job("a_module_that_nobody_has:job")
    assert "\n" not in str(raised.value)


# -------------------------------------------------------------------------------------------- invalid jobs and exits


HOSTILE = [
    ".relative:job",
    "..x:job",
    "os.:job",
    "os..path:job",
    ":job",
    "a b:job",
    "a/b:job",
    "a-b:job",
    "os:abort\0",
    "\0:job",
    "x\0.py",
    "\ud800:job",
    "\ud800.py",
    "job\ud800.py:job",
    "a" * 5000 + ".py",
    "a" * 3000 + ".py",
    "a." * 2000 + "b:job",
    "/" * 4000 + "x.py",
    "charlm" + "+a" * 2000 + "/",
    "charlm:",
    "charlm:main",
    "charlm_zero:main",
    "charlm_zero:load_job",
    "charlm:Job",
    "charlm:replace",
    "charlm:__class__",
    "charlm:__dir__",
    "charlm+lion\n",
    "/dev/zero",
    "/dev/null:job",
    "\x1b[31mred:job",
]
PIECES = st.sampled_from(
    ["charlm", "string", ".", "..", ":", "/", "+", "=", "lion", "Formatter", ".py", "~", " ", "*", "a" * 99]
)
REFERENCES = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(codec=None), max_size=30),
    st.lists(PIECES | st.text(st.characters(codec=None), max_size=4), max_size=8).map("".join),
)


@pytest.mark.timeout(60)
@given(reference=REFERENCES)
def test_every_reference_gives_a_job_or_a_one_line_error(reference):
    sys.modules.pop("os.", None)
    try:
        assert isinstance(load_job(reference), Job)
    except InputError as error:
        line = str(error)
        assert "\n" not in line
        assert len(line) < 2000
        line.replace("\ud800", "").encode(errors="backslashreplace")


@pytest.mark.parametrize("reference", [name for name in HOSTILE if name != "charlm:"])
def test_reference_to_no_job_is_rejected_in_a_printable_line(reference):
    with pytest.raises(JobError) as raised:
        load_job(reference)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


@pytest.mark.timeout(60)
def test_suffix_of_a_very_long_name_is_found_in_one_pass():
    name = "charlm" + "+a" * 60_000 + "/"
    assert plain(name) == name
    assert plain(name + "+lion") == name
    assert plain(name + "+lion=x\n+y" * 1000) == name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to(path), "no file"),
        (lambda path: path.symlink_to("nowhere"), "no file"),
    ],
    ids=["pipe", "folder", "device", "loop", "nowhere"],
)
def test_job_file_that_is_not_a_regular_file_is_rejected(tmp_path: Path, make, message):
    make(tmp_path / "x.py")
    with pytest.raises(JobError, match=message):
        load_job(str(tmp_path / "x.py"))


ENDS = [
    ("import sys; sys.exit()", "SystemExit"),
    ("import sys; sys.exit(0)", "SystemExit: 0"),
    ("raise SystemExit('over')", "SystemExit: over"),
    ("raise GeneratorExit", "GeneratorExit"),
    ("class Mine(BaseException): pass\n{indent}raise Mine('it is')", "Mine: it is"),
    ("class Odd(Exception):\n{indent}    def __str__(self): raise ValueError\n{indent}raise Odd", "Odd"),
]


@pytest.mark.parametrize(("source", "message"), ENDS)
@pytest.mark.parametrize("at", ["import", "factory", "attribute"])
def test_job_that_exits_the_program_is_rejected_in_one_line_each_time(tmp_path: Path, source, message, at):
    path = tmp_path / f"ends_{at}.py"
    body = source.replace("{indent}", "" if at == "import" else "    ")
    path.write_text(
        {"import": "", "factory": "def job():\n    ", "attribute": "def __getattr__(name):\n    "}[at] + body
    )
    for _ in range(2):
        with pytest.raises(JobError, match=message) as raised:
            load_job(str(path))
        assert str(raised.value).startswith(str(path)[:100])
        assert "\n" not in str(raised.value)


def test_keyboard_interrupt_while_loading_a_job_is_not_swallowed(tmp_path: Path):
    path = tmp_path / "interrupted.py"
    path.write_text("raise KeyboardInterrupt")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            load_job(str(path))


# --------------------------------------------------------------------------------------------- names allowed in data


@pytest.mark.parametrize(
    "reference",
    ["charlm", "charlm:adaptive", "digits+compile", "charlm+lion=3e-4+compile", "charlm+nothing", "charlm:x"],
)
def test_catalog_name_with_any_suffix_is_a_catalog_reference(reference):
    assert is_catalog_reference(reference)


@pytest.mark.parametrize(
    "reference",
    [
        *(name for name in HOSTILE if not name.startswith("charlm")),
        *("os:abort", "charlm.py", "./charlm", "charlm/../x.py:job", "envs/charlm.py", "charlm:", "charlm: job"),
        *("charlm:a.b", "charlm:os:abort", "+charlm", "", "charlm+", "charlm+/x", "Charlm", " charlm", "charlm\n"),
        *(None, 3, ["charlm"], {"charlm": 1}, b"charlm", True),
    ],
)
def test_other_references_are_not_catalog_references(reference):
    assert not is_catalog_reference(reference)


@given(reference=REFERENCES)
def test_catalog_name_loads_only_a_file_of_the_catalog(reference):
    if is_catalog_reference(reference):
        try:
            assert split(reference, where="job")[0].partition(":")[0] in catalog()
        except InputError:
            return


def test_only_attributes_that_are_jobs_are_called_in_catalog_files(monkeypatch: pytest.MonkeyPatch):
    load_job("charlm_zero")
    (module,) = (module for name, module in sys.modules.items() if name.startswith("autotune_job_charlm_zero_"))
    called = []
    monkeypatch.setattr(module, "main", lambda: called.append("main"))
    with pytest.raises(JobError, match=r"charlm_zero:main: 'main' is not an autotune.Job"):
        load_job("charlm_zero:main")
    assert not called
    for name in catalog():
        assert isinstance(load_job(name), Job)
    assert load_job("resnet50_cifar10:random").name == "resnet50_random"
