"""Cutting ragged batches by samples and by tokens: time and peak of the same steps, all in turn in one process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from autotune.bench.harness import SILENT, alternating, document_of
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import EngineError, InputError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.measurement import Measurement
from autotune.stats import paired_ratio

# Steps of each turn; the first one of a k is not timed.
_STEPS = 5
SAMPLES, PADDED, TOKENS = "samples", "tokens, padding kept", "tokens"


def bench_cutting(job: Job, *, rounds: int, seed: int = 0, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return time and peak of a job's steps whose batches are cut by samples, and by tokens, at each k above 1.

    All arms train from the same weights on the same batches, and take turns. Times are of steps on the same batch.

    Args:
        job: a job whose ``split`` is ``tokens``.
        rounds: turns of each arm at each k.
        seed: random seed for weights and batches.
        reporter: shows progress.

    Raises:
        InputError: if the job is not cut by tokens, or never cut, or there are fewer than two rounds.
        EngineError: if a window fails.
    """
    ks = [k for k in job.accumulation_choices if k > 1]
    if job.split != "tokens" or job.batching != "fixed" or not ks:
        shown = f"split of {job.name} is {job.split!r}, its batching {job.batching!r}, and its k {ks or 1}"
        raise InputError(shown, where="bench batching", allowed="tokens, fixed, and a k above 1")
    if rounds < 2:
        raise InputError(f"rounds is {rounds}", where="--seeds", allowed="at least 2")
    arms = {SAMPLES: replace(job, split="samples"), PADDED: replace(job, trim=None), TOKENS: job}
    if job.trim is None:
        del arms[PADDED]
    options = EngineOptions(discard_steps=1, statistics_every=None)
    reporter.stage(f"{len(arms)} ways of cutting in turn on {job.name}", len(ks) * rounds)
    rows: list[dict[str, Any]] = []
    with ExitStack() as opened:
        engines = {
            name: opened.enter_context(closing(TorchEngine(one, seed=seed, options=options)))
            for name, one in arms.items()
        }
        for number, k in enumerate(ks):
            windows: dict[str, list[Measurement]] = {name: [] for name in engines}
            for turn in range(rounds):
                for name in alternating(list(engines), turn):
                    windows[name].append(_window(engines[name], k))
                reporter.advance(number * rounds + turn + 1)
            rows += [_row(k, name, found, windows[SAMPLES]) for name, found in windows.items()]
    return document_of("cutting", {"job": job.name, "seed": seed, "rounds": rounds, "steps": _STEPS, "rows": rows})


def _window(engine: TorchEngine, k: int) -> Measurement:
    engine.apply(engine.plan.changed(accumulation_steps=k))
    window = engine.run(_STEPS)
    if window.failure is not None:
        raise EngineError(f"a step in {k} micro-batches ends with {window.failure}: {window.failure_detail}")
    return window


def _row(k: int, name: str, found: list[Measurement], base: list[Measurement]) -> dict[str, Any]:
    own = [seconds for window in found for seconds in window.step_s]
    beside = [seconds for window in base for seconds in window.step_s]
    peaks = [max((window.peak_bytes or 0 for window in windows), default=0) for windows in (found, base)]
    return {
        "accumulation_steps": k,
        "cut": name,
        "seconds_per_step": statistics.median(own),
        "over_samples": paired_ratio(own, beside) if name != SAMPLES else None,
        "peak_bytes": peaks[0] or None,
        "peak_over_samples": peaks[0] / peaks[1] if all(peaks) else None,
        "waited_frac_max": max((window.waited_frac or 0.0 for window in found), default=0.0),
    }


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words: time and peak, relative to cutting by samples at the same k."""
    return [
        f"k = {row['accumulation_steps']}, {row['cut']}: {_told(row)}"
        for row in document["rows"]
        if row["over_samples"] is not None
    ]


def _told(row: Mapping[str, Any]) -> str:
    ratio, share = row["over_samples"], row["peak_over_samples"]
    low, high = ratio["ratio_ci95"]
    memory = "" if share is None else f", {share:.1%} of its peak"
    return f"{ratio['ratio_median']:.3f} [{low:.3f}, {high:.3f}] of the time of cutting by samples{memory}"
