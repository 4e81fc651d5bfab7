"""Find the units whose gradient an approximate choice puts too far off: an inexact storage, or a precision asked for.

Each choice is tried in all units at once. Only where the gradient of some unit is off by more than its limit, halves of
the units are tried in turn, down to the single units that are to blame. A choice that spoils nothing so costs a single
forward and backward pass, however many units there are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autotune.choices import Precision, Storage
from autotune.errors import JobError
from autotune.job import Job
from autotune.mechanics.randomness import isolated
from autotune.mechanics.trees import map_tensors
from autotune.plan import Plan
from autotune.profiling.gradient_error import WithoutDropout, tried_gradient
from autotune.profiling.job_shape import other_batch
from autotune.profiling.tracing_engine import WatchedEngine
from autotune.profiling.trial_passes import LEAST_SHARE, STORAGE_TOLERANCE

# Relative error above which a unit's gradient is off too far. Its cosine with the exact gradient may then be below
# sqrt(1 - 0.5^2) = 0.87.
_MOST_ERROR = 0.5
# Where the gradients of two batches differ by less than that, their difference is the limit, but no less than this: an
# error that averages out over steps does little harm.
_LEAST_LIMIT = STORAGE_TOLERANCE
# Two passes over one batch that differ by more than this are no measure of anything else.
_REPEATED = 0.01
# Smaller errors are told as smaller than this.
_LEAST_TOLD = 0.001
# The whole gradient, beside the units.
WHOLE = ""

Choice = Precision | Storage
_Gradient = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientError:
    """How far a choice puts the gradient of a unit's parameters off.

    Attributes:
        unit: name of the unit; :data:`WHOLE` for all parameters.
        relative: |g' - g| / |g|, infinite if g' is not finite.
        cosine: cosine of the angle between g' and g.
        noise: |h - g| / |g| with the gradient h of another batch; ``None`` if there is none.
    """

    unit: str
    relative: float
    cosine: float
    noise: float | None

    @property
    def limit(self) -> float:
        """The relative error above which the choice is locked."""
        return _MOST_ERROR if self.noise is None else min(_MOST_ERROR, max(self.noise, _LEAST_LIMIT))

    @property
    def is_small(self) -> bool:
        """Whether the error is within its limit."""
        return self.relative <= self.limit

    def __str__(self) -> str:
        noise = "" if self.noise is None else f"; two batches differ by {as_share(self.noise)}"
        return f"{as_share(self.relative)} (cosine {self.cosine:.3f}{noise})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a choice does to the gradient.

    Attributes:
        choice: the choice.
        units: the units that were given it.
        whole: error of the whole gradient if all of them have it.
        worst: the unit, of all, whose gradient is then off most in relation to its limit.
        locked: the units to which it must not be given, with the error that it causes in them alone.
        rest: error of the whole gradient if all the others have it; ``None`` if there are none.
        problem: what the step raised; empty if nothing.
    """

    choice: Choice
    units: tuple[str, ...]
    whole: GradientError
    worst: GradientError
    locked: Mapping[str, GradientError]
    rest: GradientError | None
    problem: str = ""

    @property
    def is_useless(self) -> bool:
        """Whether no unit may have the choice."""
        return self.rest is None or not self.rest.relative <= _MOST_ERROR

    @property
    def locks(self) -> tuple[str, ...]:
        """The units that may not have the choice."""
        return self.units if self.is_useless else tuple(self.locked)


class UnjudgedError(Exception):
    """Errors cannot be measured on this gradient; the message says why."""


def find_errors(engine: WatchedEngine, job: Job, seed: int, choices: Collection[Choice]) -> list[Finding]:
    """Return what some choices do to the gradient of a step.

    Micro-batches are as small as the job allows, and other units have the leanest exact storage. Precisions are tried
    without dropout, whose masks may depend on the format.

    Args:
        engine: the engine; its training state does not change.
        job: the job, whose batches differ.
        seed: random seed for its batches.
        choices: the choices.

    Raises:
        JobError: if a step raises without any of the choices.
        UnjudgedError: if its gradient is not finite, or is another one when it is repeated.
    """
    found = []
    for kind, context in ((Precision, WithoutDropout()), (Storage, contextlib.nullcontext())):
        own = [one for one in choices if isinstance(one, kind)]
        if own and engine.space.units:
            with context:
                trial = _Trial(engine, job, seed)
                found += [finding for one in own if (finding := trial.finding(one)) is not None]
    return found


class _Trial:
    """The trial of choices in units of an engine, against one exact gradient."""

    def __init__(self, engine: WatchedEngine, job: Job, seed: int) -> None:
        self._engine = engine
        space = engine.space
        exact = [storage for storage in space.storages if storage.exact][-1]
        lean = space.leanest().changed(precision=space.baseline().precision)
        self._plan = lean.changed(storage=dict.fromkeys(space.recomputable, exact))
        gradient, problem = tried_gradient(engine, self._plan)
        if problem:
            raise JobError(f"a step with all units {exact.label} raised {problem}", where=f"job {job.name!r}")
        self._exact = gradient
        names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
        places = {names.get(id(parameter)): place for place, parameter in enumerate(engine.update.parameters)}
        self._groups = {WHOLE: list(range(len(gradient)))}
        for unit in space.units:
            own = [places[name] for name in unit.parameter_names if name in places]
            if any(gradient[place] is not None for place in own):
                self._groups[unit.name] = own
        self._noise: dict[str, float] = {}
        self._least = LEAST_SHARE * math.sqrt(float(self._sums(gradient)[:, 0].sum()))
        self._require_steady()
        self._noise = self._noises(job, seed)

    def finding(self, choice: Choice) -> Finding | None:
        """Return what a choice does; ``None`` if no unit may have it."""
        space = self._engine.space
        if isinstance(choice, Storage):
            units = tuple(name for name in space.recomputable if choice in space.storages_of(name))
        else:
            units = tuple(unit.name for unit in space.units if choice in space.precisions_of(unit.name))
        if not units:
            return None
        errors, problem = self._errors(choice, units)
        whole, worst = errors[WHOLE], _worst(errors)
        if self._engine.decided(problem):
            return Finding(
                choice=choice, units=units, whole=whole, worst=worst, locked={}, rest=None, problem=problem or "?"
            )
        locked = self._to_blame(choice, units, worst)
        others = [name for name in units if name not in locked]
        rest: GradientError | None = whole
        if locked:
            rest = self._errors(choice, others)[0][WHOLE] if others else None
        return Finding(
            choice=choice, units=units, whole=whole, worst=worst, locked=locked, rest=self._engine.decided(rest)
        )

    def _to_blame(self, choice: Choice, units: Sequence[str], worst: GradientError) -> dict[str, GradientError]:
        """Return the units that put some unit's gradient too far off if they alone have a choice.

        Args:
            choice: the choice.
            units: the units to try.
            worst: the worst error if all of them have it.
        """
        worst = self._engine.decided(worst)
        if worst.is_small:
            return {}
        if len(units) == 1:
            return {units[0]: worst}
        half = len(units) // 2
        parts = units[:half], units[half:]
        return {
            name: error
            for part in parts
            for name, error in self._to_blame(choice, part, _worst(self._errors(choice, part)[0])).items()
        }

    def _errors(self, choice: Choice, units: Iterable[str]) -> tuple[dict[str, GradientError], str]:
        """Return the errors of all units and of the whole if some units have a choice, and what the step raised."""
        chosen = dict.fromkeys(units, choice)
        plan: Plan
        if isinstance(choice, Storage):
            plan = self._plan.storing(chosen, choice)
        else:
            plan = self._plan.changed(precision={**self._plan.precision, **chosen})
        gradient, problem = tried_gradient(self._engine, plan)
        if problem:
            gradient = [None if one is None else torch.full_like(one, math.nan) for one in self._exact]
        return self._compared(gradient), problem

    def _compared(self, gradient: _Gradient) -> dict[str, GradientError]:
        """Return the errors of all units and of the whole if a gradient stands in for the exact one."""
        sums = self._sums(gradient)
        return {name: self._error(name, sums[places].sum(0).tolist()) for name, places in self._groups.items()}

    def _error(self, name: str, sums: Sequence[float]) -> GradientError:
        own, other, product, apart = sums
        relative = math.sqrt(apart) / max(math.sqrt(own), self._least, 1e-300)
        finite = math.isfinite(relative)
        return GradientError(
            unit=name,
            relative=relative if finite else math.inf,
            cosine=product / max(math.sqrt(own * other), 1e-300) if finite else 0.0,
            noise=self._noise.get(name),
        )

    def _sums(self, gradient: _Gradient) -> torch.Tensor:
        """Return, for each parameter, |g|^2, |h|^2, g h and |h - g|^2 of its exact gradient g and another one, h.

        One parameter at a time: gradients may be as large as the model.
        """
        rows = []
        for one, two in zip(self._exact, gradient, strict=True):
            if one is None or two is None:
                rows.append(torch.zeros(4, dtype=torch.float64))
                continue
            own, other = _numbers(one), _numbers(two)
            apart = other - own
            pairs = ((own, own), (other, other), (own, other), (apart, apart))
            rows.append(torch.stack([torch.dot(a, b) for a, b in pairs]).cpu())
        return torch.stack(rows)

    def _require_steady(self) -> None:
        """Refuse a gradient that is not finite, or is another one in a second pass over the same batch."""
        again, problem = tried_gradient(self._engine, self._plan)
        if problem:
            raise UnjudgedError(f"a second pass over the same batch raised {problem}")
        # A gradient that is not finite differs from itself.
        apart = self._compared(again)[WHOLE].relative
        if math.isinf(apart):
            raise UnjudgedError("the gradient of a step is not finite")
        if apart > _REPEATED:
            raise UnjudgedError(f"two passes over the same batch differ by {as_share(apart)}")

    def _noises(self, job: Job, seed: int) -> dict[str, float]:
        """Return by unit how much the gradients of two batches differ; empty if there is no other batch to compare."""
        with isolated():
            other = other_batch(job, seed)
        if other is None:
            return {}
        moved = map_tensors(lambda leaf: leaf.to(self._engine.device), other)
        needed = 1 if job.batching == "fixed" else self._plan.accumulation_steps
        gradient, problem = tried_gradient(self._engine, self._plan, [moved] * needed)
        if problem or not any(one is not None for one in gradient):
            # It may have no items that count.
            return {}
        found = {name: error.relative for name, error in self._compared(gradient).items()}
        return {name: noise for name, noise in found.items() if noise < math.inf}


def as_share(error: float) -> str:
    """Return a relative error as a percentage; one above 100 % or below 0.1 % as that bound."""
    if error >= 1:
        return "more than 100%"
    return f"{error:.1%}" if error >= _LEAST_TOLD else f"less than {_LEAST_TOLD:.1%}"


def _worst(errors: Mapping[str, GradientError]) -> GradientError:
    return max(errors.values(), key=lambda error: error.relative / error.limit)


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's numbers in one dimension; a complex one has two each."""
    dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).flatten().double()
