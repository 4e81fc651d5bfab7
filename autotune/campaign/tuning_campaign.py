"""A tuning, from the first check to the last file: references, profile, search and documents."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from autotune.agents.planner import close_plans
from autotune.agents.search_methods import METHODS, Method, PlanningMethod, find_method
from autotune.campaign.baselines import References
from autotune.campaign.job_profile import (
    any_needs_profile,
    keep_profile,
    profile_first,
    profile_then,
    refuse_small_budget,
)
from autotune.campaign.knob_trials import KnobTrials
from autotune.campaign.plan_search import TuningResult
from autotune.campaign.setup import Campaign, as_requested
from autotune.campaign.steps import (
    SearchInputs,
    begin_run,
    begin_tracking,
    open_engine,
    publish_run,
    references_of,
    search_plan,
)
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal, solve, with_shadow_price
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import InputError, RunDirectoryError
from autotune.io.documents import validated
from autotune.io.progress import Numbered
from autotune.measurement import Measurement
from autotune.plan import Plan
from autotune.records.requests import TuneRequest
from autotune.records.run_directory import LAUNCH_CHOICES, RunDirectory, require_writable
from autotune.records.run_documents import LaunchChoices
from autotune.records.tracking import Tracker
from autotune.step_parts import StepParts


def tune(campaign: Campaign, method: str) -> dict[str, Any]:
    """Find a plan with one method and return the document that ``autotune tune --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    found = find_method(method)
    _require_method(campaign, method, found)
    require_writable(campaign.runs)
    campaign = _with_measured_knobs(campaign)
    refuse_small_budget(campaign)
    campaign = replace(campaign, reporter=Numbered(campaign.reporter, 2 + any_needs_profile(campaign, [method])))
    campaign, known = profile_first(campaign, [method])
    with contextlib.ExitStack() as opened:
        with contextlib.closing(open_engine(campaign)) as engine:
            references = references_of(campaign, engine, with_leanest=not isinstance(found, PlanningMethod))
            campaign.settings.objective.check(references.baseline)
            profile = profile_then(campaign, [method], known, engine)
            if profile is not None:
                # Refuse a budget that cannot be met before anything is written.
                plans = found.plans if isinstance(found, PlanningMethod) else close_plans
                with METHODS.errors_named(method):
                    plans(profile, references.memory_budget_bytes, Goal())
            run = opened.enter_context(begin_run(campaign, "tune", {"method": method}))
            if campaign.knob_trials is not None:
                run.write(LAUNCH_CHOICES, {"version": 1, **asdict(campaign.knob_trials)})
            keep_profile(campaign, run, profile)
            tracker = begin_tracking(campaign, run, f"tune {campaign.job.name} {method}")
            inputs = SearchInputs(engine=engine, references=references, profile=profile, run=run, tracker=tracker)
            result = search_plan(campaign, method, inputs)
        document = {**_document(result, references, profile), **_knobs_found(run), "run": str(run.path)}
        _log(document, tracker)
        tracker.artifact(run.write("plan.json", result.plan.to_json()))
        tracker.artifact(run.write("tuned.json", document))
        publish_run(run, tracker)
    return document


def _with_measured_knobs(campaign: Campaign) -> Campaign:
    """Measure free knobs if they were asked for, and apply the recommended ones to the job.

    A resumed campaign has the knobs with which it began.
    """
    request = campaign.request
    if not isinstance(request, TuneRequest) or not request.knobs or request.launch_choices is not None:
        return campaign
    found = KnobTrials(tolerant=request.tolerant, seed=request.seed, reporter=campaign.reporter).measure(campaign.job)
    request = replace(request, launch_choices=found.recommended or "")
    return replace(campaign, request=request, job=as_requested(campaign.job, request), knob_trials=found)


def _knobs_found(run: RunDirectory) -> dict[str, Any]:
    """Return ``launch_choices`` of ``tuned.json``; empty if no knobs were measured."""
    if not run.has(LAUNCH_CHOICES):
        return {}
    found = run.read(LAUNCH_CHOICES)
    where = str(run.path / LAUNCH_CHOICES)
    return {"launch_choices": asdict(validated(LaunchChoices, found, where=where, version=1, error=RunDirectoryError))}


def _log(document: Mapping[str, Any], tracker: Tracker) -> None:
    """Log what was found on the parent run."""
    parts = StepParts.from_json(document["measured"]["parts"]).metrics() if document["measured"]["parts"] else {}
    found = {**document["measured"], **parts, **{name: document[name] for name in ("tuning_s", "tuning_steps")}}
    tracker.metrics({name: value for name, value in found.items() if isinstance(value, int | float)})
    tracker.tags({"plan": Plan.from_json(document["plan"])})


def _require_method(campaign: Campaign, name: str, method: Method) -> None:
    """Refuse a method that contradicts the cluster or the weights."""
    own = METHODS.registered.items()
    if campaign.cluster is not None and not method.spreads:
        raise InputError(
            f"--cluster cannot be combined with --method {name}, which measures one plan after another",
            allowed=f"--method {', '.join(other for other, entry in own if entry.spreads)}",
        )
    weights = campaign.settings.objective.weights
    if not method.weighs_energy and not weights.time and not weights.memory:
        raise InputError(
            f"--method {name} plans by time and memory, and --weights gives neither a weight",
            allowed=f"w1 or w2 above 0, or --method {', '.join(other for other, entry in own if entry.weighs_energy)}",
        )


def _document(result: TuningResult, references: References, profile: Profile | None) -> dict[str, Any]:
    """Return ``tuned.json`` without the path of the run directory."""
    budget = references.memory_budget_bytes
    return {
        "plan": result.plan.to_json(),
        "predicted": None if profile is None else _predicted(profile, result.plan, budget),
        "measured": {
            "seconds_per_step": result.measurement.seconds_per_step,
            "peak_bytes": result.measurement.peak_bytes,
            "throughput": result.measurement.throughput,
            "cost": result.cost,
            "sample_j": result.measurement.sample_j,
            "baseline_sample_j": result.baseline.sample_j,
            "energy_source": result.measurement.energy_source,
            "baseline_seconds_per_step": result.baseline.seconds_per_step,
            "baseline_peak_bytes": references.baseline.peak_bytes,
            "memory_budget_bytes": budget,
            "waited_frac": result.measurement.waited_frac,
            "parts": _parts(result.measurement),
            "baseline_parts": _parts(result.baseline),
        },
        "tuning_s": result.tuning_s,
        "tuning_steps": result.tuning_steps,
    }


def _parts(window: Measurement) -> dict[str, Any] | None:
    return None if window.parts is None else window.parts.to_json()


def _predicted(profile: Profile, plan: Plan, budget_bytes: int | None) -> dict[str, float]:
    """Return what a profile predicts for a plan.

    Returns:
        ``seconds_per_step``, ``peak_bytes`` and, under a budget, ``seconds_per_gib``: the seconds per step that one
        more GiB would save in the exact solver's plan.
    """
    document = {"seconds_per_step": seconds_per_step(profile, plan), "peak_bytes": peak_bytes(profile, plan)}
    if budget_bytes is not None:
        priced = with_shadow_price(profile, solve(profile, budget_bytes), budget_bytes)
        document["seconds_per_gib"] = priced.shadow_price or 0.0
    return document
