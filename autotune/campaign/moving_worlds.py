"""Evaluation of a policy under changing conditions, against its planner alone, rules and a clairvoyant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtr, owens_t

from autotune.agents.recipe import Recipe
from autotune.agents.shipped_network import BareNetwork, LeverNetwork
from autotune.campaign.policy_judging import (
    FACTORS,
    MECHANISMS,
    MOVING_SEED,
    BenchSettings,
    Choose,
    Guarded,
    Judged,
    Share,
    untrained_network,
)
from autotune.cost_model.cost_arrays import Floats
from autotune.gym.levers import (
    RUN_FEATURES,
    Actions,
    Features,
    Watch,
    levers_of,
)
from autotune.gym.moving_env import MovingEnv, planner_reserve
from autotune.simulator.clairvoyant import best_static, clairvoyant, held
from autotune.simulator.dip_families import FAMILIES
from autotune.simulator.dip_forecasts import DipForecast
from autotune.simulator.moving_conditions import Course, MovingRuns, Strengths
from autotune.simulator.online_planner import Planner, Rises
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.random_jobs import draw_job
from autotune.stats import clustered_mean_interval

_SIZES = ("noise_error", "cost_error", "time_noise", "drift", "length", "curriculum", "jitter", "switch_windows")
# Prefixes of the run features that an ablation hides together.
GROUPS: dict[str, tuple[str, ...]] = {
    "noise": ("noise",),
    "lengths": ("length", "rise"),
    "memory": ("pressure", "ran_out", "budget"),
    "announcements": ("until_",),
    "dips": ("dip",),
    "costs": ("surprise", "unsure"),
    "time": ("progress", "windows"),
    "units": (),
}
# Headroom in percent below which the captured share is noise.
_LEAST_HEADROOM = 2.0
# Wider than the default search range, so that the planner with a reserve does not lose for lack of range.
_RESERVES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a method on n lanes; arrays of shape (n,).

    Attributes:
        seconds: seconds of each run.
        ran_out: number of windows of each run that ran out of memory.
    """

    seconds: Floats
    ran_out: Floats


def drive(
    runs: MovingRuns,
    course: Course,
    settings: PlannerSettings,
    choose: Choose | None = None,
    prepare: Callable[[Planner], None] | None = None,
) -> Outcome:
    """Run a course under a planner.

    Args:
        runs: the runs.
        course: conditions of the runs.
        settings: settings of the planner.
        choose: chooses adjustments of the planner; ``None`` for the planner alone.
        prepare: called with the planner before the first window.
    """
    runs.begin(course)
    planner = Planner(runs.lanes, settings)
    watch = Watch(planner)
    if prepare is not None:
        prepare(planner)
    situation, ran_out = runs.situation(), np.zeros(len(course.job))
    for _ in range(runs.windows):
        levers = None if choose is None else levers_of(choose(watch.features(situation)))
        seen = runs.run(planner.decide(situation, levers))
        situation = runs.situation()
        watch.observe(seen, situation.noise_scale)
        ran_out += seen.ran_out
    return Outcome(seconds=runs.seconds, ran_out=ran_out)


def strengths_of(world: str, strengths: Strengths) -> Strengths:
    """Return the strengths of the changing conditions in a world; of a family of dips, nothing else changes.

    Half and double scale the sizes of changes, the cost of a switch and the frequency of events.
    """
    if world in FAMILIES:
        # Strictly periodic events also have one depth.
        depth = 0.0 if world == "periodic" else strengths.event_depth
        return replace(strengths.only("event_every"), event_families=(world,), event_depth=depth)
    if world in MECHANISMS:
        return strengths.only(*MECHANISMS[world])
    factor = FACTORS[world]
    sizes = {name: factor * getattr(strengths, name) for name in _SIZES}
    return replace(strengths, **sizes, event_every=round(strengths.event_every / factor))


def drawing(network: LeverNetwork, seed: int) -> Choose:
    """Return a chooser that draws levers with a network's probabilities instead of taking the most likely ones."""
    bare, generator = BareNetwork(network), np.random.default_rng(seed)
    return lambda features: bare.drawn(features, generator)


def without(choose: Choose, group: str) -> Choose:
    """Return a chooser that sees zeros in place of a group of features; see ``GROUPS``."""
    hidden = [number for number, name in enumerate(RUN_FEATURES) if name.startswith(GROUPS[group])]

    def blind(features: tuple[Features, Features]) -> Actions:
        run, units = features
        run = run.copy()
        run[:, hidden] = 0.0
        return choose((run, np.zeros_like(units) if group == "units" else units))

    return blind


class ToldRises(Rises):
    """Rises of sequence lengths, forecast from their true distribution: the best possible forecast.

    Log lengths are first-order autoregressive; the longest batch exceeds them by a half-normal deviation. Both standard
    deviations of a lane are computed in hindsight from its whole course.

    Args:
        planner: the planner that uses these rises.
        course: conditions of the runs.
        memory: time constant of the correlation of lengths, in windows.
        exactly: whether probabilities are exact; otherwise the planner approximates them from the true mean and
            deviation.
    """

    def __init__(self, planner: Planner, course: Course, memory: float, *, exactly: bool) -> None:
        super().__init__(np.zeros(len(planner.lanes)))
        self._planner, self._exactly = planner, exactly
        self._keep = math.exp(-1 / memory)
        lengths = np.log(course.length)
        innovation = np.sqrt(np.square(lengths[:, 1:] - self._keep * lengths[:, :-1]).mean(axis=1))
        self._innovation = np.maximum(innovation, 1e-9)
        self._jitter = np.sqrt(np.square(np.log(course.longest) - lengths).mean(axis=1))

    def learn(self, rise: Floats) -> None:
        """Do nothing: the distribution is known."""

    def exceed(self, rise: Floats, caution: Floats, unsure: Floats | float = 0.0) -> Floats:
        """Return the probability that the next rise exceeds each given one, shape (lanes, plans)."""
        begun = self._planner.seen is not None
        middle = (self._keep - 1) * np.log(self._planner.length) if begun else np.zeros(len(self._jitter))
        spread = self._innovation if begun else self._innovation / math.sqrt(1 - self._keep**2)
        self.mean = middle + math.sqrt(2 / math.pi) * self._jitter
        self._square = spread**2 + (1 - 2 / math.pi) * self._jitter**2
        if not self._exactly:
            return super().exceed(rise, caution, unsure)
        # The sum of a normal and a half-normal variable is skew-normal.
        place = (rise - middle[:, None]) / np.hypot(spread, self._jitter)[:, None]
        return np.asarray(ndtr(-place) + 2 * owens_t(place, (self._jitter / spread)[:, None]))


class ToldRate(DipForecast):
    """A forecast that knows, in hindsight, how often memory dips in each lane and how deep, but not when.

    No forecast of memoryless dips can be better.

    Args:
        course: conditions of the runs.
    """

    def __init__(self, course: Course) -> None:
        super().__init__(len(course.job))
        begins = course.told > course.budget
        rate, dips = begins.mean(axis=1), np.maximum(begins.sum(axis=1), 1)
        left = np.log(course.budget)
        mean = (left * begins).sum(axis=1) / dips
        self.level = np.where(rate > 0, mean, np.inf)
        self._variance = (np.square(left - mean[:, None]) * begins).sum(axis=1) / dips
        self._rate = rate
        self.count += 1

    def learn(self, dip: Floats, left: Floats) -> None:
        """Do nothing: all is known."""

    def _forecast(self, windows: int) -> Floats:
        """Return the rate of dips, shape (n, windows)."""
        return np.tile(self._rate[:, None], (1, windows))


def moving_tables(judged: Judged, recipe: Recipe, settings: BenchSettings, tell: Share) -> dict[str, dict[str, Any]]:
    """Return the table of worlds, that of families of dips and, for the world ``all``, that of the ablation.

    They are ``dynamic``, ``families`` and ``ablation``, which is empty unless the world ``all`` is requested.
    """
    generator = np.random.default_rng(settings.seed + MOVING_SEED)
    depth = (recipe.jobs.shallowest, recipe.jobs.deepest)
    env = MovingEnv(
        [draw_job(generator, depth=depth, storages=settings.storages) for _ in range(settings.jobs)],
        recipe.strengths,
        max(settings.jobs, settings.lanes),
        windows=recipe.jobs.windows,
        settings=recipe.planner,
    )
    parts = len(settings.mechanisms) + len(settings.families) + len(GROUPS) * ("all" in settings.mechanisms)
    table: dict[str, Any] = {}
    families: dict[str, Any] = {}
    ablation: dict[str, Any] = {}

    def advance(title: str) -> None:
        tell((len(table) + len(families) + len(ablation)) / parts, f"moving jobs, {title}")

    for name in settings.families:
        advance(f"{name} dips")
        families[name] = World(env, recipe, name, settings.seed + MOVING_SEED).family(judged)
    for name in settings.mechanisms:
        advance(name)
        world = World(env, recipe, name, settings.seed + MOVING_SEED)
        table[name] = world.table(judged)
        if name == "all":
            families[name] = world.family(judged)
            for group in GROUPS:
                advance(f"all, without {group}")
                ablation[group] = world.entry(world.learned(judged, group))
    return {"dynamic": table, "families": families, "ablation": ablation}


class World:
    """One world's courses and the planner's result on them; all worlds share jobs and budgets.

    Args:
        env: environment of the runs; its strengths are set to those of the world.
        recipe: strengths of changing conditions, and settings of the planner.
        name: name of the world.
        seed: random seed for the courses.
    """

    def __init__(self, env: MovingEnv, recipe: Recipe, name: str, seed: int) -> None:
        self._env, self._runs, self._name, self._settings = env, env.runs, name, recipe.planner
        self._runs.strengths = strengths_of(name, recipe.strengths)
        env.generator_state = dict(np.random.default_rng([seed, 1]).bit_generator.state)
        self._course = env.draw()
        self._planner = self._drive(recipe.planner)

    def table(self, judged: Judged) -> dict[str, Any]:
        """Return the table of the world: the possible gain over the planner, and the gain of each method."""
        best = clairvoyant(self._runs, self._course)
        still = best_static(self._runs, self._course)
        headroom = self._won([best])
        guarded = Guarded(judged)
        shipped = self._drive(judged.settings, guarded)
        ppo = self.learned(judged)
        rule = self._drive(replace(self._settings, dips="last"))
        drawn = [self._drive(judged.settings, drawing(one, seed)) for seed, one in enumerate(judged.networks.values())]
        unknown = np.full(len(best), np.nan)
        methods = {
            "best_static": self.entry([Outcome(seconds=still, ran_out=unknown)], headroom),
            "planner": self.entry([self._planner], headroom),
            "planner_no_belief": self.entry([self._drive(replace(self._settings, dips="none"))], headroom),
            "planner_assumed": self.entry([self._drive(replace(self._settings, costs="assumed"))], headroom),
            **self._reserve(headroom),
            "untrained": self.entry(
                [self._drive(judged.settings, untrained_network(judged.shipped.width).most_likely)], headroom
            ),
            "period": self.entry([rule], headroom),
            "ppo_drawn": self.entry(drawn, headroom) | {"seeds": self._seeds(judged, drawn)},
            "ppo": self.entry(ppo, headroom) | self._over(rule, ppo) | {"seeds": self._seeds(judged, ppo)},
            "shipped": self.entry([shipped], headroom)
            | self._over(rule, [shipped])
            | {"alone_share": guarded.alone / guarded.decisions},
        }
        if self._name == "pressure":
            for name, exactly in (("informed", False), ("informed_exactly", True)):
                methods[name] = self.entry([self._informed(exactly=exactly)], headroom)
        return {
            "strengths": asdict(self._runs.strengths),
            "jobs": len(np.unique(self._course.job)),
            "lanes": len(self._course.job),
            "windows": self._runs.windows,
            "headroom_percent": float(headroom.mean()),
            "headroom_ci95": self._interval(headroom),
            "methods": methods,
        }

    def family(self, judged: Judged) -> dict[str, Any]:
        """Return the time that each method saves against the planner that expects no dips, in percent of its time.

        ``full_budget`` keeps the plan that is best without dips, ``rule`` expects the last interval again, and
        ``told_rate`` knows how often memory dips and how deep: nobody can know more of memoryless dips.
        """
        alone = self._drive(replace(self._settings, dips="none"))
        self._runs.begin(self._course)
        first = Planner(self._runs.lanes, self._settings).decide(self._runs.situation())
        arms = {
            "clairvoyant": [clairvoyant(self._runs, self._course)],
            "full_budget": [held(self._runs, self._course, first)],
            "rule": [self._drive(replace(self._settings, dips="last")).seconds],
            "told_rate": [self._drive(self._settings, None, self._tell_rate).seconds],
            "planner_belief": [self._planner.seconds],
            "ppo": [outcome.seconds for outcome in self.learned(judged)],
            "shipped": [self._drive(judged.settings, Guarded(judged)).seconds],
        }
        won = {name: np.stack([100 * (1 - one / alone.seconds) for one in arm]) for name, arm in arms.items()}
        beyond = won["ppo"] - won["planner_belief"]
        return {
            **{name: float(one.mean()) for name, one in won.items()},
            "ppo_over_belief": float(beyond.mean()),
            "ci95": {name: self._interval(one) for name, one in {**won, "ppo_over_belief": beyond}.items()},
            "out_of_memory_per_run": {
                "planner": float(alone.ran_out.mean()),
                "planner_belief": float(self._planner.ran_out.mean()),
            },
        }

    def _tell_rate(self, planner: Planner) -> None:
        planner.dips = ToldRate(self._course)

    def learned(self, judged: Judged, hidden: str | None = None) -> list[Outcome]:
        """Return the outcome of each network, without a group of features if one is named."""
        choosers: list[Choose] = [network.most_likely for network in judged.networks.values()]
        if hidden is not None:
            choosers = [without(choose, hidden) for choose in choosers]
        return [self._drive(judged.settings, choose) for choose in choosers]

    def entry(self, outcomes: Sequence[Outcome], headroom: Floats | None = None) -> dict[str, Any]:
        """Return the figures of a method.

        Args:
            outcomes: outcome of each training seed, or of the one method.
            headroom: shape (1, lanes), possible gain in percent; ``None`` omits the captured share.
        """
        won = self._won([outcome.seconds for outcome in outcomes])
        ran_out = float(np.mean([outcome.ran_out for outcome in outcomes]))
        entry = {
            "won_percent": float(won.mean()),
            "won_ci95": self._interval(won),
            "p5": float(np.quantile(won, 0.05)),
            "out_of_memory_per_run": None if math.isnan(ran_out) else ran_out,
        }
        if headroom is not None:
            most = float(headroom.mean())
            entry["captured"] = float(won.mean()) / most if most >= _LEAST_HEADROOM else None
        return entry

    def _drive(
        self,
        settings: PlannerSettings,
        choose: Choose | None = None,
        prepare: Callable[[Planner], None] | None = None,
    ) -> Outcome:
        return drive(self._runs, self._course, settings, choose, prepare)

    def _won(self, seconds: Sequence[Floats]) -> Floats:
        """Return the time saved against the planner, in percent of the planner's time, shape (methods, lanes)."""
        alone = self._planner.seconds
        return np.stack([100 * (alone - one) / alone for one in seconds])

    def _interval(self, won: Floats) -> list[float]:
        return list(clustered_mean_interval(won, self._course.job))

    def _seeds(self, judged: Judged, outcomes: Sequence[Outcome]) -> dict[str, float]:
        won = self._won([outcome.seconds for outcome in outcomes]).mean(axis=1)
        return {name: float(value) for name, value in zip(judged.networks, won, strict=True)}

    def _over(self, rule: Outcome, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Return the paired gain over a rule, in percent of the planner's time."""
        beyond = self._won([outcome.seconds for outcome in outcomes]) - self._won([rule.seconds])
        return {"over_period_percent": float(beyond.mean()), "over_period_ci95": self._interval(beyond)}

    def _reserve(self, headroom: Floats) -> dict[str, Any]:
        """Return the figures of the planner without risk estimates: with no reserve, and one tuned on other courses."""
        bare = replace(self._settings, rise=0.0)
        self._env.settings = bare
        reserve = planner_reserve(self._env, _RESERVES)
        self._env.settings = self._settings
        return {
            "planner_no_risk": self.entry([self._drive(bare)], headroom),
            "planner_reserve": self.entry([self._drive(replace(bare, reserve=reserve))], headroom)
            | {"reserve": reserve},
        }

    def _informed(self, *, exactly: bool) -> Outcome:
        """Return the outcome of the planner with the true distribution of lengths."""
        memory = self._runs.strengths.length_windows

        def prepare(planner: Planner) -> None:
            planner.rises = ToldRises(planner, self._course, memory, exactly=exactly)

        return self._drive(self._settings, None, prepare)
