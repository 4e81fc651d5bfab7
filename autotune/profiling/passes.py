"""Run a unit's forward and backward passes on copies, first saving and then recomputing, and compare the results."""

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
from autotune.mechanics.activations import WRITTEN, Recomputation, hooks_kept, undone
from autotune.mechanics.copies import CopyError, Loans, TensorCopy, Weights, copied, dissolve, state_of, twin_of
from autotune.mechanics.kept import flattened
from autotune.mechanics.memory_meter import strided
from autotune.profiling.outside_state import Surroundings, own_attributes

# The largest relative difference in 2-norm that rounding explains: this many units in the last place, which cancelling
# sums may lose, but at most this fraction, which is less than dropout causes (0.4 at a rate of 0.1).
_ROUNDING_ULPS, _ROUNDING_FRAC = 32.0, 0.2
DRAWS = "it draws from Python's or NumPy's generator, which recomputation does not repeat"
# Number of repeated passes that sample how much passes differ, and the tolerated multiple of that difference.
_REPEATS, _PASSES_LIKE_THEM = 3, 4.0


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A unit and the arguments of a call.

    Attributes:
        module: the unit.
        forward: forward to run on the unit itself, if it cannot be run on a copy; ``None`` if it can.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        before: states of the random generators before the call.
        context: context variables of the call.
        outputs: list to which the outputs of the first pass are added, on the host.
    """

    module: nn.Module
    forward: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    before: randomness.RandomState
    context: Context
    outputs: list[torch.Tensor]

    def passes(self, *, recomputes: bool) -> _Outcome:
        """Return the results of a forward and a backward pass; the unit itself is not changed."""
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
                # Hooks that remove themselves do so from the unit.
                with hooks_kept(self.module):
                    return passes(twin, twin.forward, *handed)
            finally:
                dissolve(twin)
        finally:
            loans.take_back()


def _like(context: Context, lend: TensorCopy) -> Context:
    """Return a copy of a context with copies of its values, without those that cannot be copied."""
    made = Context()
    for variable, value in context.items():
        try:
            made.run(variable.set, copied(value, lend))
        except CopyError:
            continue
    return made


def compared(unit: Unit) -> str | None:
    """Return why a unit may not be recomputed, according to passes on copies; ``None`` if it may."""
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
    # By now the first pass has created what is created only once, such as a cached table.
    handed = flattened(unit.args, unit.kwargs)[0]
    around = Surroundings(unit.module, own=() if unit.forward is None else own_attributes(unit.module), handed=handed)
    recomputed = unit.passes(recomputes=True)
    if recomputed.barred is not None:
        return recomputed.barred
    changed = around.changed()
    if changed is not None:
        return f"it changes {changed}, which recomputation would change a second time"
    if saved.same(recomputed):
        return None
    return _judged(saved, recomputed, unit.passes)


def _judged(saved: _Outcome, recomputed: _Outcome, passes: Callable[..., _Outcome]) -> str | None:
    """Return why a recomputed pass differs too much from a saving one; ``None`` if repeated passes differ similarly.

    Atomic sums may repeat themselves several times before they differ, so if passes that save do not differ, or little,
    recomputing ones show whether they differ among themselves.
    """
    repeated = [passes(recomputes=False) for _ in range(_REPEATS)]
    noise, apart = max(saved.apart(other) for other in repeated), saved.apart(recomputed)
    if noise > 1:
        return "two passes over the same input differ: it is not deterministic"
    if apart > _PASSES_LIKE_THEM * noise:
        noise = max(noise, *(recomputed.apart(passes(recomputes=True)) for _ in range(_REPEATS)))
    if apart <= min(_PASSES_LIKE_THEM * noise, 1.0):
        return None
    if all(saved.same(other) for other in repeated):
        return "recomputed, its gradients, buffers or generators differ"
    return "recomputed, its gradients differ by more than repeated passes that save do"


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """The results of a forward and backward pass.

    Attributes:
        tensors: gradients, outputs, and tensors that the pass stored in its arguments.
        outputs: the outputs alone.
        state: values that the unit and its arguments contain afterwards, by path.
        generators: states of torch's random generators afterwards.
        writes: whether the passes wrote to tensors in the arguments.
        barred: why the unit cannot be recomputed at all; ``None`` if it can.
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
        """Return the largest :func:`distance` between corresponding tensors; rounding explains at most 1."""
        if not self._like(other):
            return math.inf
        return max((distance(one, two) for one, two in zip(self._values(), other._values(), strict=True)), default=0.0)

    def _values(self) -> list[torch.Tensor | None]:
        return [*self.tensors, *(value for value in self.state.values() if isinstance(value, torch.Tensor))]

    def _like(self, other: _Outcome) -> bool:
        """Return whether everything except tensors is the same."""
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
    """Run a unit's forward pass, in a context, and its backward pass, on arguments that they may write to."""
    inputs = tensors_in((args, kwargs))
    versions = [tensor._version for tensor in inputs]
    recomputation = Recomputation(module)
    if recomputes:
        outputs = context.run(recomputation.run, forward, args, kwargs)
    else:
        outputs = context.run(forward, *args, **kwargs)
    # The pass may have stored computed tensors in its arguments.
    met = {id(tensor) for tensor in inputs}
    found = [tensor for tensor in tensors_in((outputs, args, kwargs)) if id(tensor) not in met]
    roots = [leaf for leaf in found if leaf.requires_grad]
    wanted = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
    gradients: Sequence[torch.Tensor | None] = ()
    if roots and wanted:
        # Not constant: a constant gradient vanishes in a normalisation layer.
        gradients = torch.autograd.grad(roots, wanted, [_weights(leaf) for leaf in roots], allow_unused=True)
    # On the host, to leave the device's memory to the passes.
    values = [
        *(None if gradient is None else gradient.cpu() for gradient in gradients),
        *(leaf.detach().cpu() for leaf in found),
    ]
    made = [leaf.detach().cpu() for leaf in tensors_in(outputs)]
    writes = versions != [tensor._version for tensor in inputs]
    state, generators = state_of((module, args, kwargs)), randomness.drawn_states()
    return _Outcome(values, made, state, generators, writes, recomputation.barred)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that an object of any type leads to."""
    found: list[torch.Tensor] = []

    def met(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    copied(value, met)
    return found


def _weights(leaf: torch.Tensor) -> torch.Tensor:
    """Return a gradient for an output, which if possible varies only along the last dimension, to save memory."""
    count = leaf.shape[-1] if leaf.dim() and leaf.shape[-1] > 1 else leaf.numel()
    along = torch.linspace(-1, 1, count, device=leaf.device).to(leaf.dtype)
    return along.expand_as(leaf) if leaf.dim() and leaf.shape[-1] > 1 else along.view_as(leaf)


def _equal(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    if one.dtype != two.dtype or one.shape != two.shape or one.layout != two.layout:
        return False
    parts = zip(strided(one), strided(two), strict=True)
    # Where nothing is NaN, the first comparison is enough, and ten times as fast.
    return all(
        a.shape == b.shape and (torch.equal(a, b) or bool(torch.isclose(a, b, 0, 0, True).all())) for a, b in parts
    )


def distance(one: torch.Tensor | None, two: torch.Tensor | None) -> float:
    """Return the 2-norm of two tensors' difference divided by what rounding explains; infinite if not comparable."""
    if _equal(one, two):
        return 0.0
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype or not one.is_floating_point():
        return math.inf
    if one.layout is not torch.strided or two.layout is not torch.strided:
        return math.inf
    size, gap = (float(torch.linalg.vector_norm(value.double())) for value in (one, one.double() - two.double()))
    # Rounding does not explain NaN.
    found = gap / size / min(_ROUNDING_ULPS * torch.finfo(one.dtype).eps, _ROUNDING_FRAC) if size else math.inf
    return found if math.isfinite(found) else math.inf
