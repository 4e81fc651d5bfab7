"""``autotune ramp``: find a learning rate, and when a step shall consume more batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.cli import console as shared
from autotune.cli.console import FixedCostOption, JobArgument, JsonOption, SeedOption, TotalCostOption

if TYPE_CHECKING:
    from autotune.campaign.batch_ramp import Ramp
    from autotune.job import Job


def command(
    job: JobArgument,
    fixed_cost: FixedCostOption = None,
    cost: TotalCostOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a job once, let branches of the run choose its learning rate, and let updates grow on the way.

    The fixed cost of an update is measured by its time, if it is not given. Nothing is written: the settings that are
    shown, at the updates where they begin, are for the schedule of your own run.
    """
    from autotune.campaign.batch_ramp import Costs, find_ramp, measured_fixed_cost
    from autotune.catalog import load_job

    found = load_job(job)
    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        fixed = measured_fixed_cost(found, seed=seed) if fixed_cost is None else fixed_cost
        total = found.max_steps * (fixed + found.batch_size) if cost is None else cost
        ramp = find_ramp(found, Costs(fixed_samples=fixed, total_samples=total), seed=seed, reporter=bars)
    document: dict[str, Any] = {
        "job": found.name,
        "fixed_samples": fixed,
        "total_samples": total,
        "metric": ramp.curve[-1][1] * (1 if found.goal == "min" else -1),
        **ramp.to_json(),
    }
    if as_json:
        shared.print_json(document)
        return
    show(found, ramp, document)


def show(job: Job, ramp: Ramp, document: dict[str, Any]) -> None:
    """Print the settings of the run from the updates on where they begin."""
    table = shared.table(title=f"{job.name}: settings of the run", title_justify="left")
    for name in ("from update", "batches per update", "samples per update", "learning rate"):
        table.add_column(name, justify="right")
    for update, setting in ramp.updates:
        k = setting.accumulation_steps
        table.add_row(str(update), str(k), str(k * job.batch_size), f"{setting.rate:g} x the job's")
    output = shared.console(as_json=False)
    output.print(table)
    output.print(
        f"Metric at the end: {document['metric']:.4g}. The fixed cost of an update is {document['fixed_samples']:.0f} "
        f"samples; branches that were not kept took {ramp.lost / ramp.cost:.0%} of the whole cost."
        + ("" if job.schedule is None else " The job's own schedule was left out."),
        soft_wrap=True,
    )
