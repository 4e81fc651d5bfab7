"""Cost of a live tuner per sample against an unattached copy under the same sequence of plans, and its causes.

A tuner that switches plans changes the time of a step, so a copy under constant plans would not show the tuner's own
cost.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotune.bench.attached_arms import LiveArm, endless
from autotune.bench.attached_situations import SITUATIONS, budgets_of, profile_of
from autotune.bench.followed_arm import FollowedArm, follow
from autotune.bench.tuner_breakdown import breakdown, watch
from autotune.bench.tuner_timers import FORWARD, PartTimers
from autotune.catalog import load_job
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.live.limits import Limits
from autotune.live.placement import Placements
from autotune.live.settings import Settings
from autotune.mechanics import cutting
from autotune.stats import median_interval, total_ratio_interval

# A budget that never binds.
_AMPLE = 2**45
# Number of steps over which one-off costs are spread, as in the tuner.
_SPREAD_OVER = 1000
# Number of batches of the run with timers: shares of a mean need fewer than an interval.
_TIMED_BATCHES = 120

Clock = Literal["wall", "cpu"]
CLOCKS: tuple[Clock, ...] = ("wall", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A live run that an unattached copy repeats.

    Attributes:
        name: its name.
        job: the job.
        arguments: arguments of ``attach``.
        budget_at: returns the memory budget in bytes, given the number of the batch.
    """

    name: str
    job: Job
    arguments: Mapping[str, Any]
    budget_at: Callable[[int], int]


def courses_of(name: str, *, steps: int, policy: str, reporter: Reporter) -> list[Course]:
    """Return the runs of a name: an acting one, and for a job with fixed batching also an observing one.

    Args:
        name: name of a situation, or reference to a job.
        steps: number of batches of each run.
        policy: the policy that is attached.
        reporter: shows progress.
    """
    situation = next((one for one in SITUATIONS if one.name == name), None)
    settings = {"policy": policy, "stage": "act"}
    if situation is not None:
        job = load_job(situation.job)
        budgets = budgets_of(Placements(profile_of(situation, job, steps, reporter)))
        return [
            Course(
                name=name,
                job=job,
                arguments={**settings, "mode": situation.mode},
                budget_at=lambda number: situation.budget_at(number, budgets),
            )
        ]
    job = load_job(name)
    if job.batching == "adaptive":
        more = {
            "settings": Settings(
                batching="adaptive", lr_rule=job.lr_rule, accumulation_choices=job.accumulation_choices
            )
        }
        return [Course(name=name, job=job, arguments={**settings, "mode": "tolerant", **more}, budget_at=_ample)]
    stages = ("observe", "act")
    return [Course(name=name, job=job, arguments={**settings, "stage": one}, budget_at=_ample) for one in stages]


def _ample(_: int) -> int:
    return _AMPLE


def bench_followed(course: Course, *, steps: int, seed: int, reporter: Reporter | None = None) -> dict[str, Any]:
    """Return the seconds per sample of a live run divided by those of an unattached copy under the same plans.

    The ratio is measured without timers in the tuner. A second, shorter run with timers shows where the seconds go.

    Args:
        course: the run.
        steps: number of batches of each arm.
        seed: random seed for both arms.
        reporter: shows progress.
    """
    shows = reporter or Silent()
    stage = course.arguments["stage"]
    shows.stage(f"{course.name}, {stage}: live, and unattached under the same plans, in turn", steps)
    with _Pair(course, seed, course.job) as pair:
        for done in pair.take(steps, seed):
            shows.advance(done)
        status = pair.live.tuner.status
    live = pair.live
    own = float(status["overhead_frac"])
    wall, cpu = (_figures(pair, clock) for clock in CLOCKS)
    shows.stage(f"{course.name}, {stage}: where the seconds go", min(steps, _TIMED_BATCHES))
    return {
        "course": course.name,
        "job": course.job.name,
        **{name: course.arguments.get(name, "exact") for name in ("stage", "mode", "policy")},
        "steps": sum(pair.live.updated),
        "batches": len(pair.followed.seconds),
        "plans": len(dict.fromkeys(map(str, live.plans))),
        "placed": status["placed"],
        "identical": live.losses == pair.followed.losses,
        "attached": status["attached"],
        "detached_because": status["detached_because"],
        **wall,
        "cpu": cpu,
        "overhead_frac": own,
        # Both spread one-off costs over the same number of steps.
        "unaccounted_frac": {
            "wall": wall["ratio_total_1000_steps"] - 1 - own,
            "cpu": cpu["ratio_total_1000_steps"] - 1 - own,
        },
        "breakdown": _breakdown(course, steps=min(steps, _TIMED_BATCHES), seed=seed, reporter=shows),
    }


class _Pair:
    """A live arm with its own run directory, and the arm that follows it.

    Args:
        course: the run.
        seed: random seed for both arms.
        job: the job that both arms train.
    """

    def __init__(self, course: Course, seed: int, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._taken = 0
        # Number of samples in each batch.
        self.samples: list[int] = []
        arguments = {
            **course.arguments,
            "memory_budget_bytes": lambda: course.budget_at(self._taken),
            "runs_dir": self._folder.name,
            # A tuner that detaches midway would not be measured to the end.
            "limits": Limits(overhead_frac=1.0),
        }
        settings = arguments.get("settings", Settings())
        self.live = LiveArm(job, seed, arguments)
        self.followed = FollowedArm(self.live, seed, settings.lr_rule if settings.batching == "adaptive" else None)

    def take(self, batches: int, seed: int) -> Iterator[int]:
        """Train both arms; yield the number of batches that the live arm has taken."""
        taking = itertools.islice(endless(self.live.job, seed), batches)
        for done in follow(self.live, self.followed, map(self._counted, taking)):
            self._taken = done
            yield done

    def step_seconds(self, clock: Clock) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds of each step of the live arm and of its follower."""
        own, other = (
            _per_step(arm.seconds if clock == "wall" else arm.cpu_seconds, self.live.updated)
            for arm in (self.live, self.followed)
        )
        return own, other

    def _counted(self, batch: Any) -> Any:
        self.samples.append(cutting.num_samples(batch))
        return batch

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.live.tuner.detach()
        self._folder.cleanup()


def _figures(pair: _Pair, clock: Clock) -> dict[str, Any]:
    """Return the ratios of the live arm's seconds to its follower's, on one clock."""
    own, other = pair.step_seconds(clock)
    learning = _per_step(pair.live.learning, pair.live.updated) > 0
    low, high = median_interval((own / other).tolist())
    first, last = total_ratio_interval(own, other)
    once = float((own - other)[learning].sum())
    ordinary_s, more = float(other[~learning].mean()), float((own - other)[~learning].mean())
    steps = max(len(own), _SPREAD_OVER)
    samples = sum(pair.samples)
    return {
        "ratio_median": float(np.median(own / other)),
        "ratio_ci95": [low, high],
        "ratio_total": float(own.sum() / other.sum()),
        "ratio_total_ci95": [first, last],
        "ratio_total_after_learning": 1 + more / ordinary_s,
        "ratio_total_after_learning_ci95": list(total_ratio_interval(own[~learning], other[~learning])),
        # Probing and profiling cost time once per run, regardless of its length.
        "ratio_total_1000_steps": 1 + (more + once / steps) / ordinary_s,
        "learning": {
            "steps": int(learning.sum()),
            "live_s": float(own[learning].sum()),
            "followed_s": float(other[learning].sum()),
        },
        "live_s_per_sample": float(own.sum() / samples),
        "followed_s_per_sample": float(other.sum() / samples),
    }


def _per_step(values: Sequence[float], ends: Sequence[bool]) -> NDArray[np.float64]:
    """Return the sum over each step's batches."""
    sums, begun = [], 0
    for number, ended in enumerate(ends, 1):
        if ended:
            sums.append(float(sum(values[begun:number])))
            begun = number
    return np.array(sums)


def _breakdown(course: Course, *, steps: int, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Run the course again with timers in the tuner."""
    timers = PartTimers()
    job = replace(course.job, loss=timers.timed(FORWARD, course.job.loss))
    with timers.installed(), _Pair(course, seed, job) as pair:
        live, followed = (watch(timers, arm) for arm in (pair.live, pair.followed))
        for done in pair.take(steps, seed):
            reporter.advance(done)
        return breakdown(live, followed, pair.live.plans, pair.live.learning)


def line_of(found: Mapping[str, Any]) -> str:
    """Return the result of :func:`bench_followed` in one line."""
    low, high = found["ratio_ci95"]
    largest = list(found["breakdown"]["all"]["cpu"]["rooms"].items())[:3]
    return (
        f"{found['course']}, {found['stage']}, {found['batches']} batches: a step takes {found['ratio_median']:.4f} "
        f"[{low:.4f}, {high:.4f}] of an unattached one's time under the same plans, "
        f"over 1,000 steps {found['ratio_total_1000_steps']:.4f} "
        f"({found['cpu']['ratio_total_1000_steps']:.4f} of its CPU time); "
        f"the tuner reports {found['overhead_frac']:.4f}; "
        f"most is added by {', '.join(f'{part} ({share:.2%})' for part, share in largest)}"
    )
