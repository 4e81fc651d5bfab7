"""Measure plans that were found with different launch choices, side by side in this process.

Each was found in a run of its own, minutes apart, in which the machine may have been faster or slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from autotune.catalog import load_job
from autotune.engines.engine import Engine
from autotune.engines.isolated_engine import IsolatedEngine
from autotune.engines.registry import RankOptions
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import AutotuneError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.mechanics.devices import device_kind, release
from autotune.plan import Plan
from autotune.stats import paired_ratio

# Timed steps of each plan, and steps before them; after each switch of process settings, one more is not timed.
_ROUNDS, _UNTIMED = 12, 2
_OPTIONS = EngineOptions(statistics_every=None, meter_memory=False, discard_steps=0)


def side_by_side(found: Mapping[str, tuple[Job, Plan]], seed: int, reporter: Reporter) -> dict[str, dict[str, Any]]:
    """Return each plan's time per sample in proportion to the first's, from steps in turn.

    All jobs are alive at once.

    Args:
        found: jobs with launch choices, and the plan of each.
        seed: random seed for weights and batches.
        reporter: shows progress.

    Returns:
        The result of :func:`autotune.stats.paired_ratio` by name, without the first and without plans that failed.
    """
    reporter.stage(f"measure {len(found)} plans in turn", _ROUNDS)
    with contextlib.ExitStack() as opened:
        opened.callback(release, device_kind())
        engines: dict[str, TorchEngine] = {}
        for name, (job, plan) in found.items():
            with contextlib.suppress(AutotuneError):
                engine = opened.enter_context(contextlib.closing(TorchEngine(job, seed=seed, options=_OPTIONS)))
                engine.apply(plan)
                engines[name] = engine
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(-_UNTIMED, _ROUNDS):
            # Every other round is reversed, so that drift affects all equally.
            for name in list(engines)[:: -1 if number % 2 else 1]:
                engine, before = engines[name], engines[name].progress.samples
                with contextlib.suppress(AutotuneError):
                    engine.run(1)
                    window = engine.run(1)
                    if window.failure is None:
                        seconds[name].append(window.step_s[0] * 2 / (engine.progress.samples - before))
            reporter.advance(number + 1)
    timed = {name: own[_UNTIMED:] for name, own in seconds.items() if len(own) == _UNTIMED + _ROUNDS}
    first = next(iter(found))
    return {name: paired_ratio(own, timed[first]) for name, own in timed.items() if first in timed and name != first}


def baseline_peak_bytes(job: str, seed: int, ranks: RankOptions | None = None) -> int | None:
    """Return the metered peak of a job's baseline; ``None`` if it does not fit or cannot be metered.

    Args:
        job: the job's reference.
        seed: random seed for weights and batches.
        ranks: processes that train the job together, of which the peak is the largest; ``None`` for this process.
    """
    options = EngineOptions(statistics_every=None)
    if ranks is None:
        engine: Engine = TorchEngine(load_job(job), seed=seed, options=options)
    else:
        engine = IsolatedEngine(job, seed=seed, options=options, ranks=ranks)
    with contextlib.closing(engine):
        engine.run(1)
        return engine.run(1).peak_bytes
