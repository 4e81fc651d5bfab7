"""Arms of a comparison, made from the name of a rule, a policy, a plan file or a policy folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.agents.policies import POLICIES, make_policy, with_named_errors
from autotune.agents.policy import PlanningPolicy, StaticPolicy
from autotune.agents.rules import RULES, rule_plan, rule_policy
from autotune.agents.search_methods import METHODS
from autotune.campaign.comparison import GATE
from autotune.cost_model.profile import Profile
from autotune.errors import InputError, a_kind
from autotune.job import Job
from autotune.launching import canonical, launched, split, suffix
from autotune.mechanics.devices import device_kind, require_fp32_choice
from autotune.plan import Launch, Plan, PlanSpace
from autotune.records.protocol import Arm

# Arms that need no file, no folder and no other package.
OWN_ARMS = (*RULES.registered, GATE, *METHODS.registered, *POLICIES.registered)


def arm_names(given: Sequence[str]) -> list[str]:
    """Return the names of arms with the baseline first, added if it is missing.

    Raises:
        InputError: if a name is empty or repeated, or there is nothing to compare.
    """
    _require_names(given)
    if not all(given) or len({canonical(name, where="--arms") for name in given}) < len(given):
        raise InputError(
            f"arms are {','.join(given)!r}", where="--arms", allowed="different names, separated by commas"
        )
    given = [canonical(name, where="--arms") for name in given]
    names = ["baseline", *(name for name in given if name != "baseline")]
    if len(set(names) - {GATE}) < 2:
        raise InputError("there is nothing to compare with the baseline", where="--arms", allowed=_allowed())
    return names


def _require_names(given: object) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        example = given if isinstance(given, str) else "sqrt"
        raise InputError(f"arms is {given!r:.80}", where="arms", allowed=f"a list of names, as in [{example!r}]")
    for name in given:
        if not isinstance(name, str):
            allowed = "the name of a rule or a method, or the path of a plan file (plan.save) or a policy folder"
            raise InputError(f"an arm is {a_kind(name)}", where="arms", allowed=allowed)


def named_arm(name: str, job: Job, space: PlanSpace) -> Arm:
    """Return the arm of a rule, of a plan file or of the repeated baseline.

    Raises:
        InputError: if the name is unknown, or the plan does not fit the job.
    """
    if name == GATE:
        return static_arm(name, space.baseline())
    if name in RULES:
        # Find out before any search whether the rule fails.
        rule_plan(name, space)
        return Arm(name=name, policy=lambda found: rule_policy(name, found, job))
    path = Path(name)
    if path.suffix == ".json":
        plan = space.load(path, where=str(path))
        chosen = plan.launch.on_one_rank
        if job.launch != Launch() and chosen not in (Launch(), job.launch):
            raise InputError(
                f"the plan is launched with {suffix(chosen)}, and the job with {suffix(job.launch)}",
                where=str(path),
                allowed="a plan with the launch options of the job",
            )
        require_fp32_choice(chosen.fp32, device_kind(), where=str(path))
        arm = static_arm(path.stem, plan)
        return arm if chosen in (Launch(), job.launch) else replace(arm, job=launched(job, chosen))
    raise _unknown(name)


def _unknown(name: str) -> InputError:
    return InputError(f"arm {name!r} is unknown", where="--arms", allowed=_allowed(), given=name)


def require_distinct(names: Sequence[str]) -> None:
    """Refuse two arms of the same name, which is the stem of a plan file or the last part of a folder's path.

    Raises:
        InputError: if two arms have the same name.
    """
    known: dict[str, str] = {}
    for name in names:
        plain, launch = split(name, where="--arms")
        path = Path(plain)
        called = path.stem if path.suffix == ".json" else path.name if path.is_dir() else plain
        called += suffix(launch)
        if called in known:
            raise InputError(
                f"{known[called]!r} and {name!r} are both called {called!r}",
                where="--arms",
                allowed="files and folders of different names",
            )
        known[called] = name


def is_live(name: str) -> bool:
    """Return whether an arm is a policy or a policy folder, which makes decisions during a run."""
    return name in POLICIES or _is_policy_folder(name)


def needs_profile(name: str) -> bool:
    """Return whether an arm plans from the job's profile while it runs.

    Raises:
        InputError: if another package's policy cannot be loaded.
    """
    if name in POLICIES:
        return isinstance(make_policy(name), PlanningPolicy)
    return _is_policy_folder(name)


def refuse_broken_arms(names: Sequence[str]) -> None:
    """Load every rule, method, policy, plan file and policy folder among the arms, before anything is measured.

    Raises:
        PolicyFileError: if a folder is not a policy.
        PlanError: if a file is not a plan.
        InputError: if a name is unknown, or another package's entry cannot be loaded.
    """
    from autotune.agents.policy_folder import load_policy

    for name in names:
        if name in RULES:
            RULES[name]
        elif name in POLICIES:
            make_policy(name)
        elif name in METHODS:
            METHODS[name]
        elif _is_policy_folder(name):
            load_policy(Path(name))
        elif name.endswith(".json"):
            Plan.load(name)
        elif name != GATE:
            raise _unknown(name)


def live_arm(name: str, profile: Profile | None, budget_bytes: int | None) -> Arm:
    """Return the arm of a policy that makes decisions during a run.

    Args:
        name: a registered policy, such as ``planner`` or ``ppo``, or a policy folder.
        profile: the job's profile if the arm needs one; its cost is the tuning cost of the arm.
        budget_bytes: memory budget at the start of runs; ``None`` for none.

    Raises:
        PolicyFileError: if the folder is not a policy.
        InputError: if another package's policy fails.
    """
    from autotune.agents.policy_folder import load_policy

    called = name if name in POLICIES else Path(name).resolve().name
    policy = make_policy(name) if name in POLICIES else load_policy(Path(name))
    named = with_named_errors(POLICIES, name, policy)
    if profile is None:
        return Arm(name=called, policy=lambda _space: named)
    if isinstance(policy, PlanningPolicy):
        with POLICIES.errors_named(name):
            policy.begin(profile, budget_bytes)
    return Arm(name=called, policy=lambda _space: named, tuning_s=profile.seconds, tuning_steps=profile.steps)


def _is_policy_folder(name: str) -> bool:
    return name not in RULES and name not in METHODS and Path(name).is_dir()


def _allowed() -> tuple[str, ...]:
    names = dict.fromkeys((*RULES.names, GATE, *METHODS.names, *POLICIES.names))
    return (*names, "a plan file (.json)", "a policy folder")


def static_arm(name: str, plan: Plan, *, tuning_s: float = 0.0, tuning_steps: int = 0) -> Arm:
    """Return the arm of a plan."""
    return Arm(
        name=name,
        policy=lambda _space: StaticPolicy(name, plan),
        tuning_s=tuning_s,
        tuning_steps=tuning_steps,
    )
