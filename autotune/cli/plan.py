"""``autotune plan``: estimate which plan to launch with on another device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import completion
from autotune.cli import console as shared
from autotune.cli import plan_options as options
from autotune.cli.arguments import output_file
from autotune.cli.console import BudgetOption, JsonOption
from autotune.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from autotune.budget import MemoryBudget
    from autotune.cost_model.device_table import DeviceSpec
    from autotune.cost_model.profile import Profile
    from autotune.errors import BudgetError

# Share of the usable memory that stays free for what an estimate does not include: memory of the kernels themselves,
# and fragmentation.
_HEADROOM = 0.1
# Devices of a node, and layouts that are shown, unless options say otherwise.
_PER_NODE, _TOP = 8, 5


def command(
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help="Device: b200, h100, a100, rtx4090, mi300x, ...; or the file of autotune calibrate.",
            autocompletion=completion.devices,
        ),
    ],
    job: Annotated[
        str | None,
        typer.Argument(
            help="Job: a catalog name, package.module:attribute, or file.py:attribute. With --devices, --config or "
            "sizes may describe a transformer instead.",
            autocompletion=completion.jobs,
        ),
    ] = None,
    devices: options.Devices = None,
    config: options.Config = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    kv_heads: options.KvHeads = None,
    ffn: options.Ffn = None,
    vocab: options.Vocab = None,
    sequence: options.Sequence = None,
    gated: options.Gated = None,
    tied: options.Tied = None,
    global_batch: options.GlobalBatch = None,
    fixed: options.Fixed = "",
    trainable: options.Trainable = None,
    per_node: options.PerNode = _PER_NODE,
    link: options.Link = None,
    inner_link: options.InnerLink = None,
    memory_budget: BudgetOption = None,
    top: options.Top = _TOP,
    find: options.Find = None,
    export: options.Export = None,
    tokens: options.Tokens = None,
    price: options.Price = None,
    watts: options.Watts = None,
    carbon_intensity: options.Carbon = None,
    within: options.Within = None,
    within_cost: options.WithinCost = None,
    failures: options.Failures = None,
    snapshot_time: options.SnapshotTime = 60.0,
    restart_time: options.RestartTime = 900.0,
    figure: options.Figure = None,
    output: Annotated[
        Path | None, typer.Option("--output", callback=output_file, help="File to write the plan to.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate memory and time on another device, or on many, and compute the plan to launch with.

    The model is not allocated, so jobs far larger than this machine can be planned. All numbers are estimates.
    """
    numbers = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": vocab,
        "gated": gated,
        "tied": tied,
    }
    many: dict[str, object] = {
        "--config": config,
        "--seq": sequence,
        "--global-batch": global_batch,
        "--trainable": trainable,
    }
    of_sizes = {f"--{name.replace('_', '-')}": value for name, value in numbers.items()}
    many |= of_sizes
    many |= {"--plan": fixed or None, "--link": link, "--find": find, "--export": export, "--tokens": tokens}
    many |= {"--price": price, "--within": within, "--within-cost": within_cost, "--failures": failures}
    many |= {"--inner-link": inner_link, "--watts": watts, "--carbon-intensity": carbon_intensity, "--figure": figure}
    many |= {"--per-node": per_node if per_node != _PER_NODE else None, "--top": top if top != _TOP else None}
    given = [name for name, value in many.items() if value is not None]
    if devices is not None or (job is None and given):
        from autotune.cli.plan_costs import Costs
        from autotune.cli.plan_devices import run
        from autotune.cli.plan_question import Asked, Sizes

        sizes = Sizes(job=job, config=config, numbers=numbers, sequence=sequence)
        asked = Asked(
            sizes=sizes,
            device=device,
            devices="1" if devices is None else devices,
            per_node=per_node,
            link=link,
            inner_link=inner_link,
            global_batch=global_batch,
            plan=fixed,
            trainable=trainable,
            memory_budget=memory_budget,
            top=top,
            find=find,
            export=export,
        )
        costs = Costs(
            tokens=tokens,
            price=price,
            watts=watts,
            carbon_intensity=carbon_intensity,
            within=within,
            within_cost=within_cost,
            failures=failures,
            snapshot_s=snapshot_time,
            restart_s=restart_time,
            figure=figure,
        )
        run(asked, costs, output=output, as_json=as_json)
        return
    if job is None:
        raise InputError("no job is named", where="plan", allowed="JOB, --config FILE, or --layers, --hidden, ...")
    described = [name for name in given if name in ("--config", *of_sizes)]
    if described:
        problem = f"JOB cannot be combined with {described[0]}"
        raise InputError(problem, where="plan", allowed="one description of a model")
    if given:
        raise InputError(f"{given[0]} is for layouts of many devices", where="plan", allowed="--devices as well")
    _one_device(job, device, memory_budget, output, as_json=as_json)


def _one_device(job: str, device: str, memory_budget: str | None, output: Path | None, *, as_json: bool) -> None:
    """Estimate a job on one device, unit by unit, and print the best plan."""
    from autotune.budget import MemoryBudget
    from autotune.catalog import load_job
    from autotune.cost_model.solver import solve
    from autotune.errors import BudgetError
    from autotune.io.files import write_json
    from autotune.profiling.estimator import estimate

    given = None if memory_budget is None else MemoryBudget.parse(memory_budget)
    spec, found = _device(device), load_job(job)
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage(f"estimate {found.name} on {spec.name}", 1)
        profile = estimate(found, spec, on_progress=bars.advance)
    budget = _budget(given, spec, profile)
    try:
        solution = solve(profile, budget)
    except BudgetError as error:
        raise _with_advice(error, profile) from error
    rows = _rows(profile, solution.plan, budget)
    plan = solution.plan.changed(launch=found.launch)
    if output is not None:
        write_json(output, plan.to_json())
    if as_json:
        shared.print_json(
            {
                "job": found.name,
                "device": spec.name,
                "estimated": True,
                "source": spec.source,
                "memory_budget_bytes": budget,
                "context_bytes": spec.context_bytes,
                "workspace_bytes": spec.workspace_bytes,
                "plan": plan.to_json(),
                "predicted": {
                    "seconds_per_step": solution.seconds_per_step,
                    "peak_bytes": solution.peak_bytes,
                },
                "alternatives": rows,
                "seconds": profile.seconds,
            }
        )
        return
    console = shared.console(as_json=False)
    console.print(_table(rows, f"{found.name} on {spec.name}: estimated, not measured"))
    console.print(
        f"Rates from {spec.source}. {_workspaces(spec)}{_limit(memory_budget, spec, budget)} "
        f"Measure on the device before you rely on it: autotune profile, then tune --method exact.",
        soft_wrap=True,
    )


def _device(name: str) -> DeviceSpec:
    from autotune.cost_model import machine_file
    from autotune.cost_model.device_table import find_device

    return machine_file.load(Path(name)) if machine_file.is_machine_file(name) else find_device(name)


def _with_advice(error: BudgetError, profile: Profile) -> BudgetError:
    """Return the error; if the peak is in the optimizer's update, its message says that no plan can help."""
    from autotune.cost_model.solver import smallest
    from autotune.errors import BudgetError

    least = smallest(profile)
    table = profile.table_for(least.plan)
    if profile.static_bytes + table.batch_bytes + table.update_peak_bytes < least.peak_bytes:
        return error
    problem = f"{error.problem}: the peak is in the optimizer's update, which no plan changes (fused=True may)"
    return BudgetError(problem, where=error.where, allowed=error.allowed)


def _budget(given: MemoryBudget | None, spec: DeviceSpec, profile: Profile) -> int:
    from autotune.cost_model.memory_model import peak_bytes

    if given is None:
        return int(spec.usable_bytes * (1 - _HEADROOM))
    resolved = given.resolve(peak_bytes(profile, profile.space.baseline()))
    # Only a measured step shows how much reserved memory stays unused.
    return int(resolved * (1 - _HEADROOM)) if given.reserved else resolved


def _workspaces(spec: DeviceSpec) -> str:
    from autotune.budget import format_bytes

    held = spec.workspace_bytes
    return f"All peaks include {format_bytes(held)} of library workspaces. " if held else ""


def _limit(given: str | None, spec: DeviceSpec, budget: int) -> str:
    """Return a sentence about the origin of the budget."""
    from autotune.budget import format_bytes

    if given is not None:
        return f"The budget is {format_bytes(budget)}."
    of = f"of {format_bytes(spec.memory_bytes)}"
    if not spec.context_bytes:
        return f"The budget is {format_bytes(budget)} {of}; {_HEADROOM:.0%} is left free."
    return (
        f"The budget is {format_bytes(budget)}: the driver's context takes {format_bytes(spec.context_bytes)} {of}, "
        f"and {_HEADROOM:.0%} of the rest is left free."
    )


def _rows(profile: Profile, best: Any, budget: int) -> list[dict[str, Any]]:
    """Return the plans of the rules and the best plan, with their estimates."""
    from autotune.agents.rules import RULES
    from autotune.cost_model.memory_model import peak_bytes
    from autotune.cost_model.solver import SAFETY_MARGIN
    from autotune.cost_model.time_model import seconds_per_step

    plans = {**{name: rule.plan(profile.space) for name, rule in RULES.registered.items()}, "exact": best}
    return [
        {
            "name": name,
            "plan": str(plan),
            "seconds_per_step": seconds_per_step(profile, plan),
            "peak_bytes": peak_bytes(profile, plan),
            # As the solver means it, which leaves a margin for what is not predicted.
            "fits": peak_bytes(profile, plan) <= budget * (1 - SAFETY_MARGIN),
        }
        for name, plan in plans.items()
        if plan.accumulation_steps in profile.accumulation_choices
    ]


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    from autotune.budget import format_bytes

    table = shared.table(title=title, title_justify="left")
    for name in ("", "plan", "step", "peak", "fits"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row["name"],
            row["plan"],
            f"{row['seconds_per_step']:.4g} s",
            format_bytes(row["peak_bytes"]),
            "yes" if row["fits"] else "no",
        )
    return table
