"""Inputs that a run's own files must not decide: code to load, files outside the run, addresses to contact.

A run directory may come from anyone. Its request records these inputs only as text; the campaign uses the values that
its caller supplies, and ``autotune resume`` must be given them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from autotune.agents.policies import POLICIES
from autotune.agents.rules import RULES
from autotune.agents.search_methods import METHODS
from autotune.campaign.arms import OWN_ARMS
from autotune.catalog import is_catalog_reference
from autotune.engines.ray_cluster import ClusterOptions
from autotune.engines.registry import RankOptions
from autotune.errors import RunDirectoryError
from autotune.job import Job
from autotune.launching import canonical, split
from autotune.records.requests import Ranks, digest_of

_Given = TypeVar("_Given")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedInputs:
    """Inputs that a campaign's caller supplies.

    Methods take the recorded value and return the caller's value. They raise
    :class:`autotune.errors.RunDirectoryError` if a required value is missing, or a value is given but not recorded.

    Attributes:
        jobs: jobs or references to them; a run on one job accepts a single job of any name.
        arms: arms of the run; those that are plan files, policy folders or code of another package must be given.
        storage: address of the database that keeps Optuna's studies.
        cluster: address of a Ray cluster.
        ds_config: DeepSpeed configuration.
        data: folder of a reproduction's data.
        carbon_intensity: grams of CO2 per kWh, or the path of a file with a series of them.
        run: resumed run directory, for error messages; ``None`` for a new campaign.
    """

    jobs: Sequence[str | Job] = ()
    arms: Sequence[str] = ()
    storage: str | None = None
    cluster: str | None = None
    ds_config: Mapping[str, Any] | None = None
    data: str | Path | None = None
    carbon_intensity: str | None = None
    run: Path | None = None

    def job(self, recorded: str | None, *, several: bool = False) -> str | Job:
        """Return the job that the caller supplies, or the recorded job of the catalog.

        Args:
            recorded: the recorded reference; ``None`` if the job was an object.
            several: whether the run is a comparison on several jobs.
        """
        if recorded is not None and recorded in self.jobs:
            return recorded
        if len(self.jobs) == 1 and not several:
            return self.jobs[0]
        if recorded is None:
            raise self._refusal("its job was an object of a program", "autotune.resume(run, job=...)")
        if is_catalog_reference(recorded):
            return recorded
        raise self._refusal(
            f"its job {recorded[:200]!r} is code, which is not loaded because only the run's own files request it",
            "--job with its reference",
        )

    def require_arms(self, recorded: Sequence[str]) -> None:
        """Check that the caller supplies every arm or method that is not of this package, and names no others."""
        # A run records names with their launch options in one order and notation.
        supplied = {*self.arms, *(canonical(name, where="--arms") for name in self.arms)}
        for name in recorded:
            plain = split(name, where=f"{self.run}, arms")[0]
            if name in supplied or plain in OWN_ARMS:
                continue
            installed = plain in RULES or plain in METHODS or plain in POLICIES
            kind = "code of another package" if installed else "a file or a folder"
            raise self._refusal(
                f"its arm {name[:200]!r} is {kind}, which is not opened because only the run's own files request it",
                "--arms with the arms of the original command",
            )
        self.refuse_other_arms(recorded)

    def refuse_other_arms(self, recorded: Sequence[str]) -> None:
        """Check that the caller names only arms that the run has."""
        given = {canonical(name.strip(), where="--arms") for name in self.arms if name.strip()}
        extra = sorted(given - {*recorded, "baseline"})
        if extra:
            raise self._refusal(f"{extra[0][:200]!r} is not among its arms", list(recorded))

    def rank_options(self, recorded: Ranks | None) -> RankOptions | None:
        """Return the ranks with the caller's DeepSpeed configuration; ``None`` for one process."""
        if recorded is None:
            return None
        config = self._supplied(recorded.config, self.ds_config, "--ds-config", "its DeepSpeed configuration")
        if digest_of(config) != recorded.config:
            raise self._refusal("--ds-config differs", "the configuration of the original command")
        return RankOptions(
            count=recorded.count,
            zero_stage=recorded.zero_stage,
            config=config,
            mesh=recorded.mesh,
            engine=recorded.engine,
        )

    def cluster_options(self, recorded: ClusterOptions | None) -> ClusterOptions | None:
        """Return the cluster at the caller's address; ``None`` for this machine."""
        kept = None if recorded is None else recorded.address
        address = self._supplied(kept, self.cluster, "--cluster", "the address of its cluster")
        return None if recorded is None or address is None else replace(recorded, address=address)

    def database(self, recorded: str | None) -> str | None:
        """Return the address of the database that keeps Optuna's studies; ``None`` for the run directory."""
        return self._supplied(recorded, self.storage, "--storage", "the database of its studies")

    def data_folder(self, recorded: str | None) -> Path | None:
        """Return the folder of a reproduction's data; ``None`` for none."""
        given = None if self.data is None else Path(self.data)
        return self._supplied(recorded, given, "--data", "the folder of its data")

    def carbon(self, recorded: str | None) -> str | None:
        """Return the carbon intensity; the run may provide a number, but not a file. ``None`` for none."""
        if recorded is not None and self.carbon_intensity is None and _is_number(recorded):
            return recorded
        what = "its file of carbon intensities"
        return self._supplied(recorded, self.carbon_intensity, "--carbon-intensity", what)

    def _supplied(self, recorded: object, given: _Given | None, option: str, what: str) -> _Given | None:
        if recorded is not None and given is None:
            raise self._refusal(
                f"{what} is not taken from a run's own files", f"{option} with the value of the original command"
            )
        if recorded is None and given is not None:
            raise self._refusal(f"{option} is given, but the original command was run without it", "")
        return given

    def _refusal(self, problem: str, allowed: str | Sequence[str]) -> RunDirectoryError:
        return RunDirectoryError(problem, where="" if self.run is None else str(self.run), allowed=allowed)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
