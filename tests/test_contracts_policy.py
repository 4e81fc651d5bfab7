"""Contract of every named policy: it follows the protocol, stays in the space and forgets a run on reset."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_job
import torch
from test_env import plain_window

from autotune import GradientStatistics, Measurement, Plan
from autotune.agents import policy_folder
from autotune.agents.policies import POLICIES, make_policy
from autotune.agents.policy import PlanningPolicy, Policy, StaticPolicy
from autotune.agents.rules import RULES, rule_policy
from autotune.agents.scratch_network import LearnedPolicy, PolicyNetwork
from autotune.cost_model.memory_model import peak_bytes
from autotune.gym.observation import Observation
from autotune.live.deciding import RecordedPolicy, SolvingPolicy
from autotune.measurement import Failure
from autotune.simulator.random_jobs import draw_job

PROFILE = draw_job(np.random.default_rng(1), depth=(2, 4)).profile
SPACE = PROFILE.space
BUDGET = int(0.8 * peak_bytes(PROFILE, SPACE.baseline()))


def _learned() -> Policy:
    torch.manual_seed(0)
    return LearnedPolicy(PolicyNetwork())


MAKERS: dict[str, Callable[[], Policy]] = {
    **{f"policy {name}": lambda name=name: make_policy(name) for name in POLICIES.names},
    **{f"rule {name}": lambda name=name: rule_policy(name, SPACE, tiny_job.job()) for name in RULES.names},
    "rule paper, adaptive": lambda: rule_policy("paper", SPACE, tiny_job.make(batching="adaptive")),
    "live exact": lambda: SolvingPolicy("exact"),
    "live greedy": lambda: SolvingPolicy("greedy"),
    "recorded": lambda: RecordedPolicy([(0, SPACE.leanest())]),
    "static": lambda: StaticPolicy("static", SPACE.leanest()),
    "learned": _learned,
}


@pytest.fixture(params=MAKERS)
def policy(request: pytest.FixtureRequest) -> Policy:
    return MAKERS[request.param]()


def begin(policy: Policy) -> Plan:
    """Return the initial plan of a run."""
    policy.reset()
    return policy.begin(PROFILE, BUDGET) if isinstance(policy, PlanningPolicy) else SPACE.baseline()


def windows(plan: Plan) -> list[Measurement]:
    """Return windows of every kind: with and without gradients, and with every failure."""
    plain = plain_window(plan, 5)
    failed = [
        Measurement(steps=1, samples=8, items=8, total_s=0.1, peak_bytes=2 * BUDGET, failure=failure)
        for failure in Failure
    ]
    noisy = Measurement(
        steps=5, samples=40, items=40, total_s=1, gradient=GradientStatistics(norm=1.0, variance=8.0, noise_scale=20.0)
    )
    return [plain, noisy, *failed, noisy, plain]


def decisions(policy: Policy) -> list[Plan]:
    plan = begin(policy)
    plans = [plan]
    for number in range(len(windows(plan))):
        window = windows(plan)[number]
        reference = plain_window(SPACE.baseline(), 3)
        observation = Observation(
            space=SPACE,
            plan=plan,
            window=window,
            reference=reference,
            memory_budget_bytes=BUDGET,
            progress=number / 20,
        )
        plan = policy.decide(observation, plan)
        plans.append(plan)
    return plans


def test_policy_has_the_members_of_the_protocol(policy: Policy) -> None:
    assert isinstance(policy, Policy)
    assert isinstance(policy.name, str)
    assert policy.name


def test_policy_proposes_plans_in_the_space_after_any_window(policy: Policy) -> None:
    for plan in decisions(policy):
        assert SPACE.check(plan) == plan


def test_policy_repeats_its_decisions_after_reset(policy: Policy) -> None:
    assert decisions(policy) == decisions(policy)


def test_policy_leaves_the_global_generators_alone(policy: Policy) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    decisions(policy)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002


@pytest.mark.parametrize("name", POLICIES.names)
def test_registered_policy_begins_with_a_plan_predicted_to_fit(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, PlanningPolicy)
    assert peak_bytes(PROFILE, policy.begin(PROFILE, BUDGET)) <= BUDGET


def test_saved_and_loaded_policy_decides_identically(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = PolicyNetwork()
    training = policy_folder.Training(job="tiny", seed=0, windows=1, steps=1, memory_budget_bytes=None)
    policy_folder.save_policy(tmp_path, network, training)
    assert decisions(policy_folder.load_policy(tmp_path)) == decisions(LearnedPolicy(network))
