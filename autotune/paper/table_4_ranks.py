"""Table IV, reproduced: one, two and four ranks through DeepSpeed, and the share of communication in their steps.

Run as a module, this file is one of the ranks.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import distributed

from autotune.agents.rules import rule_plan
from autotune.catalog import load_job
from autotune.engines.deepspeed_engine import DeepSpeedEngine
from autotune.engines.rank_processes import Report, be_rank, run_on_ranks
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import EngineError
from autotune.mechanics.collectives import CollectiveClock
from autotune.mechanics.devices import device_kind
from autotune.paper.experiments import Experiment
from autotune.paper.paper_numbers import TABLE_4, THROUGHPUT, ScalingRow
from autotune.paper.rows import Table, TableRow
from autotune.paper.table_comparisons import Campaign

# Rule and ZeRO stage of each configuration.
CONFIGURATIONS: Mapping[str, tuple[str, int]] = {"baseline": ("baseline", 0), "paper": ("paper", 2)}
_WARM_UP, _STEPS = 3, 4


def measure(
    experiment: Experiment,
    campaign: Campaign,
    ranks: Sequence[int],
    configurations: Mapping[str, tuple[str, int]] = CONFIGURATIONS,
) -> dict[str, dict[str, Any]]:
    """Return what rank 0 measured, by configuration and number of ranks (as in ``paper-2``).

    Configurations alternate within the same ranks, one round per seed; results are medians over rounds.

    Args:
        experiment: the task.
        campaign: the measurement setup.
        ranks: numbers of ranks.
        configurations: rule and ZeRO stage by name of configuration.
    """
    campaign.reporter.stage(f"{experiment.reference}: {', '.join(map(str, ranks))} ranks through DeepSpeed", len(ranks))
    found = {}
    for done, count in enumerate(ranks, 1):
        asked = {
            "job": experiment.reference,
            "rounds": len(campaign.seeds),
            "place": device_kind(count),
            "configurations": configurations,
        }
        run = functools.partial(_on_ranks, asked, count)
        rounds = campaign.journal.once({"ranks": count, **asked}, run, dict[str, list[dict[str, float]]])
        found.update({f"{name}-{count}": _median(seen) for name, seen in rounds.items()})
        campaign.reporter.advance(done)
    return found


def _on_ranks(asked: Mapping[str, Any], count: int) -> dict[str, Any]:
    return run_on_ranks("autotune.paper.table_4_ranks", asked, ranks=count)


def _median(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def scaling(experiment: Experiment, campaign: Campaign, ranks: Sequence[int]) -> Table:
    """Measure the scaling table.

    Args:
        experiment: the task.
        campaign: the measurement setup.
        ranks: numbers of ranks, 1 first.
    """
    found = measure(experiment, campaign, ranks)
    rows = [
        row
        for name in CONFIGURATIONS
        for count in ranks
        for row in _rows(name, count, found[f"{name}-{count}"], found[f"{name}-{ranks[0]}"], experiment)
    ]
    return Table(rows=rows, notes=_notes(ranks), facts={"ranks": found})


def _rows(
    name: str, count: int, seen: Mapping[str, Any], alone: Mapping[str, Any], experiment: Experiment
) -> list[TableRow]:
    line = next((line for line in TABLE_4 if line.ranks == count), None)
    configuration = f"{name}, {count} rank{'s' if count > 1 else ''}"
    paper, percent = _printed(line, name)
    source = "" if line is None else f"Table IV, {count} GPU"
    single, rate = alone["throughput"], seen["throughput"]
    return [
        TableRow(
            THROUGHPUT,
            configuration,
            experiment.item_unit,
            rate * experiment.items,
            base=None if count == 1 else single * experiment.items,
            paper=paper,
            paper_base=None if count == 1 else _printed(TABLE_4[0], name)[0],
            source=source,
        ),
        TableRow("scaling efficiency", configuration, "%", 100 * rate / (count * single), paper=percent, source=source),
        TableRow("communication", configuration, "% of the step", 100 * seen["communication_s"] / seen["step_s"]),
    ]


def _printed(line: ScalingRow | None, name: str) -> tuple[float | None, float | None]:
    if line is None:
        return None, None
    return (line.baseline, line.baseline_percent) if name == "baseline" else (line.optimized, line.optimized_percent)


def _notes(ranks: Sequence[int]) -> list[str]:
    # Cores that this process may use, which can be fewer than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    notes = [
        "strong scaling: the global batch is fixed, and each rank takes its share of it (the paper does not say "
        "which); one thread a rank; baseline: fp32 at ZeRO stage 0; paper: its recipe at ZeRO stage 2",
        "communication: seconds of rank 0 in collectives, waiting for the slowest rank included",
    ]
    if device_kind() == "cpu" and max(ranks) > cores:
        notes.append(
            f"{max(ranks)} ranks share {cores} core(s) here: above {cores} rank(s) the efficiency says how cores are "
            "shared, not how DeepSpeed scales"
        )
    return notes


def _measured(asked: dict[str, Any], _: Report) -> dict[str, Any]:
    """Measure every configuration in turn on one rank."""
    engines = {name: _engine(asked, *chosen) for name, chosen in asked["configurations"].items()}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for number in range(asked["rounds"]):
        for name in list(engines) if number % 2 == 0 else list(engines)[::-1]:
            seen[name].append(_block(engines[name]))
    distributed.barrier()
    return seen


def _engine(asked: Mapping[str, Any], rule: str, zero_stage: int) -> DeepSpeedEngine:
    options = EngineOptions(discard_steps=0, statistics_every=None)
    engine = DeepSpeedEngine(load_job(asked["job"]), zero_stage=zero_stage, device=asked["place"], options=options)
    engine.apply(rule_plan(rule, engine.space))
    engine.run(_WARM_UP)
    return engine


def _block(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Run a block of steps and return what this rank measured."""
    clock = CollectiveClock()
    with clock.running():
        window = engine.run(_STEPS)
    if window.failure is not None or window.throughput is None:
        raise EngineError(f"the ranks' window ends with {window.failure}: {window.failure_detail}")
    return {
        "throughput": window.throughput,
        "step_s": window.total_s / _STEPS,
        "communication_s": clock.seconds / _STEPS,
        "collectives": clock.calls / _STEPS,
        "peak_bytes": window.peak_bytes,
    }


if __name__ == "__main__":
    be_rank(_measured)
