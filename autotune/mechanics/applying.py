"""``autotune.apply``: put a plan on a user's model, after checks that the engines do not need."""

from __future__ import annotations

import logging

from torch import nn

from autotune.compiled import is_compiled
from autotune.errors import PlanError
from autotune.mechanics import controls
from autotune.plan import Plan, Precision, Storage, told_unnamed
from autotune.units import find_units

logger = logging.getLogger(__name__)


def apply(model: nn.Module, plan: Plan, *, fp32_borders: bool = False) -> None:
    """Make a model run under a plan, from its next forward pass on.

    A unit that the plan does not name, or leaves at ``inherit`` and ``save``, is released; if the plan names only some
    of the model's units, a warning lists the others. A unit with a precision returns fp32, so that no unit depends on
    how others compute. If the plan puts every parameter of the model under one 16-bit precision, tensors pass between
    units without a cast, as under plain autocast, and only the last unit returns fp32. Call it only between steps,
    while no graph of the model is alive.

    Args:
        model: the model whose module names the plan uses.
        plan: the plan, its units in forward order.
        fp32_borders: whether units return fp32 in any case; for profiling.

    Raises:
        PlanError: if one of them has the wrong type, or the plan names a module that the model does not have, or sets a
            precision for a unit with 16-bit parameters; the model is left unchanged.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"model is {model!r:.80}", where="apply", allowed="a torch.nn.Module")
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {plan!r:.80}", where="apply", allowed="a Plan, as Plan.load(path) returns it")
    controls.apply(model, plan, fp32_borders=fp32_borders)
    unnamed = _unnamed(model, plan)
    if unnamed:
        logger.warning("apply: %s", told_unnamed(unnamed))
    compiled = _compiled(model, plan)
    if compiled is not None:
        whole = f"{compiled!r} is" if compiled else "the model is"
        logger.warning("apply: %s compiled as a whole, and compiled code does not follow the plan", whole)


def _compiled(model: nn.Module, plan: Plan) -> str | None:
    """Return the name of the first compiled module that contains a unit that the plan changes; ``None`` without one."""
    changed = [
        name
        for name in {**plan.precision, **plan.storage}
        if (plan.precision_of(name), plan.storage_of(name)) != (Precision.INHERIT, Storage.SAVE)
    ]
    for name, module in model.named_modules(remove_duplicate=False):
        within = any(not name or unit == name or unit.startswith(f"{name}.") for unit in changed)
        if within and is_compiled(module):
            return str(name)
    return None


def _unnamed(model: nn.Module, plan: Plan) -> list[str]:
    """Return the units of which the plan names no part, if it names any module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    named = {part for name in (*plan.precision, *plan.storage) for part in modules[name].modules()}
    return [unit.name for unit in find_units(model) if named and named.isdisjoint(modules[unit.name].modules())]
