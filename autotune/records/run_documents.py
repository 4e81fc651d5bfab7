"""Kinds of the documents in a campaign's run directory, so that what no campaign wrote is refused by name.

What a run was asked for (``config.json``) is one of several kinds, told apart by its verb. A document never decides
which code is loaded, which file is opened elsewhere or which address is connected to: where a command was given one of
those, its text is kept for people to read, and ``autotune resume`` must be given it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval, Len

from autotune.errors import RunDirectoryError
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

# POSIX seconds of the years 1 to 9999, which is what dates can show.
_Time = Annotated[float, Interval(ge=-62_135_596_800, le=253_402_300_799)]
# Of two times; what it says is shown the other way round as well, as a speed.
_Ratios = Annotated[list[Ratio], Len(2, 2)]
_Text = Annotated[str, Len(0, 10_000)]
_Name = Annotated[str, Len(1, 1_000)]
_Seeds = Annotated[list[Seed], Len(2, 1_000)]
_Names = Annotated[list[_Name], Len(1, 1_000)]
# How products of fp32 numbers were computed.
_Fp32 = Annotated[dict[Literal["matrix products", "convolutions"], Literal["fp32", "tf32", "bf16"]], Len(2, 2)]


# What was asked for.


@document
class _Budget:
    size_bytes: Bytes | None
    share: NotNegative | None


@document
class _Ranks:
    # Each is a process of this machine.
    count: Annotated[int, Interval(ge=1, le=256)]
    zero_stage: Annotated[int, Interval(ge=0, le=3)]
    # The SHA-256 of a configuration of the user's own, which may hold secrets.
    config: _Text | None = None
    engine: _Text = "deepspeed"


@document
class _Cluster:
    address: _Text
    cores: Annotated[int, Interval(ge=1, le=4096)] = 1


@document
class Asked:
    """The arguments of a tuning or a comparison, as given; see :func:`autotune.campaign.session.session_of`."""

    job: _Text | None
    memory_budget: _Text | None
    steps: Count
    trials: Count | None
    seed: Seed
    lean: bool
    isolate: bool
    ranks: _Ranks | None = None
    cluster: _Cluster | None = None
    storage: _Text | None = None
    weights: _Text | None = None
    watts: NotNegative | None = None
    dips: _Text | None = None
    carbon_intensity: _Text | None = None
    within: _Text | None = None
    method: _Name | None = None
    arms: _Names | None = None
    seeds: _Seeds | None = None


@document
class TuneConfig:
    """``config.json`` of a tuning."""

    verb: Literal["tune"]
    job: _Name
    method: _Name
    memory_budget: _Budget | None
    steps: Count
    seed: Seed
    asked: Asked


@document
class CompareConfig:
    """``config.json`` of a comparison on one job."""

    verb: Literal["compare", "demo"]
    job: _Name
    arms: _Names
    seeds: _Seeds
    memory_budget: _Budget | None
    steps: Count
    seed: Seed
    asked: Asked

    def __post_init__(self) -> None:
        for key in ("arms", "seeds"):
            own, asked = getattr(self, key), getattr(self.asked, key)
            if asked is not None and asked != own:
                raise RunDirectoryError(f"asked.{key} is not {key}", allowed="the same in both")


@document
class Settings:
    """What else a comparison of several jobs was asked for, for each of them."""

    seeds: Count = 10
    memory_budget: _Text | None = None
    steps: Count = 120
    trials: Count | None = None
    seed: Seed = 0
    dips: _Text | None = None
    lean: bool = True
    storage: _Text | None = None
    watts: NotNegative | None = None
    carbon_intensity: _Text | None = None


@document
class JobsConfig:
    """``config.json`` of a comparison on several jobs."""

    verb: Literal["compare"]
    job: Literal["jobs"]
    jobs: _Names
    arms: _Names
    settings: Settings


@document
class AskedTable:
    """The arguments of a reproduction."""

    table: _Name
    data: _Text | None
    scale: _Name
    seeds: Count


@document
class Source:
    """A file of data that a run read."""

    name: _Text
    size_bytes: Bytes
    sha256: _Text


@document
class ReproduceConfig:
    """``config.json`` of a reproduction."""

    verb: Literal["reproduce"]
    job: _Name
    asked: AskedTable
    data: list[Source]


@document
class SearchShare:
    """How far a search for recipes goes."""

    trials: Count
    decisions: Annotated[int, Interval(ge=1, le=10**12)]


@document
class TrainConfig:
    """``config.json`` of a training on simulated jobs, or of a search for its recipe."""

    verb: Literal["train"]
    job: _Name
    recipe: dict[str, Any]
    search: SearchShare | None = None


@document
class FineTuneConfig:
    """``config.json`` of a training on one real job."""

    verb: Literal["train"]
    job: _Name
    policy: _Text
    memory_budget: _Text | None
    seed: Seed


@document
class AttachConfig:
    """``config.json`` of an attached run."""

    verb: Literal["attach"]
    job: _Text
    mode: _Name
    stage: _Name
    batching: _Name
    policy: _Text


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
    """Return what a run was asked for.

    Raises:
        RunDirectoryError: naming the first key or value that no command wrote.
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

    time: _Text
    device: _Text
    fp32: dict[str, _Text] | None = None
    settings: dict[str, Any] | None = None
    cores: Count | None
    threads: Count
    python: _Text
    system: _Text
    packages: Annotated[dict[str, _Text | None], Len(0, 1_000)]
    data: list[Source]


# What was seen.


@document
class Window:
    """What a window of a compared run saw."""

    step: Count
    seconds_per_step: Seconds | None
    peak_bytes: Bytes | None
    memory_budget_bytes: Bytes | None
    noise_scale: Quantity | None
    failure: _Text | None = None


@document
class PlanFrom:
    """A plan, and the step from which it held."""

    step: Count
    plan: dict[str, Any]


@document
class Run:
    """One run of a comparison; the journal and ``comparison.json`` have the same."""

    seed: Seed
    reached: bool
    time_to_target_s: Seconds | None
    steps: Count
    samples: Count
    final_metric: Quantity | None
    throughput: NotNegative | None
    peak_bytes: Bytes | None
    within_budget: bool
    energy_j: NotNegative | None
    energy_source: _Text
    failure: _Text | None
    curve: list[tuple[Seconds, Count, Quantity]]
    ran_s: tuple[_Time, _Time] = (0.0, 0.0)
    out_of_memory: Count = 0
    alone: dict[str, Count]
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
    """What an arm of a comparison came to."""

    name: _Name
    tuning_s: Seconds
    tuning_steps: Count
    plan: dict[str, Any] | None = None
    runs: Annotated[list[Run], Len(1, 10_000)]


def _require_interval(ratio: float | None, bounds: list[float] | None) -> None:
    """Refuse a ratio without its interval, or an interval the wrong way round."""
    if (ratio is None) != (bounds is None):
        raise RunDirectoryError(f"time_ratio_ci95 is {bounds} beside a time_ratio of {ratio}", allowed="both, or none")
    if bounds is not None and bounds[0] > bounds[1]:
        raise RunDirectoryError(f"time_ratio_ci95 is {bounds}", allowed="the lower bound before the upper one")


@document
class Judged:
    """An arm against the baseline."""

    arm: _Name
    time_ratio: Ratio | None
    time_ratio_ci95: _Ratios | None
    time_ratio_bca95: _Ratios | None = None
    p_value: Quantity | None
    samples_ratio: Quantity | None = None
    memory_ratio: NotNegative | None
    metric_difference: Quantity | None
    non_inferior: bool | None
    break_even_steps: Count | None
    verdict: _Text
    reason: _Text

    def __post_init__(self) -> None:
        _require_interval(self.time_ratio, self.time_ratio_ci95)
        for key in ("metric_difference", "p_value"):
            if self.time_ratio is not None and getattr(self, key) is None:
                raise RunDirectoryError(f"{key} is None beside a time_ratio", allowed="a number")


@document
class _Dips:
    every: Annotated[int, Interval(ge=2, le=10**9)]
    share: Annotated[float, Interval(gt=0, lt=1)]
    told: bool = False


@document
class _Metric:
    goal: Literal["min", "max"]
    target: Quantity
    margin: Quantity


@document
class Comparison:
    """``comparison.json``."""

    job: _Name
    device: _Text
    # The baseline's, on an accelerator.
    fp32: _Fp32 | None = None
    seeds: _Seeds
    memory_budget_bytes: Bytes | None
    dips: _Dips | None = None
    baseline: _Name
    metric: _Metric
    horizon_samples: Count
    protocol_sha256: _Text
    indication_only: bool
    arms: Annotated[list[Arm], Len(1, 1_000)]
    against_baseline: list[Judged]
    gate: Judged | None = None
    run: _Text


@document
class Together:
    """An arm of a comparison on several jobs, put together."""

    arm: _Name
    jobs: Count
    time_ratio: Ratio | None
    time_ratio_ci95: _Ratios | None
    non_inferior: bool
    verdict: _Text
    reason: _Text

    def __post_init__(self) -> None:
        _require_interval(self.time_ratio, self.time_ratio_ci95)


@document
class OneOfJobs:
    """What a comparison on several jobs keeps of one of them."""

    job: _Name
    run: _Text
    against_baseline: list[Judged]


@document
class Jobs:
    """``jobs.json``."""

    jobs: Annotated[list[OneOfJobs], Len(1, 1_000)]
    together: list[Together]
    run: _Text


@document
class Row:
    """A number of the paper's and ours; see :class:`autotune.paper.rows.Row`."""

    metric: _Text
    configuration: _Text
    unit: _Text
    paper: Quantity | None
    ours: Quantity | None
    ratio: Quantity | None
    paper_change: Quantity | None
    our_change: Quantity | None
    source: _Text
    note: _Text


@document
class Rates:
    """What an efficiency table takes the use of a device from; the journal of a reproduction has it."""

    # Operations of one sample, and the highest rate of matrix products by precision.
    per_sample: NotNegative
    peak_per_s: dict[Literal["fp32", "bf16", "fp16"], Positive]
    threads: Count

    def __post_init__(self) -> None:
        if "fp32" not in self.peak_per_s:
            raise RunDirectoryError("peak_per_s has no fp32", allowed="what the baseline is measured in")


@document
class Reproduction:
    """``reproduction.json``, but for the facts that each table adds."""

    # Tables differ in what else they keep, which nothing reads.
    __pydantic_config__: ClassVar = {**STRICT, "extra": "ignore"}

    table: _Name
    scale: _Name
    device: _Text
    jobs: _Names
    seeds: _Seeds
    rows: list[Row]
    notes: list[_Text]
    seconds: Seconds
    run: _Text


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
    cost: Quantity
    sample_j: NotNegative | None
    baseline_sample_j: NotNegative | None
    energy_source: _Text
    baseline_seconds_per_step: Seconds | None
    baseline_peak_bytes: Annotated[int, Interval(ge=1, le=2**60)]
    memory_budget_bytes: Bytes | None


@document
class Tuned:
    """``tuned.json``."""

    plan: dict[str, Any]
    predicted: _Predicted | None
    measured: _Measured
    tuning_s: Seconds
    tuning_steps: Count
    run: _Text


@document
class Trial:
    """A line of ``trials.jsonl``."""

    method: _Name
    number: Count
    plan: dict[str, Any]
    measurement: dict[str, Any]
    cost: Quantity
    final: bool
    tuning_steps: Count
    tuning_s: Seconds
