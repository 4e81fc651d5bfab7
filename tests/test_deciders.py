"""Tests of rules, searches, the network and its file, and of PPO on a problem with a known answer."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_job
import torch
from known_problem import known_cost, known_peak
from safetensors.torch import save
from test_env import SPACE, plain_window, replay_env

from autotune import GradientStatistics, Measurement, Plan, PolicyFileError, Precision, Storage
from autotune.agents import policy_folder, ppo
from autotune.agents.optuna_search import OptunaSearch
from autotune.agents.policy import Policy
from autotune.agents.rules import PAPER_ACCUMULATION, RULES, PaperPolicy, rule_plan, rule_policy
from autotune.agents.scratch_network import Layout, LearnedPolicy, PolicyNetwork, most_likely
from autotune.agents.study_store import STORAGE_FILE
from autotune.gym.job_env import TuningEnv
from autotune.gym.observation import Observation
from autotune.measurement import Failure
from autotune.plan import PlanSpace
from autotune.simulator.random_jobs import draw_job


def observe(plan: Plan, window: Measurement, budget: int | None = None) -> Observation:
    reference = plain_window(SPACE.baseline(), 3)
    return Observation(space=SPACE, plan=plan, window=window, reference=reference, memory_budget_bytes=budget)


def known_window(budget: int) -> Callable[[Plan, int], Measurement]:
    def answer(plan: Plan, steps: int) -> Measurement:
        over = known_peak(plan) > budget and plan != SPACE.baseline()
        return Measurement(
            steps=1 if over else steps,
            samples=8 * steps,
            items=8 * steps,
            total_s=1.0,
            seconds_per_step=None if over else known_cost(plan),
            samples_per_step=None if over else 8.0,
            peak_bytes=known_peak(plan),
            memory_budget_bytes=budget,
            loss=1.0,
            failure=Failure.OVER_BUDGET if over else None,
        )

    return answer


def known_env(budget: int) -> TuningEnv:
    return replay_env(known_window(budget), memory_budget_bytes=budget, evaluate=False, max_windows=8, run_length=1e9)


def best_known(budget: int) -> float:
    grid = np.stack(np.meshgrid(*(range(size) for size in SPACE.sizes), indexing="ij"), -1).reshape(
        -1, len(SPACE.sizes)
    )
    plans = [SPACE.decode(row) for row in grid.tolist()]
    return min(known_cost(plan) for plan in plans if known_peak(plan) <= budget)


@pytest.mark.parametrize("name", RULES.registered)
def test_every_rule_makes_a_plan_of_the_space(name: str) -> None:
    plan = rule_plan(name, SPACE)
    assert SPACE.check(plan) == plan
    policy = rule_policy(name, SPACE, tiny_job.job())
    assert isinstance(policy, Policy)
    assert policy.decide(observe(plan, plain_window(plan, 3)), plan) == plan


def test_rules_match_their_names() -> None:
    plans = {name: rule.plan(SPACE) for name, rule in RULES.registered.items()}
    assert plans["baseline"] == SPACE.baseline()
    assert set(plans["uniform-bf16"].precision.values()) == {Precision.BF16}
    assert set(plans["recompute-all"].storage.values()) == {Storage.RECOMPUTE}
    assert set(plans["sqrt"].precision.values()) == {Precision.FP32}
    assert plans["paper"].accumulation_steps == PAPER_ACCUMULATION
    # Two (ceil(sqrt(3))) of the three recomputable units are kept, including the last.
    assert [name for name, choice in plans["sqrt"].storage.items() if choice is Storage.RECOMPUTE] == ["blocks.1"]


def test_paper_rule_follows_the_variance_under_adaptive_batching() -> None:
    job = tiny_job.make(batching="adaptive")
    policy = rule_policy("paper", SPACE, job)
    assert isinstance(policy, PaperPolicy)
    plan = policy.plan

    def after(variance: float) -> int:
        window = Measurement(
            steps=5, samples=40, items=40, total_s=1, gradient=GradientStatistics(norm=1.0, variance=variance)
        )
        return policy.decide(observe(plan, window), plan).accumulation_steps

    assert [after(8.0), after(8.0)] == [4, 4]
    assert after(4.0) == 2
    assert after(0.1) == 2
    assert after(1e9) == 4
    policy.reset()
    assert after(100.0) == 4


@pytest.mark.slow
def test_optuna_begins_with_the_given_plans_and_learns_from_the_rest(tmp_path: Path) -> None:
    first = [SPACE.baseline(), SPACE.leanest()]
    search = OptunaSearch(SPACE, tmp_path, 0, first)
    costs: list[float] = []
    for _ in range(120):
        plan = search.ask()
        costs.append(known_cost(plan))
        if len(costs) <= 2:
            assert plan == first[len(costs) - 1]
        search.tell(plan, observe(plan, plain_window(plan, 3)), costs[-1])
    search.close()
    generator = np.random.default_rng(0)
    drawn = [known_cost(SPACE.sample(generator)) for _ in range(500)]
    assert np.mean(costs[20:]) < np.mean(costs[2:20])
    assert np.mean(costs[20:]) < 0.8 * np.mean(drawn)


@pytest.mark.slow
def test_optuna_with_a_budget_constraint_stays_within_it_increasingly_often(tmp_path: Path) -> None:
    search = OptunaSearch(SPACE, tmp_path, 0)
    over = []
    for _ in range(200):
        plan = search.ask()
        window = known_window(300)(plan, 3)
        over.append(window.failure is not None)
        search.tell(plan, observe(plan, window, budget=300), 4.0 if over[-1] else known_cost(plan))
    search.close()
    generator = np.random.default_rng(0)
    drawn = [known_window(300)(SPACE.sample(generator), 3).failure is not None for _ in range(200)]
    assert sum(over) < 0.6 * sum(drawn)
    assert sum(over[-60:]) < 0.8 * sum(over[:60])


@pytest.mark.slow
def test_optuna_proposes_unknown_plans_until_the_space_is_exhausted(tmp_path: Path) -> None:
    space = replace(SPACE, units=SPACE.units[:3], accumulation_choices=(1, 2))
    search, known, repeats = OptunaSearch(space, tmp_path, 0), set[Plan](), 0
    size = len(space.accumulation_choices) * 2 ** (len(space.units) + len(space.recomputable))
    # A campaign ends after this many consecutive known proposals.
    while repeats < 200 and len(known) < size:
        plan = search.ask()
        repeats = repeats + 1 if plan in known else 0
        known.add(plan)
        search.tell(plan, observe(plan, plain_window(plan, 3)), known_cost(plan))
    search.close()
    assert len(known) == size


_ENDLESS = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_deciders import SPACE, observe, plain_window
from autotune.agents.optuna_search import OptunaSearch
search = OptunaSearch(SPACE, Path({folder!r}), 0)
while True:
    plan = search.ask()
    search.tell(plan, observe(plan, plain_window(plan, 3)), 1.0)
    print(sum(trial.state.name == "COMPLETE" for trial in search.study.trials), flush=True)
"""


@pytest.mark.slow
def test_optuna_results_survive_a_kill_and_running_trials_are_proposed_again(tmp_path: Path) -> None:
    code = _ENDLESS.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    told = 0
    for round_number in range(3):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told = int(line)
                if told >= 5 * (round_number + 1):
                    break
            os.kill(process.pid, signal.SIGKILL)
        search = OptunaSearch(SPACE, tmp_path, 0)
        trials = [trial for trial in search.study.trials if "plan" in trial.user_attrs]
        assert [search.ask().to_json() for _ in trials] == [trial.user_attrs["plan"] for trial in trials]
        search.close()
        states = [trial.state.name for trial in search.study.trials]
        assert states.count("COMPLETE") >= told
        assert "RUNNING" not in states
    assert (tmp_path / STORAGE_FILE).is_file()


def test_network_is_small_and_fits_models_of_any_depth() -> None:
    network = PolicyNetwork()
    assert sum(parameter.numel() for parameter in network.parameters()) <= 100_000
    for count in (1, 4, 200):
        layout = Layout((1, 2), (1, 2), count, tuple(range(count)))
        features = torch.randn(3, 18), torch.randn(3, (count + 2) * 13)
        logits, value = network(*features, layout)
        assert logits.shape == (3, sum(layout.sizes))
        assert value.shape == (3, 1)


def test_padding_never_changes_a_decision() -> None:
    network = PolicyNetwork()
    env = replay_env(plain_window, evaluate=False)
    env.reset(seed=0)
    assert env.observation is not None
    layout = Layout.of(SPACE)
    bare = most_likely(network, env.observation.arrays(), layout)
    assert most_likely(network, env.observation.arrays(40), layout) == bare
    assert SPACE.check(LearnedPolicy(network).decide(env.observation, SPACE.baseline()))


@pytest.mark.slow
def test_ppo_from_scratch_finds_a_near_optimal_plan_unlike_random_search() -> None:
    env = known_env(budget=300)
    generator = np.random.default_rng(0)
    env.reset(seed=0)
    random_play = [env.step(np.array(SPACE.encode(SPACE.sample(generator))))[1] for _ in range(300)]
    recipe = ppo.Recipe(windows=2000, rollout=32, learning_rate=1e-3, entropy=0.02)
    trained = ppo.train(env, recipe, seed=0)
    env.reset(seed=0)
    assert env.observation is not None
    plan = LearnedPolicy(trained.network).decide(env.observation, SPACE.baseline())
    cost = -env.step(np.array(SPACE.encode(plan)))[1]
    best = best_known(300) / known_cost(SPACE.baseline())
    assert cost < 1.3 * best
    assert -np.median(random_play) > 1.5 * best


def test_ppo_with_an_initial_plan_explores_near_it_and_repeats_under_a_seed() -> None:
    start = rule_plan("paper", SPACE)

    def first_plays() -> list[list[int]]:
        env = known_env(budget=300)
        played: list[list[int]] = []
        step = env.step

        def spy(action: np.ndarray) -> object:
            played.append(action.tolist())
            return step(action)

        env.step = spy  # type: ignore[method-assign,assignment]
        ppo.train(env, ppo.Recipe(windows=16), seed=1, start=start)
        return played

    plays = first_plays()
    wanted = SPACE.encode(start)
    agreement = np.mean([np.mean(np.array(play) == wanted) for play in plays[:8]])
    assert agreement > 0.7
    assert plays == first_plays()


TRAINING = policy_folder.Training(job="tiny", seed=0, windows=1, steps=1, memory_budget_bytes=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    policy_folder.save_policy(tmp_path / "policy", PolicyNetwork(), TRAINING)
    return tmp_path / "policy"


def test_policy_round_trips_without_writing_a_pickle(folder: Path) -> None:
    loaded = policy_folder.load_policy(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "manifest.json", "policy.safetensors"]
    torch.manual_seed(0)
    for name, tensor in PolicyNetwork().state_dict().items():
        assert torch.equal(tensor, loaded.network.state_dict()[name])


def edit(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


class Payload:
    def __reduce__(self) -> tuple:
        return os.system, ("touch /tmp/autotune-was-here",)


def put_weights(folder: Path, weights: bytes) -> None:
    import hashlib

    (folder / "policy.safetensors").write_bytes(weights)
    edit(folder, weights_sha256=hashlib.sha256(weights).hexdigest(), weights_bytes=len(weights))


def changed_tensors(change: Callable[[dict], None]) -> bytes:
    tensors = {name: tensor.clone() for name, tensor in PolicyNetwork().state_dict().items()}
    change(tensors)
    return save(tensors)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "no weights": lambda f: (f / "policy.safetensors").unlink(),
    "truncated manifest": lambda f: (f / "manifest.json").write_text('{"version": 1'),
    "manifest that is a list": lambda f: (f / "manifest.json").write_text("[]"),
    "manifest with a key twice": lambda f: (f / "manifest.json").write_text('{"version": 1, "version": 1}'),
    "manifest with NaN": lambda f: edit(f, width=float("nan")),
    "manifest nested without end": lambda f: (f / "manifest.json").write_text("[" * 60_000),
    "manifest too large": lambda f: (f / "manifest.json").write_text('{"a": "' + "x" * 2**17 + '"}'),
    "unknown key": lambda f: edit(f, run="rm -rf"),
    "missing key": lambda f: edit(f, width=...),
    "newer version": lambda f: edit(f, version=2),
    "newer features": lambda f: edit(f, feature_version=99),
    "other kind": lambda f: edit(f, kind="pickle"),
    "width of another network": lambda f: edit(f, width=32),
    "width without bound": lambda f: edit(f, width=10**9),
    "number as text": lambda f: edit(f, width="64"),
    "other probe": lambda f: edit(f, probe_action=[0] * 11),
    "other hash": lambda f: edit(f, weights_sha256="0" * 64),
    "truncated weights": lambda f: (f / "policy.safetensors").write_bytes(b"x"),
    "one flipped bit": lambda f: (f / "policy.safetensors").write_bytes(
        (data := bytearray((f / "policy.safetensors").read_bytes()))[:-1] + bytes([data[-1] ^ 1])
    ),
    "pickle in disguise": lambda f: put_weights(f, pickle.dumps(Payload())),
    "torch file in disguise": lambda f: (torch.save({}, f / "x"), put_weights(f, (f / "x").read_bytes())),
    "tensor that is not finite": lambda f: put_weights(
        f, changed_tensors(lambda t: t["value_head.bias"].fill_(float("nan")))
    ),
    "tensor of another dtype": lambda f: put_weights(
        f, changed_tensors(lambda t: t.update({"value_head.bias": t["value_head.bias"].double()}))
    ),
    "tensor of another shape": lambda f: put_weights(
        f, changed_tensors(lambda t: t.update({"value_head.bias": torch.zeros(2)}))
    ),
    "tensor too many": lambda f: put_weights(f, changed_tensors(lambda t: t.update(extra=torch.zeros(1)))),
    "tensor too few": lambda f: put_weights(f, changed_tensors(lambda t: t.pop("value_head.bias"))),
    "link": lambda f: ((f / "policy.safetensors").rename(f / "w"), (f / "policy.safetensors").symlink_to(f / "w")),
    "folder in place of weights": lambda f: (
        (f / "policy.safetensors").unlink(),
        (f / "policy.safetensors").mkdir(),
    ),
    "pipe": lambda f: ((f / "manifest.json").unlink(), os.mkfifo(f / "manifest.json")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_or_hostile_policy_gives_one_clear_error(case: str, folder: Path) -> None:
    HOSTILE[case](folder)
    with pytest.raises(PolicyFileError, match=r"manifest\.json|policy\.safetensors|probe") as caught:
        policy_folder.load_policy(folder)
    assert "\n" not in str(caught.value)
    assert not Path("/tmp/autotune-was-here").exists()


def test_random_damage_never_loads_as_different_weights(folder: Path) -> None:
    generator = np.random.default_rng(0)
    files = {name: (folder / name).read_bytes() for name in ("manifest.json", "policy.safetensors")}
    original = policy_folder.load_policy(folder).network.state_dict()
    refused = 0
    for _ in range(300):
        name = ("manifest.json", "policy.safetensors")[generator.integers(2)]
        data = bytearray(files[name])
        for position in generator.integers(len(data), size=generator.integers(1, 4)):
            data[position] = generator.integers(256)
        (folder / name).write_bytes(data)
        try:
            loaded = policy_folder.load_policy(folder).network.state_dict()
        except PolicyFileError:
            refused += 1
        else:
            assert all(torch.equal(tensor, loaded[key]) for key, tensor in original.items())
        (folder / name).write_bytes(files[name])
    assert refused > 200


def test_policy_folder_can_be_an_arm(folder: Path) -> None:
    from autotune.campaign.arms import live_arm, needs_profile

    profile = draw_job(np.random.default_rng(0), depth=(2, 2)).profile
    assert needs_profile(str(folder))
    arm = live_arm(str(folder), profile, None)
    assert arm.name == folder.name
    assert isinstance(arm.policy(SPACE), LearnedPolicy)


def test_space_round_trips_through_the_layout() -> None:
    assert Layout.of(SPACE).sizes == SPACE.sizes
    assert isinstance(SPACE, PlanSpace)
