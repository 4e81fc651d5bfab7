"""Step many simulated training runs at once: the environment that policies are trained in.

Observations and rewards are those of :class:`autotune.gym.env.TuningEnv` over a simulated engine, feature by feature;
a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from autotune.errors import InputError
from autotune.gym.observation import GLOBAL_FEATURES, LIMIT, UNIT_FEATURES, Array
from autotune.gym.reward import FAILURE_COST, Objective, drawn_together
from autotune.gym.spaces import observation_space
from autotune.physics.cost_arrays import Floats, Indices, Plans
from autotune.physics.goodput import efficiency
from autotune.physics.price_solver import PriceSolver
from autotune.physics.simulated_job import SimulatedJob
from autotune.physics.simulation import MOVING, Simulation, Windows, World
from autotune.physics.synthetic import draw_job
from autotune.plan import Precision

# First steps of a window that are not timed, so that a window of as many has no time.
_DISCARD = 1


class SimulatedVectorEnv(VectorEnv[dict[str, Array], NDArray[np.int64], Any]):
    """Tune many simulated jobs; one ``step`` is a window of each.

    An action has one number for k, then one precision per unit and one storage per unit; numbers for units that a job
    does not have, or that cannot be recomputed, are ignored, and a k beyond a job's choices is its largest. A lane
    whose episode ends starts another job in the same step.

    Args:
        jobs: the jobs that lanes draw from; ``None`` draws 64 of all kinds.
        num_envs: lanes.
        world: how runs differ from their profiles.
        window_steps: optimizer steps of a window.
        max_windows: windows of an episode.
        max_units: rows of the unit features; ``None`` takes the largest job's.
        budget_range: the budget as a share of the baseline's peak, from and to; where a job's leanest plan needs more,
            it gets what that needs.
        objective: what is minimised.
        seed: of jobs and runs, until ``reset`` gives another.

    Attributes:
        sizes: how many choices each number of an action has.

    Raises:
        InputError: if a number cannot be used.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob] | None = None,
        num_envs: int = 64,
        *,
        world: World = MOVING,
        window_steps: int = 5,
        max_windows: int = 64,
        max_units: int | None = None,
        budget_range: tuple[float, float] = (0.3, 1.0),
        objective: Objective | None = None,
        seed: int = 0,
    ) -> None:
        if num_envs < 1 or window_steps <= _DISCARD or max_windows < 1:
            raise InputError("num_envs, window_steps or max_windows is too small", where="environment")
        generator = np.random.default_rng(seed)
        self.jobs = tuple(jobs) if jobs is not None else tuple(draw_job(generator) for _ in range(64))
        self.simulation = Simulation(self.jobs, world, seed=seed, max_units=max_units)
        self.num_envs = num_envs
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.window_steps, self.max_windows = window_steps, max_windows
        self.objective = objective or Objective()
        self._budget_range = budget_range
        arrays = self.simulation.told
        sizes = [arrays.max_k, *[arrays.max_choices // 2] * arrays.max_units, *[2] * arrays.max_units]
        self.sizes = np.array(sizes, dtype=np.int64)
        self.single_action_space = spaces.MultiDiscrete(self.sizes)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        # Gymnasium's Dict is a space of dictionaries, which its own type does not say.
        self.single_observation_space: Any = observation_space(arrays.max_units)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.solver = PriceSolver(arrays)
        self._least = _least_peaks(self.solver)
        self._facts = _JobFacts(self.jobs, arrays.max_units)
        self._draws = np.random.default_rng(seed)
        self._reset_state()

    def _reset_state(self) -> None:
        n = self.num_envs
        self._windows = np.zeros(n, dtype=np.int64)
        self._previous_loss, self._reference = np.full(n, np.nan), _Reference.empty(n)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Start a run in every lane and run one window of its baseline.

        Args:
            seed: of everything that follows; a whole number, or ``None`` to go on drawing.
            options: ``jobs``: an array with the number of each lane's job; left out, jobs are drawn.
        """
        if isinstance(seed, list):
            raise InputError("seed is a list", where="environment", allowed="one number for all lanes")
        if seed is not None:
            self._draws = np.random.default_rng(seed)
            self.simulation.reseed(seed)
        self._reset_state()
        n = self.num_envs
        given = None if options is None else options.get("jobs")
        self.simulation.begin(self._draw(n) if given is None else np.asarray(given, dtype=np.int64))
        lanes = np.arange(n)
        window = self._begin(lanes)
        k, choices = np.zeros(n, dtype=np.int64), self._baseline(n)
        return self._observe(lanes, k, choices, window), {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[dict[str, Array], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Run a window of every lane under the plans that the actions encode."""
        k, choices = self.decode(actions)
        lanes, simulation = np.arange(self.num_envs), self.simulation
        window = simulation.run(k, choices, self.window_steps)
        self._windows += 1
        observation = self._observe(lanes, k, choices, window)
        rewards = self._rewards(k, window)
        self._previous_loss = window.loss
        terminated = simulation.arrived() & ~window.over_budget
        truncated = (self._windows >= self.max_windows) | (simulation.progress() >= 1)
        truncated &= ~terminated
        infos: dict[str, Any] = {
            "peak_bytes": window.peak_bytes,
            "over_budget": window.over_budget,
            "total_s": window.total_s,
            "arrived": terminated,
        }
        done = np.flatnonzero(terminated | truncated)
        if len(done):
            infos["final_obs"] = {name: rows[done] for name, rows in observation.items()}
            infos["final_lanes"] = done
            for name, rows in self._restart(done).items():
                observation[name][done] = rows
        return observation, rewards, terminated, truncated, infos

    def decode(self, actions: NDArray[np.int64]) -> tuple[Indices, Indices]:
        """Return each lane's k and its units' choices."""
        arrays, job = self.simulation.told, self.simulation.lanes.job
        units = arrays.max_units
        k = np.minimum(actions[:, 0], arrays.num_k[job] - 1)
        precision = np.minimum(actions[:, 1 : 1 + units], arrays.num_precisions[job][:, None] - 1)
        storage = actions[:, 1 + units :] * arrays.recomputable[job]
        return k, np.where(self._facts.present[job], 2 * precision + storage, 0)

    def encode(self, plans: Plans) -> NDArray[np.int64]:
        """Return the actions that choose plans."""
        return np.concatenate([plans.k[:, None], plans.choices // 2, plans.choices % 2], axis=1)

    def planned(self, margin: float = 0.005) -> NDArray[np.int64]:
        """Return the price solver's action for every lane, for its budget and sequence length as they are now.

        Args:
            margin: share of the budget that is left free.
        """
        lanes, arrays = self.simulation.lanes, self.simulation.told
        batch = self._facts.batch[lanes.job][:, None]
        steps = arrays.accumulation_steps[lanes.job].astype(np.float64)
        noise = self.simulation.known_noise_scale()[:, None]
        adaptive = self._facts.adaptive[lanes.job][:, None]
        worth = steps * efficiency(batch * steps, np.where(np.isnan(noise), batch, noise), batch)
        plans, _ = self.solver.solve(
            lanes.job, lanes.budget * (1 - margin), lanes.length, np.where(adaptive, worth, 1.0)
        )
        return self.encode(plans)

    def _draw(self, count: int) -> Indices:
        return self._draws.integers(0, len(self.jobs), count)

    def _baseline(self, count: int) -> Indices:
        return np.zeros((count, self.simulation.told.max_units), dtype=np.int64)

    def _begin(self, where: Indices) -> Windows:
        """Run the baseline's window, to which all ratios refer, in some lanes, and give them a budget."""
        count, simulation = len(where), self.simulation
        simulation.set_budget(where, np.full(count, np.inf))
        window = simulation.run_some(where, np.zeros(count, dtype=np.int64), self._baseline(count), self.window_steps)
        self._reference.put(where, window)
        low, high = np.log(self._budget_range)
        share = np.exp(self._draws.uniform(low, high, count))
        least = self._least[simulation.lanes.job[where]] * 1.01
        simulation.set_budget(where, np.maximum(share * window.peak_bytes, least))
        self._windows[where] = 0
        self._previous_loss[where] = np.nan
        return window

    def _restart(self, where: Indices) -> dict[str, Array]:
        self.simulation.restart(where, self._draw(len(where)))
        window = self._begin(where)
        k = np.zeros(len(where), dtype=np.int64)
        observation = self._observe(where, k, self._baseline(len(where)), window)
        self._previous_loss[where] = window.loss
        return observation

    def _observe(self, where: Indices, k: Indices, choices: Indices, window: Windows) -> dict[str, Array]:
        """Return the features of some lanes; see :mod:`autotune.gym.observation`."""
        values = self._global(where, k, window)
        table = np.stack([values[name] for name in GLOBAL_FEATURES], axis=1)
        units = self._units(where, choices, window)
        rows = np.empty((*choices.shape, len(UNIT_FEATURES)), dtype=np.float32)
        for number, name in enumerate(UNIT_FEATURES):
            rows[:, :, number] = units[name]
        rows[~self._facts.present[self.simulation.lanes.job[where]]] = 0.0
        return {"global": _bounded(table), "units": _bounded(rows).reshape(len(where), -1)}

    def _global(self, where: Indices, k: Indices, window: Windows) -> dict[str, Floats]:
        simulation, facts, reference = self.simulation, self._facts, self._reference
        job, budget = simulation.lanes.job[where], simulation.lanes.budget[where]
        # The reference itself was held to no budget.
        steps = simulation.told.accumulation_steps[job, k].astype(float)
        budgeted = np.isfinite(budget)
        peak, first = window.peak_bytes, reference.peak[where]
        throughput = window.samples_per_step / window.seconds_per_step
        previous = self._previous_loss[where]
        return {
            "loss": _log(window.loss, reference.loss[where]),
            "loss_trend": np.nan_to_num((window.loss - previous) / np.abs(previous) * 10),
            "gradient_norm": _log(window.norm, reference.norm[where]),
            "noise_scale_known": ~np.isnan(window.noise_scale),
            "noise_scale": _log(window.noise_scale, facts.batch[job]),
            "noise_scale_age": np.log1p(np.nan_to_num(window.noise_age_steps)) / 2,
            "accumulation_steps": np.log2(steps),
            "effective_batches": np.log2(np.where(facts.adaptive[job], steps, 1.0)),
            "throughput": _log(throughput, reference.throughput[where]),
            "peak": _log(peak, first),
            "budgeted": budgeted,
            "budget": np.where(budgeted, budget, 0.0) / first,
            "pressure": np.where(budgeted, peak / budget, 0.0),
            "failed": window.over_budget,
            "skipped": np.zeros(len(where)),
            "learning_rate": _log(window.learning_rate, reference.rate[where]),
            "progress": simulation.progress()[where],
            "num_units": np.log2(1 + simulation.told.num_units[job]) / 2,
        }

    def _units(self, where: Indices, choices: Indices, window: Windows) -> dict[str, Floats]:
        job, facts = self.simulation.lanes.job[where], self._facts
        shape = choices.shape
        present = facts.present[job]
        mean = np.where(present, window.unit_rms, 0.0).sum(axis=1) / present.sum(axis=1)
        known = ~np.isnan(window.unit_signal_to_noise)
        chosen = np.take_along_axis(facts.precisions[job], choices // 2, axis=1)
        return {
            "present": np.ones(shape),
            "position": facts.position[job],
            "recomputable": self.simulation.told.recomputable[job],
            "parameters": facts.parameters[job],
            "gradient_rms": _log(window.unit_rms, np.broadcast_to(mean[:, None], shape)),
            "signal_to_noise_known": known,
            "signal_to_noise": _log(window.unit_signal_to_noise, np.ones(shape)),
            "underflow": window.unit_underflow,
            **{f"is_{precision}": chosen == number for number, precision in enumerate(Precision)},
            "is_recomputed": choices % 2 == 1,
        }

    def _rewards(self, k: Indices, window: Windows) -> NDArray[np.float64]:
        """Return minus the cost of each lane's window; see :mod:`autotune.gym.reward`."""
        lanes, facts, reference, weights = self.simulation.lanes, self._facts, self._reference, self.objective.weights
        batch = facts.batch[lanes.job]
        with np.errstate(invalid="ignore"):
            time = reference.throughput / (window.samples_per_step / window.seconds_per_step)
        steps = self.simulation.told.accumulation_steps[lanes.job, k].astype(np.float64)
        rated = facts.adaptive[lanes.job] & ~np.isnan(window.noise_scale)
        time = np.where(rated, time / efficiency(batch * steps, np.nan_to_num(window.noise_scale), batch), time)
        total = weights.time * time + weights.memory * window.peak_bytes / reference.peak
        whole = weights.time + weights.memory + weights.energy
        excess = np.where(window.over_budget, window.peak_bytes / lanes.budget - 1, 0.0)
        failed = window.over_budget | np.isnan(time)
        if self.objective.gradient_norm is not None:
            failed |= window.norm > self.objective.gradient_norm
        cost = (FAILURE_COST + np.minimum(excess, 1.0)) * whole
        return -np.where(failed, cost, drawn_together(np.nan_to_num(total), whole))


class _JobFacts:
    """What features need to know of jobs, as arrays."""

    def __init__(self, jobs: Sequence[SimulatedJob], max_units: int) -> None:
        names = list(Precision)
        shape = (len(jobs), max_units)
        self.batch = np.array([float(job.profile.batch_size) for job in jobs])
        self.adaptive = np.array([job.profile.batching == "adaptive" for job in jobs])
        self.present, self.position, self.parameters = np.zeros(shape, dtype=bool), np.zeros(shape), np.zeros(shape)
        most = max(len(job.profile.precisions) for job in jobs)
        self.precisions = np.zeros((len(jobs), most), dtype=np.int64)
        for number, job in enumerate(jobs):
            units = job.profile.units
            sizes = np.array([float(unit.num_parameters) for unit in units])
            self.present[number, : len(units)] = True
            self.position[number, : len(units)] = np.arange(len(units)) / max(len(units) - 1, 1)
            self.parameters[number, : len(units)] = sizes * len(units) / sizes.sum() if sizes.sum() else 0.0
            own = [names.index(precision) for precision in job.profile.precisions]
            self.precisions[number] = own + [own[-1]] * (most - len(own))


class _Reference:
    """What each lane's baseline window saw."""

    def __init__(self, loss: Floats, norm: Floats, throughput: Floats, peak: Floats, rate: Floats) -> None:
        self.loss, self.norm, self.throughput, self.peak, self.rate = loss, norm, throughput, peak, rate

    @classmethod
    def empty(cls, count: int) -> _Reference:
        return cls(*(np.ones(count) for _ in range(5)))

    def put(self, where: Indices, window: Windows) -> None:
        self.loss[where], self.norm[where] = window.loss, window.norm
        self.throughput[where] = window.samples_per_step / window.seconds_per_step
        self.peak[where], self.rate[where] = window.peak_bytes, window.learning_rate


def _least_peaks(solver: PriceSolver) -> Floats:
    """Return the smallest peak that the price solver reaches for each job."""
    jobs = np.arange(len(solver.arrays.profiles))
    plans, _ = solver.solve(jobs, np.zeros(len(jobs)))
    return solver.arrays.peak_bytes(plans)


def _log(value: Floats, base: Floats) -> Floats:
    """Return the logarithm of a ratio, NaN for what is unknown."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = np.log(value / base)
    return np.where((base <= 0) | (value < 0), np.nan, logarithm)


def _bounded(values: Floats | Array) -> Array:
    """Return features within their limits, 0 for what is unknown."""
    bounded = np.clip(values, -LIMIT, LIMIT).astype(np.float32)
    bounded[np.isnan(bounded)] = 0.0
    return bounded
