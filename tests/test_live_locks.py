"""Locks that units hold, with or without ``with``, are free again once a unit is recomputed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_live_state import Part, train, with_blocks

LOCK, COUNTED = threading.Lock(), threading.Semaphore(1)


class Holds(Part):
    lock: Any = LOCK

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.lock.acquire(timeout=5):
            raise TimeoutError
        found = torch.sin(super().forward(x))
        self.lock.release()
        return found


class Counts(Holds):
    lock = COUNTED


class OwnsOne(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def held(x: torch.Tensor) -> torch.Tensor:
    if not LOCK.acquire(timeout=5):
        raise TimeoutError
    found = torch.sin(torch.cos(x))
    LOCK.release()
    return found


class CallsWhatHolds(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return held(super().forward(x))


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", [Holds, Counts, OwnsOne, CallsWhatHolds])
def test_a_lock_is_free_once_a_unit_was_recomputed(kind: type[Part]) -> None:
    plain, _, _ = train(lambda: with_blocks(kind), None, None)
    tuned, locks, _ = train(lambda: with_blocks(kind), 1, "exact")
    assert tuned == plain
    assert not LOCK.locked()
    assert COUNTED.acquire(blocking=False)
    COUNTED.release()
    assert all("hold a lock" in why for why in locks.values()), locks
    assert bool(locks) == (kind is CallsWhatHolds)
