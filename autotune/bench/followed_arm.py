"""An unattached copy under exactly the plans of a live run, one batch behind it: the difference is the tuner's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autotune.bench.attached_arms import Arm, LiveArm
from autotune.cost_model.learning_rate import batch_factor
from autotune.mechanics import controls, stepping
from autotune.plan import Plan


class FollowedArm(Arm):
    """Unattached copy that trains under the plan that a live arm used for each batch; applying plans is not timed.

    Attributes:
        plans: plan of each batch.

    Args:
        live: the arm that is followed; it takes each batch first.
        seed: random seed for the weights; the live arm's.
        lr_rule: rule by which the learning rate follows a step of several batches; ``None`` where k cuts a batch.
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
            # Units of a live run hand on fp32 whatever the plan.
            controls.apply(self.model, plan, fp32_borders=True)
            self.k = plan.accumulation_steps
        self.plans.append(plan)
        super().take(batch)

    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch; where a step consumes several, update with its last one."""
        if self._lr_rule is None:
            return super().step(batch)
        self._items.append(stepping.count_items(batch, self.job.count))
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
    """Let a live arm take batches and another arm follow it; yield how many the live one has taken.

    They take turns A A B B, so that each arm runs after itself as often as after the other.
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
