"""Tests of pipelines on several ranks: updates equal those of one process under any schedule and division."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rank_laws import (
    assert_adapts_as_torch,
    assert_equals_torch,
    assert_mixes_precisions,
    assert_storage_is_exact,
    assert_troubles_are_shared,
    peaks_of,
    run_ranks,
)
from ranks import fork_ranks

from autotune import RankOptions
from autotune.campaign.comparison_campaign import warn_of_layout
from autotune.catalog import load_job
from autotune.cli import console
from autotune.cli.main import run
from autotune.cli.tune import show
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.pipeline_choice import pipelined
from autotune.pipeline import Pipeline
from autotune.plan import Launch, Plan
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.records.requests import Ranks, TuneRequest

TESTS = Path(__file__).parent


REFUSALS = {
    "twice": "the loss calls the units",
    "residual": "the model cannot be computed in stages",
    "conditioned": "the model cannot be computed in stages: its loss is nan in stages",
    "checkpointed": "the model cannot be computed in stages",
    "balanced": "the model cannot be computed in stages",
    "scaled": "the model cannot be computed in stages",
    "scaled_at_first": "the model cannot be computed in stages",
    "noisy": "the model draws random numbers in training, other than dropout",
    "estimating": "the optimizer's update of a parameter depends on the others'",
    "closure": "the optimizer cannot update some parameters alone",
    "units": "names 7 units, and the model has 6",
    "reduce": "+reduce=bf16 is not possible",
    "interleaved": "no k of (1,) can be interleaved on 2 ranks",
}


# Losses under autocast, and a first batch without a finite loss.
EXACT = ("autocast", "overflowing")


def assert_exact(folder: Path, layout: str, steps: int, ranks: int = 2) -> None:
    what = "equals_torch,storage_is_exact,troubles,mixed_precision,adaptive_equals_torch"
    found = run_ranks(folder, what, layout, steps, ranks)
    # Each gradient is added up as in one process: no bit differs.
    assert_equals_torch(found, steps, apart=0.0)
    assert_storage_is_exact(found)
    assert_troubles_are_shared(found)
    assert_mixes_precisions(found)
    assert_adapts_as_torch(found, apart=0.0)


def test_pipeline_makes_the_updates_of_one_process_under_random_plans(tmp_path: Path) -> None:
    assert_exact(tmp_path, "pipe=2", 12)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("pipe=2", 2),
        ("pipe=2,schedule=gpipe,units=2/4", 2),
        ("pipe=2,schedule=interleaved,units=2/1/1/2", 2),
        ("pipe=2,schedule=zero-bubble,units=2/4", 2),
        ("pipe=3,schedule=zero-bubble", 3),
        ("pipe=4", 4),
        ("pipe=3,units=2/2/2", 3),
    ],
)
def test_all_schedules_and_divisions_make_the_same_updates(layout: str, ranks: int, tmp_path: Path) -> None:
    assert_exact(tmp_path, layout, 200 if ranks == 2 else 60, ranks)


@pytest.mark.parametrize("schedule", ["", pytest.param(",schedule=zero-bubble", marks=pytest.mark.slow)])
def test_what_ranks_of_a_pipeline_refuse_and_share(schedule: str, tmp_path: Path) -> None:
    fork_ranks("odd_pipeline_rank.py", tmp_path, schedule)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name, words in REFUSALS.items():
            assert words in found["refusals"][name], (name, found["refusals"][name])
            assert "\n" not in found["refusals"][name]
        # The head's weight is the embedding's, or is used outside its module.
        for name in ("tied", "own_head", "regularised"):
            assert found[name]["apart"] <= 3e-7
            assert found[name]["metric_apart"] <= 1e-5
            # Norms of parts of a gradient do not add up.
            assert not found[name]["sampled"]
        for name in ("lengths", "lengths_interleaved", "norms", "root_norm", "frozen", "by_place", "turning", *EXACT):
            assert found[name]["apart"] == found[name]["metric_apart"] == 0.0, name
        assert found["lengths"]["sampled"]
        # Weights of other ranks are not there for an evaluation that adds them up.
        assert found["metric_of_weights"] == "nan"
        # A rank has about half of the weights and of the optimizer's state.
        assert found["share_of_weights"] < 0.6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--method", "ppo"],
            "--engine pipeline cannot be combined with ppo: plans of a pipeline cannot be priced at once",
        ),
        (["--method", "random", "--mesh", "pipe=3"], "mesh pipe=3 is for 3 ranks, and there are 2"),
        (["--method", "random", "--mesh", "dp=2"], "pipeline is 'dp=2'"),
    ],
)
def test_wrong_options_are_rejected_in_one_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", str(TESTS / "tiny_job.py"), "--runs-dir", str(tmp_path), "--engine", "pipeline"]
    assert run([*command, *options]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert words in told[-1]
    assert not any(tmp_path.iterdir())


def test_plan_that_is_compared_on_other_ranks_than_it_was_measured_on_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = tmp_path / "found.json"
    Plan(launch=Launch(pipeline="pipe=2")).save(plan)
    warn_of_layout(str(plan), Launch(pipeline="pipe=2"))
    assert not caplog.messages
    warn_of_layout(str(plan), Launch())
    warn_of_layout(str(plan), Launch(mesh="shard=2"))
    alone, sharded = caplog.messages
    assert "measured with pipeline pipe=2, and is compared here in one process" in alone
    assert "is compared here with mesh shard=2" in sharded
    Plan(accumulation_steps=2).save(plan)
    warn_of_layout(str(plan), Launch(mesh="shard=2"))
    assert len(caplog.messages) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pipeline_is_tuned_and_its_plan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", f"{TESTS / 'rank_jobs.py'}:transformer", "--engine", "pipeline", "--method", "random", "--json"]
    assert run([*command, "--runs-dir", str(tmp_path), "--report-to", "none"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["launch"]["pipeline"] == "pipe=2"
    assert document["measured"]["parts"]["synchronisation_s"] > 0
    # The suggested comparisons train on the same ranks.
    compares = "--engine pipeline --ranks 2"
    request = TuneRequest(job="JOB", method="random", ranks=Ranks.of(RankOptions(engine="pipeline")))
    show(document, request, console.console(as_json=False), as_json=False)
    page = Path(document["run"], "report.html").read_text()
    for text in (capsys.readouterr().out, page):
        assert compares in next(line for line in text.splitlines() if "autotune compare" in line)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stages_and_schedule_are_chosen_from_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", str(TESTS / "tiny_job.py"), "--engine", "pipeline", "--mesh", "all", "--method", "random"]
    assert run([*command, "--trials", "2", "--runs-dir", str(tmp_path), "--report-to", "none", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["meshes"]) >= 2
    # Budgets in per cent refer to the first one's peak.
    assert "schedule" not in next(iter(document["meshes"]))
    assert document["plan"]["launch"]["pipeline"] in document["meshes"]
    assert all("units=" in mesh for mesh in document["meshes"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "interleaved"])
def test_profile_of_one_process_predicts_the_memory_of_each_schedule(schedule: str) -> None:
    job = f"{TESTS / 'rank_jobs.py'}:transformer"
    alone = profile(load_job(job), device_name="this", device="cpu", options=ProfilerOptions.lean())
    found = pipelined(alone, Pipeline(ranks=2, schedule=schedule))
    space, draw = found.space, np.random.default_rng(7)
    plans = [space.baseline(), space.leanest(), *(space.sample(draw) for _ in range(8))]
    peaks = peaks_of(job, RankOptions(count=2, engine="pipeline", mesh=found.pipeline), plans)
    missed = [peak_bytes(found, plan) / peaks[plan] - 1 for plan in plans]
    # A k between profiled ones is interpolated. In two parts of a backward pass, a unit that recomputes is taken to do
    # so beside what earlier units are given later.
    bounds = {"1f1b": (1e-3, 0.01), "gpipe": (5e-3, 0.03), "interleaved": (0.01, 0.07), "zero-bubble": (0.04, 0.25)}
    median, high = bounds[schedule]
    assert float(np.median(np.abs(missed))) < median
    assert min(missed) > -0.005
    assert max(missed) < high


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exact_plan_of_a_pipeline_keeps_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", f"{TESTS / 'rank_jobs.py'}:transformer", "--engine", "pipeline", "--method", "exact", "--json"]
    command += ["--memory-budget", "45%", "--runs-dir", str(tmp_path), "--report-to", "none"]
    assert run(command) == 0
    document = json.loads(capsys.readouterr().out)
    measured = document["measured"]
    assert measured["peak_bytes"] <= measured["memory_budget_bytes"] < measured["baseline_peak_bytes"]
    assert document["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.05)
    # Comparisons train in the stages that the plan is for.
    assert document["plan"]["launch"]["pipeline"].startswith("pipe=2,units=")
