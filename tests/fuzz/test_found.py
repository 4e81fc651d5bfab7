"""Regression tests of mutated documents that once caused harm."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import record

from autotune.commands import resume
from autotune.errors import InputError, ProfileError, RunDirectoryError
from autotune.io.files import read_json
from autotune.profiling.profile_cache import read_profile
from autotune.simulator.convergence import Convergence


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return Path(shutil.copytree(record.SPECIMENS / "jobs", tmp_path / "jobs"))


def changed(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"time_ratio": 0, "time_ratio_ci95": [0.5, 1.5]}, r"time_ratio is 0 \(allowed: at least 1e-30\)"),
        ({"time_ratio": 1.0, "time_ratio_ci95": [0.0, 1.5]}, r"time_ratio_ci95\[0\] is 0.0"),
        ({"time_ratio": 1.0, "time_ratio_ci95": None}, "time_ratio is 1.0 and time_ratio_ci95 is None"),
        ({"time_ratio": 1.0, "time_ratio_ci95": [1.5, 0.5]}, r"time_ratio_ci95 is \[1.5, 0.5\]"),
    ],
)
def test_time_ratio_that_gives_no_finite_speed_is_rejected(jobs: Path, values: dict[str, Any], problem: str) -> None:
    changed(jobs / "jobs.json", lambda document: document["together"][0].update(values))
    with pytest.raises(RunDirectoryError, match=problem):
        resume(jobs)


def test_comparison_without_its_run_name_is_rejected(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(record.SPECIMENS / "compare", tmp_path / "compare"))
    changed(folder / "comparison.json", lambda document: document.pop("run"))
    with pytest.raises(RunDirectoryError, match="run is missing"):
        resume(folder)


@pytest.mark.parametrize("where", ["calibration", "pieces"])
def test_profile_with_zero_step_time_is_rejected(tmp_path: Path, where: str) -> None:
    document = read_json(record.SPECIMENS / "tune-exact" / "profile.json")
    if where == "calibration":
        document["calibration"]["scale"] = 0.0
    else:
        document["calibration"]["constant_s"] = -1e9
    (tmp_path / "profile.json").write_text(json.dumps(document))
    with pytest.raises(ProfileError, match="at k = 1 a step takes no time"):
        read_profile(tmp_path / "profile.json")


def test_flat_convergence_curve_reaches_its_target_at_once_or_never() -> None:
    document = copy.deepcopy(read_json(record.SPECIMENS / "loose" / "convergence.json"))
    document["metric"]["drop"] = 0.0
    found = Convergence.from_json(document)
    assert found.metric.effort_to(found.metric.asymptote) == 0.0
    assert found.steps_to(found.metric.asymptote + 1.0, 8.0) == float("inf")


def test_error_messages_contain_no_control_characters_and_no_very_long_values() -> None:
    error = InputError(f"key 'a\x00\x1b[31m\u202e\ud800' is {'x' * 100_000}", where="file", allowed="y" * 100_000)
    assert str(error).isprintable()
    assert r"a\x00\x1b[31m\u202e\ud800" in str(error)
    assert len(str(error)) < 5_000
    assert str(InputError("é 漢 is no unit", where="file")) == "file: é 漢 is no unit"


def test_error_in_a_run_s_request_names_the_run(tmp_path: Path) -> None:
    import several

    from autotune.mechanics.devices import device_name

    folder = Path(shutil.copytree(record.SPECIMENS / "compare", tmp_path / "compare"))
    (folder / "comparison.json").unlink()
    changed(folder / "environment.json", lambda document: document.update(device=device_name()))
    changed(folder / "config.json", lambda document: document["asked"].update(dips="90%"))
    with pytest.raises(InputError, match=r"compare, --dips: dips is '90%'"):
        resume(folder, job=several.untrained())
