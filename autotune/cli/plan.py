"""``autotune plan``: estimate which plan to launch with on another device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import completion
from autotune.cli import console as shared
from autotune.cli.arguments import output_file
from autotune.cli.console import BudgetOption, JsonOption
from autotune.cli.plan_options import (
    Config,
    Devices,
    Ffn,
    Fixed,
    Gated,
    GlobalBatch,
    Heads,
    Hidden,
    InnerLink,
    KvHeads,
    Layers,
    Link,
    PerNode,
    Sequence,
    Tied,
    Top,
    Trainable,
    Vocab,
)
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


def command(
    device: Annotated[
        str,
        typer.Option(
            "--device", help="Device: b200, h100, a100, rtx4090, mi300x, ...", autocompletion=completion.devices
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
    devices: Devices = None,
    config: Config = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    ffn: Ffn = None,
    vocab: Vocab = None,
    sequence: Sequence = None,
    gated: Gated = None,
    tied: Tied = None,
    global_batch: GlobalBatch = None,
    fixed: Fixed = "",
    trainable: Trainable = None,
    per_node: PerNode = 8,
    link: Link = None,
    inner_link: InnerLink = None,
    memory_budget: BudgetOption = None,
    top: Top = 5,
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
    many = {"--config": config, "--seq": sequence, "--global-batch": global_batch, "--trainable": trainable}
    many |= {f"--{name}": value for name, value in numbers.items()} | {"--plan": fixed or None, "--link": link}
    given = [name for name, value in many.items() if value is not None]
    if devices is not None or (job is None and given):
        from autotune.cli.plan_devices import Asked, Sizes, run

        sizes = Sizes(job=job, config=config, numbers=numbers, sequence=sequence)
        asked = Asked(
            sizes=sizes,
            device=device,
            devices=devices or "1",
            per_node=per_node,
            link=link,
            inner_link=inner_link,
            global_batch=global_batch,
            plan=fixed,
            trainable=trainable,
            memory_budget=memory_budget,
            top=top,
        )
        run(asked, output=output, as_json=as_json)
        return
    if job is None:
        raise InputError("no job is named", where="plan", allowed="JOB, --config FILE, or --layers, --hidden, ...")
    if given:
        raise InputError(f"{given[0]} is for layouts of many devices", where="plan", allowed="--devices as well")
    _one_device(job, device, memory_budget, output, as_json=as_json)


def _one_device(job: str, device: str, memory_budget: str | None, output: Path | None, *, as_json: bool) -> None:
    """Estimate a job on one device, unit by unit, and print the best plan."""
    from autotune.budget import MemoryBudget, format_bytes
    from autotune.catalog import load_job
    from autotune.cost_model.device_table import find_device
    from autotune.cost_model.solver import solve
    from autotune.errors import BudgetError
    from autotune.io.files import write_json
    from autotune.profiling.estimator import estimate

    given = None if memory_budget is None else MemoryBudget.parse(memory_budget)
    spec, found = find_device(device), load_job(job)
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
        f"Rates from {spec.source}. All peaks include {format_bytes(spec.workspace_bytes)} of library workspaces. "
        f"{_limit(memory_budget, spec, budget)} "
        f"Measure on the device before you rely on it: autotune profile, then tune --method exact.",
        soft_wrap=True,
    )


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


def _limit(given: str | None, spec: DeviceSpec, budget: int) -> str:
    """Return a sentence about the origin of the budget."""
    from autotune.budget import format_bytes

    if given is not None:
        return f"The budget is {format_bytes(budget)}."
    return (
        f"The budget is {format_bytes(budget)}: the driver's context takes {format_bytes(spec.context_bytes)} of "
        f"{format_bytes(spec.memory_bytes)}, and {_HEADROOM:.0%} of the rest is left free."
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
