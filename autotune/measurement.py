"""Say what a window saw: the one document that every engine returns and every decider reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from autotune.errors import InputError
from autotune.files import refuse_unknown_keys

MEASUREMENT_VERSION = 1


class Failure(StrEnum):
    """Name what ended a window early."""

    OUT_OF_MEMORY = "out_of_memory"
    OVER_BUDGET = "over_budget"
    NON_FINITE = "non_finite"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGradient:
    """Describe the gradient of one unit's parameters, unscaled and before clipping.

    Attributes:
        rms: root mean square over the unit's parameters.
        signal_to_noise: |G|^2 over tr(Sigma)/B, the gradient's energy against the sampling noise in it at the
            step's batch; ``None`` where the step had one micro-batch.
        underflow_frac: share of the non-zero entries below 2^-24, which unscaled fp16 cannot hold (estimated
            from a fixed strided sample of the entries).
    """

    rms: float
    signal_to_noise: float | None
    underflow_frac: float

    def __post_init__(self) -> None:
        _require(self.rms >= 0 and math.isfinite(self.rms), "rms", self.rms, ">= 0")
        _require(0 <= self.underflow_frac <= 1, "underflow_frac", self.underflow_frac, "0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStatistics:
    """Hold the gradient's statistics at the last sampled step.

    Attributes:
        norm: 2-norm of the whole unscaled gradient before clipping.
        noise_scale: simple noise scale tr(Sigma)/|G|^2 in samples (moving averages); ``None`` while unknown.
        noise_scale_age_steps: optimizer steps since the noise scale was last fed; ``None`` while unknown.
        variance: eq. 7 of the paper at the last step that had several micro-batches; ``None`` while unknown.
        per_unit: one entry per unit that had gradients, by unit name.

    Source: noise scale, McCandlish et al. 2018 (arXiv:1812.06162), appendix A.
    """

    norm: float
    noise_scale: float | None = None
    noise_scale_age_steps: int | None = None
    variance: float | None = None
    per_unit: Mapping[str, UnitGradient] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Hold what one window of steps under one plan saw.

    Attributes:
        steps: optimizer steps that were attempted, discarded ones included.
        samples: samples consumed by them.
        items: loss-bearing items consumed by them.
        total_s: wall seconds of the whole window.
        step_s: wall seconds of each timed step (the first steps of a plan are run but not timed).
        seconds_per_step: median of ``step_s``; ``None`` if no step was timed.
        samples_per_step: mean samples of a timed step; ``None`` if no step was timed.
        peak_bytes: true peak of model state, gradients, activations and workspace; ``None`` if unmeasured.
        memory_budget_bytes: the budget that the engine held the window to; ``None`` for no budget.
        loss: mean training loss per loss-bearing item over the window; ``None`` if no step completed.
        gradient: gradient statistics at the last sampled step; ``None`` if none was sampled.
        learning_rate: the learning rate of the last step.
        loss_scale: the loss scale after the window; ``None`` where no unit is fp16.
        skipped_steps: steps whose update was skipped for a gradient that was not finite.
        energy_j: energy of the timed steps; ``None`` where it cannot be read.
        energy_source: ``measured:nvml``, ``measured:rapl``, ``estimated:tdp`` or ``absent``.
        failure: what ended the window early, or ``None``.
        failure_detail: one line about it.
    """

    steps: int
    samples: int
    items: int
    total_s: float
    step_s: tuple[float, ...] = ()
    seconds_per_step: float | None = None
    samples_per_step: float | None = None
    peak_bytes: int | None = None
    memory_budget_bytes: int | None = None
    loss: float | None = None
    gradient: GradientStatistics | None = None
    learning_rate: float = 0.0
    loss_scale: float | None = None
    skipped_steps: int = 0
    energy_j: float | None = None
    energy_source: str = "absent"
    failure: Failure | None = None
    failure_detail: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "samples", "items", "skipped_steps", "total_s"):
            value = getattr(self, name)
            _require(value >= 0, name, value, ">= 0")
        for name in ("seconds_per_step", "samples_per_step", "loss", "learning_rate", "energy_j"):
            value = getattr(self, name)
            _require(value is None or math.isfinite(value), name, value, "a finite number")
        _require((self.energy_j is None) == (self.energy_source == "absent"), "energy_source", self.energy_source)

    @property
    def within_budget(self) -> bool:
        """Tell whether the peak is known to fit the budget, or there is none."""
        if self.failure in (Failure.OUT_OF_MEMORY, Failure.OVER_BUDGET):
            return False
        if self.memory_budget_bytes is None:
            return True
        return self.peak_bytes is not None and self.peak_bytes <= self.memory_budget_bytes

    @property
    def throughput(self) -> float | None:
        """Return samples per second of the median timed step."""
        if not self.seconds_per_step or self.samples_per_step is None:
            return None
        return self.samples_per_step / self.seconds_per_step

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as a JSON object of the current version."""
        document = asdict(self)
        document["step_s"] = list(self.step_s)
        document["failure"] = None if self.failure is None else str(self.failure)
        return {"version": MEASUREMENT_VERSION, **document}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, where: str = "measurement") -> Measurement:
        """Read a measurement from a JSON object.

        Raises:
            InputError: naming the first key or value that is not allowed.
        """
        known = frozenset({"version", *(item.name for item in fields(cls))})
        refuse_unknown_keys(document, known, where=where)
        if document.get("version") != MEASUREMENT_VERSION:
            raise InputError(f"version is {document.get('version')!r}", where=where, allowed=[MEASUREMENT_VERSION])
        values = {key: value for key, value in document.items() if key != "version"}
        try:
            values["step_s"] = tuple(values.get("step_s", ()))
            if values.get("failure") is not None:
                values["failure"] = Failure(values["failure"])
            if values.get("gradient") is not None:
                values["gradient"] = _gradient_from_json(values["gradient"])
            return cls(**values)
        except InputError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f"is not a measurement: {error}", where=where) from error


def _gradient_from_json(document: Mapping[str, Any]) -> GradientStatistics:
    per_unit = {name: UnitGradient(**entry) for name, entry in document.get("per_unit", {}).items()}
    return GradientStatistics(**{**document, "per_unit": per_unit})


def _require(holds: bool, name: str, value: object, allowed: str = "") -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}", where="measurement", allowed=allowed)
