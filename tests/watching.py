"""Record the inside of training: samples per micro-batch, micro-batches per step, dtypes and recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watcher:
    """A recorder of the linear layers of some units while another loop trains the model.

    The matrix product is recorded, not its module, because a unit's output can be cast to another dtype.

    Args:
        model: the model.
        units: names of the units.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        self.sizes: set[int] = set()
        self.ks: set[int] = set()
        self.dtypes: dict[str, set[str]] = {unit: set() for unit in units}
        self.recomputed: set[str] = set()
        self.steps = 0
        self._forwards = 0
        self._units = {}
        for unit in self.dtypes:
            linear = next(module for module in model.get_submodule(unit).modules() if isinstance(module, nn.Linear))
            self._units[id(linear.weight)] = unit
        self._linear = F.linear
        F.linear = self._watched
        # The hook applies to any optimizer, because the loop makes its own.
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def _watched(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        output = self._linear(inputs, weight, bias)
        unit = self._units.get(id(weight))
        if unit is None or not torch.is_grad_enabled():
            return output
        self.dtypes[unit].add(str(output.dtype).removeprefix("torch."))
        # Inside a backward pass, a layer runs only for recomputation.
        if torch._C._current_graph_task_id() != -1:
            self.recomputed.add(unit)
        elif unit == next(iter(self.dtypes)):
            self._forwards += 1
            self.sizes.add(inputs.shape[0])
        return output

    def _stepped(self, *_: object) -> None:
        self.ks.add(self._forwards)
        self._forwards = 0
        self.steps += 1

    def close(self) -> None:
        F.linear = self._linear
        self._handle.remove()

    def seen(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {
            "steps": self.steps,
            "k": sorted(self.ks),
            "sizes": sorted(self.sizes),
            "dtypes": {unit: sorted(dtypes) for unit, dtypes in self.dtypes.items()},
            "recomputed": sorted(self.recomputed),
        }
