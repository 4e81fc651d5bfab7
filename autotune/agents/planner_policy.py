"""A policy for real runs: a planner that chooses a plan for each window, optionally adjusted by a neural network.

It uses the same planner, features and levers as the simulator.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.agents.policy import DipOutlook
from autotune.agents.shipped_network import BareNetwork, LeverNetwork
from autotune.cost_model.profile import Profile
from autotune.errors import InputError
from autotune.gym.levers import NEUTRAL, RUN_FEATURES, SIZES, Actions, Features, levers_of
from autotune.gym.observation import Observation
from autotune.gym.planned_run import PlannedRun
from autotune.plan import Plan
from autotune.simulator.online_planner import Situation
from autotune.simulator.planner_settings import PlannerSettings

logger = logging.getLogger(__name__)

# How far a feature may lie outside its training range: a share of the range, but at least a fixed distance.
_BEYOND, _BEYOND_LEAST = 0.1, 0.25


class LeverChooser(Protocol):
    """Chooses levers from features, as :class:`autotune.agents.shipped_network.LeverNetwork` does."""

    def most_likely(self, features: tuple[Features, Features]) -> Actions:
        """Return the choice of each lever, shape (n, levers)."""
        ...


@dataclass(frozen=True, slots=True)
class Ranges:
    """The range of each feature seen in training; arrays of shape (len(RUN_FEATURES),)."""

    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]

    def outside(self, run: Features) -> str | None:
        """Return the name of the first feature that is too far outside its range, or ``None``.

        Args:
            run: features of the run, shape (1, len(RUN_FEATURES)).
        """
        beyond = np.maximum(_BEYOND * (self.highest - self.lowest), _BEYOND_LEAST)
        wrong = (run[0] < self.lowest - beyond) | (run[0] > self.highest + beyond)
        return list(RUN_FEATURES)[int(wrong.argmax())] if wrong.any() else None


class PlannerPolicy:
    """A policy that plans a run window by window.

    Args:
        name: name of the policy.
        settings: settings of the planner.
        network: chooses the planner's levers; ``None`` keeps them neutral.
        ranges: training ranges of the features; outside them, the planner acts without the network.

    Attributes:
        name: name of the policy.
        settings: settings of the planner.
        network: chooses the planner's levers; ``None`` if they stay neutral.
        ranges: training ranges of the features.
        alone_because: why the last decision was made without the network: the name of a feature, or an error; ``None``
            if the network was used or there is none.
        alone: number of decisions in this run that were made without the network, by reason.
        reserve_frac: share of the device's memory that the last decision leaves free.
    """

    def __init__(
        self,
        name: str = "planner",
        settings: PlannerSettings | None = None,
        network: LeverChooser | None = None,
        ranges: Ranges | None = None,
    ) -> None:
        self.name = name
        self.settings = settings or PlannerSettings()
        self.alone_because: str | None = None
        self.alone: Counter[str] = Counter()
        self.reserve_frac = 0.0
        self.network = network
        self.ranges = ranges
        self._chooser = BareNetwork(network) if isinstance(network, LeverNetwork) else network
        self._profile: Profile | None = None
        self._budget: int | None = None
        self._run: PlannedRun | None = None

    @property
    def dips(self) -> DipOutlook | None:
        """What is expected of dips of the memory budget; ``None`` before the first, whose depth nobody knows."""
        found = None if self._run is None else self._run.planner.dips
        if found is None or not found.count[0]:
            return None
        return DipOutlook(
            seen=int(found.count[0]),
            windows=int(found.elapsed[0]),
            chance=float(np.clip(found.chances(1)[0, 0], 0.0, 1.0)),
            left_bytes=float(np.exp(found.level[0])),
        )

    def begin(self, profile: Profile, budget_bytes: int | None) -> Plan:
        """Begin a run and return its initial plan.

        Args:
            profile: the profile of the job.
            budget_bytes: memory budget; ``None`` for none.
        """
        self._profile, self._budget = profile, budget_bytes
        self.reset()
        return self.plan

    @property
    def plan(self) -> Plan:
        """Return the running plan; before the first window, the initial plan.

        Raises:
            InputError: if :meth:`begin` has not been called.
        """
        run = self._started()
        return run.plan_of(run.planner.plan if run.planner.seen is not None else run.first)

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan for the next window.

        Raises:
            InputError: if :meth:`begin` has not been called.
        """
        run = self._started()
        run.observe(observation)
        return run.plan_of(self._choose(run, run.situation(observation)))

    def reset(self) -> None:
        """Forget the run, but keep the profile."""
        self._run = None
        self.alone = Counter()
        self.reserve_frac = 0.0

    def _started(self) -> PlannedRun:
        if self._run is None:
            if self._profile is None:
                raise InputError(f"policy {self.name!r} has no profile to plan from", allowed="begin(profile, budget)")
            self._run = PlannedRun(self._profile, self._budget, self.settings)
            self._run.first = self._choose(self._run, self._run.opening())
        return self._run

    def _choose(self, run: PlannedRun, situation: Situation) -> NDArray[np.int64]:
        actions = np.array([NEUTRAL], dtype=np.int64)
        if self._chooser is not None:
            features = run.watch.features(situation)
            self.alone_because = None if self.ranges is None else self.ranges.outside(features[0])
            if self.alone_because is None:
                actions = self._asked(self._chooser, features)
            else:
                logger.info("the planner acts alone: %s is outside its training range", self.alone_because)
            if self.alone_because is not None:
                self.alone[self.alone_because] += 1
        number = run.planner.decide(situation, levers_of(actions))
        self.reserve_frac = float(run.planner.left_free[0])
        return number

    def _asked(self, chooser: LeverChooser, features: tuple[Features, Features]) -> Actions:
        """Return the network's choices, or neutral ones if it fails, so that the planner acts alone."""
        try:
            actions = np.asarray(chooser.most_likely(features))
            if actions.shape != (1, len(SIZES)) or not ((actions >= 0) & (actions < np.array(SIZES))).all():
                raise ValueError(f"actions are {actions.tolist()}")
        except Exception as error:  # noqa: BLE001 - the run must continue after any error
            self.alone_because = f"{type(error).__name__}: {error}"
            logger.warning("the planner acts alone: the network failed (%s)", self.alone_because)
            return np.array([NEUTRAL], dtype=np.int64)
        return actions.astype(np.int64)


class FirstPlan(PlannerPolicy):
    """A planner's first plan, kept for the whole run; arguments are those of :class:`PlannerPolicy`."""

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the first plan."""
        return self.plan
