"""Tests of the benchmark of ramps: arms at equal cost, compared where both reach the same loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tiny_job
from hypothesis import given
from hypothesis import strategies as st

from autotune import Job
from autotune.bench import bench_ramp
from autotune.bench.bench_ramp import arms_of, cost_ratio, end_of, lines, reached
from autotune.campaign.batch_ramp import CostedRun, Costs, Setting, follow
from autotune.cli.main import run
from autotune.errors import InputError

FILE = str(Path(tiny_job.__file__))
COSTS = Costs(fixed_samples=64.0, total_samples=3_000.0)


def adaptive(**changes: object) -> Job:
    settings = {"batching": "adaptive", "lr_rule": "sqrt", "accumulation_choices": (1, 2, 4), "schedule": None}
    return tiny_job.make(**{**settings, "max_steps": 40, **changes})


def falling(speed: float, floor: float = 0.0) -> tuple[tuple[float, float], ...]:
    """Return the curve of a run whose loss falls exponentially."""
    return tuple((float(cost), floor + math.exp(-speed * cost / 100)) for cost in range(2, 102, 2))


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    small = pytest.MonkeyPatch()
    with small.context() as patched:
        patched.setattr(bench_ramp, "RATES", (1.0, 2.0))
        patched.setattr(bench_ramp, "BATCHES", 2)
        patched.setattr(bench_ramp, "FINALISTS", 1)
        return bench_ramp.bench_ramp(adaptive(), fixed_samples=8.0, total_samples=800.0, seeds=2)


def test_document_has_every_arm_and_the_best_of_each_kind(document: dict) -> None:
    assert set(document["best"]) == {"k=", "ramp", "noise scale"}
    for kind, name in document["best"].items():
        assert name.startswith(kind)
        assert len(document["arms"][name]["metric"]) == len(document["seeds"]) == 2
    assert document["arms"][document["best"]["k="]]["cost_over_best"]["mean"] == 1.0
    assert len(document["arms"]["rate by branches"]["cost_over_best"]["values"]) == 2
    assert document["tuning_runs"] == {"k=": 4, "ramp": 2, "noise scale": 2} | dict.fromkeys(bench_ramp.BRANCHED, 0)
    json.dumps(document, allow_nan=False)
    assert len(lines(document)) == 5


@given(st.floats(1.05, 4.0))
def test_run_that_is_faster_by_a_factor_costs_that_much_less(factor: float) -> None:
    fast, slow = falling(2.0 * factor), falling(2.0)
    assert cost_ratio(fast, slow) == pytest.approx(1 / factor, rel=0.1)
    assert cost_ratio(slow, fast) == pytest.approx(factor, rel=0.1)
    assert cost_ratio(slow, slow) == 1.0


def test_run_that_failed_has_no_ratio() -> None:
    failed = (*falling(1.0)[:5], (12.0, math.inf))
    assert cost_ratio(failed, falling(1.0)) is None


def test_level_that_is_never_reached_counts_with_the_whole_cost() -> None:
    assert reached(falling(1.0), 0.0) == 100.0
    assert reached(falling(1.0), end_of(falling(1.0))) == 100.0


def test_plain_ramp_doubles_its_batch_at_fixed_shares_of_the_cost() -> None:
    run_of = CostedRun(adaptive(), COSTS, seed=0)
    follow(run_of, arms_of(adaptive(), COSTS)["ramp from k=1, rate 2"])
    assert [setting.accumulation_steps for _, setting in run_of.settings] == [1, 2, 4]
    assert {setting.rate for _, setting in run_of.settings} == {2.0}
    assert run_of.spent == pytest.approx(COSTS.total_samples, rel=0.05)


def test_noise_rule_takes_the_batch_with_the_most_progress_per_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best batch is sqrt(fixed cost x noise scale); the rule moves by one choice at a time."""
    choices = (1, 2, 4, 8, 16)
    job = adaptive(accumulation_choices=choices)
    rule = arms_of(job, COSTS)["noise scale, rate 1"]
    for noise, best in ((1.0, 2), (64.0, 8), (250.0, 16)):
        monkeypatch.setattr(CostedRun, "noise_scale", noise)
        run_of = CostedRun(job, COSTS, seed=0)
        for _ in range(4):
            run_of.train(rule(run_of), 1.0)
        assert rule(run_of) == Setting(accumulation_steps=best, rate=math.sqrt(best / 8))


def test_job_without_adaptive_batching_is_refused() -> None:
    with pytest.raises(InputError, match="batching of tiny is 'fixed'"):
        bench_ramp.bench_ramp(FILE, fixed_samples=64.0, seeds=2)


def test_cost_without_fixed_cost_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "batching", f"{FILE}:adaptive_job", "--cost", "100", "--runs-dir", str(tmp_path / "runs")]
    assert run(command) == 2
    assert "--cost is given without --fixed-cost (allowed: both, or neither)" in capsys.readouterr().err


def test_fixed_cost_must_not_be_negative(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "batching", f"{FILE}:adaptive_job", "--fixed-cost", "-1", "--runs-dir", str(tmp_path / "runs")]
    assert run(command) == 2
    assert "--fixed-cost" in capsys.readouterr().err
