"""The uses of a live run's steps in addition to training; each watches the step in its own way.

This module only watches. :mod:`autotune.live.lessons` chooses the use of a step, and :mod:`autotune.live.live_profiler`
reads the results.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import ExitStack

from torch import nn

from autotune.live.allowed_plans import tried_storages
from autotune.live.attached import Attached, StepAhead
from autotune.live.prediction_scores import Expected
from autotune.mechanics import devices
from autotune.mechanics.memory_meter import resident_tensors, storages, tensor_bytes
from autotune.mechanics.step_trace import Phase, StepTracer, StepWatch
from autotune.plan import Plan, Storage
from autotune.profiling.recompute_probe import UnitProbe


class Use:
    """A step that runs under a certain plan and is not watched.

    Attributes:
        plan: The plan that the step runs under.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def run_under(self, plan: Plan) -> None:
        """Take another plan for the step."""
        self.plan = plan

    def begin(self) -> None:
        """Begin to watch, after the plan has been applied and before any pass."""

    def phase(self, name: Phase) -> None:
        """Note that a pass of a micro-batch begins."""

    def go_on(self) -> None:
        """Note that the forward pass goes on, whose end was told."""

    def close(self) -> None:
        """Stop watching, whether or not the step was finished."""


class Shadowing(Use):
    """A step with trial passes: before it, its batch is run under other plans to compare their gradients.

    Attributes:
        plans: The plans to run the batch under, the reference first.
    """

    def __init__(self, plan: Plan, others: Iterable[Plan]) -> None:
        super().__init__(plan)
        self.plans = (plan, *others)

    @property
    def storages(self) -> dict[str, Storage]:
        """The storages that are tried, by unit; none if k and precisions are."""
        return tried_storages(self.plans[-1], self.plan)


class Probing(Use):
    """A step that finds out which units may be recomputed.

    Attributes:
        probes: The probe of each unit, by the unit's name.

    Args:
        plan: The plan.
        model: The model.
        names: The units to probe.
    """

    def __init__(self, plan: Plan, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__(plan)
        self._modules = {name: model.get_submodule(name) for name in names}
        self.probes: dict[str, UnitProbe] = {}

    def begin(self) -> None:
        """Place the probes."""
        self.probes = {name: UnitProbe(module) for name, module in self._modules.items()}

    def phase(self, name: Phase) -> None:
        """Let the probes look at what the forward pass left, before the backward pass begins."""
        if name == "backward":
            for probe in self.probes.values():
                probe.settle()

    def close(self) -> None:
        """Remove the probes."""
        for probe in self.probes.values():
            probe.remove()


class Timing(Use):
    """A step whose units are timed.

    Attributes:
        watch: The times of each pass of each unit.

    Args:
        plan: The plan.
        attached: The run.
        names: The names of the units.
    """

    def __init__(self, plan: Plan, attached: Attached, names: Iterable[str]) -> None:
        super().__init__(plan)
        self._attached = attached
        self._names = list(names)
        self._hooks = ExitStack()
        self.watch: StepWatch | None = None

    def begin(self) -> None:
        """Begin to watch."""
        self.watch = StepWatch(self._attached.model, self._names, devices.stamp_for(self._attached.device))
        self._hooks.enter_context(self.watch)

    def phase(self, name: Phase) -> None:
        """Note that a pass begins."""
        if self.watch is not None:
            self.watch.begin(name)

    def go_on(self) -> None:
        """Note that the forward pass goes on, whose end was told."""
        if self.watch is not None:
            self.watch.go_on()

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()


class Tracing(Timing):
    """A step whose memory is traced, allocation by allocation.

    Attributes:
        tracer: The trace.
        ahead: The step.
        expected: The peak that was predicted for the step; ``None`` if none was.
        waits: Whether only a step with more calls of units than usual is of interest.
        by_size: Whether of the batches that the loop accumulates the largest is traced, and not the first.
        gradient_bytes: Bytes of the gradients that were alive when the step began.
        static_bytes: Bytes of the model, the optimizer's state and everything else that stays.

    Args:
        plan: The plan.
        attached: The run.
        names: The names of the units.
        ahead: As the attribute.
        expected: As the attribute.
        waits: As the attribute.
        by_size: As the attribute.
    """

    def __init__(
        self,
        plan: Plan,
        attached: Attached,
        names: Iterable[str],
        ahead: StepAhead,
        expected: Expected | None = None,
        *,
        waits: bool = False,
        by_size: bool = False,
    ) -> None:
        super().__init__(plan, attached, names)
        self.ahead = ahead
        self.waits = waits
        self.by_size = by_size
        self.expected = expected
        self.tracer: StepTracer | None = None
        self.gradient_bytes = 0
        self.static_bytes = 0
        self._residents: set[int] = set()

    def run_under(self, plan: Plan) -> None:
        """Take another plan for the step; nothing is predicted for that one."""
        self.expected = self.expected if plan == self.plan else None
        super().run_under(plan)

    def begin(self) -> None:
        """Note what is alive, and begin to trace."""
        run = self._attached
        if self.expected is not None:
            # Garbage that is collected in the step would count as the step's. Automatic collection stays on: a step
            # that never ends would leave it off.
            gc.collect()
        # Gradients that are alive when a step begins are not static: some frameworks clear them within the step.
        gradients = (parameter.grad for parameter in run.model.parameters())
        self.gradient_bytes = tensor_bytes(gradient for gradient in gradients if gradient is not None)
        resident = [
            tensor for tensor in resident_tensors(run.model, run.optimizer, []) if tensor.device.type == run.device.type
        ]
        self._residents = set(storages(resident))
        self.static_bytes = tensor_bytes(resident) - self.gradient_bytes + run.bucket_bytes
        seen = devices.allocated(run.device)
        if seen is not None:
            # A teacher, averaged weights, a library's workspace or a data set may be allocated as well.
            self.static_bytes = max(self.static_bytes, seen.current - self.gradient_bytes - self.ahead.batch_bytes)
        self.tracer = StepTracer(run.model, self._names, run.device, by_size=self.by_size)
        self.watch = self.tracer.watch
        self.tracer.begin()

    def close(self) -> None:
        """End the trace."""
        if self.tracer is not None:
            self.tracer.end()

    @property
    def is_of_later(self) -> bool:
        """Whether a later batch than the first was traced, because it is larger or calls more units."""
        return self.watch is not None and self.watch.fullest > 0

    def older_bytes(self) -> int:
        """Return bytes that were alive before the step and freed in it, other than the model's and the optimizer's.

        A loop may keep the outputs of the previous step until it has new ones.
        """
        assert self.tracer is not None
        assert self.tracer.trace is not None
        older = self.tracer.trace.older.items()
        return sum(size for address, size in older if address not in self._residents)
