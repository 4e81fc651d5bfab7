"""Check of a request before anything is measured, and the state that the steps of its campaign share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from autotune import extras
from autotune.agents.study_store import checked
from autotune.budget import MemoryBudget
from autotune.campaign.plan_search import TuningSettings
from autotune.campaign.trusted_inputs import TrustedInputs
from autotune.catalog import load_job, refuse_while_loading
from autotune.cost_model.carbon import Intensity
from autotune.cost_model.paper_equations import Weights
from autotune.engines.ray_cluster import ClusterOptions
from autotune.engines.registry import ENGINES, RankOptions
from autotune.errors import InputError, JobError
from autotune.gym.reward import Objective
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.launching import with_knobs
from autotune.mechanics.devices import require_devices
from autotune.mechanics.energy_meter import require_watts
from autotune.mechanics.processor_wait import busy_frac
from autotune.plan import Launch
from autotune.records.journal import Journal
from autotune.records.protocol import Dips
from autotune.records.requests import CompareRequest, Request, TuneRequest, reference_of
from autotune.records.run_directory import RunDirectory
from autotune.records.run_documents import LaunchChoices
from autotune.report_to import chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A checked request, and the state that the steps of its campaign share.

    Attributes:
        request: the request.
        job: the job.
        reference: the job's reference, if windows run in worker processes; ``None`` for this process.
        runs: the runs folder.
        reporter: shows progress.
        budget: the memory budget; ``None`` for none.
        settings: limits and objective of each search.
        ranks: processes that train the job together through DeepSpeed; ``None`` for one process without DeepSpeed.
        cluster: cluster whose workers measure plans in parallel; ``None`` for this machine.
        dips: dips of the budget in compared runs; ``None`` for a constant budget. Static plans must fit the budget
            during a dip.
        intensity: grams of CO2 per kWh, for compared runs; ``None`` if it was not given.
        journal: operations of the campaign so far.
        run: run directory of a resumed campaign; ``None`` for a new campaign.
        knob_trials: what free knobs win, if they were measured for this campaign; ``None`` if not.
    """

    request: Request
    job: Job
    reference: str | None
    runs: Path
    reporter: Reporter
    budget: MemoryBudget | None
    settings: TuningSettings
    ranks: RankOptions | None
    cluster: ClusterOptions | None
    dips: Dips | None = None
    intensity: Intensity | None = None
    journal: Journal = field(default_factory=Journal)
    run: RunDirectory | None = None
    knob_trials: LaunchChoices | None = None

    @property
    def launch(self) -> Launch:
        """Return the launch options of the campaign's plans."""
        return self.job.launch if self.ranks is None else self.ranks.launched(self.job.launch)


def prepare(request: Request, trusted: TrustedInputs, runs: Path, reporter: Reporter) -> Campaign:
    """Check a request and return its campaign; nothing is measured or written.

    Args:
        request: the request.
        trusted: inputs that the caller supplies for the request.
        runs: the runs folder.
        reporter: shows progress.

    Raises:
        InputError: if an option is wrong, or two options contradict each other.
    """
    refuse_while_loading()
    busy_frac()
    chosen(request.report_to, where="--report-to")
    dips, intensity = None, None
    if isinstance(request, CompareRequest):
        trusted.require_arms(request.arms)
        dips = None if request.dips is None else Dips.parse(request.dips)
        if dips is not None and request.memory_budget is None:
            raise InputError("--dips requires --memory-budget")
        carbon = trusted.carbon(request.carbon_intensity)
        intensity = None if carbon is None else Intensity.parse(carbon)
    job = trusted.job(request.job)
    ranks, cluster = trusted.rank_options(request.ranks), trusted.cluster_options(request.cluster)
    if ranks is not None and cluster is not None:
        raise InputError("--cluster cannot be combined with --ranks: ranks run on one machine")
    if cluster is not None:
        extras.require("ray", where="--cluster")
    if ranks is not None:
        for module in ENGINES[ranks.engine].requires:
            extras.require(module, where=f"engine {ranks.engine}")
        require_devices(ranks.count, "--ranks")
    if request.in_workers and not isinstance(job, str):
        raise JobError(
            f"expected a job's reference, got {type(job).__name__}: worker processes load the job by its reference",
            where="isolate",
        )
    if isinstance(request, TuneRequest):
        _require_knobs(request)
    require_watts(request.watts)
    weights = Weights() if request.weights is None else Weights.parse(request.weights)
    objective = Objective(weights=weights, gradient_norm=request.gradient_norm)
    budget = None if request.memory_budget is None else MemoryBudget.parse(request.memory_budget)
    storage = trusted.database(request.storage)
    settings = TuningSettings(
        steps=request.steps,
        trials=request.trials,
        seed=request.seed,
        objective=objective,
        storage=None if storage is None else checked(storage),
    )
    loaded = as_requested(load_job(job), request)
    if ranks is not None:
        ranks.require_sendable(loaded.launch.knobs)
    return Campaign(
        request=request,
        job=loaded,
        reference=reference_of(job) if request.in_workers else None,
        runs=runs,
        reporter=reporter,
        budget=budget,
        settings=settings,
        ranks=ranks,
        cluster=cluster,
        dips=dips,
        intensity=intensity,
    )


def as_requested(job: Job, request: Request) -> Job:
    """Return a job with the free knobs that a tuning applies.

    Raises:
        InputError: if the recorded knobs are not valid.
    """
    choices = request.launch_choices if isinstance(request, TuneRequest) else None
    return with_knobs(job, choices, where="launch_choices") if choices else job


def _require_knobs(request: TuneRequest) -> None:
    """Refuse to measure knobs where windows run in other processes, and their options without it."""
    if request.tolerant and not request.knobs:
        raise InputError("--tolerant requires --knobs")
    if request.launch_choices is not None and not request.knobs:
        raise InputError("launch_choices requires knobs")
    if request.knobs and request.in_workers:
        raise InputError(
            "--knobs cannot be combined with --isolate, --ranks or --cluster: knobs are measured in this process",
            allowed="autotune knobs JOB, and then its choices behind the name of the job",
        )
