"""Search for a plan: ``autotune.tune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autotune import knobs
from autotune.budget import MemoryBudget
from autotune.campaign import tuning_campaign
from autotune.campaign.job_profile import measured_profile
from autotune.campaign.launch_trials import baseline_peak_bytes, side_by_side
from autotune.campaign.setup import prepare
from autotune.campaign.trusted_inputs import TrustedInputs
from autotune.catalog import load_job
from autotune.cost_model.pipeline_choice import chosen_pipelines
from autotune.cost_model.profile import Profile
from autotune.engines.deepspeed_config import STAGES
from autotune.engines.ray_cluster import ClusterOptions
from autotune.engines.registry import RankOptions
from autotune.errors import BudgetError, InputError
from autotune.io.documents import validated
from autotune.io.files import folder_given
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.launching import canonical, launched, split, suffix
from autotune.mesh import Mesh
from autotune.pipeline import SCHEDULES
from autotune.plan import Plan
from autotune.records.requests import Ranks, TuneRequest, recorded_address, reference_of


def tune(
    job: str | Job,
    method: str = "ppo",
    *,
    memory_budget: str | int | None = None,
    gradient_norm: float | None = None,
    steps: int = 120,
    trials: int | None = None,
    seed: int = 0,
    lean: bool = True,
    isolate: bool = False,
    ranks: RankOptions | None = None,
    cluster: ClusterOptions | None = None,
    storage: str | None = None,
    weights: str | None = None,
    watts: float | None = None,
    report_to: str | None = None,
    knobs: bool = False,
    tolerant: bool = False,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Find the fastest plan for a job within a memory budget, by measuring plans on the job itself.

    Args:
        job: the job, or its reference.
        method: ``exact``, ``greedy``, ``k-optimal``, ``planner``, ``ppo``, ``random``, ``optuna``, ``optuna-prices`` or
            ``ppo-scratch``.
        memory_budget: bytes, a size (``20GiB``) or a share of the FP32 baseline's peak (``75%``); ``None`` for no
            budget.
        gradient_norm: largest norm of the gradient, before clipping, that a plan may have in its window; ``None`` for
            no limit.
        steps: number of real optimizer steps that may be spent.
        trials: number of plans that may be measured; ``None`` for as many as the steps allow.
        seed: random seed for the search and for the engine.
        lean: whether a missing profile may be measured in a tenth of the steps.
        isolate: whether windows run in a separate process, so that a crash or a hang of the job is a failed window. The
            job is then given by its reference.
        ranks: number of processes that train the job together through DeepSpeed, and their ZeRO stage; ``None`` for
            one process without DeepSpeed.
        cluster: a Ray cluster whose workers measure plans in parallel, each in a separate process; ``None`` to
            measure one plan after another on this machine. For ``random``, ``optuna`` and ``optuna-prices``.
        storage: a database for Optuna's studies, ``postgresql://user@host:port/database``; ``None`` keeps them in the
            run directory.
        weights: weights of time, memory and energy in the objective, as in ``1,0,0.5``; ``None`` for time alone.
        watts: power of the device in watts, to estimate energy where it cannot be measured; ``None`` makes no estimate.
        report_to: experiment tracker: ``mlflow``, ``tensorboard``, ``wandb`` or ``none``; ``None`` for that in the
            variable ``AUTOTUNE_REPORT_TO``, or ``mlflow``.
        knobs: whether free knobs (:data:`autotune.knobs.KNOBS`) are measured first; the recommended ones are applied to
            every window of this run, the baseline's included.
        tolerant: whether knobs may be recommended that round differently.
        runs_dir: folder in which the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune tune --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    request = TuneRequest(
        job=reference_of(job),
        method=method,
        memory_budget=MemoryBudget.text_of(memory_budget),
        gradient_norm=gradient_norm,
        steps=steps,
        trials=trials,
        seed=seed,
        lean=lean,
        isolate=isolate,
        ranks=Ranks.of(ranks),
        cluster=cluster,
        storage=recorded_address(storage),
        weights=weights,
        watts=watts,
        report_to=report_to,
        knobs=knobs,
        tolerant=tolerant,
    )
    validated(TuneRequest, asdict(request), where="tune")
    trusted = TrustedInputs(
        jobs=[job],
        storage=storage,
        cluster=None if cluster is None else cluster.address,
        ds_config=None if ranks is None else ranks.config,
    )
    return run_tuning(request, trusted, folder_given(runs_dir, "runs_dir"), reporter or Silent())


def run_tuning(request: TuneRequest, trusted: TrustedInputs, runs: Path, reporter: Reporter) -> dict[str, Any]:
    """Run the tuning that a request describes.

    Args:
        request: the request.
        trusted: inputs that the caller supplies for the request.
        runs: folder in which the run directory is made.
        reporter: shows progress.

    Returns:
        The document that ``autotune tune --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    return tuning_campaign.tune(prepare(request, trusted, runs, reporter), request.method)


def tune_layouts(request: TuneRequest, trusted: TrustedInputs, runs: Path, reporter: Reporter) -> dict[str, Any]:
    """Tune a job with every layout of its ranks in turn, and return the fastest plan of all.

    With DeepSpeed, a layout is a ZeRO stage; with FSDP2, it is a mesh of replicas and shards, and of ranks that share
    layers if the job says how to divide them; in a pipeline, it is a schedule with the units of each stage that a
    profile of the job in one process predicts to be fastest.

    Args:
        request: the request, with ranks of any layout. A memory budget that is a share refers to the baseline's peak
            with the first layout, for all: every rank has the whole model, or the pipeline's schedule is 1F1B.
        trusted: inputs that the caller supplies for the request.
        runs: folder in which the run directories are made.
        reporter: shows progress.

    Returns:
        The document of the fastest layout, with ``stages`` or ``meshes``: the measurements with each, or why it was
        refused.

    Raises:
        InputError: for wrong input, or for a budget that no layout meets.
    """
    assert request.ranks is not None
    ranks, meshed = request.ranks, request.ranks.mesh is not None or request.ranks.engine == "pipeline"
    if ranks.engine == "pipeline":
        found = chosen_pipelines(_profile_alone(request, trusted, runs, reporter), ranks.count)
        found.sort(key=lambda one: one.pipeline.schedule != SCHEDULES[0])
        layouts = {str(one.pipeline): replace(ranks, mesh=str(one.pipeline)) for one in found}
    elif meshed:
        job = trusted.job(request.job)
        job = load_job(job) if isinstance(job, str) else job
        meshes = map(str, Mesh.all_of(ranks.count, tp=job.tensor_parallel is not None))
        layouts = _with_receivers({mesh: replace(ranks, mesh=mesh) for mesh in meshes}, job)
    else:
        layouts = {str(stage): replace(ranks, zero_stage=stage) for stage in STAGES}
    asked = {name: (replace(request, ranks=layout), trusted) for name, layout in layouts.items()}

    def whole_bytes() -> int | None:
        first = trusted.rank_options(next(iter(layouts.values())))
        return baseline_peak_bytes(str(request.job), request.seed, first)

    tuned, told = _tune_each(asked, "mesh" if meshed else "ZeRO stage", runs, reporter, whole_bytes)
    best = max(tuned.values(), key=lambda document: document["measured"]["throughput"] or 0.0)
    return {**best, "meshes" if meshed else "stages": told}


def _with_receivers(layouts: Mapping[str, Ranks], job: Job) -> dict[str, Ranks]:
    """Return the meshes on which some ranks receive what a job's launch choices send.

    Raises:
        InputError: if there are none.
    """
    found, refusal = {}, None
    for mesh, ranks in layouts.items():
        try:
            knobs.require_receivers(job.launch.knobs, Mesh.parse(mesh))
            found[mesh] = ranks
        except InputError as error:
            refusal = refusal or error
    if refusal is not None and not found:
        raise refusal
    return found


def _profile_alone(request: TuneRequest, trusted: TrustedInputs, runs: Path, reporter: Reporter) -> Profile:
    """Return the profile of the job in one process, cached or newly measured."""
    campaign = prepare(replace(request, ranks=None), replace(trusted, ds_config=None), runs, reporter)
    return measured_profile(campaign)


def tune_launches(
    request: TuneRequest, trusted: TrustedInputs, runs: Path, reporter: Reporter, *, launches: Sequence[str]
) -> dict[str, Any]:
    """Tune a job as it is and with each of several launch choices, measure the plans in turn, and return the fastest.

    Another one replaces the plan of the job as it is only if it is faster beyond doubt.

    Args:
        request: the request, with the job's reference. A memory budget that is a share refers to the peak of the job as
            it is, for all.
        trusted: inputs that the caller supplies for the request.
        runs: folder in which the run directories are made.
        reporter: shows progress.
        launches: launch choices, as behind the name of a job: ``adamw8bit``, ``release+foreach``.

    Returns:
        The document of the fastest, with ``launches``: the measurements of each, by name, and its time in proportion to
        the first's, or why it was refused; the job as it is has the name ``""``.

    Raises:
        InputError: for wrong input, or for a budget that none of them meets.
    """
    if request.weights is not None:
        raise InputError("cannot be combined with --weights: plans are compared by time", where="--launches")
    asked = {"": (request, trusted)}
    for name in launches:
        added = suffix(split(f"job+{name}", where="--launches")[1])
        if not added:
            allowed = "launch choices, as in adamw8bit,release"
            raise InputError(f"names {name!r:.80}", where="--launches", allowed=allowed)
        # Refuses what contradicts the job's own choices.
        own = canonical(f"{request.job}{added}", where="--launches")
        asked[added.removeprefix("+")] = replace(request, job=own), replace(trusted, jobs=[own])

    def whole_bytes() -> int | None:
        return baseline_peak_bytes(str(request.job), request.seed)

    found, told = _tune_each(asked, "launch choice", runs, reporter, whole_bytes)
    tuned = {name: Plan.from_json(one["plan"]) for name, one in found.items()}
    job = load_job(split(str(request.job), where="job")[0])
    # With what was measured and applied on the way, too.
    plans = {name: (launched(job, plan.launch), plan) for name, plan in tuned.items()}
    ratios = side_by_side(plans, request.seed, reporter) if len(plans) > 1 else {}
    for name, ratio in ratios.items():
        told[name]["time_over_first"] = ratio
    # Of equally fast ones, the first, which changes the job least.
    faster = [name for name, ratio in ratios.items() if ratio["ratio_ci95"][1] < 1]
    best = min(faster, key=lambda name: float(ratios[name]["ratio_median"]), default=next(iter(found)))
    return {**found[best], "launches": told}


def _tune_each(
    asked: Mapping[str, tuple[TuneRequest, TrustedInputs]],
    what: str,
    runs: Path,
    reporter: Reporter,
    whole_bytes: Callable[[], int | None] = lambda: None,
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Run several tunings within one budget; return the documents by name, and what is told of each.

    Args:
        asked: the tunings by name.
        what: what they differ in.
        runs: folder in which the run directories are made.
        reporter: shows progress.
        whole_bytes: returns the bytes of which a budget is a share, if the first one does not meet it.

    Raises:
        InputError: if the first one is refused for anything but its budget, or all are.
    """
    found: dict[str, dict[str, Any]] = {}
    told: dict[str, dict[str, Any]] = {}
    budget = next(iter(asked.values()))[0].memory_budget
    for name, (request, trusted) in asked.items():
        try:
            document = run_tuning(replace(request, memory_budget=budget), trusted, runs, reporter)
        except InputError as error:
            if not told:
                budget = _in_bytes(budget, whole_bytes) if isinstance(error, BudgetError) else None
                if budget is None:
                    raise
            told[name] = {"refused": str(error)}
            continue
        found[name] = document
        told[name] = {"measured": document["measured"], "run": document["run"]}
        if budget is not None:
            budget = f"{document['measured']['memory_budget_bytes']}B"
    if not found:
        raise BudgetError(f"no {what} meets {budget}", where="--memory-budget", allowed="a larger budget")
    return found, told


def _in_bytes(budget: str | None, whole_bytes: Callable[[], int | None]) -> str | None:
    """Return a budget in bytes; ``None`` for none, and for a share of what is not known."""
    parsed = None if budget is None else MemoryBudget.parse(budget)
    if parsed is None or parsed.share is None:
        return budget
    whole = whole_bytes()
    return None if whole is None else f"{parsed.resolve(whole)}B"
