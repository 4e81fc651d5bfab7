"""Tests of the benchmark of pipelines: layouts that are tried, and what is made of measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from autotune.bench import bench_pipelines
from autotune.cli.main import run
from autotune.errors import InputError
from autotune.pipeline import divisions
from autotune.simulator.random_jobs import draw_job

TESTS = Path(__file__).parent


def test_divisions_are_all_ways_to_give_each_stage_a_unit() -> None:
    found = list(divisions(5, 3))
    assert found == [(1, 1, 3), (1, 2, 2), (1, 3, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1)]


def test_errors_are_of_the_measured_values_and_the_chosen_layout_is_compared_in_the_same_turns() -> None:
    rows = [
        {"predicted_s": 1.0, "seconds": 1.2, "turns_s": [1.2, 2.4], "time_error": -0.2, "bubble_error": 0.1},
        {"predicted_s": 1.5, "seconds": 1.0, "turns_s": [1.0, 2.0], "time_error": 0.5, "bubble_error": -0.3},
    ]
    found = bench_pipelines._summary(rows)
    assert found["chosen"] is rows[0]
    assert found["best"] is rows[1]
    assert found["chosen_over_best"] == pytest.approx(1.2)
    assert found["time_error_median"] == pytest.approx(0.35)
    assert found["bubble_error_p90"] == pytest.approx(0.28)


def test_models_with_too_many_divisions_are_refused() -> None:
    found = draw_job(np.random.default_rng(0), depth=(60, 60)).profile
    with pytest.raises(InputError, match=r"too many divisions of .* units into 4 stages"):
        bench_pipelines._layouts(found, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_predicted_steps_of_a_small_job_are_compared_with_real_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "pipelines", "--job", f"{TESTS / 'rank_jobs.py'}:shared", "--rounds", "2", "--json"]
    assert run([*command, "--runs-dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["layout"].partition("schedule=")[2].partition(",")[0] for row in document["rows"]} == {
        "",
        "gpipe",
        "interleaved",
    }
    for row in document["rows"]:
        assert 0 < row["bubble"] < 1
        assert row["seconds"] > 0
        assert len(row["turns_s"]) == 2
    assert document["chosen_over_best"] > 0
