"""Tests of dynamic loss scaling as a state machine, and of torch's scaler against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_scale import LossScale, master_update
from torch import nn

from autotune.mechanics.stepping import Update

patterns = st.lists(st.booleans(), max_size=40)


def test_scale_halves_on_overflow_and_doubles_after_enough_good_steps():
    state = LossScale(scale=8.0, growth_interval=3)
    seen = []
    for overflow in (False, False, False, False, True, False, False, False):
        state = state.after(overflow=overflow)
        seen.append((state.scale, state.good_steps))
    assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (8, 0), (8, 1), (8, 2), (16, 0)]


def test_defaults_are_the_usual_ones():
    assert LossScale() == LossScale(scale=65536.0, good_steps=0, growth_interval=2000)


@given(patterns, st.integers(1, 5))
def test_scale_is_its_start_times_a_power_of_two_and_good_steps_stay_below_the_interval(pattern, interval):
    state = LossScale(scale=1.0, growth_interval=interval)
    for overflow in pattern:
        before, state = state, state.after(overflow=overflow)
        assert state.scale / before.scale in (0.5, 1.0, 2.0)
        assert (state.scale < before.scale) == overflow
        assert 0 <= state.good_steps < interval


def test_master_weight_steps_against_its_gradient():
    assert master_update(1.0, 2.0, 0.25) == 0.5


def fp16_step(update: Update, model: nn.Module, *, overflow: bool, pieces: int) -> tuple[bool, list[float]]:
    """Make one step of fp16 micro-batches, with an overflow in the middle one if asked; return all scales."""
    scales = [update.loss_scale]
    for piece in range(pieces):
        # 1e5 exceeds fp16's largest number, so the matrix product overflows.
        size = 1e5 if overflow and piece == pieces // 2 else 1e-2
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(torch.full((2, 4), size))
        assert bool(torch.isfinite(output).all()) is (size < 1)
        update.backward(output.float().mean(), 1 / pieces)
        scales.append(update.loss_scale)
    norm = update.unscale()
    scales.append(update.loss_scale)
    update.clip(norm)
    return update.finish(norm), scales


@given(patterns, st.integers(1, 4), st.integers(1, 3))
def test_torch_scaler_follows_the_state_machine_and_never_changes_within_a_step(pattern, interval, pieces):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    update = Update(
        torch.optim.SGD(model.parameters(), lr=1e-3), clip_norm=1.0, init_scale=4.0, growth_interval=interval
    )
    update.scaled = True
    expected = LossScale(scale=4.0, growth_interval=interval)
    for overflow in pattern:
        # Only the pattern matters: growth stops well before the scale itself could overflow.
        if expected.scale > 2.0**12 and not overflow:
            break
        before = model.weight.detach().clone()
        stepped, scales = fp16_step(update, model, overflow=overflow, pieces=pieces)
        assert stepped is not overflow
        assert set(scales) == {expected.scale}
        assert torch.equal(model.weight, before) is overflow
        expected = expected.after(overflow=overflow)
        assert update.loss_scale == expected.scale
        assert update.state_dict()["_growth_tracker"] == expected.good_steps


def test_discarded_step_keeps_the_scale_and_its_good_steps():
    model = nn.Linear(4, 4)
    update = Update(torch.optim.SGD(model.parameters(), lr=1e-3), clip_norm=None, init_scale=4.0, growth_interval=3)
    update.scaled = True
    fp16_step(update, model, overflow=False, pieces=2)
    before = update.state_dict()
    assert before["_growth_tracker"] == 1
    for unscaled in (False, True):
        update.backward(model(torch.ones(2, 4)).mean(), 1.0)
        if unscaled:
            update.unscale()
        update.discard()
        assert update.state_dict() == before
        assert all(parameter.grad is None for parameter in model.parameters())


def test_scale_survives_a_phase_without_fp16():
    model = nn.Linear(4, 4)
    update = Update(torch.optim.SGD(model.parameters(), lr=1e-3), clip_norm=None, init_scale=4.0, growth_interval=3)
    update.scaled = True
    fp16_step(update, model, overflow=True, pieces=1)
    assert update.loss_scale == 2.0
    update.scaled = False
    assert update.loss_scale == 1.0
    update.backward(model(torch.ones(2, 4)).mean(), 1.0)
    assert update.finish(update.unscale())
    update.scaled = True
    assert update.loss_scale == 2.0


def test_unscaled_gradient_does_not_depend_on_the_scale():
    gradients = []
    for scale in (1.0, 2.0**10):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        update = Update(torch.optim.SGD(model.parameters(), lr=0.0), clip_norm=None, init_scale=scale)
        update.scaled = True
        for _ in range(3):
            update.backward(model(torch.ones(2, 4)).square().mean(), 1 / 3)
        norm = update.unscale()
        gradients.append(model.weight.grad.clone())
        assert norm == pytest.approx(
            float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()), rel=1e-6
        )
    # A power of two scales fp32 numbers exactly.
    assert torch.equal(*gradients)
