"""Compare trial passes, which run alongside a live run without changing it: their results are discarded.

They show whether a batch may be cut, and how 16 bits change its gradient, which the probe of recomputation does not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from autotune.mechanics import dropout_off, randomness
from autotune.mechanics.loop_signals import any_error
from autotune.profiling.gradient_sketch import sketches
from autotune.profiling.trial_state import ModelState, Pair

logger = logging.getLogger(__name__)

# Largest relative difference of loss and gradient between a batch that is cut in two and the whole batch: in fp32, and
# if the user's own autocast rounds to 16 bits.
FP32_TOLERANCE = 1e-4
AUTOCAST_TOLERANCE = 3e-2
# Largest relative difference of a gradient in 16 bits.
PRECISION_TOLERANCE = 0.1
# Largest relative difference of the gradient of a unit with an approximate storage: rounding to four bits causes a
# tenth in ordinary blocks. A unit whose gradient is a smaller share of the whole is judged as if it had this share.
STORAGE_TOLERANCE = 0.2
LEAST_SHARE = 0.01
# Largest change of a buffer, as a share of its values, that is due to rounding.
_ROUNDING = 1e-6
# Most characters of an error in a reason.
_MOST_TEXT = 200
_COUPLED = "a sample's loss depends on the others of its batch (BatchNorm, contrastive losses, capacities)"


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Result of running a batch under one plan.

    Attributes:
        loss: mean loss of the batch.
        gradients: a sketch of each parameter's gradient; ``None`` for a parameter without one.
        changes: some elements of each tensor of the model that the passes wrote to, before and after them.
        failure: the first exception that a pass raised, as text; ``None`` if none did.
        owners: for each gradient, the ``id()`` of its parameter.
    """

    loss: float
    gradients: Sequence[torch.Tensor | None]
    changes: Mapping[str, Pair]
    failure: str | None = None
    owners: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has a gradient: a loop may skip a batch."""
        return all(one is None for one in self.gradients)

    @property
    def is_usable(self) -> bool:
        """Whether other outcomes can be compared with it: no pass failed, and there are gradients, all finite."""
        finite = all(one is None or bool(torch.isfinite(one).all()) for one in self.gradients)
        return self.failure is None and finite and not self.is_empty


@dataclass(slots=True)
class Attempt:
    """Trial passes under one plan.

    Attributes:
        training: whether the model runs in the modes in which it trains, except dropout; else in evaluation mode,
            except BatchNorm and InstanceNorm, since trial passes must show if samples depend on each other.
        losses: weighted losses of the micro-batches.
        failures: exceptions that the passes raised.
        changes: see :class:`Outcome`.
        drew: whether the passes drew random numbers, so that passes over other micro-batches differ.
        copied_bytes: bytes of the copies by which the model's state was restored.
        left: whether the loop has left the passes before they ended, and their effects are undone.
    """

    training: bool
    losses: list[torch.Tensor] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    changes: dict[str, Pair] = field(default_factory=dict)
    drew: bool = False
    copied_bytes: int = 0
    left: bool = False
    _undo: Callable[[], None] = lambda: None

    def outcome(self, parameters: Sequence[nn.Parameter]) -> Outcome:
        """Return the outcome, with the gradients that the passes accumulated in the parameters."""
        gradients: list[torch.Tensor | None] = []
        try:
            gradients += sketches(parameter.grad for parameter in parameters)
        except any_error() as error:  # a gradient that cannot be compared must not end the run
            self.failures.append(error.with_traceback(None))
        failure = next((f"{type(error).__name__}: {_first_line(error)}" for error in self.failures), None)
        return Outcome(float(sum(self.losses)), gradients, self.changes, failure, tuple(map(id, parameters)))

    def leave(self) -> None:
        """Undo the passes, which the loop may have left; if it has not, they are undone again at their end."""
        self.left = True
        self._undo()

    @contextmanager
    def undone(self, model: nn.Module, written: Collection[str]) -> Iterator[None]:
        """Run the body with dropout off, then restore the generators and the model's state.

        Args:
            model: the model; the caller must clear the gradients.
            written: names of weights and large buffers that the model writes to.
        """
        state, before = ModelState(model, written), randomness.capture()
        self.copied_bytes = state.copied_bytes
        modes = {module: module.training for module in model.modules()}
        for module, training in modes.items():
            on = not isinstance(module, _DropoutNd) if self.training else isinstance(module, _NormBase)
            module.training = training and on
        free, turn_on = _keep_modes(modes), dropout_off.turn_off(model)

        def undo() -> None:
            turn_on()
            free()
            state.restore()
            for module, training in modes.items():
                module.training = training
            randomness.restore(before)

        self._undo, is_closed = undo, False
        try:
            yield
            self.changes = state.changes()
            if state.lost:
                logger.warning("trial passes wrote to %s, which the model did not write to before", state.lost)
                self.failures.append(RuntimeError(f"the model writes to {state.lost[0]!r}"))
        except GeneratorExit:
            is_closed = True
            raise
        finally:
            self.drew = randomness.drawn(before) or state.drew
            if not (is_closed and self.left):
                # The loop may have gone on for long after it left the passes.
                undo()


def k_lock(whole: Outcome, cut: Outcome, tolerance: float) -> str | None:
    """Return why k may not be changed; ``None`` if it may.

    Args:
        whole: outcome of the whole batch.
        cut: outcome of the batch cut in two micro-batches, weighted by items.
        tolerance: largest relative difference.
    """
    failure = whole.failure or cut.failure
    if failure is not None:
        return f"cut in two, it fails: {failure}"
    if not abs(whole.loss) < float("inf") or not abs(cut.loss) < float("inf"):
        return "its loss is not finite"
    if abs(whole.loss - cut.loss) > tolerance * max(abs(whole.loss), 1e-3):
        return (
            f"cut in two, the weighted losses sum to {cut.loss:.6g} instead of {whole.loss:.6g}: "
            f"`count` is wrong or missing, or {_COUPLED}"
        )
    difference = _difference(whole, cut)
    if difference is None:
        return "cut in two, different parameters get gradients"
    if not difference <= tolerance:
        return f"cut in two, the gradient differs by {difference:.2%}: {_COUPLED}"
    changed = dict.fromkeys((*whole.changes, *cut.changes))
    other = next((name for name in changed if not _same_change(whole, cut, name, tolerance)), None)
    if other is not None:
        return f"cut in two, {other!r} of the model gets other values: it counts calls, or averages over them"
    return None


def precision_lock(exact: Outcome, rounded: Outcome) -> str | None:
    """Return why a 16-bit precision may not be used; ``None`` if it may.

    Args:
        exact: outcome of a batch in the user's own precision.
        rounded: outcome of the same batch in 16 bits everywhere.
    """
    failure = exact.failure or rounded.failure
    if failure is not None:
        return f"it fails: {failure}"
    difference = _difference(exact, rounded)
    if difference is None:
        return "different parameters get gradients"
    if not difference <= PRECISION_TOLERANCE:
        return f"it changes the gradient by {difference:.1%}; at most {PRECISION_TOLERANCE:.0%} is tolerated"
    return None


def storage_lock(exact: Outcome, approximate: Outcome, units: Mapping[str, nn.Module]) -> str | None:
    """Return why an approximate storage may not be used; ``None`` if it may.

    Args:
        exact: outcome of a batch under exact storages; usable.
        approximate: outcome of the same batch where some units have the approximate one.
        units: all units, by name; those before the ones that have it are concerned, too.
    """
    if approximate.failure is not None:
        return f"it fails: {approximate.failure}"
    if _difference(exact, approximate) is None:
        return "different parameters get gradients"
    pairs = {
        owner: (one, two)
        for owner, one, two in zip(exact.owners, exact.gradients, approximate.gradients, strict=True)
        if one is not None and two is not None
    }
    least = LEAST_SHARE**2 * sum(_squared(one) for one, _ in pairs.values())
    for name, module in {"the model": None, **units}.items():
        own = pairs.keys() if module is None else pairs.keys() & set(map(id, module.parameters()))
        size = max(sum(_squared(pairs[owner][0]) for owner in own), least, 1e-300)
        apart = sum(_squared(_wide(pairs[owner][0]) - _wide(pairs[owner][1])) for owner in own)
        error = float((apart / size) ** 0.5)
        if not error <= STORAGE_TOLERANCE:
            return f"it changes the gradient of {name} by {error:.1%}; at most {STORAGE_TOLERANCE:.0%} is tolerated"
    return None


def _keep_modes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Let ``train()`` and ``eval()`` of some modules have no effect, as some loops call them at each step.

    The class's method is replaced, and not the modules' own, which copies of them would take over.

    Returns:
        A function that gives them their effect back.
    """
    kept, former = set(map(id, modules)), nn.Module.train

    @functools.wraps(former)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        return self if id(self) in kept else former(self, mode)

    def free() -> None:
        kept.clear()
        if nn.Module.train is train:
            nn.Module.train = former  # type: ignore[method-assign]

    nn.Module.train = train  # type: ignore[assignment, method-assign]
    return free


def _first_line(error: Exception) -> str:
    """Return the beginning of an error's message, which may have pages."""
    return next(iter(str(error).splitlines()), "")[:_MOST_TEXT]


def _same_change(whole: Outcome, cut: Outcome, name: str, tolerance: float) -> bool:
    """Return whether a tensor has the same values after the passes under both plans."""
    if name not in whole.changes or name not in cut.changes:
        return False
    (before, one), (_, other) = whole.changes[name], cut.changes[name]
    if not one.shape == other.shape == before.shape:
        return False
    one, other, before = _wide(one), _wide(other), _wide(before)

    def distance(two: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(torch.where(one == two, 0.0, one - two).nan_to_num(0.0)))

    size = float(torch.linalg.vector_norm(one[torch.isfinite(one)]))
    return distance(other) <= tolerance * distance(before) + _ROUNDING * size


def _difference(one: Outcome, two: Outcome) -> float | None:
    """Return the relative 2-norm of the gradients' difference; ``None`` if other parameters have one, or none has."""
    if any((a is None) != (b is None) for a, b in zip(one.gradients, two.gradients, strict=True)):
        return None
    pairs = [(a, b) for a, b in zip(one.gradients, two.gradients, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    size = sum(_squared(a) for a, _ in pairs)
    return float((sum(_squared(_wide(a) - _wide(b)) for a, b in pairs) / max(size, 1e-300)) ** 0.5)


def _squared(gradient: torch.Tensor) -> float:
    """Return the square of a gradient's 2-norm."""
    return float(_wide(gradient).abs().square().sum())


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
