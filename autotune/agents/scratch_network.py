"""The policy network: one encoder shared by all units, so that it fits a model of any depth.

Decisions do not need stable-baselines3. ``agents.ppo`` trains the network and ``agents.policy_folder`` stores it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn

from autotune.choices import DEFAULT_STORAGES, USUAL_PRECISIONS
from autotune.gym.observation import GLOBAL_FEATURES, LIMIT, UNIT_FEATURES, Observation
from autotune.plan import Plan, PlanSpace, Precision, Storage

_FREQUENCIES = 4
_POSITION = list(UNIT_FEATURES).index("position")
_PRESENT = list(UNIT_FEATURES).index("present")
# What a storage's logit is computed from, so that a network does not depend on how many storages there are: 1, 0 for
# ``save`` and 0, 1 for ``recompute``.
_STORAGE_FACTS = [[one.kept_frac, one.extra_forwards] for one in Storage]

# The logit of each precision. One that is only offered if asked for has that of the precision with its dtype.
_PRECISION_LOGITS = [[usual.dtype for usual in USUAL_PRECISIONS].index(one.dtype) for one in Precision]


@dataclass(frozen=True, slots=True)
class Layout:
    """The logits of an action space, in the order of ``PlanSpace.sizes``.

    Attributes:
        accumulation_choices: allowed k.
        precisions: allowed precisions, as indices into ``Precision``.
        num_units: units of the model; further rows of an observation are padding.
        recomputable: rows of the units whose storage can be chosen.
        storages: allowed storages, as indices into ``Storage``.
    """

    accumulation_choices: tuple[int, ...]
    precisions: tuple[int, ...]
    num_units: int
    recomputable: tuple[int, ...]
    storages: tuple[int, ...] = tuple(list(Storage).index(storage) for storage in DEFAULT_STORAGES)

    @classmethod
    def of(cls, space: PlanSpace) -> Layout:
        """Return the layout of a space."""
        return cls(
            accumulation_choices=space.accumulation_choices,
            precisions=tuple(list(Precision).index(precision) for precision in space.precisions),
            num_units=len(space.units),
            recomputable=tuple(index for index, unit in enumerate(space.units) if unit.recomputable),
            storages=tuple(list(Storage).index(storage) for storage in space.storages),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of choices of each coordinate."""
        return (
            len(self.accumulation_choices),
            *(len(self.precisions) for _ in range(self.num_units)),
            *(len(self.storages) for _ in self.recomputable),
        )


class PolicyNetwork(nn.Module):
    """Maps features to the logits of all choices and to a value.

    All units share one encoder. The mean and the maximum of the encoded units and the global features form a context,
    which is an input to every unit's choices. Each k is scored separately, and each storage by its facts, so any sets
    of them are possible.

    Args:
        width: width of every hidden layer.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.unit_encoder = _two_layers(len(UNIT_FEATURES) + 2 * _FREQUENCIES, width)
        self.context_encoder = _two_layers(len(GLOBAL_FEATURES) + 2 * width, width)
        self.unit_decoder = nn.Sequential(linear(2 * width, width), nn.Tanh())
        self.precision_head = linear(width, len(USUAL_PRECISIONS))
        self.storage_head = linear(width, len(_STORAGE_FACTS[0]))
        self.accumulation_encoder = nn.Sequential(linear(width + 2, width), nn.Tanh())
        self.accumulation_head = linear(width, 1)
        self.value_head = linear(width, 1)
        for head in (self.precision_head, self.storage_head, self.accumulation_head, self.value_head):
            # A new network is nearly undecided: all plans are about equally likely.
            draw_slightly(head.weight)
            nn.init.zeros_(head.bias)

    def forward(
        self, global_features: torch.Tensor, unit_features: torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and values.

        Args:
            global_features: (batch, len(GLOBAL_FEATURES)).
            unit_features: (batch, rows * len(UNIT_FEATURES)), rows >= ``layout.num_units``.
            layout: the choices that get logits.

        Returns:
            Logits (batch, sum(layout.sizes)) and values (batch, 1).
        """
        batch = global_features.shape[0]
        units = unit_features.view(batch, -1, len(UNIT_FEATURES))[:, : layout.num_units]
        encoded = self.unit_encoder(torch.cat([units, _waves(units[..., _POSITION])], dim=-1))
        present = units[..., _PRESENT].unsqueeze(-1)
        pooled = torch.cat(
            [
                (encoded * present).sum(1) / present.sum(1).clamp(min=1),
                encoded.masked_fill(present == 0, -1.0).amax(1),
            ],
            dim=-1,
        )
        context = self.context_encoder(torch.cat([global_features, pooled], dim=-1))
        decoded = self.unit_decoder(torch.cat([encoded, context.unsqueeze(1).expand(-1, encoded.shape[1], -1)], dim=-1))
        logits = torch.cat(
            [
                self._accumulation_logits(context, layout),
                self.precision_head(decoded)[..., [_PRECISION_LOGITS[index] for index in layout.precisions]].flatten(1),
                self._storage_logits(decoded[:, list(layout.recomputable)], layout).flatten(1),
            ],
            dim=-1,
        )
        # Failed windows cause large value errors, which must not change the features of the choices.
        return logits, self.value_head(context.detach())

    def _storage_logits(self, decoded: torch.Tensor, layout: Layout) -> torch.Tensor:
        facts = [_STORAGE_FACTS[index] for index in layout.storages]
        described = torch.tensor(facts, dtype=decoded.dtype, device=decoded.device)
        return cast("torch.Tensor", self.storage_head(decoded) @ described.T)

    def _accumulation_logits(self, context: torch.Tensor, layout: Layout) -> torch.Tensor:
        described = [[math.log2(k) / 4, 1 / k] for k in layout.accumulation_choices]
        choices = torch.tensor(described, dtype=context.dtype, device=context.device)
        rows = context.shape[0]
        pairs = torch.cat(
            [
                context.unsqueeze(1).expand(-1, len(choices), -1),
                choices.unsqueeze(0).expand(rows, -1, -1),
            ],
            dim=-1,
        )
        return cast("torch.Tensor", self.accumulation_head(self.accumulation_encoder(pairs)).squeeze(-1))


class LearnedPolicy:
    """A policy that takes the most likely choices of a network.

    Args:
        network: the network.
        name: name of the policy.
    """

    def __init__(self, network: PolicyNetwork, name: str = "ppo") -> None:
        self.name = name
        self.network = network.eval()

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the most likely plan."""
        return observation.space.decode(most_likely(self.network, observation.arrays(), Layout.of(observation.space)))

    def reset(self) -> None:
        """Do nothing: the network has no memory."""


def most_likely(network: PolicyNetwork, arrays: dict[str, np.ndarray], layout: Layout) -> list[int]:
    """Return the index of the most likely choice of each coordinate.

    Args:
        network: the network.
        arrays: ``global`` and ``units``, as returned by ``Observation.arrays``.
        layout: the choices.
    """
    with torch.no_grad():
        logits, _ = network(
            torch.from_numpy(arrays["global"]).unsqueeze(0),
            torch.from_numpy(arrays["units"]).unsqueeze(0),
            layout,
        )
    return [int(part.argmax()) for part in logits[0].split(layout.sizes)]


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer in fp32, regardless of the default dtype."""
    return nn.Linear(inputs, outputs, dtype=torch.float32)


def draw_slightly(weight: torch.Tensor) -> None:
    """Draw small weights; on the meta device there is nothing to draw, and torch would import libraries for seconds."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=0.01)


def _two_layers(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(linear(inputs, width), nn.Tanh(), linear(width, width), nn.Tanh())


def _waves(position: torch.Tensor) -> torch.Tensor:
    """Return sines and cosines of a position in 0..1, which distinguish neighbouring units."""
    angles = (
        position.clamp(-LIMIT, LIMIT).unsqueeze(-1)
        * math.pi
        * 2.0 ** torch.arange(_FREQUENCIES, dtype=position.dtype, device=position.device)
    )
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
