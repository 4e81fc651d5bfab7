"""TPE searches with Optuna: for plans, with memory as a constraint, and for recipes. A database stores all trials."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import optuna
import sqlalchemy

from autotune.agents.peak_guess import PeakGuess
from autotune.agents.priced_plans import PRICES, SHARES, PricedPlans
from autotune.agents.recipe_space import Choice, Range, Space
from autotune.agents.study_store import STORAGE_FILE, StudyStore
from autotune.errors import AutotuneError, RunDirectoryError, first_line, raised_as
from autotune.gym.observation import Observation
from autotune.gym.reward import overshoot
from autotune.io.sqlite_files import require_own
from autotune.measurement import Failure
from autotune.plan import Plan, PlanSpace, Precision, Storage

# A run's folder, or a shared database.
Place = Path | StudyStore

logger = logging.getLogger(__name__)

# After this many repeated proposals in a row, a neighbour of the best plan is proposed.
_STALE = 2
# Number of neighbours to try with one changed parameter, then with two, and so on.
_NEIGHBOURS = 8
# Names of what trials are judged by, for who opens the database with other tools.
_METRICS = {"minimize": "cost, relative to the baseline's", "maximize": "gain in percent"}
# Remedy for a damaged study. The measurements are also stored in other files of the run.
_WITHOUT_IT = "a study stored by a search, or no file; the search then starts over"
# SQLite's messages about damaged files. Locks and full disks raise the same exception classes.
_DAMAGED = ("Could not decode", "malformed", "no such column", "no such table")


class _StudySearch:
    """A search whose plans are the trials of an Optuna study.

    The excess over the memory budget is a constraint of a trial. TPE ignores failed trials: when plans over the budget
    were reported as failed, 88-90 of 100 trials ran out of memory, against 41-50 with the constraint. Trials are stored
    in a database, so none is lost if the process is killed. A continued study first repeats its earlier proposals.

    A plan that was already measured is reported as failed. If its cost were reported each time, TPE's set of good
    trials would soon contain only the best plan, and TPE would propose plans as if it had no data (seen at 400 trials).
    If TPE keeps proposing known plans, neighbours of the best plan are proposed instead: plans that differ from it in a
    few redrawn parameters.

    Args:
        space: the plans that can be proposed.
        place: where the study is stored, a run's folder or a shared database; an existing study is continued.
        name: name of the study.
        seed: random seed of the sampler.
        first: parameters to propose before TPE does.
        ahead: largest number of proposals that may await measurement at once.
    """

    def __init__(
        self,
        space: PlanSpace,
        place: Place,
        name: str,
        seed: int,
        first: Sequence[dict[str, object]] = (),
        ahead: int = 1,
    ) -> None:
        self._seed, self._first, self._ahead = seed, list(first), ahead
        self._where = StudyStore.of(place).where
        self._storage, self.study = _opened(place, name, seed, "minimize")
        states = optuna.trial.TrialState
        # Proposals of an earlier process are repeated in order; results are reported for those that have none.
        self._stored = []
        for stored in self.study.get_trials(states=(states.COMPLETE, states.RUNNING, states.FAIL)):
            if "plan" in stored.user_attrs:
                self._stored.append(stored)
            elif not stored.state.is_finished():
                # The process was killed before this trial had a plan.
                self.study.tell(stored.number, state=states.FAIL)
        self._known = set[Plan]()
        self._told = set[Plan]()
        self._peaks = PeakGuess(space)
        self._repeats = 0
        self._open: deque[optuna.Trial | None] = deque()
        self._asked = 0

    def ask(self) -> Plan:
        """Return the next plan to measure; a continued study first repeats its earlier proposals."""
        number, self._asked = self._asked, self._asked + 1
        if number < len(self._stored):
            return self._repeat(self._stored[number])
        # Each proposal has its own seed, so that proposals depend on the reported trials and not on interruptions.
        self.study.sampler = _sampler((self._seed + number) % 2**32, several=self._ahead > 1)
        with _writing(self._where):
            # A trial that was enqueued before the process was killed is still waiting and comes first.
            ahead = None if self._waits() else self._enqueued(number)
            if ahead is not None:
                self.study.enqueue_trial(ahead)
            trial = self.study.ask()
            plan = self._propose(trial)
            trial.set_user_attr("plan", plan.to_json())
        self._open.append(trial)
        self._known.add(plan)
        return plan

    def _enqueued(self, number: int) -> dict[str, object] | None:
        """Return parameters to propose without the sampler; ``None`` to use the sampler."""
        if number < len(self._first):
            return self._first[number]
        return self._neighbour(number) if self._repeats >= _STALE else None

    def _waits(self) -> bool:
        return bool(self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,)))

    def _neighbour(self, number: int) -> dict[str, object] | None:
        """Return the best trial's parameters with a few of them redrawn so that the plan is new.

        A plan whose estimated peak exceeds the budget is returned only if no other is found. Return ``None`` if no
        trial is feasible, or all tried neighbours are known.
        """
        complete = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        fitting = [trial for trial in complete if all(over <= 0 for over in trial.constraints.values())]
        if not fitting:
            return None
        best = min(fitting, key=lambda trial: (trial.value, trial.number))
        generator, names = np.random.default_rng([self._seed, number]), sorted(best.distributions)
        doubtful = None
        for draw in range(_NEIGHBOURS * len(names)):
            # Neighbours with few changes are tried first.
            changed = map(str, generator.choice(names, size=1 + draw // _NEIGHBOURS, replace=False))
            near = {**best.params, **{name: _drawn(best.distributions[name], generator) for name in changed}}
            plan = self._propose(optuna.trial.FixedTrial(near))
            if plan in self._known:
                continue
            if self._peaks.may_fit(plan):
                return near
            doubtful = doubtful or near
        return doubtful

    def _repeat(self, stored: optuna.trial.FrozenTrial) -> Plan:
        told = stored.state.is_finished()
        self._open.append(None if told else optuna.Trial(self.study, stored._trial_id))
        plan = Plan.from_json(stored.user_attrs["plan"])
        self._known.add(plan)
        return plan

    def _propose(self, trial: optuna.trial.BaseTrial) -> Plan:
        raise NotImplementedError

    def tell(self, plan: Plan, observation: Observation, cost: float) -> None:
        """Report the cost of the oldest open proposal and its excess over the memory budget to the study."""
        trial, repeated = self._open.popleft(), plan in self._told
        self._repeats = self._repeats + 1 if repeated else 0
        self._told.add(plan)
        failure, peak = observation.window.failure, observation.window.peak_bytes
        over, budget = overshoot(observation), observation.memory_budget_bytes
        if not repeated and failure is Failure.OUT_OF_MEMORY:
            self._peaks.tell(plan, 1 + over)
        elif not repeated and failure in (None, Failure.OVER_BUDGET) and peak and budget:
            self._peaks.tell(plan, peak / budget)
        if trial is None:
            return
        if repeated:
            with _writing(self._where):
                # Not PRUNED: the sampler would take a pruned plan for a bad one.
                trial.set_user_attr("failure", "proposed again, and not measured again")
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        # A plan that cannot run violates the constraint as much as one that needs twice the budget.
        broken = failure not in (None, Failure.OVER_BUDGET, Failure.OUT_OF_MEMORY)
        with _writing(self._where):
            trial.set_user_attr("failure", None if failure is None else str(failure))
            trial.set_user_attr("seconds_per_step", observation.window.seconds_per_step)
            trial.set_user_attr("peak_bytes", peak)
            trial.set_constraint("memory", max(over, 1.0) if broken else over)
            self.study.tell(trial, cost)

    def close(self) -> None:
        """Report open proposals as failed and close the database."""
        for trial in filter(None, self._open):
            with contextlib.suppress(Exception):
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        _close(self._storage)


class OptunaSearch(_StudySearch):
    """TPE over k, the precision of each unit and the storage of each recomputable unit.

    Args:
        space: the plans that can be proposed.
        place: where the study is stored, a run's folder or a shared database; an existing study is continued.
        seed: random seed of the sampler.
        first: plans to propose before TPE does (hand-made rules).
        ahead: largest number of proposals that may await measurement at once.
    """

    def __init__(
        self, space: PlanSpace, place: Place, seed: int, first: Sequence[Plan] = (), *, ahead: int = 1
    ) -> None:
        self._space = space
        super().__init__(space, place, "tune", seed, [self._parameters(plan) for plan in dict.fromkeys(first)], ahead)

    def _propose(self, trial: optuna.trial.BaseTrial) -> Plan:
        space = self._space

        def chosen(kind: str, name: str, allowed: Sequence[str]) -> str:
            return str(trial.suggest_categorical(f"{kind} {name}", [str(one) for one in allowed]))

        return Plan(
            accumulation_steps=trial.suggest_categorical("k", space.accumulation_choices),
            precision={
                unit.name: Precision(chosen("precision", unit.name, space.precisions_of(unit.name)))
                for unit in space.units
            },
            storage={name: Storage(chosen("storage", name, space.storages_of(name))) for name in space.recomputable},
        )

    def _parameters(self, plan: Plan) -> dict[str, object]:
        return {
            "k": plan.accumulation_steps,
            **{f"precision {unit.name}": str(plan.precision_of(unit.name)) for unit in self._space.units},
            **{f"storage {name}": str(plan.storage_of(name)) for name in self._space.recomputable},
        }


class OptunaPriceSearch(_StudySearch):
    """TPE over three numbers instead of two per unit: k, the usable share of the budget, and the price of 16 bits.

    The plans at neutral prices are proposed first.

    Args:
        priced: turns prices into plans.
        space: the plans that can be proposed.
        place: where the study is stored, a run's folder or a shared database; an existing study is continued.
        seed: random seed of the sampler.
        ahead: largest number of proposals that may await measurement at once.
    """

    def __init__(self, priced: PricedPlans, space: PlanSpace, place: Place, seed: int, *, ahead: int = 1) -> None:
        self._priced = priced
        self._choices = space.accumulation_choices
        first: list[dict[str, object]] = [{"k": k, "share": 1.0, "price_16_bit": 0.0} for k in self._choices]
        super().__init__(space, place, "prices", seed, first, ahead)

    def _propose(self, trial: optuna.trial.BaseTrial) -> Plan:
        return self._priced.plan(
            trial.suggest_categorical("k", self._choices),
            trial.suggest_float("share", *SHARES),
            trial.suggest_float("price_16_bit", *PRICES),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Values to try.

    Attributes:
        number: number of the trial, from 0.
        own: whether these are the recipe's own values.
        values: values by name.
    """

    number: int
    own: bool
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a proposal.

    Attributes:
        proposal: the proposal.
        gain: its gain, larger is better; ``None`` if it failed.
    """

    proposal: Proposal
    gain: float | None


class RecipeStudy:
    """A TPE search over a recipe's values; no proposal is lost if the process is killed.

    The sampler is reseeded for every trial. With one trial at a time, an interrupted study therefore proposes the same
    values as an uninterrupted one.

    Args:
        space: the searched values and their ranges.
        folder: where the study is stored; an existing study is continued.
        seed: random seed of the sampler.
        own: the recipe's own values, which are proposed first.

    Raises:
        RunDirectoryError: if the stored file is not a study, or cannot be used.
    """

    def __init__(self, space: Space, folder: Path, seed: int, own: dict[str, float]) -> None:
        self._seed, self._space = seed, space
        self._where = StudyStore.of(folder).where
        self._distributions = {name: _distribution(place) for name, place in space.items()}
        self._storage, self._study = _opened(folder, "recipe", seed, "maximize")
        try:
            with _using(self._where):
                self._settle(own)
        except BaseException:
            self.close()
            raise

    def _settle(self, own: dict[str, float]) -> None:
        """Fail trials that a killed process left without values; enqueue the recipe's values if not yet proposed."""
        states = optuna.trial.TrialState
        for trial in self._study.get_trials(states=(states.RUNNING,)):
            if trial.params.keys() != self._distributions.keys():
                # The process was killed before this trial had its values.
                self._study.tell(trial.number, state=states.FAIL)
        waiting = self._study.get_trials(states=(states.WAITING,))
        if not waiting and not any(proposal.own for proposal in self.proposals()):
            self._study.enqueue_trial(own, user_attrs={"own": True})

    def ask(self) -> Proposal:
        """Return the next proposal."""
        with _using(self._where):
            number = len(self._study.get_trials(deepcopy=False))
            self._study.sampler = _sampler((self._seed + number) % 2**32)
            trial = self._study.ask(fixed_distributions=self._distributions)
            return Proposal(number=trial.number, own="own" in trial.user_attrs, values=trial.params)

    def tell(self, proposal: Proposal, gain: float | None) -> None:
        """Report the gain of a proposal; ``None`` if it failed."""
        failed = optuna.trial.TrialState.FAIL if gain is None else None
        with _using(self._where):
            self._study.tell(proposal.number, gain, state=failed)

    def proposals(self) -> list[Proposal]:
        """Return all proposals."""
        return [_proposal(trial) for trial in self._whole()]

    def untold(self) -> list[Proposal]:
        """Return the proposals without a reported result."""
        return [_proposal(trial) for trial in self._whole() if not trial.state.is_finished()]

    def outcomes(self) -> list[Outcome]:
        """Return the results reported so far."""
        return [
            Outcome(proposal=_proposal(trial), gain=trial.value) for trial in self._whole() if trial.state.is_finished()
        ]

    def close(self) -> None:
        """Close the database."""
        _close(self._storage)

    def _whole(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials with all their values.

        Raises:
            RunDirectoryError: if a value is outside its range, or a gain is not finite.
        """
        with _using(self._where):
            trials = self._study.get_trials(deepcopy=False)
        whole = [trial for trial in trials if trial.params.keys() == self._distributions.keys()]
        for trial in whole:
            searched = all(self._space[name].holds(value) for name, value in trial.params.items())
            told = trial.value is None or math.isfinite(trial.value)
            if not (searched and told):
                raise RunDirectoryError(f"trial {trial.number} is damaged", where=self._where, allowed=_WITHOUT_IT)
        return whole


def _proposal(trial: optuna.trial.FrozenTrial) -> Proposal:
    return Proposal(number=trial.number, own="own" in trial.user_attrs, values=dict(trial.params))


def _distribution(place: Range | Choice) -> optuna.distributions.BaseDistribution:
    if isinstance(place, Choice):
        return optuna.distributions.CategoricalDistribution(place.options)
    if place.whole:
        return optuna.distributions.IntDistribution(int(place.low), int(place.high), log=place.log)
    return optuna.distributions.FloatDistribution(place.low, place.high, log=place.log)


def _opened(
    place: Place, name: str, seed: int, direction: Literal["minimize", "maximize"]
) -> tuple[optuna.storages.RDBStorage, optuna.Study]:
    """Return the storage and the study of a place; the study is created if missing.

    Raises:
        RunDirectoryError: if the stored file is not a study, or the database cannot be used.
    """
    # Optuna's own warnings about a damaged database would repeat the error raised here.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    store = StudyStore.of(place)
    if isinstance(place, Path):
        with raised_as(RunDirectoryError):
            require_own(place / STORAGE_FILE)
    with _using(store.where):
        storage = optuna.storages.RDBStorage(store.url, engine_kwargs=store.engine_options)
        study = optuna.create_study(
            study_name=store.prefix + name,
            storage=storage,
            sampler=_sampler(seed),
            direction=direction,
            load_if_exists=True,
        )
        if study.metric_names is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([_METRICS[direction]])
    return storage, study


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except (sqlalchemy.exc.OperationalError, optuna.exceptions.StorageInternalError) as error:
        if not any(said in f"{error} {error.__cause__}" for said in _DAMAGED):
            raise
        raise _no_study(error, where) from error
    except AutotuneError:
        raise
    except Exception as error:  # the exception classes depend on Optuna and its driver
        raise _no_study(error, where) from error


def _no_study(error: Exception, where: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"the file is not an Optuna study ({type(error).__name__})", where=where, allowed=_WITHOUT_IT
    )


@contextlib.contextmanager
def _using(where: str) -> Iterator[None]:
    """Convert errors of a damaged, full, locked or missing database to ``RunDirectoryError``."""
    with _writing(where), _reading(where):
        yield


@contextlib.contextmanager
def _writing(where: str) -> Iterator[None]:
    """Convert errors of a full, locked or missing database to ``RunDirectoryError``."""
    try:
        yield
    except (sqlalchemy.exc.OperationalError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = first_line(getattr(cause, "orig", None) or cause)
        raise RunDirectoryError(
            f"cannot be written ({reason}); stored trials are kept, and autotune resume continues",
            where=where,
            allowed="a reachable database with free space",
        ) from error


def _drawn(place: optuna.distributions.BaseDistribution, generator: np.random.Generator) -> object:
    """Return a uniform draw."""
    if isinstance(place, optuna.distributions.CategoricalDistribution):
        return place.choices[generator.integers(len(place.choices))]
    assert isinstance(place, optuna.distributions.FloatDistribution)
    return float(generator.uniform(place.low, place.high))


def _close(storage: optuna.storages.RDBStorage) -> None:
    storage.remove_session()
    storage.engine.dispose()


def _sampler(seed: int, *, several: bool = False) -> optuna.samplers.BaseSampler:
    """Return a TPE sampler; with ``several``, open proposals count as bad trials, so that new proposals differ."""
    with warnings.catch_warnings():
        # Optuna marks some of TPE's defaults as experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=several)
