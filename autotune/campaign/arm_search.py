"""Arms of a comparison: rules, plan files and policies are used as they are; methods search for a plan."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import replace

from autotune.agents.policies import POLICIES
from autotune.agents.search_methods import METHODS
from autotune.budget import MemoryBudget, format_bytes
from autotune.campaign.arms import is_live, live_arm, named_arm, needs_profile, static_arm
from autotune.campaign.baselines import References
from autotune.campaign.job_profile import profile_first, profile_then
from autotune.campaign.setup import Campaign
from autotune.campaign.steps import SearchInputs, open_engine, references_of, search_plan
from autotune.cost_model.profile import Profile
from autotune.engines.engine import Engine
from autotune.errors import InputError
from autotune.launching import launched, relaunched, split, suffix
from autotune.mechanics.devices import device_kind, require_fp32_choice
from autotune.plan import Launch
from autotune.records.protocol import Arm
from autotune.records.run_directory import RunDirectory
from autotune.records.tracking import Tracker


def by_launch(campaign: Campaign, names: Sequence[str]) -> tuple[list[str], dict[Launch, list[str]]]:
    """Return the arms without launch options, and the plain names of the other arms by their launch options.

    Raises:
        InputError: if both the job and an arm have launch options, or this device cannot run an arm.
    """
    own: list[str] = []
    others: dict[Launch, list[str]] = {}
    for name in names:
        plain, launch = split(name, where="--arms")
        require_fp32_choice(launch.fp32, device_kind(), where=f"arm {name!r}")
        if launch == Launch():
            own.append(name)
        elif campaign.job.launch == Launch():
            others.setdefault(launch, []).append(plain)
        else:
            raise InputError(
                f"arm {name!r} is launched differently from the job",
                where="--arms",
                allowed=f"arms without launch options, or the job without {suffix(campaign.job.launch)}",
            )
    return own, others


def plain_arms(
    campaign: Campaign, names: Sequence[str], engine: Engine, profile: Profile | None, references: References
) -> dict[str, Arm]:
    """Return the arms that need no search, by name.

    Raises:
        InputError: if a name is unknown, or a plan does not fit the job.
    """
    arms = {}
    for name in names:
        if is_live(name):
            found = profile if needs_profile(name) else None
            arms[name] = live_arm(name, found, references.memory_budget_bytes)
        elif not is_searched(name):
            arms[name] = named_arm(name, campaign.job, engine.space)
    return arms


def searched_arms(campaign: Campaign, names: Sequence[str], inputs: SearchInputs) -> dict[str, Arm]:
    """Search for a plan with each arm that is a method; return these arms by name."""
    arms = {}
    for method in filter(is_searched, names):
        result = search_plan(campaign, method, inputs)
        inputs.run.write(f"plan-{method}.json", result.plan.to_json())
        arms[method] = static_arm(method, result.plan, tuning_s=result.tuning_s, tuning_steps=result.tuning_steps)
    return arms


def launched_arms(
    campaign: Campaign, launch: Launch, names: Sequence[str], budget: int | None, run: RunDirectory, tracker: Tracker
) -> dict[str, Arm]:
    """Return the arms that train the job with other launch options, within a budget in bytes.

    The files of their searches are written to a subfolder of the run directory.
    """
    # Free compiled objects in reference cycles before the next engine measures memory.
    gc.collect()
    campaign = replace(
        campaign,
        job=launched(campaign.job, launch),
        reference=None if campaign.reference is None else relaunched(campaign.reference, launch),
        budget=None if budget is None else MemoryBudget(size_bytes=budget),
    )
    campaign, known = profile_first(campaign, names)
    with contextlib.closing(open_engine(campaign)) as engine:
        references = references_of(campaign, engine)
        profile = profile_then(campaign, names, known, engine)
        folder = RunDirectory(run.path / f"{run.path.name}{suffix(launch)}")
        folder.path.mkdir(exist_ok=True)
        lowest = within_dips(campaign, references) if any(map(is_searched, names)) else references
        inputs = SearchInputs(engine=engine, references=lowest, profile=profile, run=folder, tracker=tracker)
        arms = plain_arms(campaign, names, engine, profile, references)
        arms |= searched_arms(campaign, names, inputs)
    behind = suffix(launch)
    return {name + behind: replace(arm, name=arm.name + behind, job=campaign.job) for name, arm in arms.items()}


def within_dips(campaign: Campaign, references: References) -> References:
    """Return the references with the budget during a dip, which static plans must meet.

    Raises:
        InputError: if the leanest plan needs more memory.
    """
    budget = references.memory_budget_bytes
    if campaign.dips is None or budget is None:
        return references
    left = int(budget * campaign.dips.share)
    least = None if references.leanest is None else references.leanest.peak_bytes
    if least is not None and least > left:
        raise InputError(
            f"a dip leaves {format_bytes(left)}, and the leanest plan needs {format_bytes(least)}",
            where="--dips",
            allowed=f"at least {format_bytes(least)}",
        )
    return replace(references, memory_budget_bytes=left)


def is_searched(name: str) -> bool:
    """Return whether the plan of an arm must be searched for."""
    return name in METHODS and name not in POLICIES
