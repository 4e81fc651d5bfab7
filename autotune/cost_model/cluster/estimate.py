"""The estimate of one layout: time, throughput and memory, and whether it fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autotune.cost_model.cluster.constants import Constants
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.machines import Machine
from autotune.cost_model.cluster.memory import MemoryParts, predict_memory
from autotune.cost_model.cluster.step_time import Passes, StepSeconds, predict_seconds
from autotune.cost_model.cluster.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A layout with its predicted time and memory.

    Attributes:
        model: the transformer.
        layout: the layout.
        machine: the device and its links.
        seconds: seconds of a step by part.
        memory: peak of the fullest rank by part.
        budget_bytes: memory that a rank may use.
    """

    model: Transformer
    layout: Layout
    machine: Machine
    seconds: StepSeconds
    memory: MemoryParts
    budget_bytes: float

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of all devices."""
        return self.layout.tokens_per_step / self.seconds.total

    @property
    def mfu(self) -> float:
        """Return the model's operations, recomputation left out, as a share of the devices' peak."""
        done = self.model.flops_per_token(self.layout.sequence, self.layout.trainable) * self.tokens_per_s
        return done / (self.machine.peak_flops * self.layout.devices)

    @property
    def fits(self) -> bool:
        """Return whether the peak is within the budget."""
        return self.memory.total <= self.budget_bytes

    @property
    def binds(self) -> str:
        """Return what limits the layout: the largest part of the step, or memory where little of it is free."""
        return f"{self.seconds.binds}, memory" if self.memory.total > 0.9 * self.budget_bytes else self.seconds.binds

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as a JSON object."""
        layout = self.layout
        return {
            "estimated": True,
            "layout": {
                **asdict(layout),
                "dp": layout.replicas * layout.shard,
                "devices": layout.devices,
                "global_batch": layout.global_batch,
            },
            "seconds_per_step": self.seconds.total,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s / layout.devices,
            "mfu": self.mfu,
            "seconds": asdict(self.seconds),
            "peak_bytes": self.memory.total,
            "memory": asdict(self.memory),
            "fits": self.fits,
            "binds": self.binds,
        }


def estimate_layout(
    model: Transformer,
    layout: Layout,
    machine: Machine,
    constants: Constants,
    *,
    budget_bytes: float | None = None,
    passes: Passes | None = None,
) -> Estimate:
    """Return the estimate of a layout.

    Args:
        model: the transformer.
        layout: the layout.
        machine: the device and its links.
        constants: the model's constants.
        budget_bytes: memory that a rank may use; the device's capacity if left out.
        passes: what one micro-batch takes in one block, if that is known already.
    """
    return Estimate(
        model=model,
        layout=layout,
        machine=machine,
        seconds=predict_seconds(model, layout, machine, constants, passes),
        memory=predict_memory(model, layout, constants),
        budget_bytes=machine.capacity_bytes if budget_bytes is None else budget_bytes,
    )
