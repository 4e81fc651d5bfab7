"""Tests of a tuner that fails, is late or costs too much: the user's run is unaffected."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import TinyGPT
from test_live import (
    RESTLESS,
    Wanders,
    assert_identical,
    deep_gpt,
    gpt_loss,
    seeded,
    shape_of,
    token_batches,
    train,
)
from torch import nn

import autotune
from autotune.live.controller import Controller
from autotune.live.deciding import Decider
from autotune.live.placement import Placements
from autotune.live.rank_channel import Ranks, RanksError
from autotune.plan import Plan
from autotune.profiling.own_time import OwnTime

ATTACHED = {"policy": Wanders(), "memory_budget_bytes": 10**9, "limits": RESTLESS}


@pytest.mark.some(2)
@pytest.mark.parametrize("broken", [(Placements, "peak_bytes"), (Controller, "summary"), (Controller, "close")])
def test_failure_in_any_part_of_the_tuner_leaves_the_run_unchanged(
    broken: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(deep_gpt, token_batches, gpt_loss, 24)

    def raises(*_: object, **__: object) -> Any:
        raise RuntimeError("broken")

    def breaks(tuner: Any, number: int) -> None:
        if number == 15:
            assert tuner.attached
            monkeypatch.setattr(*broken, raises)
            if broken[1] in ("summary", "close"):
                # It is read when the tuner ends, whatever ends it.
                tuner.detach()
        if number == 18:
            assert not tuner.attached
            assert all("forward" not in module.__dict__ for module in tuner._facts.model.modules())

    assert_identical(plain, train(deep_gpt, token_batches, gpt_loss, 24, on_step=breaks, **ATTACHED))


def test_detach_that_is_interrupted_anywhere_leaves_nothing_after_another_one() -> None:
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    untouched = [set(module.__dict__) for module in model.modules()]

    def is_interrupted(at: int) -> bool:
        lines = 0

        def traced(frame: Any, event: str, _: object) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.endswith("stand_ins.py"):
                return None
            lines += event == "line"
            if event == "line" and lines == at:
                raise KeyboardInterrupt
            return traced

        tuner = autotune.attach(model, optimizer, memory_budget_bytes=1, runs_dir=None)
        for batch in token_batches(2):
            for part in tuner.micro_batches(batch):
                tuner.backward(gpt_loss(model, part))
            tuner.step()
        sys.settrace(traced)
        try:
            tuner.detach()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            autotune.detach(model)
        return False

    at = 1
    while is_interrupted(at):
        assert [set(module.__dict__) for module in model.modules()] == untouched, f"interrupted at line {at}"
        at += 3
    assert at > 10


def test_attach_that_is_interrupted_leaves_autograd_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> Any:
        # As Ctrl-C does at the end of torch.no_grad().
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune.live.attach.find_policy", interrupted)
    model = TinyGPT()
    with pytest.raises(KeyboardInterrupt):
        autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), memory_budget_bytes=1, runs_dir=None)
    assert torch.is_grad_enabled()


def test_storage_alone_is_switched_while_gradients_from_outside_are_alive() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # The first parameter gets no gradient, so it cannot be used for detection.
            self.prefix = nn.Parameter(torch.ones(3), requires_grad=False)
            self.inner = deep_gpt()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(tokens)

    seeded()
    model = Frozen()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(
        model,
        optimizer,
        **ATTACHED,
        mode="rounding",
        settings=autotune.Settings(accumulation_choices=(1,)),
        runs_dir=None,  # type: ignore[arg-type]
    )
    for number, batch in enumerate(token_batches(24)):
        alive = number > 14 and number % 2 == 0
        plan = tuner.plan
        if alive:
            gpt_loss(model, batch).backward()
        for micro in tuner.micro_batches(batch):
            assert not alive or tuner.plan.changed(storage=plan.storage) == plan
            tuner.backward(gpt_loss(model, micro))
        tuner.step()
    assert tuner.status["placed"] >= 5
    tuner.detach()


def test_tuner_that_costs_too_much_detaches_with_a_message() -> None:
    plain = train(TinyGPT, token_batches, gpt_loss, 210)
    seen: list[tuple[bool, str]] = []

    def look(tuner: Any, _: int) -> None:
        seen.append((tuner.attached, str(tuner.detached_because)))

    limits = dataclasses.replace(RESTLESS, overhead_frac=1e-4, decide_every=100)
    tuned = train(TinyGPT, token_batches, gpt_loss, 210, on_step=look, **{**ATTACHED, "limits": limits})
    # A profile is a one-time cost, so overhead is not judged before this many steps.
    assert [attached for attached, _ in seen] == [True] * 199 + [False] * 11
    assert "own share of the run's time is" in seen[-1][1]
    assert_identical(plain, tuned)


def test_what_the_first_profile_took_is_shown_but_no_reason_to_leave() -> None:
    """Leaving would not win it back; what comes again and again would be."""
    own = OwnTime(None)
    own.run_s = 200.0
    own.spend(50.0)
    assert own.frac(200, 0.0) > 0.04
    assert not own.is_too_expensive(200, 0.0, 0.03)
    own.run_s = 400.0
    own.spend(10.0)
    assert not own.is_too_expensive(400, 0.0, 0.03)
    own.spend(30.0)
    assert own.is_too_expensive(400, 0.0, 0.03)
    again = OwnTime(None)
    again.run_s, again.learns = 200.0, False
    again.spend(7.0)
    assert again.is_too_expensive(200, 0.0, 0.03)


class SlowToRead(UserDict[str, torch.Tensor]):
    """A batch that takes longer to inspect than a step takes."""

    def values(self) -> Any:
        time.sleep(0.02)
        return super().values()

    def items(self) -> Any:
        time.sleep(0.02)
        return super().items()


def test_time_to_inspect_a_batch_counts_as_tuner_overhead() -> None:
    model = nn.Linear(4, 1)
    batch = SlowToRead(x=torch.zeros(2, 4))
    tuner = autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), stage="observe", runs_dir=None)
    for _ in range(10):
        for micro in tuner.micro_batches(batch):
            tuner.backward(model(micro["x"]).sum())
        tuner.step()
    status = tuner.status
    tuner.detach()
    # Three of four inspections happen before the step is controlled, the fourth during it.
    assert status["overhead_frac"] > 1.0


class Hangs(Wanders):
    """A policy that does not answer the fifth request until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.hanging = False
        self.allowed = threading.Event()

    def decide(self, observation: Any, plan: Plan) -> Plan:
        self.asked += 1
        if self.asked == 5:
            self.hanging = True
            self.allowed.wait(60)
            self.hanging = False
        return super().decide(observation, plan)


def test_late_decision_keeps_plan_without_blocking() -> None:
    plain = train(deep_gpt, token_batches, gpt_loss, 30)
    policy = Hangs()
    plans: list[Plan] = []
    ended_meanwhile: list[int] = []

    def look(tuner: Any, step: int) -> None:
        plans.append(tuner.status["decided"])
        if policy.hanging:
            ended_meanwhile.append(step)
        if len(ended_meanwhile) == 4:
            policy.allowed.set()

    limits = dataclasses.replace(RESTLESS, decision_timeout_s=0.05)
    tuned = train(
        deep_gpt, token_batches, gpt_loss, 30, on_step=look, **{**ATTACHED, "limits": limits, "policy": policy}
    )
    late = [event["step"] for event in tuned.events if event["event"] == "late"]  # type: ignore[attr-defined]
    assert late
    assert not tuned.status["trips"]  # type: ignore[attr-defined]
    assert all(plans[step - 1] == plans[step - 2] for step in late)
    # Steps continue while the answer is pending.
    assert len(ended_meanwhile) >= 4
    assert_identical(plain, tuned)


def test_environment_hooks_and_optimizer_stay_unchanged() -> None:
    model = deep_gpt()
    before, shape = dict(os.environ), shape_of(model)
    threads, hooks = torch.get_num_threads(), len(torch.nn.modules.module._global_forward_hooks)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    groups = [sorted(group) for group in optimizer.param_groups]
    with autotune.attach(model, optimizer, **ATTACHED, runs_dir=None) as tuner:  # type: ignore[arg-type]
        for batch in token_batches(16):
            for micro in tuner.micro_batches(batch):
                tuner.backward(gpt_loss(model, micro))
            tuner.step()
            assert dict(os.environ) == before
    assert dict(os.environ) == before
    assert shape_of(model) == shape
    assert (torch.get_num_threads(), len(torch.nn.modules.module._global_forward_hooks)) == (threads, hooks)
    assert [sorted(group) for group in optimizer.param_groups] == groups
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("place", [0, 31, 32, -2])
def test_damaged_decision_is_rejected(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(nn.Linear(1, 1), 1.0)
    ranks.world, ranks._first = 2, 0

    def damaging(tensor: torch.Tensor, *_: object, **__: object) -> None:
        if tensor.dtype is torch.uint8:
            tensor[place] ^= 1

    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "broadcast", damaging)
    with pytest.raises(RanksError, match="damaged"):
        ranks.from_first({"plan": {"version": 1}, "open": False})
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    assert ranks.from_first({"open": False}) == {"open": False}


@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_a_rank_that_does_not_answer_is_told_of_in_plain_words(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(nn.Linear(1, 1), 2.5)
    ranks.world, ranks._first = 2, 0

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer\nGLHF!")

    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, fail if name == call else lambda *_, **__: None)
    with pytest.raises(RanksError) as caught:
        ranks.from_first({"open": False})
    assert str(caught.value) == "another rank has left, or did not answer within rank_timeout_s (2.5 s)"


LATE = """
import dataclasses, sys, time
sys.path.insert(0, {tests!r})
import torch
import autotune
from test_live import RESTLESS, deep_gpt, gpt_loss, token_batches

class Slow:
    def decide(self, observation, plan):
        if {sleeps}:
            time.sleep(10**6)
        a = torch.randn(600, 600)
        while True:
            a = torch.tanh(a @ a)

model = deep_gpt()
limits = dataclasses.replace(RESTLESS, decision_timeout_s=0.01)
tuner = autotune.attach(
    model, torch.optim.SGD(model.parameters(), 0.1), Slow(), memory_budget_bytes=10**9, limits=limits, runs_dir=None
)
for batch in token_batches(12):
    for micro in tuner.micro_batches(batch):
        tuner.backward(gpt_loss(model, micro))
    tuner.step()
assert any(event["event"] == "late" for event in tuner.events)
if {detaches}:
    tuner.detach()
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("sleeps", "detaches"), [(False, False), (False, True), (True, True)])
def test_policy_that_never_answers_does_not_abort_the_process_at_exit(*, sleeps: bool, detaches: bool) -> None:
    code = LATE.format(tests=str(Path(__file__).parent), sleeps=sleeps, detaches=detaches)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 7, ended.stderr


def test_a_closed_thread_has_freed_what_it_alone_referred_to() -> None:
    """If it still did so while Python ends, the process would abort."""
    freed = threading.Event()

    class Large:
        def __del__(self) -> None:
            time.sleep(0.3)
            freed.set()

    # A tuner of another test may not have been collected yet.
    others = set(threading.enumerate())
    decider = Decider(Wanders(), 5.0)
    assert decider.ask(functools.partial(isinstance, Large(), Large))
    decider.close()
    assert freed.is_set()
    assert not any(thread.name == "autotune-policy" for thread in set(threading.enumerate()) - others)


def test_forked_child_of_a_run_asks_a_thread_of_its_own() -> None:
    model = deep_gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tuner = autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    *batches, last = token_batches(12)

    def step(batch: torch.Tensor) -> None:
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(model, micro))
        tuner.step()

    for batch in batches:
        step(batch)
    controller: Any = tuner._controller
    # The parent's thread has answered, and waits for more questions.
    assert controller._decisions._decider._thread.is_alive()
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def work() -> None:
        """Look at the model, ask for a decision, and detach: autograd itself refuses to run after a fork."""
        begun = time.monotonic()
        with torch.no_grad():
            loss = float(gpt_loss(model.eval(), last))
        answered = [controller._decisions._decider.ask(os.getpid) for _ in range(3)]
        tuner.detach()
        writer.send((loss, answered, time.monotonic() - begun))

    child = context.Process(target=work)
    child.start()
    writer.close()
    # An answer of the thread that only its parent has would never come.
    limit_s = RESTLESS.decision_timeout_s
    assert reader.poll(limit_s)
    loss, answered, took_s = reader.recv()
    child.join(limit_s)
    assert child.exitcode == 0
    assert set(answered) == {child.pid}
    assert took_s < limit_s
    with torch.no_grad():
        assert loss == float(gpt_loss(model.eval(), last))
    # The parent's own thread goes on.
    model.train()
    step(last)
    assert tuner.attached
    assert controller._decisions._decider.ask(os.getpid) == os.getpid()
    tuner.detach()
