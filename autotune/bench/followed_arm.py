"""An unattached copy under the same plans as a live run, one batch behind it: the difference is the tuner's cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autotune.bench.attached_arms import Arm, LiveArm
from autotune.cost_model.learning_rate import batch_factor
from autotune.mechanics import controls, cutting
from autotune.plan import Plan


class FollowedArm(Arm):
    """Unattached copy that trains each batch under the plan that a live arm used; applying plans is not timed.

    Attributes:
        plans: plan of each batch.

    Args:
        live: the arm to follow; it takes each batch first.
        seed: the live arm's random seed, for the weights.
        lr_rule: learning-rate rule for steps of several batches; ``None`` if k splits a batch.
    """

    def __init__(self, live: LiveArm, seed: int, lr_rule: Any = None) -> None:
        super().__init__(live.job, seed)
        self._live = live
        self._lr_rule = lr_rule
        self._items: list[int] = []
        self.plans: list[Plan] = []

    def take(self, batch: Any) -> None:
        """Train on one batch under its plan."""
        plan = self._live.plans[len(self.plans)]
        if not self.plans or plan != self.plans[-1]:
            # Units of a live run pass on fp32 tensors under every plan.
            controls.apply(self.model, plan, fp32_borders=True)
            self.k = plan.accumulation_steps
        self.plans.append(plan)
        super().take(batch)

    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch; if a step consumes several, update after the last one."""
        if self._lr_rule is None:
            return super().step(batch)
        self._items.append(cutting.count_items(batch, self.job.count))
        loss = self.job.loss(self.model, batch)
        (loss * (self._items[-1] / (self._items[0] * self.k))).backward()
        if self._live.updated[len(self.losses)]:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            factor = batch_factor(self._lr_rule, sum(self._items) / self._items[0], 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] *= factor
            self.update()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self._items = []
        return loss


def follow(live: Arm, followed: Arm, batches: Iterable[Any]) -> Iterable[int]:
    """Train a live arm and an arm that follows it; yield the number of batches that the live arm has taken.

    The order of arms is A A B B, so that each arm runs after itself as often as after the other.
    """
    before: list[Any] = []
    number = -1
    for number, batch in enumerate(batches):
        turns = [(live, [batch]), (followed, before)]
        for arm, due in turns if number % 2 else reversed(turns):
            for one in due:
                arm.take(one)
        before = [batch]
        yield number + 1
    for one in before:
        followed.take(one)
