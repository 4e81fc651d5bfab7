"""``autotune tune``: find a plan for a job."""

from __future__ import annotations

import functools
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.budget import format_bytes
from autotune.cli import completion
from autotune.cli import console as shared
from autotune.cli.console import (
    BudgetOption,
    ClusterOption,
    ConfigOption,
    EngineOption,
    GradientNormOption,
    JobArgument,
    JsonOption,
    LeanOption,
    RanksOption,
    ReportToOption,
    RunsOption,
    SeedOption,
    StepsOption,
    StorageOption,
    TolerantOption,
    TrialsOption,
    WattsOption,
    WorkerCoresOption,
)
from autotune.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from autotune.records.requests import TuneRequest


def command(
    job: JobArgument,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="ppo, planner, exact, greedy, k-optimal, random, optuna, optuna-prices, ppo-scratch, last-dip or "
            "full-budget.",
            autocompletion=completion.methods,
        ),
    ] = "ppo",
    memory_budget: BudgetOption = None,
    gradient_norm: GradientNormOption = None,
    steps: StepsOption = 120,
    trials: TrialsOption = None,
    lean: LeanOption = True,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Train in a separate process: a crash or a hang is a failed trial.")
    ] = False,
    engine: EngineOption = "torch",
    ranks: RanksOption = None,
    zero_stage: Annotated[
        str, typer.Option("--zero-stage", help="With deepspeed: ZeRO stage 0, 1, 2 or 3, or all to choose the fastest.")
    ] = "0",
    ds_config: ConfigOption = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help="With fsdp2: replicas, shards and ranks that share layers, such as dp=2,shard=2 or tp=2. "
            "With pipeline: its stages, such as "
            "pipe=2,schedule=gpipe,units=3/5. all chooses them.",
        ),
    ] = None,
    cluster: ClusterOption = None,
    worker_cores: WorkerCoresOption = 1,
    storage: StorageOption = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", help="Weights of time, memory and energy in the cost, as in 1,0,0.5."),
    ] = None,
    watts: WattsOption = None,
    knobs: Annotated[
        bool,
        typer.Option("--knobs", help="First measure free knobs (fused optimizer, threads, ...); apply those that win."),
    ] = False,
    tolerant: TolerantOption = False,
    launches: Annotated[
        str | None,
        typer.Option(
            "--launches", help="Tune with each of these launch choices, too, as in adamw8bit,release; the fastest wins."
        ),
    ] = None,
    seed: SeedOption = 0,
    report_to: ReportToOption = None,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan within a memory budget by measuring plans on the real job."""
    from autotune import commands
    from autotune.campaign.trusted_inputs import TrustedInputs
    from autotune.records.requests import Ranks, TuneRequest, recorded_address

    rank_options = shared.ranks(engine, ranks, zero_stage, ds_config, mesh)
    workers = shared.cluster(cluster, worker_cores)
    request = TuneRequest(
        job=job,
        method=method,
        memory_budget=memory_budget,
        gradient_norm=gradient_norm,
        steps=steps,
        trials=trials,
        seed=seed,
        lean=lean,
        isolate=isolate,
        ranks=Ranks.of(rank_options),
        cluster=workers,
        storage=recorded_address(storage),
        weights=weights,
        watts=watts,
        report_to=report_to,
        knobs=knobs,
        tolerant=tolerant,
    )
    trusted = TrustedInputs(
        jobs=[job],
        storage=storage,
        cluster=cluster,
        ds_config=None if rank_options is None else rank_options.config,
    )
    output = shared.console(as_json=as_json)
    every_layout = rank_options is not None and "all" in (zero_stage, mesh) and workers is None
    run = commands.tune_layouts if every_layout else commands.run_tuning
    if launches is not None:
        if rank_options is not None or workers is not None or isolate:
            problem = "cannot be combined with ranks, a cluster or --isolate: plans are measured in turn in one process"
            raise InputError(problem, where="--launches", allowed="--engine torch on this machine")
        run = functools.partial(commands.tune_launches, launches=[name.strip() for name in launches.split(",")])
    with shared.Bars(output) as bars:
        document = run(request, trusted, runs_dir, bars)
    show(document, request, output, as_json=as_json)


def show(document: dict[str, Any], request: TuneRequest, output: Console, *, as_json: bool) -> None:
    """Print the result of a tuning: a table with a summary, or the JSON document."""
    if as_json:
        shared.print_json(document)
        return
    from autotune.plan import Plan
    from autotune.report.knobs_section import knob_lines
    from autotune.report.terminal_tables import busy_words, cost_words
    from autotune.report.time_section import terminal_table, time_lines, tuned_parts

    job, weights, measured = request.job or "JOB", request.weights, document["measured"]
    table = shared.table(title=f"{job}: {request.method}", title_justify="left")
    for name in ("", "plan", "step", "peak"):
        table.add_column(name)
    baseline = format_bytes(measured["baseline_peak_bytes"])
    table.add_row("baseline", "fp32, k=1", _ms(measured["baseline_seconds_per_step"]), baseline)
    plan = Plan.from_json(document["plan"])
    peak = "unknown" if measured["peak_bytes"] is None else format_bytes(measured["peak_bytes"])
    table.add_row("tuned", str(plan), _ms(measured["seconds_per_step"]), peak)
    output.print(table)
    named = tuned_parts(document)
    times = terminal_table(named)
    if times is not None:
        output.print(times)
    if "launches" in document:
        output.print(_launch_table(document["launches"]))
    own, other = measured["sample_j"], measured["baseline_sample_j"]
    energy = f", {own / other:.0%} of its energy ({measured['energy_source']})" if own and other else ""
    found = measured["peak_bytes"]
    known = found is not None and measured["baseline_peak_bytes"]
    share = f"{found / measured['baseline_peak_bytes']:.0%}" if known else "an unknown share"
    for line in [*time_lines(named), *knob_lines(document.get("launch_choices"))]:
        output.print(line, soft_wrap=True)
    ranks = [] if request.ranks is None else request.ranks.of_layout(plan.launch).flags
    compare = shlex.join(["autotune", "compare", job, "--arms", f"baseline,{document['run']}/plan.json", *ranks])
    output.print(
        f"{busy_words(measured)}{cost_words(measured['cost'], weights)}, with {share} of its memory{energy}; found in "
        f"{document['tuning_s']:.0f} s and {document['tuning_steps']} real steps. Compare it on fresh seeds before you "
        "rely on it:"
    )
    output.print(f"    {compare}", soft_wrap=True)
    output.print(f"Written: {document['run']}/ (report.html, tuned.json, plan.json, figures)", soft_wrap=True)


def _launch_table(launches: dict[str, Any]) -> Table:
    """Return a table of what was found with each launch choice, or why nothing was."""
    table = shared.table(title="with each launch choice, the fastest above", title_justify="left")
    for name in ("launch choice", "time over the first's", "peak", "run"):
        table.add_column(name)
    for name, one in launches.items():
        if "refused" in one:
            table.add_row(f"+{name}" if name else "as it is", "none", "", one["refused"])
            continue
        measured, ratio = one["measured"], one.get("time_over_first")
        speed = "" if ratio is None else "{ratio_median:.2f} [{ratio_ci95[0]:.2f}, {ratio_ci95[1]:.2f}]".format(**ratio)
        peak = "unknown" if measured["peak_bytes"] is None else format_bytes(measured["peak_bytes"])
        table.add_row(f"+{name}" if name else "as it is", speed, peak, one["run"])
    return table


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1000:.0f} ms"
