"""Make optimizer updates through a DeepSpeed engine, which shards gradients and optimizer state over ranks (ZeRO).

The accumulation boundary is set for every micro-batch, so that any number of them makes exactly one update. The norm is
computed from the reduced shards before the engine steps. Only this file knows where each ZeRO stage keeps its tensors.
DeepSpeed itself is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from autotune.mechanics.memory_meter import resident_tensors
from autotune.mechanics.rank_probe import RankUpdate, Shard


class ShardedUpdate(RankUpdate):
    """Updates through a DeepSpeed engine.

    A micro-batch's weight is its weight in the global step times the number of ranks, since the engine averages over
    ranks.

    Args:
        engine: result of ``deepspeed.initialize``, with the job's optimizer in it.
        optimizer: the job's optimizer.
        parameters: the model's trained parameters.
        clip_norm: norm at which the engine clips; ``None`` for no clipping.
    """

    def __init__(
        self, engine: Any, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clip_norm: float | None
    ) -> None:
        super().__init__(optimizer, clip_norm=clip_norm)
        self.engine = engine
        self.stage = int(engine.zero_optimization_stage())
        self._parameters = list(parameters)
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._left = 0
        self.copies = 1 if self.stage else distributed.get_world_size()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the model's trained parameters."""
        return self._parameters

    def begin(self, micro_batches: int) -> None:
        """Set the number of micro-batches that each rank runs in the next update."""
        self._left = micro_batches
        self._mark()

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        """Accumulate the gradient of one micro-batch, and reduce it over the ranks after the last one."""
        self._accumulating = True
        # The engine divides by its own number of accumulation steps, which is 1 under a plan.
        self.engine.backward(loss * weight)
        self._left -= 1
        self._mark()

    def _mark(self) -> None:
        # After the last micro-batch, the boundary stays set until the update.
        self.engine.set_gradient_accumulation_boundary(self._left <= 1)

    def unscale(self) -> float:
        """Return the 2-norm of the reduced gradient, the same on every rank."""
        if not self._accumulating:
            return 0.0
        pieces = [gradient for _, gradient in self.shards()]
        square = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        if pieces:
            square += torch.stack([norm.double() for norm in torch._foreach_norm(pieces)]).square().sum()
        if self.stage:
            distributed.all_reduce(square)
        return math.sqrt(value) if math.isfinite(value := float(square)) else value

    def clip(self, norm: float) -> None:
        """Leave clipping to the engine's own step."""

    def finish(self, norm: float, *, abandon: bool = False) -> bool:
        """Step and clear the gradients; skip the step, on every rank, if the gradient is not finite."""
        stepping = math.isfinite(norm) and not abandon and self._accumulating
        if stepping:
            self.engine.step()
            self._accumulating = False
        else:
            self.discard()
        return stepping

    def discard(self) -> None:
        """Drop accumulated gradients, after the last backward pass of a step or before the first."""
        if self._accumulating and self.stage:
            # An engine that skips an update clears its gradients.
            self._poison()
            self.engine.step()
        elif self._accumulating:
            self.engine.zero_grad()
        self._accumulating = False

    def _poison(self) -> None:
        """Make the engine skip the update, by a NaN in the first element outside padding: padding is not cleared."""
        rank = distributed.get_rank()
        for index, gradient in self.shards():
            parameter: Any = self._parameters[index]
            if self.stage < 3 or rank * parameter.partition_numel() < parameter.ds_numel:
                gradient.view(-1)[0] = math.nan
                return

    def shards(self) -> list[Shard]:
        """Return this rank's part of the reduced gradient: pieces, flat or whole, with their parameters' indices."""
        optimizer = self.engine.optimizer
        if self.stage == 0:
            return [(index, p.grad) for index, p in enumerate(self._parameters) if p.grad is not None]
        groups = optimizer.fp16_groups if self.stage == 3 else optimizer.params_in_partition
        found: list[Shard] = []
        for number, group in enumerate(groups):
            held = [g for g in optimizer.averaged_gradients[number] if not getattr(g, "_zero_padding", False)]
            # Padding of a partition comes last.
            found += [(self._index[id(p)], g) for p, g in zip(group, held, strict=False) if id(p) in self._index]
        return found

    def optimizer_state(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state."""
        with _whole_groups(self):
            return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`optimizer_state` on this rank."""
        with _whole_groups(self):
            self.optimizer.load_state_dict(state)

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's weights, fp32 masters and buffers by name."""
        optimizer = self.engine.optimizer
        found = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        for name, parameter in model.named_parameters():
            found[f"parameter {name}"] = getattr(parameter, "ds_tensor", parameter)
        if self.stage == 3:
            masters = optimizer.fp32_partitioned_groups_flat
            whole = {id(parameter) for parameter in optimizer.persistent_parameters}
            for name, parameter in model.named_parameters():
                if id(parameter) in whole:
                    found[f"whole {name}"] = parameter
        else:
            masters = optimizer.single_partition_of_fp32_groups if self.stage else []
        return {**found, **{f"master {number}": master for number, master in enumerate(masters)}}

    def whole_shape(self, parameter: nn.Parameter) -> Sequence[int]:
        """Return the shape of a parameter of which this rank may have only a part."""
        return getattr(parameter, "ds_shape", parameter.shape)

    def settle(self) -> None:
        """Release gathered weights, so that none is older than its shard."""
        if self.stage == 3:
            self.engine.optimizer._partition_all_parameters()

    def resident(self, model: nn.Module, batches: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that are alive on this rank before a step begins."""
        shards = [getattr(parameter, "ds_tensor", None) for parameter in model.parameters()]
        held = _reachable(vars(self.engine.optimizer), set()) if self.stage else []
        return [
            *resident_tensors(model, self.optimizer, batches),
            *(shard for shard in shards if shard is not None),
            *held,
        ]


class _whole_groups:  # noqa: N801 - a context manager
    """Context in which the optimizer's state covers all its shards; otherwise stage 3 exposes one at a time."""

    def __init__(self, update: ShardedUpdate) -> None:
        self._optimizer = update.engine.optimizer if update.stage == 3 else None

    def __enter__(self) -> None:
        if self._optimizer is not None:
            self._optimizer._set_fp32_optimizer_param_groups()

    def __exit__(self, *_: object) -> None:
        if self._optimizer is not None:
            self._optimizer._clear_fp32_optimizer_param_groups()


def _reachable(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """Return the tensors in nested containers and in DeepSpeed's objects."""
    if isinstance(value, torch.Tensor):
        return [value, *([value.grad] if value.is_leaf and value.grad is not None else [])]
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, dict):
        return [found for item in value.values() for found in _reachable(item, seen)]
    if isinstance(value, list | tuple | set):
        return [found for item in value for found in _reachable(item, seen)]
    if type(value).__module__.startswith("deepspeed.runtime.zero") and hasattr(value, "__dict__"):
        return _reachable(vars(value), seen)
    return []
