"""Training of the policy networks with stable-baselines3's PPO.

Only this module imports stable-baselines3; it returns plain networks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv
from torch import nn

from autotune.agents.recipe import LeverRecipe
from autotune.agents.saved_training import MOMENTS, SavedTraining
from autotune.agents.scratch_network import Layout, PolicyNetwork
from autotune.agents.shipped_network import LeverNetwork
from autotune.engines.budgeted_engine import StepsSpentError
from autotune.gym.job_env import TuningEnv
from autotune.gym.lever_env import LeverEnv
from autotune.gym.levers import LIMIT, RUN_FEATURES, SIZES, UNIT_FEATURES, Features
from autotune.gym.moving_env import MovingEnv
from autotune.gym.observation import Array
from autotune.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """PPO's settings for tuning one job on its real engine.

    Attributes:
        windows: largest number of windows, including repeated plans, which are not measured again.
        rollout: windows between two updates.
        epochs: passes over a rollout.
        learning_rate: learning rate of Adam.
        entropy: weight of the entropy bonus.
        clip: PPO's clip range.
        discount: discount of future rewards; 0, because a window of a static plan does not affect the next one.
        start_confidence: initial probability of each choice of the start plan.
        width: width of the network.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """PPO's settings for continued training on one real job.

    Attributes:
        windows: windows to train on.
        rollout: windows between two updates.
        epochs: passes over a rollout.
        learning_rate: learning rate of Adam.
        clip: PPO's clip range.
        discount: discount of future rewards.
    """

    windows: int = 96
    rollout: int = 16
    epochs: int = 4
    learning_rate: float = 1e-4
    clip: float = 0.2
    discount: float = 0.9


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained network and the number of windows it was trained on."""

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
        seed: random seed for the network and the sampled actions.
        start: the plan that the network initially prefers; ``None`` for no preference.
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
    model.set_logger(_silent())
    # Training usually ends when the real steps are spent; the network then has the weights of the last update.
    with contextlib.suppress(StepsSpentError):
        model.learn(recipe.windows, callback=counter)
    return Trained(features.network.eval(), counter.windows)


def _silent() -> Logger:
    """Return a logger that writes nothing; the default one leaves a temporary folder behind."""
    return Logger(folder=None, output_formats=[])


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
    """The policy network as stable-baselines3's feature extractor; its features are all logits, then the value."""

    def __init__(self, observation_space: spaces.Dict, layout: Layout, width: int) -> None:
        super().__init__(observation_space, features_dim=sum(layout.sizes) + 1)
        self.layout = layout
        self.network = PolicyNetwork(width)

    def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return logits and value, shape (batch, features_dim)."""
        logits, value = self.network(observations["global"], observations["units"], self.layout)
        return torch.cat([logits, value], dim=-1)


class _LeverFeatures(BaseFeaturesExtractor):
    """The lever network as stable-baselines3's feature extractor; its features are all logits, then the value."""

    def __init__(self, observation_space: spaces.Box, width: int) -> None:
        super().__init__(observation_space, features_dim=sum(SIZES) + 1)
        self.network = LeverNetwork(width)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Return logits and value, shape (batch, features_dim)."""
        run, units = observations.split([len(RUN_FEATURES), observations.shape[1] - len(RUN_FEATURES)], dim=1)
        return torch.cat(self.network(run, units.unflatten(1, (-1, len(UNIT_FEATURES)))), dim=-1)


def _take_heads_from_features(
    policy: ActorCriticPolicy | MaskableMultiInputActorCriticPolicy, learning_rate: float
) -> None:
    """Replace a policy's heads: the action logits and the value are columns of the features."""
    logits = policy.features_dim - 1
    policy.action_net = _Columns(0, logits)
    policy.value_net = _Columns(logits, logits + 1)  # type: ignore[assignment]
    policy.optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate, eps=1e-5)


class _NetworkPolicy(MaskableMultiInputActorCriticPolicy):
    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        _take_heads_from_features(self, lr_schedule(1))


class _LeverPolicy(ActorCriticPolicy):
    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        _take_heads_from_features(self, lr_schedule(1))


class _Columns(nn.Module):
    def __init__(self, first: int, end: int) -> None:
        super().__init__()
        self._columns = slice(first, end)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the columns, shape (batch, end - first)."""
        return values[:, self._columns]


def _clone(features: _NetworkFeatures, arrays: dict[str, Array], choice: Sequence[int], confidence: float) -> None:
    """Train the network to prefer one plan, each of its choices with the given probability."""
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


def train_levers(
    env: MovingEnv,
    recipe: LeverRecipe,
    *,
    seed: int,
    saved: SavedTraining | None = None,
    on_save: Callable[[SavedTraining], None] | None = None,
    on_rollout: Callable[[int, float], None] | None = None,
) -> LeverNetwork:
    """Train a network that sets a planner's levers.

    Args:
        env: runs under moving conditions; a rollout is one whole run of each lane.
        recipe: the settings.
        seed: random seed for the network and the sampled actions.
        saved: an interrupted training to continue; the result equals that of an uninterrupted one.
        on_save: called before every rollout with the state of the training, which is valid only during the call.
        on_rollout: called with the number of decisions so far and the mean reward of the last runs, in percent.
    """
    shown = _LeverVecEnv(env)
    with warnings.catch_warnings():
        # The last gradient step of an epoch may use fewer decisions than the others.
        warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
        model, network = _lever_model(
            shown,
            recipe.width,
            seed=seed,
            n_steps=env.runs.windows,
            batch_size=min(recipe.batch, env.lanes * env.runs.windows),
            n_epochs=recipe.epochs,
            learning_rate=lambda left: recipe.learning_rate * max(left, 0.0),
            ent_coef=recipe.entropy,
            clip_range=recipe.clip,
            gamma=recipe.discount,
            gae_lambda=recipe.trace,
        )
    model.learn(recipe.decisions, callback=_Rollouts(shown, network, saved, on_save, on_rollout))
    return network.eval()


def fine_tune(
    env: LeverEnv,
    network: LeverNetwork,
    recipe: FineTuning,
    *,
    seed: int,
    on_window: Callable[[], None] | None = None,
) -> LeverNetwork:
    """Continue training a network on one real job, and return a new network.

    Args:
        env: the job.
        network: the network to begin with; it is not changed.
        recipe: the settings.
        seed: random seed for the sampled actions.
        on_window: called after every window.
    """
    model, trained = _lever_model(
        FlattenObservation(env),
        network.width,
        seed=seed,
        n_steps=recipe.rollout,
        batch_size=recipe.rollout,
        n_epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        ent_coef=0.0,
        clip_range=recipe.clip,
        gamma=recipe.discount,
    )
    trained.load_state_dict(network.state_dict())
    model.learn(recipe.windows, callback=_Counter(on_window))
    return trained.eval()


def _lever_model(env: Any, width: int, **settings: Any) -> tuple[PPO, LeverNetwork]:
    """Return a PPO model with a new lever network, and that network.

    Args:
        env: an environment that stable-baselines3 accepts.
        width: width of the network.
        settings: PPO's settings.
    """
    features = {"features_extractor_class": _LeverFeatures, "features_extractor_kwargs": {"width": width}}
    model = PPO(
        _LeverPolicy, env, device="cpu", policy_kwargs={**features, "net_arch": [], "ortho_init": False}, **settings
    )
    model.set_logger(_silent())
    extractor = model.policy.features_extractor
    assert isinstance(extractor, _LeverFeatures)
    return model, extractor.network


class _Rollouts(BaseCallback):
    """Reports every rollout, passes on the training state before each one, and restores a saved state."""

    def __init__(
        self,
        env: _LeverVecEnv,
        network: LeverNetwork,
        saved: SavedTraining | None,
        on_save: Callable[[SavedTraining], None] | None,
        on_rollout: Callable[[int, float], None] | None,
    ) -> None:
        super().__init__()
        self._env = env
        self._network = network
        self._saved = saved
        self._on_save = on_save
        self._on_rollout = on_rollout

    def _on_training_start(self) -> None:
        saved = self._saved
        if saved is None:
            return
        with torch.no_grad():
            for name, parameter in self._parameters().items():
                parameter.copy_(saved.weights[name])
        optimizer = self.model.policy.optimizer
        state = {
            index: {moment: values[name] for moment, values in saved.moments.items()}
            for index, name in enumerate(self._parameters())
            if saved.moments
        }
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        self.model.num_timesteps = saved.decisions
        self.model._last_obs = self._env.take_up(dict(saved.courses))
        torch.set_rng_state(saved.torch_state)
        np.random.set_state(saved.numpy_state)  # noqa: NPY002

    def _on_rollout_start(self) -> None:
        if self._on_save is None:
            return
        parameters, state = self._parameters(), self.model.policy.optimizer.state
        moments = {
            moment: {name: state[parameter][moment] for name, parameter in parameters.items()}
            for moment in MOMENTS
            if state
        }
        self._on_save(
            SavedTraining(
                decisions=self.model.num_timesteps,
                weights={name: parameter.detach() for name, parameter in parameters.items()},
                moments=moments,
                courses=self._env.drawn_from,
                torch_state=torch.get_rng_state(),
                numpy_state=np.random.get_state(legacy=True),  # type: ignore[arg-type]  # noqa: NPY002
            )
        )

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the network's parameters by name, in the optimizer's order."""
        names = {parameter: name for name, parameter in self._network.named_parameters()}
        (group,) = self.model.policy.optimizer.param_groups
        assert len(group["params"]) == len(names)
        return {names[parameter]: parameter for parameter in group["params"]}

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if self._on_rollout is not None:
            self._on_rollout(self.num_timesteps, float(self._env.mean_reward))


class _LeverVecEnv(VecEnv):
    """A :class:`MovingEnv` as a stable-baselines3 vector environment."""

    def __init__(self, env: MovingEnv) -> None:
        self._env = env
        self._actions = np.zeros((env.lanes, len(SIZES)), dtype=np.int64)
        # State of the generator before it drew the current courses, and the sum of their rewards so far.
        self.drawn_from = env.generator_state
        self._sum = self.mean_reward = 0.0
        numbers = _flat(env.reset()).shape[1]
        super().__init__(
            env.lanes,
            spaces.Box(-LIMIT, LIMIT, shape=(numbers,), dtype=np.float32),
            spaces.MultiDiscrete(np.array(SIZES, dtype=np.int64)),
        )

    def reset(self) -> Any:
        self.drawn_from = self._env.generator_state
        return _flat(self._env.reset())

    def take_up(self, drawn_from: dict[str, Any]) -> Any:
        """Start the courses that a saved training would have run next."""
        self._env.generator_state = drawn_from
        return self.reset()

    def step_async(self, actions: Any) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        features, rewards, ended = self._env.step(self._actions)
        self._sum += float(rewards.mean())
        observation = _flat(features)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if ended:
            infos = [{"terminal_observation": row} for row in observation]
            self.mean_reward, self._sum = self._sum, 0.0
            observation = self.reset()
        return observation, self._relative(rewards), np.full(self.num_envs, ended), infos

    def _relative(self, rewards: Any) -> Any:
        """Return rewards minus the mean reward of the other lanes on the same course, if there are any."""
        clones = self._env.clones
        if clones < 2:
            return rewards
        grouped = rewards.reshape(-1, clones)
        others = (grouped.sum(axis=1, keepdims=True) - grouped) / (clones - 1)
        return (grouped - others).reshape(-1)

    def close(self) -> None:
        """Do nothing; nothing is open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self._env, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("a moving environment's lanes share their attributes")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("a moving environment's lanes share their methods")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def _flat(features: tuple[Features, Features]) -> Features:
    run, units = features
    return np.concatenate([run, units.reshape(len(units), -1)], axis=1)
