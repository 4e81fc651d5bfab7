"""Tests that a loop's own hooks on saved tensors, and what records its model, come out as without a tuner."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from test_live import RESTLESS, seeded
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import WIDTH, Residual, points

import autotune
from autotune.live.live_profiler import _WAITED
from autotune.mechanics.step_trace import TURN

STEPS = 14
Way = Literal["checkpoint", "micro-batches", "within a step", "from the middle of a step on"]


def rounding() -> Any:
    """Return hooks that save activations in bf16, so that whoever runs under them gets other gradients."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if tensor.dtype == torch.float32 and not tensor.is_leaf else tensor

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        return saved.float() if saved.dtype == torch.bfloat16 else saved

    return saved_tensors_hooks(pack, unpack)


def top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def stack() -> tuple[nn.Module, torch.optim.Optimizer]:
    seeded()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Residual() for _ in range(3)], nn.Linear(WIDTH, 1))
    return model, torch.optim.SGD(model.parameters(), 1e-2)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (3 * outputs).tanh().square().mean()


def trained(way: Way, budget: int | None, every: int) -> dict[str, Any]:
    """Train with the hooks in every n-th step, open where the way says; a budget of ``None`` is unattached."""
    model, optimizer = stack()
    tuner: Any = None
    if budget is not None and way == "checkpoint":
        tuner = autotune.checkpoint(model, budget, optimizer=optimizer)
    elif budget is not None:
        tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=budget, runs_dir=None, limits=RESTLESS)
    for number, batch in enumerate(points(STEPS)):
        hooks = contextlib.ExitStack()
        if number % every == 0 and way != "from the middle of a step on":
            hooks.enter_context(rounding())
        if tuner is not None and way == "micro-batches":
            with hooks:
                for micro in tuner.micro_batches(batch):
                    tuner.backward(loss_of(model(micro)))
            tuner.step()
            continue
        told = tuner if way not in ("checkpoint", "micro-batches") else None
        if told is not None:
            told.begin_step(batch)
            told.tell_phase("forward")
        if number % every == 0 and way == "from the middle of a step on":
            hooks.enter_context(rounding())
        outputs = model(batch)
        if way != "micro-batches":
            # Only the forward pass of the model runs within.
            hooks.close() if way != "from the middle of a step on" else None
        loss = loss_of(outputs)
        if told is not None:
            told.tell_phase("backward")
        loss.backward()
        if told is not None:
            told.tell_phase("update")
        optimizer.step()
        optimizer.zero_grad()
        if told is not None:
            told.end_step()
        hooks.close()
        assert top_hooks() is None
    if tuner is not None:
        assert tuner.attached
        tuner.detach()
    return model.state_dict()


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("budget", [1, 10**10])
@pytest.mark.parametrize("way", ["checkpoint", "micro-batches", "within a step", "from the middle of a step on"])
def test_hooks_of_the_loop_hold_where_it_has_set_them_and_nowhere_else(way: Way, budget: int, every: int) -> None:
    alone, attached = (trained(way, one, every) for one in (None, budget))
    assert top_hooks() is None
    for name, value in alone.items():
        assert torch.equal(attached[name], value), name


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("step", [0, 1, 4, 9])
def test_programs_recorded_between_steps_are_the_loops_own(step: int) -> None:
    """The next step is prepared already, and may be traced: calls that torch records are no part of it."""
    (batch,) = points(1)

    def recorded(model: nn.Module) -> tuple[list[str], list[str]]:
        script = torch.jit.trace(model, (batch,), check_trace=False)
        return [node.kind() for node in script.inlined_graph.nodes()], [
            str(node.target) for node in make_fx(model)(batch).graph.nodes
        ]

    model, optimizer = stack()
    expected = recorded(model)
    tuner = autotune.checkpoint(model, 1, optimizer=optimizer)
    for number, rows in enumerate(points(step + 2)):
        loss_of(model(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == step:
            assert recorded(model) == expected
            assert torch.func.jacrev(model)(batch[0]).shape == (1, *batch[0].shape)
    assert tuner.attached
    tuner.detach()


def test_each_of_two_threads_may_train_a_model_with_a_tuner() -> None:
    """Both traced steps at once, which ended the process."""
    done: list[list[float]] = []

    def work() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Residual() for _ in range(3)], nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        tuner = autotune.checkpoint(model, 1, optimizer=optimizer)
        losses = []
        for number in range(STEPS):
            loss = loss_of(model(torch.full((8, WIDTH), number / STEPS)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        tuner.detach()
        done.append(losses)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 2
    assert top_hooks() is None
    assert type(torch._C._autograd._saved_tensors_hooks_disable).__name__ == "builtin_function_or_method"


def test_model_that_a_worker_thread_calls_is_left_alone() -> None:
    model, optimizer = stack()
    tuner = autotune.checkpoint(model, 1, optimizer=optimizer)
    with ThreadPoolExecutor(1) as worker:
        for batch in points(STEPS):
            loss_of(worker.submit(model, batch).result()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert worker.submit(top_hooks).result() is None
    assert tuner.detached_because == "another thread calls the model than makes the updates"


def test_model_is_trained_where_hooks_are_forbidden() -> None:
    model, optimizer = stack()
    tuner = autotune.checkpoint(model, 1, optimizer=optimizer)
    for batch in points(STEPS):
        with disable_saved_tensors_hooks("none here"):
            outputs = model(batch)
        loss_of(outputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tuner.attached
    tuner.detach()


@pytest.mark.parametrize("way", ["checkpoint", "within a step"])
def test_model_compiled_without_breaks_after_a_tuner_was_attached_trains_as_alone(way: Way) -> None:
    def run(tuned: bool) -> list[float]:
        model, optimizer = stack()
        tuner: Any = None
        if tuned and way == "checkpoint":
            tuner = autotune.checkpoint(model, 10**10, optimizer=optimizer)
        elif tuned:
            tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=10**10, runs_dir=None)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        told, losses = tuner if way == "within a step" else None, []
        for batch in points(STEPS):
            if told is not None:
                told.begin_step(batch)
                told.tell_phase("forward")
            loss = loss_of(compiled(batch))
            if told is not None:
                told.tell_phase("backward")
            loss.backward()
            if told is not None:
                told.tell_phase("update")
            optimizer.step()
            optimizer.zero_grad()
            if told is not None:
                told.end_step()
            losses.append(loss.item())
        if tuner is not None:
            tuner.detach()
        torch.compiler.reset()
        return losses

    assert run(tuned=True) == run(tuned=False)


ENDS_WITHIN_A_STEP = """
import torch, autotune
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
tuner = autotune.checkpoint(model, "1GB", optimizer=optimizer)
for number in range(8):
    loss = model(torch.ones(4, 16)).square().mean()
    if number == {at}:
        break
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("ended")
"""


@pytest.mark.parametrize("at", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_process_may_end_within_a_step_that_is_traced(at: int) -> None:
    code = ENDS_WITHIN_A_STEP.format(at=at)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr[-500:]


def test_thread_that_ended_within_a_traced_step_keeps_no_other_run_from_being_profiled() -> None:
    held: list[Any] = []

    def work() -> None:
        model, optimizer = stack()
        tuner = autotune.checkpoint(model, 10**10, optimizer=optimizer)
        for number, batch in enumerate(points(4)):
            loss = loss_of(model(batch))
            if TURN.is_taken:
                held.append((model, optimizer, tuner, loss, number))
                return
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert held
    model, optimizer = stack()
    tuner = autotune.checkpoint(model, 10**10, optimizer=optimizer)
    for batch in points(30):
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not tuner.plan.recomputed
    for one in (tuner, held[0][2]):
        one.detach()
    assert not TURN.is_taken


def test_run_after_one_that_was_interrupted_in_a_traced_step_is_profiled_and_frees_its_model() -> None:
    def interrupted() -> weakref.ref[nn.Module]:
        model, optimizer = stack()
        autotune.checkpoint(model, 10**10, optimizer=optimizer)
        for batch in points(4):
            loss = loss_of(model(batch))
            if TURN.is_taken:
                return weakref.ref(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        raise AssertionError("no step was traced")

    former = interrupted()
    model, optimizer = stack()
    tuner = autotune.checkpoint(model, 10**10, optimizer=optimizer)
    assert not TURN.is_taken
    gc.collect()
    assert former() is None
    for batch in points(30):
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not tuner.plan.recomputed
    assert tuner.locks.keys() == {"precision", "accumulation_steps"}
    tuner.detach()


def test_run_that_cannot_be_profiled_for_long_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = stack()
    tuner = autotune.checkpoint(model, 10**10, optimizer=optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for batch in points(2 + _WAITED):
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sum("no step could be profiled" in record.message for record in caplog.records) == 1
    tuner.detach()
