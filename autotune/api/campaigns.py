"""Take up what was interrupted: ``autotune.resume``; and compare on several jobs, each of which may have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.agents.study_store import without_password
from autotune.api.comparing import compare
from autotune.api.reproducing import reproduced_run
from autotune.api.session import session_of
from autotune.campaign.arms import (
    arm_names,
)
from autotune.campaign.journal import Journal
from autotune.campaign.progress import Reporter, Silent
from autotune.campaign.protocol import Dips, paired_seeds
from autotune.campaign.runs import RunDirectory, require_writable
from autotune.campaign.stratified import together
from autotune.catalog import load_job
from autotune.cluster import ClusterOptions
from autotune.engines.isolated_engine import RankOptions
from autotune.errors import InputError, RunDirectoryError
from autotune.job import Job
from autotune.launching import split
from autotune.mechanics.devices import device_name
from autotune.physics.carbon import Intensity
from autotune.plan import Launch

# What a finished campaign leaves, by the key that tells its kind.
_FINISHED = {"method": "tuned.json", "arms": "comparison.json", "table": "reproduction.json"}


def resume(run: str | Path, *, job: Job | None = None, reporter: Reporter | None = None) -> dict[str, Any]:
    """Take up a tuning or a comparison that was interrupted at any instant, and finish it.

    What was measured stays; the model begins anew, so that windows after the interruption see an earlier stage of
    training than they would have. Of a campaign that was finished, the document is returned as it is.

    Args:
        run: its run directory.
        job: the job, if it was handed over as an object.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that the command would have returned.

    Raises:
        InputError: if the folder holds no such run, or a damaged one.
    """
    folder = RunDirectory.open(Path(run))
    config = folder.read("config.json")
    if "jobs" in config:
        finished = (folder.path / "jobs.json").is_file()
        return folder.read("jobs.json") if finished else _compared_jobs(folder, config, reporter)
    asked = config.get("asked")
    if not isinstance(asked, dict) or not set(_FINISHED) & set(asked):
        raise RunDirectoryError("holds no tuning and no comparison", where=str(run), allowed="the run of one")
    document = next(name for key, name in _FINISHED.items() if key in asked)
    if (folder.path / document).is_file():
        return folder.read(document)
    if "table" in asked:
        return reproduced_run(asked, folder, Journal.opened(folder.path), reporter or Silent())
    if asked["job"] is None and job is None:
        raise RunDirectoryError("its job was an object", where=str(run), allowed="autotune.resume(run, job=...)")
    measured_on = folder.read("environment.json")["device"]
    if measured_on != device_name():
        raise RunDirectoryError(
            f"was measured on {measured_on!r}, and this is {device_name()!r}",
            where=str(run),
            allowed="the same device: times of two do not compare",
        )
    session = replace(
        session_of(
            job or asked["job"],
            asked["memory_budget"],
            asked["steps"],
            asked["trials"],
            asked["seed"],
            folder.path.parent,
            reporter,
            lean=asked["lean"],
            isolate=asked["isolate"],
            ranks=None if asked.get("ranks") is None else RankOptions(**asked["ranks"]),
            cluster=None if asked.get("cluster") is None else ClusterOptions(**asked["cluster"]),
            storage=asked.get("storage"),
            weights=asked.get("weights"),
            watts=asked.get("watts"),
        ),
        journal=Journal.opened(folder.path),
        run=folder,
    )
    if "method" in asked:
        return session.tune(asked["method"])
    dips, intensity = asked["dips"], asked.get("carbon_intensity")
    session = replace(
        session,
        dips=None if dips is None else Dips.parse(dips),
        intensity=None if intensity is None else Intensity.parse(intensity),
    )
    return session.compare(asked["arms"], tuple(asked["seeds"]), verb=config["verb"])


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
    for job in jobs:
        if load_job(job).launch != Launch() and any(launch != Launch() for _, launch in named):
            raise InputError(
                f"arms are launched differently from the job {job!r}",
                where="--arms",
                allowed="jobs, or arms, without what is launched",
            )
    require_writable(Path(runs_dir))
    reporter = settings.pop("reporter", None)
    storage = settings.get("storage")
    # Where it is taken up, a password comes from PGPASSWORD.
    kept = settings if storage is None else {**settings, "storage": without_password(storage)}
    asked = {"jobs": list(jobs), "arms": list(arms), "settings": kept}
    run = RunDirectory.create(Path(runs_dir), "compare", "jobs", asked)
    return _compared_jobs(run, {**asked, "settings": settings}, reporter)


def _compared_jobs(run: RunDirectory, asked: Mapping[str, Any], reporter: Reporter | None) -> dict[str, Any]:
    """Compare several jobs; those that were begun before go on where they stopped."""
    documents = []
    for job in asked["jobs"]:
        begun = _begun_within(run, job)
        if begun is not None:
            documents.append(resume(begun, reporter=reporter))
            continue
        settings = {**asked["settings"], "runs_dir": run.path.parent, "within": run.path.name}
        documents.append(compare(job, asked["arms"], reporter=reporter, **settings))
    entries = [{key: document[key] for key in ("job", "run", "against_baseline")} for document in documents]
    document = {"version": 1, "jobs": entries, "together": together(documents), "run": str(run.path)}
    run.write("jobs.json", document)
    return document


def _begun_within(run: RunDirectory, job: str) -> Path | None:
    """Return the run directory of a job's comparison that belongs to one of several jobs."""
    for path in sorted(run.path.parent.glob("*/config.json")):
        asked = RunDirectory.open(path.parent).read("config.json").get("asked") or {}
        if asked.get("within") == run.path.name and asked.get("job") == job:
            return path.parent
    return None
