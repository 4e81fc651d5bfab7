"""``autotune explain``: why a plan is what it is, unit by unit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from autotune.cli import console as shared
from autotune.cli.console import JsonOption

if TYPE_CHECKING:
    from autotune.campaign.runs import RunDirectory
    from autotune.plan import Plan, PlanSpace
    from autotune.report.explanation import Row


def command(
    subject: Annotated[str, typer.Argument(metavar="PLAN|RUN", help="A run directory, a plan file or a rule's name.")],
    job: Annotated[str | None, typer.Option("--job", help="The job, for a plan file or a rule.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show every choice of a plan and why the rule or the search made it."""
    plan, space, rows = _explain(subject, job)
    if as_json:
        shared.print_json({"plan": plan.to_json(), "rows": [_row(row) for row in rows]})
        return
    output = shared.console(as_json=False)
    table = Table(title=f"{subject}: {plan}", title_justify="left")
    for name in ("unit", "kind", "choice", "why"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row.unit, row.kind, row.choice, row.reason)
    output.print(table)
    output.print(f"{len(space.units)} units, of which {len(space.recomputable)} can be recomputed.")


def _explain(subject: str, job: str | None) -> tuple[Plan, PlanSpace, list[Row]]:
    from autotune.agents.rules import RULES
    from autotune.campaign.runs import RunDirectory, read_plan
    from autotune.errors import InputError
    from autotune.report import explanation

    path = Path(subject)
    if path.is_dir():
        run = RunDirectory.open(path)
        space = _space(job or _catalog_job(run))
        plan = space.check(read_plan(path / "plan.json"), where=str(path / "plan.json"))
        return plan, space, explanation.explain_search(plan, space, run.lines("trials.jsonl"))
    if job is None:
        raise InputError("no job was given", where="--job", allowed="the job that the plan is for")
    space = _space(job)
    if subject in RULES:
        plan = RULES[subject].plan(space)
        return plan, space, explanation.explain_rule(plan, space, RULES[subject])
    if path.suffix != ".json":
        raise InputError(f"{subject!r} is unknown", where="explain", allowed=["a run", "a .json plan", *RULES])
    plan = space.check(read_plan(path), where=str(path))
    if (path.parent / "trials.jsonl").is_file():
        trials = RunDirectory(path.parent).lines("trials.jsonl")
        return plan, space, explanation.explain_search(plan, space, trials)
    return plan, space, explanation.explain_file(plan, space)


def _catalog_job(run: RunDirectory) -> str:
    """Return the run's job if it is a reference job: any other is code, which only the command line may name."""
    from autotune.catalog import catalog
    from autotune.errors import InputError

    name = str(run.read("config.json").get("job"))
    if name not in catalog():
        raise InputError(f"the run's job {name!r} is not in the catalog", where="--job", allowed="the job's reference")
    return name


def _space(reference: str) -> PlanSpace:
    from autotune.catalog import load_job
    from autotune.engines.torch_engine import TorchEngine

    engine = TorchEngine(load_job(reference))
    engine.close()
    return engine.space


def _row(row: Row) -> dict[str, Any]:
    return {"unit": row.unit, "kind": row.kind, "choice": row.choice, "reason": row.reason}
