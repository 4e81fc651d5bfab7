"""The arms of the peers benchmark: candidates, each trained in a process of its own from the same seed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from autotune.agents.planner import close_plans, offering
from autotune.bench.peer_engine import ENGINE, PLAIN, Technique, techniques
from autotune.choices import DEFAULT_STORAGES, EXACT_STORAGES, STORAGES, Precision, Storage
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal
from autotune.engines.torch_engine import EngineOptions
from autotune.engines.worker_processes import Workers, WorkersError
from autotune.errors import BudgetError, InputError
from autotune.job import Job
from autotune.measurement import Measurement
from autotune.mechanics.devices import device_kind
from autotune.plan import Plan, PlanSpace

# Our families: the storages that the solver may choose.
OURS: Mapping[str, Sequence[Storage]] = {
    "ours:save-recompute": DEFAULT_STORAGES,
    "ours:exact": EXACT_STORAGES,
    "ours:all": STORAGES,
}
# Number of the solver's plans that are tried for each budget: planners measure their best few.
_FINALISTS = 4
# Timed steps that choose an arm, after the step that compiles, the metered one and an untimed one; and those of each
# window.
_SURVEY_STEPS, WINDOW_STEPS = 4, 3
# Seconds within which a window must end; the first one compiles.
_PATIENCE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration that competes for its families.

    Attributes:
        name: name of the candidate.
        families: families that it belongs to, of which the fastest fitting candidate represents each.
        plan: its plan; of a peer's, only k counts.
        technique: a peer's technique; ``None`` for our plans.
    """

    name: str
    families: frozenset[str]
    plan: Plan
    technique: Technique | None = None


def peer_candidates(space: PlanSpace, names: Collection[str]) -> list[Candidate]:
    """Return every setting of plain accumulation and of some peers at every k, the plain model at the smallest k first.

    Accumulation is always among them: a peer or plan that is no better than k alone must not seem to win.

    Args:
        space: the plans of the job.
        names: names of peers, or of single settings, as :func:`techniques` takes them.
    """
    return [
        Candidate(
            name=technique.name(k),
            families=frozenset({f"peer:{technique.peer}"}),
            plan=space.baseline().changed(accumulation_steps=k),
            technique=technique,
        )
        for technique in techniques([PLAIN, *names], bf16=Precision.BF16 in space.precisions)
        for k in space.accumulation_choices
    ]


def own_candidates(profile: Profile, budgets: Iterable[int]) -> list[Candidate]:
    """Return the baseline's plan, and the solver's best plans within each budget with the storages of each family.

    Args:
        profile: profile of all storages.
        budgets: memory budgets in bytes.
    """
    plans: dict[Plan, None] = {profile.space.baseline(): None}
    for storages in OURS.values():
        offered = offering(profile, storages)
        for budget in budgets:
            try:
                plans.update(dict.fromkeys(close_plans(offered, budget, Goal())[:_FINALISTS]))
            except BudgetError:
                continue
    return [
        Candidate(
            name=f"ours:plan-{number}",
            families=frozenset(name for name, offered in OURS.items() if {*plan.storage.values()} <= {*offered}),
            plan=plan,
        )
        for number, plan in enumerate(plans, 1)
    ]


class Arm:
    """A candidate that trains in a process of its own, and stays there between its windows.

    Attributes:
        candidate: the candidate.
        compile_s: seconds that its first step took beyond an ordinary one.
        survey_s: median seconds of its first timed steps; ``None`` if it failed.
        peak_bytes: its peak; ``None`` if it failed before it was metered.
        loss: mean loss of its last window.
        seconds: median seconds of a step in each round.
        failure: why it ended; ``None`` if it did not.

    Args:
        candidate: the candidate.
        job: the job's reference.
        seed: random seed for weights, batches and training, the same for all arms.
        threads: torch threads.
        cache: folder of what torch compiles.
    """

    def __init__(self, candidate: Candidate, job: str, *, seed: int, threads: int, cache: str) -> None:
        self.candidate = candidate
        self.compile_s: float | None = None
        self.survey_s: float | None = None
        self.peak_bytes: int | None = None
        self.loss: float | None = None
        self.seconds: list[float] = []
        self.failure: str | None = None
        opening = {
            "engine": ENGINE,
            "arguments": {"technique": None if candidate.technique is None else asdict(candidate.technique)},
            "job": job,
            "seed": seed,
            "device": device_kind(),
            "options": asdict(EngineOptions(statistics_every=None)),
            "threads": threads,
        }
        self._workers = Workers("autotune.bench.peer_engine", opening, environment={"TORCHINDUCTOR_CACHE_DIR": cache})
        self._described = False

    @property
    def seconds_per_step(self) -> float:
        """Return the median seconds of a step over the rounds; before the first one, that of the first steps."""
        return statistics.median(self.seconds) if self.seconds else self.survey_s or math.inf

    def survey(self) -> None:
        """Run the first steps: one that compiles, one whose memory is metered, one that is untimed, and timed ones."""
        untimed = list(itertools.takewhile(lambda seconds: seconds is not None, (self._run(1) for _ in range(3))))
        if len(untimed) == 3 and (timed := self._run(_SURVEY_STEPS)) is not None:
            self.survey_s = timed
            self.compile_s = max((untimed[0] or 0.0) - timed, 0.0)

    def take(self) -> None:
        """Run one window of a round, after an untimed step that follows the other arms; one that failed runs none."""
        if self.failure is None and self._run(1) is not None and (seconds := self._run(WINDOW_STEPS)) is not None:
            self.seconds.append(seconds)

    def fits(self, budget_bytes: int) -> bool:
        """Return whether the arm has not failed, and its peak is within a budget."""
        return self.failure is None and self.peak_bytes is not None and self.peak_bytes <= budget_bytes

    def close(self) -> None:
        """End the process."""
        self._workers.close()

    def _run(self, steps: int) -> float | None:
        """Return the seconds of a step in a window, untimed ones if all are; ``None`` if it failed."""
        window = self._window(steps)
        if window.failure is not None:
            self.failure = f"{window.failure}: {window.failure_detail}"
            return None
        self.peak_bytes, self.loss = window.peak_bytes, window.loss
        return window.seconds_per_step or window.total_s / steps

    def _window(self, steps: int) -> Measurement:
        request = {"steps": steps, "plan": self.candidate.plan.to_json(), "memory_budget_bytes": None}
        try:
            if not self._described:
                self._workers.answer(_PATIENCE_S)
                self._described = True
            self._workers.send({"call": "run", **request})
            return Measurement.from_json(self._workers.answer(_PATIENCE_S)["answer"])
        except WorkersError as error:
            return Measurement.of_failure(error.failure, str(error), None)


def require_baseline(arm: Arm, job: Job) -> int:
    """Return the peak of the plain fp32 model.

    Raises:
        InputError: if it failed, or the device does not report its memory.
    """
    if arm.failure is not None or arm.peak_bytes is None:
        problem = f"the plain model ends with {arm.failure or 'an unknown peak'}"
        raise InputError(problem, where=f"job {job.name!r}", allowed="a job that trains on this device")
    return arm.peak_bytes
