"""Make arms from what a user names: a rule, a plan file or a policy folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.agents.policy import Policy, StaticPolicy
from autotune.agents.rules import RULES, rule_policy
from autotune.campaign.comparison import Arm
from autotune.campaign.runs import read_plan
from autotune.campaign.tuning import METHODS
from autotune.errors import InputError
from autotune.job import Job
from autotune.plan import Plan, PlanSpace

_ALLOWED = (*RULES, *METHODS, "a plan file (.json)", "a policy folder")


def arm_names(given: Sequence[str]) -> list[str]:
    """Return arms with the baseline first, added if it is missing.

    Raises:
        InputError: if a name is empty or stands twice, or nothing is left to compare.
    """
    if not all(given) or len(set(given)) < len(given):
        raise InputError(
            f"arms are {','.join(given)!r}", where="--arms", allowed="different names, separated by commas"
        )
    names = ["baseline", *(name for name in given if name != "baseline")]
    if len(names) < 2:
        raise InputError("there is nothing to compare with the baseline", where="--arms", allowed=_ALLOWED)
    return names


def named_arm(name: str, job: Job, space: PlanSpace) -> Arm:
    """Return the arm of a rule's name, of a plan file or of a policy folder.

    Raises:
        InputError: if it is none of them, or the plan does not fit the job.
    """
    if name in RULES:
        return Arm(name=name, policy=lambda found: rule_policy(name, found, job))
    path = Path(name)
    if path.suffix == ".json":
        plan = space.check(read_plan(path), where=str(path))
        return static_arm(path.stem, plan)
    if path.is_dir():
        return _policy_arm(path)
    raise InputError(
        f"arm {name!r} is unknown",
        where="--arms",
        allowed=_ALLOWED,
    )


def static_arm(name: str, plan: Plan, *, tuning_s: float = 0.0, tuning_steps: int = 0) -> Arm:
    """Return the arm of a plan."""
    return Arm(
        name=name,
        policy=lambda _space: StaticPolicy(name, plan),
        tuning_s=tuning_s,
        tuning_steps=tuning_steps,
    )


def _policy_arm(folder: Path) -> Arm:
    from autotune.agents.bundle import load_policy

    policy = load_policy(folder)

    def make(_space: PlanSpace) -> Policy:
        return policy

    return Arm(name=folder.name, policy=make)
