"""``autotune profile``: measure the cost of each unit of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.budget import format_bytes
from autotune.cli import console as shared
from autotune.cli.console import (
    ConfigOption,
    EngineOption,
    JobArgument,
    JsonOption,
    LeanOption,
    MeshOption,
    RanksOption,
    RunsOption,
    ZeroStageOption,
)
from autotune.errors import InputError
from autotune.io.documents import LARGEST_SEED

if TYPE_CHECKING:
    from rich.table import Table

    from autotune.cost_model.profile import Cost, Profile


# Most choices that fit beside each other.
_MOST_COLUMNS = 4


def command(
    job: JobArgument,
    validate: Annotated[
        int, typer.Option("--validate", min=0, max=10_000, help="Also measure this number of random plans.")
    ] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure even if a cached profile exists.")] = False,
    convergence: Annotated[
        bool, typer.Option("--convergence", help="Also fit a model of convergence to a few short real runs.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=5, max=shared.LONGEST_S, help="Approximate seconds for profiling."),
    ] = 50.0,
    lean: LeanOption = False,
    engine: EngineOption = "torch",
    ranks: RanksOption = None,
    zero_stage: ZeroStageOption = "0",
    ds_config: ConfigOption = None,
    mesh: MeshOption = None,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=LARGEST_SEED, help="Random seed for weights, batches and calibration plans."),
    ] = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Measure the cost of every unit of a job, so that the time and memory of any plan can be predicted."""
    from autotune.profiling.profile_index import indexed_profile

    rank_options = shared.ranks(engine, ranks, zero_stage, ds_config, mesh)
    if rank_options is not None and "all" in (zero_stage, mesh):
        option = "--mesh" if mesh == "all" else "--zero-stage"
        raise InputError(f"{option} is all: only one layout of the ranks is profiled at a time", where=option)
    if rank_options is not None and convergence:
        raise InputError(f"--engine {engine} cannot be combined with --convergence")
    known = None if fresh or validate or convergence or rank_options else indexed_profile(job, runs_dir, lean=lean)
    if known is not None:
        _show(known[0], known[1], {}, cached=True, as_json=as_json)
        return
    from autotune.catalog import load_job
    from autotune.profiling import profile_cache
    from autotune.profiling.convergence_runs import cached_convergence
    from autotune.profiling.profile_index import remember
    from autotune.profiling.profiler import ProfilerOptions
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)
    found = load_job(job)
    options = ProfilerOptions.lean(seed) if lean else ProfilerOptions(seconds=seconds, seed=seed)
    more: dict[str, Any] = {}
    ranked = None if rank_options is None else profile_cache.Ranked(job, rank_options)
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage(f"profile {found.name}", 1)
        profile, path, cached = profile_cache.cached_profile(
            found,
            runs_dir,
            options=options,
            fresh=fresh,
            on_progress=bars.advance,
            ranked=ranked,
        )
        if rank_options is None:
            remember(job, path, runs_dir)
        if validate:
            bars.stage(f"measure {validate} random plans", 2 * validate)
            more["validation"] = profile_cache.validate(
                found, profile, validate, seed=seed + 1, on_plan=bars.advance, ranked=ranked
            ).to_json()
        if convergence:
            bars.stage("train a few short runs", 1)
            model, _, _ = cached_convergence(found, runs_dir, fresh=fresh, seed=seed, on_progress=bars.advance)
            more["convergence"] = model.to_json()
    _show(profile, path, more, cached=cached, as_json=as_json)


def _show(profile: Profile, path: Path, more: dict[str, Any], *, cached: bool, as_json: bool) -> None:
    for warning in profile.warnings:
        shared.console(as_json=True).print(f"warning: {warning}", soft_wrap=True)
    if as_json:
        shared.print_json({"file": str(path), "cached": cached, **profile.to_json(), **more})
        return
    output = shared.console(as_json=False)
    output.print(_table(profile))
    taken = f"Took {profile.seconds:.0f} s and {profile.steps} real steps"
    output.print(f"{'From the cache' if cached else taken}: {path}", soft_wrap=True)
    lines = {"validation": _validation_line, "convergence": _convergence_line}
    for name, document in more.items():
        output.print(lines[name](document), soft_wrap=True)


def _validation_line(found: dict[str, Any]) -> str:
    return (
        f"Against {found['plans']} random plans: peak memory off by {found['memory_error_median']:.2%} (median), "
        f"{found['memory_error_p95']:.2%} (p95), too low by {found['memory_underprediction_max']:.2%} at worst; time "
        f"off by {found['time_error_median']:.1%} (median), {found['time_error_p95']:.1%} (p95), where two "
        f"measurements of one plan differ by {found['time_noise_median']:.1%}."
    )


def _convergence_line(document: dict[str, Any]) -> str:
    from autotune.simulator.convergence import Convergence

    model = Convergence.from_json(document)
    start, end = model.loss.at(0.0), model.loss.at(model.steps / max(model.runs, 1))
    return (
        f"Convergence, from {model.runs} runs of {model.steps} steps in all: the fitted loss is off by "
        f"{model.loss_error_frac:.1%}, the metric by {model.metric_error_frac:.1%} (medians). The noise scale is "
        f"{model.noise_scale(start):.3g} samples at a loss of {start:.3g} and {model.noise_scale(end):.3g} at "
        f"{end:.3g}."
    )


def _table(profile: Profile) -> Table:
    """Return a table of each unit's costs at the smallest k."""
    k = profile.accumulation_choices[0]
    table = shared.table(title=f"{profile.job} on {profile.device}: one step at k = {k}", title_justify="left")
    names = list(dict.fromkeys(name for s in profile.table(k).segments if s.unit for name in s.costs))
    if len(names) > _MOST_COLUMNS:
        return _long(profile, table)
    table.add_column("unit")
    for name in names:
        table.add_column(name, justify="right")
    for segment in profile.table(k).segments:
        if segment.unit is not None:
            costs = (segment.costs.get(name) for name in names)
            table.add_row(segment.unit, *("" if cost is None else ", ".join(_told(cost)) for cost in costs))
    return table


def _long(profile: Profile, table: Table) -> Table:
    """Return a table with a row for each choice of a unit."""
    for name in ("unit", "choice"):
        table.add_column(name)
    for name in ("time", "kept"):
        table.add_column(name, justify="right")
    for segment in profile.table(profile.accumulation_choices[0]).segments:
        if segment.unit is not None:
            for place, (name, cost) in enumerate(segment.costs.items()):
                table.add_row("" if place else segment.unit, name, *_told(cost))
    return table


def _told(cost: Cost) -> tuple[str, str]:
    return f"{cost.seconds * 1e3:.1f} ms", format_bytes(cost.saved_bytes)
