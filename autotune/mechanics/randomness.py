"""Capture, restore and isolate every random generator that training draws from."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune import host_generators
from autotune.mechanics import devices

# If the states change in this many runs in a row, it is the body that draws and not another thread.
_LOOKS = 4


@dataclass(frozen=True, slots=True)
class RandomState(host_generators.HostState):
    """The states of the generators of python, numpy, the CPU, and the accelerators that this process has used."""

    accelerators: tuple[torch.Tensor, ...]


def capture() -> RandomState:
    """Return the current states of all generators."""
    host = host_generators.capture()
    return RandomState(host.python, host.numpy, host.cpu, devices.random_states())


def restore(state: RandomState) -> None:
    """Set all generators to a captured state; skip those already in it, since other threads may draw from them."""
    host_generators.restore(state)
    devices.restore_random_states(state.accelerators)


def drawn(since: RandomState) -> bool:
    """Return whether any generator has another state than a captured one."""
    accelerators = zip(devices.random_states(), since.accelerators, strict=False)
    return any(host_generators.drawn(since)) or not all(torch.equal(now, then) for now, then in accelerators)


def restore_torch(state: RandomState) -> None:
    """Set only torch's generators to a captured state."""
    if not torch.equal(torch.get_rng_state(), state.cpu):
        torch.set_rng_state(state.cpu)
    devices.restore_random_states(state.accelerators)


def drawn_states() -> list[torch.Tensor]:
    """Return the states of torch's generators, which recomputation restores."""
    return [torch.get_rng_state(), *devices.random_states()]


def draws_on_host(body: Callable[[], object]) -> bool:
    """Return whether a repeatable body draws from or seeds python's or numpy's generator; run it up to four times.

    Another thread, such as a data loader's, may draw at the same time. A body that draws does so in every run, so one
    run without a change of state rules it out. A body that seeds may leave the states equal, so seeding is recorded.
    """
    with _noticing_seeds() as seeded:
        for _ in range(_LOOKS):
            before = host_generators.capture()
            body()
            if seeded:
                return True
            python, numpy, _ = host_generators.drawn(before)
            if not python and not numpy:
                return False
    return True


@contextmanager
def _noticing_seeds() -> Iterator[list[str]]:
    """Record this thread's calls that seed python's or numpy's generator while the body runs."""
    seeded: list[str] = []
    own = threading.get_ident()

    def noticed(seed: Callable[..., Any]) -> Callable[..., Any]:
        def noticing(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == own:
                seeded.append(seed.__name__)
            return seed(*args, **kwargs)

        return noticing

    modules: tuple[Any, ...] = (random, np.random)
    former = [module.seed for module in modules]
    try:
        for module, seed in zip(modules, former, strict=True):
            module.seed = noticed(seed)
        yield seeded
    finally:
        for module, seed in zip(modules, former, strict=True):
            module.seed = seed


def seed_all(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


@contextmanager
def isolated() -> Iterator[None]:
    """Run the body, then restore the caller's generators."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
