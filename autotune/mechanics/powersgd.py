"""Average gradients between replicas as matrices of low rank (PowerSGD, Vogels et al. 2019, arXiv:1905.13727).

A gradient M of shape (n, m) is sent as P of shape (n, rank) and Q of shape (m, rank). What their product leaves out
is added to the next gradient (error feedback), and Q is where the next step begins (warm start). Vectors, and matrices
that would not shrink to half, are sent whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

# Smallest ratio of a gradient's entries to those of P and Q, as in torch's hook.
_LEAST_COMPRESSION = 2
_SEED = 0


class LowRankAverage:
    """Average of gradients between replicas, whose large matrices are sent as two of low rank.

    Args:
        rank: columns of P and Q.
        group: the process group of the replicas; ``None`` for all ranks.
    """

    def __init__(self, rank: int, group: distributed.ProcessGroup | None = None) -> None:
        self._rank = rank
        self._group = group
        # By place of the parameter, in fp32: what has not been sent yet, and Q.
        self._errors: dict[int, torch.Tensor] = {}
        self._factors: dict[int, torch.Tensor] = {}

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace each gradient by its average, in place; two collectives.

        If a gradient is not finite on any replica, all gradients become NaN, and what is kept for the next step stays.

        Args:
            gradients: this rank's gradient of each parameter, in the same order at each call; ``None`` for none, on all
                replicas alike.
        """
        gradients = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
        present = [(place, one) for place, one in enumerate(gradients) if one is not None and one.numel()]
        compressed = {place: one for place, one in present if self._shrinks(one.shape)}
        low = {place: one.reshape(len(one), -1) for place, one in compressed.items()}
        whole = [one for place, one in present if place not in low]
        starts = {place: _orthogonal(self._factor(place, matrix)) for place, matrix in low.items()}
        left = {place: self._with_error(place, matrix) @ starts[place] for place, matrix in low.items()}
        sent = self._mean([*whole, *left.values()])
        if not all(bool(one.isfinite().all()) for one in sent):
            for _, gradient in present:
                gradient.fill_(math.nan)
            return
        for gradient, mean in zip(whole, sent, strict=False):
            gradient.copy_(mean)
        left = dict(zip(low, map(_orthogonal, sent[len(whole) :]), strict=True))
        for place, matrix in low.items():
            # The error now is the gradient with its error, until its approximation is subtracted.
            self._errors[place] = self._with_error(place, matrix)
        right = self._mean([self._errors[place].T @ left[place] for place in low])
        for place, factor in zip(low, right, strict=True):
            self._factors[place] = factor
            approximation = left[place] @ factor.T
            self._errors[place] -= approximation
            compressed[place].copy_(approximation.view_as(compressed[place]))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are kept from step to step."""
        return [*self._errors.values(), *self._factors.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what is kept from step to step."""
        return {
            "errors": {place: error.clone() for place, error in self._errors.items()},
            "factors": {place: factor.clone() for place, factor in self._factors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._errors = {place: error.clone() for place, error in state["errors"].items()}
        self._factors = {place: factor.clone() for place, factor in state["factors"].items()}

    def _shrinks(self, shape: torch.Size) -> bool:
        if len(shape) == 1:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, self._rank)
        return (rows + columns) * rank * _LEAST_COMPRESSION < rows * columns

    def _factor(self, place: int, matrix: torch.Tensor) -> torch.Tensor:
        """Return Q of the last step; at first one at random, the same on all replicas."""
        if place not in self._factors:
            generator = torch.Generator().manual_seed(_SEED + place)
            columns = matrix.shape[1]
            drawn = torch.randn(columns, min(*matrix.shape, self._rank), generator=generator)
            self._factors[place] = drawn.to(matrix.device)
        return self._factors[place]

    def _with_error(self, place: int, matrix: torch.Tensor) -> torch.Tensor:
        error = self._errors.get(place)
        return matrix.float() if error is None else error + matrix

    def _mean(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the average of each tensor over the replicas, in fp32, by one collective."""
        if not parts:
            return []
        flat = torch.cat([part.reshape(-1).float() for part in parts])
        distributed.all_reduce(flat, group=self._group)
        flat /= distributed.get_world_size(self._group)
        means = flat.split([part.numel() for part in parts])
        return [mean.view(part.shape) for mean, part in zip(means, parts, strict=True)]


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of a matrix's columns."""
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis
