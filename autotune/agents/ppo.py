"""Train the policy network with stable-baselines3's PPO.

The only file that knows stable-baselines3; what it trains leaves it as a bare network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from autotune.agents.network import Layout, PolicyNetwork
from autotune.engines.metered_engine import StepsSpentError
from autotune.gym.env import TuningEnv
from autotune.gym.observation import Array
from autotune.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hold PPO's settings for tuning one job on its real engine.

    Attributes:
        windows: windows at most, those answered from memory included.
        rollout: windows between two updates.
        epochs: passes over a rollout.
        learning_rate: Adam's.
        entropy: weight of the entropy bonus.
        clip: PPO's clip range.
        discount: of future rewards; 0, since a static plan's window has no effect on the next one's.
        start_confidence: how likely each choice of the plan that training starts from is at first.
        width: of the network.
    """

    windows: int = 512
    rollout: int = 8
    epochs: int = 10
    learning_rate: float = 3e-3
    entropy: float = 0.01
    clip: float = 0.2
    discount: float = 0.0
    start_confidence: float = 0.85
    width: int = 64


@dataclass(frozen=True, slots=True)
class Trained:
    """Hold a trained network and how many windows it saw."""

    network: PolicyNetwork
    windows: int


def train(
    env: TuningEnv,
    recipe: Recipe,
    *,
    seed: int,
    start: Plan | None = None,
    on_window: Callable[[], None] | None = None,
) -> Trained:
    """Train a network on an environment until its windows or its real steps are spent.

    Args:
        env: the environment.
        recipe: the settings.
        seed: of the network and of the sampled actions.
        start: a plan to begin near, instead of an undecided network.
        on_window: called after every window.
    """
    model = MaskablePPO(
        _NetworkPolicy,
        env,
        seed=seed,
        n_steps=recipe.rollout,
        batch_size=recipe.rollout,
        n_epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        ent_coef=recipe.entropy,
        clip_range=recipe.clip,
        gamma=recipe.discount,
        gae_lambda=1.0,
        device="cpu",
        policy_kwargs={
            "features_extractor_class": _NetworkFeatures,
            "features_extractor_kwargs": {"layout": Layout.of(env.plan_space), "width": recipe.width},
            "net_arch": [],
            "ortho_init": False,
        },
    )
    features = model.policy.features_extractor
    assert isinstance(features, _NetworkFeatures)
    arrays, _ = env.reset(seed=seed)
    if start is not None:
        _clone(features, arrays, env.plan_space.encode(start), recipe.start_confidence)
    counter = _Counter(on_window)
    # The budget of real steps is what usually ends training; the network stands as the last update left it.
    with contextlib.suppress(StepsSpentError):
        model.learn(recipe.windows, callback=counter)
    return Trained(features.network.eval(), counter.windows)


class _Counter(BaseCallback):
    def __init__(self, on_window: Callable[[], None] | None) -> None:
        super().__init__()
        self.windows = 0
        self._on_window = on_window

    def _on_step(self) -> bool:
        self.windows += 1
        if self._on_window is not None:
            self._on_window()
        return True


class _NetworkFeatures(BaseFeaturesExtractor):
    """Let the whole network be stable-baselines3's feature extractor: logits and value side by side."""

    def __init__(self, observation_space: spaces.Dict, layout: Layout, width: int) -> None:
        super().__init__(observation_space, features_dim=sum(layout.sizes) + 1)
        self.layout = layout
        self.network = PolicyNetwork(width)

    def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return (batch, logits + value)."""
        logits, value = self.network(observations["global"], observations["units"], self.layout)
        return torch.cat([logits, value], dim=-1)


class _NetworkPolicy(MaskableMultiInputActorCriticPolicy):
    """Take action logits and value from the feature extractor as they are."""

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        logits = self.features_dim - 1
        self.action_net = _Columns(0, logits)
        self.value_net = _Columns(logits, logits + 1)  # type: ignore[assignment]
        self.optimizer = torch.optim.Adam(self.parameters(), lr=lr_schedule(1), eps=1e-5)


class _Columns(nn.Module):
    def __init__(self, first: int, end: int) -> None:
        super().__init__()
        self._columns = slice(first, end)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the columns of (batch, all columns)."""
        return values[:, self._columns]


def _clone(features: _NetworkFeatures, arrays: dict[str, Array], choice: Sequence[int], confidence: float) -> None:
    """Fit the network to prefer one plan, each choice with a stated probability."""
    targets = []
    for size, index in zip(features.layout.sizes, choice, strict=True):
        target = torch.full((size,), (1 - confidence) / max(size - 1, 1))
        target[index] = confidence if size > 1 else 1.0
        targets.append(target)
    inputs = [torch.from_numpy(arrays[key]).unsqueeze(0) for key in ("global", "units")]
    optimizer = torch.optim.Adam(features.network.parameters(), lr=1e-2)
    for _ in range(200):
        logits, _ = features.network(*inputs, features.layout)
        parts = logits[0].split(features.layout.sizes)
        loss = torch.stack(
            [nn.functional.cross_entropy(part, target) for part, target in zip(parts, targets, strict=True)]
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
