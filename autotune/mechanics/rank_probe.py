"""Observe the gradients of a step that several ranks make together, whichever library spreads them over the ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from autotune.mechanics.gradient_stats import GradientProbe, ProbedStep, tiny_counts
from autotune.mechanics.stepping import Update

# The index of a parameter, and this rank's part of its gradient.
Shard = tuple[int, torch.Tensor]


class RankUpdate(Update, ABC):
    """Updates of which every rank makes its part.

    A micro-batch's weight is its weight in the global step times the number of ranks, since the ranks' gradients are
    averaged.

    Attributes:
        copies: number of ranks that have the same part of the gradient.
        sharing: number of ranks, one after another, that compute the same samples.
    """

    copies: int
    sharing = 1

    @abstractmethod
    def shards(self) -> list[Shard]:
        """Return this rank's part of the reduced gradient: pieces, flat or whole, with their parameters' indices."""

    def repeats(self, parameter: nn.Parameter) -> int:
        """Return how many of the :attr:`sharing` ranks have this rank's part of a parameter's gradient."""
        return self.sharing

    @abstractmethod
    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's weights, fp32 masters and buffers by name."""

    @abstractmethod
    def resident(self, model: nn.Module, batches: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that are alive on this rank before a step begins."""

    @abstractmethod
    def settle(self) -> None:
        """Release gathered weights, so that none is older than its shard."""

    def whole_shape(self, parameter: nn.Parameter) -> Sequence[int]:
        """Return the shape of a parameter of which this rank may have only a part."""
        return parameter.shape


class RankProbe(GradientProbe):
    """Probe of one optimizer step whose micro-batches run on several ranks.

    Args:
        update: the update of the step.
        bearing: for every micro-batch of every rank, in order of ranks, whether it has loss-bearing items.
    """

    def __init__(self, update: RankUpdate, bearing: Sequence[bool]) -> None:
        super().__init__(update.parameters)
        self._update = update
        self._bearing = bearing

    def read(self) -> ProbedStep:
        """Return the squared norms of the step on all ranks: one collective for micro-batches, one for the rest."""
        shards, copies, world = self._update.shards(), self._update.copies, distributed.get_world_size()
        device = self._parameters[0].device
        whole = torch.zeros(3, len(self._parameters), dtype=torch.float32, device=device)
        if shards:
            where = torch.tensor([index for index, _ in shards], device=device)
            pieces = [gradient for _, gradient in shards]
            squares = torch.stack([norm.float() for norm in torch._foreach_norm(pieces)]).square()
            tiny, present = tiny_counts(pieces)
            whole.index_add_(1, where, torch.stack([squares, tiny, present]))
        repeats = torch.tensor([float(self._update.repeats(one)) for one in self._parameters], device=device)
        whole /= repeats
        if copies < world:
            distributed.all_reduce(whole)
            whole /= copies
        zero = torch.zeros((), dtype=torch.float32, device=device)
        own = torch.stack([torch.stack(row) for row in self._rows(range(len(self._parameters)), zero)]).square()
        micro = [
            row for row, bears in zip(self.micro_batches(own / repeats).tolist(), self._bearing, strict=True) if bears
        ]
        squares, tiny, present = whole.tolist()
        return ProbedStep(
            parameters=tuple(self._parameters),
            sizes=tuple(math.prod(self._update.whole_shape(one)) for one in self._parameters),
            micro=tuple(tuple(row) for row in micro),
            whole=tuple(squares),
            tiny=tuple(tiny),
            present=tuple(present),
        )

    def micro_batches(self, own: torch.Tensor) -> torch.Tensor:
        """Return the squared norms of all micro-batches, by parameter, in order of the ranks that compute them.

        Args:
            own: those of this rank's micro-batches, shape (micro-batches, parameters); of ranks that compute the same
                samples, they are summed.
        """
        gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, own)
        ranks: torch.Tensor = torch.stack(gathered).unflatten(0, (-1, self._update.sharing))
        return ranks.sum(1).flatten(0, 1)
