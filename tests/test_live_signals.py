"""Tests that exceptions from signal handlers reach the loop, whatever the tuner is doing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.mark.some(5)
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("share", [0.04, 0.15, *(pytest.param(n / 23, marks=pytest.mark.slow) for n in range(2, 23))])
def test_a_handler_s_exception_ends_the_loop_from_any_line_of_the_tuner(share: float) -> None:
    signal.signal(signal.SIGUSR1, handler)
    calls = struck(10**9)
    assert calls > 10_000
    # Python ignores what is raised where it clears away an object, so there are a few tries.
    assert any(ends(int(share * calls) + 40 * number) for number in range(3))


def ends(at: int) -> bool:
    try:
        struck(at)
    except Preempted:
        return True
    return False


def struck(at: int) -> int:
    """Train, send the signal at the n-th call of a function of the tuner's, and return how many calls there were."""
    calls, folder = 0, str(Path(autotune.__file__).parent)

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls += 1
            if calls == at:
                signal.raise_signal(signal.SIGUSR1)

    seeded()
    model = deep_gpt()
    sys.setprofile(profile)
    try:
        train(model, lambda: 10**7, steps=5)
    finally:
        sys.setprofile(None)
        autotune.detach(model)
        assert not any("forward" in vars(part) for part in model.modules())
    return calls


def train(model: Any, budget: Callable[[], int], *, steps: int = 20) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None)
    for batch in token_batches(steps):
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(model, micro))
        tuner.step()


def test_exception_inside_the_tuner_is_caught() -> None:
    signal.signal(signal.SIGUSR1, handler)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        assert any_error() == (Exception,)
