"""Tests of a user's own loss scaler: rejected if it would leave gradients scaled, otherwise left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_live import RESTLESS, Trace, Wanders, assert_identical, autocast_loss, deep_gpt, gpt_loss, token_batches
from test_live import seeded as seed
from torch import nn

import autotune
from autotune import AttachError
from autotune.live.scaled_loss import is_scaled


def attached(model: nn.Module, **changes: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"memory_budget_bytes": 10**9, "limits": RESTLESS, "runs_dir": None, **changes}
    return autotune.attach(model, optimizer, Wanders(), **options)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda scaler, loss: scaler.scale(loss),
        lambda scaler, loss: scaler.scale(loss / 2),
        lambda scaler, loss: scaler.scale(loss) / 2,
    ],
)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_loss_scaled_by_a_grad_scaler_is_rejected(scaled: Callable[[Any, Any], Any], number: int) -> None:
    model = deep_gpt()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    tuner, scaler = attached(model), torch.amp.GradScaler("cpu")
    for done, batch in enumerate(token_batches(number + 1)):
        for micro in tuner.micro_batches(batch):
            loss = autocast_loss(model, micro)
            if done == number:
                with pytest.raises(AttachError, match="GradScaler has scaled") as caught:
                    tuner.backward(scaled(scaler, loss))
                assert "\n" not in str(caught.value)
                assert "begin_step()" in str(caught.value)
                assert all(parameter.grad is None for parameter in model.parameters())
            else:
                tuner.backward(loss)
        if done < number:
            tuner.step()
    assert number or all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_weighted_losses_are_not_mistaken_for_scaled_ones() -> None:
    model, scaler = deep_gpt(), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    tuner, weight = attached(model), torch.tensor(65536.0)
    weighed: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda loss: loss * 2.0,
        lambda loss: loss * weight,
        lambda loss: loss / 3 + 0.1 * loss,
    ]
    for batch, weigh in zip(token_batches(3), weighed, strict=True):
        for micro in tuner.micro_batches(batch):
            tuner.backward(weigh(gpt_loss(model, micro)))
        assert tuner.step()
    loss = gpt_loss(model, batch)
    # A disabled scaler scales nothing.
    assert not is_scaled(torch.amp.GradScaler("cpu", enabled=False).scale(loss))
    assert not is_scaled(loss)
    assert is_scaled(scaler.scale(loss))


def test_step_of_a_grad_scaler_is_observed_and_bit_identical() -> None:
    def run(with_tuner: bool) -> tuple[Trace, int, int]:
        seed()
        model = deep_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        tuner = (
            autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
            if with_tuner
            else None
        )
        losses, skipped = [], 0
        for number, batch in enumerate(token_batches(40)):
            if tuner is not None:
                tuner.begin_step(batch)
                tuner.tell_phase("forward")
            loss = autocast_loss(model, batch) * (float("inf") if number % 9 == 8 else 1.0)
            if tuner is not None:
                tuner.tell_phase("backward")
            scaler.scale(loss).backward()
            if tuner is not None:
                tuner.tell_phase("update")
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < scale
            optimizer.zero_grad()
            if tuner is not None:
                tuner.end_step(losses=[loss.detach()], stepped=scaler.get_scale() >= scale)
            losses.append(float(loss.detach()))
        placed = 0 if tuner is None else tuner.status["placed"]
        trace = Trace(losses, model, optimizer)
        if tuner is not None:
            assert tuner.attached
            tuner.detach()
        return trace, placed, skipped

    plain, tuned = run(False), run(True)
    assert tuned[1] >= 25
    assert plain[2] == tuned[2] == 4
    assert_identical(plain[0], tuned[0])
