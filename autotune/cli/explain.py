"""``autotune explain``: the reasons for a plan, unit by unit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import require_readable
from autotune.cli.console import JsonOption, RunsOption

if TYPE_CHECKING:
    from rich.table import Table

    from autotune.cost_model.profile import Profile
    from autotune.job import Job
    from autotune.plan import Plan, PlanSpace
    from autotune.records.run_directory import RunDirectory
    from autotune.report.explanation import Row


def command(
    subject: Annotated[str, typer.Argument(metavar="PLAN|RUN", help="A run directory, a plan file or a rule's name.")],
    job: Annotated[str | None, typer.Option("--job", help="The job, for a plan file or a rule.")] = None,
    pareto: Annotated[bool, typer.Option("--pareto", help="Show the fastest plan of every budget as well.")] = False,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Show every choice of a plan, why the rule or the search made it, and its cost if the job was profiled."""
    from autotune.errors import InputError
    from autotune.profiling.profile_cache import find_profile, read_profile
    from autotune.records.run_directory import PROFILE
    from autotune.report.explanation import unit_costs

    plan, found, space, rows = _explain(subject, job)
    kept = Path(subject) / PROFILE
    # A run contains the profile that it was planned with; a run on several ranks has its own.
    profile = read_profile(kept) if kept.is_file() else find_profile(found, runs_dir)
    if pareto and profile is None:
        raise InputError("the job has no profile yet", where="--pareto", allowed=f"autotune profile {found.name} first")
    costs = {}
    if profile is not None and plan.accumulation_steps in profile.accumulation_choices:
        costs = unit_costs(profile, plan)
    front = pareto_rows(profile) if profile is not None and pareto else []
    if as_json:
        document = {"plan": plan.to_json(), "rows": [{**asdict(row), "cost": costs.get(row.unit)} for row in rows]}
        shared.print_json({**document, "pareto": front} if pareto else document)
        return
    output = shared.console(as_json=False)
    table = shared.table(title=f"{subject}: {plan}", title_justify="left")
    for name in ("unit", "kind", "choice", "why", *(["measured, per step"] if costs else [])):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row.unit, row.kind, row.choice, row.reason, *([costs.get(row.unit, "")] if costs else []))
    output.print(table)
    output.print(f"{len(space.units)} units, of which {len(space.recomputable)} can be recomputed.")
    if not costs:
        output.print(f"What each unit costs is known after: autotune profile {found.name}")
    if front:
        output.print(_front_table(front))


def pareto_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return the fastest plan for each of several budgets, as JSON objects, the smallest budget first."""
    from autotune.cost_model.solver import pareto_front

    return [
        {
            "peak_bytes": solution.peak_bytes,
            "seconds_per_step": solution.seconds_per_step,
            "seconds_per_sample": solution.seconds_per_sample,
            "gap": solution.gap,
            "plan": solution.plan.to_json(),
        }
        for solution in pareto_front(profile)
    ]


def _front_table(front: list[dict[str, Any]]) -> Table:
    from autotune.budget import format_bytes
    from autotune.plan import Plan

    table = shared.table(title="the fastest plan of every budget, predicted", title_justify="left")
    for name in ("peak", "step", "plan"):
        table.add_column(name)
    for row in front:
        plan = str(Plan.from_json(row["plan"]))
        table.add_row(format_bytes(row["peak_bytes"]), f"{row['seconds_per_step'] * 1e3:.0f} ms", plan)
    return table


def _explain(subject: str, job: str | None) -> tuple[Plan, Job, PlanSpace, list[Row]]:
    from autotune.agents.rules import RULES, rule_plan
    from autotune.errors import InputError
    from autotune.records.results import trials_of
    from autotune.records.run_directory import RunDirectory
    from autotune.report import explanation

    path = Path(subject)
    require_readable(path, where=subject)
    if path.is_dir():
        run = RunDirectory.open(path)
        found, space = _space(job or _catalog_job(run))
        plan = space.check(Plan.load(path), where=str(path / "plan.json"))
        return plan, found, space, explanation.explain_trials(plan, space, trials_of(run))
    if job is None:
        raise InputError("no job was given", where="--job", allowed="the job that the plan is for")
    found, space = _space(job)
    if subject in RULES:
        plan = rule_plan(subject, space)
        return plan, found, space, explanation.explain_rule(plan, space, RULES[subject])
    if path.suffix != ".json":
        raise InputError(f"{subject!r} is unknown", where="explain", allowed=["a run", "a .json plan", *RULES.names])
    plan = space.check(Plan.load(path), where=str(path))
    if (path.parent / "trials.jsonl").is_file():
        trials = trials_of(RunDirectory(path.parent))
        return plan, found, space, explanation.explain_trials(plan, space, trials)
    return plan, found, space, explanation.explain_file(plan, space)


def _catalog_job(run: RunDirectory) -> str:
    """Return the run's job if it is in the catalog; other jobs are code, which only the command line may name."""
    from autotune.catalog import is_catalog_reference
    from autotune.errors import InputError
    from autotune.records.run_documents import CompareConfig, TuneConfig

    config = run.config
    asked = config.asked.job if isinstance(config, TuneConfig | CompareConfig) else None
    name = asked or config.job
    if not is_catalog_reference(name):
        raise InputError(f"the run's job {name!r} is not in the catalog", where="--job", allowed="the job's reference")
    return name


def _space(reference: str) -> tuple[Job, PlanSpace]:
    from autotune.catalog import load_job
    from autotune.engines.torch_engine import TorchEngine

    job = load_job(reference)
    engine = TorchEngine(job)
    engine.close()
    return job, engine.space
