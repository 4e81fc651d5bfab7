"""Tests of the profile benchmark: predictions are compared with measurements of unseen plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.cli import bench
from autotune.cli.main import run
from autotune.records.run_directory import benchmark_folder

JOB = Path(__file__).parent / "tiny_job.py"


@pytest.mark.slow
def test_lean_profile_needs_a_fraction_of_the_steps_and_predicts_memory_equally_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "profile", "--jobs", str(JOB), "--plans", "4", "--runs-dir", str(tmp_path)]) == 0
    document = json.loads((benchmark_folder(tmp_path) / "profile.json").read_text())
    (entry,) = document["jobs"]
    assert entry["lean"]["steps"] < 0.4 * entry["full"]["steps"]
    assert document["steps_ratio_median"] == entry["lean"]["steps"] / entry["full"]["steps"]
    for kind in ("lean", "full"):
        assert entry[kind]["memory_error_p95"] <= 0.02
        assert entry[kind]["memory_underprediction_max"] <= 0.01
    assert "tiny: lean (" in capsys.readouterr().out


def test_bench_all_names_existing_benchmarks() -> None:
    known = {command.name for command in bench.app.registered_commands}
    assert set(bench.ALL) <= known
    assert {"cluster", "gpu", "policy", "all"} <= known
