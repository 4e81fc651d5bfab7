"""Measure what a live tuner costs per sample, against an unattached copy under the same sequence of plans, and where.

A tuner that switches plans changes what a step takes: against constant plans its own cost cannot be told from that.
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
from autotune.bench.tuner_rooms import FORWARD, Rooms
from autotune.catalog import load_job
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.live.limits import Limits
from autotune.live.placement import Placements
from autotune.live.settings import Settings
from autotune.mechanics import stepping
from autotune.stats import median_interval, total_ratio_interval

# A budget that binds nobody.
_AMPLE = 2**45
# Steps that what is paid once is spread over, as the tuner spreads it.
_SPREAD_OVER = 1000

Clock = Literal["wall", "cpu"]
CLOCKS: tuple[Clock, ...] = ("wall", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Name a live run that is followed.

    Attributes:
        name: what it is called.
        job: what is trained.
        arguments: what ``attach`` is called with.
        budget_at: returns the budget of a step, by its number.
    """

    name: str
    job: Job
    arguments: Mapping[str, Any]
    budget_at: Callable[[int], int]


def courses_of(name: str, *, steps: int, policy: str, reporter: Reporter) -> list[Course]:
    """Return the runs that a name stands for: of a job, observing and acting; of a situation, acting.

    Args:
        name: a situation's name, or a job's reference.
        steps: batches of each run.
        policy: what is attached.
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
    """Return a live run's seconds per sample over those of an unattached copy under the same plans, and their causes.

    They are measured without any timer in the tuner; what spends them is found out in a second run.

    Args:
        course: the run.
        steps: batches of each arm.
        seed: of both arms.
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
    shows.stage(f"{course.name}, {stage}: where the seconds go", steps)
    return {
        "course": course.name,
        "job": course.job.name,
        **{name: course.arguments.get(name, "exact") for name in ("stage", "mode", "policy")},
        "steps": sum(live.updated),
        "batches": steps,
        "plans": len(dict.fromkeys(map(str, live.plans))),
        "placed": status["placed"],
        "identical": live.losses == pair.followed.losses,
        "attached": status["attached"],
        "detached_because": status["detached_because"],
        **wall,
        "cpu": cpu,
        "overhead_frac": own,
        # Both spread what is paid once over as many steps.
        "unaccounted_frac": {
            "wall": wall["ratio_total_1000_steps"] - 1 - own,
            "cpu": cpu["ratio_total_1000_steps"] - 1 - own,
        },
        "breakdown": _breakdown(course, steps=steps, seed=seed, reporter=shows),
    }


class _Pair:
    """A live arm with a run directory of its own, and the arm that follows it.

    Args:
        course: the run.
        seed: of both.
        job: what both train.
    """

    def __init__(self, course: Course, seed: int, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._taken = 0
        # Of each batch.
        self.samples: list[int] = []
        arguments = {
            **course.arguments,
            "memory_budget_bytes": lambda: course.budget_at(self._taken),
            "runs_dir": self._folder.name,
            # One that leaves half-way is not measured to its end.
            "limits": Limits(overhead_frac=1.0),
        }
        settings = arguments.get("settings", Settings())
        self.live = LiveArm(job, seed, arguments)
        self.followed = FollowedArm(self.live, seed, settings.lr_rule if settings.batching == "adaptive" else None)

    def take(self, batches: int, seed: int) -> Iterator[int]:
        """Let both take batches; yield how many the live arm has taken."""
        taking = itertools.islice(endless(self.live.job, seed), batches)
        for done in follow(self.live, self.followed, map(self._counted, taking)):
            self._taken = done
            yield done

    def _counted(self, batch: Any) -> Any:
        self.samples.append(stepping.num_samples(batch))
        return batch

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.live.tuner.detach()
        self._folder.cleanup()


def _figures(pair: _Pair, clock: Clock) -> dict[str, Any]:
    """Return what the live arm took over what the other one did, by one of their clocks."""
    ends = pair.live.updated
    arms = (pair.live, pair.followed)
    own, other = (_per_step(arm.seconds if clock == "wall" else arm.cpu_seconds, ends) for arm in arms)
    learning = np.array(_per_step(pair.live.learning, ends)) > 0
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
        # Probing and profiling are paid once, however long the run.
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
    """Return the sums over the batches of each step."""
    sums, begun = [], 0
    for number, ended in enumerate(ends, 1):
        if ended:
            sums.append(float(sum(values[begun:number])))
            begun = number
    return np.array(sums)


def _breakdown(course: Course, *, steps: int, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Run the same again with timers in the tuner's rooms."""
    rooms = Rooms()
    job = replace(course.job, loss=rooms.timed(FORWARD, course.job.loss))
    with rooms.installed(), _Pair(course, seed, job) as pair:
        live, followed = (watch(rooms, arm) for arm in (pair.live, pair.followed))
        for done in pair.take(steps, seed):
            reporter.advance(done)
        return breakdown(live, followed, pair.live.plans, pair.live.learning)


def line_of(found: Mapping[str, Any]) -> str:
    """Return in one line what :func:`bench_followed` found."""
    low, high = found["ratio_ci95"]
    largest = list(found["breakdown"]["all"]["cpu"]["rooms"].items())[:3]
    return (
        f"{found['course']}, {found['stage']}: a step takes {found['ratio_median']:.4f} [{low:.4f}, {high:.4f}] of an "
        f"unattached one's time under the same plans, over 1,000 steps {found['ratio_total_1000_steps']:.4f} "
        f"({found['cpu']['ratio_total_1000_steps']:.4f} of its CPU time); the tuner says {found['overhead_frac']:.4f}; "
        f"most is added by {', '.join(f'{room} ({share:.2%})' for room, share in largest)}"
    )
