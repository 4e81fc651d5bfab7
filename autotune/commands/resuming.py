"""Take up what was interrupted: ``autotune.resume``; and compare on several jobs, each of which may have been.

A run's folder is data. What it was asked for is read from it, but for what would make that data act: code to load,
files outside the folder, and addresses to connect to. Those are trusted where the caller names them, and only there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from autotune.agents.rules import RULES
from autotune.campaign.arms import LIVE, arm_names, require_distinct
from autotune.campaign.comparison import GATE
from autotune.campaign.plan_search import METHODS
from autotune.campaign.session import digest_of, session_of
from autotune.catalog import is_catalog_reference, load_job
from autotune.commands.comparing import compare
from autotune.commands.reproducing import reproduced_run
from autotune.cost_model.carbon import Intensity
from autotune.engines.ray_cluster import ClusterOptions
from autotune.engines.registry import RankOptions
from autotune.errors import InputError, RunDirectoryError
from autotune.io.addresses import without_secrets
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.launching import split
from autotune.mechanics.devices import device_kind, device_name, require_fp32_choice
from autotune.plan import Launch
from autotune.records.journal import Journal
from autotune.records.protocol import Dips, paired_seeds
from autotune.records.results import result_name, result_of
from autotune.records.run_directory import RunDirectory, require_writable
from autotune.records.run_documents import (
    Asked,
    CompareConfig,
    JobsConfig,
    ReproduceConfig,
    Settings,
    TuneConfig,
)
from autotune.records.stratified import together

logger = logging.getLogger(__name__)

_Given = TypeVar("_Given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched:
    """What the caller names anew, since no file of a run may decide it; each as the run was begun with.

    Attributes:
        jobs: jobs, or references to them; a run on one job takes whatever single one is given.
        arms: arms that are plan files or policy folders, others beside them.
        storage: the address of the database that keeps Optuna's studies.
        cluster: the address of a Ray cluster.
        ds_config: a configuration of DeepSpeed.
        data: the folder of a reproduction's data.
        carbon_intensity: grams of CO2 per kWh, or a file of them.
    """

    jobs: Sequence[str | Job] = ()
    arms: Sequence[str] = ()
    storage: str | None = None
    cluster: str | None = None
    ds_config: dict[str, Any] | None = None
    data: str | Path | None = None
    carbon_intensity: str | None = None


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
    """Take up a tuning, a comparison or a reproduction that was interrupted at any instant, and finish it.

    What was measured stays; the model begins anew, so that windows after the interruption see an earlier stage of
    training than they would have. Of a campaign that was finished, the document is returned as it is.

    Only jobs of the catalog are loaded on the run's own word. Any other job, a plan file or a policy folder among the
    arms, a database, a cluster, a configuration of DeepSpeed, a folder of data or a series of carbon intensities is
    given again, as the run was begun with.

    Args:
        run: its run directory.
        job: the job or its reference; of a comparison on several jobs, the references that are not in the catalog.
        arms: arms that are files or folders, as they were given.
        storage: as for :func:`autotune.tune`.
        cluster: the address of the Ray cluster.
        ds_config: the configuration of DeepSpeed.
        data: as for :func:`autotune.reproduce`.
        carbon_intensity: as for :func:`autotune.compare`.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that the command would have returned.

    Raises:
        InputError: if the folder holds no such run, or a damaged one, another process writes in it, or something that
            must be given again was not.
    """
    jobs = [job] if isinstance(job, str | Job) else list(job or ())
    vouched = Vouched(
        jobs=jobs,
        arms=arms,
        storage=storage,
        cluster=cluster,
        ds_config=ds_config,
        data=data,
        carbon_intensity=carbon_intensity,
    )
    path = Path(run)
    # What lies beside a run is its folder's, which `.` does not name.
    return _resumed(path.resolve() if path.name in ("", "..") else path, vouched, reporter or Silent())


def compare_jobs(
    jobs: Sequence[str], arms: Sequence[str], *, runs_dir: str | Path = "runs", **settings: Any
) -> dict[str, Any]:
    """Compare arms on several jobs, one after another, and put what is found together.

    Args:
        jobs: their references.
        arms: as for :func:`compare`, without plan files, which fit one job.
        runs_dir: where the run directories are made: one of each job, and one of all.
        settings: what else :func:`compare` takes, for each job.

    Returns:
        ``jobs`` (name, run and ``against_baseline`` of each), ``together`` (an entry of each arm, its interval
        stratified by job) and ``run``.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    if len(set(jobs)) < max(2, len(jobs)):
        raise InputError(f"jobs are {','.join(jobs)!r}", where="compare", allowed="different jobs")
    named = [split(name, where="--arms") for name in arm_names(arms)]
    files = [name for name, _ in named if Path(name).suffix == ".json"]
    if files:
        allowed = "rules, methods and policy folders; a plan file fits one job"
        raise InputError(f"arm {files[0]!r} is compared on several jobs", where="--arms", allowed=allowed)
    paired_seeds(settings.get("seeds", 10))
    require_distinct(arms)
    for name, launch in named:
        require_fp32_choice(launch.fp32, device_kind(), where=f"arm {name!r}")
    for job in jobs:
        if load_job(job).launch != Launch() and any(launch != Launch() for _, launch in named):
            raise InputError(
                f"arms are launched differently from the job {job!r}",
                where="--arms",
                allowed="jobs, or arms, without what is launched",
            )
    require_writable(Path(runs_dir))
    reporter = settings.pop("reporter", None) or Silent()
    given = Settings(**settings)
    # Where it is taken up, a password is given again.
    kept = replace(given, storage=None if given.storage is None else without_secrets(given.storage))
    config = JobsConfig(verb="compare", job="jobs", jobs=list(jobs), arms=list(arms), settings=kept)
    vouched = Vouched(jobs=jobs, arms=arms, storage=given.storage, carbon_intensity=given.carbon_intensity)
    with RunDirectory.create(Path(runs_dir), "compare", "jobs", asdict(config)) as run:
        return _jobs(run, config, vouched, reporter)


def _resumed(path: Path, vouched: Vouched, reporter: Reporter) -> dict[str, Any]:
    found = RunDirectory.open(path)
    config = found.config
    if found.has(result_name(config, str(path))):
        return result_of(found, config)
    with RunDirectory.take_up(path) as run, _named(path):
        config = run.config
        if run.has(result_name(config, str(path))):
            # Whoever held the lock has finished it.
            return result_of(run, config)
        if isinstance(config, JobsConfig):
            return _jobs(run, config, vouched, reporter)
        if isinstance(config, ReproduceConfig):
            data = _again(config.asked.data, vouched.data, path, "--data", "the folder of its data")
            asked = replace(config.asked, data=None if data is None else str(data))
            return reproduced_run(asked, run, Journal.opened(path), reporter)
        assert isinstance(config, TuneConfig | CompareConfig)
        return _campaign(run, config, vouched, reporter)


@contextmanager
def _named(run: Path) -> Iterator[None]:
    """Name the run in an error about what it was asked for: nobody gave that on this command line."""
    try:
        yield
    except InputError as error:
        if str(run) in str(error):
            raise
        where = f"{run}, {error.where}" if error.where else str(run)
        raise type(error)(error.problem, where=where, allowed=error.allowed) from error


def _campaign(
    run: RunDirectory, config: TuneConfig | CompareConfig, vouched: Vouched, reporter: Reporter
) -> dict[str, Any]:
    asked, path = config.asked, run.path
    measured_on = run.environment.device
    if measured_on != device_name():
        raise RunDirectoryError(
            f"was measured on {measured_on!r}, and this is {device_name()!r}",
            where=str(path),
            allowed="the same device: times of two do not compare",
        )
    if isinstance(config, CompareConfig):
        _require_arms(config.arms, vouched, path)
    dips, carbon = None, None
    if isinstance(config, CompareConfig):
        dips = None if config.asked.dips is None else Dips.parse(config.asked.dips)
        carbon = _carbon(config.asked.carbon_intensity, vouched, path)
    intensity = None if carbon is None else Intensity.parse(carbon)
    session = session_of(
        _job(asked.job, vouched, path),
        asked.memory_budget,
        asked.steps,
        asked.trials,
        asked.seed,
        path.parent,
        reporter,
        lean=asked.lean,
        isolate=asked.isolate,
        ranks=_ranks(asked, vouched, path),
        cluster=_cluster(asked, vouched, path),
        storage=_again(asked.storage, vouched.storage, path, "--storage", "the database of its studies"),
        weights=asked.weights,
        watts=asked.watts,
    )
    # Nothing is written before all that was asked for has been read.
    session = replace(session, journal=Journal.opened(path), run=run, dips=dips, intensity=intensity)
    if isinstance(config, TuneConfig):
        return session.tune(config.method)
    return session.compare(config.arms, tuple(config.seeds), verb=config.verb)


def _jobs(run: RunDirectory, config: JobsConfig, vouched: Vouched, reporter: Reporter) -> dict[str, Any]:
    """Compare several jobs; those that were begun before go on where they stopped."""
    path, settings = run.path, config.settings
    _require_arms(config.arms, vouched, path)
    storage = _again(settings.storage, vouched.storage, path, "--storage", "the database of its studies")
    carbon = _carbon(settings.carbon_intensity, vouched, path)
    references = [(kept, _job(kept, vouched, path, several=True)) for kept in config.jobs]
    documents = []
    for kept, job in references:
        begun = _begun_within(run, kept)
        if begun is not None:
            documents.append(_resumed(begun, replace(vouched, jobs=[job]), reporter))
            continue
        found = compare(
            job,
            config.arms,
            seeds=settings.seeds,
            memory_budget=settings.memory_budget,
            steps=settings.steps,
            trials=settings.trials,
            seed=settings.seed,
            dips=settings.dips,
            lean=settings.lean,
            storage=storage,
            watts=settings.watts,
            carbon_intensity=carbon,
            runs_dir=path.parent,
            reporter=reporter,
            within=path.name,
        )
        documents.append(found)
    entries = [{key: document[key] for key in ("job", "run", "against_baseline")} for document in documents]
    document = {"version": 1, "jobs": entries, "together": together(documents), "run": str(path)}
    run.write("jobs.json", document)
    return document


def _begun_within(run: RunDirectory, job: str) -> Path | None:
    """Return the run directory of a job's comparison that belongs to one of several jobs."""
    for path in sorted(run.path.parent.glob("*/config.json")):
        try:
            config = RunDirectory.open(path.parent).config
        except RunDirectoryError as error:
            logger.warning("%s; it is left out", error)
            continue
        if isinstance(config, CompareConfig) and config.asked.within == run.path.name and config.asked.job == job:
            return path.parent
    return None


def _job(kept: str | None, vouched: Vouched, run: Path, *, several: bool = False) -> str | Job:
    """Return the job of a run: what the caller named, or one of the catalog."""
    if kept in vouched.jobs or (len(vouched.jobs) == 1 and not several):
        return kept if kept is not None and kept in vouched.jobs else vouched.jobs[0]
    if kept is None:
        raise RunDirectoryError("its job was an object", where=str(run), allowed="autotune.resume(run, job=...)")
    if is_catalog_reference(kept):
        return kept
    raise RunDirectoryError(
        f"its job {kept[:200]!r} is code, which is not loaded on the word of a run's own files",
        where=str(run),
        allowed="--job with its reference",
    )


def _require_arms(kept: Sequence[str], vouched: Vouched, run: Path) -> None:
    """Refuse arms that are files or folders, unless the caller names them."""
    known = (*RULES, GATE, *METHODS, *LIVE)
    for name in kept:
        if name not in vouched.arms and split(name, where=f"{run}, arms")[0] not in known:
            raise RunDirectoryError(
                f"its arm {name[:200]!r} is a file or a folder, which is not opened on the word of a run's own files",
                where=str(run),
                allowed="--arms with the arms that it was begun with",
            )


def _ranks(asked: Asked, vouched: Vouched, run: Path) -> RankOptions | None:
    if asked.ranks is None:
        return None
    config = _again(asked.ranks.config, vouched.ds_config, run, "--ds-config", "its configuration of DeepSpeed")
    if digest_of(config) != asked.ranks.config:
        raise RunDirectoryError("--ds-config differs", where=str(run), allowed="what the run was begun with")
    kept = asked.ranks
    return RankOptions(count=kept.count, zero_stage=kept.zero_stage, config=config, engine=kept.engine)


def _cluster(asked: Asked, vouched: Vouched, run: Path) -> ClusterOptions | None:
    kept = None if asked.cluster is None else asked.cluster.address
    address = _again(kept, vouched.cluster, run, "--cluster", "the address of its cluster")
    return (
        None if address is None else ClusterOptions(address=address, cores=asked.cluster.cores if asked.cluster else 1)
    )


def _carbon(kept: str | None, vouched: Vouched, run: Path) -> str | None:
    """Return a carbon intensity: a number may come from the run, a file may not."""
    if kept is not None and vouched.carbon_intensity is None and _is_number(kept):
        return kept
    return _again(kept, vouched.carbon_intensity, run, "--carbon-intensity", "its file of carbon intensities")


def _again(kept: object, given: _Given | None, run: Path, option: str, what: str) -> _Given | None:
    """Return what the caller names anew.

    Raises:
        RunDirectoryError: if the run was begun with it and it is not given, or the other way round.
    """
    if kept is not None and given is None:
        raise RunDirectoryError(
            f"{what} is not taken from a run's own files",
            where=str(run),
            allowed=f"{option} beside it, as the run was begun with",
        )
    if kept is None and given is not None:
        raise RunDirectoryError(f"{option} is given, and the run was begun without it", where=str(run))
    return given


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
