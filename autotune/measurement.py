"""Measurements of windows of steps: the document that every engine returns and every policy reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from autotune.errors import InputError
from autotune.io.documents import STRICT, validated
from autotune.step_parts import StepParts

MEASUREMENT_VERSION = 1
ABSENT = "absent"
ENERGY_SOURCES = ("measured:nvml", "measured:amdsmi", "measured:rapl", "estimated:tdp", ABSENT)


class Failure(StrEnum):
    """The reason why a window ended early."""

    OUT_OF_MEMORY = "out_of_memory"
    OVER_BUDGET = "over_budget"
    NON_FINITE = "non_finite"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGradient:
    """Statistics of the gradient of one unit's parameters, unscaled and before clipping.

    Attributes:
        rms: root mean square over the unit's parameters.
        signal_to_noise: |G|^2 over tr(Sigma)/B, the ratio of the squared gradient to its sampling noise at the
            step's batch size; ``None`` if the step had one micro-batch.
        underflow_frac: share of the non-zero entries below 2^-24, which unscaled fp16 cannot represent (estimated
            from a fixed strided sample of the entries).
    """

    __pydantic_config__ = STRICT

    rms: float
    signal_to_noise: float | None
    underflow_frac: float

    def __post_init__(self) -> None:
        _require(_is_number(self.rms) and self.rms >= 0, "rms", self.rms, ">= 0")
        ratio = self.signal_to_noise
        _require(ratio is None or isinstance(ratio, int | float), "signal_to_noise", ratio, "a number")
        share = self.underflow_frac
        _require(_is_number(share) and 0 <= share <= 1, "underflow_frac", share, "0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStatistics:
    """The gradient's statistics at the last sampled step.

    Attributes:
        norm: 2-norm of the whole unscaled gradient before clipping.
        noise_scale: simple noise scale tr(Sigma)/|G|^2 in samples (moving averages); ``None`` while unknown.
        noise_scale_age_steps: optimizer steps since the noise scale was last updated; ``None`` while unknown.
        variance: eq. 7 of the paper at the last step that had several micro-batches; ``None`` while unknown.
        per_unit: statistics by unit name, for units with gradients.

    Source: noise scale, McCandlish et al. 2018 (arXiv:1812.06162), appendix A.
    """

    __pydantic_config__ = STRICT

    norm: float
    noise_scale: float | None = None
    noise_scale_age_steps: int | None = None
    variance: float | None = None
    per_unit: Mapping[str, UnitGradient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The norm may be infinite: a gradient that overflowed is reported as it is.
        _require(isinstance(self.norm, int | float), "norm", self.norm, "a number")
        for name in ("noise_scale", "noise_scale_age_steps", "variance"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, int | float), name, value, "a number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement of one window of steps under one plan.

    Attributes:
        steps: completed optimizer steps, including untimed and skipped ones.
        samples: samples consumed by these steps.
        items: loss-bearing items consumed by these steps.
        total_s: wall seconds of the whole window.
        step_s: wall seconds of each timed step (the first steps of a plan are run but not timed).
        seconds_per_step: median of ``step_s``; ``None`` if no step was timed.
        samples_per_step: mean samples of a timed step; ``None`` if no step was timed.
        batch_bytes: mean and largest bytes of the tensors of a batch; ``None`` if unknown.
        peak_bytes: true peak of model state, gradients, activations and workspace; ``None`` if unmeasured.
        reserved_bytes: peak memory reserved by an accelerator's allocator; ``None`` on a CPU, or if unmeasured.
        memory_budget_bytes: memory budget of the window; ``None`` for no budget.
        loss: mean training loss per loss-bearing item over the steps that were not skipped; ``None`` if there are none.
        gradient: gradient statistics at the last sampled step; ``None`` if none was sampled.
        learning_rate: the learning rate of the last step.
        loss_scale: the loss scale after the window; ``None`` if the loss is not scaled.
        skipped_steps: steps whose update was skipped because the loss or the gradient was not finite.
        energy_j: energy of the timed steps; ``None`` if it cannot be read.
        total_energy_j: energy of the whole window; ``None`` if it cannot be read.
        energy_source: ``measured:nvml``, ``measured:amdsmi``, ``measured:rapl``, ``estimated:tdp`` or ``absent``.
        waited_frac: share of the window's processor time, from 0 to 1, that its threads waited for a processor which
            others had; ``None`` if unknown.
        parts: where the time of the timed steps goes; ``None`` if unknown, as in documents of earlier versions.
        failure: the reason why the window ended early, or ``None``.
        failure_detail: one line about the failure.
    """

    __pydantic_config__ = STRICT

    steps: int
    samples: int
    items: int
    total_s: float
    step_s: tuple[float, ...] = ()
    seconds_per_step: float | None = None
    samples_per_step: float | None = None
    batch_bytes: tuple[float, float] | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    memory_budget_bytes: int | None = None
    loss: float | None = None
    gradient: GradientStatistics | None = None
    learning_rate: float = 0.0
    loss_scale: float | None = None
    skipped_steps: int = 0
    energy_j: float | None = None
    total_energy_j: float | None = None
    energy_source: str = ABSENT
    waited_frac: float | None = None
    parts: StepParts | None = None
    failure: Failure | None = None
    failure_detail: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "samples", "items", "skipped_steps", "total_s"):
            value = getattr(self, name)
            _require(_is_number(value) and value >= 0, name, value, ">= 0")
        for name in ("peak_bytes", "reserved_bytes", "memory_budget_bytes"):
            value = getattr(self, name)
            _require(value is None or (_is_number(value) and value >= 0), name, value, ">= 0")
        _require(_is_number(self.learning_rate), "learning_rate", self.learning_rate, "a finite number")
        for name in ("seconds_per_step", "samples_per_step", "loss", "loss_scale", "energy_j", "total_energy_j"):
            value = getattr(self, name)
            _require(value is None or _is_number(value), name, value, "a finite number")
        waited = self.waited_frac
        _require(waited is None or (_is_number(waited) and 0 <= waited <= 1), "waited_frac", waited, "0 to 1")
        sizes = self.batch_bytes
        two = sizes is None or (len(sizes) == 2 and all(_is_number(size) and size >= 0 for size in sizes))
        _require(two, "batch_bytes", sizes, "the mean and the largest, >= 0")
        known = self.energy_source in ENERGY_SOURCES and (self.energy_j is None) == (self.energy_source == ABSENT)
        _require(known, "energy_source", self.energy_source, f"{', '.join(ENERGY_SOURCES)}; absent without energy_j")

    @classmethod
    def of_failure(
        cls, failure: Failure, detail: str, memory_budget_bytes: int | None, *, total_s: float = 0.0
    ) -> Measurement:
        """Return the measurement of a window that failed without any completed step.

        Args:
            failure: the kind of failure.
            detail: one line about the failure.
            memory_budget_bytes: memory budget of the window; ``None`` for no budget.
            total_s: seconds that the window took.
        """
        return cls(
            steps=0,
            samples=0,
            items=0,
            total_s=total_s,
            memory_budget_bytes=memory_budget_bytes,
            failure=failure,
            failure_detail=detail,
        )

    @property
    def within_budget(self) -> bool:
        """Return whether memory did not run out, and the peak is known to fit the budget, if there is one."""
        if self.failure in (Failure.OUT_OF_MEMORY, Failure.OVER_BUDGET):
            return False
        if self.memory_budget_bytes is None:
            return True
        return self.peak_bytes is not None and self.peak_bytes <= self.memory_budget_bytes

    @property
    def fragments_bytes(self) -> int:
        """Return the difference between the reserved and the allocated peak; 0 if it was not measured."""
        if self.reserved_bytes is None or self.peak_bytes is None:
            return 0
        return max(self.reserved_bytes - self.peak_bytes, 0)

    @property
    def throughput(self) -> float | None:
        """Return samples per second at the median step time."""
        if not self.seconds_per_step or self.samples_per_step is None:
            return None
        return self.samples_per_step / self.seconds_per_step

    @property
    def sample_j(self) -> float | None:
        """Return joules per sample of the timed steps."""
        if self.energy_j is None or not self.step_s or not self.samples_per_step:
            return None
        return self.energy_j / (self.samples_per_step * len(self.step_s))

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as a JSON object of the current version."""
        document = asdict(self)
        document["step_s"] = list(self.step_s)
        document["batch_bytes"] = None if self.batch_bytes is None else list(self.batch_bytes)
        document["parts"] = None if self.parts is None else self.parts.to_json()
        document["failure"] = None if self.failure is None else str(self.failure)
        return {"version": MEASUREMENT_VERSION, **document}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, where: str = "measurement") -> Measurement:
        """Read a measurement from a JSON object.

        Raises:
            InputError: naming the first key or value that is not allowed.
        """
        return validated(cls, document, where=where, version=MEASUREMENT_VERSION)


def quieter_window(first: Measurement, second: Measurement) -> Measurement:
    """Return the less disturbed of two windows of one plan, with what both consumed; or the one that failed."""
    windows = (first, second)
    failed = [window for window in windows if window.failure is not None]
    best = failed[0] if failed else min(windows, key=lambda window: window.waited_frac or 0.0)
    return replace(
        best,
        steps=first.steps + second.steps,
        samples=first.samples + second.samples,
        items=first.items + second.items,
        total_s=first.total_s + second.total_s,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, value: object, allowed: str = "") -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}", where="measurement", allowed=allowed)
