"""Tests of the batch stream: endless, in one order per seed, from any position."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_jobs import perceptron_job

from autotune import Job, JobError
from autotune.engines.batch_stream import BatchStream

CPU = torch.device("cpu")


def numbered_job(epoch_length: int) -> Job:
    """Return a job whose batches contain their seed and position."""

    def batches(seed: int) -> Iterator[torch.Tensor]:
        for index in range(epoch_length):
            yield torch.tensor([seed, index])

    return perceptron_job(batches=batches)


def take(stream: BatchStream, count: int) -> list[tuple[int, int]]:
    return [tuple(stream.take().tolist()) for _ in range(count)]


@given(st.integers(1, 4), st.integers(0, 2**31))
def test_every_epoch_is_complete_and_has_its_own_seed(epoch_length: int, seed: int):
    batches = take(BatchStream(numbered_job(epoch_length), seed, CPU), 3 * epoch_length)
    assert [index for _, index in batches] == list(range(epoch_length)) * 3
    seeds = [batches[epoch * epoch_length][0] for epoch in range(3)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 3


def test_epochs_of_neighbouring_seeds_differ():
    seen = [{seed for seed, _ in take(BatchStream(numbered_job(1), start, CPU), 50)} for start in range(10)]
    assert len(set.union(*seen)) == 500


@given(st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_seeking_gives_the_batches_of_an_uninterrupted_run(epoch_length: int, first: int, second: int):
    everything = take(BatchStream(numbered_job(epoch_length), 5, CPU), 12)
    stream = BatchStream(numbered_job(epoch_length), 5, CPU)
    for position in (first, second):
        stream.seek(position)
        assert stream.position == position
        assert take(stream, 3) == everything[position : position + 3]
        assert stream.position == position + 3


def test_job_without_batches_is_rejected():
    with pytest.raises(JobError, match=r"job 'perceptron': batches yields nothing"):
        BatchStream(numbered_job(0), 5, CPU).take()


def test_list_of_batches_works_like_an_iterator():
    job = perceptron_job(batches=lambda seed: [torch.tensor([seed, 0]), torch.tensor([seed, 1])])
    assert [index for _, index in take(BatchStream(job, 5, CPU), 4)] == [0, 1, 0, 1]
