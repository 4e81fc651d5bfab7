"""Reading of a finished campaign's documents; documents that no campaign could have written are rejected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.errors import RunDirectoryError
from autotune.io.documents import validated
from autotune.measurement import Measurement
from autotune.plan import Plan
from autotune.records.run_directory import RunDirectory
from autotune.records.run_documents import (
    CompareConfig,
    Comparison,
    Config,
    Jobs,
    JobsConfig,
    ReproduceConfig,
    Reproduction,
    Trial,
    TuneConfig,
    Tuned,
)

AS_WRITTEN = "a document written by autotune"


def result_name(config: Config, where: str) -> str:
    """Return the name of the document of a finished campaign.

    Args:
        config: configuration of the run.
        where: the run directory, for error messages.

    Raises:
        RunDirectoryError: if the run is not a campaign but a training run or an attached run.
    """
    if type(config) not in _DOCUMENTS:
        raise RunDirectoryError(
            f"is a run of {config.verb!r}", where=where, allowed="a run of tune, compare, demo or reproduce"
        )
    return _DOCUMENTS[type(config)][0]


def result_of(run: RunDirectory, config: Config) -> dict[str, Any]:
    """Return the document of a finished campaign.

    Raises:
        RunDirectoryError: if it is missing or damaged.
        PlanError: if a plan in it is damaged.
    """
    name = result_name(config, str(run.path))
    found = run.read(name)
    _DOCUMENTS[type(config)][1](found, str(run.path / name))
    return found


def trials_of(run: RunDirectory) -> tuple[dict[str, Any], ...]:
    """Return the trials of a search, in order.

    Raises:
        InputError: if a line is damaged; the message names the first such line.
    """
    path, rows = run.path / "trials.jsonl", run.lines("trials.jsonl")
    for number, row in enumerate(rows, 1):
        validated(Trial, row, where=f"{path} line {number}", error=RunDirectoryError)
        Plan.from_json(row["plan"], where=f"{path} line {number}, plan")
        # Add the optional values that a line may omit.
        row["measurement"] = Measurement.from_json(
            row["measurement"], where=f"{path} line {number}, measurement"
        ).to_json()
    return tuple(rows)


def _check_comparison(found: Mapping[str, Any], where: str) -> None:
    """Reject a comparison whose arms, seeds and verdicts are inconsistent."""
    read = validated(Comparison, found, where=where, version=1, error=RunDirectoryError)
    names = [arm.name for arm in read.arms]
    judged = [entry.arm for entry in (*read.against_baseline, *([read.gate] if read.gate else []))]
    whole = (
        len(set(names)) == len(names)
        and names[0] == read.baseline
        and len(set(judged)) == len(judged)
        and set(judged) <= set(names[1:])
        and all([run.seed for run in arm.runs] == read.seeds for arm in read.arms)
    )
    if whole:
        arrived = {arm.name: all(run.reached and run.time_to_target_s for run in arm.runs) for arm in read.arms}
        timed = [entry.arm for entry in read.against_baseline if entry.time_ratio is not None]
        whole = all(arrived[name] for name in (*timed, *([read.baseline] if timed else [])))
    if not whole:
        raise RunDirectoryError("arms, seeds and verdicts are inconsistent", where=where, allowed=AS_WRITTEN)
    for arm in read.arms:
        place = f"{where}, arm {arm.name}"
        if arm.plan is not None:
            Plan.from_json(arm.plan, where=place)
        elif not all(run.plans for run in arm.runs):
            raise RunDirectoryError("a run has no plan", where=place, allowed=AS_WRITTEN)
        for run in arm.runs:
            for number, entry in enumerate(run.plans or ()):
                Plan.from_json(entry.plan, where=f"{place}, seed {run.seed}, plan {number}")


def _check_jobs(found: Mapping[str, Any], where: str) -> None:
    """Reject a comparison on several jobs if an arm of its combined result is missing from a job."""
    read = validated(Jobs, found, where=where, version=1, error=RunDirectoryError)
    for entry in read.together:
        if not all(entry.arm in [one.arm for one in job.against_baseline] for job in read.jobs):
            raise RunDirectoryError(f"arm {entry.arm!r} is missing from a job", where=where, allowed=AS_WRITTEN)


def _check_tuned(found: Mapping[str, Any], where: str) -> None:
    validated(Tuned, found, where=where, error=RunDirectoryError)
    Plan.from_json(found["plan"], where=f"{where}, plan")


def _check_reproduction(found: Mapping[str, Any], where: str) -> None:
    validated(Reproduction, found, where=where, version=1, error=RunDirectoryError)


# File name and checking function of a finished campaign's document, by the type of its configuration.
_DOCUMENTS: dict[type, tuple[str, Callable[[Mapping[str, Any], str], None]]] = {
    JobsConfig: ("jobs.json", _check_jobs),
    ReproduceConfig: ("reproduction.json", _check_reproduction),
    TuneConfig: ("tuned.json", _check_tuned),
    CompareConfig: ("comparison.json", _check_comparison),
}
