"""Record a real run window by window under changing plans; the simulator's strengths are fitted to the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autotune.engines.batch_stream import BatchStream
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.io.files import write_atomic
from autotune.job import Job
from autotune.measurement import Measurement
from autotune.mechanics import randomness
from autotune.mechanics.memory_meter import tensor_bytes
from autotune.mechanics.trees import tensors
from autotune.plan import Plan, PlanSpace

# Significant digits of recorded numbers.
_DIGITS = 6


def schedule(space: PlanSpace, windows: int, *, stay: int = 2) -> list[Plan]:
    """Return a plan for each window: k in long ascending stretches, with three plans in turn within each.

    The three are the baseline, 16-bit everywhere, and everything recomputed.

    Args:
        space: the job's plans.
        windows: number of windows, at least 1.
        stay: number of windows for which a plan is kept.

    Raises:
        ValueError: if ``windows`` or ``stay`` is below 1.
    """
    if windows < 1 or stay < 1:
        raise ValueError(f"windows is {windows} and stay is {stay}; both must be at least 1")
    kinds = [
        (space.precisions[0], ()),
        (space.lowest_precision, ()),
        (space.precisions[0], space.recomputable),
    ]
    plans = []
    for window in range(windows):
        k = space.accumulation_choices[window * len(space.accumulation_choices) // windows]
        precision, recomputed = kinds[window // stay % len(kinds)]
        plans.append(space.plan(accumulation_steps=k, precision=precision, recomputed=recomputed))
    return plans


def record(job: Job, plans: Sequence[Plan], *, steps: int, window_steps: int, seed: int) -> list[dict[str, Any]]:
    """Train a job under changing plans, and return the measurement of each window.

    Every window feeds the noise scale once if the plan allows it: at k = 1 under fixed batching its step is split in
    two. Peaks are not metered, because that would lengthen the first steps after a switch.

    Args:
        job: the job.
        plans: the plan of each window; repeated if there are fewer plans than windows.
        steps: optimizer steps in all; the last window may be shorter than the others.
        window_steps: optimizer steps of a window.
        seed: random seed of weights, batches and all else.

    Returns:
        A JSON object per window: ``window``, its number from 0; ``plan``; ``measurement``, to six significant digits
        and without statistics per unit; ``batch_bytes``, the mean and the largest bytes of the tensors of the batches
        that the window used up. A window that fails is the last.

    Raises:
        ValueError: if there is no plan, or ``steps`` or ``window_steps`` is below 1.
        JobError: if the job's model, batches or loss cannot be used.
        PlanError: if a plan lies outside the job's space.
    """
    if not plans or steps < 1 or window_steps < 1:
        raise ValueError(f"{len(plans)} plans, {steps} steps, {window_steps} steps a window; each must be at least 1")
    options = EngineOptions(split_to_learn_noise=True, meter_memory=False, total_samples=_samples(job, plans, steps))
    engine = TorchEngine(job, seed=seed, options=options)
    stream = BatchStream(job, seed, torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    try:
        for first in range(0, steps, window_steps):
            number, used = len(rows), engine.progress.batches
            plan = plans[number % len(plans)]
            engine.apply(plan)
            window = engine.run(min(window_steps, steps - first))
            sizes = _batch_bytes(stream, engine.progress.batches - used)
            rows.append({"window": number, "plan": plan.to_json(), "measurement": _kept(window), "batch_bytes": sizes})
            if window.failure is not None:
                break
    finally:
        engine.close()
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write recorded windows, one JSON object a line, as ``replay_engine.read_trace`` reads them.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if a number is not finite.
    """
    lines = (json.dumps(row, separators=(",", ":"), allow_nan=False) for row in rows)
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def _samples(job: Job, plans: Sequence[Plan], steps: int) -> int:
    """Return the approximate number of samples of the recording, the length of its learning-rate schedule."""
    if job.batching == "fixed":
        return max(job.total_samples, steps * job.batch_size)
    mean = sum(plan.accumulation_steps for plan in plans) / len(plans)
    return max(job.total_samples, round(steps * mean * job.batch_size))


def _batch_bytes(stream: BatchStream, batches: int) -> list[float]:
    """Return the mean and the largest bytes of the stream's next batches; zeros for none."""
    with randomness.isolated():
        sizes = [tensor_bytes(tensors(stream.take())) for _ in range(batches)]
    return [_rounded(sum(sizes) / len(sizes)), float(max(sizes))] if sizes else [0.0, 0.0]


def _kept(window: Measurement) -> dict[str, Any]:
    """Return the window as a JSON object with six significant digits, without statistics per unit."""
    gradient = None if window.gradient is None else replace(window.gradient, per_unit={})
    kept: dict[str, Any] = _rounded(replace(window, gradient=gradient).to_json())
    return kept


def _rounded(value: Any) -> Any:
    """Return a JSON value with its numbers rounded to six significant digits; whole numbers stay."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
