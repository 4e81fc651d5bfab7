"""Compiled units: what they compute and keep, when they are compiled, and which are left uncompiled."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_job
import torch
from torch import nn

from autotune import EngineOptions, Plan, Storage, TorchEngine
from autotune.choices import COMPILED_STORAGES
from autotune.cost_model.device_table import find_device
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Cost
from autotune.engines.isolated_engine import IsolatedEngine, Patience
from autotune.mechanics import controls
from autotune.mechanics.compiled_units import compilations, refusal
from autotune.mechanics.storage_acts import excluded, offered
from autotune.profiling.estimator import estimate
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.profiling.unseen_costs import none_faster_than_saving

# Deprecation warnings inside the compiler do not matter here.
pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = EngineOptions(discard_steps=0, meter_memory=False, statistics_every=None)
NAMES = [f"blocks.{number}" for number in range(3)]


class Printing(tiny_job.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight.sum() * self.calls


class Averaging(tiny_job.Block):
    """Computes with a running mean of its input, which it updates in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(), 0.5)
        return super().forward(x) * self.mean


class InPlace(tiny_job.Block):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2.0))


class Normed(tiny_job.Block):
    """Has a weight that each call divides by an estimate of its norm, which it improves."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


class PrintingNetwork(tiny_job.Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Printing() for _ in range(3))


@pytest.fixture(autouse=True)
def _forget_versions() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def all_in(storage: Storage | str) -> Plan:
    return Plan(precision=dict.fromkeys(NAMES, "fp32"), storage=dict.fromkeys(NAMES, storage))


def pass_of(model: nn.Module, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a model in training under a plan, and the gradient of all parameters."""
    controls.apply(model, plan)
    model.zero_grad()
    torch.manual_seed(1)
    loss = tiny_job.mean_loss(model, next(tiny_job.batches(0)))
    loss.backward()
    controls.remove(model)
    return loss.detach(), torch.cat([one.grad.flatten() for one in model.parameters()])


@pytest.mark.parametrize(
    "storage", [pytest.param(one, marks=[] if one == "compiled10" else [pytest.mark.slow]) for one in COMPILED_STORAGES]
)
def test_gradients_are_those_of_saving_with_the_same_dropout(storage: Storage) -> None:
    torch.manual_seed(0)
    model = tiny_job.Network()
    state = list(model.state_dict())
    loss, gradient = pass_of(model, Plan())
    before = compilations().versions
    compiled_loss, compiled_gradient = pass_of(model, all_in(storage))
    # Like units share one version.
    assert compilations().versions == before + 1
    assert torch.allclose(loss, compiled_loss)
    # With other dropout masks in the backward pass, the error is more than a tenth.
    assert float((gradient - compiled_gradient).norm() / gradient.norm()) < 1e-5
    assert torch.equal(pass_of(model, Plan())[1], gradient)
    pass_of(model, all_in(storage))
    controls.apply(model, all_in(storage))
    with torch.no_grad():
        model.eval()(next(tiny_job.batches(0))[:3, :-1])
    # Neither switching nor evaluation, whose shapes are others, compiles anything.
    assert compilations().versions == before + 1
    controls.remove(model)
    assert list(model.state_dict()) == state
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_no_step_that_compiles_is_timed_or_metered_and_training_goes_on_exactly_after_a_switch() -> None:
    job = tiny_job.make(storages=["compiled10"])
    engines = [TorchEngine(job, options=PLAIN) for _ in range(2)]
    engines[0].apply(engines[0].space.check(all_in("compiled10").changed(precision=engines[0].plan.precision)))
    window = engines[0].run(3)
    assert (window.failure, window.steps, len(window.step_s)) == (None, 3, 2)
    assert engines[0].settling() == 1
    engines[1].restore(engines[0].snapshot())
    losses = []
    for engine in engines:
        engine.apply(engine.space.baseline())
        losses.append([engine.run(1).loss for _ in range(2)])
        engine.close()
    assert losses[0] == losses[1]


def test_a_unit_that_cannot_be_compiled_as_a_whole_saves_and_tells_why(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, before = PrintingNetwork(), compilations()
    plain = pass_of(model, Plan())
    with caplog.at_level(logging.WARNING):
        found = [pass_of(model, all_in("compiled50")) for _ in range(2)]
    assert all(torch.equal(one, two) for pair in found for one, two in zip(plain, pair, strict=True))
    assert compilations() == before
    reason = refusal(model.blocks[0], 0.5)
    assert reason is not None
    assert "graph_break" in reason.lower().replace(" ", "_")
    # Once for all units of a class.
    assert [record.getMessage() for record in caplog.records if "run uncompiled" in record.getMessage()] == [
        f"units of class Printing run uncompiled: {reason}"
    ]


@pytest.mark.parametrize("block", [Averaging, InPlace, Normed])
def test_a_unit_that_writes_to_a_buffer_or_its_input_saves_and_tells_why(block: type[tiny_job.Block]) -> None:
    torch.manual_seed(0)
    model = tiny_job.Network()
    model.blocks = nn.ModuleList(block() for _ in range(3))
    fresh = copy.deepcopy(model)
    for _ in range(2):
        plain, found = pass_of(fresh, Plan()), pass_of(model, all_in("compiled10"))
        assert all(torch.equal(one, two) for one, two in zip(plain, found, strict=True))
    assert "writes to a buffer" in (refusal(model.blocks[0], 0.1) or "")


def test_a_storage_that_compiles_no_unit_is_left_out_of_the_profile() -> None:
    job = tiny_job.make(model=PrintingNetwork, storages=["compiled50"], accumulation_choices=(1, 2))
    found = profile(job, device_name="here", options=ProfilerOptions.lean())
    assert found.space.storages == ("save", "recompute")
    assert any("compiled50 suits no unit, so no plan may use it: Unsupported" in one for one in found.warnings)


@pytest.mark.slow
def test_a_unit_that_is_compiled_anew_in_every_call_is_left_uncompiled() -> None:
    model = nn.ModuleDict({"unit": Counting()})
    controls.apply(model, Plan(storage={"unit": "compiled"}))
    before = compilations().versions
    for calls in range(1, 6):
        output = model["unit"](torch.ones(2, 8))
        assert torch.allclose(output, model["unit"].weight.sum().expand(2, 8) * calls)
    assert compilations().versions == before + 3
    assert "compiled anew" in str(refusal(model["unit"], 1.0))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_child_process_has_time_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_STORAGES", "compiled10")
    # Nothing that was compiled before is found.
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    patience = Patience(opening_s=300.0, first_s=600.0, factor=1.0, grace_s=0.1)
    engine = IsolatedEngine(str(Path(__file__).parent / "tiny_job.py") + ":job", options=PLAIN, patience=patience)
    try:
        assert engine.run(2).failure is None
        base = engine.space.baseline()
        engine.apply(base.changed(storage=dict.fromkeys(NAMES, "compiled10")))
        window = engine.run(2)
        assert (window.failure, len(window.step_s)) == (None, 1)
        # Far longer than the limit of a window whose steps only train.
        assert window.total_s > 0.1 + 2 * 1.0 * engine.run(2).total_s
    finally:
        engine.close()


def test_without_a_compiler_no_plan_compiles() -> None:
    from torch._inductor import config

    assert offered(["compiled"]) == ("save", "compiled", "recompute")
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert offered(["compiled", "compress8"]) == ("save", "compress8", "recompute")
        assert set(excluded(["compiled", "compress8"])) == {"compiled"}
        engine = TorchEngine(tiny_job.make(storages=["compiled10"]), options=PLAIN)
    assert engine.space.storages == ("save", "recompute")
    assert "finds no C++ compiler; install g++" in engine.locks["storage compiled10"]
    engine.close()


def test_estimates_leave_compiled_units_out_with_the_reason() -> None:
    job = tiny_job.make(storages=["compiled", "compress8"], accumulation_choices=(1,))
    found = estimate(job, find_device("A100"))
    assert found.space.storages == ("save", "compress8", "recompute")
    assert "compiled cannot be estimated, only profiled" in found.warnings


def test_only_compiled_units_may_be_faster_than_saving_ones() -> None:
    def cost(backward_s: float) -> Cost:
        return Cost(
            forward_s=1.0, backward_s=backward_s, saved_bytes=0, forward_peak_bytes=(0, 0), backward_peak_bytes=(0, 0)
        )

    costs = {f"fp32/{name}": cost(seconds) for name, seconds in (("save", 3), ("compiled", 2), ("recompute", 2.5))}
    raised = none_faster_than_saving(costs)
    assert [raised[name].backward_s for name in costs] == [3, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_peaks_of_plans_with_compiled_units_are_predicted() -> None:
    job = tiny_job.make(storages=["compiled", "compiled10"], accumulation_choices=(1, 2))
    found = profile(job, device_name="here", options=ProfilerOptions.lean())
    assert found.space.storages == ("save", "compiled", "compiled10", "recompute")
    assert any(one.startswith("compiling took ") for one in found.warnings)
    assert sum("puts the gradient of a step off by less than 0.1%" in one for one in found.warnings) == 2
    mixed = ["compiled", "compiled10", "recompute"]
    for storages in (["compiled"] * 3, ["compiled10"] * 3, mixed, mixed[::-1]):
        plan = found.space.baseline().changed(storage=dict(zip(NAMES, storages, strict=True)))
        engine = TorchEngine(job, options=EngineOptions(discard_steps=1))
        engine.apply(plan)
        measured = engine.run(3).peak_bytes
        engine.close()
        assert measured is not None
        assert 0.995 * measured <= peak_bytes(found, plan) <= 1.02 * measured
