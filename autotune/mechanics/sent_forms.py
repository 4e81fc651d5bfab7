"""Forms in which ranks send gradients and weights to each other that take fewer bytes than the weights' own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from autotune.mechanics.powersgd import LowRankAverage


class RoundedGather:
    """Gathering of weights for ``FSDPModule.set_custom_all_gather()``, which sends them in bf16.

    What is gathered is rounded; the shards are not.

    Attributes:
        rounds: whether weights are rounded now.
    """

    def __init__(self) -> None:
        self.rounds = True

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the tensor into which weights are gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> distributed.Work | None:
        """Gather the shards of one or several weights."""
        if not self.rounds or input_tensor.dtype not in (torch.float32, torch.float64):
            return _all_gather(output_tensor, input_tensor, group, async_op=async_op)
        received = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        _all_gather(received, input_tensor.to(torch.bfloat16), group)
        output_tensor.copy_(received)
        return None


def _all_gather(
    output: torch.Tensor, shard: torch.Tensor, group: distributed.ProcessGroup, *, async_op: bool = False
) -> distributed.Work | None:
    # Torch 2.13 calls it by another name, and warns of the former one.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    work: distributed.Work | None = gather(output, shard, group=group, async_op=async_op)
    return work


@dataclass(frozen=True, slots=True, kw_only=True)
class SentForms:
    """What a model that is spread over ranks does not send by itself, or not as it is.

    Attributes:
        average: what must average gradients between replicas after the last micro-batch; ``None`` if the model does.
        gather: how the model gathers weights; ``None`` for torch's way.
    """

    average: LowRankAverage | None = None
    gather: RoundedGather | None = None

    @contextmanager
    def exact_weights(self) -> Iterator[None]:
        """Gather weights as they are during the body."""
        if self.gather is None:
            yield
            return
        self.gather.rounds = False
        try:
            yield
        finally:
            self.gather.rounds = True
