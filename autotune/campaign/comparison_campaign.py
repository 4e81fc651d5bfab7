"""A comparison on one job, from the first check to the last file: references, arms, runs and documents."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune import knobs
from autotune.campaign import comparison
from autotune.campaign.arm_search import by_launch, is_searched, launched_arms, plain_arms, searched_arms, within_dips
from autotune.campaign.arms import is_live, named_arm, refuse_broken_arms, require_distinct
from autotune.campaign.baselines import References
from autotune.campaign.job_profile import (
    any_needs_profile,
    keep_profile,
    profile_first,
    profile_then,
    refuse_small_budget,
)
from autotune.campaign.setup import Campaign
from autotune.campaign.steps import SearchInputs, begin_run, begin_tracking, open_engine, publish_run, references_of
from autotune.engines.engine import Engine
from autotune.engines.isolated_engine import IsolatedEngine
from autotune.engines.job_checks import build_model, build_optimizer
from autotune.engines.torch_engine import EngineOptions
from autotune.io.documents import Count
from autotune.io.progress import Numbered
from autotune.job import Job
from autotune.launching import launched, relaunched, split
from autotune.mechanics.devices import device_name
from autotune.plan import Launch, Plan
from autotune.records.protocol import Arm, Protocol
from autotune.records.requests import CompareRequest
from autotune.records.run_directory import RunDirectory, require_writable
from autotune.records.tracking import Tracker
from autotune.report.png_figures import draw_comparison

logger = logging.getLogger(__name__)

_FIGURE = "comparison.png"


def compare(campaign: Campaign, request: CompareRequest, *, verb: str = "compare") -> dict[str, Any]:
    """Search for plans where arms need it, compare all arms and return the content of ``comparison.json``.

    Args:
        campaign: the campaign.
        request: the request of the campaign.
        verb: the command that the run directory is named after.

    Raises:
        InputError: for wrong input, before anything is written; or if the baseline's pilot run misses the target.
    """
    names = request.arms
    require_writable(campaign.runs)
    refuse_broken_arms([split(name, where="--arms")[0] for name in names])
    require_distinct(names)
    own, others = by_launch(campaign, names)
    refuse_small_budget(campaign)
    campaign = replace(campaign, reporter=Numbered(campaign.reporter, _stages(campaign, [own, *others.values()])))
    _require_launchable(campaign, others)
    campaign, known = profile_first(campaign, own)
    # Before any search: the baseline may miss its target.
    horizon = _horizon(campaign)
    with contextlib.ExitStack() as opened:
        with contextlib.closing(open_engine(campaign)) as engine:
            _require_fitting(campaign, names, engine)
            references = references_of(campaign, engine)
            profile = profile_then(campaign, own, known, engine)
            arms = plain_arms(campaign, own, engine, profile, references)
            lowest = within_dips(campaign, references)
            run = opened.enter_context(begin_run(campaign, verb, {"arms": names, "seeds": request.seeds}))
            keep_profile(campaign, run, profile)
            tracker = begin_tracking(campaign, run, f"{verb} {campaign.job.name}")
            inputs = SearchInputs(engine=engine, references=lowest, profile=profile, run=run, tracker=tracker)
            arms |= searched_arms(campaign, own, inputs)
        # Free the engine's memory before other arms and compared runs are measured.
        del engine, inputs
        for launch, group in others.items():
            arms |= launched_arms(campaign, launch, group, references.memory_budget_bytes, run, tracker)
        document = _run_arms(campaign, [arms[name] for name in names], request.seeds, horizon, references, tracker)
        document = {**document, "run": str(run.path)}
        _publish(document, run, tracker)
    return document


def _stages(campaign: Campaign, groups: Sequence[Sequence[str]]) -> int:
    """Return the number of stages of a comparison: per group of arms with the same launch options, and two for all."""
    return 2 + sum(1 + any_needs_profile(campaign, group) + sum(map(is_searched, group)) for group in groups)


def _require_fitting(campaign: Campaign, names: Sequence[str], engine: Engine) -> None:
    """Refuse plans of another model and rules that fail, before anything is measured."""
    for name in (split(name, where="--arms")[0] for name in names):
        if not is_searched(name) and not is_live(name):
            named_arm(name, campaign.job, engine.space)
        if name.endswith(".json"):
            warn_of_layout(name, campaign.launch)


def warn_of_layout(path: str, here: Launch) -> None:
    """Warn of a plan that was measured on other ranks than those of a comparison.

    Args:
        path: the plan's file.
        here: the launch choices of the comparison.
    """
    found = Plan.load(path).launch.of_ranks
    if found and found != here.of_ranks:
        logger.warning(
            "%s was measured with %s, and is compared here %s, where other plans may be better: options --engine, "
            "--ranks and --mesh or --zero-stage compare it as it was measured",
            path,
            _words(found),
            f"with {_words(here.of_ranks)}" if here.of_ranks else "in one process",
        )


def _words(choices: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in choices.items())


def _require_launchable(campaign: Campaign, others: Mapping[Launch, Sequence[str]]) -> None:
    """Refuse optimizers that cannot be built, and forms of sending that are not possible, before anything is run."""
    for launch in others:
        if campaign.ranks is not None:
            campaign.ranks.require_sendable(launch.knobs)
        elif campaign.cluster is None:
            knobs.require_several(launch.knobs, where=f"job {campaign.job.name!r}")
        build_optimizer(launched(campaign.job, launch), build_model(campaign.job))


def _run_arms(
    campaign: Campaign,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    horizon_samples: int,
    references: References,
    tracker: Tracker,
) -> dict[str, Any]:
    """Train every arm on every seed and return ``comparison.json`` without the path of the run directory."""
    reporter = campaign.reporter
    protocol = Protocol(
        job=campaign.job.name,
        arms=tuple(arm.name for arm in arms),
        seeds=tuple(seeds),
        horizon_samples=horizon_samples,
        memory_budget_bytes=references.memory_budget_bytes,
        dips=campaign.dips,
        watts=campaign.request.watts,
        gradient_norm=campaign.settings.objective.gradient_norm,
    )
    reporter.stage(f"compare {len(arms)} arms on {len(seeds)} seeds", len(arms) * len(seeds))
    return comparison.compare(
        campaign.job,
        arms,
        protocol,
        device=device_name(),
        tracker=tracker,
        journal=campaign.journal,
        reporter=reporter,
        intensity=campaign.intensity,
        open_run=_opener(campaign),
    )


def _opener(campaign: Campaign) -> comparison.OpenRun:
    """Return the function that opens the engine of a run: in this process, or on the campaign's ranks."""
    reference, ranks = campaign.reference, campaign.ranks
    if ranks is None:
        return comparison.on_one_rank
    assert reference is not None

    def opened(job: Job, seed: int, options: EngineOptions) -> IsolatedEngine:
        own = reference if job.launch == campaign.job.launch else relaunched(reference, job.launch)
        return IsolatedEngine(own, seed=seed, options=options, ranks=ranks)

    return opened


def _horizon(campaign: Campaign) -> int:
    """Return the number of samples in every compared run."""
    campaign.reporter.stage("pilot run of the baseline, to fix the length of all runs", 1)

    def find() -> int:
        return comparison.find_horizon(
            campaign.job,
            on_pilot=lambda number, share: campaign.reporter.advance(share, f"pilot {number + 1}"),
            needs_target=True,
            gradient_norm=campaign.settings.objective.gradient_norm,
            open_run=_opener(campaign),
        )

    return int(campaign.journal.once({"horizon": campaign.job.name}, find, Count))


def _publish(document: dict[str, Any], run: RunDirectory, tracker: Tracker) -> None:
    """Write the comparison, its figure, its best plan and its report, and log them."""
    tracker.artifact(run.write("comparison.json", document))
    tracker.artifact(draw_comparison(document, run.path / _FIGURE))
    best = _fastest_fitting_plan(document)
    if best is not None:
        tracker.artifact(run.write("plan.json", best))
    for entry in document["against_baseline"]:
        tracker.metrics({f"{name}.{entry['arm']}": entry[name] for name in ("time_ratio", "memory_ratio")})
        tracker.tags({f"verdict.{entry['arm']}": entry["verdict"]})
    publish_run(run, tracker)


def _fastest_fitting_plan(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the plan of the fastest static arm that reached the target within the budget on every seed, if any."""
    judged = [entry for entry in document["against_baseline"] if entry["verdict"] != "not comparable"]
    ratios = {document["baseline"]: 1.0, **{entry["arm"]: entry["time_ratio"] for entry in judged}}
    fitting = [
        arm
        for arm in document["arms"]
        if "plan" in arm
        and ratios.get(arm["name"]) is not None
        and all(run["within_budget"] and run["reached"] for run in arm["runs"])
    ]
    if not fitting:
        return None
    best: dict[str, Any] = min(fitting, key=lambda arm: ratios[arm["name"]])["plan"]
    return best
