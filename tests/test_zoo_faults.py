"""Tests of faults in an attached run or its tuner: the run continues or ends as it would unattached."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_faults import NOT_FINITE, OUT_OF_MEMORY, OwnFault
from test_live import RESTLESS, Wanders
from test_zoo import LOOPS, assert_same, loop_of, trained
from torch import nn
from zoo import Alone, Run

from autotune import Settings
from autotune.live.kill_switches import KILL_VARIABLE

# Excluded loops: rejected, run by a framework, compiled, or with workers.
LEFT_OUT = (
    "hf_",
    "trl_",
    "lightning_",
    "accelerate_",
    "diffusers_",
    "peft_",
    "timm_",
    "compiled_",
    "fork_",
    "lbfgs",
    "prefetch_",
)
NAMES = sorted(str(found.values[0]) for found in LOOPS if not str(found.values[0]).startswith(LEFT_OUT))
# Loops that continue with the next batch after running out of memory.
SKIPPING = sorted(name for name in NAMES if name.startswith("memory_skipped"))
ENDS = {"exception": ValueError, "interrupt": KeyboardInterrupt, "memory": MemoryError}
# Faults that affect the unattached run as well.
OWN = (*ENDS, *NOT_FINITE, *OUT_OF_MEMORY, "memory skipped")
TUNERS = ("stop", "kill", "detach", "policy", "hang", "lie", "disk", "folder")
FAULTS = (*OWN, *TUNERS, "server")
# Loops in which a fault has no place: a model that is never called as a whole, blocks that receive no tensors, and
# clones that are trained in the model's place, so that no policy is asked.
UNFIT = {
    "nan in loss": "cyclegan",
    "memory between": "cyclegan",
    "nan in forward": "state_in_place",
    "policy": "maml_by_clones",
    "hang": "maml_by_clones",
}
FOLLOWER, DEAD_SERVER = "autotune-follower", "http://127.0.0.1:9"


class Skips(Alone):
    """A stand-in that skips updates with nonfinite gradients, as ``LiveTuner.step`` is documented to do."""

    def step(self) -> bool:
        """Clip, update, and clear the gradients."""
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if all(gradient.to_dense().isfinite().all() for gradient in gradients):
            return super().step()
        self._optimizer.zero_grad()
        self.end_step()
        return False


class Faulty(Run):
    """A run with a fault at one step, as a user's machine or code may have.

    Attributes:
        ended: exception that ended the loop; ``None`` for none.
        injected: whether the fault occurred.

    Args:
        fault: kind of the fault.
        at: number of logged losses before the fault.
        folder: folder for the log of an attached run.
        attaching: arguments of ``attach``; ``None`` trains unattached.
    """

    def __init__(self, fault: str, at: int, folder: Path, attaching: dict[str, Any] | None) -> None:
        super().__init__(attaching, steps=12)
        self.fault, self.at, self.folder = fault, at, folder
        self.ended: str | None = None
        self._went_wrong = False
        self._own: OwnFault | None = None

    @property
    def injected(self) -> bool:
        """Tell whether the fault occurred."""
        return self._went_wrong if self._own is None else self._own.fired

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        """Insert faults of the model or optimizer, as its owner would, and attach."""
        kind = "memory in forward" if self.fault == "memory skipped" else self.fault
        if kind in (*NOT_FINITE, *OUT_OF_MEMORY):
            self._own = OwnFault(kind, lambda: len(self.losses) >= self.at, model, optimizer)
        if self.attaching is None:
            return Skips(self, model, optimizer, options.get("clip_norm"))
        return super().attach(model, optimizer, **options)

    def log(self, *losses: Any) -> None:
        """Record losses, and cause the fault when it is due."""
        super().log(*losses)
        if len(self.losses) >= self.at and not self._went_wrong:
            self._go_wrong()

    def _go_wrong(self) -> None:
        if self.fault in ENDS:
            self._went_wrong = True
            raise ENDS[self.fault]("somebody's own")
        tuner = self.tuner
        if tuner is None:
            return
        if self.fault == "stop":
            (tuner.folder / "STOP").touch()
        elif self.fault == "kill":
            os.environ[KILL_VARIABLE] = "1"
        elif self.fault == "detach":
            tuner.detach()
        elif self.fault == "disk":
            # A full disk.
            log = tuner._controller.run.log
            log._file.close()
            log._file = Path("/dev/full").open("ab")  # noqa: SIM115
        elif self.fault == "folder":
            # A too long name raises the same kind of error as an inaccessible folder.
            tuner._stop_file = tuner.folder / ("STOP" * 100)
        if self.fault in ("policy", "hang"):
            self._went_wrong = self.attaching is not None and self.attaching["policy"].raised
        elif self.fault == "server":
            self._went_wrong = any(thread.name == FOLLOWER for thread in threading.enumerate())
        else:
            self._went_wrong = True

    def arguments(self, **options: Any) -> dict[str, Any]:
        """Add the run's folder and faults outside the run to the arguments."""
        found = {**super().arguments(**options), "runs_dir": self.folder}
        found["settings"] = replace(
            found.get("settings", Settings()), report_to="mlflow" if self.fault == "server" else "none"
        )
        if self.fault == "lie":
            found["memory_budget_bytes"] = self._lie
        return found

    def _lie(self) -> Any:
        # A lie at the very beginning is refused.
        self._went_wrong = self._went_wrong or len(self.losses) >= max(self.at, 1)
        return "much" if self._went_wrong else 10**12


class Trouble(Wanders):
    """A policy that wanders, and raises or is late once."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.asked, self.raised = fault, 0, False

    def decide(self, observation: Any, plan: Any) -> Any:
        self.asked += 1
        if self.asked == 2 and self.fault in ("policy", "hang"):
            self.raised = True
            raise RuntimeError("crashed") if self.fault == "policy" else TimeoutError("late")
        return super().decide(observation, plan)


def ended(loop: Any, run: Faulty) -> Faulty:
    """Train until the end, or until the loop's own exception."""
    # Functions of torch reject nonfinite numbers.
    rejected = (RuntimeError,) if run.fault in NOT_FINITE else ()
    try:
        trained(loop, run)
    except (*ENDS.values(), torch.OutOfMemoryError, *rejected) as error:
        run.ended = f"{type(error).__name__}: {error}"
        run.finish()
    return run


def drawn(count: int) -> list[tuple[str, str, int, int]]:
    """Return cases, each of a loop, a fault, its step and the budget."""
    choice = random.Random(0)
    # Each process that sends to a server takes seconds to import its libraries.
    faults = ["server"] * 5 + [(*OWN, *TUNERS)[number % len((*OWN, *TUNERS))] for number in range(count - 5)]
    choice.shuffle(faults)
    found = []
    for fault in faults:
        names = SKIPPING if fault == "memory skipped" else [name for name in NAMES if UNFIT.get(fault) != name]
        found.append((choice.choice(names), fault, choice.randint(0, 8), choice.choice([1, 10**12])))
    return found


DRAWN = drawn(200)
# One case of each fault runs each time, the others with the slow tests.
QUICKLY = {fault: number for number, (_, fault, _, _) in reversed(list(enumerate(DRAWN))) if fault != "server"}


@pytest.fixture(autouse=True, scope="module")
def _nothing_follows() -> Iterator[None]:
    """Wait at the end for the processes that send to a server."""
    yield
    for thread in threading.enumerate():
        if thread.name == FOLLOWER:
            thread.join(120.0)
            assert not thread.is_alive()


def test_each_fault_occurs_several_times() -> None:
    counts = Counter(fault for _, fault, _, _ in DRAWN)
    assert counts.keys() == set(FAULTS)
    assert min(counts.values()) >= 5


@pytest.mark.some(8)
@pytest.mark.parametrize(
    ("name", "fault", "at", "budget"),
    [
        pytest.param(*one, marks=[] if QUICKLY.get(one[1]) == number else [pytest.mark.slow])
        for number, one in enumerate(DRAWN)
    ],
)
def test_fault_changes_nothing_in_a_run(
    name: str, fault: str, at: int, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KILL_VARIABLE, "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD_SERVER)
    loop = loop_of(name)
    alone = ended(loop, Faulty(fault, at, tmp_path, None))
    attaching = {"limits": RESTLESS, "policy": Trouble(fault), "memory_budget_bytes": budget}
    attached = ended(loop, Faulty(fault, at, tmp_path, attaching))
    assert (alone.injected, attached.injected) == (fault in OWN, True)
    assert alone.ended == attached.ended
    assert_same(alone, attached)
