"""Tests of a user's own loss scaler, which is left alone."""

from __future__ import annotations

from typing import Any

import torch
from test_live import RESTLESS, Trace, Wanders, assert_identical, autocast_loss, deep_gpt, token_batches
from test_live import seeded as seed
from torch import nn

import autotune


def attached(model: nn.Module, **changes: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"memory_budget_bytes": 10**9, "limits": RESTLESS, "runs_dir": None, **changes}
    return autotune.attach(model, optimizer, Wanders(), **options)


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
