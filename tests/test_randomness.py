"""Tests of random state: every generator that training draws from can be saved and restored."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from small_jobs import differences, global_generators

from autotune.mechanics import randomness


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_restored_state_repeats_every_draw():
    state = randomness.capture()
    first = [draw() for _ in range(3)]
    randomness.restore(state)
    assert [draw() for _ in range(3)] == first


def test_captured_state_is_not_changed_by_later_draws():
    state = randomness.capture()
    first = draw()
    for _ in range(2):
        randomness.restore(state)
        assert draw() == first


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40])
def test_seed_sets_every_generator(seed):
    with randomness.isolated():
        randomness.seed_all(seed)
        first = draw()
        draw()
        randomness.seed_all(seed)
        assert draw() == first
        randomness.seed_all(seed + 1)
        assert all(other != one for other, one in zip(draw(), first, strict=True))


def test_isolated_body_leaves_the_generators_unchanged_even_if_it_raises():
    before = global_generators()
    with randomness.isolated():
        draw()
    assert differences(before, global_generators()) == []

    def fail() -> None:
        with randomness.isolated():
            draw()
            raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        fail()
    assert differences(before, global_generators()) == []
