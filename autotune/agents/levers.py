"""Say how the network that leans on a planner is trained, and measure what it wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.gym.moving_env import MovingEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRecipe:
    """Hold PPO's settings for the levers.

    Attributes:
        decisions: windows to train on.
        lanes: runs at once.
        epochs: passes over a rollout, which is one whole run of every lane.
        batch: decisions in a gradient step.
        learning_rate: Adam's, falling linearly to 0.
        entropy: weight of the entropy bonus.
        clip: PPO's clip range.
        discount: of rewards per window.
        trace: lambda of generalised advantage estimation.
        width: of the network.
    """

    decisions: int = 1_000_000
    lanes: int = 256
    epochs: int = 6
    batch: int = 2048
    learning_rate: float = 1e-3
    entropy: float = 2e-3
    clip: float = 0.2
    discount: float = 0.95
    trace: float = 0.9
    width: int = 64


def evaluate(env: MovingEnv, decide: Callable[[NDArray[np.float32]], NDArray[np.int64]], rounds: int) -> list[float]:
    """Return the time won over the planner alone, in percent of its run, of every lane of some rounds."""
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
    """Return mean, standard error and quantiles of the time won, in percent."""
    values = np.asarray(won)
    return {
        "mean": float(values.mean()),
        "error": float(values.std(ddof=1) / np.sqrt(len(values))),
        "p5": float(np.quantile(values, 0.05)),
        "median": float(np.median(values)),
        "p95": float(np.quantile(values, 0.95)),
    }
