"""Say what a campaign's documents hold, as far as reports read them, and refuse what no campaign wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autotune.errors import RunDirectoryError

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_Interval = Annotated[list[_Finite], Field(min_length=2, max_length=2)]


class _Read(BaseModel):
    # What else a later version writes is left alone.
    model_config = ConfigDict(extra="ignore", strict=True)


class _Window(_Read):
    step: _Count
    seconds_per_step: _Finite | None
    peak_bytes: _Count | None
    memory_budget_bytes: _Count | None
    noise_scale: _Finite | None


class _PlanFrom(_Read):
    step: _Count
    plan: dict[str, Any]


class _Run(_Read):
    seed: int
    reached: bool
    time_to_target_s: _Finite | None
    steps: _Count
    samples: _Count
    final_metric: _Finite | None
    throughput: _Finite | None
    peak_bytes: _Count | None
    within_budget: bool
    energy_j: _Finite | None
    energy_source: str
    failure: str | None
    curve: list[Annotated[list[_Finite], Field(min_length=3, max_length=3)]]
    grams: _Finite | None = None
    ran_s: _Interval | None = None
    plans: list[_PlanFrom] | None = None
    windows: list[_Window] | None = None


class _Arm(_Read):
    name: str
    tuning_s: _Finite
    tuning_steps: _Count
    plan: dict[str, Any] | None = None
    runs: Annotated[list[_Run], Field(min_length=1)]


class _Judged(_Read):
    arm: str
    time_ratio: _Finite | None
    time_ratio_ci95: _Interval | None
    time_ratio_bca95: _Interval | None = None
    p_value: _Finite | None
    memory_ratio: _Finite | None
    metric_difference: _Finite | None
    non_inferior: bool | None
    break_even_steps: int | None
    verdict: str
    reason: str


class _Metric(_Read):
    goal: str
    target: _Finite
    margin: _Finite


class Comparison(_Read):
    """Be what ``comparison.json`` holds."""

    version: int
    job: str
    device: str
    seeds: list[int]
    memory_budget_bytes: _Count | None
    baseline: str
    metric: _Metric
    horizon_samples: _Count
    protocol_sha256: str
    indication_only: bool
    arms: Annotated[list[_Arm], Field(min_length=1)]
    against_baseline: list[_Judged]
    gate: _Judged | None = None


class _Measured(_Read):
    seconds_per_step: _Finite | None
    peak_bytes: _Count | None
    cost: _Finite
    baseline_seconds_per_step: _Finite | None
    baseline_peak_bytes: _Count
    memory_budget_bytes: _Count | None


class Tuned(_Read):
    """Be what ``tuned.json`` holds."""

    plan: dict[str, Any]
    measured: _Measured
    tuning_s: _Finite
    tuning_steps: _Count


class Trial(_Read):
    """Be what a line of ``trials.jsonl`` holds."""

    method: str
    number: _Count
    plan: dict[str, Any]
    measurement: dict[str, Any]
    cost: _Finite
    final: bool
    tuning_steps: _Count
    tuning_s: _Finite


def check(kind: type[BaseModel], document: Mapping[str, Any], where: str) -> None:
    """Refuse a document that is not of a kind.

    Args:
        kind: the kind.
        document: what was read.
        where: the file, and the line in it.

    Raises:
        RunDirectoryError: naming the first place that is wrong.
    """
    try:
        kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        raise RunDirectoryError(
            f"is damaged at {place}: {first['msg'].lower()}", where=where, allowed="what autotune wrote"
        ) from error
