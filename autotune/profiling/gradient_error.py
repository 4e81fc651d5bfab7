"""Error of the gradient in low precision, with the same batch and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autotune.engines.torch_engine import TorchEngine
from autotune.mechanics.loop_signals import any_error
from autotune.plan import Plan, Precision
from autotune.profiling.homogeneous_plans import spread_choices

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
# Functions that drop some of what they compute, and the place and name of the argument that says how much.
_DROPPING: Mapping[Any, tuple[int, str]] = {
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
}
# Maximum number of units to measure. If there are more, evenly spaced ones represent the others.
_MAX_UNITS = 24


def squared_errors(engine: TorchEngine) -> dict[str, dict[str, float]]:
    """Return the squared relative error of the whole gradient that each unit causes in each reduced precision.

    The squared errors of single units add up to that of a plan. Nothing is dropped out meanwhile: a GPU draws another
    mask for each format from the same random state, which would change the gradient more than rounding does.

    Args:
        engine: the engine; its training state does not change.

    Returns:
        By unit and precision: sum over parameters of |g' - g|^2, divided by |g|^2; empty if the engine does not have
        both fp32 and a reduced precision.
    """
    space = engine.space
    lower = [precision for precision in space.precisions if precision.is_reduced]
    if not lower or Precision.FP32 not in space.precisions:
        return {}
    with WithoutDropout():
        return _by_unit(engine, lower)


class WithoutDropout(TorchFunctionMode):
    """Context in which dropout returns what it is given."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        place, name = _DROPPING.get(func, (-1, ""))
        if 0 <= place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif name:
            kwargs[name] = 0.0
        return func(*args, **kwargs)


def _by_unit(engine: TorchEngine, lower: Sequence[Precision]) -> dict[str, dict[str, float]]:
    """Return the squared errors by unit and precision."""
    space = engine.space
    exact = engine.gradient(space.baseline())
    names = [unit.name for unit in space.units]
    measured = {
        name: {
            str(precision): _error(exact, engine.gradient(_alone(space.baseline(), name, precision)))
            for precision in lower
        }
        for name in spread_choices(names, _MAX_UNITS)
    }
    return {name: measured[_nearest(names, name, measured)] for name in names}


def tried_gradient(
    engine: TorchEngine, plan: Plan, batches: list[Any] | None = None
) -> tuple[Sequence[torch.Tensor | None], str]:
    """Return the gradient of each parameter under a plan, and what the step raised; empty if nothing.

    Args:
        engine: the engine; its training state does not change.
        plan: the plan.
        batches: batches of the step; ``None`` for the next ones.
    """
    try:
        return engine.gradient(plan, batches), ""
    except any_error() as error:  # the job's own code, under a storage that may not suit it
        return (), f"{type(error).__name__}: {str(error).partition('. ')[0]}"


def _alone(baseline: Plan, name: str, precision: Precision) -> Plan:
    return baseline.changed(precision={**baseline.precision, name: precision})


def _error(exact: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> float:
    pairs = [(one, two) for one, two in zip(exact, other, strict=True) if one is not None and two is not None]
    size = sum(float(one.double().square().sum()) for one, _ in pairs)
    return sum(float((two.double() - one.double()).square().sum()) for one, two in pairs) / max(size, 1e-300)


def _nearest(names: Sequence[str], name: str, measured: dict[str, dict[str, float]]) -> str:
    place = names.index(name)
    return min(measured, key=lambda other: abs(names.index(other) - place))
