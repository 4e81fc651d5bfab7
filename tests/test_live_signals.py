"""Tests that exceptions from signal handlers reach the loop, whatever the tuner is doing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_live import RESTLESS, Wanders, deep_gpt, gpt_loss, seeded, token_batches

import autotune
from autotune.mechanics.loop_signals import any_error


class Preempted(Exception):
    """The exception that a scheduler's signal raises."""


def handler(*_: object) -> None:
    raise Preempted


class Handler:
    def __call__(self, *_: object) -> None:
        raise Preempted

    def method(self, *_: object) -> None:
        raise Preempted


HANDLERS = {"function": handler, "object": Handler(), "method": Handler().method}


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    former = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, former)


def at_call(number: int) -> Callable[[], None]:
    """Return a function that sends the signal at its n-th call."""
    calls = iter(range(10**9))
    return lambda: signal.raise_signal(signal.SIGUSR1) if next(calls) == number else None


@pytest.mark.parametrize("kind", list(HANDLERS))
@pytest.mark.parametrize(("where", "number"), [("budget", 0), ("budget", 5), ("unit", 0), ("unit", 1), ("unit", 12)])
def test_signal_handler_exception_ends_the_loop(kind: str, where: str, number: int) -> None:
    signal.signal(signal.SIGUSR1, HANDLERS[kind])
    seeded()
    model, strike = deep_gpt(), at_call(number)
    unit = model.blocks[0]
    original = unit.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if where == "unit":
            strike()
        return original(*args, **kwargs)

    unit.forward = forward

    def budget() -> int:
        if where == "budget":
            strike()
        return 10**7

    with pytest.raises(Preempted):
        train(model, budget)


def train(model: Any, budget: Callable[[], int]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None)
    for batch in token_batches(20):
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(model, micro))
        tuner.step()


def test_exception_inside_the_tuner_is_caught() -> None:
    signal.signal(signal.SIGUSR1, handler)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        assert any_error() == (Exception,)
