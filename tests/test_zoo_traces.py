"""Tests that a detached tuner leaves no bytes, hooks, threads, files, settings or objects behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import traces
from leftovers import wait_until
from test_live import RESTLESS, Wanders
from test_zoo import LOOPS, QUICK, assert_same, loop_of, trained
from torch import nn
from zoo import Run

from autotune.live.kill_switches import KILL_VARIABLE
from autotune.mechanics.devices import profiled

# Objects of a detached tuner: it still runs the loop, and has the step that an exception ended.
HELD = {"LiveTuner", "Attached", "Limits", "Size", "BudgetFunction", "Trained", "Update", "WholeTensors", "RunningStep"}
HELD |= {"StepTimes", "StepClock"}
LEAKS: dict[str, str] = {}
# Loops whose modules hold graphs: what can still be run backward through holds what would recompute it, in a cycle that
# the garbage collector does not see, so that the last recomputed step's graph outlives the run.
HOLD_GRAPHS = {"metrics_on_modules"}
# Loops that log too few losses to be ended midway.
SHORT = {"fork_workers"}
WAYS = ("its end", "an exception", "the variable", "disabled")
# Loops that are run to their end as well, each time: of two models, and of gradients of gradients.
ALWAYS = ("gan", "maml")


@pytest.fixture(autouse=True, scope="module")
def _profiled_before() -> None:
    """Start the thread that torch's profiler keeps from its first use to the end of the process."""
    with profiled():
        torch.ones(1)


class OwnError(Exception):
    """A user's exception."""


class Watched(Run):
    """A run of a loop that ends in a given way, and a record of the changes it left.

    Attributes:
        happened: whether the loop or its tuner was ended.
        bytes: bytes of live tensors that the run created.
        process: changes in the process.
        objects: changes in models and optimizers.
        held: live objects of the package while the loop's owner still has the tuner.
        left: live objects of the package after that.

    Args:
        way: one of ``WAYS``.
        attaching: arguments of ``attach``; ``None`` trains unattached.
        patch: sets environment variables.
    """

    def __init__(self, way: str, attaching: dict[str, Any] | None, patch: pytest.MonkeyPatch) -> None:
        super().__init__(attaching, steps=10)
        self.way, self.patch = way, patch
        self.happened = False
        self._before: list[tuple[nn.Module, torch.optim.Optimizer, traces.Facts]] = []
        self._others: list[threading.Thread] = []

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        """Record the state of model and optimizer, and attach."""
        self._before.append((model, optimizer, traces.of_objects(model, optimizer)))
        return super().attach(model, optimizer, **options)

    def log(self, *losses: Any) -> None:
        """Record losses, and end the loop when it is due."""
        super().log(*losses)
        if len(self.losses) >= 4 and not self.happened and self.way in ("the variable", "an exception"):
            self.happened = True
            if self.way == "the variable":
                self.patch.setenv(KILL_VARIABLE, "1")
            else:
                raise OwnError

    def observed(self, loop: Any) -> Watched:
        """Train, and record the changes."""
        self.patch.setenv(KILL_VARIABLE, "1" if self.way == "disabled" else "0")
        process = traces.of_process()
        self._others = threading.enumerate()
        with traces.only_new_objects():
            self._until_its_end(loop)
            self.patch.setenv(KILL_VARIABLE, "1" if self.way == "disabled" else "0")
            self.objects = {
                change
                for model, optimizer, before in self._before
                for change in traces.changes(before, traces.of_objects(model, optimizer))
            }
            self.bytes, self.held = traces.live_bytes(), traces.alive()
            # A tuner references its model.
            self.tuner = None
            self._before = []
            self.left = traces.alive()
        self.process = traces.changes(process, traces.of_process())
        return self

    def _until_its_end(self, loop: Any) -> None:
        try:
            trained(loop, self)
        except OwnError:
            self.finish()
        for thread in threading.enumerate():
            if thread.name == "autotune-policy" and thread not in self._others:
                thread.join(10.0)
                task = Path(f"/proc/self/task/{thread.native_id}")
                wait_until(lambda task=task: not task.exists(), "a policy's thread goes on")


def cases() -> Iterator[Any]:
    """Yield each loop with one way of ending, quick loops with all ways, and others with their end as well."""
    for number, found in enumerate(LOOPS):
        name = str(found.values[0])
        ways = ("its end" if name in SHORT else WAYS[number % len(WAYS)],)
        if name in ALWAYS:
            ways = tuple(dict.fromkeys(("its end", *ways)))
        for way in WAYS if name in QUICK else ways:
            often = name == "gpt" or (way == "its end" and name in ALWAYS)
            marks = [] if often else [pytest.mark.slow]
            yield pytest.param(
                name, way, marks=[*marks, pytest.mark.xfail(reason=LEAKS[name])] if name in LEAKS else marks
            )


@pytest.mark.some(6)
@pytest.mark.parametrize(("name", "way"), list(cases()))
def test_detached_tuner_leaves_nothing_behind(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_of(name)
    if hasattr(loop, "REFUSED"):
        pytest.skip("it is refused")
    attaching = {"limits": RESTLESS, "policy": Wanders(), "memory_budget_bytes": 10**12, "runs_dir": tmp_path}
    alone = Watched(way, None, monkeypatch).observed(loop)
    attached = Watched(way, attaching, monkeypatch).observed(loop)
    assert attached.happened == (way in ("the variable", "an exception"))
    assert_same(alone, attached)
    assert attached.objects == alone.objects
    # First-use effects of libraries happen in the unattached run.
    assert attached.process <= alone.process
    if name in HOLD_GRAPHS and way != "disabled":
        return
    # Some libraries keep a few bytes of their first use, which was in the unattached run.
    assert attached.bytes <= alone.bytes
    assert set(attached.held) <= HELD
    assert attached.left == []
