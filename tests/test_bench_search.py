"""Tests of the search benchmark: cost curves of real searches and the verdicts of its document."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_job

from autotune import InputError, Measurement, Plan
from autotune.agents.rules import rule_plan
from autotune.agents.search_methods import METHODS, PlanningMethod
from autotune.bench import bench_search as bench
from autotune.bench import search_judging as judging
from autotune.cli.main import run
from autotune.engines.tuning_windows import WINDOW_STEPS, make_engine
from autotune.records.run_directory import benchmark_folder

STEPS, REPETITIONS, BUDGET = 50, 2, "80%"


@dataclass(frozen=True)
class Bench:
    runs: Path
    shown: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    runs, shown = tmp_path_factory.mktemp("search"), io.StringIO()
    options = {"memory-budget": BUDGET, "steps": STEPS, "repetitions": REPETITIONS, "rounds": 2, "runs-dir": runs}
    command = ["bench", "search", str(Path(tiny_job.__file__)), "--profile-seconds", "0.1"]
    with contextlib.redirect_stdout(shown):
        assert run([*command, *(str(part) for name, value in options.items() for part in (f"--{name}", value))]) == 0
    return Bench(runs, shown.getvalue())


@pytest.fixture(scope="module")
def document(ran: Bench) -> dict:
    return json.loads((benchmark_folder(ran.runs) / "search-tiny.json").read_text())


def courses_of(document: dict) -> list[tuple[str, int, list[dict]]]:
    return [
        (name, number, curve)
        for name, method in document["methods"].items()
        for number, curve in enumerate(method["curves"])
    ]


@pytest.mark.slow
def test_document_has_the_documented_keys(document: dict) -> None:
    assert {key: document[key] for key in ("version", "benchmark", "job", "steps", "seeds")} == {
        "version": 1,
        "benchmark": "search",
        "job": "tiny",
        "steps": STEPS,
        "seeds": [0, 1],
    }
    assert set(document["methods"]) == set(bench.METHODS)
    for method in document["methods"].values():
        assert set(method) == {"steps", "seconds", "regret_frac", "failures", "curves"}
        for unit in ("steps", "seconds"):
            assert len(method[unit]["values"]) == len(method[unit]["limits"]) == 2
            assert (method[unit]["median"] is None) == (method[unit]["more_than"] is not None)
    assert set(document["planner_against"]) == {"optuna-cold", "optuna-warm"}
    assert set(document["claim"]) == {"tenth_of_cold", "fewer_than_warm"}
    assert "1/10 of cold Optuna's steps" in judging.lines(document)[0]


@pytest.mark.slow
def test_curves_rise_in_cost_and_fall_in_measured_time(document: dict) -> None:
    for name, _, curve in courses_of(document):
        for before, after in itertools.pairwise(curve):
            assert before["steps"] <= after["steps"], name
            assert before["seconds"] <= after["seconds"], name
        windows = [point["window_seconds_per_sample"] for point in curve if not point["chosen"]]
        assert windows == sorted(windows, reverse=True)
        assert len(set(windows)) == len(windows)
        assert [point["chosen"] for point in curve].count(True) == 1
        assert curve[-1]["chosen"]


@pytest.mark.slow
def test_search_keeps_its_budget_and_pays_for_its_profile(document: dict) -> None:
    for name, number, curve in courses_of(document):
        found = document["profiles"][number]
        # Every method first pays for the references: the baseline, and for a search the leanest plan, which fits.
        references = WINDOW_STEPS + 1
        method = METHODS[bench.METHODS[name][0]]
        if not isinstance(method, PlanningMethod):
            references += WINDOW_STEPS
            assert curve[0]["steps"] == references
            curve = curve[1:]
        if not method.needs_profile:
            assert curve[-1]["steps"] <= STEPS
            continue
        assert found["steps"] > 0
        for point in curve:
            assert point["steps"] > found["steps"] + references
            assert point["seconds"] > found["seconds"]
        if name == "optuna-prices":
            assert curve[-1]["steps"] <= STEPS + found["steps"]
            assert document["methods"][name]["steps"]["limits"][number] == STEPS + found["steps"]


@pytest.mark.slow
def test_plan_over_budget_never_counts_and_best_plan_is_the_minimum(document: dict) -> None:
    plans = document["plans"]
    fitting = [plan["seconds_per_sample"] for plan in plans if plan["fits"]]
    assert document["best_seconds_per_sample"] == min(fitting) == plans[document["best_plan"]]["seconds_per_sample"]
    for plan in plans:
        assert plan["fits"] == (plan["failure"] is None and plan["peak_bytes"] <= document["memory_budget_bytes"])
    for name, number, curve in courses_of(document):
        arrived = [
            point["steps"]
            for point in curve
            if plans[point["plan"]]["fits"] and plans[point["plan"]]["regret_frac"] <= judging.WITHIN_FRAC
        ]
        assert document["methods"][name]["steps"]["values"][number] == (arrived[0] if arrived else None)


@pytest.mark.slow
def test_only_a_warm_search_begins_with_the_hand_made_rules(ran: Bench) -> None:
    firsts = {}
    for name in ("optuna-cold", "optuna-warm"):
        (path,) = ran.runs.glob(f"*/{name}-0/trials.jsonl")
        firsts[name] = json.loads(path.read_text().splitlines()[0])["plan"]
    space = make_engine(tiny_job.job(), 0).space
    rule = rule_plan("uniform-bf16", space)
    assert Plan.from_json(firsts["optuna-warm"]) == rule
    assert Plan.from_json(firsts["optuna-cold"]) != rule


def plan_of(k: int) -> Plan:
    return Plan(accumulation_steps=k)


def window_of(seconds: float) -> Measurement:
    return Measurement(
        steps=3,
        samples=24,
        items=24,
        total_s=1.0,
        step_s=(seconds,),
        seconds_per_step=seconds,
        samples_per_step=8.0,
        peak_bytes=10,
        memory_budget_bytes=100,
        loss=1.0,
    )


def worth_of(seconds: float) -> judging.Worth:
    return judging.Worth(seconds_per_sample=seconds, halves=(seconds, seconds), window=window_of(1.0))


def course_of(method: str, *points: tuple[int, int], limit: int = 240) -> judging.SearchRun:
    return judging.SearchRun(
        method=method,
        seed=0,
        points=tuple(
            judging.Improvement(steps=steps, seconds=steps / 2, plan=plan_of(k), window_s=1.0, chosen=False)
            for steps, k in points
        ),
        limit_steps=limit,
        seconds=limit / 2,
        failure=None,
    )


WORTHS = {
    plan_of(1): worth_of(1.0),
    plan_of(2): worth_of(1.015),
    plan_of(3): worth_of(1.5),
    plan_of(4): worth_of(math.inf),
}


def test_search_that_never_reaches_the_target_gives_a_lower_bound() -> None:
    courses = [
        course_of("planner", (7, 3), (20, 2)),
        course_of("optuna-cold", (7, 3), (30, 4)),
        course_of("optuna-warm", (7, 3), (100, 4), (120, 1)),
    ]
    document = judging.judge_searches(courses, WORTHS)
    methods = document["methods"]
    assert methods["planner"]["steps"]["median"] == 20
    # A plan that exceeds the budget never counts, however fast its window was.
    assert methods["optuna-cold"]["steps"] == {"median": None, "more_than": 240, "values": [None], "limits": [240]}
    assert methods["optuna-cold"]["regret_frac"]["median"] is None
    assert methods["optuna-warm"]["seconds"]["median"] == 60
    assert methods["planner"]["regret_frac"]["median"] == pytest.approx(0.015)
    cold, warm = (document["planner_against"][name]["steps"] for name in ("optuna-cold", "optuna-warm"))
    assert (cold["ratio"], cold["at_most"]) == (pytest.approx(20 / 240), True)
    assert (warm["ratio"], warm["at_most"]) == (pytest.approx(20 / 120), False)
    assert document["claim"] == {"tenth_of_cold": True, "fewer_than_warm": True}
    assert "holds (20 against > 240)" in judging.lines({**document, "steps": 240})[0]


@pytest.mark.parametrize(
    ("planner", "cold", "claim"),
    [
        (24, None, True),
        (25, None, None),
        (24, 240, True),
        (25, 240, False),
        (None, None, False),
    ],
)
def test_claim_is_unknown_if_the_lower_bound_is_too_low(
    planner: int | None, cold: int | None, claim: bool | None
) -> None:
    def course(name: str, steps: int | None) -> judging.SearchRun:
        return course_of(name, (7, 3), *([] if steps is None else [(steps, 1)]))

    courses = [course("planner", planner), course("optuna-cold", cold), course("optuna-warm", 100)]
    assert judging.judge_searches(courses, WORTHS)["claim"]["tenth_of_cold"] is claim


@pytest.mark.parametrize(
    ("values", "median", "more_than"),
    [
        ([10, 20, 30], 20, None),
        ([10, 20, None], 20, None),
        ([10, None, None], None, 240),
        ([10, None], None, 125),
    ],
)
def test_median_is_known_if_most_repetitions_reach_the_target(
    values: list[float | None], median: float | None, more_than: float | None
) -> None:
    found = judging.spent_summary(values, [240] * len(values))
    assert (found["median"], found["more_than"]) == (median, more_than)


def test_first_window_of_a_plan_counts() -> None:
    windows = [(plan_of(k), window_of(s), steps, 1.0) for k, s, steps in ((1, 3.0, 3), (2, 2.0, 6), (1, 1.0, 9))]
    points = judging.improvements(windows, lambda _plan, window: window.seconds_per_step or math.inf)
    assert [(point.plan, point.steps) for point in points] == [(plan_of(1), 3), (plan_of(2), 6)]


def test_drift_of_the_machine_does_not_change_which_plan_is_faster() -> None:
    """Rounds run at half and twice the speed; the slower plan misses the slow ones, the last does not fit."""
    fast, slow, large = (Plan(accumulation_steps=k) for k in (1, 2, 4))
    speeds = [1.0, 2.0, 0.5, 1.0, 2.0]
    rounds = [{fast: 1.0 * speed, slow: 1.1 * speed, large: math.inf} for speed in speeds]
    rounds += [{fast: 4.0}, {fast: 4.0}, {fast: 4.0}]
    steady = judging.steadied(rounds)
    for number in range(5):
        assert steady[slow][number] / steady[fast][number] == pytest.approx(1.1)
    assert statistics.median(steady[fast]) < statistics.median(steady[slow])
    assert all(math.isinf(seconds) for seconds in steady[large])


def test_order_of_methods_changes_between_repetitions() -> None:
    orders = [bench.order_of("abcdef", number, 3) for number in range(3)]
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len({order[0] for order in orders}) == 3


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(InputError, match="at least 41"):
        bench.SearchBenchSettings(steps=40)
    with pytest.raises(InputError, match="--rounds"):
        bench.SearchBenchSettings(rounds=1)
    with pytest.raises(InputError, match="optuna-warm among them"):
        bench.SearchBenchSettings(methods=("planner", "optuna-cold"))
    with pytest.raises(InputError, match="--methods"):
        bench.SearchBenchSettings(methods=(*bench.METHODS, "magic"))
    with pytest.raises(InputError, match="--repetitions"):
        bench.SearchBenchSettings(repetitions=0)


def test_command_has_json_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "search", "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.slow
def test_command_shows_a_table_and_writes_a_figure(ran: Bench) -> None:
    assert all(name in ran.shown for name in bench.METHODS)
    assert "fewer than warm" in ran.shown
    assert (benchmark_folder(ran.runs) / "search-tiny.png").stat().st_size > 0
