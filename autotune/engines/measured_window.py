"""Collect the reports of the steps of one window, and turn them into a measurement."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.measurement import ABSENT, Failure, GradientStatistics, Measurement
from autotune.mechanics.energy_meter import EnergyMeter
from autotune.mechanics.processor_wait import ProcessorWait
from autotune.step_parts import StepParts


@dataclass(slots=True, kw_only=True)
class StepReport:
    """Report on one completed step.

    Attributes:
        seconds: wall time of the step.
        parts: seconds of each of its parts, which sum to it; ``communication`` is all time in collectives.
        flops: operations of its forward and backward passes without recomputation; ``None`` if they are not known.
        energy_j: energy of the step; ``None`` if it cannot be read.
        timed: whether the time is representative (the step was not discarded, metered or split to measure the noise).
        samples: samples consumed.
        items: loss-bearing items consumed.
        batch_bytes: bytes of the tensors of each batch.
        loss: mean loss per item; may be NaN or infinite.
        stepped: whether the update was made, not skipped.
        learning_rate: learning rate of the first parameter group.
    """

    seconds: float
    parts: Mapping[str, float]
    flops: int | None
    energy_j: float | None
    timed: bool
    samples: int
    items: int
    batch_bytes: tuple[int, ...]
    loss: float
    stepped: bool
    learning_rate: float


@dataclass(slots=True, kw_only=True)
class Window:
    """A window of steps that begins when this object is created.

    Attributes:
        meter: the energy meter.
    """

    meter: EnergyMeter
    reports: list[StepReport] = field(default_factory=list)
    failure: Failure | None = None
    failure_detail: str = ""
    began: float = field(init=False)
    began_j: float | None = field(init=False)
    _wait: ProcessorWait = field(init=False, default_factory=ProcessorWait)

    def __post_init__(self) -> None:
        self.began_j, self.began = self.meter.read(), time.perf_counter()

    def elapsed(self) -> float:
        """Return the seconds since the window began."""
        return time.perf_counter() - self.began

    def fail(self, failure: Failure, detail: str) -> None:
        """End the window early."""
        self.failure = failure
        self.failure_detail = " ".join(detail.split())[:300]

    def measurement(
        self,
        *,
        peak_bytes: int | None,
        reserved_bytes: int | None,
        memory_budget_bytes: int | None,
        gradient: GradientStatistics | None,
        loss_scale: float | None,
        parts: StepParts | None,
    ) -> Measurement:
        """Return the window as a measurement."""
        good = [report for report in self.reports if report.stepped]
        timed = [report for report in good if report.timed]
        items = sum(report.items for report in good)
        energies = [report.energy_j for report in timed if report.energy_j is not None]
        known = self.began_j is not None and len(energies) == len(timed)
        sizes = [size for report in self.reports for size in report.batch_bytes]
        return Measurement(
            steps=len(self.reports),
            samples=sum(report.samples for report in self.reports),
            items=sum(report.items for report in self.reports),
            total_s=self.elapsed(),
            step_s=tuple(report.seconds for report in timed),
            seconds_per_step=statistics.median(report.seconds for report in timed) if timed else None,
            samples_per_step=statistics.fmean(report.samples for report in timed) if timed else None,
            batch_bytes=(statistics.fmean(sizes), float(max(sizes))) if sizes else None,
            peak_bytes=peak_bytes,
            reserved_bytes=reserved_bytes,
            memory_budget_bytes=memory_budget_bytes,
            loss=sum(report.loss * report.items for report in good) / items if items else None,
            gradient=gradient,
            learning_rate=self.reports[-1].learning_rate if self.reports else 0.0,
            loss_scale=loss_scale,
            energy_j=math.fsum(energies) if known else None,
            total_energy_j=spent(self.began_j, self.meter.read()),
            energy_source=self.meter.source if known else ABSENT,
            skipped_steps=len(self.reports) - len(good),
            waited_frac=self._wait.frac(),
            parts=parts,
            failure=self.failure,
            failure_detail=self.failure_detail,
        )


def spent(before_j: float | None, after_j: float | None) -> float | None:
    """Return the joules between two readings of a meter; ``None`` if either is unknown."""
    return None if before_j is None or after_j is None else after_j - before_j
