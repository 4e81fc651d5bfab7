"""Average gradients between replicas as matrices of low rank (PowerSGD, Vogels et al. 2019, arXiv:1905.13727).

A gradient M of shape (n, m) is sent as P of shape (n, rank) and Q of shape (m, rank). What their product leaves out
is added to the next gradient (error feedback), and Q is where the next step begins (warm start). Vectors, and matrices
that would not shrink to half, are sent whole.
"""

from __future__ import annotations

import functools
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
        # What the last call would leave of both.
        self._pending: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = {}, {}

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace each gradient by its average, in place; two collectives.

        If a gradient is not finite on any replica, or becomes so, all gradients become NaN. What the next step begins
        with stays until :meth:`keep`, which belongs to a step that updates the weights.

        Args:
            gradients: this rank's gradient of each parameter, in the same order at each call; ``None`` for none, on all
                replicas alike.
        """
        self.drop()
        gradients = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
        present = [(place, one) for place, one in enumerate(gradients) if one is not None and one.numel()]
        compressed = {place: one for place, one in present if self._shrinks(one.shape)}
        whole = [one for place, one in present if place not in compressed]
        # What is to be sent, of which what was sent is subtracted.
        errors = {place: self._with_error(place, one) for place, one in compressed.items()}
        starts = {place: _orthogonal(self._factor(place, error)) for place, error in errors.items()}
        sent = self._mean([*whole, *(error @ starts[place] for place, error in errors.items())])
        right: list[torch.Tensor] = []
        if is_finite := _are_finite(sent):
            left = dict(zip(errors, map(_orthogonal, sent[len(whole) :]), strict=True))
            right = self._mean([errors[place].T @ left[place] for place in errors])
            is_finite = _are_finite(right)
        if not is_finite:
            for _, gradient in present:
                gradient.fill_(math.nan)
            return
        for gradient, mean in zip(whole, sent, strict=False):
            gradient.copy_(mean)
        factors = dict(zip(errors, right, strict=True))
        for place, gradient in compressed.items():
            approximation = left[place] @ factors[place].T
            errors[place] -= approximation
            gradient.copy_(approximation.view_as(gradient))
        # From a factor of zeros, as of a gradient that is zero at first, some gradients would never be found.
        self._pending = errors, {place: factor for place, factor in factors.items() if bool(factor.any())}

    def keep(self) -> None:
        """Begin the next step with what the last one has left out, and where it has ended."""
        for kept, found in zip((self._errors, self._factors), self._pending, strict=True):
            for place, tensor in found.items():
                # In place: on a CPU, the meter of a step does not see that memory from before it is freed.
                kept.setdefault(place, tensor).copy_(tensor)
        self.drop()

    def drop(self) -> None:
        """Begin the next step as if the last one had not been."""
        self._pending = {}, {}

    def reset(self) -> None:
        """Begin the next step as the first one."""
        self._errors, self._factors = {}, {}
        self.drop()

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
        self.drop()
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

    def _with_error(self, place: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return a new matrix in fp32: the gradient with what was not sent yet."""
        matrix = gradient.reshape(len(gradient), -1)
        error = self._errors.get(place)
        return matrix.to(torch.float32, copy=True) if error is None else error + matrix.float()

    def _mean(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the average of each tensor over the replicas, in fp32 or its own wider format, by one collective."""
        if not parts:
            return []
        dtypes = [torch.promote_types(part.dtype, torch.float32) for part in parts]
        widest = functools.reduce(torch.promote_types, dtypes)
        flat = torch.cat([part.reshape(-1).to(widest) for part in parts])
        distributed.all_reduce(flat, group=self._group)
        flat /= distributed.get_world_size(self._group)
        means = zip(flat.split([part.numel() for part in parts]), parts, dtypes, strict=True)
        return [mean.view(part.shape).to(dtype) for mean, part, dtype in means]


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of a matrix's columns."""
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis
