"""Keep a run's random numbers its own: capture, restore and isolate every generator that training draws from."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune.mechanics import devices


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of the generators of python, numpy, the CPU, and the accelerators that this process has used."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    accelerators: tuple[torch.Tensor, ...]


def capture() -> RandomState:
    """Return the current states of all generators."""
    return RandomState(
        python=random.getstate(),
        numpy=np.random.get_state(),  # noqa: NPY002 - user code may draw from the legacy generator
        cpu=torch.get_rng_state(),
        accelerators=devices.random_states(),
    )


def restore(state: RandomState) -> None:
    """Set all generators to a captured state; one that is in it already is left alone, for others may draw from it."""
    if random.getstate() != state.python:
        random.setstate(state.python)
    if not _same_numpy(state.numpy):
        np.random.set_state(state.numpy)  # noqa: NPY002
    restore_torch(state)


def restore_torch(state: RandomState) -> None:
    """Set torch's generators to a captured state, and leave those of python and numpy as they are."""
    if not torch.equal(torch.get_rng_state(), state.cpu):
        torch.set_rng_state(state.cpu)
    devices.restore_random_states(state.accelerators)


@contextmanager
def noticing_draws() -> Iterator[list[str]]:
    """Run the body, and note the calls by which this thread draws from python's generator.

    Its state would not tell: other threads, which fetch batches say, may draw at the same time.

    Yields:
        The names of the functions that were called.
    """
    generator = random.random.__self__  # type: ignore[attr-defined]
    found: list[str] = []

    def noticed(_frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is generator:
            found.append(called.__name__)

    former = sys.getprofile()
    sys.setprofile(noticed)
    try:
        yield found
    finally:
        sys.setprofile(former)


def drawn_states() -> list[torch.Tensor]:
    """Return the states of torch's generators, which recomputation repeats."""
    return [torch.get_rng_state(), *devices.random_states()]


def draws_from_numpy(body: Callable[[], object]) -> bool:
    """Tell whether a body that can be run again draws from numpy's generator; run it once, or twice.

    numpy's functions cannot be watched as python's can. Where other threads run, which may draw as well, what changes
    the generator's state only once is one of them.
    """
    changed = False
    for _ in range(2):
        before: Any = np.random.get_state()  # noqa: NPY002
        body()
        changed = not _same_numpy(before)
        if not changed or threading.active_count() == 1:
            break
    return changed


def _same_numpy(state: Any) -> bool:
    now: Any = np.random.get_state()  # noqa: NPY002
    return all(np.array_equal(one, two) for one, two in zip(now, state, strict=True))


def seed_all(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


@contextmanager
def isolated() -> Iterator[None]:
    """Run the body and leave the caller's generators as they were."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
