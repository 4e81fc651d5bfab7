"""Tests of the policy benchmark: its document, its reference methods and invalid input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lever_gains import neutral_actions

from autotune.agents.planner_policy import Ranges
from autotune.agents.policy_folder import LeverTraining, save_levers
from autotune.agents.recipe import JobsRecipe, Recipe
from autotune.agents.shipped_network import LeverNetwork
from autotune.bench.bench_policy import bench_policy
from autotune.campaign.moving_worlds import GROUPS, ToldRises, drive, moving_tables, strengths_of
from autotune.campaign.policy_judging import BenchSettings, load_judged
from autotune.campaign.static_jobs import static_cases
from autotune.catalog import content_folder
from autotune.choices import DEFAULT_STORAGES, STORAGES, Storage
from autotune.cli.main import run
from autotune.errors import InputError, PolicyFileError, RunDirectoryError
from autotune.gym.levers import RUN_FEATURES, SIZES, Actions, Features
from autotune.gym.moving_env import MovingEnv
from autotune.io.progress import Silent
from autotune.simulator.moving_conditions import Strengths
from autotune.simulator.online_planner import Planner
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.random_jobs import draw_job

STRENGTHS = Strengths(
    noise_error=0.5,
    cost_error=0.2,
    drift=0.1,
    length=0.1,
    jitter=0.1,
    event_every=5,
    event_told=0.5,
    switch_windows=0.1,
)
RECIPE = Recipe(
    seeds=(0,),
    jobs=JobsRecipe(shallowest=2, deepest=4, windows=12),
    strengths=STRENGTHS,
    planner=PlannerSettings(rise=0.2),
)
TINY = BenchSettings(
    jobs=4,
    depth=(2, 4),
    variants=("shifted", "misjudged"),
    mechanisms=("all", "none"),
    families=("jittered",),
    lanes=16,
    evaluations=8,
    optuna_jobs=1,
    units=6,
)


def save_untrained(folder: Path) -> Path:
    torch.manual_seed(0)
    network = LeverNetwork(16)
    training = LeverTraining(
        recipe_sha256=RECIPE.sha256,
        strengths_sha256=RECIPE.strengths_sha256,
        seed=0,
        seeds=1,
        decisions=0,
        won_percent=0.0,
        won_ci95=[0.0, 0.0],
    )
    wide = np.full(len(RUN_FEATURES), 5.0)
    save_levers(folder, network, RECIPE.planner, Ranges(-wide, wide), training, "# Untrained")
    return folder


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict:
    parts: list[float] = []
    folder = save_untrained(tmp_path_factory.mktemp("bench") / "policy")

    class Noted(Silent):
        def advance(self, done: float, detail: str = "") -> None:
            parts.append(done)

    found = bench_policy(load_judged(folder), RECIPE, TINY, reporter=Noted())
    assert parts == sorted(parts)
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture(scope="module")
def env() -> MovingEnv:
    generator = np.random.default_rng(0)
    jobs = [draw_job(generator, depth=(2, 4)) for _ in range(4)]
    return MovingEnv(jobs, STRENGTHS, 16, windows=12, settings=RECIPE.planner, seed=3)


@pytest.mark.slow
def test_document_has_the_documented_keys(document: dict) -> None:
    assert {key: document[key] for key in ("version", "benchmark", "jobs", "seed")} == {
        "version": 1,
        "benchmark": "policy",
        "jobs": 4,
        "seed": 0,
    }
    assert document["strengths_sha256"] == RECIPE.strengths_sha256
    assert len(document["policy"]["weights_sha256"]) == 64
    methods = {
        "ppo",
        "ppo_wary",
        "shipped",
        "untrained",
        "planner",
        "planner_wary",
        "untrained_wary",
        "greedy",
        "exact",
        "random",
        "optuna",
    }
    for table in (document["methods"], *document["static"].values()):
        assert set(table) == methods
        for entry in table.values():
            assert {"regret_median", "regret_p95", "over_budget", "infeasible", "evaluations", "decision_s"} <= set(
                entry
            )
    assert list(document["static"]) == ["shifted", "misjudged"]
    assert document["methods"]["optuna"]["jobs"] == 1
    assert document["methods"]["optuna"]["evaluations"] == 8
    assert list(document["dynamic"]) == ["all", "none"]
    for world in document["dynamic"].values():
        assert set(world["methods"]) == {
            "best_static",
            "planner",
            "planner_no_belief",
            "planner_no_risk",
            "planner_reserve",
            "untrained",
            "period",
            "planner_assumed",
            "ppo_drawn",
            "ppo",
            "shipped",
        }
        for entry in world["methods"].values():
            assert {"won_percent", "won_ci95", "captured", "p5", "out_of_memory_per_run"} <= set(entry)
        assert {"over_period_percent", "over_period_ci95", "seeds"} <= set(world["methods"]["ppo"])
    arms = {"clairvoyant", "full_budget", "rule", "told_rate", "planner_belief", "ppo", "shipped"}
    assert set(document["families"]) == {"jittered", "all"}
    for row in document["families"].values():
        assert {*arms, "ppo_over_belief", "ci95", "out_of_memory_per_run"} == set(row)
        assert set(row["ci95"]) == {*arms, "ppo_over_belief"}
        assert all(row[name] <= row["clairvoyant"] + 1e-9 for name in arms)
        # The untrained network leaves the planner as it is.
        assert row["ppo"] == row["planner_belief"]
    assert set(document["ablation"]) == set(GROUPS)
    assert document["decision"]["units"] == 6
    assert document["decision"]["network_s"] <= document["decision"]["decision_s"]
    assert document["decision"]["needs_stable_baselines3"] is False


@pytest.mark.slow
def test_exact_solver_has_the_least_regret_which_is_zero(document: dict) -> None:
    assert document["methods"]["exact"]["regret_p95"] == 0.0
    for name, entry in document["methods"].items():
        assert entry["regret_median"] is None or entry["regret_median"] >= -1e-3, name
    assert document["static"]["shifted"]["exact"]["regret_p95"] == 0.0
    assert document["static"]["misjudged"]["exact"]["regret_p95"] > 0


@pytest.mark.slow
def test_static_conditions_leave_nothing_to_win(document: dict) -> None:
    world = document["dynamic"]["none"]
    assert world["headroom_percent"] == pytest.approx(0.0, abs=1e-6)
    assert world["methods"]["ppo"]["captured"] is None


@pytest.mark.slow
def test_untrained_policy_equals_the_planner_everywhere(document: dict) -> None:
    untimed = lambda entry: {key: value for key, value in entry.items() if not key.endswith("_s")}  # noqa: E731
    for table in (document["methods"], *document["static"].values()):
        assert (
            untimed(table["ppo"])
            == untimed(table["shipped"])
            == untimed(table["untrained"])
            == untimed(table["planner"])
        )
        assert untimed(table["ppo_wary"]) == untimed(table["untrained_wary"]) == untimed(table["planner_wary"])
    for world in document["dynamic"].values():
        methods = world["methods"]
        for name in ("untrained", "ppo", "shipped"):
            assert methods[name]["won_percent"] == 0.0
            assert methods[name]["out_of_memory_per_run"] == methods["planner"]["out_of_memory_per_run"]
    assert all(entry["won_percent"] == 0.0 for entry in document["ablation"].values())


@pytest.mark.slow
def test_no_method_beats_the_clairvoyant(document: dict) -> None:
    world = document["dynamic"]["all"]
    assert world["headroom_percent"] > 0
    for entry in world["methods"].values():
        assert entry["won_percent"] <= world["headroom_percent"] + 1e-9


def wary_when_stretched(run: Features) -> Actions:
    """Return actions that differ between lanes and windows."""
    actions = neutral_actions(len(run))
    actions[:, 0] = np.where(run[:, list(RUN_FEATURES).index("pressure")] > 0, SIZES[0] - 1, actions[:, 0])
    actions[:, 1] = np.where(run[:, list(RUN_FEATURES).index("length")] > 0, SIZES[1] - 1, actions[:, 1])
    return actions


def test_evaluation_matches_the_training_environment(env: MovingEnv) -> None:
    course, rule = env.draw(), lambda features: wary_when_stretched(features[0])
    features, done, won = env.reset(course), False, np.zeros(env.lanes)
    while not done:
        features, rewards, done = env.step(rule(features))
        won += rewards
    driven = drive(env.runs, course, RECIPE.planner, rule)
    alone = drive(env.runs, course, RECIPE.planner)
    np.testing.assert_allclose(alone.seconds, env.planner_seconds.sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(100 * (1 - driven.seconds / alone.seconds), won, atol=1e-3)


def test_exact_probability_agrees_with_many_random_draws() -> None:
    generator = np.random.default_rng(0)
    jobs = [draw_job(generator, depth=(2, 2))]
    env = MovingEnv(jobs, Strengths(length=0.1, length_windows=2, jitter=0.12), 4, windows=400, settings=RECIPE.planner)
    course = env.course
    env.runs.begin(course)
    planner = Planner(env.runs.lanes, RECIPE.planner)
    rise = np.tile(np.linspace(-0.1, 0.5, 7), (4, 1))
    rises = [ToldRises(planner, course, 2.0, exactly=exactly) for exactly in (True, False)]
    chances = [told.exceed(rise, np.zeros(4)) for told in rises]
    drawn = np.log(course.longest)
    seen = (drawn[:, :, None] > rise[:, None, :]).mean(axis=1)
    # 400 windows with a correlation time of two windows are about a hundred independent draws.
    np.testing.assert_allclose(chances[0], seen, atol=0.15)
    np.testing.assert_allclose(chances[0].mean(axis=0), seen.mean(axis=0), atol=0.06)
    np.testing.assert_allclose(chances[1], chances[0], atol=0.1)


def test_strengths_without_a_fitted_value_are_scaled() -> None:
    half, double = (strengths_of(name, STRENGTHS) for name in ("all_half", "all_double"))
    assert (half.cost_error, double.cost_error) == (0.1, 0.4)
    assert (half.event_every, double.event_every) == (10, 2)
    assert half.event_share == double.event_share == STRENGTHS.event_share
    assert strengths_of("none", STRENGTHS) == STRENGTHS.only()


def test_almost_every_run_feature_belongs_to_one_group() -> None:
    groups = {name: [g for g, prefixes in GROUPS.items() if name.startswith(prefixes)] for name in RUN_FEATURES}
    assert max(len(found) for found in groups.values()) == 1
    left = {name for name, found in groups.items() if not found}
    assert left == {"still", "switch_cost", "held", "adaptive", "k", "k_more", "once", "recomputed", "lowered", "depth"}


def test_jobs_used_in_training_are_rejected(tmp_path: Path) -> None:
    own = dataclasses.replace(RECIPE, jobs=dataclasses.replace(RECIPE.jobs, seed=10_000))
    with pytest.raises(InputError, match="draws the recipe's own jobs"):
        bench_policy(load_judged(save_untrained(tmp_path / "policy")), own, TINY)


def test_training_run_without_networks_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"has no seed-\*\.safetensors"):
        load_judged(save_untrained(tmp_path / "policy"), tmp_path)


def test_every_network_of_a_training_run_is_evaluated(tmp_path: Path) -> None:
    folder = save_untrained(tmp_path / "policy")
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}.safetensors").write_bytes((folder / "policy.safetensors").read_bytes())
    assert list(load_judged(folder, tmp_path).networks) == ["seed-0", "seed-1"]
    (tmp_path / "seed-1.safetensors").write_bytes(b"nothing")
    with pytest.raises(PolicyFileError, match="is not safetensors"):
        load_judged(folder, tmp_path)


def test_missing_policy_folder_is_rejected_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    arguments = [
        "bench",
        "policy",
        "--jobs",
        "4",
        "--policy",
        str(missing),
        "--runs-dir",
        str(tmp_path / "runs"),
        "--json",
    ]
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert str(missing) in captured.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("storages", [DEFAULT_STORAGES, STORAGES])
def test_held_out_jobs_offer_the_storages_of_the_settings(storages: tuple[Storage, ...]) -> None:
    settings = dataclasses.replace(TINY, storages=storages)
    assert {case.told.space.storages for case in static_cases(settings)} == {storages}
    moving = moving_tables(
        load_judged(content_folder("policies") / "ppo"),
        RECIPE,
        dataclasses.replace(settings, mechanisms=("none",), families=()),
        lambda _share, _title: None,
    )["dynamic"]
    assert abs(moving["none"]["methods"]["ppo"]["won_percent"]) < 1
