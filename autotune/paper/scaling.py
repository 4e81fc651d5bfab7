"""Repeat table IV: one, two and four ranks through DeepSpeed, and what their step spends on communication.

Run as a module, this file is one rank of it.
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
from autotune.paper.paper_numbers import TABLE_4, Scaling
from autotune.paper.rows import Row, over
from autotune.paper.table_comparisons import Campaign

# The rule and the ZeRO stage of each configuration.
CONFIGURATIONS: Mapping[str, tuple[str, int]] = {"baseline": ("baseline", 0), "paper": ("paper", 2)}
_WARM_UP, _STEPS = 3, 4


def measure(
    experiment: Experiment,
    campaign: Campaign,
    ranks: Sequence[int],
    configurations: Mapping[str, tuple[str, int]] = CONFIGURATIONS,
) -> dict[str, dict[str, Any]]:
    """Return what rank 0 saw, by configuration and number of ranks (as in ``paper-2``).

    Configurations alternate within the same ranks, as many rounds as there are seeds; medians are kept.

    Args:
        experiment: the task.
        campaign: what it is measured with.
        ranks: numbers of ranks.
        configurations: the rule and the ZeRO stage of each, by name.
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
    return run_on_ranks("autotune.paper.scaling", asked, ranks=count)


def _median(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def scaling(
    experiment: Experiment, campaign: Campaign, ranks: Sequence[int]
) -> tuple[list[Row], list[str], dict[str, Any]]:
    """Return rows, notes and facts of the scaling table.

    Args:
        experiment: the task.
        campaign: what it is measured with.
        ranks: numbers of ranks, 1 first.
    """
    found = measure(experiment, campaign, ranks)
    rows: list[Row] = []
    for name in CONFIGURATIONS:
        alone = found[f"{name}-{ranks[0]}"]["throughput"] / ranks[0]
        for count in ranks:
            rows += _rows(name, count, found[f"{name}-{count}"], alone, experiment)
    return rows, _notes(ranks), {"ranks": found}


def _rows(name: str, count: int, seen: Mapping[str, Any], alone: float, experiment: Experiment) -> list[Row]:
    number = next((line for line in TABLE_4 if line.ranks == count), None)
    configuration = f"{name}, {count} rank{'s' if count > 1 else ''}"
    paper, percent = _paper(number, name)
    source = "" if number is None else f"Table IV, {count} GPU"
    efficiency = 100 * seen["throughput"] / (count * alone)
    return [
        Row(
            metric="throughput",
            configuration=configuration,
            unit=experiment.item_unit,
            paper=paper,
            ours=seen["throughput"] * experiment.items,
            paper_change=None if count == 1 else over(paper, _paper(TABLE_4[0], name)[0]),
            our_change=None if count == 1 else seen["throughput"] / alone,
            source=source,
        ),
        Row(
            metric="scaling efficiency",
            configuration=configuration,
            unit="%",
            paper=percent,
            ours=efficiency,
            source=source,
        ),
        Row(
            metric="communication",
            configuration=configuration,
            unit="% of the step",
            ours=100 * seen["communication_s"] / seen["step_s"],
        ),
    ]


def _paper(number: Scaling | None, name: str) -> tuple[float | None, float | None]:
    if number is None:
        return None, None
    if name == "baseline":
        return number.baseline, number.baseline_percent
    return number.optimized, number.optimized_percent


def _notes(ranks: Sequence[int]) -> list[str]:
    # The cores that this process may use, of however many there are.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    notes = [
        "strong scaling: the global batch stays, and each rank takes its share of it (the paper does not say which); "
        "one thread a rank; baseline: fp32 at ZeRO stage 0; paper: its recipe at ZeRO stage 2",
        "communication: seconds of rank 0 in collectives, waiting for the slowest rank included",
    ]
    if device_kind() == "cpu" and max(ranks) > cores:
        notes.append(
            f"{max(ranks)} ranks share {cores} core(s) here: above {cores} rank(s) the efficiency says how cores are "
            "shared, not how DeepSpeed scales"
        )
    return notes


def _measured(asked: dict[str, Any], _: Report) -> dict[str, Any]:
    """Measure, on one rank, every configuration in turn."""
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
    """Run a block of steps and return what this rank saw."""
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
