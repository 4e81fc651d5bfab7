"""Tests of how the ranks of an attempt find each other in a store that former attempts have used."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from autotune.engines.rendezvous import agreed_name
from autotune.errors import EngineError


def names(store: HashStore, world: int, order: list[int]) -> list[str]:
    """Return the name on which each rank agrees; ranks come in an order."""
    come = threading.Event()
    with ThreadPoolExecutor(world) as pool:
        found = []
        for rank in order:
            found.append(pool.submit(agreed_name, store, rank, world, 60.0))
            come.wait(0.1)
        return [one.result() for one in found]


def test_ranks_of_each_attempt_agree_on_a_name_of_their_own() -> None:
    store = HashStore()
    attempts = [(3, [0, 1, 2]), (3, [2, 1, 0]), (2, [1, 0]), (4, [3, 0, 2, 1]), (1, [0])]
    found = [names(store, world, order) for world, order in attempts]
    assert [len(set(one)) for one in found] == [1] * len(attempts)
    assert len({one[0] for one in found}) == len(attempts)


def test_a_rank_that_ends_while_others_come_costs_nothing() -> None:
    store = HashStore()
    with pytest.raises(EngineError, match="rank 1 has waited for the other 2 ranks"):
        agreed_name(store, 1, 3, 0.2)
    with pytest.raises(EngineError, match="rank 0 has waited"):
        agreed_name(store, 0, 3, 0.2)
    assert len(set(names(store, 3, [1, 0, 2]))) == 1
