"""Tests that tracing a live step disturbs nothing: transforms, wrapper tensors, copies and other threads."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from test_live import RESTLESS, seeded
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import set_checkpoint_debug_enabled
from zoo import WIDTH, Residual, points

import autotune
from autotune.live.live_profiler import LiveProfiler
from autotune.mechanics.memory_meter import storages
from autotune.mechanics.step_trace import StepWatch

STEPS = 10
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def stack() -> nn.Sequential:
    seeded()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Residual() for _ in range(3)], nn.Linear(WIDTH, 1))


def trained(
    loss_of: Loss,
    *,
    attach: bool,
    before_backward: Callable[[nn.Module], object] | None = None,
    budget: int | None = None,
) -> Any:
    """Return a model after some steps, and its tuner."""
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with ExitStack() as left:
        tuner = None
        if attach:
            settings = {"runs_dir": None, "limits": RESTLESS, "memory_budget_bytes": budget}
            tuner = autotune.attach(model, optimizer, "exact", **settings)
            left.callback(tuner.detach)
        for batch in points(STEPS):
            for micro in [batch] if tuner is None else tuner.micro_batches(batch):
                loss = loss_of(model, micro)
                if before_backward is not None:
                    before_backward(model)
                loss.backward() if tuner is None else tuner.backward(loss)
            if tuner is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                tuner.step()
    return model, tuner


def vmapped(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(model)(batch.view(4, 4, -1)).square().mean()


def jvp(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out, tangent = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
    return out.square().mean() + tangent.square().mean()


def dual(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(batch, torch.ones_like(batch)))
        return sum((part.square().mean() for part in forward_ad.unpack_dual(out)), torch.zeros(()))


def without_hooks(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with disable_saved_tensors_hooks("not here"):
        return model(batch).square().mean()


def of_a_subclass(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(TwoTensor(batch, 2 * batch)).square().mean().a


def plain(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("loss_of", [vmapped, jvp, dual, without_hooks])
def test_transform_in_a_traced_step_gives_the_same_result(loss_of: Loss) -> None:
    alone, _ = trained(loss_of, attach=False)
    attached, tuner = trained(loss_of, attach=True)
    assert all(map(torch.equal, alone.parameters(), attached.parameters()))
    assert tuner.detached_because == "detach() was called"


def debugged(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_debug_enabled(True):
        return plain(model, batch)


@pytest.mark.parametrize("later", [without_hooks, debugged])
def test_what_recomputation_cannot_run_under_may_begin_late(later: Loss) -> None:
    """The run once ended in an error."""

    def loss_of() -> Loss:
        calls = itertools.count()
        return lambda model, batch: (later if next(calls) > STEPS / 2 else plain)(model, batch)

    alone, _ = trained(loss_of(), attach=False)
    attached, _ = trained(loss_of(), attach=True, budget=1)
    assert all(map(torch.equal, alone.parameters(), attached.parameters()))


def test_units_that_may_call_a_transform_are_locked() -> None:
    class Differentiates(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            return found + torch.func.grad(lambda z: z.sum())(found) if len(x) > 16 else found

    seeded()
    model = nn.Sequential(*(Differentiates() for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, "exact", runs_dir=None, limits=RESTLESS, memory_budget_bytes=1)
    for batch in points(STEPS):
        rows = torch.cat([batch, batch]) if tuner.status["steps"] == STEPS - 2 else batch
        for micro in tuner.micro_batches(rows):
            tuner.backward(model(micro).square().mean())
        tuner.step()
        optimizer.zero_grad()
    assert all("torch.func.grad" in tuner.locks[name] for name in ("0", "1"))
    tuner.detach()


def test_saved_tensor_hooks_work_after_a_step_that_disabled_tracing_hooks() -> None:
    trained(without_hooks, attach=True)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert type(torch._C._autograd._saved_tensors_hooks_disable).__name__ == "builtin_function_or_method"


@pytest.mark.parametrize("step", [*range(STEPS)])
@pytest.mark.parametrize("written", ["leaf", "activation"])
def test_autograd_reports_writes_to_saved_tensors_in_every_step(written: str, step: int) -> None:
    """Traced steps once hid the error, since autograd leaves the check to hooks for saved tensors."""
    left = itertools.count()

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(WIDTH, requires_grad=True)
        first, *others, last = model.children()
        hidden = first(batch)
        for part in others:
            hidden = part(hidden)
        loss = last(hidden * scale).square().mean()
        if next(left) == step:
            with torch.no_grad():
                (scale if written == "leaf" else hidden).mul_(2)
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(loss_of, attach=True)


class Ends(nn.Module):
    """A block whose output autograd saves; in large batches it writes to what autograd has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(WIDTH, WIDTH), False
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.linear(x))
        if len(x) > 16:
            hidden += 0.1
        return torch.tanh(hidden * self.mask)


def ends_in_error(place: str, *, attach: bool) -> tuple[str, int]:
    """Return the error in which a loop ends that writes to a tensor that autograd has saved, and in which step."""
    seeded()
    model = nn.Sequential(*(Ends() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=1, runs_dir=None) if attach else None
    rows, steps = 32 if place == "within" else 16, 0
    with ExitStack() as left:
        if tuner is not None:
            left.callback(tuner.detach)
        try:
            for steps in range(30):
                batch = torch.randn(rows if steps == 25 else 16, WIDTH)
                for x in [batch] if tuner is None else tuner.micro_batches(batch):
                    found = model[0](x)
                    if place == "output":
                        found += 1
                    loss = model[1:](found).square().mean()
                    if place == "buffer":
                        model[1].mask.mul_(1.0)
                    loss.backward() if tuner is None else tuner.backward(loss)
                optimizer.step() if tuner is None else tuner.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            return str(error).partition("[")[0], steps
    return "", steps


@pytest.mark.parametrize("place", ["output", "buffer", "within"])
def test_writes_to_what_recomputed_units_save_are_reported_as_without_a_tuner(place: str) -> None:
    """Such loops once went on, with another gradient."""
    alone = ends_in_error(place, attach=False)
    assert "modified by an inplace operation" in alone[0]
    assert alone[1] == (25 if place == "within" else 0)
    assert ends_in_error(place, attach=True) == alone


def test_modules_may_share_a_dictionary_of_hooks() -> None:
    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        for part in model.children():
            part._forward_hooks = model._forward_hooks
            part._forward_pre_hooks = model._forward_pre_hooks
        return model(batch).square().mean()

    alone, _ = trained(loss_of, attach=False)
    attached, _ = trained(loss_of, attach=True)
    assert all(map(torch.equal, alone.parameters(), attached.parameters()))


def test_wrapper_tensor_is_stored_in_the_tensors_it_wraps() -> None:
    one, two = torch.zeros(4), torch.zeros(8)
    assert sum(storages([TwoTensor(one, two[:4])]).values()) == 48


def test_tensor_inside_a_transform_has_no_inspectable_storage() -> None:
    found = []
    torch.func.vmap(lambda row: found.append(storages([row])) or row)(torch.zeros(2, 3))
    assert found == [{}]


def test_model_copies_made_in_a_traced_step_have_no_hooks_afterwards() -> None:
    copies: list[nn.Module] = []
    model, _ = trained(plain, attach=True, before_backward=lambda one: copies.append(copy.deepcopy(one)))
    assert len(copies) == STEPS
    for module in (part for copied in [model, *copies] for part in copied.modules()):
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            assert not getattr(module, kind)
            assert not getattr(module, f"{kind}_with_kwargs")


def test_model_pickled_in_a_traced_step_loads_without_this_package() -> None:
    pickled: list[bytes] = []
    trained(plain, attach=True, before_backward=lambda one: pickled.append(pickle.dumps(one)))
    assert not any(b"autotune" in one for one in pickled)
    loaded = pickle.loads(pickled[2])
    assert loaded(torch.zeros(2, WIDTH)).shape == (2, 1)


def test_inference_in_another_thread_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    end = LiveProfiler.end

    def ends(self: LiveProfiler, step: Any) -> bool:
        news = end(self, step)
        failed.extend([] if self.failed is None else [self.failed])
        return news

    monkeypatch.setattr(LiveProfiler, "end", ends)

    def serve(model: nn.Module) -> None:
        with torch.no_grad():
            model(torch.zeros(2, WIDTH))

    def served(model: nn.Module) -> None:
        thread = threading.Thread(target=serve, args=(model,))
        thread.start()
        thread.join()

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model[:2](batch)
        served(model)
        return model[2:](hidden).square().mean()

    _, tuner = trained(loss_of, attach=True, before_backward=served)
    assert failed == []
    assert "profile" not in tuner.locks


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_unit_is_locked_with_a_reason_and_the_tuner_stays() -> None:
    model = stack()
    model[2] = torch.jit.script(Residual())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, "exact", runs_dir=None, limits=RESTLESS, memory_budget_bytes=10**9)
    for batch in points(STEPS):
        for micro in tuner.micro_batches(batch):
            tuner.backward(model(micro).square().mean())
        tuner.step()
    assert tuner.attached, tuner.detached_because
    assert {name for name in tuner.locks if name.isdecimal()} == {"2"}
    assert "ScriptModule" in tuner.locks["2"]
    assert "profile" not in tuner.locks
    tuner.detach()


def test_watched_step_lets_graphs_go_that_the_loop_drops() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gc.collect()
    gc.disable()
    try:
        with StepWatch(model, ["0", "1"], lambda: None) as watch:
            watch.begin("forward")
            given = torch.randn(2, 4, requires_grad=True) * 2
            kept = weakref.ref(given)
            model(given).detach()
            del given
            assert kept() is None
    finally:
        gc.enable()


def test_gradients_taken_before_the_backward_phase_begin_it_unless_units_are_called_after_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with StepWatch(model, ["0", "1"], lambda: None) as watch:
        for goes_on in (False, True):
            watch.begin("forward")
            given = torch.randn(2, 4, requires_grad=True)
            torch.autograd.grad(model(given * 2).sum(), given)
            if goes_on:
                model(given * 2)
            watch.begin("backward")
    places = {(place.micro_batch, place.phase, place.segment) for place in watch.places}
    assert {(0, "backward", segment) for segment in (3, 1)} <= places
    assert not any(place[0] == 1 and place[1] == "backward" and place[2] < 8 for place in places)
    assert watch.calls == [["0", "1"], ["0", "1", "0", "1"]]
