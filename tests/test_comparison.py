"""Comparing fairly: the statistics against their own laws, and whole comparisons of a real tiny job."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_job
import torch
from rich.console import Console

import autotune
from autotune.agents.policy import StaticPolicy
from autotune.campaign.comparison import GATE, _within_reach, find_horizon, pilot
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import InputError
from autotune.plan import Plan
from autotune.records.protocol import Arm, Protocol, RunRecord
from autotune.records.verdicts import gated, judge
from autotune.report.campaign_run import read_campaign
from autotune.report.terminal_tables import alone_lines, comparison_table, plan_lines, verdict_line
from autotune.report.writing import page_for

PROTOCOL = Protocol(
    job="j", arms=("baseline", "a"), seeds=tuple(range(10)), horizon_samples=100, memory_budget_bytes=None
)
ARM = Arm(name="a", policy=lambda space: StaticPolicy("a", space.baseline()), tuning_s=30.0, tuning_steps=50)


def record(seed: int, time_s: float | None, metric: float = 1.0, failure: str | None = None) -> RunRecord:
    return RunRecord(
        seed=seed,
        reached=time_s is not None,
        time_to_target_s=time_s,
        steps=100,
        samples=1000,
        final_metric=metric,
        peak_bytes=100,
        failure=failure,
    )


def judged(times: list[float | None], baseline: list[float], **metrics: list[float]) -> dict:
    own = metrics.get("own", [1.0] * len(times))
    other = metrics.get("other", [1.0] * len(times))
    runs = [record(i, value, own[i]) for i, value in enumerate(times)]
    return judge(ARM, runs, [record(i, value, other[i]) for i, value in enumerate(baseline)], PROTOCOL, "min")


def test_ratios_verdicts_and_break_even_are_what_the_times_say() -> None:
    faster = judged([5.0, 5.2, 4.9, 5.1] * 2, [10.0, 10.1, 9.9, 10.0] * 2)
    assert faster["verdict"] == "faster"
    assert faster["time_ratio"] == pytest.approx(0.505, abs=0.01)
    for key in ("time_ratio_ci95", "time_ratio_bca95"):
        assert faster[key][0] < faster["time_ratio"] < faster[key][1]
    # 30 s of tuning are won back at 4.95 of 10 s per 100 steps: about 606 steps.
    assert faster["break_even_steps"] == pytest.approx(606, abs=10)
    assert judged([10.0, 10.2, 9.8, 10.1], [5.0, 5.1, 5.0, 4.9])["verdict"] == "slower"
    assert judged([10.0, 9.0, 11.0, 10.2], [10.0, 10.1, 9.9, 10.0])["verdict"] == "no difference shown"


def test_a_run_that_converged_worse_cannot_be_faster() -> None:
    worse = judged([5.0, 5.1, 4.9, 5.0], [10.0, 10.1, 9.9, 10.0], own=[1.02, 1.03, 1.02, 1.02])
    assert not worse["non_inferior"]
    assert worse["verdict"] == "no difference shown"
    assert worse["metric_difference"] == pytest.approx(0.0225)


def test_missed_targets_and_failures_stay_in() -> None:
    missed = judged([5.0, None, 4.9, 5.0], [10.0, 10.1, 9.9, 10.0])
    assert (missed["verdict"], missed["time_ratio"]) == ("slower", None)
    assert "1 of 4" in missed["reason"]
    runs = [record(0, 5.0), record(1, None, failure="out_of_memory")]
    failed = judge(ARM, runs, [record(0, 10.0), record(1, 10.0)], PROTOCOL, "min")
    assert (failed["verdict"], failed["non_inferior"]) == ("slower", False)
    assert failed["reason"] == "1 of 2 runs ended with out_of_memory, which counts as missing the target"
    assert judge(ARM, runs, [record(0, None), record(1, 10.0)], PROTOCOL, "min")["verdict"] == "not comparable"


def test_without_a_target_whole_runs_are_compared_per_sample() -> None:
    def ended(times: list[float], samples: int) -> list[RunRecord]:
        found = [record(seed, time) for seed, time in enumerate(times)]
        for one in found:
            one.samples = samples
        return found

    base = ended([10.0, 10.1, 9.9, 10.0], 1000)
    twice = judge(ARM, ended([10.0, 10.1, 9.9, 10.0], 2000), base, PROTOCOL, "min", targeted=False)
    assert (twice["verdict"], twice["time_ratio"]) == ("faster", pytest.approx(0.5))
    failed = [record(seed, None, failure="out_of_memory") for seed in range(4)]
    lost = judge(ARM, failed, base, PROTOCOL, "min", targeted=False)
    assert (lost["verdict"], lost["reason"]) == ("slower", "4 of 4 runs ended with out_of_memory")
    none = judge(ARM, base, failed, PROTOCOL, "min", targeted=False)
    assert (none["verdict"], none["reason"]) == (
        "not comparable",
        "the baseline failed (out_of_memory after 100 steps)",
    )


def test_a_job_without_a_target_is_compared_by_time_and_memory_per_sample(tmp_path: Path) -> None:
    job = tiny_job.make(target=None, max_steps=10, evaluate_every=5)
    assert find_horizon(job) == 10 * job.batch_size
    document = autotune.compare(job, ["sqrt"], seeds=2, runs_dir=tmp_path)
    assert document["metric"] == {"goal": "min", "target": None, "margin": 0.005}
    for arm in document["arms"]:
        for run in arm["runs"]:
            assert (run["reached"], run["samples"]) == (True, 80)
            assert run["time_to_target_s"] == run["curve"][-1][0]
            assert run["final_metric"] == run["curve"][-1][2]
    entry = document["against_baseline"][0]
    assert entry["time_ratio"] is not None
    assert entry["memory_ratio"] < 1
    assert entry["metric_difference"] == 0
    assert entry["samples_ratio"] == 1
    console = Console(width=100, record=True)
    console.print(comparison_table(document))
    table = console.export_text()
    assert "time per" in table
    assert "target" not in table + verdict_line(document)
    zero = {**entry, "metric_difference": -1e-9, "verdict": "slower", "time_ratio_ci95": [1.002, 1.5]}
    told = verdict_line({**document, "against_baseline": [zero]})
    assert "(95 % interval 0.67x to 0.998x)" in told
    assert "final metric +0.00%" in told
    page = page_for(read_campaign(Path(document["run"]))).text
    assert "per sample" in page
    assert "target" not in page.split("<body", 1)[-1].replace(document["run"], "")


def test_a_goal_of_max_turns_the_sign_of_quality_only() -> None:
    runs, base = [record(i, 5.0 + i / 10, 0.99) for i in range(4)], [record(i, 10.0, 0.95) for i in range(4)]
    entry = judge(ARM, runs, base, PROTOCOL, "max")
    assert entry["non_inferior"]
    assert entry["metric_difference"] > 0
    assert not judge(ARM, runs, base, PROTOCOL, "min")["non_inferior"]


@pytest.mark.slow
def test_an_arm_against_itself_is_rarely_called_different_and_a_planted_effect_is_found() -> None:
    generator = np.random.default_rng(0)

    def verdicts(shift: float, count: int) -> list[str]:
        found = []
        for _ in range(count):
            noise = generator.normal(size=(2, 10))
            times = np.exp(0.05 * noise[0] / math.sqrt(2) + 0.05 * shift), np.exp(0.05 * noise[1] / math.sqrt(2))
            found.append(judged(times[0].tolist(), times[1].tolist())["verdict"])
        return found

    assert sum(verdict != "no difference shown" for verdict in verdicts(0.0, 200)) <= 18
    assert np.mean([verdict == "faster" for verdict in verdicts(-1.0, 2000)]) >= 0.75


def arrived(seed: int, evaluation: int) -> RunRecord:
    """Return a run that met its target at an evaluation, of which there is one every 100 samples and seconds."""
    found = record(seed, 100.0 * evaluation)
    found.curve = [(100.0 * number, 100 * number, 1.0) for number in range(41)]
    return found


def test_an_arm_that_learns_more_per_sample_than_the_baseline_is_not_comparable() -> None:
    base = [arrived(seed, 20 + seed % 3) for seed in range(8)]
    fast = judge(ARM, [arrived(seed, 14 + seed % 2) for seed in range(8)], base, PROTOCOL, "min")
    assert fast["verdict"] == "not comparable"
    assert "fewer samples than the baseline" in fast["reason"]
    assert fast["samples_ratio"] == pytest.approx(14.5 / 21, abs=0.03)
    # One evaluation earlier is what evaluations can tell apart, and later is nothing suspicious.
    for shift in (-1, 5):
        other = [arrived(seed, 20 + seed % 3 + shift) for seed in range(8)]
        assert judge(ARM, other, base, PROTOCOL, "min")["verdict"] in ("faster", "slower")


@pytest.mark.slow
def test_a_learning_rate_that_is_scaled_wrongly_is_flagged_on_a_real_job() -> None:
    def runs(rate: float) -> list[RunRecord]:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=rate)

        job = replace(tiny_job.make(evaluate_every=2, max_steps=120, target=2.0), optimizer=optimizer)
        return [pilot(job, 120 * job.batch_size, seed=seed) for seed in range(3)]

    entry = judge(ARM, runs(8e-3), runs(4e-3), PROTOCOL, "min")
    assert entry["verdict"] == "not comparable", entry
    assert entry["samples_ratio"] < 0.9
    assert judge(ARM, runs(4e-3), runs(4e-3), PROTOCOL, "min")["samples_ratio"] == 1


def test_a_baseline_that_beats_itself_takes_every_verdict_away() -> None:
    faster = judged([5.0, 5.2, 4.9, 5.1] * 2, [10.0, 10.1, 9.9, 10.0] * 2)
    same = judged([10.1, 9.9, 10.0, 10.2] * 2, [10.0, 10.1, 9.9, 10.0] * 2)
    assert gated([faster], same) == [faster]
    (taken,) = gated([faster], {**faster, "arm": GATE})
    assert taken["verdict"] == "not comparable"
    assert "than itself" in taken["reason"]


def test_the_baseline_arrives_at_about_four_fifths_of_the_horizon_under_a_schedule_of_that_length() -> None:
    job = tiny_job.make(evaluate_every=2, max_steps=200, target=1.5)
    length = find_horizon(job)
    assert length < job.total_samples
    assert length % (2 * job.batch_size) == 0
    arrived = pilot(job, length)
    assert arrived.reached
    assert 0.5 < arrived.samples / length <= 0.95


def test_the_horizon_of_a_job_that_never_arrives_is_its_own_length() -> None:
    job = tiny_job.never_met()
    assert find_horizon(job) == 10 * job.batch_size


def test_a_job_that_has_arrived_before_training_has_a_horizon_all_the_same() -> None:
    job = tiny_job.already_met()
    assert 0 < find_horizon(job) <= job.total_samples


def test_a_run_reaches_its_target_only_once_its_gradient_is_within_the_limit() -> None:
    job, samples = tiny_job.make(evaluate_every=5, target=2.5, max_steps=80), 80 * tiny_job.BATCH
    free = pilot(job, samples)
    assert free.reached
    # The gradient shrinks after this job has reached its target.
    limit = 0.75 * free.gradient_norm
    held = pilot(job, samples, gradient_norm=limit)
    assert held.reached
    assert held.gradient_norm <= limit
    assert held.samples > free.samples
    assert not pilot(job, samples, gradient_norm=1e-6).reached
    with pytest.raises(
        InputError, match=r"never with a gradient norm of at most 1e-06: it ends with \d.* larger --gra"
    ):
        find_horizon(job, needs_target=True, gradient_norm=1e-6)


def test_the_arm_of_equation_9_trains_the_k_with_the_most_samples_per_second_and_byte(tmp_path: Path) -> None:
    job = tiny_job.make(batching="adaptive", accumulation_choices=(1, 2, 4))
    document = autotune.compare(job, ["k-optimal"], seeds=2, steps=60, gradient_norm=1e3, runs_dir=tmp_path)
    assert document["gradient_norm"] == 1e3
    run = Path(document["run"])
    profile = Profile.from_json(json.loads((run / "profile.json").read_text()))
    plan = Plan.from_json(next(arm["plan"] for arm in document["arms"] if arm["name"] == "k-optimal"))
    plans = [profile.space.baseline().changed(accumulation_steps=k) for k in (1, 2, 4)]
    assert plan in plans
    density = [p.accumulation_steps / seconds_per_step(profile, p) / peak_bytes(profile, p) for p in plans]
    assert density[plans.index(plan)] == max(density)
    assert json.loads((run / "plan-k-optimal.json").read_text())["accumulation_steps"] == plan.accumulation_steps
    assert json.loads((run / "config.json").read_text())["asked"]["gradient_norm"] == 1e3


def test_a_protocol_has_one_hash_and_any_change_another() -> None:
    assert PROTOCOL.digest == replace(PROTOCOL).digest
    assert PROTOCOL.digest != replace(PROTOCOL, margin=0.01).digest


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict:
    runs = tmp_path_factory.mktemp("runs")
    return autotune.compare(
        tiny_job.job(), ["uniform-bf16", "random", "ppo-scratch"], seeds=2, memory_budget="90%", steps=48, runs_dir=runs
    )


@pytest.mark.slow
def test_the_comparison_is_the_documented_one_and_is_on_the_disk(document: dict) -> None:
    run = Path(document["run"])
    assert json.loads((run / "comparison.json").read_text()) == document
    assert [arm["name"] for arm in document["arms"]] == ["baseline", "uniform-bf16", "random", "ppo-scratch"]
    assert {"version", "job", "device", "seeds", "memory_budget_bytes", "baseline", "arms", "against_baseline"} <= set(
        document
    )
    wanted = {
        *("seed", "reached", "time_to_target_s", "steps", "samples", "final_metric", "throughput", "peak_bytes"),
        *("within_budget", "energy_j", "energy_source", "failure"),
    }
    for arm in document["arms"]:
        assert {"name", "plan", "tuning_s", "tuning_steps", "runs"} <= set(arm)
        assert all(wanted <= set(entry) for entry in arm["runs"])
        # Every arm runs to the same number of samples.
        assert {entry["samples"] for entry in arm["runs"]} == {document["horizon_samples"]}
    for entry in document["against_baseline"]:
        keys = {"arm", "time_ratio", "time_ratio_ci95", "p_value", "memory_ratio", "metric_difference", "non_inferior"}
        assert keys | {"break_even_steps", "verdict"} <= set(entry)


def test_searched_arms_have_paid_their_real_steps_and_their_trials_are_recorded(document: dict) -> None:
    rows = [json.loads(row) for row in Path(document["run"], "trials.jsonl").read_text().splitlines()]
    for arm in document["arms"]:
        if arm["name"] in ("random", "ppo-scratch"):
            assert 0 < arm["tuning_steps"] <= 48
            assert arm["tuning_s"] > 0
            own = [row for row in rows if row["method"] == arm["name"]]
            assert [row["number"] for row in own] == list(range(len(own)))
            assert sum(row["final"] for row in own) > 0
    assert Path(document["run"], "policy", "policy.safetensors").is_file()


def test_a_picture_a_plan_and_provenance_are_written(document: dict) -> None:
    run = Path(document["run"])
    assert (run / "comparison.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (run / "comparison.png").stat().st_size > 20_000
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["data"] == []
    assert json.loads((run / "config.json").read_text())["memory_budget"]["share"] == 0.9


def test_two_runs_of_one_arm_and_seed_learn_the_same(document: dict) -> None:
    again = autotune.compare(tiny_job.job(), ["uniform-bf16"], seeds=2, runs_dir=Path(document["run"]).parent)
    first, second = (next(arm for arm in found["arms"] if arm["name"] == "uniform-bf16") for found in (document, again))
    assert [run["final_metric"] for run in first["runs"]] == [run["final_metric"] for run in second["runs"]]


def test_the_tables_say_what_the_document_says(document: dict) -> None:
    table = comparison_table(document)
    assert table.row_count == 4
    assert len(plan_lines(document)) == 4
    line = verdict_line(document)
    assert "an indication, not a claim" in line or "Nothing can be compared" in line or "No arm" in line


@pytest.mark.slow
def test_a_target_that_is_met_before_training_is_said_and_is_no_error(tmp_path: Path) -> None:
    met = autotune.compare(tiny_job.already_met(), ["uniform-bf16"], seeds=2, runs_dir=tmp_path)
    assert met["against_baseline"][0]["verdict"] == "not comparable"
    assert "before any training" in met["against_baseline"][0]["reason"]
    assert "before any training" in verdict_line(met)


def test_a_target_out_of_reach_ends_the_comparison_after_its_pilot_and_names_one_within_reach(tmp_path: Path) -> None:
    job = tiny_job.never_met()
    with pytest.raises(InputError, match="the baseline misses the target") as caught:
        autotune.compare(job, ["uniform-bf16"], seeds=2, runs_dir=tmp_path)
    assert "target=None" in str(caught.value)
    within = float(re.search(r"a target of about ([\d.]+);", str(caught.value))[1])
    found = autotune.compare(replace(job, target=within), ["sqrt"], seeds=2, runs_dir=tmp_path)
    assert all(run["reached"] for arm in found["arms"] for run in arm["runs"] if arm["name"] == "baseline")


@pytest.mark.parametrize("evaluate_every", [5, 10])
def test_no_target_is_proposed_that_the_untrained_model_has(evaluate_every: int, tmp_path: Path) -> None:
    flat = tiny_job.make(target=0.0, max_steps=10, evaluate_every=evaluate_every, evaluate=lambda model: 5.0)
    with pytest.raises(InputError, match="which is no better than before training") as caught:
        autotune.compare(flat, ["random"], seeds=2, runs_dir=tmp_path)
    assert "a target of about" not in str(caught.value)
    # The pilot comes before any search, and nothing is written.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metric", "goal", "text"),
    [
        (5.00041, "min", "5.001"),
        (0.99996, "max", "0.9999"),
        (-1.23456, "min", "-1.234"),
        (1234567.0, "max", "1.234e+06"),
    ],
)
def test_proposed_targets_are_rounded_to_the_side_within_reach(metric: float, goal: str, text: str) -> None:
    assert _within_reach(metric, goal) == text


def test_a_plan_file_is_an_arm_and_a_live_arm_lists_its_plans(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"version": 1, "accumulation_steps": 2, "precision": {"head": "bf16"}}))
    job = tiny_job.make(batching="adaptive", max_steps=48, target=None)
    found = autotune.compare(job, [str(path), "paper"], seeds=2, runs_dir=tmp_path)
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert arms["mine"]["plan"]["accumulation_steps"] == 2
    assert arms["mine"]["plan"]["precision"]["head"] == "bf16"
    for arm in arms.values():
        for run in arm["runs"]:
            # The last step of an adaptive run is not cut.
            assert 0 <= run["samples"] - found["horizon_samples"] < 4 * job.batch_size
            assert ("plans" in run) == ("plan" not in arm)


def test_an_arm_whose_network_stood_back_says_in_how_many_windows_and_why() -> None:
    def arm(name: str, *alone: dict[str, int]) -> dict:
        return {"name": name, "runs": [{"alone": reasons} for reasons in alone]}

    lines = alone_lines(
        {"arms": [arm("exact", {}, {}), arm("ppo", {"once": 5, "dip": 1}, {"once": 4}), {"name": "old", "runs": [{}]}]}
    )
    assert len(lines) == 1
    assert lines[0].startswith("ppo: the planner decided alone in 10 of the windows of 2 runs, most often for once")


@pytest.mark.parametrize("broken", ["a failure after the target", "no metric"])
def test_a_baseline_without_a_final_metric_is_no_reference_and_the_document_is_whole(broken: str) -> None:
    runs, baseline = [record(i, 1.0) for i in range(3)], [record(i, 2.0) for i in range(3)]
    baseline[1].final_metric = None
    baseline[1].failure = "out_of_memory" if broken.startswith("a failure") else None
    entry = judge(ARM, runs, baseline, PROTOCOL, "min")
    assert entry["verdict"] == "not comparable"
    json.dumps(entry, allow_nan=False)


def test_a_metric_that_is_better_than_0_is_all_of_it_better() -> None:
    found = judged([1.0, 1.1, 1.05], [2.0, 2.1, 2.0], own=[-0.1] * 3, other=[0.0] * 3)
    assert (found["metric_difference"], found["non_inferior"], found["verdict"]) == (-1.0, True, "faster")
    worse = judged([1.0, 1.1, 1.05], [2.0, 2.1, 2.0], own=[0.1] * 3, other=[0.0] * 3)
    assert worse["non_inferior"] is False
