"""``autotune compare``: compare arms on paired seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import completion
from autotune.cli import console as shared
from autotune.cli.console import (
    BudgetOption,
    ConfigOption,
    EngineOption,
    GradientNormOption,
    JsonOption,
    LeanOption,
    MeshOption,
    RanksOption,
    ReportToOption,
    RunsOption,
    SeedOption,
    SeedsOption,
    StepsOption,
    StorageOption,
    TrialsOption,
    WattsOption,
    ZeroStageOption,
)

if TYPE_CHECKING:
    from rich.console import Console


def command(
    job: Annotated[
        list[str],
        typer.Argument(
            help="Jobs: catalog names, package.module:attribute, or file.py:attribute.", autocompletion=completion.jobs
        ),
    ],
    arms: Annotated[
        str,
        typer.Option(
            "--arms",
            help="Arms: rules, methods, plan files or policy folders, separated by commas.",
            autocompletion=completion.arms,
        ),
    ] = "baseline,uniform-bf16,recompute-all,sqrt,paper,random,optuna,ppo",
    seeds: SeedsOption = 10,
    memory_budget: BudgetOption = None,
    gradient_norm: GradientNormOption = None,
    dips: Annotated[
        str | None,
        typer.Option(
            "--dips",
            help="EVERY:SHARE, as in 5:70%: in every 5th window the budget shrinks to 70%; EVERY:SHARE:told announces "
            "it to policies. Behind jittered:, missing:, bursts:, memoryless: or diurnal:, the windows are drawn for "
            "each seed.",
        ),
    ] = None,
    steps: StepsOption = 120,
    trials: TrialsOption = None,
    lean: LeanOption = True,
    storage: StorageOption = None,
    watts: WattsOption = None,
    carbon_intensity: Annotated[
        str | None,
        typer.Option(
            "--carbon-intensity", help="gCO2/kWh, as a number or a CSV file; the grams of each run are then shown."
        ),
    ] = None,
    engine: EngineOption = "torch",
    ranks: RanksOption = None,
    zero_stage: ZeroStageOption = "0",
    ds_config: ConfigOption = None,
    mesh: MeshOption = None,
    seed: SeedOption = 0,
    report_to: ReportToOption = None,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Search for a plan for each arm that needs one, then compare all arms on fresh paired seeds, interleaved."""
    from autotune import commands
    from autotune.campaign.arms import arm_names
    from autotune.campaign.trusted_inputs import TrustedInputs
    from autotune.errors import InputError
    from autotune.records.requests import CompareOptions, Ranks, recorded_address

    options = CompareOptions(
        seeds=seeds,
        memory_budget=memory_budget,
        gradient_norm=gradient_norm,
        dips=dips,
        steps=steps,
        trials=trials,
        lean=lean,
        storage=recorded_address(storage),
        watts=watts,
        carbon_intensity=carbon_intensity,
        seed=seed,
        report_to=report_to,
    )
    names = [name.strip() for name in arms.split(",")]
    rank_options = shared.ranks(engine, ranks, zero_stage, ds_config, mesh)
    if "all" in (zero_stage, mesh) or (rank_options is not None and len(job) > 1):
        problem = "--ranks cannot be combined with several jobs, or with several layouts of the ranks"
        raise InputError(problem, allowed="one job, and one --mesh or --zero-stage")
    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        if len(job) > 1:
            trusted = TrustedInputs(jobs=job, arms=names, storage=storage, carbon_intensity=carbon_intensity)
            document = commands.compare_jobs(job, names, options, trusted, runs_dir, bars)
        else:
            names = arm_names(names)
            config = None if rank_options is None else rank_options.config
            trusted = TrustedInputs(
                jobs=job, arms=names, storage=storage, carbon_intensity=carbon_intensity, ds_config=config
            )
            request = replace(options.request(job[0], names), ranks=Ranks.of(rank_options))
            document = commands.run_comparison(request, trusted, runs_dir, bars)
    (show_jobs if len(job) > 1 else show)(document, output, as_json=as_json)


def show_jobs(document: dict[str, Any], output: Console, *, as_json: bool) -> None:
    """Print the combined result of several jobs; with ``as_json`` also the document."""
    from autotune.report.terminal_tables import jobs_table

    for entry in document["together"]:
        if entry["verdict"] == "not comparable":
            output.print(f"{entry['arm']} cannot be compared: {entry['reason']}", soft_wrap=True)
    output.print(jobs_table(document))
    for entry in document["jobs"]:
        output.print(f"{entry['job']}: {entry['run']}/", soft_wrap=True)
    output.print(f"Written: {document['run']}/jobs.json", soft_wrap=True)
    if as_json:
        shared.print_json(document)


def show(document: dict[str, Any], output: Console, *, as_json: bool) -> None:
    """Print a comparison: a table, one sentence and the paths of the files; with ``as_json`` also the document.

    The sentence comes first if the machine was busy, because the times in the table are doubtful then.
    """
    from autotune.report.terminal_tables import alone_lines, comparison_table, energy_lines, plan_lines, verdict_line
    from autotune.report.time_section import arm_parts, terminal_table, time_lines

    if document.get("busy") is not None:
        output.print(verdict_line(document), soft_wrap=True)
    output.print(comparison_table(document))
    named = arm_parts(document)
    times = terminal_table(named)
    if times is not None:
        output.print(times)
    for line in [*time_lines(named), *plan_lines(document), *alone_lines(document), *energy_lines(document)]:
        output.print(line, soft_wrap=True)
    if document.get("busy") is None:
        output.print(verdict_line(document))
    output.print(f"Written: {document['run']}/ (report.html, comparison.json, plan.json, figures)", soft_wrap=True)
    if as_json:
        shared.print_json(document)
