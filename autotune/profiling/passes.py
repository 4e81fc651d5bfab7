"""Run a unit's forward and backward passes on copies, once saving and once recomputing, and compare the results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.mechanics import randomness
from autotune.mechanics.activations import WRITTEN, Recomputation, undone
from autotune.mechanics.copies import CopyError, Loans, TensorCopy, Weights, copied, dissolve, state_of, twin_of
from autotune.mechanics.kept import flattened
from autotune.mechanics.memory_meter import strided
from autotune.profiling.outside_state import Surroundings, own_attributes

# Relative differences, by 2-norms, up to which two passes over one input differ by rounding alone: so many units in the
# last place (sums that cancel lose as many), and never what dropout does (a rate of 0.1 differs by 0.4).
_ROUNDING_ULPS, _ROUNDING_FRAC = 32.0, 0.2
DRAWS = "it draws from python's or numpy's generator, which recomputation does not repeat"
# So many passes are a sample of what passes differ by, which may be so many times as much.
_REPEATS, _PASSES_LIKE_THEM = 3, 4.0


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A unit, and what it was called with.

    Attributes:
        module: the unit.
        forward: its forward, where no copy can be made of it; ``None`` where one can.
        args: what it was called with.
        kwargs: the same, by keyword.
        before: the generators' states.
        context: the context variables that it was called with.
        outputs: what its first pass returned, on the host.
    """

    module: nn.Module
    forward: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    before: randomness.RandomState
    context: Context
    outputs: list[torch.Tensor]

    def passes(self, *, recomputes: bool) -> _Outcome:
        """Return the results of the unit's passes; the unit itself is not changed."""
        randomness.restore_torch(self.before)
        loans = Loans()
        try:
            handed = copied((self.args, dict(self.kwargs)), loans.lend)
            passes = functools.partial(_passes, recomputes=recomputes, context=_like(self.context, loans.lend))
            if self.forward is not None:
                with undone(self.module):
                    return passes(self.module, self.forward, *handed)
            twin = twin_of(self.module, loans.lend)
            try:
                return passes(twin, twin.forward, *handed)
            finally:
                dissolve(twin)
        finally:
            loans.take_back()


def _like(context: Context, lend: TensorCopy) -> Context:
    """Return a context with copies of what a context holds, as far as that can be copied."""
    made = Context()
    for variable, value in context.items():
        try:
            made.run(variable.set, copied(value, lend))
        except CopyError:
            continue
    return made


def compared(unit: Unit) -> str | None:
    """Return why a unit may not be recomputed, as passes over copies show; ``None`` if it may."""
    weights = Weights(unit.module)
    try:
        reason = _compared(unit)
    finally:
        written = weights.put_back()
    return "it writes to its own weights" if written else reason


def _compared(unit: Unit) -> str | None:
    found: list[_Outcome] = []
    if randomness.draws_on_host(lambda: found.append(unit.passes(recomputes=False))):
        return DRAWS
    saved = found[0]
    unit.outputs.extend(saved.outputs)
    if saved.writes:
        return WRITTEN
    # What is only made once, such as a table that is kept, is there by now.
    handed = flattened(unit.args, unit.kwargs)[0]
    around = Surroundings(unit.module, own=() if unit.forward is None else own_attributes(unit.module), handed=handed)
    recomputed = unit.passes(recomputes=True)
    if recomputed.barred is not None:
        return recomputed.barred
    changed = around.changed()
    if changed is not None:
        return f"it changes {changed}, which recomputation would change once more"
    if saved.same(recomputed):
        return None
    return _judged(saved, recomputed, [unit.passes(recomputes=False) for _ in range(_REPEATS)])


def _judged(saved: _Outcome, recomputed: _Outcome, repeated: Sequence[_Outcome]) -> str | None:
    """Return why a recomputed pass may not differ from a saved one; ``None`` if saved passes differ as much."""
    if all(saved.same(other) for other in repeated):
        return "recomputed, its gradients, buffers or generators differ"
    apart = max(saved.apart(other) for other in repeated)
    if apart > 1:
        return "two passes over one input differ: it has a randomness of its own"
    if saved.apart(recomputed) > min(_PASSES_LIKE_THEM * apart, 1.0):
        return "recomputed, its gradients differ by more than two passes that save"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """The results of a forward and backward pass.

    Attributes:
        tensors: gradients and outputs.
        outputs: the outputs alone.
        state: all that the unit and its arguments hold afterwards, by path.
        generators: the states of the random generators.
        writes: whether it wrote to tensors that it was handed.
        barred: why it could not be recomputed at all; ``None`` if it could.
    """

    tensors: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor]
    state: Mapping[str, Any]
    generators: Sequence[torch.Tensor]
    writes: bool
    barred: str | None

    def same(self, other: _Outcome) -> bool:
        return self._like(other) and all(
            _equal(one, two) for one, two in zip(self._values(), other._values(), strict=True)
        )

    def apart(self, other: _Outcome) -> float:
        """Return the largest difference of two tensors over what rounding explains; above 1 it is something else."""
        if not self._like(other):
            return math.inf
        return max((distance(one, two) for one, two in zip(self._values(), other._values(), strict=True)), default=0.0)

    def _values(self) -> list[torch.Tensor | None]:
        return [*self.tensors, *(value for value in self.state.values() if isinstance(value, torch.Tensor))]

    def _like(self, other: _Outcome) -> bool:
        """Tell whether all but tensors are the same."""
        drawn = all(torch.equal(one, two) for one, two in zip(self.generators, other.generators, strict=True))
        return (
            drawn
            and self.state.keys() == other.state.keys()
            and all(map(_alike, self.state.values(), other.state.values()))
        )


def _alike(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) or type(one) is not type(two):
        return isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"))
    return one is two or one == two or one != one


def _passes(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    recomputes: bool,
    context: Context,
) -> _Outcome:
    """Run a unit forward and backward on what it may write to; forward in a context of its own."""
    inputs = tensors_in((args, kwargs))
    versions = [tensor._version for tensor in inputs]
    recomputation = Recomputation(module)
    if recomputes:
        outputs = context.run(recomputation.run, forward, args, kwargs)
    else:
        outputs = context.run(forward, *args, **kwargs)
    # What it was handed may have taken up some of what it computes.
    met = {id(tensor) for tensor in inputs}
    found = [tensor for tensor in tensors_in((outputs, args, kwargs)) if id(tensor) not in met]
    roots = [leaf for leaf in found if leaf.requires_grad]
    wanted = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
    gradients: Sequence[torch.Tensor | None] = ()
    if roots and wanted:
        # Anything but constant: a constant hides what a normalisation layer does.
        gradients = torch.autograd.grad(roots, wanted, [_weights(leaf) for leaf in roots], allow_unused=True)
    # On the host: what is compared takes no room that the passes need.
    values = [
        *(None if gradient is None else gradient.cpu() for gradient in gradients),
        *(leaf.detach().cpu() for leaf in found),
    ]
    made = [leaf.detach().cpu() for leaf in tensors_in(outputs)]
    writes = versions != [tensor._version for tensor in inputs]
    state, generators = state_of((module, args, kwargs)), randomness.drawn_states()
    return _Outcome(values, made, state, generators, writes, recomputation.barred)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that an object leads to, whatever it is."""
    found: list[torch.Tensor] = []

    def met(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    copied(value, met)
    return found


def _weights(leaf: torch.Tensor) -> torch.Tensor:
    """Return what an output is weighed with; along its last dimension, where that will do, which takes no room."""
    count = leaf.shape[-1] if leaf.dim() and leaf.shape[-1] > 1 else leaf.numel()
    along = torch.linspace(-1, 1, count, device=leaf.device).to(leaf.dtype)
    return along.expand_as(leaf) if leaf.dim() and leaf.shape[-1] > 1 else along.view_as(leaf)


def _equal(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    if one.dtype != two.dtype or one.shape != two.shape or one.layout != two.layout:
        return False
    parts = zip(strided(one), strided(two), strict=True)
    return all(a.shape == b.shape and bool(torch.isclose(a, b, 0, 0, True).all()) for a, b in parts)


def distance(one: torch.Tensor | None, two: torch.Tensor | None) -> float:
    """Return the 2-norm of two tensors' difference over what rounding explains; infinite where they are not alike."""
    if _equal(one, two):
        return 0.0
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype or not one.is_floating_point():
        return math.inf
    if one.layout is not torch.strided or two.layout is not torch.strided:
        return math.inf
    size, gap = (float(torch.linalg.vector_norm(value.double())) for value in (one, one.double() - two.double()))
    # What is not a number is no rounding.
    found = gap / size / min(_ROUNDING_ULPS * torch.finfo(one.dtype).eps, _ROUNDING_FRAC) if size else math.inf
    return found if math.isfinite(found) else math.inf
