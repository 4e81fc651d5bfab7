"""Be the network that leans on a planner: a small perceptron from what is seen of a run to the planner's levers.

Untrained, it prefers every lever's middle, so that its most likely action is the planner's own.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from autotune.gym.moving_env import FEATURES, NEUTRAL, SIZES

# Logit of the neutral choice over all others before training.
_CONFIDENCE = 2.0


class LeverNetwork(nn.Module):
    """Map features to logits of every lever's choices, and to a value.

    Args:
        width: of the hidden layers.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.trunk = _perceptron(width)
        self.critic = _perceptron(width)
        self.levers = nn.Linear(width, sum(SIZES))
        self.value = nn.Linear(width, 1)
        nn.init.normal_(self.levers.weight, std=0.01)
        nn.init.zeros_(self.levers.bias)
        with torch.no_grad():
            first = 0
            for size, neutral in zip(SIZES, NEUTRAL, strict=True):
                self.levers.bias[first + neutral] = _CONFIDENCE
                first += size

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, shape (n, sum of choices), and values, shape (n, 1), of features, shape (n, features)."""
        return self.levers(self.trunk(features)), self.value(self.critic(features))

    def most_likely(self, features: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the most likely choice of each lever, shape (n, levers), for features, shape (n, features)."""
        with torch.no_grad():
            logits, _ = self(torch.from_numpy(features))
        parts = [part.argmax(dim=1) for part in logits.split(SIZES, dim=1)]
        return cast("NDArray[np.int64]", torch.stack(parts, dim=1).numpy())


def _perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(len(FEATURES), width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
