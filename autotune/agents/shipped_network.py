"""The network of the shipped policy, which maps features of a run and its units to a planner's levers.

All units share one encoder and are pooled, so that the network fits a model of any depth. Before training it prefers
neutral levers, so that the planner acts unchanged.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from autotune.agents.scratch_network import draw_slightly, linear
from autotune.gym.levers import NEUTRAL, RUN_FEATURES, SIZES, UNIT_FEATURES, Actions, Features

Weights = NDArray[np.float32]

# Logit of the neutral choice before training; all others have logit 0.
_CONFIDENCE = 2.0
_PRESENT = UNIT_FEATURES.index("present")


class LeverNetwork(nn.Module):
    """Maps features to the logits of every lever's choices and to a value.

    Args:
        width: width of the hidden layers.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.actor = _Trunk(width)
        self.critic = _Trunk(width)
        self.levers = linear(width, sum(SIZES))
        self.value = linear(width, 1)
        draw_slightly(self.levers.weight)
        nn.init.zeros_(self.levers.bias)
        with torch.no_grad():
            first = 0
            for size, neutral in zip(SIZES, NEUTRAL, strict=True):
                self.levers.bias[first + neutral] = _CONFIDENCE
                first += size

    def forward(self, run: torch.Tensor, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and values.

        Args:
            run: shape (n, len(RUN_FEATURES)).
            units: shape (n, units, len(UNIT_FEATURES)), any number of units; padding is zeros.

        Returns:
            Logits, shape (n, sum(SIZES)), and values, shape (n, 1).
        """
        return self.levers(self.actor(run, units)), self.value(self.critic(run, units))

    def most_likely(self, features: tuple[Features, Features]) -> Actions:
        """Return the most likely choice of each lever, shape (n, levers)."""
        with torch.inference_mode():
            logits = self.levers(self.actor(*(torch.from_numpy(part) for part in features)))
        parts = [part.argmax(dim=1) for part in logits.split(SIZES, dim=1)]
        return cast("Actions", torch.stack(parts, dim=1).numpy().astype(np.int64))


class BareNetwork:
    """The actor of a network in NumPy, which decides in a third of the time that torch modules take.

    Args:
        network: the network whose current weights are copied.
    """

    def __init__(self, network: LeverNetwork) -> None:
        def layers(module: nn.Module) -> list[tuple[Weights, Weights]]:
            linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
            return [
                (part.weight.detach().cpu().numpy().T.copy(), part.bias.detach().cpu().numpy().copy())
                for part in linear
            ]

        self._unit, self._run = layers(network.actor.unit), layers(network.actor.run)
        ((self._weight, self._bias),) = layers(network.levers)
        self._ends = np.cumsum((0, *SIZES))

    def logits(self, features: tuple[Features, Features]) -> Weights:
        """Return the logits of :class:`LeverNetwork`, shape (n, sum(SIZES))."""
        run, units = features
        present = units[..., _PRESENT : _PRESENT + 1]
        encoded = _through(self._unit, units)
        mean = (encoded * present).sum(axis=1) / np.maximum(present.sum(axis=1), 1)
        largest = np.where(present > 0, encoded, np.float32(-1.0)).max(axis=1)
        return np.asarray(_through(self._run, np.concatenate([run, mean, largest], axis=1)) @ self._weight + self._bias)

    def most_likely(self, features: tuple[Features, Features]) -> Actions:
        """Return the most likely choice of each lever, shape (n, levers).

        Raises:
            FloatingPointError: if a logit is not a finite number.
        """
        logits = self.logits(features)
        if not np.isfinite(logits).all():
            raise FloatingPointError("a logit is not finite")
        return self._highest(logits)

    def drawn(self, features: tuple[Features, Features], generator: np.random.Generator) -> Actions:
        """Return a choice of each lever, drawn with the network's probabilities, shape (n, levers)."""
        logits = self.logits(features)
        return self._highest(logits + generator.gumbel(size=logits.shape))

    def _highest(self, values: NDArray[Any]) -> Actions:
        parts = [values[:, low:high].argmax(axis=1) for low, high in pairwise(self._ends)]
        return np.stack(parts, axis=1)


def _through(layers: list[tuple[Weights, Weights]], values: Weights) -> Weights:
    for weight, bias in layers:
        values = np.tanh(values @ weight + bias)
    return values


class _Trunk(nn.Module):
    """Encodes units, pools them, and encodes them together with the run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.unit = nn.Sequential(linear(len(UNIT_FEATURES), half), nn.Tanh(), linear(half, half), nn.Tanh())
        self.run = nn.Sequential(
            linear(len(RUN_FEATURES) + 2 * half, width), nn.Tanh(), linear(width, width), nn.Tanh()
        )

    def forward(self, run: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        """Return the encoded runs, shape (n, width)."""
        present = units[..., _PRESENT : _PRESENT + 1]
        encoded = self.unit(units)
        mean = (encoded * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
        largest = torch.where(present > 0, encoded, -1.0).amax(dim=1)
        return cast("torch.Tensor", self.run(torch.cat([run, mean, largest], dim=1)))
