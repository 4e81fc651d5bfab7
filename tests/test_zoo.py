"""Tests of many common training loops: attached, they stay bit-identical within every budget."""

from __future__ import annotations

import gc
import importlib
import math
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch
import zoo
from test_live import RESTLESS, Wanders, seeded
from test_live_modes import Roams
from torch.utils._pytree import tree_leaves
from zoo import Run

from autotune import AttachError
from autotune.plan import Plan, Storage

# These loops run each time, the others with the slow tests.
QUICK = {"gpt", "lbfgs", "sam"}

LOOPS = [
    pytest.param(found.name, marks=[] if found.name in QUICK else [pytest.mark.slow])
    for found in pkgutil.iter_modules(zoo.__path__)
    if not found.name.startswith("_")
]


def loop_of(name: str) -> ModuleType:
    """Return a loop if its requirements are installed."""
    try:
        found = importlib.import_module(f"zoo.{name}")
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    # What was imported is left out of the garbage collections of the trainings.
    gc.freeze()
    return found


def trained(loop: Any, run: Run) -> Run:
    seeded()
    try:
        loop.train(run)
    finally:
        run.metered.close()
    return run.finish()


def assert_same(one: Run, two: Run) -> None:
    """Compare losses, trained state and generators bit for bit; NaN equals NaN."""
    pairs = [(one.losses, two.losses), (tree_leaves(one.kept), tree_leaves(two.kept))]
    assert all(is_same(a, b) for these, those in pairs for a, b in zip(these, those, strict=True))
    assert one.drawn == two.drawn


def is_same(one: Any, two: Any) -> bool:
    """Tell whether two tensors or values are bit-identical."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two) or (one.dtype == two.dtype and torch.equal(bits_of(one), bits_of(two)))
    return bool(one == two) or (isinstance(one, float) and math.isnan(one) and math.isnan(two))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_locks(loop: ModuleType, run: Run) -> None:
    """Check that the locks are those that the loop declares, and that the tuner is still attached."""
    assert run.status["attached"], run.status["detached_because"]
    locked = {name: why for name, why in run.locks.items() if name not in ("accumulation_steps", "precision")}
    expected = getattr(loop, "LOCKED", {})
    observed = getattr(loop, "OBSERVED", None)
    if observed is not None:
        expected = {**expected, "units": observed}
    # It is random in which runs a profile fails.
    by_chance = expected.keys() if hasattr(loop, "BY_CHANCE") else {"profile"}
    expected = {name: part for name, part in expected.items() if name in locked or name not in by_chance}
    assert locked.keys() == expected.keys(), locked
    assert all(part in locked[name] for name, part in expected.items()), locked


def attached(loop: ModuleType, **attaching: Any) -> Run:
    return trained(loop, Run({"limits": RESTLESS, "policy": "exact", **attaching}))


@pytest.mark.parametrize("name", LOOPS)
def test_attached_loop_is_bit_identical_within_every_budget(name: str) -> None:
    loop = loop_of(name)
    refused = getattr(loop, "REFUSED", None)
    if refused is not None:
        with pytest.raises(AttachError, match=refused):
            attached(loop)
        return
    alone = trained(loop, Run())
    lean = attached(loop, memory_budget_bytes=1)
    assert_same(alone, lean)
    assert_locks(loop, lean)
    wandering = attached(loop, policy=Wanders(), memory_budget_bytes=10**12)
    assert_same(alone, wandering)
    assert_locks(loop, wandering)
    recomputed = set(lean.used[-1].storage) - lean.locks.keys()
    if recomputed and not hasattr(loop, "OBSERVED") and "profile" not in wandering.locks | lean.locks:
        assert wandering.status["switches"] > 8, wandering.status
        within(loop, alone, lean)


def kept_where_locked(run: Run) -> list[Plan]:
    """Return the plans of a run as executed: the first is made before the locks are known."""
    return [
        plan.changed(storage={name: Storage.SAVE if name in run.locks else own for name, own in plan.storage.items()})
        for plan in run.used
    ]


def within(loop: ModuleType, alone: Run, lean: Run) -> None:
    """Attach under a changing budget, and meter each step of an unattached run under the same plans."""
    leanest = trained(loop, Run(plans=kept_where_locked(lean)))
    everything = lean.used[0].changed(storage=dict.fromkeys(lean.used[0].storage, Storage.SAVE))
    fullest = trained(loop, Run(plans=[everything]))
    assert_same(alone, leanest)
    lowest, highest = max(leanest.peaks), max(fullest.peaks)

    def budget(step: int) -> int:
        return int(lowest * 1.02 + (highest * 1.05 - lowest * 1.02) * (step * 5 % 7) / 6)

    moving = trained(loop, Run({"limits": RESTLESS, "policy": "exact"}, budget=budget))
    assert_same(alone, moving)
    metered = trained(loop, Run(plans=kept_where_locked(moving))).peaks
    spread = 1 + getattr(loop, "SPREAD", 0.0)
    over = {step: peak / budget(step) for step, peak in enumerate(metered) if peak > budget(step) * spread}
    over = {step: share for step, share in over.items() if step not in getattr(loop, "SURPRISES", ())}
    assert not over, (over, lowest, highest)
    if highest > 1.1 * lowest and not hasattr(loop, "STAYS_LEAN"):
        assert len({repr(plan) for plan in moving.used}) > 1, moving.status


@pytest.mark.parametrize("name", ["contrastive", "gan_detached"])
def test_no_step_is_said_to_exceed_a_budget_that_can_be_met(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = loop_of(name)
    lean = attached(loop, memory_budget_bytes=1)
    lowest = max(trained(loop, Run(plans=kept_where_locked(lean))).peaks)
    caplog.clear()
    # What the loop itself keeps from step to step, such as another model's gradients, counts as well.
    run = attached(loop, memory_budget_bytes=int(1.1 * lowest))
    assert run.status["over_budget_steps"] == 0
    assert "no plan fits" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loop_trains_in_rounding_modes(name: str) -> None:
    loop = loop_of(name)
    for mode in getattr(loop, "MODES", ()):
        alone, tuned = trained(loop, Run()), attached(loop, policy=Roams(), mode=mode, memory_budget_bytes=10**12)
        assert tuned.status["attached"], tuned.status["detached_because"]
        assert far(alone, tuned) < (1e-3 if mode == "rounding" else 0.1), mode


def far(one: Run, two: Run) -> float:
    """Return the distance between the trained values of two runs, relative to the first run's norm."""
    both = list(zip(tree_leaves(one.kept[0]), tree_leaves(two.kept[0]), strict=True))
    pairs = [(a, b) for a, b in both if isinstance(a, torch.Tensor) and a.is_floating_point()]
    apart = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return math.sqrt(apart / sum(float(a.double().square().sum()) for a, _ in pairs))
