"""Tests of kill switches: they work within one step and leave the run as if never attached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import ConvolutionBlock, TinyConvolution
from test_live import RESTLESS, Trace, Wanders, assert_identical, image_batches, image_loss, seeded, shape_of
from torch import nn

import autotune
from autotune.live.kill_switches import KILL_VARIABLE

STEPS = 30
# Places in a step where the kill switch is used.
MOMENTS = ("before", "forward", "backward", "update")


class Draws(ConvolutionBlock):
    """A model whose forward pass updates buffers and draws from the global generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


def model() -> nn.Module:
    made = TinyConvolution(blocks=0)
    made.blocks = nn.Sequential(*(Draws(4) for _ in range(4)))
    return made


class Run:
    """A run that trains step by step, attached or not, and uses a kill switch once.

    Args:
        way: ``call``, ``file``, ``variable``, or ``never`` for an unattached run.
        at: step in which the switch is used.
        moment: place in that step.
        runs: folder in which the run directory is made.
    """

    def __init__(self, way: str, at: int, moment: str, runs: Path, patch: pytest.MonkeyPatch) -> None:
        self.way, self.at, self.moment, self.runs, self.patch = way, at, moment, runs, patch
        seeded()
        self.model = model()
        self.shape = shape_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.tuner: Any = self.attach() if way in ("call", "file") else None
        self.placed = 0

    def attach(self) -> Any:
        return autotune.attach(
            self.model,
            self.optimizer,
            Wanders(),
            clip_norm=1.0,
            memory_budget_bytes=10**9,
            limits=RESTLESS,
            runs_dir=self.runs,
        )

    def pull(self, number: int, moment: str) -> None:
        if (number, moment) != (self.at, self.moment):
            return
        if self.way == "variable":
            with self.patch.context() as patch:
                patch.setenv(KILL_VARIABLE, "1")
                self.tuner = self.attach()
        elif self.way != "never":
            self.placed = self.tuner.status["placed"]
            if self.way == "call":
                self.tuner.detach()
                self.check_gone()
            else:
                (self.tuner.folder / "STOP").touch()

    def check_gone(self) -> None:
        assert not self.tuner.attached
        assert shape_of(self.model) == self.shape
        assert not any(parameter._backward_hooks for parameter in self.model.parameters())
        assert not torch._C._autograd._profiler_enabled()

    def train(self) -> Trace:
        losses = []
        for number, batch in enumerate(image_batches(STEPS)):
            self.pull(number, "before")
            if self.tuner is None:
                loss = image_loss(self.model, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                loss = self.step(number, batch)
            losses.append(float(loss.detach()))
        if self.tuner is not None:
            self.tuner.detach()
        return Trace(losses, self.model, self.optimizer)

    def step(self, number: int, batch: Any) -> torch.Tensor:
        for micro in self.tuner.micro_batches(batch):
            if number > self.at:
                self.check_gone()
            loss = image_loss(self.model, micro)
            self.pull(number, "forward")
            self.tuner.backward(loss)
            self.pull(number, "backward")
        self.tuner.step()
        self.pull(number, "update")
        return loss


def pulls(count: int, seed: int) -> Iterator[tuple[str, int, str]]:
    generator = np.random.default_rng(seed)
    for number in range(count):
        way = ("call", "call", "file", "file", "variable")[number % 5]
        # The variable is read when attaching, so it has no effect on a running process.
        moment = "before" if way == "variable" else MOMENTS[int(generator.integers(4))]
        yield way, int(generator.integers(STEPS - 1)), moment


def kill(count: int, seed: int, folder: Path, patch: pytest.MonkeyPatch) -> list[Run]:
    others = set(threading.enumerate())
    plain = Run("never", 0, "before", folder, patch).train()
    runs = []
    for number, (way, at, moment) in enumerate(pulls(count, seed)):
        run = Run(way, at, moment, folder / str(number), patch)
        trace = run.train()
        assert_identical(plain, trace)
        # An unattached run writes nothing.
        assert run.runs.exists() == (way != "variable")
        runs.append(run)
    # The threads have ended, or are about to end.
    for thread in threading.enumerate():
        if thread.name == "autotune-policy" and thread not in others:
            thread.join(5.0)
            assert not thread.is_alive()
    return runs


def test_a_tuner_that_was_disabled_from_the_beginning_has_the_figures_of_one_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    with autotune.attach(trained, optimizer, runs_dir=None) as tuner:
        before = tuner.status
    monkeypatch.setenv(KILL_VARIABLE, "1")
    status = autotune.attach(trained, optimizer, total_steps=5, runs_dir=None).status
    assert list(status) == list(before)
    assert status["total_steps"] == 5
    assert status["steps"] == status["placed"] == status["switches"] == 0
    assert not status["attached"]
    assert status["plan"].accumulation_steps == 1


@pytest.mark.slow
def test_kill_switch_at_any_point_of_a_step_restores_the_unattached_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = kill(5, 1, tmp_path, monkeypatch)
    assert sum(run.placed > 0 for run in runs) >= 2


@pytest.mark.slow
def test_kill_switch_works_at_a_hundred_random_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = kill(100, 0, tmp_path, monkeypatch)
    assert {(run.way, run.moment) for run in runs} >= {(way, moment) for way in ("call", "file") for moment in MOMENTS}
    assert len({run.at for run in runs}) >= 25
    # Plans had been switched before most of these steps.
    assert sum(run.placed > 0 for run in runs) >= 50
