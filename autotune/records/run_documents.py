"""Types of the documents in a run directory, against which every document is checked when it is read.

``config.json`` has one of several types, which its keys select. A document never decides which code is loaded, which
file outside the run is opened or which address is contacted: these are recorded for readers only, and
``autotune resume`` must be given them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval, Len

from autotune.cost_model.paper_equations import Weights
from autotune.errors import InputError, RunDirectoryError
from autotune.io.documents import (
    STRICT,
    Bytes,
    Count,
    NotNegative,
    Positive,
    Quantity,
    Ratio,
    Seconds,
    Seed,
    document,
    shown,
    validated,
)
from autotune.records.requests import CompareOptions, CompareRequest, Name, Names, Seeds, Text, TuneRequest
from autotune.step_parts import StepParts

# POSIX seconds of the years 1 to 9999, the range of dates.
_Time = Annotated[float, Interval(ge=-62_135_596_800, le=253_402_300_799)]
# An interval of a time ratio; its inverse is shown as a ratio of speeds.
_Ratios = Annotated[list[Ratio], Len(2, 2)]
# How products of fp32 numbers were computed.
_Fp32 = Annotated[dict[Literal["matrix products", "convolutions"], Literal["fp32", "tf32", "bf16"]], Len(2, 2)]


# Configurations.


@document
class _Budget:
    size_bytes: Bytes | None
    share: NotNegative | None


@document
class TuneConfig:
    """``config.json`` of a tuning."""

    verb: Literal["tune"]
    job: Name
    method: Name
    memory_budget: _Budget | None
    steps: Count
    seed: Seed
    asked: TuneRequest

    def __post_init__(self) -> None:
        _require_equal(self, "method")
        if self.asked.weights is not None:
            try:
                Weights.parse(self.asked.weights)
            except InputError as error:
                raise RunDirectoryError(f"weights: {error.problem}", allowed=error.allowed) from error


def _require_equal(config: TuneConfig | CompareConfig, *keys: str) -> None:
    """Refuse a configuration whose request differs from its own keys."""
    for key in keys:
        if getattr(config.asked, key) != getattr(config, key):
            raise RunDirectoryError(f"asked.{key} differs from {key}", allowed="the same value in both")


@document
class CompareConfig:
    """``config.json`` of a comparison on one job."""

    verb: Literal["compare", "demo"]
    job: Name
    arms: Names
    seeds: Seeds
    memory_budget: _Budget | None
    steps: Count
    seed: Seed
    asked: CompareRequest

    def __post_init__(self) -> None:
        _require_equal(self, "arms", "seeds")


@document
class JobsConfig:
    """``config.json`` of a comparison on several jobs."""

    verb: Literal["compare"]
    job: Literal["jobs"]
    jobs: Names
    arms: Names
    settings: CompareOptions


@document
class TableRequest:
    """Options of a reproduction; see :func:`autotune.reproduce`."""

    table: Name
    data: Text | None
    scale: Name
    seeds: Count


@document
class Source:
    """A file of data that a run read."""

    name: Text
    size_bytes: Bytes
    sha256: Text


@document
class ReproduceConfig:
    """``config.json`` of a reproduction."""

    verb: Literal["reproduce"]
    job: Name
    asked: TableRequest
    data: list[Source]


@document
class SearchSettings:
    """Limits of a search for recipes.

    Attributes:
        trials: number of trials, including failed ones and those before an interruption.
        decisions: number of decisions in each trial.

    Raises:
        InputError: if one of them is below 1.
    """

    trials: Count
    decisions: Annotated[int, Interval(le=10**12)]

    def __post_init__(self) -> None:
        for option, value in (("--search", self.trials), ("--search-decisions", self.decisions)):
            if value < 1:
                raise InputError(f"is {value}", where=option, allowed="at least 1")


@document
class TrainConfig:
    """``config.json`` of a training on simulated jobs, or of a search for its recipe."""

    verb: Literal["train"]
    job: Name
    recipe: dict[str, Any]
    search: SearchSettings | None = None


@document
class FineTuneConfig:
    """``config.json`` of a training on one real job."""

    verb: Literal["train"]
    job: Name
    policy: Text
    memory_budget: Text | None
    seed: Seed


@document
class AttachConfig:
    """``config.json`` of an attached run."""

    verb: Literal["attach"]
    job: Text
    mode: Name
    stage: Name
    batching: Name
    policy: Text


Config = TuneConfig | CompareConfig | JobsConfig | ReproduceConfig | TrainConfig | FineTuneConfig | AttachConfig
_VERBS: Mapping[str, type[Config]] = {
    "tune": TuneConfig,
    "compare": CompareConfig,
    "demo": CompareConfig,
    "reproduce": ReproduceConfig,
    "train": TrainConfig,
    "attach": AttachConfig,
}


def config_of(found: Mapping[str, Any], *, where: str) -> Config:
    """Return the configuration of a run.

    Raises:
        RunDirectoryError: if a key or a value is not allowed; the message names the first one.
    """
    verb = found.get("verb")
    if not isinstance(verb, str) or verb not in _VERBS:
        raise RunDirectoryError(f"verb is {shown(verb)}", where=where, allowed=list(_VERBS))
    kind = _VERBS[verb]
    if verb == "compare" and "jobs" in found:
        kind = JobsConfig
    if verb == "train" and "policy" in found:
        kind = FineTuneConfig
    return validated(kind, found, where=where, version=1, error=RunDirectoryError)


@document
class Environment:
    """``environment.json``: the machine, the versions and the data."""

    time: Text
    device: Text
    fp32: dict[str, Text] | None = None
    settings: dict[str, Any] | None = None
    precisions_excluded: dict[Literal["bf16", "fp16"], Text] | None = None
    storages: Text | None = None
    cores: Count | None
    threads: Count
    python: Text
    system: Text
    packages: Annotated[dict[str, Text | None], Len(0, 1_000)]
    data: list[Source]


# Results.

_Share = Annotated[float, Interval(ge=0, le=1)]


@document
class Window:
    """A window of a compared run."""

    step: Count
    seconds_per_step: Seconds | None
    peak_bytes: Bytes | None
    memory_budget_bytes: Bytes | None
    noise_scale: Quantity | None
    failure: Text | None = None


@document
class PlanFrom:
    """A plan, and the step at which it was applied."""

    step: Count
    plan: dict[str, Any]


@document
class Run:
    """One run of a comparison, in the journal and in ``comparison.json``."""

    seed: Seed
    reached: bool
    time_to_target_s: Seconds | None
    steps: Count
    samples: Count
    final_metric: Quantity | None
    gradient_norm: NotNegative | None = None
    throughput: NotNegative | None
    peak_bytes: Bytes | None
    within_budget: bool
    energy_j: NotNegative | None
    energy_source: Text
    failure: Text | None
    failure_detail: Text | None = None
    curve: list[tuple[Seconds, Count, Quantity]]
    ran_s: tuple[_Time, _Time] = (0.0, 0.0)
    out_of_memory: Count = 0
    alone: dict[str, Count]
    waited_frac: _Share | None = None
    parts: StepParts | None = None
    grams: NotNegative | None = None
    plans: list[PlanFrom] | None = None
    windows: list[Window] | None = None

    def __post_init__(self) -> None:
        if self.reached and self.time_to_target_s is None:
            raise RunDirectoryError("reached is true, and time_to_target_s is None", allowed="a number")
        if self.time_to_target_s and not any(
            seconds >= self.time_to_target_s and samples > 0 for seconds, samples, _ in self.curve
        ):
            raise RunDirectoryError(
                f"time_to_target_s is {self.time_to_target_s}, and its curve has no sample there",
                allowed="the time of an evaluation",
            )


@document
class Arm:
    """The runs of an arm, and the cost of its tuning."""

    name: Name
    tuning_s: Seconds
    tuning_steps: Count
    plan: dict[str, Any] | None = None
    runs: Annotated[list[Run], Len(1, 10_000)]


def _require_interval(ratio: float | None, bounds: list[float] | None) -> None:
    """Refuse a ratio without its interval, or an interval in descending order."""
    if (ratio is None) != (bounds is None):
        raise RunDirectoryError(f"time_ratio is {ratio} and time_ratio_ci95 is {bounds}", allowed="both, or neither")
    if bounds is not None and bounds[0] > bounds[1]:
        raise RunDirectoryError(f"time_ratio_ci95 is {bounds}", allowed="the lower bound before the upper one")


@document
class Judged:
    """An arm compared with the baseline."""

    arm: Name
    time_ratio: Ratio | None
    time_ratio_ci95: _Ratios | None
    time_ratio_bca95: _Ratios | None = None
    p_value: Quantity | None
    samples_ratio: Quantity | None = None
    memory_ratio: NotNegative | None
    metric_difference: Quantity | None
    non_inferior: bool | None
    break_even_steps: Count | None
    verdict: Text
    reason: Text

    def __post_init__(self) -> None:
        _require_interval(self.time_ratio, self.time_ratio_ci95)
        for key in ("metric_difference", "p_value"):
            if self.time_ratio is not None and getattr(self, key) is None:
                raise RunDirectoryError(f"{key} is None although time_ratio is a number", allowed="a number")


@document
class _Dips:
    every: Annotated[int, Interval(ge=2, le=10**9)]
    share: Annotated[float, Interval(gt=0, lt=1)]
    told: bool = False
    family: str = "periodic"


@document
class _Metric:
    goal: Literal["min", "max"]
    target: Quantity | None
    margin: Quantity


@document
class _Busy:
    """Runs that were disturbed by other programs, also where they were repeated."""

    runs: Count
    of: Count
    waited_frac_max: _Share


@document
class Comparison:
    """``comparison.json``."""

    job: Name
    device: Text
    # The baseline's fp32 arithmetic, on an accelerator.
    fp32: _Fp32 | None = None
    seeds: Seeds
    memory_budget_bytes: Bytes | None
    dips: _Dips | None = None
    baseline: Name
    gradient_norm: Positive | None = None
    metric: _Metric
    horizon_samples: Count
    protocol_sha256: Text
    indication_only: bool
    arms: Annotated[list[Arm], Len(1, 1_000)]
    against_baseline: list[Judged]
    gate: Judged | None = None
    busy: _Busy | None = None
    run: Text


@document
class Together:
    """Combined result of an arm on several jobs."""

    arm: Name
    jobs: Count
    time_ratio: Ratio | None
    time_ratio_ci95: _Ratios | None
    non_inferior: bool
    verdict: Text
    reason: Text

    def __post_init__(self) -> None:
        _require_interval(self.time_ratio, self.time_ratio_ci95)


@document
class OneOfJobs:
    """One job of a comparison on several jobs."""

    job: Name
    run: Text
    against_baseline: list[Judged]


@document
class Jobs:
    """``jobs.json``."""

    jobs: Annotated[list[OneOfJobs], Len(1, 1_000)]
    together: list[Together]
    run: Text


@document
class Row:
    """A number of the paper and our own number; see :class:`autotune.paper.rows.TableRow`."""

    metric: Text
    configuration: Text
    unit: Text
    paper: Quantity | None
    ours: Quantity | None
    ratio: Quantity | None
    paper_change: Quantity | None
    our_change: Quantity | None
    source: Text
    note: Text


@document
class Rates:
    """Rates from which an efficiency table computes the utilisation of a device; in the journal of a reproduction."""

    # Operations per sample, and the peak rate of matrix products by precision.
    per_sample: NotNegative
    peak_per_s: dict[Literal["fp32", "bf16", "fp16"], Positive]
    threads: Count

    def __post_init__(self) -> None:
        if "fp32" not in self.peak_per_s:
            raise RunDirectoryError("peak_per_s has no fp32", allowed="the precision of the baseline")


@document
class Reproduction:
    """``reproduction.json`` without the keys that only some tables have."""

    # Tables have further keys, which nothing reads.
    __pydantic_config__: ClassVar = {**STRICT, "extra": "ignore"}

    table: Name
    scale: Name
    device: Text
    jobs: Names
    seeds: Seeds
    rows: list[Row]
    notes: list[Text]
    seconds: Seconds
    run: Text


@document
class LaunchTrial:
    """What a launch choice, or several together, win on a job: ratios to the job as it is.

    Attributes:
        choice: the choice, as behind a job's name.
        exact: whether it promises bit-identical training, and training was bit-identical.
        time_ratio: median ratio of the times of two steps side by side; ``None`` if it cannot be used.
        time_ratio_ci95: the interval of that median.
        peak_ratio: ratio of the peaks; ``None`` where memory cannot be metered.
        difference: largest relative difference of losses and weights after the steps.
        reason: why it cannot be used here; ``None`` if it can.
    """

    choice: Name
    exact: bool = False
    time_ratio: Ratio | None = None
    time_ratio_ci95: _Ratios | None = None
    peak_ratio: NotNegative | None = None
    difference: NotNegative | None = None
    reason: Text | None = None

    def __post_init__(self) -> None:
        _require_interval(self.time_ratio, self.time_ratio_ci95)

    @property
    def is_faster(self) -> bool:
        """Return whether the whole interval of the time ratio lies below 1."""
        return self.time_ratio_ci95 is not None and self.time_ratio_ci95[1] < 1


@document
class LaunchChoices:
    """``launch_choices.json``: what free knobs win on a job.

    Attributes:
        job: name of the job.
        steps: steps after which losses and weights were compared.
        pairs: most pairs of timed steps of a trial; one that is slower beyond doubt ends earlier.
        tolerant: whether choices that round differently could be recommended.
        repeat_difference: largest relative difference of losses and weights of two trainings of the job as it is.
        trials: trials of single choices.
        recommended: the recommended choices, as behind a job's name; ``None`` for none.
        together: the trial of all choices that were faster alone; ``None`` for none.
    """

    job: Name
    steps: Count
    pairs: Count
    tolerant: bool
    repeat_difference: NotNegative
    trials: Annotated[list[LaunchTrial], Len(1, 1_000)]
    recommended: Name | None
    together: LaunchTrial | None


@document
class _Predicted:
    seconds_per_step: Quantity
    peak_bytes: Quantity
    seconds_per_gib: Quantity | None = None


@document
class _Measured:
    seconds_per_step: Seconds | None
    peak_bytes: Bytes | None
    throughput: NotNegative | None
    cost: Ratio
    sample_j: NotNegative | None
    baseline_sample_j: NotNegative | None
    energy_source: Text
    baseline_seconds_per_step: Seconds | None
    baseline_peak_bytes: Annotated[int, Interval(ge=1, le=2**60)]
    memory_budget_bytes: Bytes | None
    waited_frac: _Share | None = None
    parts: StepParts | None = None
    baseline_parts: StepParts | None = None


@document
class Tuned:
    """``tuned.json``."""

    plan: dict[str, Any]
    predicted: _Predicted | None
    measured: _Measured
    tuning_s: Seconds
    tuning_steps: Count
    run: Text
    launch_choices: LaunchChoices | None = None


@document
class Trial:
    """A line of ``trials.jsonl``."""

    method: Name
    number: Count
    plan: dict[str, Any]
    measurement: dict[str, Any]
    cost: Quantity
    final: bool
    tuning_steps: Count
    tuning_s: Seconds
