"""Protocol of a comparison, fixed before the first run, and the records of its runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.agents.policy import Policy
from autotune.budget import MemoryBudget
from autotune.errors import InputError
from autotune.io.files import json_sha256
from autotune.job import Job
from autotune.measurement import ABSENT
from autotune.plan import PlanSpace
from autotune.simulator.dip_families import FAMILIES, draw_events

# With fewer paired seeds, a verdict is only an indication: for n = 3, the smallest two-sided sign-flip p is 0.25.
FEWEST_FOR_A_CLAIM = 6
# First seed of compared runs.
_FIRST_SEED = 1000
_MOST_SEEDS = 1000
# Largest number of windows between two dips, more than any run has.
_RAREST_DIPS = 10**6
# Number of windows whose dips are drawn together, and what seeds of dips begin with.
_DRAWN, _DIPS_SEED = 128, 7

ArmFactory = Callable[[PlanSpace], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dips:
    """Dips of the memory budget during a run, as if an evaluation or another process needed memory.

    Attributes:
        every: mean number of windows from one dip to the next; a window is the time between two evaluations, and a dip
            lasts for one window.
        share: share of the budget that a dip leaves.
        told: whether dips are announced to policies.
        family: a name of :data:`autotune.simulator.dip_families.FAMILIES`; all but periodic dips are drawn for each
            seed, the same for all arms.
    """

    every: int
    share: float
    told: bool = False
    family: str = "periodic"

    @classmethod
    def parse(cls, text: str) -> Dips:
        """Read ``[FAMILY:]EVERY:SHARE[:told]``, as in ``5:70%`` or ``jittered:5:70%``.

        Raises:
            InputError: if the text has another form.
        """
        allowed = (
            "EVERY:SHARE or EVERY:SHARE:told, as in 5:70%, with EVERY from 2 to 1000000 and a share below 100%, behind "
            f"one of {', '.join(f'{name}:' for name in FAMILIES)} if dips are not to be periodic"
        )
        first, _, rest = text.partition(":")
        family, parts = (first, rest.split(":")) if first in FAMILIES else ("periodic", text.split(":"))
        try:
            every, share = int(parts[0]), MemoryBudget.parse(parts[1]).share
        except (ValueError, IndexError) as error:
            raise InputError(f"dips is {text!r}", where="--dips", allowed=allowed) from error
        good = 2 <= every <= _RAREST_DIPS and share is not None and share < 1 and parts[2:] in ([], ["told"])
        if not good or share is None:
            raise InputError(f"dips is {text!r}", where="--dips", allowed=allowed)
        return cls(every=every, share=share, told=len(parts) == 3, family=family)

    def budget(self, window: int, budget_bytes: int, seed: int = 0) -> int:
        """Return the budget of a window, numbered from 0, in the run of a seed."""
        return int(budget_bytes * self.share) if self._dips(window, seed) else budget_bytes

    def _dips(self, window: int, seed: int) -> bool:
        if self.family == "periodic":
            return window % self.every == self.every - 1
        part, place = divmod(window, _DRAWN)
        return bool(_drawn(self.family, self.every, seed, part)[place])


@functools.lru_cache(maxsize=64)
def _drawn(family: str, every: int, seed: int, part: int) -> NDArray[np.bool_]:
    """Return in which of a part's windows memory dips; families have slow periods of a third of a part."""
    generator = np.random.default_rng([_DIPS_SEED, seed, part])
    one = np.ones((1, 1), dtype=np.int64)
    event, _ = draw_events(generator, (family,), every * one, one, _DRAWN)
    return np.asarray(event[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One alternative in a comparison.

    Attributes:
        name: name of the arm.
        policy: makes the policy for a space; called once per run.
        tuning_s: seconds spent to find the arm.
        tuning_steps: real optimizer steps spent to find the arm.
        job: job of the arm, if it differs from the compared job in more than the plan, such as the learning-rate
            schedule; ``None`` for the compared job.
    """

    name: str
    policy: ArmFactory
    tuning_s: float = 0.0
    tuning_steps: int = 0
    job: Job | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Declaration of a comparison before its first run.

    Attributes:
        job: the job's name.
        arms: the arms' names; the first is the baseline.
        seeds: the paired seeds.
        horizon_samples: number of samples of every run; the schedule depends on it.
        memory_budget_bytes: memory budget of the runs; ``None`` for no budget.
        dips: dips of the budget; ``None`` for a constant budget. With dips, a window that runs out of memory is
            repeated under the leanest plan, and the time of both counts.
        watts: power in watts, to estimate energy where it cannot be measured; ``None`` makes no estimate.
        gradient_norm: largest gradient norm with which a run reaches the target; ``None`` for no limit.
        margin: largest relative loss of the final metric that counts as non-inferior.
        confidence: confidence level of every interval.
    """

    job: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    horizon_samples: int
    memory_budget_bytes: int | None
    dips: Dips | None = None
    watts: float | None = None
    gradient_norm: float | None = None
    margin: float = 0.005
    confidence: float = 0.95

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the protocol, which is logged before the first run."""
        return json_sha256(asdict(self))


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One compared run; fields have the names of the keys in ``comparison.json``."""

    seed: int
    reached: bool = False
    time_to_target_s: float | None = None
    steps: int = 0
    samples: int = 0
    final_metric: float | None = None
    # Norm of the gradient, before clipping, at the last sampled step of the last window; None if unknown.
    gradient_norm: float | None = None
    throughput: float | None = None
    peak_bytes: int | None = None
    within_budget: bool = True
    out_of_memory: int = 0
    # Number of windows in which a policy's planner acted without its network, by reason; empty for other arms.
    alone: dict[str, int] = field(default_factory=dict)
    # Energy of training without evaluation, and the POSIX times of the start and the end of the run.
    energy_j: float | None = None
    energy_source: str = ABSENT
    ran_s: tuple[float, float] = (0.0, 0.0)
    # Share of the processor time of training in which threads waited for a processor; None if unknown.
    waited_frac: float | None = None
    # Where the time of the timed steps goes, mean of the windows; None if unknown.
    parts: dict[str, Any] | None = None
    failure: str | None = None
    # What the failure was, in words, such as the exception.
    failure_detail: str | None = None
    # Training seconds, samples and metric at each evaluation, and plans with the step at which they were applied.
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    # Documents of the windows, in order; ``comparison.json`` omits them for an arm whose plan never changes.
    windows: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        document = asdict(self)
        document["curve"] = [list(point) for point in self.curve]
        document["plans"] = [{"step": step, "plan": plan} for step, plan in self.plans]
        document["ran_s"] = list(self.ran_s)
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RunRecord:
        """Return the record of a document of type :class:`autotune.records.run_documents.Run`."""
        curve = [(seconds, samples, metric) for seconds, samples, metric in document["curve"]]
        plans = [(entry["step"], entry["plan"]) for entry in document.get("plans") or ()]
        ran = tuple(document.get("ran_s", (0.0, 0.0)))
        return cls(**{**document, "curve": curve, "plans": plans, "ran_s": ran})


def require_count(count: object) -> None:
    """Refuse a number of seeds that no comparison can have.

    Raises:
        InputError: for fewer than 2 or more than 1000.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= _MOST_SEEDS:
        allowed = f"a whole number, at least 2, at most {_MOST_SEEDS}"
        raise InputError(f"seeds is {count!r}", where="--seeds", allowed=allowed)


def paired_seeds(count: int, *, tuning_seed: int | None = None) -> tuple[int, ...]:
    """Return fresh seeds for compared runs.

    Args:
        count: number of seeds.
        tuning_seed: the seed that plans were searched with, which is not fresh; ``None`` for none.

    Raises:
        InputError: for fewer than 2 or more than 1000.
    """
    require_count(count)
    fresh = [seed for seed in range(_FIRST_SEED, _FIRST_SEED + count + 1) if seed != tuning_seed]
    return tuple(fresh[:count])
