"""Whatever goes wrong in an attached run or in its tuner, the run goes on, or ends, as it would have alone."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from test_live import RESTLESS, Wanders
from test_zoo import LOOPS, assert_same, loop_of, trained
from zoo import Run

from autotune.live.limits import KILL_VARIABLE

# Refused, of a framework, compiled, or with workers.
LEFT_OUT = (
    "hf_",
    "trl_",
    "lightning_",
    "accelerate_",
    "diffusers_",
    "peft_",
    "compiled_",
    "fork_",
    "lbfgs",
    "prefetch_",
)
NAMES = sorted(str(found.values[0]) for found in LOOPS if not str(found.values[0]).startswith(LEFT_OUT))
ENDS = {"exception": ValueError, "interrupt": KeyboardInterrupt, "memory": MemoryError}
FAULTS = (*ENDS, "stop", "kill", "detach", "policy", "hang", "lie", "disk")


class Faulty(Run):
    """Go wrong at a step, as somebody's machine or code does.

    Args:
        fault: how.
        at: at which of the losses that are logged.
        folder: where an attached run is logged.
        attaching: what to attach with; ``None`` trains alone.
    """

    def __init__(self, fault: str, at: int, folder: Path, attaching: dict[str, Any] | None) -> None:
        super().__init__(attaching, steps=12)
        self.fault, self.at, self.folder = fault, at, folder
        self.ended: str | None = None

    def log(self, *losses: Any) -> None:
        """Note losses; where it is time, go wrong."""
        super().log(*losses)
        if len(self.losses) >= self.at:
            self.at = 10**9
            self._go_wrong()

    def _go_wrong(self) -> None:
        if self.fault in ENDS:
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
            # A disk without room.
            log = tuner._pilot.log
            log._file.close()
            log._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115

    def arguments(self, **options: Any) -> dict[str, Any]:
        """Attach with a run's folder, and a budget or policy that may go wrong."""
        found = {**super().arguments(**options), "runs_dir": self.folder}
        if self.fault == "lie":
            found["memory_budget_bytes"] = lambda: "much" if self.at == 10**9 else 10**12
        return found


class Trouble(Wanders):
    """Wander, until it raises or hangs."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.asked = fault, 0

    def decide(self, observation: Any, plan: Any) -> Any:
        self.asked += 1
        if self.fault == "policy" and self.asked == 4:
            raise RuntimeError("crashed")
        if self.fault == "hang" and self.asked == 4:
            raise TimeoutError("late")
        return super().decide(observation, plan)


def ended(loop: Any, run: Faulty) -> Faulty:
    """Train until the end, or until the loop's own exception."""
    try:
        trained(loop, run)
    except tuple(ENDS.values()) as error:
        run.ended = f"{type(error).__name__}: {error}"
        run.finish()
    return run


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed > 5 else []) for seed in range(200)]
)
def test_a_fault_changes_nothing_of_a_run(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KILL_VARIABLE, "")
    choice = random.Random(seed)
    loop, fault, at = loop_of(choice.choice(NAMES)), choice.choice(FAULTS), choice.randint(1, 11)
    alone = ended(loop, Faulty(fault, at, tmp_path, None))
    monkeypatch.setenv(KILL_VARIABLE, "")
    attaching = {"limits": RESTLESS, "policy": Trouble(fault), "memory_budget_bytes": choice.choice([1, 10**12])}
    attached = ended(loop, Faulty(fault, at, tmp_path, attaching))
    assert alone.ended == attached.ended
    assert_same(alone, attached)
