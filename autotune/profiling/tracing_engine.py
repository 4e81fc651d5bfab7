"""Engines whose steps can be traced for memory, or timed piece by piece."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from autotune.engines.torch_engine import TorchEngine
from autotune.errors import InputError
from autotune.job import Job
from autotune.measurement import Measurement
from autotune.mechanics import controls, devices
from autotune.mechanics.collectives import of_all_ranks, of_first_rank
from autotune.mechanics.compiled_units import compilations
from autotune.mechanics.devices import stamp_for
from autotune.mechanics.memory_meter import collection_paused, tensor_bytes
from autotune.mechanics.step_trace import Phase, StepTracer, StepWatch, seconds_by_place
from autotune.mechanics.trees import tensors
from autotune.plan import Plan, Storage

Value = TypeVar("Value")


class WatchedEngine(TorchEngine):
    """A torch engine whose steps can be traced or timed piece by piece.

    Attributes:
        watch: observer of the running step; ``None`` for an ordinary step.
        tracer: memory tracer of the running step; ``None`` if it is not traced.
        static_bytes: bytes that stay between steps: the maximum over traced steps.
        batch_bytes: bytes of the batches of the latest traced step.
        fragments_bytes: peak of reserved bytes minus peak of allocated bytes: the maximum over traced steps.
    """

    watch: StepWatch | None = None
    tracer: StepTracer | None = None
    static_bytes: int = 0
    batch_bytes: int = 0
    fragments_bytes: int = 0

    def phase(self, name: Phase) -> None:
        """Report the phase to :attr:`watch`, if there is one."""
        if self.watch is not None:
            self.watch.begin(name)

    @contextlib.contextmanager
    def metering(self, batches: Sequence[Any]) -> Iterator[bool]:
        """Trace or watch the body if requested; yield whether its memory is measured."""
        if self.tracer is not None:
            self.batch_bytes = tensor_bytes(tensors(batches))
            static = self._static()
            self.watch = self.tracer.watch
            with collection_paused(), self.tracer.tracing():
                yield True
            self.static_bytes = max(self.static_bytes, static + self._behind(static))
            seen = devices.allocated(self.device)
            if seen is not None:
                self.fragments_bytes = max(self.fragments_bytes, seen.reserved_peak - seen.peak)
        elif self.watch is not None:
            with self.watch:
                yield False
        else:
            with super().metering(batches) as metered:
                yield metered
        self.watch = None

    def _static(self) -> int:
        """Return the bytes that stay between steps.

        On an accelerator this is all allocated memory except the batch: libraries also allocate workspaces.
        """
        seen = devices.allocated(self.device)
        return tensor_bytes(self.resident([])) if seen is None else seen.current - self.batch_bytes

    def unit_bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return bytes by unit: of the parameters that it has for itself with their optimizer state, and of gradients.

        The latter are those of parameters that it shares; units without any are left out.
        """
        users = Counter[nn.Parameter]()
        for module in self.model.modules():
            users.update(module.parameters(recurse=False))
        own, shared, state = dict[str, int](), dict[str, int](), self.update.optimizer.state
        for unit in self.space.units:
            here = Counter[nn.Parameter]()
            for module in self.model.get_submodule(unit.name).modules():
                here.update(module.parameters(recurse=False))
            kept = [one for one, times in here.items() if times == users[one]]
            own[unit.name] = tensor_bytes(tensors([kept, [state.get(one) for one in kept]]))
            others = [one for one, times in here.items() if times < users[one] and one.requires_grad]
            if others:
                shared[unit.name] = tensor_bytes(others)
        return own, shared

    def _behind(self, static: int) -> int:
        """Return how many bytes the last trace's peak is below that of the rank with the highest peak."""
        assert self.tracer is not None
        assert self.tracer.trace is not None
        above = itertools.accumulate(size for _, size in self.tracer.trace.changes)
        own = static + max(above, default=0)
        return int(self.agreed(own)) - own

    def traced(self) -> tuple[Measurement, StepTracer]:
        """Run one step and trace its memory."""
        if self.settling():
            self.run(self.settling())
        if devices.is_accelerator(self.device):
            # Memory left by earlier steps in reference cycles or in the cache must not count.
            devices.release(self.device)
            devices.forget_peaks(self.device)
        tracer = self.tracer = StepTracer(self.model, self._unit_names(), self.device)
        try:
            return self.run(1), tracer
        finally:
            self.tracer = self.watch = None

    def timed(self) -> tuple[Measurement, dict[tuple[Phase, int], float], tuple[str, ...]]:
        """Run one step; return its measurement, its seconds by phase and segment, and the units called, in order.

        A step that compiled is followed by another one.
        """
        compiled = compilations()
        watch = self.watch = StepWatch(self.model, self._unit_names(), stamp_for(self.device))
        try:
            window = self.run(1)
        finally:
            self.watch = None
        if window.failure is not None:
            return window, {}, ()
        if compilations() != compiled:
            return self.timed()
        return window, seconds_by_place(watch, self.device), tuple(watch.calls[0])

    def apply_with(self, plan: Plan, *, fp32_borders: bool) -> None:
        """Apply a plan with fp32 or 16-bit borders.

        Args:
            plan: the plan.
            fp32_borders: whether tensors pass between units in fp32; always so if the engine requires it.
        """
        self.apply(plan)
        controls.apply(self.model, plan, fp32_borders=fp32_borders or self.fp32_borders)

    def decided(self, value: Value) -> Value:
        """Return the first rank's value, so that all ranks decide alike."""
        return value

    def united(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the union of all ranks' names, sorted."""
        return tuple(sorted(names))

    def may_try(self, what: str) -> bool:
        """Return whether a step may be tried: always, except in :class:`WatchedRanks`.

        Args:
            what: name of the step.
        """
        return True

    def samples_here(self) -> int:
        """Return the number of samples of each batch that this process trains on."""
        return self.job.batch_size

    def leave_out(self, names: Collection[str]) -> None:
        """Exclude units from all plans from now on, and apply the baseline plan; the units stay as the job has them.

        Args:
            names: names of the units.
        """
        units = tuple(unit for unit in self.space.units if unit.name not in names)
        self.space = replace(self.space, units=units)
        self.apply(self.space.baseline())

    def leave_out_storage(self, storage: Storage) -> None:
        """Exclude a storage from all plans from now on."""
        self.space = replace(self.space, storages=tuple(one for one in self.space.storages if one is not storage))

    def _unit_names(self) -> list[str]:
        return [unit.name for unit in self.space.units]


class WatchedRanks(WatchedEngine):
    """An engine of several ranks whose steps can be watched on each rank; all ranks watch the same steps.

    Args:
        job: the job.
        no_room: names of steps that must not be tried because a rank ran out of memory in them.
        on_try: called with the name of each step before it is tried.
        options: keyword arguments of the engine.
    """

    def __init__(
        self, job: Job, *, no_room: Collection[str] = (), on_try: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        super().__init__(job, **options)
        self._no_room, self._on_try = frozenset(no_room), on_try

    def may_try(self, what: str) -> bool:
        """Return whether a step may be tried, and report it to ``on_try`` if so.

        Args:
            what: name of the step.
        """
        if what in self._no_room:
            return False
        # Wait for all ranks: one that has ended did so in the previous step, not in this one.
        self.united(())
        if self._on_try is not None:
            self._on_try(what)
        return True

    def samples_here(self) -> int:
        """Return the number of samples of each batch on the rank with the most samples."""
        return -(-self.job.batch_size // self.divides_by)

    def decided(self, value: Value) -> Value:
        """Return the first rank's value."""
        return of_first_rank(value)

    def united(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the union of all ranks' names, sorted."""
        return tuple(sorted({name for one in of_all_ranks(tuple(names)) for name in one}))


def watched_ranks(engine: type[Any]) -> type[WatchedRanks]:
    """Return a class of engines of several ranks whose steps can be watched.

    Args:
        engine: the class whose steps are watched.

    Raises:
        InputError: if it does not inherit :class:`autotune.TorchEngine`.
    """
    if not issubclass(engine, TorchEngine):
        raise InputError(
            f"engine {engine.__name__} cannot be profiled", where="engine", allowed="one that inherits TorchEngine"
        )
    return type(f"Watched{engine.__name__}", (WatchedRanks, engine), {})
