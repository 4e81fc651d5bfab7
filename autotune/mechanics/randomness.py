"""Keep a run's random numbers its own: capture, restore and isolate every generator that training draws from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """Hold the states of the python, numpy, torch CPU and torch CUDA generators."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]


def capture() -> RandomState:
    """Return the current states of all generators."""
    initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
    return RandomState(
        python=random.getstate(),
        numpy=np.random.get_state(),  # noqa: NPY002 - user code may draw from the legacy generator
        cpu=torch.get_rng_state(),
        cuda=tuple(torch.cuda.get_rng_state_all()) if initialized else (),
    )


def restore(state: RandomState) -> None:
    """Set all generators to a captured state."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)  # noqa: NPY002
    torch.set_rng_state(state.cpu)
    if state.cuda:
        torch.cuda.set_rng_state_all(list(state.cuda))


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
