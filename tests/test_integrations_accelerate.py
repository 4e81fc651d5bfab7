"""Tests of a custom loop over objects prepared by an Accelerator: attached, it stays bit-identical."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import TinyGPT
from test_live import RESTLESS, Wanders, gpt_loss, seeded, token_batches
from torch import nn

import autotune
from autotune import AttachError

accelerate = pytest.importorskip("accelerate")


def forget() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def _forget_the_accelerator() -> Any:
    # Trainers of other tests leave one behind, too.
    forget()
    yield
    forget()


def prepared(**arguments: Any) -> tuple[Any, nn.Module, Any, Any]:
    seeded()
    accelerator = accelerate.Accelerator(cpu=True, **arguments)
    model = TinyGPT(width=16, blocks=4, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.slow), "bf16"])
def test_attached_loop_over_prepared_objects_is_bit_identical(precision: str) -> None:
    def run(attached: bool) -> tuple[list[float], list[torch.Tensor], torch.Tensor, int]:
        accelerator, model, optimizer, schedule = prepared(mixed_precision=precision)
        tuner = (
            autotune.attach(
                model, optimizer, Wanders(), clip_norm=1.0, memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None
            )
            if attached
            else None
        )
        losses = []
        for batch in token_batches(60, ragged=True):
            if tuner is None:
                loss = gpt_loss(model, batch)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            else:
                for micro in tuner.micro_batches(batch):
                    loss = gpt_loss(model, micro)
                    tuner.backward(loss)
                tuner.step()
            schedule.step()
            losses.append(float(loss.detach()))
        switches = 0 if tuner is None else tuner.status["switches"]
        if tuner is not None:
            tuner.detach()
        return losses, [*model.state_dict().values()], torch.get_rng_state(), switches

    plain, tuned = run(False), run(True)
    assert tuned[3] >= 30
    assert plain[0] == tuned[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], tuned[1], strict=True))
    assert torch.equal(plain[2], tuned[2])


def test_accelerator_with_gradient_accumulation_is_rejected() -> None:
    _, model, optimizer, _ = prepared(gradient_accumulation_steps=3)
    with pytest.raises(AttachError, match="accumulates 3 batches") as caught:
        autotune.attach(model, optimizer, runs_dir=None)
    assert "\n" not in str(caught.value)


def test_accelerator_with_a_loss_scaler_is_rejected() -> None:
    _, model, optimizer, _ = prepared()
    optimizer.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(AttachError, match="a loss scale of its own"):
        autotune.attach(model, optimizer, runs_dir=None)
