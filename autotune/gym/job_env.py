"""A training job as a Gymnasium environment: one step is one window under one plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from autotune.budget import MemoryBudget
from autotune.catalog import load_job
from autotune.engines.engine import Engine
from autotune.errors import InputError, PlanError
from autotune.gym.observation import Array, Observation
from autotune.gym.reward import Objective
from autotune.gym.spaces import action_space, observation_space
from autotune.job import Job
from autotune.measurement import Failure, Measurement
from autotune.plan import Plan, PlanSpace

EngineFactory = Callable[[int], Engine]

# After this many crashed windows in a row, the run counts as lost.
_UNRECOVERABLE_AFTER = 3


class TuningEnv(gymnasium.Env[dict[str, Array], NDArray[np.int64]]):
    """An environment that tunes a real training job window by window.

    An action is a plan as ``MultiDiscrete`` indices; an observation contains the features of
    :mod:`autotune.gym.observation`; the reward is minus the cost of :mod:`autotune.gym.reward`.

    An episode is one training run: ``reset`` restarts the job under the baseline plan and runs one window, to which all
    ratios refer. ``terminated``: the target was reached, or the run is lost. ``truncated``: the windows or the job's
    samples are used up.

    Args:
        job: the job, or its name.
        engine: ``torch``, or a function that makes an engine from a seed.
        memory_budget_bytes: memory budget in bytes or as a share of the baseline's peak (``40%``); ``None`` for none.
        window_steps: optimizer steps in a window.
        max_windows: windows in an episode.
        max_units: rows of the unit features; ``None`` for the number of units.
        objective: the objective, which is minimised.
        evaluate: whether the job is evaluated after each window, so that it can reach its target.
        run_length: samples after which an episode is truncated; ``None`` for the length of the job.

    Raises:
        InputError: if the job, the engine's name or a number is invalid.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own attribute

    def __init__(
        self,
        job: str | Job = "charlm",
        engine: str | EngineFactory = "torch",
        *,
        memory_budget_bytes: int | str | None = None,
        window_steps: int = 5,
        max_windows: int = 64,
        max_units: int | None = None,
        objective: Objective | None = None,
        evaluate: bool = True,
        run_length: float | None = None,
    ) -> None:
        self.job = load_job(job)
        self._budget = _budget(memory_budget_bytes)
        self.memory_budget_bytes: int | None = None
        self.window_steps = _positive("window_steps", window_steps)
        self.max_windows = _positive("max_windows", max_windows)
        self.objective = objective or Objective()
        self._factory = _factory(self.job, engine)
        self._evaluate = evaluate
        self._run_length = self.job.total_samples if run_length is None else run_length
        self._engine = self._factory(0)
        self.plan_space: PlanSpace = self._engine.space
        self._rows = len(self.plan_space.units) if max_units is None else max_units
        if self._rows < len(self.plan_space.units):
            raise InputError(f"max_units is {max_units}", allowed=f"at least {len(self.plan_space.units)}")
        self.action_space = action_space(self.plan_space)
        # Typed as Any: Gymnasium's Dict is not typed as a space of dictionaries.
        self.observation_space: Any = observation_space(self._rows)
        self.observation: Observation | None = None
        self._windows = self._crashes = self._samples = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Restart the job and run one window of the baseline.

        Raises:
            InputError: if the baseline cannot run, or the objective needs a quantity that cannot be measured.
        """
        super().reset(seed=seed, options=options)
        self._engine.close()
        self._engine = self._factory(int(self.np_random.integers(2**31)))
        self._windows = self._crashes = self._samples = 0
        self._engine.apply(self.plan_space.baseline())
        # The reference must complete to be timed, so the budget does not apply to it.
        self._engine.memory_budget_bytes = None
        reference = self._engine.run(self.window_steps)
        if reference.failure is not None:
            raise InputError(
                f"the baseline ends with {reference.failure}: {reference.failure_detail}",
                where=f"job {self.job.name!r}",
            )
        if reference.seconds_per_step is None:
            from autotune.engines.tuning_windows import WINDOW_STEPS

            raise InputError(
                f"window_steps is {self.window_steps}, and no step of the baseline's window was timed",
                where="environment",
                allowed=f"at least {max(self.window_steps + 1, WINDOW_STEPS)}",
            )
        if self._budget is not None:
            self.memory_budget_bytes = self._budget.resolve(reference.peak_bytes or 0, reference.fragments_bytes)
        self._engine.memory_budget_bytes = self.memory_budget_bytes
        self._samples += reference.samples
        self.observation = self._observe(self.plan_space.baseline(), reference, reference, None)
        self.objective.check(self.observation.reference)
        return self.observation.arrays(self._rows), self._info(self.observation, metric=None)

    def step(self, action: NDArray[np.int64]) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Run one window under the plan that an action encodes.

        Raises:
            PlanError: if the action lies outside the action space.
            InputError: if the environment was not reset.
        """
        if self.observation is None:
            raise InputError("step was called before reset", where="environment", allowed="reset first")
        plan = self.plan_space.decode(_indices(action))
        before = self.observation
        self._engine.apply(plan)
        window = self._engine.run(self.window_steps)
        self.memory_budget_bytes = self._engine.memory_budget_bytes
        self._windows += 1
        self._samples += window.samples
        self._crashes = self._crashes + 1 if window.failure in (Failure.CRASHED, Failure.NON_FINITE) else 0
        self.observation = self._observe(plan, window, before.reference, before.window.loss)
        metric = self._engine.evaluate() if self._evaluate and window.failure is None else None
        arrived = metric is not None and self.job.arrived(metric)
        terminated = arrived or self._crashes >= _UNRECOVERABLE_AFTER
        truncated = self._windows >= self.max_windows or self._samples >= self._run_length
        return (
            self.observation.arrays(self._rows),
            self.objective.reward(self.observation),
            terminated,
            truncated and not terminated,
            self._info(self.observation, metric=metric),
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """Return a flat mask over all choices, as ``MaskablePPO`` needs it: only locked choices are not allowed.

        The memory of a plan depends on all choices together, which a mask per choice cannot express.
        """
        space = self.plan_space
        precisions = [one in space.precisions_of(unit.name) for unit in space.units for one in space.precisions]
        storages = [one in space.storages_of(name) for name in space.recomputable for one in space.storages]
        return np.array([True] * len(space.accumulation_choices) + precisions + storages, dtype=np.bool_)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _observe(
        self, plan: Plan, window: Measurement, reference: Measurement, previous_loss: float | None
    ) -> Observation:
        return Observation(
            space=self.plan_space,
            plan=plan,
            window=window,
            reference=reference,
            previous_loss=previous_loss,
            memory_budget_bytes=self.memory_budget_bytes,
            batch_size=self.job.batch_size,
            adaptive=self.job.batching == "adaptive",
            progress=min(self._samples / self.job.total_samples, 1.0),
        )

    def _info(self, observation: Observation, *, metric: float | None) -> dict[str, Any]:
        """Return the values that repeat exactly for one seed; measured times are in ``observation.window``."""
        window = observation.window
        return {
            "plan": observation.plan.to_json(),
            "failure": None if window.failure is None else str(window.failure),
            "peak_bytes": window.peak_bytes,
            "loss": window.loss,
            "samples": self._samples,
            "metric": metric,
        }


def _factory(job: Job, engine: str | EngineFactory) -> EngineFactory:
    if callable(engine):
        return engine
    if engine != "torch":
        raise InputError(f"engine is {engine!r}", where="environment", allowed="torch, or a function of a seed")

    def create(seed: int) -> Engine:
        from autotune.engines.tuning_windows import make_engine

        return make_engine(job, seed)

    return create


def _budget(given: int | str | None) -> MemoryBudget | None:
    if given is None or isinstance(given, str):
        return None if given is None else MemoryBudget.parse(given)
    return MemoryBudget(size_bytes=given)


def _indices(action: NDArray[np.int64]) -> list[int]:
    try:
        return [int(value) for value in np.asarray(action).reshape(-1)]
    except (TypeError, ValueError) as error:
        raise PlanError(f"action is {action!r}", where="environment", allowed="whole numbers") from error


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}", where="environment", allowed="a whole number >= 1")
    return value
