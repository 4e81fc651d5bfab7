"""Measure how much time a policy that adjusts a planner saves over the planner alone; and actions without effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autotune.gym.levers import NEUTRAL, Actions, Features
from autotune.gym.moving_env import MovingEnv


def neutral_actions(lanes: int) -> Actions:
    """Return actions that do not change the planner, shape (lanes, levers)."""
    return np.tile(np.array(NEUTRAL, dtype=np.int64), (lanes, 1))


def evaluate(env: MovingEnv, decide: Callable[[tuple[Features, Features]], Actions], rounds: int) -> list[float]:
    """Return the time saved over the planner alone, in percent of its run, for each lane of some rounds."""
    won: list[float] = []
    for _ in range(rounds):
        observation, done = env.reset(), False
        total = np.zeros(env.lanes)
        while not done:
            observation, rewards, done = env.step(decide(observation))
            total += rewards
        won += total.tolist()
    return won


def summary(won: Sequence[float]) -> dict[str, float]:
    """Return mean, standard error and quantiles of the time saved, in percent."""
    values = np.asarray(won)
    return {
        "mean": float(values.mean()),
        "error": float(values.std(ddof=1) / np.sqrt(len(values))),
        "p5": float(np.quantile(values, 0.05)),
        "median": float(np.median(values)),
        "p95": float(np.quantile(values, 0.95)),
    }
