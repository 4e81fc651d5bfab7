"""Tests of energy in campaigns: weights affect the decision, and each compared run records joules and grams."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tiny_job
from known_problem import KnownEngine, known_answer
from test_env import SPACE

import autotune
from autotune import InputError, Measurement, Plan, Precision
from autotune.campaign import plan_search
from autotune.campaign.baselines import measure_references
from autotune.cost_model.carbon import JOULES_PER_KWH
from autotune.cost_model.paper_equations import Weights
from autotune.gym.reward import Objective
from autotune.mechanics import energy_meter
from autotune.records.protocol import RunRecord
from autotune.records.run_directory import RunDirectory
from autotune.report.terminal_tables import energy_lines


@pytest.fixture(autouse=True)
def _no_counters(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_meter, "POWERCAP", tmp_path_factory.mktemp("none"))


def joules(plan: Plan) -> float:
    """Energy of a machine on which 16 bits are fast but inefficient: the fastest plan uses the most energy."""
    return 10.0 + 5.0 * sum(plan.precision_of(unit.name).is_reduced for unit in SPACE.units)


class HungryEngine(KnownEngine):
    """An engine that computes windows by formulas of time, memory and energy."""

    def run(self, steps: int) -> Measurement:
        window = known_answer(self.plan, steps, self.memory_budget_bytes)
        spent = joules(self.plan) * len(window.step_s)
        return replace(window, energy_j=spent, total_energy_j=spent, energy_source="measured:rapl")


def tuned(objective: Objective, folder: Path) -> plan_search.TuningResult:
    engine = HungryEngine()
    references = measure_references(engine, None)
    run = RunDirectory.create(folder, "tune", tiny_job.job(), {})
    settings = plan_search.TuningSettings(steps=150, seed=1, objective=objective)
    return plan_search.tune(tiny_job.job(), "random", engine, references, settings, run=run)


def test_weight_of_energy_decides_between_a_fast_and_an_efficient_plan(tmp_path: Path) -> None:
    fast = tuned(Objective(), tmp_path / "fast")
    frugal = tuned(Objective(weights=Weights(time=0.0, energy=1.0)), tmp_path / "frugal")
    count = [list(found.plan.precision.values()).count(Precision.FP32) for found in (fast, frugal)]
    assert count[0] < count[1]
    assert frugal.cost == pytest.approx(joules(frugal.plan) / joules(SPACE.baseline()))
    assert frugal.measurement.energy_j == pytest.approx(joules(frugal.plan) * len(frugal.measurement.step_s))
    assert frugal.measurement.energy_source == "measured:rapl"


def test_real_job_is_tuned_by_energy_estimated_from_watts(tmp_path: Path) -> None:
    found = autotune.tune(tiny_job.job(), "random", steps=60, weights="0.5,0,0.5", watts=40.0, runs_dir=tmp_path)
    measured = found["measured"]
    assert measured["energy_source"] == "estimated:tdp"
    energy = measured["sample_j"] / measured["baseline_sample_j"]
    seconds = measured["seconds_per_step"] / measured["baseline_seconds_per_step"]
    assert measured["cost"] == pytest.approx(0.5 * seconds + 0.5 * energy)
    assert RunDirectory.open(Path(found["run"])).read("config.json")["asked"]["weights"] == "0.5,0,0.5"


def test_energy_weight_without_a_reading_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="energy has a weight but cannot be read on this machine"):
        autotune.tune(tiny_job.job(), "random", steps=60, weights="1,0,1", runs_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def hourly(folder: Path, begin: datetime, hours: int) -> str:
    path = folder / "series.csv"
    rows = (f"{(begin + timedelta(hours=hour)).isoformat()},250" for hour in range(hours))
    path.write_text("time,gCO2/kWh\n" + "\n".join(rows) + "\n")
    return str(path)


@pytest.mark.parametrize("as_file", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_compared_run_records_energy_and_carbon(as_file: bool, tmp_path: Path) -> None:
    intensity = hourly(tmp_path, datetime.now(UTC) - timedelta(hours=1), 5) if as_file else "250"
    found = autotune.compare(
        tiny_job.make(max_steps=20),
        ["uniform-bf16"],
        seeds=2,
        watts=40.0,
        carbon_intensity=intensity,
        runs_dir=tmp_path / "runs",
    )
    for arm in found["arms"]:
        for run in arm["runs"]:
            assert run["energy_source"] == "estimated:tdp"
            # At least the time to the last evaluation, at most the elapsed time.
            assert 40.0 * 0.9 * run["curve"][-1][0] < run["energy_j"] <= 40.0 * (run["ran_s"][1] - run["ran_s"][0])
            assert run["grams"] == pytest.approx(run["energy_j"] / JOULES_PER_KWH * 250)
            own = {key: value for key, value in run.items() if key != "grams"}
            assert RunRecord.from_json({**own, "plans": []}).energy_j == run["energy_j"]
    lines = energy_lines(found)
    assert [line.partition(":")[0] for line in lines] == ["baseline", "uniform-bf16"]
    assert all("gCO2 (estimated:tdp)" in line for line in lines)


def test_comparison_without_a_reading_reports_absent_energy_and_no_carbon(tmp_path: Path) -> None:
    found = autotune.compare(
        tiny_job.make(max_steps=10), ["uniform-bf16"], seeds=2, carbon_intensity="250", runs_dir=tmp_path
    )
    runs = [run for arm in found["arms"] for run in arm["runs"]]
    assert {(run["energy_j"], run["energy_source"], run["grams"]) for run in runs} == {(None, "absent", None)}
    assert energy_lines(found) == []


def test_carbon_series_of_another_period_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    path = hourly(tmp_path, datetime(2025, 3, 1, tzinfo=UTC), 4)
    with pytest.raises(InputError, match=r"--carbon-intensity: the series does not cover .* 2025-03-01T04:00:00"):
        autotune.compare(tiny_job.job(), ["sqrt"], seeds=2, carbon_intensity=path, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
