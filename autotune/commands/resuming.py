"""Resumption of interrupted campaigns, ``autotune.resume``, and comparison on several jobs, new or interrupted.

The request of a campaign is read from its run directory; inputs that its files must not decide come from the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autotune.campaign import comparison_campaign, tuning_campaign
from autotune.campaign.arms import arm_names, require_distinct
from autotune.campaign.setup import as_requested, prepare
from autotune.campaign.trusted_inputs import TrustedInputs
from autotune.catalog import load_job
from autotune.choices import STORAGES_VARIABLE
from autotune.commands.comparing import run_comparison
from autotune.commands.reproducing import reproduced_run
from autotune.errors import InputError, RunDirectoryError
from autotune.io.environment_variables import variable
from autotune.io.files import folder_given
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.launching import split
from autotune.mechanics import known_precisions
from autotune.mechanics.devices import device_kind, device_name, require_fp32_choice
from autotune.plan import Launch
from autotune.records.journal import Journal
from autotune.records.protocol import paired_seeds
from autotune.records.requests import CompareOptions
from autotune.records.results import result_name, result_of
from autotune.records.run_directory import RunDirectory, require_writable
from autotune.records.run_documents import CompareConfig, JobsConfig, ReproduceConfig, TuneConfig
from autotune.records.stratified import together

logger = logging.getLogger(__name__)


def resume(
    run: str | Path,
    *,
    job: str | Job | Sequence[str] | None = None,
    arms: Sequence[str] = (),
    storage: str | None = None,
    cluster: str | None = None,
    ds_config: dict[str, Any] | None = None,
    data: str | Path | None = None,
    carbon_intensity: str | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Resume a tuning, a comparison or a reproduction that was interrupted at any point, and finish it.

    Measurements before the interruption are kept. The model starts again from its initial weights, so windows after the
    interruption measure an earlier stage of training than in an uninterrupted run. The document of a finished campaign
    is returned unchanged.

    Jobs of the catalog are loaded as recorded. Any other job, a plan file or a policy folder among the arms, a
    database, a cluster, a DeepSpeed configuration, a folder of data or a series of carbon intensities must be given
    again, with the value of the original command.

    Args:
        run: the run directory.
        job: the job or its reference; for a comparison on several jobs, the references that are not in the catalog.
        arms: arms that are files, folders or code of another package, as in the original command.
        storage: as for :func:`autotune.tune`.
        cluster: the address of the Ray cluster.
        ds_config: the DeepSpeed configuration.
        data: as for :func:`autotune.reproduce`.
        carbon_intensity: as for :func:`autotune.compare`.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that the command would have returned.

    Raises:
        InputError: if the folder has no such run, the run is damaged, another process is writing to it, or an input
            that must be given again is missing.
    """
    trusted = TrustedInputs(
        jobs=[job] if isinstance(job, str | Job) else list(job or ()),
        arms=arms,
        storage=storage,
        cluster=cluster,
        ds_config=ds_config,
        data=data,
        carbon_intensity=carbon_intensity,
    )
    path = folder_given(run, "run")
    # The runs folder is the parent of the run's folder, so `.` and `..` must be resolved.
    return _resumed(path.resolve() if path.name in ("", "..") else path, trusted, reporter or Silent())


def compare_jobs(
    jobs: Sequence[str],
    arms: Sequence[str],
    options: CompareOptions,
    trusted: TrustedInputs,
    runs: Path,
    reporter: Reporter,
) -> dict[str, Any]:
    """Compare arms on several jobs, one after another, and combine the results.

    Args:
        jobs: references of the jobs.
        arms: as for :func:`autotune.compare`, without plan files, which fit only one job.
        options: options of the comparison on each job.
        trusted: inputs that the caller supplies.
        runs: folder in which the run directories are made: one for each job, and one for the whole comparison.
        reporter: shows progress.

    Returns:
        A document with ``jobs`` (name, run and ``against_baseline`` of each), ``together`` (one entry per arm, with an
        interval stratified by job) and ``run``.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    if len(set(jobs)) < max(2, len(jobs)):
        raise InputError(f"jobs are {','.join(jobs)!r}", where="compare", allowed="different jobs")
    _require_arms_for_any_job(jobs, arms)
    paired_seeds(options.seeds)
    require_writable(runs)
    config = JobsConfig(verb="compare", job="jobs", jobs=list(jobs), arms=list(arms), settings=options)
    with RunDirectory.create(runs, "compare", "jobs", asdict(config)) as run:
        return _jobs(run, config, trusted, reporter)


def _require_arms_for_any_job(jobs: Sequence[str], arms: Sequence[str]) -> None:
    """Refuse arms that cannot be compared on every job."""
    named = [split(name, where="--arms") for name in arm_names(arms)]
    for name, _ in named:
        if Path(name).suffix == ".json":
            raise InputError(
                f"plan file {name!r} cannot be compared on several jobs",
                where="--arms",
                allowed="rules, methods and policy folders; a plan file fits one job",
            )
    require_distinct(arms)
    for name, launch in named:
        require_fp32_choice(launch.fp32, device_kind(), where=f"arm {name!r}")
    for job in jobs:
        if load_job(job).launch != Launch() and any(launch != Launch() for _, launch in named):
            raise InputError(
                f"arms are launched differently from the job {job!r}",
                where="--arms",
                allowed="launch options on jobs or on arms, not on both",
            )


def _resumed(path: Path, trusted: TrustedInputs, reporter: Reporter) -> dict[str, Any]:
    found = RunDirectory.open(path)
    if found.has(result_name(found.config, str(path))):
        if isinstance(found.config, TuneConfig | CompareConfig):
            _require_job_of(found, [as_requested(load_job(given), found.config.asked) for given in trusted.jobs])
        if isinstance(found.config, CompareConfig | JobsConfig):
            replace(trusted, run=path).refuse_other_arms(found.config.arms)
        return result_of(found, found.config)
    trusted = replace(trusted, run=path)
    with RunDirectory.take_up(path) as run, _naming(path):
        config = run.config
        if run.has(result_name(config, str(path))):
            # The process that held the lock has finished the campaign.
            return result_of(run, config)
        match config:
            case JobsConfig():
                return _jobs(run, config, trusted, reporter)
            case ReproduceConfig():
                data = trusted.data_folder(config.asked.data)
                request = replace(config.asked, data=None if data is None else str(data))
                return reproduced_run(request, run, Journal.opened(path), reporter)
            case TuneConfig() | CompareConfig():
                return _campaign(run, config, trusted, reporter)
    raise AssertionError(config)


def _require_job_of(run: RunDirectory, given: Sequence[Job]) -> None:
    """Refuse jobs of which none has the name of the run's, if any was given."""
    names = [job.name for job in given]
    if names and run.config.job not in names:
        raise RunDirectoryError(
            f"is a run of the job {run.config.job!r}, and {' and '.join(map(repr, names))} was given",
            where=str(run.path),
            allowed="the job of the run",
        )


@contextmanager
def _naming(run: Path) -> Iterator[None]:
    """Add the run to errors about its recorded request, which is not part of this command line."""
    try:
        yield
    except InputError as error:
        if str(run) in str(error):
            raise
        where = f"{run}, {error.where}" if error.where else str(run)
        raise type(error)(error.problem, where=where, allowed=error.allowed) from error


def _campaign(
    run: RunDirectory, config: TuneConfig | CompareConfig, trusted: TrustedInputs, reporter: Reporter
) -> dict[str, Any]:
    measured_on = run.environment.device
    if measured_on != device_name():
        raise RunDirectoryError(
            f"was measured on {measured_on!r}, and this is {device_name()!r}",
            where=str(run.path),
            allowed="the same device: times from different devices are not comparable",
        )
    # A measurement of these precisions may differ from the interrupted campaign's, whose plans are continued.
    if run.environment.precisions_excluded is not None:
        known_precisions.keep_all({device_kind(): run.environment.precisions_excluded})
    with variable(STORAGES_VARIABLE, run.environment.storages):
        campaign = prepare(config.asked, trusted, run.path.parent, reporter)
        _require_job_of(run, [campaign.job])
        # Open the journal after the request was checked, since opening it may write a file.
        campaign = replace(campaign, journal=Journal.opened(run.path), run=run)
        if isinstance(config, TuneConfig):
            trusted.require_arms([config.method])
            return tuning_campaign.tune(campaign, config.method)
        return comparison_campaign.compare(campaign, config.asked, verb=config.verb)


def _jobs(run: RunDirectory, config: JobsConfig, trusted: TrustedInputs, reporter: Reporter) -> dict[str, Any]:
    """Compare arms on several jobs; resume comparisons that have begun."""
    options, runs = config.settings, run.path.parent
    trusted.require_arms(config.arms)
    trusted.database(options.storage)
    trusted.carbon(options.carbon_intensity)
    references = [(recorded, trusted.job(recorded, several=True)) for recorded in config.jobs]
    names = arm_names(config.arms)
    documents = []
    for recorded, job in references:
        own = replace(trusted, jobs=[job], arms=[*trusted.arms, *names])
        begun = _begun_within(run, recorded)
        if begun is not None:
            documents.append(_resumed(begun, own, reporter))
        else:
            request = options.request(job, names, within=run.path.name)
            documents.append(run_comparison(request, own, runs, reporter))
    entries = [{key: document[key] for key in ("job", "run", "against_baseline")} for document in documents]
    document = {"version": 1, "jobs": entries, "together": together(documents), "run": str(run.path)}
    run.write("jobs.json", document)
    return document


def _begun_within(run: RunDirectory, job: str) -> Path | None:
    """Return the run directory of one job's part of a comparison on several jobs; ``None`` if it has not begun."""
    for path in sorted(run.path.parent.glob("*/config.json")):
        try:
            config = RunDirectory.open(path.parent).config
        except RunDirectoryError as error:
            logger.warning("%s; this run is skipped", error)
            continue
        if isinstance(config, CompareConfig) and config.asked.within == run.path.name and config.asked.job == job:
            return path.parent
    return None
