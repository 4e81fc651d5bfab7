"""The random generators that Python code draws from on the host: python's, numpy's and torch's for the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class HostState:
    """The states of the three generators."""

    python: Any
    numpy: Any
    cpu: torch.Tensor


def capture() -> HostState:
    """Return the current states."""
    return HostState(
        python=random.getstate(),
        numpy=np.random.get_state(),  # noqa: NPY002 - user code may draw from the legacy generator
        cpu=torch.get_rng_state(),
    )


def drawn(since: HostState) -> tuple[bool, bool, bool]:
    """Return whether python's, numpy's and torch's generator have other states than captured ones."""
    now: Any = np.random.get_state()  # noqa: NPY002
    return (
        random.getstate() != since.python,
        not all(np.array_equal(one, two) for one, two in zip(now, since.numpy, strict=True)),
        not torch.equal(torch.get_rng_state(), since.cpu),
    )


def restore(state: HostState) -> None:
    """Set the generators to captured states; skip those already in them, since other threads may draw from them."""
    python, numpy, cpu = drawn(state)
    if python:
        random.setstate(state.python)
    if numpy:
        np.random.set_state(state.numpy)  # noqa: NPY002
    if cpu:
        torch.set_rng_state(state.cpu)


class Draws:
    """Generators of one consumer, whose draws neither depend on nor change those of others.

    Args:
        seed: random seed of all three.
    """

    def __init__(self, seed: int) -> None:
        former = capture()
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        self._state = capture()
        restore(former)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Run the body with this consumer's generators, and put the others' back."""
        former = capture()
        restore(self._state)
        try:
            yield
        finally:
            self._state = capture()
            restore(former)
