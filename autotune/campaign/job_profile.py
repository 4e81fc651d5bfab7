"""Profile of a campaign's job: measuring it, checking the budget against it, and writing it to the run directory."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.agents.search_methods import METHODS
from autotune.campaign.arms import needs_profile
from autotune.campaign.setup import Campaign
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import require_feasible
from autotune.engines.registry import ENGINES
from autotune.errors import InputError
from autotune.mechanics.devices import device_kind, is_accelerator
from autotune.mechanics.known_precisions import named
from autotune.mechanics.precision import useful_precisions
from autotune.mechanics.storage_acts import offered
from autotune.profiling.profile_cache import Ranked, cached_profile, find_profile, profile_elsewhere, read_matching
from autotune.profiling.profiler import ProfilerOptions
from autotune.records.run_directory import PROFILE, RunDirectory


def profile_first(campaign: Campaign, names: Sequence[str]) -> Profile | None:
    """Return the profile, measured before an engine is opened, if the engine would occupy memory that profiling needs.

    Returns:
        ``None`` if :func:`profile_for` can measure it later, or no method or arm uses it.
    """
    if campaign.ranks is not None or is_accelerator(device_kind()):
        return profile_for(campaign, names)
    return None


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


def profile_for(campaign: Campaign, names: Sequence[str]) -> Profile | None:
    """Return the job's profile, cached or newly measured; ``None`` if no method or arm uses it.

    Args:
        campaign: the campaign.
        names: methods, or names of arms.
    """
    if not any_needs_profile(campaign, names):
        return None
    if campaign.ranks is not None and not ENGINES[campaign.ranks.engine].has_profile:
        needing = [name for name in names if needs_profile(name) or (name in METHODS and METHODS[name].needs_profile)]
        others = [name for name, entry in METHODS.registered.items() if not entry.needs_profile]
        raise InputError(
            f"--engine {campaign.ranks.engine} cannot be combined with {', '.join(needing)}: it has no profile",
            allowed=f"methods and arms that need none, such as {', '.join(others)}",
        )
    return measured_profile(campaign)


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
