"""Search with Optuna's TPE: ask and tell, memory as a constraint, every told trial on disk."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import optuna

from autotune.gym.observation import Observation
from autotune.gym.reward import overshoot
from autotune.measurement import Failure
from autotune.plan import Plan, PlanSpace, Precision, Storage

logger = logging.getLogger(__name__)

STORAGE_FILE = "optuna.db"


class OptunaSearch:
    """Propose plans by TPE over k, every unit's precision and every unit's storage.

    Being over the budget is told as a constraint: told as a failure it would be invisible to TPE (88-90 of 100 trials
    ran out of memory then, 41-50 when it was told). Trials are kept in SQLite, which loses nothing of what was told
    when the process is killed; a trial that was running then is told as failed when the study is opened again.

    Args:
        space: the plans that can be proposed.
        folder: where the study is stored; an existing study is continued.
        seed: of the sampler.
        first: plans to propose before TPE does (hand-made rules).
    """

    name = "optuna"

    def __init__(self, space: PlanSpace, folder: Path, seed: int, first: Sequence[Plan] = ()) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{folder / STORAGE_FILE}")
        self.study = optuna.create_study(
            study_name="tune",
            storage=self._storage,
            sampler=_sampler(seed),
            direction="minimize",
            load_if_exists=True,
        )
        for stale in self.study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            self.study.tell(stale.number, state=optuna.trial.TrialState.FAIL)
        if not self.study.trials:
            for plan in dict.fromkeys(first):
                self.study.enqueue_trial(self._parameters(plan))
        self._trial: optuna.Trial | None = None

    def ask(self) -> Plan:
        """Return the next proposal."""
        trial = self.study.ask()
        self._trial = trial
        precisions = [str(precision) for precision in self._space.precisions]
        storages = [str(storage) for storage in Storage]
        return Plan(
            accumulation_steps=trial.suggest_categorical("k", self._space.accumulation_choices),
            precision={
                unit.name: Precision(trial.suggest_categorical(f"precision {unit.name}", precisions))
                for unit in self._space.units
            },
            storage={
                name: Storage(trial.suggest_categorical(f"storage {name}", storages))
                for name in self._space.recomputable
            },
        )

    def tell(self, plan: Plan, observation: Observation, cost: float) -> None:
        """Tell the cost of the last proposal and by how much it was over the budget."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        failure = observation.window.failure
        over = overshoot(observation)
        trial.set_user_attr("plan", plan.to_json())
        trial.set_user_attr("failure", None if failure is None else str(failure))
        # A plan that cannot run at all is as far from being allowed as one that needs twice the budget.
        broken = failure not in (None, Failure.OVER_BUDGET, Failure.OUT_OF_MEMORY)
        trial.set_constraint("memory", max(over, 1.0) if broken else over)
        self.study.tell(trial, cost)

    def close(self) -> None:
        """Close the database; a proposal that was never told is told as failed."""
        if self._trial is not None:
            with contextlib.suppress(Exception):
                self.study.tell(self._trial, state=optuna.trial.TrialState.FAIL)
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _parameters(self, plan: Plan) -> dict[str, object]:
        return {
            "k": plan.accumulation_steps,
            **{f"precision {unit.name}": str(plan.precision_of(unit.name)) for unit in self._space.units},
            **{f"storage {name}": str(plan.storage_of(name)) for name in self._space.recomputable},
        }


def _sampler(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        # Optuna marks some of TPE's defaults as experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed)
