"""Steps that a tuning and a comparison share, from the engine to the report."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from typing import Any

from autotune.budget import format_bytes
from autotune.campaign import plan_search
from autotune.campaign.baselines import References, measure_references
from autotune.campaign.setup import Campaign
from autotune.cost_model.profile import Profile
from autotune.engines.engine import Engine
from autotune.engines.tuning_windows import make_engine
from autotune.mechanics.devices import device_kind
from autotune.mechanics.flops import measure_peaks
from autotune.records.journal import JournaledEngine
from autotune.records.run_directory import RunDirectory
from autotune.records.tracking import Tracker, send_pending
from autotune.report.writing import publish


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchInputs:
    """Inputs of a search for a plan.

    Attributes:
        engine: engine that measures plans.
        references: measured references.
        profile: the job's profile; ``None`` if no method needs it.
        run: run directory for trials, the study and the policy.
        tracker: logs trials.
    """

    engine: Engine
    references: References
    profile: Profile | None
    run: RunDirectory
    tracker: Tracker


def open_engine(campaign: Campaign) -> JournaledEngine:
    """Return the engine that measures plans; windows in the journal are not measured again."""
    campaign.reporter.stage("measure the baseline", 1)
    if campaign.reference is None:
        # Other processes would not know what is measured here.
        measure_peaks(device_kind())
    engine = make_engine(
        campaign.job,
        campaign.settings.seed,
        isolate=campaign.reference,
        ranks=campaign.ranks,
        cluster=campaign.cluster,
        watts=campaign.request.watts,
    )
    return JournaledEngine(engine, campaign.journal)


def references_of(campaign: Campaign, engine: Engine, *, with_leanest: bool = True) -> References:
    """Measure the references; see :func:`autotune.campaign.baselines.measure_references`."""
    references = measure_references(engine, campaign.budget, with_leanest=with_leanest, clock=campaign.journal.clock)
    size = references.memory_budget_bytes
    campaign.reporter.advance(1, "" if size is None else f"budget {format_bytes(size)}")
    return references


def begin_run(campaign: Campaign, verb: str, config: dict[str, Any]) -> RunDirectory:
    """Return the run directory: a new one that records the request, or that of a resumed campaign.

    Args:
        campaign: the campaign.
        verb: name of the command.
        config: keys of ``config.json`` that only this command has.
    """
    if campaign.run is not None:
        return campaign.run
    budget, settings = campaign.budget, campaign.settings
    run = RunDirectory.create(
        campaign.runs,
        verb,
        campaign.job,
        {
            **config,
            "memory_budget": None if budget is None else {"size_bytes": budget.size_bytes, "share": budget.share},
            "steps": settings.steps,
            "seed": settings.seed,
            "asked": asdict(campaign.request),
        },
    )
    with contextlib.ExitStack() as opened:
        # An interruption here, too, tells how to finish the run.
        opened.enter_context(run)
        campaign.journal.keep_in(run.path)
        send_pending(campaign.runs)
        opened.pop_all()
    return run


def begin_tracking(campaign: Campaign, run: RunDirectory, name: str) -> Tracker:
    """Return the tracker of a campaign; its parent run has what was asked as parameters."""
    tracker = Tracker(campaign.runs, run.path, name, campaign.request.report_to)
    # An address of a database may name its user.
    asked = {name: value for name, value in asdict(campaign.request).items() if value is not None and name != "storage"}
    tracker.params({**asked, "job": campaign.job.name})
    tracker.tags({"run_directory": run.path.name})
    return tracker


def search_plan(campaign: Campaign, method: str, inputs: SearchInputs) -> plan_search.TuningResult:
    """Search for a plan with one method; the plan in the result has the campaign's launch options."""
    campaign.reporter.stage(f"tune with {method}", campaign.settings.steps)
    # The first connection to the database migrates its schema, which must not happen during a timed window.
    inputs.tracker.settle(20.0)
    result = plan_search.tune(
        campaign.job,
        method,
        inputs.engine,
        inputs.references,
        campaign.settings,
        run=inputs.run,
        tracker=inputs.tracker,
        profile=inputs.profile,
        on_progress=campaign.reporter.advance,
        clock=campaign.journal.clock,
    )
    return replace(result, plan=result.plan.changed(launch=campaign.launch))


def publish_run(run: RunDirectory, tracker: Tracker) -> None:
    """Write the report of a finished campaign, log it and any trained policy, and close the tracker."""
    if (run.path / "policy").is_dir():
        tracker.artifact(run.path / "policy")
    publish(run.path, tracker)
    tracker.close()
