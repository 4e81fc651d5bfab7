"""Tests of unusual loops: odd defaults and batches, and modules, forwards and optimizers replaced during training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Block
from test_live import RESTLESS, Wanders, deep_gpt, gpt_loss, seeded, token_batches
from torch import nn

import autotune
from autotune.agents.scratch_network import LearnedPolicy, PolicyNetwork
from autotune.mechanics.controls import ControlledForward, recomputations
from autotune.mechanics.precision import useful_precisions
from autotune.plan import Precision, Storage


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "float64": functools.partial(default_dtype, torch.float64),
    "bfloat16": functools.partial(default_dtype, torch.bfloat16),
    "meta": functools.partial(torch.device, "meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Run:
    """A model in training, attached or not.

    Args:
        attaching: Arguments of :func:`autotune.attach`; without any, the run is unattached.
        around: Context that is entered while attaching.
    """

    def __init__(self, *, around: Callable[[], Any] = contextlib.nullcontext, **attaching: Any) -> None:
        seeded()
        self.model: Any = deep_gpt()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        with around():
            self.tuner = (
                autotune.attach(self.model, self.optimizer, runs_dir=None, limits=RESTLESS, **attaching)
                if attaching
                else None
            )

    def train(
        self,
        steps: int,
        given: Callable[[torch.Tensor], Any] = lambda tokens: tokens,
        each: Callable[[Run, int], None] = lambda run, number: None,
    ) -> list[torch.Tensor]:
        """Train on the given batches, and return the parameters."""
        for number, tokens in enumerate(token_batches(steps)):
            each(self, number)
            if self.tuner is None:
                gpt_loss(self.model, tokens).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                continue
            for _ in self.tuner.micro_batches(given(tokens)):
                self.tuner.backward(gpt_loss(self.model, tokens))
            self.tuner.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@functools.cache
def plain_run(steps: int) -> list[torch.Tensor]:
    """Return the parameters of an unattached run."""
    return Run().train(steps)


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def controlled(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if isinstance(one.__dict__.get("forward"), ControlledForward)]


# Defaults.


@pytest.mark.some(2)
@pytest.mark.parametrize("default", DEFAULTS)
def test_shipped_policy_is_built_identically_under_any_defaults(default: str) -> None:
    run = Run(policy="ppo", memory_budget_bytes=10**9, around=DEFAULTS[default])
    assert_same(run.train(12), plain_run(12))
    assert run.tuner is not None
    assert run.tuner.attached
    assert not run.tuner.status["trips"]
    run.tuner.detach()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.bfloat16])
def test_network_decides_under_another_default_dtype(dtype: torch.dtype) -> None:
    # Not every untrained network proposes another plan.
    seeded()
    with default_dtype(dtype):
        policy = LearnedPolicy(PolicyNetwork())
    run = Run(policy=policy, mode="tolerant", memory_budget_bytes=10**9)
    assert run.tuner is not None
    # What the network proposes depends on measured times.
    for _ in range(5):
        with default_dtype(dtype):
            run.train(20)
        if run.tuner.status["switches"]:
            break
    assert run.tuner.status["switches"]
    assert not run.tuner.status["trips"]
    run.tuner.detach()


def test_loss_of_one_number_need_not_be_a_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    """``backward()`` accepts one, and so does the tuner."""
    run = Run(policy=Wanders(), memory_budget_bytes=10**9)
    loss = gpt_loss
    monkeypatch.setitem(globals(), "gpt_loss", lambda *given: loss(*given).reshape(1, 1))
    attached = run.train(12)
    monkeypatch.undo()
    assert_same(attached, plain_run(12))
    assert run.tuner is not None
    assert not run.tuner.status["trips"]
    run.tuner.detach()


@pytest.mark.slow
@pytest.mark.parametrize("switched", [torch.no_grad, torch.inference_mode])
def test_useful_precisions_are_found_whatever_the_caller_has_disabled(
    switched: Callable[[], Any], measuring_precisions: Callable[[], None]
) -> None:
    plain = useful_precisions("cpu")
    measuring_precisions()
    with switched():
        assert [p for p in useful_precisions("cpu") if p is not Precision.FP16] == [
            p for p in plain if p is not Precision.FP16
        ]


# Budgets.


@pytest.mark.some(3)
@pytest.mark.parametrize("size", [np.int64(10**9), 1e9, torch.tensor(10**9), np.float32(1e9), "1GB", "1GB:reserved"])
def test_budget_can_be_a_size_of_any_library_or_a_function(size: Any) -> None:
    for given in (size, lambda: size):
        run = Run(policy="exact", memory_budget_bytes=given)
        run.train(3)
        assert run.tuner is not None
        assert run.tuner.status["memory_budget_bytes"] == 10**9
        run.tuner.detach()


def test_invalid_budget_from_the_first_step_keeps_the_first_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: Iterator[Any] = iter([1000])
    run = Run(policy="exact", memory_budget_bytes=lambda: next(answers, -1))
    run.train(12)
    assert run.tuner is not None
    assert run.tuner.status["memory_budget_bytes"] == 1000
    assert sum(event["event"] == "budget refused" for event in run.tuner.events) == 1
    assert sum("its last answer stands" in message for message in caplog.messages) == 1
    run.tuner.detach()


# Batches.

NESTED: dict[str, Any] = {}
NESTED["itself"] = NESTED
ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda tokens: None,
    "texts": lambda tokens: ["a", "b"],
    "numbers": lambda tokens: [1, 2, 3],
    "arrays": lambda tokens: tokens.numpy(),
    "a generator": lambda tokens: (row for row in tokens),
    "one number": lambda tokens: torch.tensor(3.0),
    "empty": lambda tokens: tokens[:0],
    "an object": lambda tokens: object(),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param(kind, mode, marks=[] if mode == "exact" or kind == "texts" else [pytest.mark.slow])
        for kind in ODD
        for mode in ("exact", "rounding", "tolerant")
    ],
)
def test_batch_without_samples_trains_whole(kind: str, mode: str) -> None:
    run = Run(policy="exact", mode=mode, memory_budget_bytes=10**9)
    assert run.tuner is not None
    trained = run.train(12, ODD[kind])
    assert run.tuner.attached
    assert run.tuner.status["steps"] == 12
    if mode != "tolerant":
        assert_same(trained, plain_run(12))
    run.tuner.detach()


def test_batch_that_contains_itself_trains_whole() -> None:
    run = Run(policy="exact", memory_budget_bytes=10**9)
    assert_same(run.train(6, lambda tokens: NESTED), plain_run(6))


def test_unsplittable_batch_among_others_is_not_split() -> None:
    run = Run(policy=Wanders(), mode="rounding", memory_budget_bytes=10**9)
    seen: list[Any] = []
    assert run.tuner is not None
    for number, tokens in enumerate(token_batches(30)):
        pieces = 0
        for piece in run.tuner.micro_batches({"odd": 3} if number % 3 == 2 else tokens):
            pieces += not run.tuner.probing
            run.tuner.backward(gpt_loss(run.model, piece if isinstance(piece, torch.Tensor) else tokens))
        run.tuner.step()
        seen.append(pieces)
    assert run.tuner.attached
    assert set(seen[2::3]) == {1}
    run.tuner.detach()


def test_one_shot_iterable_batch_is_read_once() -> None:
    run = Run(policy=Wanders(), mode="tolerant", memory_budget_bytes=10**9)
    assert run.tuner is not None
    for tokens in token_batches(8):
        for rows in run.tuner.micro_batches(iter(tokens)):
            run.tuner.backward(gpt_loss(run.model, torch.stack(list(rows))))
        run.tuner.step()
    assert "read only once" in run.tuner.locks["bf16"]
    run.tuner.detach()


# Modules.


def replace_a_block(model: Any) -> None:
    model.blocks[2] = Block(16, 0.0)


def remove_a_block(model: Any) -> None:
    del model.blocks[-1]


def add_a_block(model: Any) -> None:
    model.blocks.append(Block(16, 0.0))


def replace_all(model: Any) -> None:
    model.blocks = nn.ModuleList(Block(16, 0.0) for _ in range(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace_a_block, "the module blocks.2 was replaced"),
        (remove_a_block, "was removed"),
        (add_a_block, "modules were added to blocks"),
        (replace_all, "the module blocks was replaced"),
    ],
)
def test_model_whose_modules_change_is_detached_with_a_warning(
    change: Callable[[Any], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    former: list[nn.Module] = []

    def at_eight(run: Run, number: int) -> None:
        if number == 8:
            former.extend(run.model.modules())
            seeded(1)
            change(run.model)
            run.optimizer.param_groups[0]["params"] = list(run.model.parameters())

    run = Run(policy="exact", memory_budget_bytes=1)
    trained = run.train(16, each=at_eight)
    assert run.tuner is not None
    assert said in str(run.tuner.detached_because)
    assert any(said in message and "attach() again" in message for message in caplog.messages)
    assert not any("forward" in module.__dict__ for module in (*former, *run.model.modules()))
    assert_same(trained, Run().train(16, each=at_eight))
    # As the warning advises.
    autotune.attach(run.model, run.optimizer, runs_dir=None).detach()


def test_module_added_next_to_the_units_changes_nothing() -> None:
    def at_four(run: Run, number: int) -> None:
        if number == 4:
            run.model.criterion = nn.CrossEntropyLoss()

    run = Run(policy="exact", memory_budget_bytes=1)
    run.train(8, each=at_four)
    assert run.tuner is not None
    assert run.tuner.attached
    run.tuner.detach()


def leave_out(run: Run, number: int) -> None:
    """Call no block in the first step, the first one in the second, and one more in each third step after it."""

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        x = run.model.embedding(tokens)
        for block in list(run.model.blocks)[: (number + 2) // 3]:
            x = block(x)
        return run.model.head(x)

    run.model.forward = forward


def test_units_that_the_first_steps_leave_out_are_recomputed() -> None:
    run = Run(policy="exact", memory_budget_bytes=1)
    assert_same(run.train(24, each=leave_out), Run().train(24, each=leave_out))
    assert run.tuner is not None
    assert not any(name.startswith("blocks") for name in run.tuner.locks)
    assert all(count > 0 for count in recomputations(run.model).values())
    assert len(run.tuner.plan.recomputed) == 4
    run.tuner.detach()


def wrap(run: Run, number: int) -> None:
    if number == 8:
        for block in run.model.blocks:
            block.forward = functools.partial(lambda former, x: former(x), block.forward)


def test_forward_wrapped_during_training_runs_plainly_after_detaching() -> None:
    run = Run(policy="exact", memory_budget_bytes=1)
    assert_same(run.train(16, each=wrap), Run().train(16, each=wrap))
    assert run.tuner is not None
    run.tuner.detach()
    held = [block.forward.args[0] for block in run.model.blocks]
    counts = [forward.recomputation.count for forward in held]
    assert all(isinstance(forward, ControlledForward) for forward in held)
    gpt_loss(run.model, next(token_batches(1))).backward()
    assert [forward.recomputation.count for forward in held] == counts


def test_plan_stays_active_while_forwards_are_wrapped_and_unwrapped() -> None:
    def wrap_and_unwrap(run: Run, number: int) -> None:
        wrap(run, number)
        if number == 12:
            for block in run.model.blocks:
                block.forward = bare(block.forward)

    run = Run(policy="exact", memory_budget_bytes=1)
    run.train(16, each=wrap_and_unwrap)
    assert run.tuner is not None
    assert all(storage is Storage.RECOMPUTE for storage in run.tuner.plan.storage.values())
    before = recomputations(run.model)
    run.train(1)
    assert all(count > before[name] for name, count in recomputations(run.model).items())
    run.tuner.detach()
    assert not controlled(run.model)


def bare(forward: Any) -> Any:
    """Return the function that a user wrapped with :func:`wrap`."""
    wrapper = forward.original if isinstance(forward, ControlledForward) else forward
    return wrapper.args[0]


def test_bound_forward_taken_while_attached_runs_plainly_after_detaching() -> None:
    run = Run(policy="exact", memory_budget_bytes=1)
    run.train(6)
    taken = run.model.blocks[0].forward
    assert run.tuner is not None
    run.tuner.detach()
    count = taken.recomputation.count
    taken(torch.randn(2, 3, 16, requires_grad=True)).sum().backward()
    assert taken.recomputation.count == count


# Optimizers.


def test_optimizer_without_any_of_the_gradients_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(policy="exact", memory_budget_bytes=10**9)

    def renewed(run: Run, number: int) -> None:
        if number == 4:
            # As after model.to_empty(), or after rebuilding the model in place.
            for module in run.model.modules():
                for key, parameter in list(module._parameters.items()):
                    module._parameters[key] = None if parameter is None else nn.Parameter(parameter.detach().clone())

    run.train(8, each=renewed)
    told = [message for message in caplog.messages if "another optimizer than the attached one" in message]
    assert len(told) == 1
    assert "none of the attached optimizer's parameters has a gradient" in told[0]


def test_optimizer_stepped_instead_of_the_tuner_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def trained(attach: bool) -> list[torch.Tensor]:
        run = Run(policy="exact", memory_budget_bytes=10**9) if attach else Run()
        for tokens in token_batches(30):
            if run.tuner is None:
                gpt_loss(run.model, tokens).backward()
            else:
                for micro in run.tuner.micro_batches(tokens):
                    run.tuner.backward(gpt_loss(run.model, micro))
            run.optimizer.step()
            run.optimizer.zero_grad()
        return list(run.model.parameters())

    assert_same(trained(attach=True), trained(attach=False))
    assert sum("another optimizer than the attached one" in message for message in caplog.messages) == 1


def test_loop_that_skips_an_occasional_batch_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(policy="exact", memory_budget_bytes=10**9)
    assert run.tuner is not None
    for number, tokens in enumerate(token_batches(30)):
        for micro in run.tuner.micro_batches(tokens):
            run.tuner.backward(gpt_loss(run.model, micro))
        if number % 5 < 2:
            run.optimizer.zero_grad()
        else:
            run.tuner.step()
    assert not any("another optimizer" in message for message in caplog.messages)
    run.tuner.detach()
