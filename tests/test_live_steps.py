"""Tests of steps that the loop delimits: accumulated batches, and frameworks that only report their steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small_models import Block, TinyGPT
from test_live import RESTLESS, Wanders, deep_gpt, gpt_loss, seeded, token_batches
from torch import nn

import autotune
from autotune import AttachError, Limits
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors, tensor_bytes


@pytest.mark.some(2)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("budget", [10**9, 1000], ids=["save", "recompute"])
def test_peak_of_an_accumulating_loop_is_predicted_with_its_gradients(budget: int, k: int) -> None:
    model = TinyGPT(width=32, blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(
        model,
        optimizer,
        "exact",
        accumulation_steps=k,
        memory_budget_bytes=budget,
        limits=RESTLESS,
        runs_dir=None,
    )
    for number, batch in enumerate(token_batches(16 * k)):
        for micro in tuner.micro_batches(batch):
            assert micro is batch
            tuner.backward(gpt_loss(model, micro) / k)
        if number % k == k - 1:
            tuner.step()
    status = tuner.status
    assert status["plan"].accumulation_steps == k
    assert {str(choice) for choice in status["plan"].storage.values()} == {"save" if budget > 1000 else "recompute"}
    assert 0.97 <= status["predicted_peak_bytes"] / status["measured_peak_bytes"] <= 1.05
    tuner.detach()


@pytest.mark.slow
def test_steps_of_several_uneven_batches_never_need_more_than_predicted() -> None:
    model = deep_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(
        model, optimizer, Wanders(), accumulation_steps=3, memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None
    )

    def step(batches: list[torch.Tensor]) -> None:
        for batch in batches:
            for micro in tuner.micro_batches(batch):
                tuner.backward(gpt_loss(model, micro) / 3)
        tuner.step()

    batches = list(token_batches(180, ragged=True))
    steps = [batches[first : first + 3] for first in range(0, 180, 3)]
    for several in steps[:20]:
        step(several)
    meter = MemoryMeter(torch.device("cpu"))
    ratios = []
    for several in steps[20:]:
        meter.reset()
        largest = max(several, key=torch.numel)
        with meter.metering(resident_tensors(model, optimizer, [largest])):
            step(several)
            # The plan of the step; the tuner does not profile it while another profiler runs.
            controller: Any = tuner._controller
            plan = controller.run.plan
        length = (
            max(tensor_bytes([batch]) for batch in several) / controller.run.placements.profile.tables[0].batch_bytes
        )
        assert meter.peak_bytes is not None
        # Memory that does not depend on the step's size is not separated, and matters more in small steps.
        if length >= 0.7:
            ratios.append(meter.peak_bytes / controller.run.placements.peak_bytes(plan, length))
    assert max(ratios) <= 1.03
    assert len(set(ratios)) > 10


@pytest.mark.slow
def test_attached_loop_with_accumulation_is_bit_identical() -> None:
    def run(attached: bool) -> tuple[list[torch.Tensor], int]:
        seeded()
        model = deep_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        tuner = (
            autotune.attach(
                model,
                optimizer,
                Wanders(),
                accumulation_steps=3,
                memory_budget_bytes=10**9,
                limits=RESTLESS,
                runs_dir=None,
            )
            if attached
            else None
        )
        for number, batch in enumerate(token_batches(90, ragged=True)):
            if tuner is None:
                (gpt_loss(model, batch) / 3).backward()
            else:
                for micro in tuner.micro_batches(batch):
                    tuner.backward(gpt_loss(model, micro) / 3)
            if number % 3 == 2 and tuner is None:
                optimizer.step()
                optimizer.zero_grad()
            elif number % 3 == 2 and tuner is not None:
                tuner.step()
        return [p.detach() for p in model.parameters()], 0 if tuner is None else tuner.status["switches"]

    plain, tuned = run(False), run(True)
    assert tuned[1] >= 10
    assert all(torch.equal(a, b) for a, b in zip(plain[0], tuned[0], strict=True))


def test_framework_that_reports_its_steps_leaves_no_hook_on_parameters() -> None:
    model = deep_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    limits = Limits(statistics_every=3)
    tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=10**9, limits=limits, runs_dir=None)
    for batch in token_batches(30):
        tuner.begin_step(batch)
        tuner.tell_phase("forward")
        loss = gpt_loss(model, batch)
        tuner.tell_phase("backward")
        loss.backward()
        tuner.tell_phase("update")
        optimizer.step()
        optimizer.zero_grad()
        tuner.end_step()
        assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert tuner.attached
    # The batch needs no particular form.
    tuner.begin_step({"nothing": 3})
    tuner.begin_step(None)
    assert tuner.attached
    tuner.detach()


@pytest.mark.parametrize("left_out", ["backward", "update"])
def test_loop_that_omits_the_update_is_told_and_the_backward_pass_is_noticed(left_out: str) -> None:
    model = deep_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=10**9, runs_dir=None)
    for batch in token_batches(12):
        tuner.begin_step(batch)
        tuner.tell_phase("forward")
        loss = gpt_loss(model, batch)
        if left_out != "backward":
            tuner.tell_phase("backward")
        loss.backward()
        if left_out != "update":
            tuner.tell_phase("update")
        optimizer.step()
        optimizer.zero_grad()
        tuner.end_step()
    assert tuner.attached
    locks = " ".join(tuner.locks.values())
    assert ("no phase 'update'" in locks) == (left_out == "update")
    assert ("profile" in tuner.locks) == (left_out == "update")
    tuner.detach()


def test_nonrecomputable_unit_is_not_recomputed_even_in_the_first_step() -> None:
    class Draws(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.1 * random.random() * x.cumsum(-1))

    def run(attached: bool) -> tuple[list[float], dict[str, str]]:
        seeded()
        model = TinyGPT(width=16, blocks=0)
        model.blocks = nn.ModuleList(Draws(16, 0.1) for _ in range(3))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if not attached:
            losses = []
            for batch in token_batches(20):
                loss = gpt_loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses, {}
        losses = []
        # No plan fits the budget, so the first step recomputes every unit not known to be unsafe.
        tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=1000, runs_dir=None)
        for batch in token_batches(20):
            for micro in tuner.micro_batches(batch):
                loss = gpt_loss(model, micro)
                tuner.backward(loss)
            tuner.step()
            losses.append(float(loss.detach()))
        return losses, tuner.locks

    (plain, _), (tuned, locks) = run(False), run(True)
    assert plain == tuned
    assert all("draws from Python's" in locks[f"blocks.{number}"] for number in range(3))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_accumulation_steps_must_be_a_whole_number(wrong: Any) -> None:
    model = deep_gpt()
    with pytest.raises(AttachError, match="accumulation_steps is"):
        autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=wrong, runs_dir=None)
