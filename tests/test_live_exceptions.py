"""Tests of exceptions from user code: they propagate unchanged, and the run can continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_live import RESTLESS, Trace, Wanders, assert_identical, deep_gpt, gpt_loss, seeded, shape_of, token_batches

import autotune

PLACES = ("forward", "backward", "optimizer", "loader")
MORE_PLACES = ("between", "schedule")
STEPS = 16


class OwnError(Exception):
    """A user's exception with attributes."""


def raise_mine(kind: type[BaseException], place: str) -> None:
    raise kind("mine", place)


class OwnOptimizer(torch.optim.AdamW):
    """A user's optimizer."""

    def __init__(self, owner: Clumsy) -> None:
        super().__init__(owner.model.parameters(), 1e-2)
        self.owner = owner

    def step(self, closure: Any = None) -> Any:
        self.owner.trouble("optimizer")
        return super().step(closure)


class Clumsy:
    """A loop of two micro-batches per step that raises in some steps at one place, and then continues.

    Args:
        place: place of the exception.
        kind: type of the exception.
        at: steps in which it is raised.
        attach: whether a tuner is attached.
    """

    def __init__(self, place: str, kind: type[BaseException], at: set[int], *, attach: bool) -> None:
        self.place, self.kind, self.at = place, kind, at
        self.number = 0
        seeded()
        self.model: Any = deep_gpt()
        self.shape = shape_of(self.model)
        self.began = False
        self.optimizer = OwnOptimizer(self)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.began = True
        self.model.head.weight.register_hook(lambda _: self.trouble("backward"))
        self.tuner: Any = None
        self.caught: list[BaseException] = []
        self.losses: list[float] = []
        if attach:
            self.tuner = autotune.attach(
                self.model,
                self.optimizer,
                Wanders(),
                accumulation_steps=2,
                memory_budget_bytes=10**9,
                limits=RESTLESS,
                runs_dir=None,
            )

    def trouble(self, place: str) -> None:
        if self.began and place == self.place and self.number in self.at:
            self.at.discard(self.number)
            raise_mine(self.kind, place)

    def rate(self, _: int) -> float:
        self.trouble("schedule")
        return 1.0

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        self.trouble("forward")
        return gpt_loss(self.model, batch) / 2

    def one_step(self, first: torch.Tensor, second: torch.Tensor) -> None:
        for number, batch in enumerate((first, second)):
            if self.tuner is None:
                loss = self.loss(batch)
                loss.backward()
            else:
                for micro in self.tuner.micro_batches(batch):
                    loss = self.loss(micro)
                    self.tuner.backward(loss)
            self.losses.append(float(loss.detach()))
            if number == 0:
                self.trouble("between")
        if self.tuner is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.tuner.step()
        self.schedule.step()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batches = list(token_batches(2 * STEPS))
        for number in range(STEPS):
            self.trouble("loader")
            yield batches[2 * number], batches[2 * number + 1]

    def train(self) -> Trace:
        loader = self.batches()
        while self.number < STEPS:
            try:
                pair = next(loader, None)
                if pair is None:
                    # The generator has ended with the exception.
                    break
                self.one_step(*pair)
            except BaseException as error:
                self.caught.append(error)
                # The steps of a loop that skips a batch.
                self.optimizer.zero_grad()
            self.number += 1
        return Trace(self.losses, self.model, self.optimizer)


@pytest.mark.some(2)
@pytest.mark.parametrize("place", [*PLACES, *(pytest.param(place, marks=pytest.mark.slow) for place in MORE_PLACES)])
def test_exceptions_from_user_code_propagate_and_the_run_continues(place: str) -> None:
    # In the probe step, in traced steps and under plans.
    at = {0, 2, 9, 13} if place != "loader" else {9}
    kind = KeyboardInterrupt if place in ("between", "loader") else OwnError
    plain = Clumsy(place, kind, set(at), attach=False)
    without = plain.train()
    tuned = Clumsy(place, kind, set(at), attach=True)
    attached = tuned.train()
    assert len(plain.caught) == len(tuned.caught) == len(at)
    for error in tuned.caught:
        assert type(error) is kind
        assert error.args == ("mine", place)
        assert error.__cause__ is None
        assert error.__context__ is None
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert frames[0] == "train"
        assert frames[-2:] == ["trouble", "raise_mine"]
    assert tuned.tuner.attached
    if place != "loader":
        assert tuned.tuner.status["placed"] >= 3
    assert_identical(without, attached)
    tuned.tuner.detach()
    assert shape_of(tuned.model) == tuned.shape
    assert not torch._C._autograd._profiler_enabled()


SCRIPT = """
import sys, os, signal
# A shell that starts something in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
import autotune
from test_live import RESTLESS, Wanders, deep_gpt, gpt_loss, token_batches

def own_code(number):
    if number == int(sys.argv[1]):
        if sys.argv[2] == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif sys.argv[2] == "exit":
            sys.exit(7)
        else:
            raise ValueError("somebody's own")

model = deep_gpt()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
tuner = autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
for number, batch in enumerate(token_batches(30)):
    for micro in tuner.micro_batches(batch):
        loss = gpt_loss(model, micro)
        own_code(number)
        tuner.backward(loss)
    tuner.step()
print("came to its end")
"""


@pytest.mark.parametrize(
    ("at", "what", "code", "last"),
    [
        pytest.param(0, "raise", 1, "ValueError: somebody's own", marks=pytest.mark.slow),
        (2, "interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        pytest.param(2, "exit", 7, "", marks=pytest.mark.slow),
        pytest.param(20, "raise", 1, "ValueError: somebody's own", marks=pytest.mark.slow),
        pytest.param(99, "nothing", 0, "", marks=pytest.mark.slow),
    ],
)
def test_process_ends_as_it_would_without_the_tuner(at: int, what: str, code: int, last: str) -> None:
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(at), what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    # The library behind the profiler prints its own line.
    said = [line for line in done.stderr.splitlines() if "CPUAllocator" not in line]
    assert said[-1:] == ([last] if last else [])
    assert ("came to its end" in done.stdout) == (code == 0)
    if what == "raise":
        assert "in own_code" in done.stderr
        assert "During handling" not in done.stderr
