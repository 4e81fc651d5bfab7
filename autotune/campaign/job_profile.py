"""Profile of a campaign's job: measuring it, checking the budget against it, and writing it to the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.agents.search_methods import METHODS
from autotune.campaign.arms import needs_profile
from autotune.campaign.setup import Campaign
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.pipeline_choice import pipelined, within
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import require_feasible
from autotune.engines.engine import Engine
from autotune.engines.registry import ENGINES
from autotune.errors import InputError
from autotune.mechanics.devices import device_kind, is_accelerator
from autotune.mechanics.known_precisions import named
from autotune.mechanics.precision import useful_precisions
from autotune.mechanics.storage_acts import offered
from autotune.pipeline import Pipeline
from autotune.profiling.profile_cache import Ranked, cached_profile, find_profile, profile_elsewhere, read_matching
from autotune.profiling.profiler import ProfilerOptions
from autotune.records.run_directory import PROFILE, RunDirectory


def profile_first(campaign: Campaign, names: Sequence[str]) -> tuple[Campaign, Profile | None]:
    """Return the profile, measured before an engine is opened, if the engine would occupy memory that profiling needs.

    Returns:
        The campaign, in which the stages of a pipeline are divided by the profile, and the profile; ``None`` if
        :func:`profile_then` can measure it later, or no method or arm uses it.
    """
    if campaign.ranks is None and not is_accelerator(device_kind()):
        return campaign, None
    found = _profile_for(campaign, names)
    if found is not None and found.pipeline and campaign.ranks is not None:
        campaign = replace(campaign, ranks=replace(campaign.ranks, mesh=found.pipeline))
    return campaign, found


def profile_then(campaign: Campaign, names: Sequence[str], known: Profile | None, engine: Engine) -> Profile | None:
    """Return the job's profile, newly measured unless it is known; ``None`` if no method or arm uses it.

    Args:
        campaign: the campaign.
        names: methods, or names of arms.
        known: the result of :func:`profile_first`.
        engine: the engine that measures plans.
    """
    found = known or _profile_for(campaign, names)
    return within(found, engine.space) if found is not None and found.pipeline else found


def any_needs_profile(campaign: Campaign, names: Sequence[str]) -> bool:
    """Return whether a method or arm uses the job's profile.

    A search that needs none otherwise needs it for choices that approximate the gradient: the profile tells for which
    units they are locked. Ranks cannot measure that.
    """
    if any(needs_profile(name) or (name in METHODS and METHODS[name].needs_profile) for name in names):
        return True
    searches = campaign.ranks is None and any(name in METHODS for name in names)
    return searches and _offers_approximate(campaign)


def _offers_approximate(campaign: Campaign) -> bool:
    """Return whether plans may choose a storage that approximates gradients, or a precision that was asked for."""
    if any(one.approximates for one in offered(campaign.job.storages)):
        return True
    # Otherwise a device's precisions need not be timed here.
    asked = any(one.asked_only for one in named() or ())
    return asked and any(one.asked_only for one in useful_precisions(device_kind()))


def _profile_for(campaign: Campaign, names: Sequence[str]) -> Profile | None:
    """Return the job's profile, cached or newly measured; ``None`` if no method or arm uses it."""
    if not any_needs_profile(campaign, names):
        return None
    ranks = campaign.ranks
    if ranks is None or ENGINES[ranks.engine].has_profile:
        return measured_profile(campaign)
    # All else is predicted plan by plan.
    pricing = [name for name in names if needs_profile(name) or (name in METHODS and METHODS[name].prices)]
    if pricing:
        others = [name for name, one in METHODS.registered.items() if not one.prices and not needs_profile(name)]
        problem = f"--engine {ranks.engine} cannot be combined with {', '.join(pricing)}"
        raise InputError(
            f"{problem}: plans of a pipeline cannot be priced at once",
            allowed=f"methods and arms that measure or predict plan by plan, such as {', '.join(others)}",
        )
    layout = ranks.whole_mesh
    assert isinstance(layout, Pipeline)
    return pipelined(measured_profile(replace(campaign, ranks=None)), layout)


def measured_profile(campaign: Campaign) -> Profile:
    """Return the job's profile, cached or newly measured."""
    campaign.reporter.stage("profile the units, once", 1)
    ranked = _ranked(campaign)
    if campaign.run is not None and (own := read_matching(campaign.run.path / PROFILE, campaign.job, ranked)):
        # A resumed campaign requests the same plans only from the profile with which it began.
        return own
    lean = campaign.request.lean
    if ranked is None and campaign.reference is not None and find_profile(campaign.job, campaign.runs) is None:
        profile_elsewhere(campaign.reference, campaign.runs, lean=lean)
    profile, _, _ = cached_profile(
        campaign.job,
        campaign.runs,
        options=ProfilerOptions.lean() if lean else ProfilerOptions(),
        on_progress=campaign.reporter.advance,
        ranked=ranked,
    )
    return profile


def refuse_small_budget(campaign: Campaign) -> None:
    """Refuse a budget that a cached profile shows to be too small, before anything runs.

    Raises:
        BudgetError: if no plan fits the budget.
    """
    if campaign.budget is None:
        return
    profile = find_profile(campaign.job, campaign.runs, _ranked(campaign))
    if profile is not None:
        require_feasible(profile, campaign.budget.resolve(peak_bytes(profile, profile.space.baseline())))


def keep_profile(campaign: Campaign, run: RunDirectory, profile: Profile | None) -> None:
    """Write the profile to the run directory for the report; if the campaign used none, write a cached one."""
    # Looking for a cached profile builds the job, which is wasted if there are no profiles.
    if profile is None and (campaign.runs / "profiles").is_dir():
        profile = find_profile(campaign.job, campaign.runs, _ranked(campaign))
    if profile is not None:
        run.write(PROFILE, profile.to_json())


def _ranked(campaign: Campaign) -> Ranked | None:
    if campaign.ranks is None:
        return None
    assert campaign.reference is not None
    return Ranked(campaign.reference, campaign.ranks)
