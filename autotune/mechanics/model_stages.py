"""Compute a model in stages, each of which runs the units of a part, in any loss function that calls the model.

A stage runs the user's own code from the model's call on. Units before the stage return NaN of the right shape that
takes no memory, so that any other use of it shows; the stage's first unit is handed what the stage before has sent;
where the next stage's first unit is called, the forward pass ends. Code between two stages thus runs in the earlier
one, and what the model computes before its first unit runs in every stage, to no effect but in the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autotune.errors import AutotuneError, JobError, one_line
from autotune.mechanics.buffers import copy_buffers, write_buffers
from autotune.mechanics.stand_ins import StandIn
from autotune.mechanics.trees import map_tensors

# Largest relative difference of a loss or a gradient in stages and at once that is due to the order of sums; and in
# multiples of the smallest difference of a dtype.
ROUNDING, _ROUNDINGS = 1e-3, 4
# A gradient whose norm is so small a share of the whole gradient's may be nothing but rounding.
_FLOOR = 1e-6

# What units return, by their numbers, with tensors on the meta device in place of theirs.
Shapes = dict[int, Any]


class _ReachedNext(BaseException):
    """The forward pass has come to the next stage; no error, so that no code of a model handles it."""

    def __init__(self, sent: torch.Tensor) -> None:
        super().__init__()
        self.sent = sent


@dataclass(slots=True)
class StageRun:
    """A forward pass of one stage.

    Attributes:
        stage: number of the stage.
        received: what the stage before has sent; ``None`` in the first one.
        shapes: what units return for this micro-batch; the pass adds those of its own units.
        was_handed: whether the stage's first unit was handed it.
    """

    stage: int
    received: torch.Tensor | None = None
    shapes: Shapes = field(default_factory=dict)
    was_handed: bool = False


class ModelStages:
    """A model whose units are divided into stages.

    Args:
        model: the model; each unit is called once in a forward pass, in their order.
        names: its units, in that order.
        counts: number of units of each stage.
        where: what the model belongs to, for errors.

    Attributes:
        parts: names of the units of each stage.
        absent: the parameters of other stages, which have no memory here.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], counts: Sequence[int], *, where: str) -> None:
        borders = [sum(counts[:number]) for number in range(len(counts) + 1)]
        self.parts = [tuple(names[begin:end]) for begin, end in itertools.pairwise(borders)]
        self._model, self._where = model, where
        self._device = next(model.parameters()).device
        self._units = [model.get_submodule(name) for name in names]
        self._stage_of = [stage for stage, part in enumerate(self.parts) for _ in part]
        self.absent: list[nn.Parameter] = []
        self._running: StageRun | None = None
        self._exchange: Callable[[int, Any], Any] | None = None
        self._elsewhere: frozenset[int] = frozenset()
        self._is_parted = False
        for number, module in enumerate(self._units):
            _Skipping(module, self, number).place()
            if number in borders[1:]:
                handed = self._handing(self._stage_of[number])
                module.register_forward_pre_hook(handed, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._noting(number), prepend=True)

    def forward(self, run: StageRun, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what a stage sends to the next one, or the loss in the last.

        Args:
            run: the pass.
            compute: function that returns the loss of a micro-batch.

        Raises:
            JobError: if the pass does not come to the next stage, or not through its own.
        """
        self._running = run
        try:
            loss = compute()
        except _ReachedNext as reached:
            return reached.sent
        finally:
            self._running = None
        if run.stage < len(self.parts) - 1 or not (run.stage == 0 or run.was_handed):
            raise JobError(
                f"the loss does not call the units of stage {run.stage + 1} after those of stage {run.stage}",
                where=self._where,
                allowed="a loss that calls each unit of the model once, in their order",
            )
        return loss

    def keep(self, stages: Collection[int], shared: Iterable[nn.Parameter]) -> None:
        """Release the weights of all stages but some.

        Args:
            stages: the stages that stay.
            shared: the parameters that stay in any case.
        """
        kept, self._is_parted = set(map(id, shared)), True
        self._elsewhere = frozenset(n for n, stage in enumerate(self._stage_of) if stage not in stages)
        others = (one for number in sorted(self._elsewhere) for one in self._units[number].parameters())
        self.absent = [one for one in dict.fromkeys(others) if id(one) not in kept]
        for parameter in self.absent:
            # The object stays, since other code may hold it, and its memory goes.
            parameter.data, parameter.grad = _nothing(parameter, parameter.device), None
            parameter.requires_grad_(False)

    @contextmanager
    def exchanging(self, exchange: Callable[[int, Any], Any]) -> Iterator[None]:
        """Let whole forward passes in the body run in all stages, each on its own rank.

        Args:
            exchange: function that returns a unit's output on all ranks; it is called with the number of the unit's
                stage and what the unit returns here, ``None`` where it is not computed.
        """
        self._exchange = exchange
        try:
            yield
        finally:
            self._exchange = None

    def shared(self, contained: Collection[str]) -> list[nn.Parameter]:
        """Return the parameters that all stages keep: those that no stage has for itself, in the order of the model.

        Args:
            contained: names of the units whose parameters nothing else uses.
        """
        own = {id(one) for name in contained for one in self._model.get_submodule(name).parameters()}
        return [one for one in self._model.parameters() if id(one) not in own]

    def require_chain(self, compute: Callable[[], torch.Tensor]) -> bool:
        """Refuse a model whose stages one after another do not give its loss and gradient.

        Args:
            compute: function that returns the loss of a micro-batch, without random numbers.

        Returns:
            Whether each parameter has a gradient from one stage alone.

        Raises:
            JobError: if they do not; it names a parameter.
        """
        buffers = copy_buffers(self._model)
        loss = compute()
        if not bool(torch.isfinite(loss.detach())):
            raise self.refusal("its loss is not finite")
        if loss.requires_grad:
            loss.backward()
        expected = {name: one.grad for name, one in self._model.named_parameters() if one.requires_grad}
        self._model.zero_grad(set_to_none=True)
        write_buffers(self._model, buffers)
        try:
            staged, gradients = self._in_stages(compute)
        except AutotuneError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise self.refusal(f"{type(error).__name__}: {one_line(error):.200}") from error
        if not torch.isclose(staged, loss.detach(), rtol=rounding_of(self._model), atol=1e-6):
            raise self.refusal(f"its loss is {float(staged):.6g} in stages and {float(loss.detach()):.6g} at once")
        floor = floor_of(one for one in expected.values() if one is not None)
        for name, parameter in self._model.named_parameters():
            parts = gradients.get(parameter, [])
            if not is_close(sum(parts[1:], parts[0]) if parts else None, expected.get(name), floor):
                raise self.refusal(f"the gradient of {name} is another one in stages than at once")
        return all(len(parts) == 1 for parts in gradients.values())

    def _in_stages(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, dict[nn.Parameter, list[torch.Tensor]]]:
        """Return the loss, and the gradients that each parameter gets from the stages."""
        ends: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        gradients: dict[nn.Parameter, list[torch.Tensor]] = {}
        shapes: Shapes = {}
        received: torch.Tensor | None = None
        for stage in range(len(self.parts)):
            sent = self.forward(StageRun(stage, received, shapes), compute)
            ends.append((received, sent))
            received = sent.detach().requires_grad_(sent.requires_grad)
        gradient = None
        for entry, sent in reversed(ends):
            if sent.requires_grad:
                sent.backward(gradient)
            if entry is not None:
                gradient = torch.zeros_like(entry) if entry.grad is None else entry.grad
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    gradients.setdefault(parameter, []).append(parameter.grad)
                    parameter.grad = None
        return ends[-1][1].detach(), gradients

    def refusal(self, why: str) -> JobError:
        """Return the error for a model that cannot be computed in stages."""
        allowed = "a model each of whose units uses only what the one before it returns, and no gradients of gradients"
        return JobError(f"the model cannot be computed in stages: {why}", where=self._where, allowed=allowed)

    # What units do when they are called.

    def skips(self, number: int) -> bool:
        """Return whether a unit is not to be computed now."""
        run = self._running
        return number in self._elsewhere if run is None else self._stage_of[number] < run.stage

    def stand_in(self, number: int) -> Any:
        """Return NaN in place of what a unit returns, which takes no memory; ``None`` if it will be exchanged."""
        run = self._running
        if run is None:
            return None
        if number not in run.shapes:
            raise self.refusal(f"unit {number + 1} of {len(self._units)} is not called in its place")
        found: Any = map_tensors(lambda one: _nothing(one, self._device), run.shapes[number])
        return found

    def _handing(self, stage: int) -> Callable[..., Any]:
        def handed(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = self._running
            if run is None:
                if self._is_parted and self._exchange is None and torch.is_grad_enabled():
                    raise self.refusal("a unit is called in the backward pass, as by torch.utils.checkpoint")
                return None
            if stage > run.stage + 1 or stage < run.stage:
                return None
            place, found = _hidden(args, kwargs)
            if found is None:
                raise self.refusal("a unit is handed no tensor of real numbers")
            if stage == run.stage + 1:
                raise _ReachedNext(found)
            assert run.received is not None
            if run.was_handed:
                raise self.refusal("the first unit of a stage is called twice")
            run.was_handed = True
            if isinstance(place, int):
                return (*args[:place], run.received, *args[place + 1 :]), kwargs
            return args, {**kwargs, place: run.received}

        return handed

    def _noting(self, number: int) -> Callable[..., Any]:
        def note(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
            if self._running is not None:
                self._running.shapes[number] = map_tensors(shape_of, output)
            elif self._exchange is not None:
                return self._exchange(self._stage_of[number], output)
            return None

        return note


class _Skipping(StandIn):
    """A unit's forward that is left out where another stage computes it."""

    def __init__(self, module: nn.Module, stages: ModelStages, number: int) -> None:
        super().__init__(module)
        self._stages, self._number = stages, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._stages.skips(self._number):
            return self._stages.stand_in(self._number)
        return self.original(*args, **kwargs)


def unit_operations(
    model: nn.Module, names: Sequence[str], compute: Callable[[], torch.Tensor]
) -> tuple[list[float], float, float]:
    """Return the operations of each unit's forward pass, of what is before the units, and of what is after them.

    Args:
        model: the model; each unit is called once, in the order of the names.
        names: names of its units.
        compute: function that returns the loss of a micro-batch.
    """
    counter, reached = FlopCounterMode(display=False), list[float]()

    def note(*_: object) -> None:
        reached.append(float(counter.get_total_flops()))

    units = [model.get_submodule(name) for name in names]
    handles = [units[0].register_forward_pre_hook(note), *(unit.register_forward_hook(note) for unit in units)]
    try:
        with counter, torch.no_grad():
            compute()
    finally:
        for handle in handles:
            handle.remove()
    counts = [after - before for before, after in itertools.pairwise(reached)]
    return counts, reached[0], float(counter.get_total_flops()) - reached[-1]


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's shape and dtype, as a tensor on the meta device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _nothing(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return NaN of a tensor's shape, which takes no memory; zeros if it has whole numbers."""
    value = math.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, torch.Tensor | None]:
    """Return the place and value of the first argument that is a tensor of real numbers."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return place, value
    return 0, None


def floor_of(gradients: Iterable[torch.Tensor]) -> float:
    """Return the difference below which gradients count as equal: some are nothing but rounding, as of a key's bias."""
    whole = math.hypot(*(float(torch.linalg.vector_norm(_dense(one))) for one in gradients))
    return _FLOOR * whole if math.isfinite(whole) else 0.0


def is_close(one: torch.Tensor | None, two: torch.Tensor | None, floor: float) -> bool:
    """Return whether two gradients differ by a small share of the second one's norm, or by less than a floor."""
    if one is None or two is None:
        return one is two
    one, two = _dense(one), _dense(two)
    apart, size = torch.linalg.vector_norm(one - two), torch.linalg.vector_norm(two)
    tolerance = max(ROUNDING, _ROUNDINGS * torch.finfo(two.dtype).eps)
    return bool(apart <= tolerance * size + floor)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def rounding_of(model: nn.Module) -> float:
    """Return the largest relative difference of two losses of a model that is due to the order of sums."""
    kinds = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return max([ROUNDING, *(_ROUNDINGS * torch.finfo(one).eps for one in kinds)])
