"""From attach to detach, however a run ends, no byte, hook, thread, file, setting or object of ours is left behind."""

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
from autotune.mechanics.devices import quiet_profiler

# What a tuner still is once it is detached: it runs the loop, and has the step that an exception ended.
HELD = {"LiveTuner", "Attached", "Limits", "Size", "BudgetFunction", "Trained", "Update", "WholeTensors", "RunningStep"}
LEAKS: dict[str, str] = {}
# Loops whose modules hold graphs where an exception ends them: what can still be run backward through holds what would
# recompute it.
HOLD_GRAPHS = {"metrics_on_modules"}
# Loops that note too few losses to be ended under way.
SHORT = {"fork_workers"}
WAYS = ("its end", "an exception", "the variable", "disabled")


@pytest.fixture(autouse=True, scope="module")
def _profiled_before() -> None:
    """Let torch's profiler start the thread that it has from its first use to the end of a process."""
    with quiet_profiler(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(1)


class OwnError(Exception):
    """Somebody's own exception."""


class Watched(Run):
    """Run a loop until it ends in some way, and note what that changed.

    Attributes:
        happened: whether something has ended it, or its tuner.
        bytes: of all tensors that are alive after it, and were made by it.
        process: what changed in the process.
        objects: what changed in models and optimizers.
        held: the package's objects that are alive while the loop's owner still has the tuner.
        left: those that are alive after that.

    Args:
        way: one of ``WAYS``.
        attaching: what to attach with; ``None`` trains alone.
        patch: sets what the process's environment has.
    """

    def __init__(self, way: str, attaching: dict[str, Any] | None, patch: pytest.MonkeyPatch) -> None:
        super().__init__(attaching, steps=10)
        self.way, self.patch = way, patch
        self.happened = False
        self._before: list[tuple[nn.Module, torch.optim.Optimizer, traces.Facts]] = []
        self._others: list[threading.Thread] = []

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        """Note what model and optimizer are like, and attach."""
        self._before.append((model, optimizer, traces.of_objects(model, optimizer)))
        return super().attach(model, optimizer, **options)

    def log(self, *losses: Any) -> None:
        """Note losses, and end the loop where it is time."""
        super().log(*losses)
        if len(self.losses) >= 4 and not self.happened and self.way in ("the variable", "an exception"):
            self.happened = True
            if self.way == "the variable":
                self.patch.setenv(KILL_VARIABLE, "1")
            else:
                raise OwnError

    def observed(self, loop: Any) -> Watched:
        """Train, and note what that changed."""
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
            # A tuner holds its model.
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
    """Yield a loop and a way for each loop, and all ways for the quick ones."""
    for number, found in enumerate(LOOPS):
        name = str(found.values[0])
        for way in WAYS if name in QUICK else ("its end" if name in SHORT else WAYS[number % len(WAYS)],):
            often = name == "gpt" or (way == "its end" and name in ("gan", "maml"))
            marks = [] if often else [pytest.mark.slow]
            yield pytest.param(
                name, way, marks=[*marks, pytest.mark.xfail(reason=LEAKS[name])] if name in LEAKS else marks
            )


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
    # What a library does the first time that it is used, it does for the run alone.
    assert attached.process <= alone.process
    if name in HOLD_GRAPHS and way == "an exception":
        return
    assert attached.bytes == alone.bytes
    assert set(attached.held) <= HELD
    assert attached.left == []
