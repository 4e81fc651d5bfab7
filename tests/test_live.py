"""Tests of a live tuner in exact mode: training stays bit-identical, and the run always continues."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import json
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import Block, TinyConvolution, TinyGPT
from torch import nn

import autotune
from autotune import AttachError, Limits, Settings
from autotune.live.deciding import find_policy
from autotune.live.kill_switches import KILL_VARIABLE
from autotune.plan import Launch, Plan, PlanSpace, Precision, Storage

Loss = Callable[[nn.Module, Any], torch.Tensor]

# Limits that decide and may switch at every step.
RESTLESS = Limits(
    decide_every=1,
    min_steps_between_switches=0,
    canary_steps=0,
    gain_frac=-1e6,
    max_trips=10**6,
    # Steps take microseconds, so the tuner's work takes longer, and any plan may be slower.
    overhead_frac=1e6,
    slowdown_frac=1e6,
    # On a busy machine an answer may be late; lateness is tested separately.
    decision_timeout_s=60.0,
)


def gpt_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def image_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def autocast_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return gpt_loss(model, tokens)


def token_batches(count: int, *, ragged: bool = False) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        length = int(torch.randint(4, 24, (1,), generator=generator)) if ragged else 16
        yield torch.randint(0, 11, (4, length), generator=generator)


def image_batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randn(6, 1, 4, 4, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def seeded(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@dataclasses.dataclass
class Trace:
    """The result of a run."""

    losses: list[float]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    tuner: Any = None

    def __post_init__(self) -> None:
        drawn = np.random.get_state()[1].tolist()  # noqa: NPY002
        self.random = (random.getstate(), drawn, torch.get_rng_state().tolist())

    def state(self) -> list[torch.Tensor]:
        optimizer = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.model.state_dict().values(), *(torch.as_tensor(value) for value in optimizer)]


def assert_identical(one: Trace, two: Trace) -> None:
    assert one.losses == two.losses
    assert one.random == two.random
    for a, b in zip(one.state(), two.state(), strict=True):
        assert torch.equal(a, b)


def train(
    model: Callable[[], nn.Module],
    batches: Callable[[int], Iterator[Any]],
    loss_of: Loss,
    steps: int,
    *,
    on_step: Callable[[Any, int], None] | None = None,
    **attaching: Any,
) -> Trace:
    """Train a new model, attached if arguments of attach are given."""
    seeded()
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    tuner = autotune.attach(trained, optimizer, clip_norm=1.0, runs_dir=None, **attaching) if attaching else None
    losses = []
    for number, batch in enumerate(batches(steps)):
        if tuner is None:
            loss = loss_of(trained, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            for micro in tuner.micro_batches(batch):
                loss = loss_of(trained, micro)
                tuner.backward(loss)
            tuner.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if on_step is not None:
            on_step(tuner, number)
    trace = Trace(losses, trained, optimizer, tuner)
    if tuner is not None:
        trace.status = dict(tuner.status)  # type: ignore[attr-defined]
        trace.plan = tuner.plan  # type: ignore[attr-defined]
        trace.events = tuner.events  # type: ignore[attr-defined]
        tuner.detach()
    return trace


@functools.cache
def plain_gpt(steps: int) -> Trace:
    """Return the unattached training of the little GPT, which many tests compare with."""
    return train(deep_gpt, token_batches, gpt_loss, steps)


class Wanders:
    """A policy that proposes another placement at each decision."""

    name = "wanders"

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def decide(self, observation: Any, plan: Plan) -> Plan:
        names, storages = observation.space.recomputable, observation.space.storages
        chosen = {name: storages[int(self.generator.integers(len(storages)))] for name in names}
        return plan.changed(storage=chosen)

    def reset(self) -> None:
        """Do nothing."""


def deep_gpt() -> nn.Module:
    return TinyGPT(width=16, blocks=4, dropout=0.2)


class Moves:
    """A budget that varies between the needs of recomputing everything and nothing."""

    def __init__(self, lowest: int, highest: int) -> None:
        self.lowest, self.highest = lowest, highest
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return self.highest if self.asked % 2 else self.lowest


@pytest.mark.parametrize(
    ("model", "batches", "loss_of"),
    [
        pytest.param(deep_gpt, token_batches, gpt_loss, id="dropout"),
        pytest.param(lambda: TinyConvolution(blocks=5), image_batches, image_loss, id="batchnorm"),
        pytest.param(deep_gpt, token_batches, autocast_loss, id="autocast", marks=pytest.mark.slow),
        pytest.param(deep_gpt, lambda n: token_batches(n, ragged=True), gpt_loss, id="ragged"),
    ],
)
def test_training_attached_and_switching_is_bit_identical(model: Any, batches: Any, loss_of: Loss) -> None:
    plain = train(model, batches, loss_of, 60)
    tuned = train(model, batches, loss_of, 60, policy=Wanders(), memory_budget_bytes=10**9, limits=RESTLESS)
    assert tuned.status["switches"] >= 40  # type: ignore[attr-defined]
    assert tuned.status["attached"]  # type: ignore[attr-defined]
    assert_identical(plain, tuned)


def test_model_switched_to_evaluation_between_forward_and_backward_pass_trains_bit_identically() -> None:
    def evaluating(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        model.train()
        loss = gpt_loss(model, tokens)
        # Recomputation in evaluation mode would leave the dropout out.
        model.eval()
        return loss

    plain = train(deep_gpt, token_batches, evaluating, 12)
    tuned = train(deep_gpt, token_batches, evaluating, 12, memory_budget_bytes=1, limits=RESTLESS, policy="exact")
    assert not any(name.startswith("blocks.") for name in tuned.tuner.locks)
    assert set(tuned.plan.storage.values()) == {Storage.RECOMPUTE}  # type: ignore[attr-defined]
    assert_identical(plain, tuned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batches", "loss_of"),
    [
        pytest.param(deep_gpt, token_batches, gpt_loss, id="dropout"),
        pytest.param(lambda: TinyConvolution(blocks=5), image_batches, image_loss, id="batchnorm"),
        pytest.param(deep_gpt, token_batches, autocast_loss, id="autocast"),
    ],
)
def test_thousand_attached_steps_are_bit_identical(model: Any, batches: Any, loss_of: Loss) -> None:
    plain = train(model, batches, loss_of, 1000)
    tuned = train(model, batches, loss_of, 1000, policy=Wanders(), memory_budget_bytes=10**9, limits=RESTLESS)
    assert tuned.status["switches"] >= 200  # type: ignore[attr-defined]
    assert_identical(plain, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["exact", "greedy", "planner", "ppo"])
def test_every_named_policy_follows_a_changing_budget_and_stays_bit_identical(policy: str) -> None:
    plain, peaks = plain_gpt(60), profiled_peaks()
    budget = Moves(int(peaks[0] * 1.02), int(peaks[1] * 1.1))
    tuned = train(deep_gpt, token_batches, gpt_loss, 60, policy=policy, memory_budget_bytes=budget, limits=RESTLESS)
    assert tuned.status["attached"], tuned.status  # type: ignore[attr-defined]
    assert tuned.status["placed"] >= 20  # type: ignore[attr-defined]
    assert not tuned.status["over_budget_steps"]  # type: ignore[attr-defined]
    assert_identical(plain, tuned)


@functools.cache
def profiled_peaks() -> tuple[float, float]:
    """Return the smallest and the largest predicted peak of the little GPT."""
    tuned = train(deep_gpt, token_batches, gpt_loss, 12, policy="exact", memory_budget_bytes=10**9)
    event = next(event for event in tuned.events if event["event"] == "decision")  # type: ignore[attr-defined]
    largest = event["predicted"]["peak_bytes"]
    small = train(deep_gpt, token_batches, gpt_loss, 12, policy="exact", memory_budget_bytes=1000)
    return small.status["predicted_peak_bytes"], largest  # type: ignore[attr-defined]


class Hostile:
    """A policy that gives every forbidden answer."""

    name = "hostile"

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, observation: Any, plan: Plan) -> Any:
        self.asked += 1
        random.random()
        torch.rand(3)
        answers: list[Callable[[], Any]] = [
            lambda: None,
            lambda: 7,
            lambda: plan.changed(accumulation_steps=64),
            lambda: plan.changed(storage={"no such unit": "recompute"}),
            lambda: plan.changed(precision=dict.fromkeys(plan.precision, "bf16")),
            lambda: {"version": 1},
            lambda: (_ for _ in ()).throw(ValueError("no")),
            lambda: np.full(7, np.nan),
            lambda: plan.changed(storage=dict.fromkeys(plan.storage, "save")),
            lambda: sys.exit(3),
        ]
        return answers[self.asked % len(answers)]()

    def reset(self) -> None:
        """Do nothing."""


def test_hostile_policy_causes_only_trips() -> None:
    plain = plain_gpt(60)
    budget = int(profiled_peaks()[0] * 1.05)
    limits = dataclasses.replace(RESTLESS, pause_steps=1)
    hostile = Hostile()
    # Pauses double; they are short here, and the circuit breaker is far away, because the answers are tested.
    tuned = train(deep_gpt, token_batches, gpt_loss, 60, policy=hostile, memory_budget_bytes=budget, limits=limits)
    assert tuned.status["trips"]  # type: ignore[attr-defined]
    assert not tuned.status["over_budget_steps"]  # type: ignore[attr-defined]
    logged = [event for event in tuned.events if event["event"] == "tripped"]  # type: ignore[attr-defined]
    assert len(logged) == len(tuned.status["trips"])  # type: ignore[attr-defined]
    assert_identical(plain, tuned)


def test_too_many_trips_detach_permanently() -> None:
    plain = plain_gpt(60)
    limits = dataclasses.replace(RESTLESS, pause_steps=1, max_trips=3)
    tuned = train(deep_gpt, token_batches, gpt_loss, 60, policy=Hostile(), memory_budget_bytes=10**9, limits=limits)
    assert not tuned.status["attached"]  # type: ignore[attr-defined]
    assert "3 trips" in tuned.status["detached_because"]  # type: ignore[attr-defined]
    assert_identical(plain, tuned)


@pytest.mark.parametrize(
    "lie",
    [
        float("nan"),
        *(pytest.param(lie, marks=pytest.mark.slow) for lie in (-1, 0, "much", float("inf"))),
        None,
        RuntimeError("no driver"),
    ],
)
def test_invalid_budget_is_logged_once_and_the_last_valid_one_is_kept(
    lie: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def budget() -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            if isinstance(lie, Exception):
                raise lie
            return lie
        return 10**9

    plain = plain_gpt(30)
    tuned = train(deep_gpt, token_batches, gpt_loss, 30, policy="exact", memory_budget_bytes=budget, limits=RESTLESS)
    assert tuned.status["attached"]  # type: ignore[attr-defined]
    refused = [event for event in tuned.events if event["event"] == "budget refused"]  # type: ignore[attr-defined]
    # None is a valid answer: there is no budget now. An invalid answer is reported once.
    assert len(refused) == (lie is not None)
    warned = [message for message in caplog.messages if "its last answer stands" in message]
    assert len(warned) == len(refused)
    assert_identical(plain, tuned)


def test_kill_switch_variable_is_read_when_attaching(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_gpt(20)
    monkeypatch.setenv(KILL_VARIABLE, "1")
    tuned = train(deep_gpt, token_batches, gpt_loss, 20, policy="exact", memory_budget_bytes=1000, limits=RESTLESS)
    assert not tuned.status["attached"]  # type: ignore[attr-defined]
    assert_identical(plain, tuned)


def shape_of(model: nn.Module) -> list[Any]:
    return [
        (
            name,
            type(module),
            sorted(key for key in module.__dict__ if key != "training"),
            [len(getattr(module, hooks)) for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")],
        )
        for name, module in model.named_modules()
    ]


def test_attaching_and_detaching_leaves_no_trace() -> None:
    model = deep_gpt()
    before, keys = shape_of(model), list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    states = torch.get_rng_state(), random.getstate()
    tuner = autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    for batch in token_batches(20):
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(model, micro))
        tuner.step()
        assert list(model.state_dict()) == keys
    tuner.detach()
    assert shape_of(model) == before
    assert all(not parameter._backward_hooks for parameter in model.parameters())
    alive = weakref.ref(model)
    del model, optimizer, tuner, micro, batch
    gc.collect()
    assert alive() is None


def test_model_saved_while_attached_loads_without_this_package(tmp_path: Path) -> None:
    model = TinyGPT(width=16, blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=1000, runs_dir=None)
    saved: list[bytes] = []
    for number, batch in enumerate(token_batches(14)):
        for micro in tuner.micro_batches(batch):
            if number in (0, 13):
                # In the probe step and under a plan.
                stream = io.BytesIO()
                torch.save(model, stream)
                saved.append(stream.getvalue())
                plain = [part.__dict__.get("forward") for part in copy.deepcopy(model).modules()]
                assert all(getattr(forward, "__func__", None) in (None, Block.forward) for forward in plain)
                pickle.loads(pickle.dumps(model))
            tuner.backward(gpt_loss(model, micro))
        tuner.step()
    assert tuner.status["predicted_peak_bytes"] is not None
    for number, data in enumerate(saved):
        (tmp_path / f"{number}.pt").write_bytes(data)
    code = (
        "import sys; sys.modules['autotune'] = None; import torch\n"
        "for n in range(2):\n"
        f"    model = torch.load(f'{tmp_path}/{{n}}.pt', weights_only=False)\n"
        "    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, timeout=120)


class BudgetError(Exception):
    """A user's exception."""


def raise_within(tuner: Any, model: nn.Module, batch: Any, error: BaseException) -> None:
    for micro in tuner.micro_batches(batch):
        gpt_loss(model, micro)
        raise error


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(ZeroDivisionError, marks=pytest.mark.slow),
        KeyboardInterrupt,
        pytest.param(BudgetError, marks=pytest.mark.slow),
        torch.OutOfMemoryError,
    ],
)
def test_user_exceptions_propagate_and_the_run_can_continue(kind: type[BaseException]) -> None:
    model = deep_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    error = kind("mine")
    for number, batch in enumerate(token_batches(20)):
        if number in (0, 1, 4, 12):
            with pytest.raises(kind) as caught:
                raise_within(tuner, model, batch, error)
            assert caught.value is error
            continue
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(model, micro))
        tuner.step()
    assert tuner.attached
    tuner.detach()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_nonfinite_gradient_never_reaches_a_weight() -> None:
    model = deep_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    stepped = []
    for number, batch in enumerate(token_batches(20)):
        for micro in tuner.micro_batches(batch):
            factor = float("nan") if number % 3 == 1 else 1.0
            tuner.backward(gpt_loss(model, micro) * factor)
        stepped.append(tuner.step())
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert stepped == [number % 3 != 1 for number in range(20)]


def test_manual_accumulation_by_the_user_is_left_alone() -> None:
    def run(attached: bool) -> list[torch.Tensor]:
        seeded()
        model = deep_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        tuner = (
            autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
            if attached
            else None
        )
        for number, batch in enumerate(token_batches(60)):
            if tuner is None:
                (gpt_loss(model, batch) / 3).backward()
            else:
                for micro in tuner.micro_batches(batch):
                    tuner.backward(gpt_loss(model, micro) / 3)
            if number % 3 == 2:
                if tuner is None:
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    tuner.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(one, two) for one, two in zip(run(False), run(True), strict=True))


def test_observing_scores_its_advice_and_switches_nothing() -> None:
    plain = plain_gpt(40)
    tuned = train(
        deep_gpt,
        token_batches,
        gpt_loss,
        40,
        policy="exact",
        stage="observe",
        memory_budget_bytes=1000,
        limits=RESTLESS,
    )
    assert tuned.status["placed"] == 0  # type: ignore[attr-defined]
    decisions = [event for event in tuned.events if event["event"] == "decision"]  # type: ignore[attr-defined]
    assert decisions
    assert not any(event["applied"] for event in decisions)
    assert all(event["measured"]["peak_bytes"] for event in decisions if event["measured"])
    assert_identical(plain, tuned)


def test_model_without_units_is_only_observed() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Flat()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tuner = autotune.attach(model, optimizer, memory_budget_bytes=10**6, runs_dir=None)
    assert "observed only" in tuner.locks["units"]
    for _ in range(60):
        for micro in tuner.micro_batches(torch.ones(2, 3)):
            tuner.backward(model(micro).sum())
        assert tuner.step()
    assert tuner.attached


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": 3}, "model is an int"),
        ({"optimizer": "adam"}, "optimizer is a str"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)}, "owns none of the model's parameters"),
        ({"policy": "best"}, "policy is 'best'"),
        ({"policy": object()}, "without decide"),
        ({"policy": Path("/nowhere/at/all")}, "nowhere"),
        ({"policy": "missing.json"}, "missing.json"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"stage": "go"}, "stage is 'go'"),
        ({"memory_budget_bytes": -3}, "memory_budget_bytes is -3"),
        ({"memory_budget_bytes": 1.5}, r"memory_budget_bytes is 1\.5, which includes a fraction of a byte"),
        ({"memory_budget_bytes": "75%"}, "75%"),
        ({"memory_budget_bytes": "lots"}, "lots"),
        ({"memory_budget_bytes": float("inf")}, "memory_budget_bytes is inf"),
        ({"memory_budget_bytes": True}, "memory_budget_bytes is True"),
        ({"memory_budget_bytes": np.ones(3)}, "memory_budget_bytes is array"),
        ({"memory_budget_bytes": lambda: "lots"}, "memory_budget_bytes returned 'lots'"),
        ({"memory_budget_bytes": lambda: float("nan")}, "memory_budget_bytes returned nan"),
        ({"memory_budget_bytes": lambda: 1 // 0}, "memory_budget_bytes raised ZeroDivisionError"),
        ({"limits": 5}, "limits is 5"),
        ({"settings": 5}, "settings is 5"),
        ({"settings": Settings(units=["nothing"])}, "not a module of the model"),
        ({"units": ["nothing"]}, r"units is a setting \(allowed: settings=Settings\(units=...\)\)"),
        ({"clip_norm": "1.0"}, "clip_norm is '1.0'"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"clip_norm": -1.0}, r"clip_norm is -1\.0"),
        ({"total_steps": "1000"}, "total_steps is '1000'"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"total_steps": 3.5}, r"total_steps is 3\.5"),
        ({"runs_dir": 5}, "runs_dir is 5"),
        ({"runs_dir": "\0"}, "runs_dir is "),
        ({"model": nn.Sequential(nn.LazyLinear(4), nn.ReLU())}, r"0\.weight has no shape yet"),
    ],
)
def test_invalid_input_is_one_line_and_leaves_the_model_unchanged(change: dict[str, Any], said: str) -> None:
    model = deep_gpt()
    before = shape_of(model)
    arguments: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    with pytest.raises(autotune.InputError, match=said) as caught:
        autotune.attach(**{"runs_dir": None, **arguments, **change})
    assert "\n" not in str(caught.value)
    assert shape_of(model) == before
    # The failed attach left nothing, so the next one can attach.
    autotune.attach(model, arguments["optimizer"], runs_dir=None).detach()


def test_second_attach_is_rejected() -> None:
    model = deep_gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with autotune.attach(model, optimizer, runs_dir=None), pytest.raises(AttachError, match="attached to this model"):
        autotune.attach(model, optimizer, runs_dir=None)
    autotune.attach(model, optimizer, runs_dir=None).detach()


def test_calls_out_of_order_name_the_remedy() -> None:
    model = deep_gpt()
    tuner = autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), runs_dir=None)
    with pytest.raises(AttachError, match=r"without a backward\(\)"):
        tuner.step()
    with pytest.raises(AttachError, match="outside of micro_batches"):
        tuner.backward(torch.ones((), requires_grad=True))
    batch = next(token_batches(1))
    for counted in (0, -1, 1.5):
        with pytest.raises(AttachError, match="count returned"):
            list(tuner.micro_batches(batch, count=lambda _, counted=counted: counted))
    for _ in tuner.micro_batches(batch):
        with pytest.raises(AttachError, match="without a gradient"):
            tuner.backward(torch.ones(()))
        with pytest.raises(AttachError, match=r"shape \(2,\)"):
            tuner.backward(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"decide_every": 0},
        {"gain_frac": float("nan")},
        {"max_trips": 1.5},
        {"follow_batches": 1},
        {"pause_steps": True},
    ],
)
def test_invalid_limits_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(AttachError, match=next(iter(wrong))):
        Limits(**wrong)


def test_recorded_run_can_be_repeated_without_its_policy(tmp_path: Path) -> None:
    seeded()
    first = deep_gpt()
    optimizer = torch.optim.AdamW(first.parameters(), 1e-2)
    with autotune.attach(
        first, optimizer, Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=tmp_path
    ) as tuner:
        for batch in token_batches(44):
            for micro in tuner.micro_batches(batch):
                tuner.backward(gpt_loss(first, micro))
            tuner.step()
        folder = tuner.folder
    assert folder is not None
    log = folder / "decisions.jsonl"
    switched = [json.loads(line) for line in log.read_text().splitlines() if '"switched"' in line]
    assert len(switched) > 22
    second = deep_gpt()
    optimizer = torch.optim.AdamW(second.parameters(), 1e-2)
    again = autotune.attach(second, optimizer, log, memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    for batch in token_batches(44):
        for micro in again.micro_batches(batch):
            again.backward(gpt_loss(second, micro))
        again.step()
    repeated = [event for event in again.events if event["event"] == "switched"]
    assert [(event["step"], event["plan"]) for event in repeated] == [(e["step"], e["plan"]) for e in switched]


def test_replay_compares_predictions_with_measurements_and_reruns_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune.cli.main import run

    job = autotune.load_job(str(Path(__file__).parent / "tiny_job.py"))
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    limits = dataclasses.replace(RESTLESS, decide_every=4)
    with autotune.attach(
        model, optimizer, Wanders(), memory_budget_bytes=10**9, limits=limits, runs_dir=tmp_path
    ) as tuner:
        for batch, _ in zip(job.batches(0), range(40), strict=False):
            for micro in tuner.micro_batches(batch):
                tuner.backward(job.loss(model, micro))
            tuner.step()
        folder = tuner.folder
    reference = str(Path(__file__).parent / "tiny_job.py")
    assert run(["replay", str(folder), "--job", reference, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recorded"]["switches"] == document["repeated"]["switches"] > 2
    assert all(row["predicted_s"] > 0 for row in document["recorded"]["windows"])
    assert any(row["time_error_frac"] is not None for row in document["repeated"]["windows"])
    assert run(["replay", str(folder)]) == 0
    assert "recorded" in capsys.readouterr().out
    for wrong in (tmp_path / "nothing", Path(reference)):
        assert run(["replay", str(wrong)]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


class Greedy:
    """A policy that always wants the largest plan, and is sometimes late, invalid or raises."""

    name = "greedy for memory"

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, observation: Any, plan: Plan) -> Any:
        self.asked += 1
        if self.asked in (700, 2100, 3500):
            raise RuntimeError("now and then")
        if self.asked in (1400, 2800):
            return np.full(3, np.nan)
        return observation.space.baseline()

    def reset(self) -> None:
        """Do nothing."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_greedy_decisions_respect_a_changing_and_sometimes_invalid_budget() -> None:
    lowest, highest = profiled_peaks()
    generator = np.random.default_rng(0)
    lies = 0

    def budget() -> Any:
        nonlocal lies
        if generator.random() < 0.05:
            lies += 1
            return [float("nan"), -1, "none of it", 0][lies % 4]
        return int(generator.uniform(lowest * 1.02, highest * 1.05))

    # Pauses double, so they start as short as possible, and only a few trips fit in the time.
    limits = dataclasses.replace(RESTLESS, pause_steps=1)
    greedy = Greedy()
    plain = train(deep_gpt, token_batches, gpt_loss, 12_000)
    tuned = train(deep_gpt, token_batches, gpt_loss, 12_000, policy=greedy, memory_budget_bytes=budget, limits=limits)
    status, events = tuned.status, tuned.events  # type: ignore[attr-defined]
    assert status["attached"]
    assert greedy.asked >= 10_000
    assert not status["over_budget_steps"]
    assert status["placed"] > 1000
    assert len(status["trips"]) == sum(event["event"] == "tripped" for event in events) == 5
    # Numbers of two types and text.
    assert sum(event["event"] == "budget refused" for event in events) == 3
    assert lies > 300
    assert_identical(plain, tuned)


def test_launch_options_of_a_plan_are_left_to_the_script_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    space = PlanSpace(units=autotune.find_units(TinyGPT()), accumulation_choices=(1,), precisions=(Precision.INHERIT,))
    plan = space.leanest().changed(launch=Launch(optimizer="lion", learning_rate=1e-4))
    assert find_policy(plan).decide(None, space.baseline()) == space.leanest()
    told = "launched with optimizer = lion, learning_rate = 0.0001: a live run keeps what its script launched"
    assert [message.partition(" is ")[2] for message in caplog.messages] == [told]
