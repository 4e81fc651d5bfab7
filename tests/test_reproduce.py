"""Tests of reproducing the paper's tables: printed numbers, curve analysis and real tiny tables."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import public_folders
import pytest
import tiny_job
import torch

import autotune
from autotune.catalog import load_job
from autotune.cli.main import run
from autotune.cost_model.paper_equations import cycles_to_double, efficiency_after, net_speedup
from autotune.cost_model.time_model import seconds_by_operation, summed_seconds
from autotune.engines.torch_engine import TorchEngine
from autotune.errors import InputError, JobError
from autotune.io.progress import Silent
from autotune.optimizers import KINDS
from autotune.paper import experiments as experiments_module
from autotune.paper import paper_numbers as paper
from autotune.paper.error_analysis import early_share, gain_shares, kind_gains
from autotune.paper.experiments import CONVOLUTION, SCALES, TRANSFORMER, Experiment
from autotune.paper.rows import TableRow, over
from autotune.paper.table_3_ablation import COMPONENTS, _length_note, component_arms, component_plans
from autotune.paper.table_comparisons import Campaign, missed, rule_arm, samples_needed, summarised
from autotune.paper.tables_1_2_efficiency import tuned_arm
from autotune.plan import Precision, Storage
from autotune.profiling.operator_times import COMPUTE, MEMORY
from autotune.profiling.profiler import ProfilerOptions
from autotune.profiling.profiler import profile as lean_profile
from autotune.records.journal import Journal
from autotune.records.protocol import paired_seeds
from autotune.records.run_directory import RunDirectory
from autotune.simulator.random_jobs import draw_job


def test_relative_numbers_of_the_paper_follow_from_its_absolute_ones():
    """Table I prints -26.2 %, -25.6 %, +27.4 %; Table II -23.8 %, -25.0 %, +27.8 %."""
    printed = [(-26.2, -25.6, 27.4), (-23.8, -25.0, 27.8)]
    for table, expected in zip((paper.TABLE_1, paper.TABLE_2), printed, strict=True):
        changes = [100 * (pair.optimized / pair.baseline - 1) for pair in table[:3]]
        assert changes == pytest.approx(expected, abs=0.06)


def test_ablation_of_the_paper_ends_where_its_table_begins_and_each_row_is_faster():
    times = [component.minutes for component in paper.TABLE_3]
    assert times == sorted(times, reverse=True)
    assert (times[0], times[-1]) == (paper.TABLE_1[0].baseline, paper.TABLE_1[0].optimized)
    assert [component.name.lower().split()[0] for component in paper.TABLE_3] == ["baseline", "+", "+", "+", "+"]


def test_scaling_efficiencies_of_the_paper_follow_from_its_throughputs_up_to_rounding():
    for line in paper.TABLE_4:
        assert 100 * line.baseline / (line.ranks * 1240) == pytest.approx(line.baseline_percent, abs=0.1)
        assert 100 * line.optimized / (line.ranks * 1580) == pytest.approx(line.optimized_percent, abs=0.1)


def test_closing_equations_give_all_numbers_of_the_paper_except_the_wrong_one():
    assert net_speedup(1.42, 0.12) == pytest.approx(1.27, abs=0.005)
    assert efficiency_after(3, 1.26) == pytest.approx(1.26**3)
    months = paper.CYCLE_MONTHS * cycles_to_double(1.26)
    assert months == pytest.approx(15.0, abs=0.01)
    assert abs(months - paper.DOUBLING.value) > 0.1
    assert paper.CYCLE_MONTHS * cycles_to_double(1.2) == pytest.approx(19, abs=0.05)
    assert cycles_to_double(1.0) is None
    assert cycles_to_double(0.9) is None
    assert efficiency_after(cycles_to_double(1.4), 1.4) == pytest.approx(2)


def test_ratio_of_a_row_is_missing_if_one_number_is_missing():
    assert TableRow("m", "c", "u", 1.0, paper=4.0).to_json()["ratio"] == 0.25
    assert TableRow("m", "c", "u", None, paper=4.0).to_json()["ratio"] is None
    assert TableRow("m", "c", "u", 4.0).to_json()["ratio"] is None
    assert over(None, 2.0) is None
    assert over(1.0, None) is None


def entry(name: str, curve: list[tuple[float, int, float]], reached: bool = True) -> dict:
    time_s = next((seconds for seconds, _, metric in curve if metric <= 1.0), None) if reached else None
    return {
        "name": name,
        "runs": [
            {
                "reached": reached,
                "time_to_target_s": time_s,
                "curve": curve,
                "peak_bytes": 10,
                "throughput": 5.0,
                "final_metric": curve[-1][2],
                "failure": None,
            }
        ],
    }


SLOW = [(0.0, 0, 5.0), (5.0, 50, 3.0), (10.0, 100, 1.0), (12.0, 120, 0.8)]


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        # The run is twice as fast throughout, so half of the gain lies in the first half of the baseline's time.
        ([(0.0, 0, 5.0), (2.5, 50, 3.0), (5.0, 100, 1.0)], 0.5),
        # All of the gain is early.
        ([(0.0, 0, 5.0), (1.0, 50, 3.0), (6.0, 100, 1.0)], 1.0),
        # The run is slower at first, so the late half gains more than the total.
        ([(0.0, 0, 5.0), (6.0, 50, 3.0), (8.0, 100, 1.0)], -0.5),
        # Nothing is gained.
        (SLOW, None),
    ],
)
def test_early_share_is_computed_from_the_curves(curve, expected):
    document = {"metric": {"goal": "min"}, "baseline": "b", "arms": [entry("b", SLOW), entry("a", curve)]}
    assert early_share(document, "a") == (None if expected is None else pytest.approx(expected))


def test_early_share_is_unknown_for_runs_that_missed_the_target():
    document = {"metric": {"goal": "min"}, "baseline": "b", "arms": [entry("b", SLOW), entry("a", SLOW, False)]}
    assert early_share(document, "a") is None
    assert summarised(document, "a").time_s is None
    assert summarised(document, "a").problem == "1 of 1 runs did not reach the target"
    first = document["arms"][0]["runs"][0]
    assert samples_needed(first) == 100


def test_shares_of_operations_add_up_and_costs_are_negative():
    shares = gain_shares({"forward": 4.0, "backward": 8.0, "x": 1.0}, {"forward": 2.0, "backward": 4.0, "x": 2.0})
    assert shares == pytest.approx({"forward": 0.4, "backward": 0.8, "x": -0.2})
    assert gain_shares({"forward": 1.0}, {"forward": 1.0}) is None


def cell(kind: str, bound: str, seconds: float) -> dict:
    return {"kind": kind, "bound": bound, "measured_s": seconds, "predicted_s": 0.0, "calls": 1.0}


def test_gains_of_operators_are_by_the_bound_that_their_kind_has_in_the_baseline():
    baseline = [cell("matrix products", COMPUTE, 7.0), cell("matrix products", MEMORY, 1.0)]
    baseline += [cell("copies and conversions", MEMORY, 4.0)]
    # In 16 bits, the same products are memory-bound; a step of the paper has two batches.
    paper = [cell("matrix products", MEMORY, 4.0), cell("copies and conversions", MEMORY, 4.0)]
    found = kind_gains({"baseline": baseline, "paper": paper}, 2)
    assert found["kinds"]["matrix products"] == pytest.approx(6 / 8)
    assert found["bounds"] == pytest.approx({COMPUTE: 6 / 8, MEMORY: 2 / 8})
    assert kind_gains({"baseline": paper, "paper": baseline}, 1) is None


def test_seconds_by_operation_add_up_to_the_step():
    profile = draw_job(np.random.default_rng(0), depth=(4, 4)).profile
    generator = np.random.default_rng(1)
    for _ in range(10):
        plan = profile.space.sample(generator)
        found = seconds_by_operation(profile, plan)
        assert set(found) == {"forward", "backward", "optimizer"}
        assert sum(found.values()) == pytest.approx(summed_seconds(profile, plan), rel=1e-12)


def test_each_ablation_row_adds_one_component():
    engine = TorchEngine(tiny_job.make())
    plans = component_plans(engine.space)
    engine.close()
    assert tuple(plans) == COMPONENTS
    assert [plan.accumulation_steps for plan in plans.values()] == [1, 4, 4, 4, 4]
    assert [Precision.FP32 in plan.precision.values() for plan in plans.values()] == [True, True, False, False, False]
    recomputed = [sum(choice is Storage.RECOMPUTE for choice in plan.storage.values()) for plan in plans.values()]
    assert recomputed == [0, 0, 0, 0, 1]


def test_each_scale_has_a_job_per_architecture_and_small_jobs_need_no_data_folder():
    assert {tuple(sorted(tasks)) for tasks in SCALES.values()} == {(CONVOLUTION, TRANSFORMER)}
    for tasks in SCALES.values():
        for task in tasks.values():
            assert task.job.schedule is not None
            assert task.constant.schedule is None
    batch = next(SCALES["cpu"][TRANSFORMER].job.batches(0))
    assert batch.shape[1] - 1 == SCALES["cpu"][TRANSFORMER].items
    assert SCALES["cpu"][CONVOLUTION].job.data_sources is not None


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace both tasks by a network that trains in a second, and look for the peak rate in small products."""
    monkeypatch.setattr("autotune.mechanics.flops._SIDES", (128, 256))
    reference = f"{Path(tiny_job.__file__)}:job"
    tasks = {
        architecture: Experiment(
            architecture=architecture,
            reference=reference,
            items=tiny_job.LENGTH,
            item_unit="bytes/s",
            quality_unit="perplexity of bytes",
            quality=math.exp,
            at_most=0.5,
        )
        for architecture in (CONVOLUTION, TRANSFORMER)
    }
    monkeypatch.setattr(experiments_module, "SCALES", {"cpu": tasks, "paper": SCALES["paper"]})
    assert load_job(reference).name == "tiny"


def test_only_the_recipe_of_the_paper_has_a_schedule(tiny: None):
    task = experiments_module.SCALES["cpu"][TRANSFORMER]
    space = TorchEngine(task.job).space
    profile = lean_profile(task.job, device_name="here", options=ProfilerOptions.lean())
    arms = [rule_arm("baseline", task.constant), rule_arm("paper", task.job), tuned_arm(task, profile, 10**9)]
    assert [arm.job.schedule is None for arm in arms] == [True, False, True]
    assert [arm.job.schedule is None for arm in component_arms(task, space)] == [True, True, True, False, False]


@pytest.mark.slow
def test_efficiency_table_is_measured_with_real_steps(tiny: None, tmp_path: Path):
    document = autotune.reproduce("table1", scale="cpu", seeds=2, runs_dir=tmp_path)
    rows = document["rows"]
    assert [row["metric"] for row in rows[::3]] == [pair.metric for pair in paper.TABLE_1]
    assert {row["configuration"] for row in rows} == {"baseline", "paper", "ppo"}
    for row in rows:
        assert row["ours"] > 0
        assert row["ratio"] == pytest.approx(row["ours"] / row["paper"])
        assert (row["our_change"] is None) == (row["configuration"] == "baseline")
    utilisation = [row["ours"] for row in rows if row["metric"] == paper.UTILISATION]
    throughput = [row["ours"] for row in rows if row["metric"] == paper.THROUGHPUT]
    assert all(share < 100 for share in utilisation)
    assert [share / utilisation[0] for share in utilisation] == pytest.approx(
        [rate / throughput[0] for rate in throughput]
    )
    assert len(document["held"]) == 2
    for held in document["held"]:
        if held["time_ratio"] is not None:
            assert held["samples_ratio"] * held["seconds_per_sample_ratio"] == pytest.approx(held["time_ratio"])
    run = Path(document["run"])
    assert json.loads((run / "reproduction.json").read_text()) == document
    assert json.loads((run / "config.json").read_text())["asked"]["table"] == "table1"
    plans = json.loads((run / "comparison-tiny.json").read_text())["arms"]
    assert [arm["name"] for arm in plans] == ["baseline", "paper", "ppo"]


# Warnings of the compiler are not ours.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ablation_contains_every_arm_and_prints_its_table(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["reproduce", "table3", "--scale", "cpu", "--seeds", "2", "--runs-dir", str(tmp_path)]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    for name in (*COMPONENTS, "baseline+compile", "baseline+sgd", "ZeRO stage 3"):
        assert name in shown
    assert "2 seeds are an indication, not a claim" in " ".join(shown.split())
    document = json.loads(next(tmp_path.glob("*-reproduce-table3-*/reproduction.json")).read_text())
    papers = [row for row in document["rows"] if row["source"]]
    assert [row["configuration"] for row in papers] == list(COMPONENTS) * 3
    assert all(row["paper"] is not None for row in papers)
    changed = [row for row in document["rows"] if row["metric"] == "time to target, one choice changed"]
    choices = [row["configuration"].partition("=")[0] for row in changed]
    assert choices == ["baseline", *(f"baseline+{name}" for name in sorted(KINDS)), "baseline+compile"]
    assert all((row["ours"] is None) == bool(row["note"]) for row in changed)
    stages = [row for row in document["rows"] if row["metric"] == "peak memory of a rank"]
    assert [row["our_change"] for row in stages[:1]] == [None]
    assert len(stages) == 4
    assert all(row["ours"] > 0 for row in stages)


@pytest.mark.parametrize(("rate", "arrives"), [(3e-3, True), (1e-7, False)])
def test_runs_are_lengthened_until_every_arm_arrives_or_to_the_cap(
    rate: float, arrives: bool, tiny: None, tmp_path: Path
):
    task = experiments_module.SCALES["cpu"][TRANSFORMER]
    slow = replace(task.constant, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate))
    arms = [rule_arm("baseline", task.constant), replace(rule_arm("baseline", task.constant), name="slow", job=slow)]

    def raced(longest: int) -> dict:
        request = RunDirectory.create(tmp_path, "reproduce", f"table{longest}", {})
        with request as run:
            campaign = Campaign(run=run, journal=Journal(), seeds=paired_seeds(2), reporter=Silent())
            return campaign.race(task, arms, None, longest=longest)

    once, longer = raced(1), raced(4)
    assert missed(once) == ["slow"]
    assert missed(longer) == ([] if arrives else ["slow"])
    ratio = longer["horizon_samples"] / once["horizon_samples"]
    assert ratio in (2, 4) if arrives else ratio == 4
    assert ("every seed" in _length_note(longer)) == arrives
    assert ("the cap: slow did not always arrive" in _length_note(longer)) != arrives
    assert [run["samples"] >= longer["horizon_samples"] for arm in longer["arms"] for run in arm["runs"]] == [True] * 4


def test_interrupted_reproduction_resumes_from_its_journal(tiny: None, tmp_path: Path):
    document = autotune.reproduce("table1", scale="cpu", seeds=2, runs_dir=tmp_path)
    folder = Path(document["run"])
    assert (folder / "reproduction.png").stat().st_size > 10_000
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        logged = dict(database.execute("select key, value from metrics").fetchall())
        names = [name for (name,) in database.execute("select name from runs")]
    assert names == ["reproduce table1"]
    for row in document["rows"]:
        if row["ours"] is not None:
            assert logged[re.sub(r"[^\w\-. :/]", "-", f"{row['metric']} of {row['configuration']}")] == row["ours"]
    (folder / "reproduction.json").unlink()
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-2]))
    again = autotune.resume(folder)
    assert len(journal.read_bytes().splitlines()) == len(lines)
    # The first seed's runs were reused, with identical times.
    for first, second in zip(document["comparison"]["arms"], again["comparison"]["arms"], strict=True):
        assert first["runs"][0] == second["runs"][0]
    assert autotune.resume(folder) == json.loads((folder / "reproduction.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table9", "--scale", "cpu"], "allowed: table1, table2, table3, table4, error-analysis"),
        (["table1", "--scale", "huge"], "allowed: cpu, paper"),
        (["table1", "--scale", "cpu", "--seeds", "1"], "at least 2"),
        (["table1"], "a folder, by --data or in the environment"),
        (["table1", "--data", "nowhere"], "'nowhere' is not a folder"),
    ],
)
def test_invalid_input_is_one_line_and_nothing_is_written(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)
    assert run(["reproduce", *arguments, "--runs-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_folder_without_the_expected_files_is_rejected_before_anything_is_written(tmp_path: Path):
    public_folders.wikitext(tmp_path / "data")
    with pytest.raises(JobError, match=r"contains wikitext-2-raw \(allowed: cifar-10-batches-py/.data_batch_1,"):
        autotune.reproduce("table1", data=tmp_path / "data", runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_unknown_scale_is_rejected():
    with pytest.raises(InputError, match="scale is 'x'"):
        experiments_module.experiments_of("x")


@pytest.mark.slow
def test_two_ranks_are_measured_with_their_communication(tiny: None, tmp_path: Path, monkeypatch):
    from autotune.paper import paper_tables

    monkeypatch.setattr(paper_tables, "RANKS", (1, 2))
    document = autotune.reproduce("table4", scale="cpu", seeds=2, runs_dir=tmp_path)
    shares = {row["configuration"]: row["ours"] for row in document["rows"] if row["metric"] == "communication"}
    assert set(shares) == {"baseline, 1 rank", "baseline, 2 ranks", "paper, 1 rank", "paper, 2 ranks"}
    assert all(0 < share < 100 for share in shares.values())
    seen = document["ranks"]
    assert seen["baseline-2"]["collectives"] >= 1
    efficiency = next(row for row in document["rows"] if row["configuration"] == "paper, 1 rank")
    assert efficiency["paper"] == 1580
    alone = next(row["ours"] for row in document["rows"] if row["metric"] == "scaling efficiency")
    assert alone == pytest.approx(100)


@pytest.mark.slow
def test_error_analysis_has_phases_operations_and_architectures(tiny: None, tmp_path: Path):
    document = autotune.reproduce("error-analysis", scale="cpu", seeds=2, runs_dir=tmp_path)
    for architecture in (CONVOLUTION, TRANSFORMER):
        rows = {row["metric"]: row for row in document["rows"] if row["configuration"] == architecture}
        parts = [rows[name]["ours"] for name in ("forward", "backward", "optimizer", "communication")]
        if None not in parts:
            assert sum(parts) == pytest.approx(100)
        halves = [rows[f"{name} half of training"]["ours"] for name in ("early", "late")]
        if None not in halves:
            assert sum(halves) == pytest.approx(100)
        net = rows["net speed-up (21)"]["ours"]
        gain, overhead = (rows[f"{name} (21)"]["ours"] for name in ("throughput gain", "recomputation overhead"))
        assert net == pytest.approx(net_speedup(gain, overhead))
        bounds = [rows[f"{bound}-bound operators"]["ours"] for bound in ("memory", "compute")]
        kinds = [row["ours"] for name, row in rows.items() if name.startswith("operators: ")]
        if None not in bounds:
            assert sum(bounds) == pytest.approx(100)
            assert sum(kinds) == pytest.approx(100)
        assert rows["memory-bound operators"]["paper"] == 22
    assert any("T_cycle, undefined" in note for note in document["notes"])
