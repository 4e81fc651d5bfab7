"""Pipelines: predicted steps and bubbles against measured ones, and the chosen layout against all others.

Run as a module, this file is one of the ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

from autotune.bench.harness import SILENT, alternating, document_of
from autotune.catalog import load_job
from autotune.cost_model.pipeline_choice import predicted_step
from autotune.cost_model.profile import Profile
from autotune.engines.pipeline_engine import PipelineEngine
from autotune.engines.rank_processes import Report, be_rank, run_elsewhere, run_on_ranks
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import EngineError, InputError
from autotune.io.progress import Reporter
from autotune.mechanics.devices import device_name
from autotune.pipeline import SCHEDULES, Pipeline, divisions
from autotune.profiling.profiler import ProfilerOptions, profile

_MODULE = "autotune.bench.bench_pipelines"
# Steps of each turn; the first one is not timed.
_STEPS = 4
# Parts of a step that a prediction is of: not the update.
_PASSES = ("compute", "communication", "synchronisation")
# Divisions of the units that are measured under each schedule, from the one that is predicted to be fastest.
_DIVISIONS = 6
# Divisions that are predicted, at most.
_MOST = 10_000


def bench_pipelines(job: str, *, ranks: int, rounds: int, seed: int = 0, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return predicted and measured seconds and bubbles of a job's steps in pipelines, all in turn on the same ranks.

    Predictions are made from a profile of one process with as many threads as each rank has.

    Args:
        job: the job's reference.
        ranks: number of ranks.
        rounds: turns of each layout at each k.
        seed: random seed for weights and batches.
        reporter: shows progress.

    Raises:
        InputError: if the job has too few units for the stages, or too many to predict every division.
        EngineError: if a rank fails; the message quotes its exception.
    """
    if ranks < 2:
        raise InputError(f"ranks is {ranks}", where="bench pipelines", allowed="at least 2")
    loaded = load_job(job)
    reporter.stage(f"{loaded.name}: profile of one process", 1)
    asked = {"job": job, "seed": seed}
    found = run_elsewhere(_MODULE, {**asked, "part": "profile"}, threads=1)
    measured = Profile.from_json(found["profile"])
    layouts = _layouts(measured, ranks)
    reporter.stage(f"{loaded.name}: {len(layouts)} layouts on {ranks} ranks in turn", 1)
    asked |= {"part": "steps", "rounds": rounds, "layouts": [[str(layout), ks] for layout, ks in layouts]}
    told = run_on_ranks(_MODULE, asked, ranks=ranks, on_progress=reporter.advance)
    rows = [_row(measured, Pipeline.parse(row["layout"]), row) for row in told["rows"]]
    return document_of(
        "pipelines",
        {
            "job": loaded.name,
            "ranks": ranks,
            "threads": told["threads"],
            "seed": seed,
            "rounds": rounds,
            "steps": _STEPS,
            **_summary(rows),
            "rows": rows,
        },
    )


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    chosen, best = document["chosen"], document["best"]
    return [
        f"{document['job']} on {document['ranks']} ranks, {len(document['rows'])} layouts and k: predicted seconds of "
        f"a step are {document['time_error_median']:.1%} off in the median (90 %: {document['time_error_p90']:.1%}), "
        f"bubbles {document['bubble_error_median']:.1%} (90 %: {document['bubble_error_p90']:.1%}) of measured ones",
        f"chosen {_named(chosen)} takes {document['chosen_over_best']:.3f} of the time of {_named(best)}, the fastest",
    ]


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['layout']} with k = {row['accumulation_steps']}"


def _layouts(measured: Profile, ranks: int) -> list[tuple[Pipeline, list[int]]]:
    """Return the layouts to measure, each with its numbers of micro-batches."""
    units, found = len(measured.units), []
    if units < ranks:
        problem = f"the model has {units} units, and there are {ranks} ranks"
        raise InputError(problem, where="bench pipelines", allowed=f"at most {units} ranks")
    for schedule in SCHEDULES:
        stages = Pipeline(ranks=ranks, schedule=schedule).stages
        ks = [k for k in measured.accumulation_choices if stages == ranks or k % ranks == 0]
        if stages > units or not ks:
            continue
        if math.comb(units - 1, stages - 1) > _MOST:
            problem = f"there are too many divisions of {units} units into {stages} stages"
            raise InputError(problem, where="bench pipelines", allowed=f"a job and ranks with at most {_MOST}")
        layouts = [Pipeline(ranks=ranks, schedule=schedule, units=counts) for counts in divisions(units, stages)]
        fastest = {one: min(predicted_step(measured, one, k).seconds for k in ks) for one in layouts}
        found += [(one, ks) for one in sorted(layouts, key=fastest.__getitem__)[:_DIVISIONS]]
    return found


def _row(measured: Profile, pipeline: Pipeline, row: Mapping[str, Any]) -> dict[str, Any]:
    step = predicted_step(measured, pipeline, row["accumulation_steps"])
    return {
        **row,
        "predicted_s": step.seconds,
        "time_error": step.seconds / row["seconds"] - 1,
        "predicted_bubble": step.bubble,
        "bubble_error": step.bubble / row["bubble"] - 1,
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    chosen = min(rows, key=lambda row: row["predicted_s"])
    best = min(rows, key=lambda row: row["seconds"])
    found: dict[str, Any] = {}
    for name in ("time_error", "bubble_error"):
        errors = [abs(row[name]) for row in rows]
        found |= {
            f"{name}_{what}": float(np.quantile(errors, share)) for what, share in (("median", 0.5), ("p90", 0.9))
        }
    # In the same turns, which are slow or fast for both.
    ratios = [one / other for one, other in zip(chosen["turns_s"], best["turns_s"], strict=True)]
    return {**found, "chosen": chosen, "best": best, "chosen_over_best": statistics.median(ratios)}


def _answer(asked: dict[str, Any], report: Report) -> dict[str, Any]:
    job, seed = load_job(asked["job"]), asked["seed"]
    if asked["part"] == "profile":
        found = profile(job, device_name=device_name(), device="cpu", options=ProfilerOptions.lean(seed))
        return {"profile": found.to_json()}
    options = EngineOptions(discard_steps=1, statistics_every=None, meter_memory=False)
    engines = {
        layout: (PipelineEngine(job, mesh=layout, seed=seed, device="cpu", options=options), ks)
        for layout, ks in asked["layouts"]
    }
    arms = [(layout, k) for layout, (_, ks) in engines.items() for k in ks]
    windows: dict[tuple[str, int], list[dict[str, float]]] = {arm: [] for arm in arms}
    for turn in range(asked["rounds"]):
        for number, (layout, k) in enumerate(alternating(arms, turn)):
            windows[layout, k].append(_window(engines[layout][0], k))
            report.done((turn + number / len(arms)) / asked["rounds"])
    distributed.barrier()
    return {"rows": [_measured(*arm, found) for arm, found in windows.items()], "threads": torch.get_num_threads()}


def _window(engine: PipelineEngine, k: int) -> dict[str, float]:
    """Return the mean seconds of the parts of a step."""
    engine.apply(engine.plan.changed(accumulation_steps=k))
    window = engine.run(_STEPS)
    if window.failure is not None or window.parts is None:
        raise EngineError(f"a step in {k} micro-batches ends with {window.failure}: {window.failure_detail}")
    return window.parts.seconds()


def _measured(layout: str, k: int, windows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the seconds of the passes of a step, and the share of them in which ranks wait for each other."""
    parts = {name: statistics.median(window[name] for window in windows) for name in windows[0]}
    seconds = sum(parts[name] for name in _PASSES)
    return {
        "layout": layout,
        "accumulation_steps": k,
        "seconds": seconds,
        "turns_s": [sum(window[name] for name in _PASSES) for window in windows],
        "bubble": parts["synchronisation"] / seconds,
        "communication_s": parts["communication"],
        "update_s": parts["update"],
    }


if __name__ == "__main__":
    be_rank(_answer)
