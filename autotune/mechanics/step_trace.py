"""Trace one optimizer step: when each piece of the model ran, and when each block of memory was alive.

A *segment* is one call of a unit or the code between two calls. Segments are numbered in forward order: the code before
call c is 2c and the call itself 2c + 1, so that after n calls the last segment (the loss) is 2n.
"""

from __future__ import annotations

import atexit
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.autograd.graph import register_multi_grad_hook
from torch.autograd.profiler import profile, record_function

from autotune.mechanics import devices
from autotune.mechanics.ambient import recorded, runs_backward, transformed
from autotune.mechanics.collectives import settled_collectives
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.memory_meter import storages, tensor_bytes
from autotune.mechanics.trees import tensors
from autotune.mechanics.watching_hooks import WatchingHook, clear_copies, observing_kept, yielding_saved_hooks

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True)
class Place:
    """A place within a step.

    Attributes:
        micro_batch: from 0; in a trace, -1 for those that are not traced.
        phase: ``forward``, ``backward`` or, between and after them, ``update``.
        segment: the segment's number; -1 in ``update``.
    """

    micro_batch: int
    phase: Phase
    segment: int


@dataclass(frozen=True, slots=True)
class Block:
    """The life of one block of memory.

    Attributes:
        size: bytes.
        born: time of its allocation.
        died: time at which it was freed; infinity if it outlived the step.
    """

    size: int
    born: float
    died: float


@dataclass(frozen=True, slots=True)
class Sighting:
    """An observation of a tensor's storage at a place.

    Attributes:
        role: ``input`` or ``output`` of a call, or ``saved`` for backward.
        place: place of the observation.
        time: time at which the storage was certainly alive.
        address: address of the storage.
    """

    role: Literal["input", "output", "saved"]
    place: Place
    time: float
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Trace of a step's memory.

    Attributes:
        calls: the units called, in order, in the first micro-batch that is traced: the fullest one of the watch. Later
            ones are traced that call the same.
        times: times at which the step moved on to another place, ascending.
        places: those places.
        changes: (time, bytes) of every allocation (> 0) and release (< 0), ascending.
        blocks: blocks allocated during the step, by address, each list ascending in time.
        sightings: observations of storages in the first micro-batch that is traced.
        older: bytes of blocks that were allocated before the step and released in it, by address.
    """

    calls: tuple[str, ...]
    times: tuple[float, ...]
    places: tuple[Place, ...]
    changes: tuple[tuple[float, int], ...]
    blocks: dict[int, list[Block]]
    sightings: tuple[Sighting, ...]
    older: dict[int, int] = field(default_factory=dict)

    def place_at(self, moment: float) -> Place | None:
        """Return the place of the step at a time; ``None`` before its first forward pass."""
        index = bisect_right(self.times, moment) - 1
        return None if index < 0 else self.places[index]

    @property
    def traces_peak(self) -> bool:
        """Whether no micro-batch that is not traced needs more memory than those that are."""
        level, most = 0, {True: 0, False: 0}
        for moment, size in self.changes:
            level += size
            place = self.place_at(moment)
            is_traced = place is None or place.micro_batch >= 0
            most[is_traced] = max(most[is_traced], level)
        return most[False] <= most[True]

    def block_at(self, address: int, moment: float) -> Block | None:
        """Return the block at an address and a time; ``None`` for memory older than the step."""
        for block in self.blocks.get(address, ()):
            if block.born <= moment < block.died:
                return block
        return None


class StepWatch:
    """Observer of a step's progress from unit to unit; use it as a context manager around the step.

    Attributes:
        places: places of the step, in order.
        stamps: result of ``stamp`` on entering each place.
        calls: the units called in each micro-batch.
        thread: the step's thread; another one may run the model meanwhile.
        spoilt: why the observations are incomplete; ``None`` if they are complete.

    Args:
        model: the model.
        units: names of the units.
        stamp: function that records the time.
        on_call: function that receives the role, place and tensors of the inputs and of the outputs of each call.
        by_size: whether, of micro-batches that call as many units, the one is the fullest whose units are handed most.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[str],
        stamp: Callable[[], Any],
        on_call: Callable[[Literal["input", "output"], Place, Sequence[torch.Tensor]], None] | None = None,
        *,
        by_size: bool = False,
    ) -> None:
        self._model = model
        self._by_size = by_size
        # Bytes that units were handed in each micro-batch.
        self._handed: list[int] = []
        self._units = list(units)
        self._stamp = stamp
        self._on_call = on_call
        self._hooks = ExitStack()
        self._copies: list[Any] = []
        # The number of places before a backward pass that began in the forward phase; ``None`` if none has.
        self._before_early: int | None = None
        self.thread = threading.get_ident()
        self.places: list[Place] = []
        self.stamps: list[Any] = []
        self.calls: list[list[str]] = []
        self.spoilt: str | None = None

    def __enter__(self) -> StepWatch:
        for name in self._units:
            module = self._model.get_submodule(name)
            if isinstance(module, torch.jit.ScriptModule):
                # It does not allow hooks: its calls count as part of the code around them.
                continue
            for handle in self._hooked(module, name):
                self._hooks.callback(handle.remove)
        return self

    def _hooked(self, module: nn.Module, name: str) -> list[Any]:
        """Register the hooks of a unit, and return their handles.

        A unit of ``fully_shard()`` gathers and releases its weights in hooks of its own, which count as part of the
        unit in both passes: in forward, they run between these hooks, and in backward, after the unit is entered.
        """

        def hook(do: Callable[..., None]) -> WatchingHook:
            return WatchingHook(do, watched=module, copies=self._copies)

        gathers = hasattr(module, "unshard")
        looks: list[tuple[Callable[..., None], bool]]
        looks = [(self._returned, True), (self._left, False)] if gathers else [(self._returned_and_left, False)]
        return [
            module.register_forward_pre_hook(hook(self._entering(name)), with_kwargs=True, prepend=gathers),
            *(module.register_forward_hook(hook(do), with_kwargs=True, prepend=first) for do, first in looks),
        ]

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        clear_copies(self._copies)

    @property
    def place(self) -> Place:
        """Return the current place of the step."""
        return self.places[-1]

    @property
    def fullest(self) -> int:
        """Return the number of the micro-batch that calls most units; of equal ones, the first or the largest."""
        return self.fullest_of(range(len(self.calls)))

    def fullest_of(self, numbers: Iterable[int]) -> int:
        """Return the fullest of some micro-batches; 0 for none."""
        return max(numbers, key=lambda n: (len(self.calls[n]), self._handed[n] * self._by_size), default=0)

    def begin(self, phase: Phase) -> None:
        """Begin a micro-batch's forward or backward pass, or the update after it."""
        self._before_early = None
        if phase == "forward":
            self.thread = threading.get_ident()
            self.calls.append([])
            self._handed.append(0)
            self._go(Place(len(self.calls) - 1, phase, 0))
        elif not self.calls:
            # Without a forward pass there is no step.
            return
        elif phase == "backward":
            self._go(Place(self.place.micro_batch, phase, 2 * len(self.calls[-1])))
        else:
            self._go(Place(self.place.micro_batch, phase, -1))

    def go_on(self) -> None:
        """Note that the forward pass goes on: the backward pass, which was taken to have begun, has not."""
        if self.places and self.place.phase == "backward":
            self.places[-1] = Place(self.place.micro_batch, "forward", 2 * len(self.calls[-1]))

    def _go(self, place: Place) -> None:
        self.places.append(place)
        self.stamps.append(self._stamp())

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._resume_forward()
            if not self._watching():
                return
            call = len(self.calls[-1])
            self.calls[-1].append(name)
            self._go(Place(self.place.micro_batch, "forward", 2 * call + 1))
            self._look("input", call, (args, kwargs))

        return enter

    def _returned_and_left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._returned(module, args, kwargs, output)
        self._left()

    def _returned(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_inside():
            self._look("output", len(self.calls[-1]) - 1, output, (args, kwargs))

    def _left(self, *_: object) -> None:
        if self._is_inside():
            self._go(Place(self.place.micro_batch, "forward", 2 * len(self.calls[-1])))

    def _is_inside(self) -> bool:
        """Return whether a unit's call is observed; one that began unobserved has no place."""
        return self._watching() and self.place.segment % 2 == 1

    def _watching(self) -> bool:
        if not self.places or self.place.phase != "forward" or threading.get_ident() != self.thread:
            return False
        if transformed():
            self.spoilt = "a unit was called within torch.func or forward-mode differentiation"
            return False
        return True

    def _look(self, role: Literal["input", "output"], call: int, tree: Any, given: Any = ()) -> None:
        try:
            self._see(role, call, tree, given)
        except any_error() as error:  # an observer must not stop the step
            self.spoilt = f"a unit's inputs or outputs cannot be inspected: {error}"

    def _see(self, role: Literal["input", "output"], call: int, tree: Any, given: Any) -> None:
        found = tensors(tree)
        if role == "input" and self._by_size:
            self._handed[-1] += tensor_bytes(found)
        if self._on_call is not None:
            self._on_call(role, self.place, found)
        inside, before = 2 * call + 1, 2 * call
        # In autograd.grad(), autograd does not report whether gradients of leaves are needed.
        # What a unit returns as it was given is no output of its own.
        others = {id(tensor) for tensor in tensors(given)}
        flowing = [tensor for tensor in found if tensor.grad_fn is not None and id(tensor) not in others]
        if not flowing or not torch.is_grad_enabled():
            return
        if role == "output":
            # The backward pass enters the unit when the gradient of any of its outputs is complete ...
            move = self._once_for_each_pass(lambda: self._move_back(inside))
            handles = [tensor.register_hook(move) for tensor in flowing]
        elif len(flowing) == 1:
            # ... and leaves it when the gradients of all its inputs are complete.
            handles = [flowing[0].register_hook(lambda _: self._leave_back(inside, before))]
        else:
            # Torch's hook and the graph refer to each other, in a cycle that the garbage collector cannot see: a graph
            # that the loop drops lives until the step ends.
            handles = [register_multi_grad_hook(flowing, lambda _: self._leave_back(inside, before), mode="all")]
        for handle in handles:
            self._hooks.callback(handle.remove)

    @staticmethod
    def _once_for_each_pass(do: Callable[[], None]) -> Callable[[torch.Tensor], None]:
        passes = set[int]()

        def hook(_: torch.Tensor) -> None:
            if (number := torch._C._current_graph_task_id()) not in passes:
                passes.add(number)
                do()

        return hook

    def _move_back(self, segment: int) -> None:
        if self.place.phase == "forward" and self.place.segment % 2 == 0 and not torch.is_grad_enabled():
            # The loop takes gradients before it says that the backward pass begins, and what units saved may be freed.
            self._before_early = len(self.places)
        elif self.place.phase != "backward":
            return
        self._go(Place(self.place.micro_batch, "backward", segment))

    def _resume_forward(self) -> None:
        """Count a backward pass that began in the forward phase as part of that, if units are called after it."""
        if self._before_early is None or runs_backward() or threading.get_ident() != self.thread:
            return
        within = Place(self.place.micro_batch, "forward", 2 * len(self.calls[-1]))
        self.places[self._before_early :] = [within] * (len(self.places) - self._before_early)
        self._before_early = None

    def _leave_back(self, inside: int, before: int) -> None:
        if self.place.phase == "backward" and self.place.segment == inside:
            self._move_back(before)


def seconds_by_place(watch: StepWatch, device: torch.device) -> dict[tuple[Phase, int], float]:
    """Return the seconds spent in each phase and segment of a step, in all micro-batches.

    Args:
        watch: the observer, with :func:`autotune.mechanics.devices.stamp_for` as its clock.
        device: the device of the step.
    """
    moments = devices.seconds_between(watch.stamps, device)
    seconds: dict[tuple[Phase, int], float] = {}
    # If a later micro-batch calls more units than the first one, their segments are not the same.
    most = len(watch.calls[watch.fullest]) if watch.fullest else 0
    for place, began, ended in zip(watch.places, moments, moments[1:], strict=False):
        if len(watch.calls[place.micro_batch]) < most:
            continue
        key = (place.phase, place.segment)
        seconds[key] = seconds.get(key, 0.0) + ended - began
    return seconds


def rest_of(step_s: float, seconds: Mapping[tuple[Phase, int], float]) -> float:
    """Return the seconds of a step outside the forward and backward passes.

    Never below 0: an accelerator's events and the host's clock differ by microseconds.

    Args:
        step_s: seconds of the whole step by the host's clock.
        seconds: result of :func:`seconds_by_place`.
    """
    return max(step_s - sum(value for (phase, _), value in seconds.items() if phase != "update"), 0.0)


class _Turn:
    """The right to trace, which one step of a process has at a time: torch's profiler crashes if two threads use it.

    A thread that has ended, or that a fork has left behind, has it no more.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: tuple[threading.Thread, StepTracer] | None = None

    @property
    def is_taken(self) -> bool:
        """Whether a step is traced now, on any thread."""
        owner = self._owner
        return owner is not None and owner[0].is_alive()

    def take(self, who: StepTracer) -> bool:
        """Take the right if it is free; return whether it was."""
        with self._guard:
            if self.is_taken:
                return False
            self._owner = threading.current_thread(), who
            return True

    def give_back(self, who: StepTracer) -> None:
        """Give the right back, if nobody else has it by now."""
        with self._guard:
            if self._owner is not None and self._owner[1] is who:
                self._owner = None

    def end_own(self) -> None:
        """End the trace that this thread has begun, if there is one: its loop may have been interrupted for good."""
        owner = self._owner
        if owner is not None and owner[0] is threading.current_thread():
            owner[1].abandon()


TURN = _Turn()


class StepTracer:
    """Tracer of the memory of one step.

    Attributes:
        watch: observer whose ``begin`` must be called at each phase while the step runs.
        trace: the trace, after :meth:`tracing` has ended.

    Args:
        model: the model.
        units: names of the units.
        device: device whose memory is traced.
        by_size: as for :class:`StepWatch`.
    """

    _STEP, _MARK = "autotune.step", "autotune.step_trace"

    def __init__(self, model: nn.Module, units: Iterable[str], device: torch.device, *, by_size: bool = False) -> None:
        self._device = device
        self._stamp = devices.stamp_for(device)
        # The sightings in the fullest micro-batch so far, and in the running one.
        self._seen: dict[int, list[tuple[Literal["input", "output", "saved"], Place, int, int]]] = {}
        self.watch = StepWatch(model, units, self._mark, self._note, by_size=by_size)
        self.trace: StepTrace | None = None
        self._hooks = ExitStack()

    def begin(self) -> None:
        """Begin to trace an optimizer step, in place of :meth:`tracing`."""
        # A trace that is still open when the interpreter is taken apart crashes it.
        atexit.register(self.end)
        self._hooks.enter_context(self.tracing())

    def end(self) -> None:
        """End the trace that :meth:`begin` began, if it has not ended."""
        atexit.unregister(self.end)
        self._hooks.close()

    def abandon(self) -> None:
        """End the trace before the step ends."""
        self.watch.spoilt = "the step did not end before another tuner was attached"
        self.end()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace the body, one optimizer step, unless another step of this process is traced."""
        if not TURN.take(self):
            self.watch.spoilt = "another step of this process is traced"
            yield
            return
        try:
            with self._traced():
                yield
        finally:
            TURN.give_back(self)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        with (
            settled_collectives(),
            # The profiler keeps an accelerator's allocations and releases only if they have a parent: those of the
            # backward pass, which has a thread of its own there, an operation, and those between operations the step.
            devices.profiled(memory=True, operations=devices.is_accelerator(self._device)) as profiled,
            record_function(self._STEP),
            self.watch,
            yielding_saved_hooks(self._pack, self._give_way),
            observing_kept(self._keep),
        ):
            yield
        if self.watch.spoilt is None:
            self.trace = self._read(profiled)

    def _give_way(self) -> None:
        self.watch.spoilt = "it runs within saved-tensor hooks of its own, or code that forbids them, like torch.func"

    def _mark(self) -> Any:
        with record_function(self._MARK):
            # The mark has the host's time: an accelerator may run the operation much later.
            return self._stamp()

    def _note(self, role: Literal["input", "output"], place: Place, found: Sequence[torch.Tensor]) -> None:
        mark = len(self.watch.places) - 1
        self._sightings(place).extend((role, place, mark, self._address(tensor)) for tensor in found)

    def _sightings(self, place: Place) -> list[tuple[Literal["input", "output", "saved"], Place, int, int]]:
        """Return the sightings in a place's micro-batch."""
        if place.micro_batch not in self._seen:
            fullest = self.watch.fullest_of(self._seen)
            self._seen = {fullest: self._seen[fullest]} if self._seen else {}
        return self._seen.setdefault(place.micro_batch, [])

    def _keep(self, kept: Iterable[torch.Tensor]) -> None:
        # Another thread may run units meanwhile.
        watch = self.watch
        if watch.places and watch.place.phase == "forward" and threading.get_ident() == watch.thread:
            place = watch.place
            self._sightings(place).extend(("saved", place, -1, self._address(tensor)) for tensor in kept)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        watch = self.watch
        self._keep([tensor])
        try:
            # Detached: a saved output would otherwise keep its own graph alive. Autograd keeps leaves themselves, and
            # code may give them other data until the backward pass.
            return tensor if tensor.is_leaf or recorded() else tensor.detach()
        except any_error() as error:  # a foreign tensor type that cannot be detached
            watch.spoilt = f"a tensor that autograd saves cannot be inspected: {error}"
            return tensor

    def _address(self, tensor: torch.Tensor) -> int:
        """Return a number that identifies a tensor's storage among all that are alive."""
        # A tensor without a storage of its own is identified by the object.
        return next(iter(storages([tensor])), id(tensor))

    def _read(self, profiled: profile) -> StepTrace:
        marks: list[float] = []
        changes: list[tuple[float, int, int]] = []
        results: Any = profiled.kineto_results
        # There are tens of thousands of events, and each access costs microseconds.
        waiting = list(results.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            tag = event.tag
            if tag == _EventType.Allocation:
                fields = event.extra_fields
                if fields.device.type == self._device.type:
                    changes.append((event.start_time_ns, fields.alloc_size, fields.ptr))
                continue
            if tag == _EventType.TorchOp and event.name == self._MARK:
                marks.append(event.start_time_ns)
            waiting += event.children
        changes.sort(key=lambda change: change[0])
        marks.sort()
        return self._assemble(marks, changes)

    def _assemble(self, marks: Sequence[float], changes: Sequence[tuple[float, int, int]]) -> StepTrace:
        """Return the trace of a step.

        Args:
            marks: time of each of the watch's places.
            changes: time, bytes and address of every allocation (> 0) and release (< 0), ascending.
        """
        chosen = self.watch.fullest
        places = tuple(self._counted(place, chosen) for place in self.watch.places)
        if len(marks) != len(places):
            raise ValueError("a part of the step ran in another thread than the step, where its memory is not seen")
        blocks, older = _blocks(changes)
        first_backward = next(
            (moment for moment, place in zip(marks, places, strict=True) if place.phase == "backward"), float("inf")
        )
        return StepTrace(
            calls=tuple(self.watch.calls[chosen]) if self.watch.calls else (),
            times=tuple(marks),
            places=places,
            changes=tuple((moment, size) for moment, size, _ in changes),
            blocks=blocks,
            older=older,
            # Saved tensors are alive when the backward pass begins; inputs and outputs when they are observed.
            sightings=tuple(
                Sighting(
                    role,
                    self._counted(place, chosen),
                    first_backward if role == "saved" else _after(marks, mark, role),
                    address,
                )
                for role, place, mark, address in self._seen.get(chosen, ())
            ),
        )

    def _counted(self, place: Place, chosen: int) -> Place:
        """Return a place, counted from a micro-batch on; of the others, those count that call the same."""
        calls = self.watch.calls
        if not chosen:
            return place
        if place.micro_batch < chosen or calls[place.micro_batch] != calls[chosen]:
            return Place(-1, "update", -1)
        return Place(place.micro_batch - chosen, place.phase, place.segment)


def _after(marks: Sequence[float], mark: int, role: str) -> float:
    """Return a time at which a call's input or output was alive: its entry, or the end of its segment."""
    return marks[mark] if role == "input" else marks[mark + 1]


def _blocks(changes: Sequence[tuple[float, int, int]]) -> tuple[dict[int, list[Block]], dict[int, int]]:
    """Return the blocks that were allocated, and the bytes of older ones that were released, by address."""
    older: dict[int, int] = {}
    blocks: dict[int, list[Block]] = {}
    alive: dict[int, tuple[float, int]] = {}
    for moment, size, address in changes:
        if size > 0:
            alive[address] = (moment, size)
        elif address in alive:
            born, known = alive.pop(address)
            blocks.setdefault(address, []).append(Block(known, born, moment))
        else:
            older[address] = older.get(address, 0) - size
    for address, (born, size) in alive.items():
        blocks.setdefault(address, []).append(Block(size, born, float("inf")))
    return blocks, older
