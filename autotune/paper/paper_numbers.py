"""The paper's numbers as printed, each with its location; nothing here is measured or corrected.

Source: M. Nallaretnam, U. Thayasivam, "Systematic Training Compute Optimization for Large-Scale AI Models: A Dynamic
Resource Allocation Approach", University of Moratuwa; four RTX 3090, PyTorch 2.0.1, DeepSpeed 0.10.0 (section IV.C).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """One line of an efficiency table.

    Attributes:
        metric: what was measured.
        unit: its unit.
        baseline: value for standard PyTorch in FP32 at a constant learning rate.
        optimized: value for the paper's method.
        source: where the paper states it.
    """

    metric: str
    unit: str
    baseline: float
    optimized: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """One line of the ablation, in which each component is added to those above it.

    Attributes:
        name: the paper's name of the component.
        minutes: minutes to 85 % accuracy.
        memory_gb: peak memory in GB.
        accuracy_percent: final accuracy in percent.
        source: where the paper states it.
    """

    name: str
    minutes: float
    memory_gb: float
    accuracy_percent: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One line of the scaling table.

    Attributes:
        ranks: number of GPUs.
        baseline: images per second of the baseline.
        optimized: images per second of the paper's method.
        baseline_percent: scaling efficiency of the baseline in percent.
        optimized_percent: scaling efficiency of the paper's method in percent.
    """

    ranks: int
    baseline: float
    optimized: float
    baseline_percent: float
    optimized_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """A single number.

    Attributes:
        value: the number.
        unit: its unit.
        source: where the paper states it.
    """

    value: float
    unit: str
    source: str


TIME, SAMPLES, MEMORY, THROUGHPUT, QUALITY, UTILISATION = (
    "time to target",
    "samples to target",
    "peak memory",
    "throughput",
    "final quality",
    "FLOPs utilisation",
)

TABLE_1 = (
    PaperRow(metric=TIME, unit="min", baseline=42.3, optimized=31.2, source="Table I, time to 85 % accuracy"),
    PaperRow(metric=MEMORY, unit="GB", baseline=8.24, optimized=6.13, source="Table I, peak memory"),
    PaperRow(metric=THROUGHPUT, unit="img/s", baseline=1240, optimized=1580, source="Table I, throughput"),
    PaperRow(metric=QUALITY, unit="% accuracy", baseline=85.31, optimized=85.14, source="Table I, final accuracy"),
    PaperRow(metric=UTILISATION, unit="%", baseline=42.3, optimized=58.7, source="Table I, FLOPs utilization"),
)
TABLE_2 = (
    PaperRow(metric=TIME, unit="hr", baseline=3.82, optimized=2.91, source="Table II, time to perplexity 45"),
    PaperRow(metric=MEMORY, unit="GB", baseline=12.43, optimized=9.32, source="Table II, peak memory"),
    PaperRow(metric=THROUGHPUT, unit="tok/s", baseline=8520, optimized=10890, source="Table II, throughput"),
    PaperRow(metric=QUALITY, unit="perplexity", baseline=44.82, optimized=45.13, source="Table II, final perplexity"),
)
TABLE_3 = (
    AblationRow(name="Baseline", minutes=42.3, memory_gb=8.24, accuracy_percent=85.31, source="Table III, row 1"),
    AblationRow(
        name="+ Gradient Accum (k=4)", minutes=38.1, memory_gb=7.12, accuracy_percent=85.28, source="Table III, row 2"
    ),
    AblationRow(
        name="+ Mixed Precision", minutes=34.5, memory_gb=6.45, accuracy_percent=85.22, source="Table III, row 3"
    ),
    AblationRow(name="+ LR Scheduler", minutes=32.8, memory_gb=6.45, accuracy_percent=85.19, source="Table III, row 4"),
    AblationRow(
        name="+ Activation Checkpoint", minutes=31.2, memory_gb=6.13, accuracy_percent=85.14, source="Table III, row 5"
    ),
)
TABLE_4 = (
    ScalingRow(ranks=1, baseline=1240, optimized=1580, baseline_percent=100.0, optimized_percent=100.0),
    ScalingRow(ranks=2, baseline=2310, optimized=3040, baseline_percent=93.1, optimized_percent=96.2),
    ScalingRow(ranks=4, baseline=4250, optimized=5980, baseline_percent=85.7, optimized_percent=94.6),
)
# "Optimization impact", section V.D; the four add up to 100 %, though they are of different kinds.
EARLY = PaperFigure(value=35, unit="% of gains", source="section V.D, early training")
BACKWARD = PaperFigure(value=28, unit="% of gains", source="section V.D, gradient-intensive operations")
MEMORY_BOUND = PaperFigure(value=22, unit="% of gains", source="section V.D, memory-bound phases")
COMMUNICATION = PaperFigure(value=15, unit="% of gains", source="section V.D, communication-bound phases")
CONVOLUTION_PRECISION = PaperFigure(value=28, unit="% speed-up", source="section V.D, CNNs: mixed precision")
TRANSFORMER_PRECISION = PaperFigure(
    value=25, unit="% speed-up", source="section V.D, Transformers: mixed precision on attention operations"
)
TRANSFORMER_CHECKPOINTING = PaperFigure(
    value=32, unit="% less memory", source="section V.D, Transformers: activation checkpointing"
)
# The paper quotes these from its reference 3.
COMMUNICATION_SHARE = (
    PaperFigure(value=30, unit="% of the step", source="section I, lower end of 30-40 %, after its reference 3"),
    PaperFigure(value=40, unit="% of the step", source="section I, upper end of 30-40 %, after its reference 3"),
)
THROUGHPUT_GAIN = PaperFigure(value=1.42, unit="x", source="eq. 21, throughput gain")
RECOMPUTATION_OVERHEAD = PaperFigure(value=0.12, unit="of a step", source="eq. 21, recomputation overhead")
NET_SPEEDUP = PaperFigure(value=1.27, unit="x", source="eq. 21, net speed-up")
CYCLE_GAIN = PaperFigure(value=1.26, unit="x", source="eq. 22, gain of a cycle")
CYCLE_MONTHS = 5.0
DOUBLING = PaperFigure(value=14.8, unit="months", source="eq. 23, at 5 months a cycle")
