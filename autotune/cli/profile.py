"""``autotune profile``: measure what a job's pieces cost, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from autotune.budget import format_bytes
from autotune.cli import console as shared
from autotune.cli.console import JsonOption, RunsOption

if TYPE_CHECKING:
    from autotune.physics.profile import Profile


def command(
    job: Annotated[str, typer.Argument(help="A catalog name, package.module:attribute, or file.py:attribute.")],
    validate: Annotated[int, typer.Option("--validate", min=0, help="Measure so many random plans as well.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure even if a profile is cached.")] = False,
    convergence: Annotated[
        bool, typer.Option("--convergence", help="Fit how the job converges to a few short real runs as well.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=5, help="About how long profiling may take.")] = 50.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of weights, batches and calibration plans.")] = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Measure what every unit of a job costs, so that the time and memory of any plan can be predicted."""
    from autotune.campaign import profiling
    from autotune.campaign.convergence import cached_convergence
    from autotune.campaign.runs import require_writable
    from autotune.catalog import load_job
    from autotune.engines.profiler import ProfilerOptions

    require_writable(runs_dir)
    found = load_job(job)
    output = shared.console(as_json=as_json)
    options = ProfilerOptions(seconds=seconds, seed=seed)
    with shared.Bars(output) as bars:
        bars.stage(f"profile {found.name}", 1)
        profile, path, cached = profiling.cached_profile(
            found, runs_dir, options=options, fresh=fresh, on_progress=bars.advance
        )
        validation = None
        if validate:
            bars.stage(f"measure {validate} random plans", 2 * validate)
            validation = profiling.validate(found, profile, validate, seed=seed + 1, on_plan=bars.advance)
        model = None
        if convergence:
            bars.stage("train a few short runs", 1)
            model, _, _ = cached_convergence(found, runs_dir, fresh=fresh, seed=seed, on_progress=bars.advance)
    for warning in profile.warnings:
        shared.console(as_json=True).print(f"warning: {warning}", soft_wrap=True)
    if as_json:
        document: dict[str, Any] = {"file": str(path), "cached": cached, **profile.to_json()}
        if validation is not None:
            document["validation"] = validation.to_json()
        if model is not None:
            document["convergence"] = model.to_json()
        shared.print_json(document)
        return
    output.print(_table(profile))
    output.print(
        f"{'From the cache' if cached else f'Took {profile.seconds:.0f} s and {profile.steps} real steps'}: {path}",
        soft_wrap=True,
    )
    if validation is not None:
        output.print(
            f"Against {validation.plans} random plans: peak memory off by {validation.memory_error_median:.2%} "
            f"(median), {validation.memory_error_p95:.2%} (p95), too low by "
            f"{validation.memory_underprediction_max:.2%} at worst; time off by {validation.time_error_median:.1%} "
            f"(median), {validation.time_error_p95:.1%} (p95), where two measurements of one plan differ by "
            f"{validation.time_noise_median:.1%}."
        )
    if model is not None:
        start, end = model.loss.at(0.0), model.loss.at(model.steps / max(model.runs, 1))
        output.print(
            f"Convergence, from {model.runs} runs of {model.steps} steps in all: the fitted loss is off by "
            f"{model.loss_error_frac:.1%}, the metric by {model.metric_error_frac:.1%} (medians). The noise scale is "
            f"{model.noise_scale(start):.3g} samples at a loss of {start:.3g} and {model.noise_scale(end):.3g} at "
            f"{end:.3g}.",
            soft_wrap=True,
        )


def _table(profile: Profile) -> Table:
    """Return each unit's costs at the smallest k."""
    k = profile.accumulation_choices[0]
    table = Table(title=f"{profile.job} on {profile.device}: one step at k = {k}", title_justify="left")
    table.add_column("unit")
    names = list(dict.fromkeys(name for s in profile.table(k).segments if s.unit for name in s.costs))
    for name in names:
        table.add_column(name, justify="right")
    for segment in profile.table(k).segments:
        if segment.unit is not None:
            cells = [
                f"{cost.seconds * 1e3:.1f} ms, {format_bytes(cost.saved_bytes)}" if cost is not None else ""
                for cost in (segment.costs.get(name) for name in names)
            ]
            table.add_row(segment.unit, *cells)
    return table
