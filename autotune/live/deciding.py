"""Policies of live runs: finding the one that a user names, and asking it in a thread with a time limit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from autotune.agents.planner import greedy_plan
from autotune.agents.policies import POLICIES, make_policy
from autotune.agents.policy import DipOutlook, StaticPolicy
from autotune.agents.policy_folder import load_policy
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal, fitting, smallest
from autotune.errors import AttachError, BudgetError, a_kind
from autotune.gym.observation import Observation
from autotune.io.documents import validated
from autotune.live.decision_log import read_log, schedule_of
from autotune.mechanics import randomness
from autotune.mechanics.loop_signals import any_error
from autotune.plan import Plan

logger = logging.getLogger(__name__)

# Seconds that the process waits at exit for a policy that is still deciding.
_EXIT_TIMEOUT_S = 5.0
# Seconds in which the thread of an idle policy ends.
_IDLE_S = 0.5


class Decides(Protocol):
    """The interface of a policy: any object with ``decide``."""

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan to run next."""
        ...


class SolvingPolicy:
    """Policy that solves for the current budget at each decision.

    Args:
        name: ``exact`` or ``greedy``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._profile: Profile | None = None
        # The last question and its answer: as long as neither budget nor noise changes, each decision is the same.
        self._asked: tuple[int | None, float | None] = (None, None)
        self._answer: Plan | None = None

    def begin(self, profile: Profile, budget_bytes: int | None) -> Plan:
        """Keep the profile and return the first plan."""
        self._profile, self._answer = profile, None
        return self._solve(budget_bytes, None)

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the best plan for the observation's budget and noise scale."""
        return self._solve(observation.memory_budget_bytes, observation.gradient.noise_scale)

    def reset(self) -> None:
        """Do nothing: this policy has no state."""

    def _solve(self, budget_bytes: int | None, noise_scale: float | None) -> Plan:
        if self._profile is None:
            raise AttachError(f"policy {self.name!r} has no profile", where="policy", allowed="begin(profile, budget)")
        asked = budget_bytes, noise_scale
        if self._answer is None or asked != self._asked:
            self._answer = self._solved(self._profile, budget_bytes, Goal(noise_scale=noise_scale))
            self._asked = asked
        return self._answer

    def _solved(self, profile: Profile, budget_bytes: int | None, goal: Goal) -> Plan:
        with contextlib.suppress(BudgetError):
            if self.name == "greedy":
                return greedy_plan(profile, budget_bytes, goal)
            if found := fitting(profile, budget_bytes, goal):
                return found[0].plan
        # A batch as large as the profiled one does not fit; smaller ones may.
        return smallest(profile).plan


class RecordedPolicy:
    """Policy that repeats the plans of a decision log at the steps at which they were decided.

    Args:
        schedule: pairs of a step and the plan in effect from that step on, ascending.
    """

    def __init__(self, schedule: Sequence[tuple[int, Plan]]) -> None:
        self.name = "recorded"
        self.schedule = tuple(schedule)

    def at(self, step: int) -> Plan | None:
        """Return the plan in effect at a step; ``None`` before the first plan."""
        return next((plan for begins, plan in reversed(self.schedule) if begins <= step), None)

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the running plan; the controller calls :meth:`at` instead."""
        return plan

    def reset(self) -> None:
        """Do nothing: this policy has no state."""


def find_policy(policy: object) -> Any:
    """Return the policy that a user named or passed.

    Args:
        policy: ``ppo``, ``planner``, ``exact``, ``greedy``, another registered policy, a policy folder, a plan file
            (.json), a decision log (.jsonl), or an object with ``decide``.

    Raises:
        AttachError: if ``policy`` is none of them.
        PolicyFileError: if a folder is not a policy.
    """
    if isinstance(policy, str) and policy in ("exact", "greedy"):
        return SolvingPolicy(policy)
    if isinstance(policy, str) and policy in POLICIES:
        return make_policy(policy)
    if isinstance(policy, str | Path):
        path = Path(policy)
        if path.suffix == ".jsonl":
            return RecordedPolicy(schedule_of(read_log(path), str(path)))
        if path.suffix == ".json":
            return _under(Plan.load(path), path.stem)
        if isinstance(policy, Path) or "/" in policy or path.exists():
            return load_policy(path)
        raise AttachError(f"policy is {policy!r}", where="attach", allowed=_allowed())
    if isinstance(policy, Plan):
        return _under(policy, "plan")
    if not callable(getattr(policy, "decide", None)):
        raise AttachError(f"policy is {a_kind(policy)} without decide()", where="attach", allowed=_allowed())
    return policy


def _allowed() -> tuple[str, ...]:
    names = dict.fromkeys(("ppo", "planner", "exact", "greedy", *POLICIES.names))
    return (*names, "a policy folder", "a plan file (.json)", "a decision log (.jsonl)", "an object with decide()")


class Decider:
    """Runs a policy in a separate thread, so that a policy that hangs costs one bounded wait.

    Attributes:
        policy: the policy.
        late: whether an answer is overdue; until it arrives, further questions time out.

    Args:
        policy: the policy.
        timeout_s: seconds to wait for an answer.
    """

    def __init__(self, policy: Decides, timeout_s: float) -> None:
        self.policy = policy
        self._timeout_s = timeout_s
        self._questions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: Callable[[], None] = lambda: None
        self.late = False

    def ask(self, question: Callable[[], object], timeout_s: float | None = None) -> object:
        """Call a function in the thread and return its result.

        Args:
            question: the function, which queries the policy.
            timeout_s: seconds to wait; ``None`` for the default.

        Raises:
            TimeoutError: if the answer does not arrive in time, or an earlier one is overdue.
            Exception: any exception of the policy.
        """
        if self.late:
            try:
                self._answers.get_nowait()
            except queue.Empty:
                raise TimeoutError("the policy is still busy with a former decision") from None
            self.late = False
        if self._thread is None or not self._thread.is_alive():
            # After a fork, the thread exists only in the parent.
            self._questions, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            self._thread = threading.Thread(target=self._work, name="autotune-policy", daemon=True)
            self._thread.start()
            self._ending = functools.partial(_end, self._thread, self._questions)
            atexit.register(self._ending)
        # Random generators belong to the process, so their states are restored after a user's policy. For policies of
        # this package, which draw nothing, a restore would only undo the draws of the run's other threads.
        ours = type(self.policy).__module__.startswith("autotune.")
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with contextlib.nullcontext() if ours else randomness.isolated():
            self._questions.put(question)
            try:
                answer, error = self._answers.get(timeout=limit_s)
            except queue.Empty:
                self.late = True
                raise TimeoutError(f"no answer within {limit_s:g} s") from None
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        """Let the thread end, and wait for it if it is idle: as it ends, it may free what nothing else refers to."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._questions.put(None)
        if not self.late and thread is not threading.current_thread():
            thread.join(_EXIT_TIMEOUT_S)
        if not thread.is_alive():
            atexit.unregister(self._ending)

    def _work(self) -> None:
        """Answer questions until one is ``None``."""
        while (question := self._questions.get()) is not None:
            try:
                self._answers.put((question(), None))
            except BaseException as error:  # noqa: BLE001 - raised again where the question was asked
                self._answers.put((None, error))


def reserve_of(policy: object) -> float:
    """Return the share of the device's memory that a policy leaves free; 0 where its answer is missing or invalid."""
    reserve = getattr(policy, "reserve_frac", 0.0)
    good = isinstance(reserve, int | float) and not isinstance(reserve, bool) and 0 <= reserve < 1
    return float(reserve) if good else 0.0


def dips_of(policy: object) -> DipOutlook | None:
    """Return what a policy expects of dips of the memory budget; ``None`` where it does not say or cannot."""
    try:
        found = getattr(policy, "dips", None)
        return validated(DipOutlook, asdict(found), where="dips") if isinstance(found, DipOutlook) else None
    except any_error():  # whatever a policy raises, the run goes on
        return None


def _end(thread: threading.Thread, questions: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    """End a policy's thread before the process does.

    If Python kills a thread with C++ frames on its stack at exit, the process aborts and loses its own exit code.
    """
    questions.put(None)
    thread.join(_IDLE_S)
    if thread.ident is not None and thread.is_alive():
        # Raised as soon as the policy is back in Python; a sleeping policy does no harm.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        thread.join(_EXIT_TIMEOUT_S)


def _under(plan: Plan, name: str) -> StaticPolicy:
    """Return a policy that always proposes one plan, without its launch settings, which stay the script's."""
    launch = plan.launch.to_json()
    if launch:
        told = ", ".join(f"{key} = {value}" for key, value in launch.items())
        logger.warning("the plan is launched with %s: a live run keeps what its script launched", told)
    return StaticPolicy(name, plan.bare)
