"""``autotune explain``: the reasons for a plan, unit by unit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    """Show every choice of a plan, why the rule or the search made it, and what other choices would change.

    Costs and the effects of other choices are known if the job was profiled.
    """
    from autotune.errors import InputError
    from autotune.report.alternatives import other_choices
    from autotune.report.explanation import unit_costs

    found = _explain(subject, job, runs_dir)
    plan, profile = found.plan, found.profile
    if pareto and profile is None:
        allowed = f"autotune profile {shlex.quote(found.job)} first"
        raise InputError("the job has no profile yet", where="--pareto", allowed=allowed)
    costs, others = {}, {}
    if profile is not None and plan.accumulation_steps in profile.accumulation_choices:
        costs, others = unit_costs(profile, plan), other_choices(profile, plan, found.budget_bytes)
    front = pareto_rows(profile) if profile is not None and pareto else []
    if as_json:
        rows = [{**asdict(row), "cost": costs.get(row.unit), "others": others.get(row.unit)} for row in found.rows]
        document = {"plan": plan.to_json(), "rows": rows}
        shared.print_json({**document, "pareto": front} if pareto else document)
        return
    output = shared.console(as_json=False)
    output.print(_choice_table(f"{subject}: {plan}", found.rows, costs))
    reasons = {row.reason for row in found.rows}
    if len(reasons) == 1:
        output.print(f"Why each choice was made: {reasons.pop()}.")
    if others:
        output.print("What another choice for one of them alone would change, in time and peak, as predicted:")
    for unit, effects in others.items():
        output.print(f"  {unit}: {effects or 'there is none'}", soft_wrap=True)
    output.print(f"{len(found.space.units)} units, of which {len(found.space.recomputable)} can be recomputed.")
    if not costs:
        output.print(f"What each unit costs is known after: autotune profile {shlex.quote(found.job)}", soft_wrap=True)
    if front:
        output.print(_front_table(front))


def _choice_table(title: str, rows: Sequence[Row], costs: Mapping[str, str]) -> Table:
    """Return a table of the choices; reasons and costs have a column only if they differ by row."""
    columns = {
        "kind": {row.unit: row.kind for row in rows if row.kind},
        "choice": {row.unit: row.choice for row in rows},
        "why": {row.unit: row.reason for row in rows} if len({row.reason for row in rows}) > 1 else {},
        "measured, per step": costs,
    }
    shown = {name: column for name, column in columns.items() if column}
    table = shared.table(title=title, title_justify="left")
    for name in ("unit", *shown):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row.unit, *(column.get(row.unit, "") for column in shown.values()))
    return table


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Explained:
    """A plan and what is known about it.

    Attributes:
        plan: the plan, with a choice for every unit.
        space: the space that contains it.
        rows: its choices and their reasons.
        job: name of the job.
        profile: profile of the job; ``None`` if it was never profiled.
        budget_bytes: memory budget of the run; ``None`` without one.
    """

    plan: Plan
    space: PlanSpace
    rows: Sequence[Row]
    job: str
    profile: Profile | None
    budget_bytes: int | None = None


def _explain(subject: str, job: str | None, runs: Path) -> _Explained:
    from autotune.agents.rules import RULES, rule_plan
    from autotune.errors import InputError
    from autotune.profiling.profile_cache import find_profile
    from autotune.records.results import trials_of
    from autotune.records.run_directory import RunDirectory
    from autotune.report import explanation

    path = Path(subject)
    require_readable(path, where=subject)
    if path.is_dir():
        return _explain_run(path, job, runs)
    if subject not in RULES and path.suffix != ".json":
        allowed = ["a run directory", "a .json plan", *RULES.names]
        problem = "is no run, plan or rule" if path.exists() else "does not exist"
        raise InputError(f"{subject!r} {problem}", where="explain", allowed=allowed, given=subject)
    if job is None:
        raise InputError("no job was given", where="--job", allowed="the job that the plan is for")
    found, space = _space(job)
    if subject in RULES:
        plan = rule_plan(subject, space)
        rows = explanation.explain_rule(plan, space, RULES[subject])
    else:
        plan = space.load(path, where=str(path))
        if (path.parent / "trials.jsonl").is_file():
            rows = explanation.explain_trials(plan, space, trials_of(RunDirectory(path.parent)))
        else:
            rows = explanation.explain_file(plan, space)
    return _Explained(plan=plan, space=space, rows=rows, job=job, profile=find_profile(found, runs))


def _explain_run(path: Path, job: str | None, runs: Path) -> _Explained:
    """Explain a run's plan by its own profile; without one, the job is loaded to know its units."""
    from autotune.profiling.profile_cache import find_profile, read_profile
    from autotune.records.results import trials_of
    from autotune.records.run_directory import PROFILE, RunDirectory
    from autotune.report import explanation

    run = RunDirectory.open(path)
    # A run contains the profile that it was planned with.
    profile = read_profile(path / PROFILE) if (path / PROFILE).is_file() else None
    if profile is not None and job is None:
        space, name = profile.space, run.config.job
    else:
        name = job or _catalog_job(run)
        found, space = _space(name)
        profile = profile or find_profile(found, runs)
    plan = space.load(path, where=str(path / "plan.json"))
    rows = explanation.explain_trials(plan, space, trials_of(run))
    return _Explained(plan=plan, space=space, rows=rows, job=name, profile=profile, budget_bytes=_budget(path))


def _budget(path: Path) -> int | None:
    """Return the memory budget of a run; ``None`` without one, or for a run that is not finished."""
    from autotune.errors import RunDirectoryError
    from autotune.report.campaign_run import read_campaign

    try:
        return read_campaign(path).budget_bytes
    except RunDirectoryError:
        return None


def _catalog_job(run: RunDirectory) -> str:
    """Return the run's job if it is in the catalog; other jobs are code, which only the command line may name."""
    from autotune.catalog import is_catalog_reference
    from autotune.errors import InputError
    from autotune.records.run_documents import CompareConfig, TuneConfig

    config = run.config
    asked = config.asked.job if isinstance(config, TuneConfig | CompareConfig) else None
    name = asked or config.job
    if not is_catalog_reference(name):
        raise InputError(
            f"the run has no profile, and its job {name!r} is not in the catalog",
            where="--job",
            allowed="the job's reference, such as mine.py:job",
        )
    return name


def _space(reference: str) -> tuple[Job, PlanSpace]:
    from autotune.catalog import load_job
    from autotune.engines.torch_engine import TorchEngine

    job = load_job(reference)
    engine = TorchEngine(job)
    engine.close()
    return job, engine.space
