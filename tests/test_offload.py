"""Offloaded activations: exact training, the device's bytes, and what is left out where."""

import gc
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import device_jobs
import fake_accelerator
import numpy as np
import pytest
import tiny_job
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autotune import EngineOptions, Plan, Storage, TorchEngine
from autotune.cost_model.device_table import find_device
from autotune.cost_model.memory_model import peak_bytes
from autotune.mechanics import controls, devices, offloaded, storage_acts
from autotune.profiling.estimator import estimate
from autotune.profiling.profiler import ProfilerOptions, profile

needs_fake = pytest.mark.skipif(fake_accelerator.reason() is not None, reason=str(fake_accelerator.reason()))
WIDTH = 64


class Block(nn.Module):
    """A transformer block whose three projections are views of one storage, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        x = x + self.out((F.dropout(scores, 0.1, self.training) @ v).transpose(1, 2).flatten(2))
        return x + self.mix(x)


def model_of(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(depth)), nn.Linear(WIDTH, 8)).to("fake")


def plan_of(model: nn.Sequential, storage: str = "offload") -> Plan:
    return Plan(storage={str(number): Storage(storage) for number in range(1, len(model) - 1)})


def batch_of(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, 32, 8, generator=torch.Generator().manual_seed(seed)).to("fake")


def allocated() -> int:
    gc.collect()
    return torch.fake.memory_allocated()


@pytest.fixture
def fake(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # The blocks' activations have 64 KiB and more.
    monkeypatch.setattr(offloaded, "_SMALLEST_BYTES", 2**14)
    return accelerator


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the bytes of every copied storage are added."""
    sizes: list[int] = []
    begin = offloaded._Moved.__init__

    def counted(self: offloaded._Moved, tensor: torch.Tensor) -> None:
        begin(self, tensor)
        sizes.append(tensor.untyped_storage().nbytes())

    monkeypatch.setattr(offloaded._Moved, "__init__", counted)
    return sizes


def trained(plan: Callable[[nn.Sequential], Plan], steps: int = 3) -> list[torch.Tensor]:
    """Return the losses, gradients and weights of steps of AdamW with dropout."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controls.apply(model, plan(model))
    torch.manual_seed(3)
    seen = []
    for step in range(steps):
        loss = model(batch_of(step)).square().mean()
        loss.backward()
        seen += [loss.detach().cpu(), *(one.grad.cpu() for one in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(one.detach().cpu() for one in model.parameters())]


def alternating(model: nn.Sequential) -> Plan:
    kinds = [Storage.OFFLOAD, Storage.SAVE, Storage.OFFLOAD, Storage.RECOMPUTE]
    return Plan(storage={str(number + 1): kind for number, kind in enumerate(kinds)})


@needs_fake
@pytest.mark.parametrize("plan", [plan_of, alternating])
def test_training_is_bit_identical(fake: ModuleType, plan: Callable[[nn.Sequential], Plan]) -> None:
    for one, two in zip(trained(lambda _: Plan()), trained(plan), strict=True):
        assert torch.equal(one, two)


class Late(TorchFunctionMode):
    """A second stream that copies only when another stream waits for it; until then, targets are garbage."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None]]] = []
        self.late = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, source = args
        target.fill_(171)
        # The device's memory may be reused once it is free; what the host pins is kept until it is copied.
        self.waiting.append((target, weakref.ref(source) if source.device.type == "fake" else lambda: source))
        return target

    def run(self, count: int) -> None:
        self.late += min(count, len(self.waiting))
        due, self.waiting = self.waiting[:count], self.waiting[count:]
        for target, source in due:
            found = source()
            assert found is not None, "memory was freed before it was copied"
            target.copy_(found)

    def wait_stream(self, other: object) -> None:
        assert isinstance(other, Present)

    def record_event(self) -> tuple[torch.Tensor, ...]:
        return tuple(target for target, _ in self.waiting)


class Present:
    """The stream of the computation, which waits for nothing unless it is told to."""

    def __init__(self, beside: Late) -> None:
        self.beside = beside

    def wait_stream(self, other: Late) -> None:
        other.run(len(other.waiting))

    def wait_event(self, event: tuple[torch.Tensor, ...]) -> None:
        self.beside.run(sum(any(target is one for one in event) for target, _ in self.beside.waiting))


@needs_fake
def test_the_device_waits_for_every_copy_before_it_uses_or_frees_memory(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(lambda _: Plan())
    beside = Late()
    present = Present(beside)
    monkeypatch.setattr(devices, "side_stream", lambda _: beside)
    monkeypatch.setattr(devices, "current_stream", lambda _: present)
    for one, two in zip(plain, trained(plan_of), strict=True):
        assert torch.equal(one, two)
    assert beside.late > 50
    assert not beside.waiting


@needs_fake
def test_the_device_keeps_fewer_bytes_by_what_is_offloaded(fake: ModuleType, moved: list[int]) -> None:
    kept = {}
    for storage in ("save", "offload"):
        model = model_of()
        controls.apply(model, plan_of(model, storage))
        before = allocated()
        loss = model(batch_of()).mean()
        kept[storage] = allocated() - before
        del loss, model
    # Each storage was copied once, the three views of the projection included; all have whole blocks of 512 bytes.
    assert kept["save"] - kept["offload"] == sum(moved)
    assert kept["offload"] < 0.4 * kept["save"]


@needs_fake
def test_nothing_is_left_on_the_device_or_the_host_after_steps(fake: ModuleType) -> None:
    model = model_of()
    controls.apply(model, plan_of(model))
    levels = []
    for step in range(3):
        model(batch_of(step)).mean().backward()
        model.zero_grad()
        levels.append(allocated())
    model(batch_of()).mean()  # a graph that no backward pass follows
    levels.append(allocated())
    assert len(set(levels)) == 1
    assert not offloaded._copies


@needs_fake
def test_a_backward_pass_holds_the_activations_of_two_units_at_most(fake: ModuleType) -> None:
    peaks = []
    for depth in (4, 8):
        model = model_of(depth)
        controls.apply(model, plan_of(model))
        loss = model(batch_of()).mean()
        before = allocated()
        torch.fake.reset_peak_memory_stats()
        loss.backward()
        peaks.append(torch.fake.max_memory_allocated() - before)
        gradients = sum(one.grad.nbytes for one in model.parameters())
        peaks[-1] -= gradients
        del loss
    assert peaks[1] - peaks[0] < 2**18


@needs_fake
def test_the_unit_before_is_fetched_when_a_backward_pass_begins(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    calls: list[offloaded._Call] = []
    begin, fetch = offloaded._Call.__init__, offloaded._Call.fetch
    monkeypatch.setattr(offloaded._Call, "__init__", lambda self, *given: (calls.append(self), begin(self, *given))[1])
    monkeypatch.setattr(offloaded._Call, "fetch", lambda self: (order.append(calls.index(self)), fetch(self))[1])
    model = model_of(3)
    controls.apply(model, plan_of(model))
    loss = model(batch_of()).mean()
    loss.backward(retain_graph=True)
    assert order == [2, 1, 1, 0, 0]
    loss.backward()
    assert order == [2, 1, 1, 0, 0] * 2


@needs_fake
def test_a_tensor_that_two_units_save_is_copied_once(fake: ModuleType, moved: list[int]) -> None:
    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner = x.exp()
            return self.inner.sin()

    class Second(nn.Module):
        def __init__(self, first: First) -> None:
            super().__init__()
            object.__setattr__(self, "first", first)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.cos() * self.first.inner).tanh().sin()

    first = First()
    model = nn.Sequential(nn.Linear(8, 512), first, Second(first)).to("fake")
    controls.apply(model, Plan(storage={"1": Storage.OFFLOAD, "2": Storage.OFFLOAD}))
    loss = model(batch_of()).mean()
    # exp(), which sin() and the product of the next unit save, and cos() and tanh() there.
    assert len(moved) == 3
    loss.backward()
    gradient = model[0].weight.grad.clone()
    controls.remove(model)
    model.zero_grad()
    model(batch_of()).mean().backward()
    assert torch.equal(gradient, model[0].weight.grad)


@needs_fake
def test_a_write_between_forward_and_backward_is_refused_as_by_torch(fake: ModuleType) -> None:
    class Open(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner = x.exp()
            return self.inner.sum(-1, keepdim=True)

    model = nn.Sequential(nn.Linear(8, 512), Open()).to("fake")
    for storage in (Storage.SAVE, Storage.OFFLOAD):
        controls.apply(model, Plan(storage={"1": storage}))
        loss = model(batch_of()).sum()
        model[1].inner.detach()[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@needs_fake
def test_a_second_backward_pass_and_gradients_of_gradients_are_exact(fake: ModuleType) -> None:
    def seen(storage: str) -> list[torch.Tensor]:
        model = model_of(2)
        controls.apply(model, plan_of(model, storage))
        torch.manual_seed(3)
        x = batch_of().requires_grad_()
        loss = model(x).square().mean()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x, create_graph=True)
        second.square().sum().backward()
        return [first, second.detach(), *(one.grad for one in model.parameters())]

    for one, two in zip(seen("save"), seen("offload"), strict=True):
        assert torch.equal(one.cpu(), two.cpu())


@needs_fake
def test_an_exception_in_forward_or_backward_leaves_the_next_step_exact(fake: ModuleType) -> None:
    model = model_of()
    controls.apply(model, plan_of(model))
    level = allocated()
    handle = model[3].out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch_of())
    handle.remove()
    handle = model[2].out.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch_of()).mean().backward()
    handle.remove()
    model.zero_grad()
    for _ in range(200):  # autograd's thread frees what the failed pass held, a little later
        if allocated() == level:
            break
        time.sleep(0.05)
    assert allocated() == level
    assert not offloaded._copies
    with torch.no_grad():
        model(batch_of())
    assert not offloaded._copies
    gradients = []
    for storage in ("offload", "save"):
        controls.apply(model, plan_of(model, storage))
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(model(batch_of()).mean(), list(model.parameters())))
    assert all(torch.equal(one.cpu(), two.cpu()) for one, two in zip(*gradients, strict=True))


@needs_fake
def test_a_profile_times_it_and_predicts_the_peaks_of_mixed_plans(fake: ModuleType) -> None:
    for known in (devices.lacks, devices.traces_memory):
        known.cache_clear()
    job = device_jobs.make(storages=["offload"], accumulation_choices=(1, 2))
    found = profile(job, device_name="fake", options=ProfilerOptions.lean(0), device="fake")
    assert found.space.storages == ("save", "offload", "recompute")
    names = found.space.recomputable
    costs = [segment.costs for segment in found.tables[0].segments if segment.unit in names]
    assert all(cost["fp32/offload"].saved_bytes < 0.3 * cost["fp32/save"].saved_bytes for cost in costs)
    assert all(cost["fp32/offload"].forward_s > 0 for cost in costs)
    ahead = max(cost["fp32/save"].saved_bytes for cost in costs)
    engine = TorchEngine(job, device="fake", options=EngineOptions(discard_steps=0, statistics_every=None))
    engine.run(1)
    generator = np.random.default_rng(0)
    whole = found.space.baseline().changed(storage=dict.fromkeys(names, Storage.OFFLOAD))
    for plan in [whole, *(found.space.sample(generator) for _ in range(8))]:
        engine.apply(plan)
        difference = peak_bytes(found, plan) - (engine.run(1).peak_bytes or 0)
        if plan is whole:
            assert difference == 0
        # The prediction counts what is fetched ahead for each unit, even if the one before is not offloaded.
        assert 0 <= difference <= ahead, str(plan)


def test_a_cpu_is_told_why_it_is_left_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(tiny_job.job(), storages=["offload"])
    told = "the storage offload is left out: on cpu there is no memory of a device that it could free"
    with caplog.at_level(logging.WARNING):
        engine = TorchEngine(job, device="cpu")
    assert engine.space.storages == ("save", "recompute")
    assert engine.locks["storage offload"] in told
    assert [record.getMessage() for record in caplog.records].count(told) == 1
    caplog.clear()
    found = estimate(job, find_device("h100"))
    assert found.space.storages == ("save", "recompute")
    assert "offload is left out: estimates do not know" in caplog.text
    plan = engine.space.baseline().changed(storage={engine.space.recomputable[0]: Storage.OFFLOAD})
    with pytest.raises(Exception, match="does not name or this device cannot do"):
        engine.space.check(plan)


@pytest.fixture(autouse=True)
def warn_again() -> None:
    storage_acts._warn_once.cache_clear()
