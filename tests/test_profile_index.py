"""Tests of the index of cached profiles: found without loading the job, and never after a change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.catalog import load_job
from autotune.cli.main import run
from autotune.profiling import profile_index
from autotune.profiling.profile_index import indexed_profile, remember
from autotune.profiling.profiler import ProfilerOptions

TINY = Path(__file__).parent / "tiny_job.py"


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return a job's reference and the folder of its cached profile."""
    from autotune.profiling.profile_cache import cached_profile

    folder = tmp_path_factory.mktemp("cached") / "own"
    folder.mkdir()
    file = folder / "some_job.py"
    shutil.copy(TINY, file)
    reference = f"{file}:job"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = ProfilerOptions.lean(0)
        _, path, _ = cached_profile(load_job(reference), folder / "runs", options=options)
        remember(reference, path, folder / "runs")
    return reference, folder / "runs"


@pytest.fixture
def profiled(cached: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """Return the same for one test, in the job's folder; what the test changes is undone."""
    reference, runs = cached
    changed = [Path(reference.partition(":")[0]), runs / "profiles" / "index.json"]
    before = [path.read_bytes() for path in changed]
    monkeypatch.chdir(runs.parent)
    yield cached
    for path, data in zip(changed, before, strict=True):
        path.write_bytes(data)


def test_unchanged_job_is_found_and_a_changed_one_is_not(profiled: tuple[str, Path]) -> None:
    reference, runs = profiled
    found = indexed_profile(reference, runs)
    assert found is not None
    assert found[0].job == "tiny"
    file = Path(reference.partition(":")[0])
    file.write_text(file.read_text() + "\n# another line\n")
    assert indexed_profile(reference, runs) is None


def test_index_entry_of_another_environment_is_ignored(
    profiled: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, runs = profiled
    for name, value in (("OMP_NUM_THREADS", "7"), ("AUTOTUNE_STORAGES", "zip"), ("AUTOTUNE_PRECISIONS", "fp32")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert indexed_profile(reference, runs) is None
    assert indexed_profile(reference, runs) is not None
    assert indexed_profile(reference, runs, lean=False) is None


def test_relative_reference_depends_on_its_folder(profiled: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reference, runs = profiled
    monkeypatch.chdir(runs)
    assert indexed_profile(reference, runs) is None


@pytest.mark.parametrize("damage", ["{", "[]", '{"x": 1}', "null"])
def test_damaged_index_is_ignored(profiled: tuple[str, Path], damage: str) -> None:
    reference, runs = profiled
    (runs / "profiles" / "index.json").write_text(damage)
    assert indexed_profile(reference, runs) is None
    assert indexed_profile(reference, runs / "nowhere") is None


def test_command_shows_a_cached_profile_without_importing_torch(
    profiled: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    reference, runs = profiled
    code = f"""
import sys
from autotune.cli.main import run
assert run(["profile", {reference!r}, "--lean", "--runs-dir", {str(runs)!r}, "--json"]) == 0
assert "torch" not in sys.modules, "torch was imported"
"""
    # Test modules were loaded when the profile was cached, so the index also looks for them there.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd(), env=environment
    )
    document = json.loads(done.stdout)
    assert document["cached"] is True
    assert run(["profile", reference, "--lean", "--runs-dir", str(runs)]) == 0
    assert "From the cache" in capsys.readouterr().out


def test_files_of_this_and_of_installed_packages_are_not_part_of_the_job() -> None:
    sources = profile_index._sources()
    assert not any("site-packages" in str(path) for path in sources)
    assert Path(profile_index.__file__) not in sources
    assert Path(__file__) in sources


def test_index_files_are_read_only_if_a_job_may_consist_of_them(profiled: tuple[str, Path]) -> None:
    reference, runs = profiled
    index = runs / "profiles" / "index.json"
    known = json.loads(index.read_text())
    (entry,) = known.values()
    secret = runs.parent.parent / "secret.py"
    secret.write_text("x = 1")
    for name in ("/dev/zero", "/etc/hostname", str(secret), str(runs / "pipe.py")):
        entry["sources"] = {name: profile_index._digest(secret)}
        index.write_text(json.dumps(known))
        if name.endswith("pipe.py") and not Path(name).exists():
            os.mkfifo(name)
        assert indexed_profile(reference, runs) is None
    entry["sources"] = {reference.partition(":")[0]: profile_index._digest(Path(reference.partition(":")[0]))}
    index.write_text(json.dumps(known))
    assert indexed_profile(reference, runs) is not None
    entry["file"] = "../../secret.py"
    index.write_text(json.dumps(known))
    assert indexed_profile(reference, runs) is None
