"""Replay of a decision log without its policy, and the differences between predictions and measurements."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from autotune.engines.job_checks import build_model, build_optimizer
from autotune.errors import InputError
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.live.attach import attach
from autotune.live.decision_log import LOG_NAME, read_log, schedule_of
from autotune.live.limits import Limits
from autotune.live.logged_windows import windows_of
from autotune.mechanics import randomness

# Limits that never stop the replay: the recorded run kept its own.
_FOLLOWING = Limits(
    decide_every=1, min_steps_between_switches=0, canary_steps=0, gain_frac=-1e9, overhead_frac=1e9, slowdown_frac=1e9
)


def replay(
    log: Path, job: Job | None, *, steps: int | None = None, seed: int = 0, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Return what a recorded run predicted and measured and, if its job is given, what a replay measures now.

    Args:
        log: a decision log, or the run directory that contains it.
        job: the job to run; ``None`` runs nothing.
        steps: optimizer steps to run; ``None`` for as many as were recorded.
        seed: random seed for the weights and batches of the run.
        reporter: shows progress.

    Raises:
        InputError: if the log is damaged, or has other units than the job.
    """
    events = read_log(log)
    recorded = {"log": str(log), "switches": len(schedule_of(events, str(log))), "windows": windows_of(events)}
    if job is None:
        return {"version": 1, "recorded": recorded, "repeated": None}
    file = log / LOG_NAME if log.is_dir() else log
    length = steps or max(int(event["step"]) for event in events)
    shows = reporter or Silent()
    shows.stage(f"run {job.name} along {file}", length)
    with randomness.isolated():
        randomness.seed_all(seed)
        model = build_model(job)
        model.train()
        optimizer = build_optimizer(job, model)
        budgets = [event["measured"].get("memory_budget_bytes") for event in events if event.get("measured")]
        budget = next((size for size in budgets if size is not None), None)
        tuner = attach(
            model,
            optimizer,
            file,
            memory_budget_bytes=budget,
            limits=_FOLLOWING,
            clip_norm=job.clip_norm,
            runs_dir=None,
        )
        found = [unit for unit in events[0]["units"] if unit not in dict(model.named_modules())]
        if found:
            tuner.detach()
            raise InputError(
                f"unit {found[0]!r} is not a module of {job.name}", where=str(file), allowed="a log of the same job"
            )
        batches = itertools.chain.from_iterable(job.batches(seed + number) for number in itertools.count())
        for number, batch in enumerate(itertools.islice(batches, length)):
            for micro in tuner.micro_batches(batch):
                tuner.backward(job.loss(model, micro))
            tuner.step()
            shows.advance(number + 1)
        again, because = tuner.events, tuner.detached_because
        tuner.detach()
    repeated = {
        "steps": length,
        "switches": sum(event["event"] == "switched" for event in again),
        "windows": windows_of(again),
        "detached_because": because,
    }
    return {"version": 1, "recorded": recorded, "repeated": repeated}
