"""Tests of timing collectives: waiting time counts once, and nothing is left patched."""

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


def test_timed_collectives_give_unchanged_results(group: None):
    clock, value = CollectiveClock(), torch.arange(1000.0)
    with clock.running():
        distributed.all_reduce(value)
        gathered = [torch.empty_like(value)]
        distributed.all_gather(gathered, value)
    assert torch.equal(gathered[0], torch.arange(1000.0))
    assert clock.calls == 2
    assert clock.seconds > 0


def test_asynchronous_collective_counts_only_while_it_is_waited_for(group: None):
    clock = CollectiveClock()
    with clock.running():
        work = distributed.all_reduce(torch.ones(10), async_op=True)
        # FSDP waits for nothing else.
        assert isinstance(work, distributed.Work)
        begun = clock.seconds
        work.wait()
    assert clock.seconds > begun
    assert work.is_completed()


def test_patches_are_removed_after_an_exception(group: None):
    before = distributed.all_reduce
    clock = CollectiveClock()
    with pytest.raises(TypeError, match=r"type torch.Tensor"), clock.running():
        distributed.all_reduce(None)
    assert distributed.all_reduce is before
    assert clock.calls == 1
    distributed.all_reduce(torch.ones(1))
    assert clock.calls == 1


def test_nested_collective_counts_once(group: None):
    clock = CollectiveClock()
    inner = clock._timed(lambda: None)
    clock._timed(inner)()
    assert clock.calls == 1


def test_collectives_of_divided_layers_count_if_asked_and_return_what_they_always_return(group: None):
    from torch.distributed import _functional_collectives as functional

    before, value = functional.all_reduce, torch.arange(10.0)
    first = before(value, "sum", distributed.group.WORLD)
    kind = type(first)
    assert torch.equal(functional.wait_tensor(first), value)
    clock = CollectiveClock()
    with clock.running():
        assert functional.all_reduce is before
    with clock.running(of_layers=True):
        found = functional.all_reduce(value, "sum", distributed.group.WORLD)
    assert clock.calls == 1
    with settled_collectives():
        settled = functional.all_reduce(value, "sum", distributed.group.WORLD)
    for one in (found, settled):
        # Callers may wait for it again.
        assert type(one) is kind
        assert torch.equal(functional.wait_tensor(one), value)
    assert functional.all_reduce is before


def test_settled_collectives_finish_before_they_return_and_give_unchanged_results(group: None):
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


def test_settling_without_ranks_changes_nothing():
    before = distributed.all_reduce
    with settled_collectives():
        assert distributed.all_reduce is before
