"""The run directory of a comparison or a tuning, read and validated.

Reports use only these files: nothing is measured, and no job is loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cost_model.profile import Profile
from autotune.errors import InputError, RunDirectoryError
from autotune.plan import Plan
from autotune.profiling.profile_cache import read_profile
from autotune.records.results import result_name, result_of, trials_of
from autotune.records.run_directory import PROFILE, RunDirectory
from autotune.records.run_documents import CompareConfig, Environment, TuneConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRun:
    """A campaign, as its run directory describes it.

    Attributes:
        folder: the run directory.
        config: the recorded request.
        environment: machine, versions and data.
        document: ``comparison.json`` or ``tuned.json``.
        trials: records of the windows measured to find plans, in order.
        plan: the plan to launch with; ``None`` if no arm that fits has one.
        profile: profile of the job; ``None`` if it was never profiled.
    """

    folder: Path
    config: TuneConfig | CompareConfig
    environment: Environment
    document: Mapping[str, Any]
    trials: tuple[Mapping[str, Any], ...]
    plan: Plan | None
    profile: Profile | None

    @property
    def job(self) -> str:
        """Return the job's name."""
        return self.config.job

    @property
    def to_profile(self) -> str:
        """Return how to profile the job; a job that was given as an object has no reference for the command line."""
        reference = self.config.asked.job
        return (
            "autotune.tune(job, method='exact')" if reference is None else f"autotune profile {shlex.quote(reference)}"
        )

    @property
    def compared(self) -> bool:
        """Return whether the campaign is a comparison."""
        return isinstance(self.config, CompareConfig)

    @property
    def budget_bytes(self) -> int | None:
        """Return the memory budget; ``None`` without one."""
        found = self.document if self.compared else self.document["measured"]
        budget: int | None = found["memory_budget_bytes"]
        return budget


def read_campaign(folder: Path, profile: Path | None = None) -> CampaignRun:
    """Read the run directory of a comparison or a tuning.

    Args:
        folder: the run directory.
        profile: a profile of the job; ``None`` for the campaign's own, if it has one.

    Raises:
        RunDirectoryError: if it is not a campaign, is not finished, or has a damaged file.
        ProfileError: if the profile is damaged.
        InputError: if the profile belongs to another job.
    """
    run = RunDirectory.open(folder)
    config = run.config
    if not isinstance(config, TuneConfig | CompareConfig):
        raise RunDirectoryError(
            f"a run of {config.verb!r} has no report", where=str(folder), allowed="attach, tune, compare, demo"
        )
    name = result_name(config, str(folder))
    if not run.has(name):
        raise RunDirectoryError(
            f"is not finished: {name} is missing",
            where=str(folder),
            allowed=f"autotune resume {shlex.quote(str(folder))} first",
        )
    return CampaignRun(
        folder=folder,
        config=config,
        environment=run.environment,
        document=result_of(run, config),
        trials=trials_of(run),
        plan=_plan(run),
        profile=_profile(folder, config.job, profile),
    )


def _plan(run: RunDirectory) -> Plan | None:
    path = run.path / "plan.json"
    return Plan.from_json(run.read("plan.json"), where=str(path)) if run.has("plan.json") else None


def _profile(folder: Path, job: str, given: Path | None) -> Profile | None:
    path = given or folder / PROFILE
    if given is None and not path.is_file():
        return None
    found = read_profile(path)
    if found.job != job:
        raise InputError(f"is a profile of {found.job!r}", where=str(path), allowed=f"a profile of {job!r}")
    return found


def arm_named(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an arm of ``comparison.json``."""
    found: Mapping[str, Any] = next(arm for arm in document["arms"] if arm["name"] == name)
    return found


def launched(arm: Mapping[str, Any]) -> Plan:
    """Return the plan that an arm's runs start with."""
    plans: Sequence[Mapping[str, Any]] = arm["runs"][0].get("plans") or ()
    return Plan.from_json(arm["plan"] if arm.get("plan") is not None else plans[0]["plan"])
