"""Search with Optuna's TPE: ask and tell, memory as a constraint, every told trial on disk."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import optuna

from autotune.agents.priced_plans import PRICES, SHARES, PricedPlans
from autotune.gym.observation import Observation
from autotune.gym.reward import overshoot
from autotune.measurement import Failure
from autotune.plan import Plan, PlanSpace, Precision, Storage

logger = logging.getLogger(__name__)

STORAGE_FILE = "optuna.db"


class _StudySearch:
    """Ask a study for trials and tell it what they cost.

    Being over the budget is told as a constraint: told as a failure it would be invisible to TPE (88-90 of 100 trials
    ran out of memory then, 41-50 when it was told). Trials are kept in SQLite, which loses nothing of what was told
    when the process is killed; a trial that was running then is told as failed when the study is opened again.

    Args:
        folder: where the study is stored; an existing study is continued.
        seed: of the sampler.
        first: parameters to propose before TPE does.
    """

    def __init__(self, folder: Path, seed: int, first: Sequence[dict[str, object]] = ()) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
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
            for parameters in first:
                self.study.enqueue_trial(parameters)
        self._trial: optuna.Trial | None = None

    def ask(self) -> Plan:
        """Return the next proposal."""
        self._trial = self.study.ask()
        return self._propose(self._trial)

    def _propose(self, trial: optuna.Trial) -> Plan:
        raise NotImplementedError

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


class OptunaSearch(_StudySearch):
    """Propose plans by TPE over k, every unit's precision and every unit's storage.

    Args:
        space: the plans that can be proposed.
        folder: where the study is stored; an existing study is continued.
        seed: of the sampler.
        first: plans to propose before TPE does (hand-made rules).
    """

    name = "optuna"

    def __init__(self, space: PlanSpace, folder: Path, seed: int, first: Sequence[Plan] = ()) -> None:
        self._space = space
        super().__init__(folder, seed, [self._parameters(plan) for plan in dict.fromkeys(first)])

    def _propose(self, trial: optuna.Trial) -> Plan:
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

    def _parameters(self, plan: Plan) -> dict[str, object]:
        return {
            "k": plan.accumulation_steps,
            **{f"precision {unit.name}": str(plan.precision_of(unit.name)) for unit in self._space.units},
            **{f"storage {name}": str(plan.storage_of(name)) for name in self._space.recomputable},
        }


class OptunaPriceSearch(_StudySearch):
    """Propose plans by TPE over a planner's prices: k, the share of the budget that is used, and what 16 bits cost.

    Three numbers instead of two per unit; the planner's own answer is proposed first.

    Args:
        priced: turns prices into plans.
        space: the plans that can be proposed.
        folder: where the study is stored; an existing study is continued.
        seed: of the sampler.
    """

    name = "optuna-prices"

    def __init__(self, priced: PricedPlans, space: PlanSpace, folder: Path, seed: int) -> None:
        self._priced = priced
        self._choices = space.accumulation_choices
        first: list[dict[str, object]] = [{"k": k, "share": 1.0, "price_16_bit": 0.0} for k in self._choices]
        super().__init__(folder, seed, first)

    def _propose(self, trial: optuna.Trial) -> Plan:
        return self._priced.plan(
            trial.suggest_categorical("k", self._choices),
            trial.suggest_float("share", *SHARES),
            trial.suggest_float("price_16_bit", *PRICES),
        )


def _sampler(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        # Optuna marks some of TPE's defaults as experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed)
