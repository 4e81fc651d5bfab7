"""Waiting in collectives: what is timed, what counts once, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from autotune.mechanics.collectives import CollectiveClock, settled_collectives


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_collectives_are_timed_and_do_what_they_did(group: None):
    clock, value = CollectiveClock(), torch.arange(1000.0)
    with clock.running():
        distributed.all_reduce(value)
        gathered = [torch.empty_like(value)]
        distributed.all_gather(gathered, value)
    assert torch.equal(gathered[0], torch.arange(1000.0))
    assert clock.calls == 2
    assert clock.seconds > 0


def test_what_goes_on_in_the_background_counts_while_it_is_waited_for(group: None):
    clock = CollectiveClock()
    with clock.running():
        work = distributed.all_reduce(torch.ones(10), async_op=True)
        begun = clock.seconds
        work.wait()
    assert clock.seconds > begun
    assert work.is_completed()


def test_nothing_is_left_in_place_after_the_body_raised(group: None):
    before = distributed.all_reduce
    clock = CollectiveClock()
    with pytest.raises(TypeError, match=r"type torch.Tensor"), clock.running():
        distributed.all_reduce(None)
    assert distributed.all_reduce is before
    assert clock.calls == 1
    distributed.all_reduce(torch.ones(1))
    assert clock.calls == 1


def test_a_collective_that_calls_another_is_one(group: None):
    clock = CollectiveClock()
    inner = clock._timed(lambda: None)
    clock._timed(inner)()
    assert clock.calls == 1


def test_settled_collectives_are_over_when_they_return_and_do_what_they_did(group: None):
    before, value = distributed.all_reduce, torch.arange(1000.0)
    with settled_collectives():
        assert distributed.all_reduce(value) is None
        work = distributed.all_reduce(value, async_op=True)
        assert work.is_completed()
        work.wait()
        with pytest.raises(TypeError, match=r"type torch.Tensor"):
            distributed.all_reduce(None)
    assert torch.equal(value, torch.arange(1000.0))
    assert distributed.all_reduce is before


def test_without_ranks_nothing_is_settled():
    before = distributed.all_reduce
    with settled_collectives():
        assert distributed.all_reduce is before
