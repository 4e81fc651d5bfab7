"""Tests of ramps of batch and learning rate: branches of a real run, counted in samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tiny_job
import torch

from autotune import EngineOptions, Job, TorchEngine
from autotune.campaign import batch_ramp
from autotune.campaign.batch_ramp import Branching, CostedRun, Costs, Ramp, Setting, find_ramp, first_setting, follow
from autotune.cli.main import run
from autotune.errors import InputError, JobError

FILE = str(Path(tiny_job.__file__))


def adaptive(**changes: object) -> Job:
    settings = {"batching": "adaptive", "lr_rule": "sqrt", "accumulation_choices": (1, 2, 4), "schedule": None}
    return tiny_job.make(**{**settings, "max_steps": 40, **changes})


def slow_job() -> Job:
    """Return a job whose learning rate is a thousandth of a good one."""
    return adaptive(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5))


def costs(total: float = 3_000.0) -> Costs:
    return Costs(fixed_samples=12.0, total_samples=total)


@pytest.fixture(scope="module")
def ramp() -> Ramp:
    return find_ramp(adaptive(), costs(), branching=Branching(larger_at=None))


def test_batch_grows_at_the_given_shares_of_the_cost() -> None:
    found = find_ramp(adaptive(), costs(2_000.0), branching=Branching(larger_at=(0.5,)))
    (chosen,) = found.rounds
    (_, first), (update, later) = found.updates
    assert first == chosen.chosen == Setting(accumulation_steps=1, rate=first.rate)
    assert later == Setting(accumulation_steps=2, rate=first.rate)
    assert update * (12 + tiny_job.BATCH) + found.lost == pytest.approx(1_000, rel=0.05)


def test_everything_that_is_trained_counts_as_cost(ramp: Ramp) -> None:
    updates = [number for number, _ in ramp.updates]
    assert updates == sorted(updates)
    assert 0 < ramp.lost < ramp.cost
    assert ramp.cost == pytest.approx(costs().total_samples, rel=0.02)
    assert ramp.curve[-1][0] == ramp.cost
    assert [cost for cost, _ in ramp.curve] == sorted(cost for cost, _ in ramp.curve)


def test_cost_of_a_run_is_its_samples_and_a_fixed_cost_per_update() -> None:
    run_of = CostedRun(adaptive(), costs(), seed=0)
    assert run_of.train(Setting(accumulation_steps=4, rate=1.0), 5 * (12 + 32))
    assert run_of.spent == 5 * (12 + 4 * tiny_job.BATCH)


def test_each_round_keeps_the_branch_with_the_best_metric(ramp: Ramp) -> None:
    assert len(ramp.rounds) >= 2
    for one in ramp.rounds:
        best = min(one.metrics, key=lambda pair: pair[1])
        assert one.chosen == best[0]
    first, *later = ramp.rounds
    assert len({setting.rate for setting, _ in first.metrics}) == len(first.metrics) >= 3
    for one in later:
        assert len({setting.rate for setting, _ in one.metrics}) == 1
        assert len({setting.accumulation_steps for setting, _ in one.metrics}) == 2


def test_too_low_a_learning_rate_is_raised() -> None:
    found = find_ramp(slow_job(), costs(2_000.0))
    assert found.updates[0][1].rate >= 8
    alone = CostedRun(slow_job(), costs(2_000.0), seed=0)
    follow(alone, lambda _: Setting(accumulation_steps=1, rate=1.0))
    assert found.curve[-1][1] < alone.curve[-1][1]


def test_branches_that_are_not_kept_leave_no_trace() -> None:
    """The run trains as if it had had its settings from the beginning."""
    found = find_ramp(adaptive(), costs(), branching=Branching(larger_at=None, growth=3.0))
    again = CostedRun(adaptive(), costs(), seed=0)
    ends = [number for number, _ in found.updates[1:]]
    for (number, setting), end in zip(found.updates, ends, strict=False):
        assert again.train(setting, (end - number) * again.cost_of(setting))
    number, setting = found.updates[-1]
    kept = found.cost - found.lost
    assert again.train(setting, kept - again.spent)
    assert again.evaluate() == found.curve[-1][1]


def test_engine_trains_with_the_multiple_of_its_learning_rate() -> None:
    engine = TorchEngine(adaptive(lr_rule="none"), seed=0, options=EngineOptions(meter_memory=False))
    assert engine.run(1).learning_rate == 1e-2
    engine.scale_learning_rate(0.25)
    state = engine.snapshot()
    assert engine.run(1).learning_rate == 2.5e-3
    engine.restore(state)
    assert engine.run(1).learning_rate == 2.5e-3


@pytest.mark.parametrize(("fixed", "k"), [(0.0, 1), (15.0, 1), (16.0, 2), (32.0, 4), (1e6, 4)])
def test_first_batch_costs_at_most_the_fixed_cost(fixed: float, k: int) -> None:
    found = first_setting(adaptive(), Costs(fixed_samples=fixed, total_samples=1.0))
    assert found == Setting(accumulation_steps=k, rate=1.0)


def test_measured_fixed_cost_is_a_number_of_samples() -> None:
    found = batch_ramp.measured_fixed_cost(adaptive())
    assert math.isfinite(found)
    assert found >= 0


def test_job_that_fails_at_every_rate_is_refused_in_a_sentence() -> None:
    def diverging(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return tiny_job.mean_loss(model, batch) * math.nan

    with pytest.raises(JobError, match=r"training fails at 0\.5 to 2 times the learning rate"):
        find_ramp(adaptive(loss=diverging), costs())


@pytest.mark.parametrize(("fixed", "total"), [(-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)])
def test_costs_that_are_no_numbers_of_samples_are_refused(fixed: float, total: float) -> None:
    with pytest.raises(InputError, match="in samples"):
        Costs(fixed_samples=fixed, total_samples=total)


BAD = {
    "fixed batching": ([FILE], "batching of tiny is 'fixed' (allowed: adaptive)"),
    "one k": ([f"{FILE}:one_adaptive_k"], "allowed: at least two"),
    "negative cost": ([FILE, "--fixed-cost", "-1"], "--fixed-cost"),
    "no cost": ([FILE, "--cost", "0"], "--cost"),
    "few updates": ([f"{FILE}:adaptive_job", "--fixed-cost", "64", "--cost", "3000"], "allowed: at least 3840"),
    "no number": ([FILE, "--cost", "much"], "--cost"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_a_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, told = BAD[case]
    assert run(["ramp", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_command_prints_the_ramp_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ramp", f"{FILE}:adaptive_job", "--fixed-cost", "64", "--cost", "4000", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["job"] == "tiny"
    assert document["fixed_samples"] == 64
    assert document["updates"][0][1].keys() == {"accumulation_steps", "rate"}
    assert document["metric"] == document["curve"][-1][1]
    assert run(["ramp", f"{FILE}:adaptive_job", "--fixed-cost", "64", "--cost", "4000"]) == 0
    assert "samples per update" in capsys.readouterr().out
