"""Tests of memory, time, random numbers and failures on a fake accelerator."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import device_jobs
import numpy as np
import pytest
import torch
from leftovers import wait_until
from torch import nn

import autotune
from autotune.budget import allocated_within
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import SAFETY_MARGIN, solve
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.io.progress import Silent
from autotune.live.deciding import reserve_of
from autotune.live.limits import Limits
from autotune.measurement import Failure
from autotune.mechanics import devices
from autotune.mechanics.flops import matmul_peak
from autotune.mechanics.step_trace import StepTracer
from autotune.plan import Plan
from autotune.profiling import profiler
from autotune.profiling.homogeneous_plans import homogeneous_plans
from autotune.profiling.passes import _judged, _Outcome
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.profiling.recompute_probe import storage_lock
from autotune.profiling.tracing_engine import WatchedEngine

DEVICE = "fake"
LIVELY = Limits(decide_every=5, pause_steps=5, min_steps_between_switches=5, overhead_frac=10.0)


@pytest.fixture(autouse=True)
def _asked_anew(accelerator: ModuleType) -> Iterator[None]:
    """Clear cached device capabilities, because tests change them."""
    for known in (devices.lacks, devices.traces_memory):
        known.cache_clear()
    yield
    gc.collect()


def allocated(fake: ModuleType) -> int:
    """Return the bytes allocated on the device, without garbage."""
    gc.collect()
    return int(fake.stats()["allocated_bytes.all.current"])


def engine(job: autotune.Job | None = None, **options: Any) -> TorchEngine:
    settings = {"discard_steps": 0, "statistics_every": None, **options}
    return TorchEngine(job or device_jobs.make(), device=DEVICE, options=EngineOptions(**settings))


def profiled(**changes: Any) -> Profile:
    return profile(
        device_jobs.make(**{"accumulation_choices": (1, 2), **changes}),
        device_name="fake",
        device=DEVICE,
        options=ProfilerOptions.lean(0),
    )


@functools.cache
def profiled_in_small_segments() -> Profile:
    """Return the profile of the job where memory is fragmented; the caller has made segments small."""
    return profiled()


def some_plans(space: Any, count: int) -> list[Any]:
    generator = np.random.default_rng(1)
    return [space.baseline(), space.leanest(), *(space.sample(generator) for _ in range(count))]


# 1


def test_backward_runs_in_the_device_thread() -> None:
    seen: set[int] = set()
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    weight.register_hook(lambda gradient: seen.add(threading.get_ident()))
    (weight * 2).sum().backward()
    assert seen != {threading.get_ident()}


# 2


def test_trace_contains_every_byte_on_the_device(accelerator: ModuleType) -> None:
    running = engine(meter_memory=False)
    running.run(2)
    tracer = StepTracer(running.model, [unit.name for unit in running.space.units], running.device)
    running.phase = tracer.watch.begin  # type: ignore[method-assign]
    before = allocated(accelerator)
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    with tracer.tracing():
        running.run(1)
    assert tracer.trace is not None
    total = np.cumsum([size for _, size in tracer.trace.changes])
    assert before + total[-1] == accelerator.stats()["allocated_bytes.all.current"]
    assert before + total.max() == accelerator.stats()["allocated_bytes.all.peak"]


# 3


def test_profiling_leaves_nothing_on_the_device(accelerator: ModuleType) -> None:
    before = allocated(accelerator)
    profiled(accumulation_choices=(1,))
    assert allocated(accelerator) == before


# 4


@pytest.mark.parametrize("workspace", [pytest.param(0, marks=pytest.mark.slow), 64 * 2**20])
def test_peaks_are_predicted_even_when_a_library_holds_a_workspace(accelerator: ModuleType, workspace: int) -> None:
    held = torch.empty(workspace, dtype=torch.uint8, device=DEVICE)
    known = profiled()
    running = engine(device_jobs.make(accumulation_choices=(1, 2)))
    running.run(1)
    for plan in some_plans(running.space, 4):
        running.apply(plan)
        peak = running.run(1).peak_bytes
        assert peak is not None
        assert peak > workspace
        assert abs(peak_bytes(known, plan) / peak - 1) < 0.005, str(plan)
    del held


@pytest.mark.parametrize("room", [0.75, pytest.param(0.9, marks=pytest.mark.slow)])
def test_plan_for_a_reserved_budget_fits_despite_fragmentation(accelerator: ModuleType, room: float) -> None:
    accelerator.small_segments(64)
    known = profiled_in_small_segments()
    assert known.fragments_bytes > 0
    running = engine()
    running.run(1)
    reserved = running.run(1).reserved_bytes
    assert reserved is not None
    capacity = int(room * reserved)
    plan = solve(known, allocated_within(capacity, known.fragments_bytes)).plan
    running.apply(plan)
    devices.release(DEVICE)
    accelerator.capacity(capacity)
    assert running.run(8).failure is None


# 5


def test_times_at_every_k_are_those_of_whole_steps(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def took(plan: Plan) -> float:
        # Bound by launches: not on a line between the smallest and the largest k.
        return max(1.0, 0.4 * plan.accumulation_steps) * (1.3 if "recompute" in plan.storage.values() else 1.0)

    monkeypatch.setattr(profiler._Profiler, "_time_plan", lambda _self, plan, _steps: [took(plan)])
    known = profiled(accumulation_choices=(1, 2, 4))
    assert any("k = 2 is interpolated" in warning for warning in known.warnings)
    for plan in homogeneous_plans(known.space, (1, 2, 4)).values():
        assert seconds_per_step(known, plan) == pytest.approx(took(plan), rel=1e-3), plan


def test_out_of_memory_is_returned_as_a_failure_and_leaves_nothing_behind(accelerator: ModuleType) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        # User code often leaves reference cycles that keep a step's tensors alive.
        kept: list[Any] = [model(batch[:, :-1])]
        kept.append(kept)
        return nn.functional.cross_entropy(kept[0].flatten(0, 1), batch[:, 1:].flatten())

    running = engine(device_jobs.make(loss=loss), meter_memory=False)
    running.apply(running.space.leanest())
    running.run(2)
    before, calls = allocated(accelerator), accelerator.calls["allocations"]
    running.run(1)
    count = accelerator.calls["allocations"] - calls
    gc.collect()
    gc.disable()
    try:
        # Everything from the batch to the last gradient counts.
        for number in np.linspace(1, 0.8 * count, 12).astype(int).tolist():
            accelerator.fail_at(number)
            window = running.run(1)
            accelerator.fail_at(0)
            assert window.failure is Failure.OUT_OF_MEMORY, number
            # The device thread may release a failed backward pass a moment later.
            wait_until(lambda: accelerator.stats()["allocated_bytes.all.current"] - before <= BATCH_BYTES, str(number))
    finally:
        gc.enable()
    assert running.run(1).failure is None


BATCH_BYTES = 2 * 16 * 33 * 8 + 1024


def test_step_repeated_after_out_of_memory_gives_identical_results(accelerator: ModuleType) -> None:
    plain, troubled = (engine(meter_memory=False) for _ in range(2))
    plain.run(4)
    troubled.run(2)
    for number in (1, 40):
        accelerator.fail_at(number)
        assert troubled.run(1).failure is Failure.OUT_OF_MEMORY
    troubled.run(2)
    for one, two in zip(plain.model.parameters(), troubled.model.parameters(), strict=True):
        assert torch.equal(one, two)


# 6


class Loop:
    """A user's training loop."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        job = device_jobs.make()
        self.job, self.model = job, job.model().to(DEVICE).train()
        self.optimizer = job.optimizer(self.model.parameters())
        self.batches = (batch.to(DEVICE) for batch in job.batches(0))

    def step(self) -> None:
        self.job.loss(self.model, next(self.batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def attached(self, tuner: Any, steps: int, fake: ModuleType) -> list[int]:
        """Return the peak of each step."""
        peaks = []
        for _, batch in zip(range(steps), self.batches, strict=False):
            # Peaks are recorded separately, because this test must not change the user's statistics.
            began = fake.stats()["allocated_bytes.all.peak"]
            for piece in tuner.micro_batches(batch):
                tuner.backward(self.job.loss(self.model, piece))
            tuner.step()
            ended = fake.stats()["allocated_bytes.all.peak"]
            peaks.append(ended if ended > began else 0)
        return peaks


def plain_peak(fake: ModuleType) -> int:
    loop = Loop()
    loop.step()
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    loop.step()
    return int(fake.stats()["allocated_bytes.all.peak"])


@pytest.mark.parametrize(
    ("share", "steps"),
    [(0.85, 40), *(pytest.param(share, 300, marks=pytest.mark.slow) for share in (0.4, 0.6))],
)
def test_plan_within_its_budget_does_not_trip(accelerator: ModuleType, share: float, steps: int) -> None:
    peak = plain_peak(accelerator)
    loop = Loop()
    loop.step()
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    # Only the leanest plans fit, because no plan shrinks the update.
    least = accelerator.stats()["allocated_bytes.all.current"]
    budget = int(least + share * (peak - least))
    tuner = autotune.attach(
        loop.model, loop.optimizer, policy="planner", memory_budget_bytes=budget, runs_dir=None, limits=LIVELY
    )
    peaks = loop.attached(tuner, steps, accelerator)
    assert max(peaks) <= budget
    status = tuner.status
    assert tuner.attached
    assert not status["trips"]
    assert status["over_budget_steps"] == 0
    tuner.detach()


def test_predictions_are_corrected_by_measured_peaks(accelerator: ModuleType) -> None:
    """A library allocates a workspace during the run, which no tensor and no profile shows."""
    peak = plain_peak(accelerator)
    loop = Loop()
    loop.step()
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    least = accelerator.stats()["allocated_bytes.all.current"]
    budget = int(least + 0.9 * (peak - least))
    tuner = autotune.attach(
        loop.model, loop.optimizer, policy="planner", memory_budget_bytes=budget, runs_dir=None, limits=LIVELY
    )
    assert max(loop.attached(tuner, 37, accelerator)) <= budget
    workspace = torch.empty((peak - least) // 4, dtype=torch.uint8, device=DEVICE)
    first, *later = loop.attached(tuner, 20, accelerator)
    assert first > budget
    # The memory of a step is visible only if it raises the peak.
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    later += loop.attached(tuner, 20, accelerator)
    assert max(later) <= budget
    assert tuner.attached
    tuner.detach()
    del workspace


def test_plan_that_fills_its_budget_does_not_trip(accelerator: ModuleType) -> None:
    # The share of memory that a plan may use, and the prediction error.
    budget = int(1.005 * plain_peak(accelerator) / (1 - SAFETY_MARGIN))
    loop = Loop()
    loop.step()
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    tuner = autotune.attach(
        loop.model, loop.optimizer, policy="planner", memory_budget_bytes=budget, runs_dir=None, limits=LIVELY
    )
    peaks = loop.attached(tuner, 40, accelerator)
    assert 0.95 * budget < max(peaks) <= budget
    assert not tuner.status["trips"]
    tuner.detach()


def test_budget_below_every_plan_keeps_the_leanest_plan(accelerator: ModuleType) -> None:
    loop = Loop()
    loop.step()
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    budget = int(1.05 * accelerator.stats()["allocated_bytes.all.current"])
    tuner = autotune.attach(
        loop.model, loop.optimizer, policy="planner", memory_budget_bytes=budget, runs_dir=None, limits=LIVELY
    )
    loop.attached(tuner, 40, accelerator)
    assert tuner.attached
    assert not tuner.status["trips"]
    assert tuner.status["over_budget_steps"] > 20
    assert len([one for one in tuner.plan.storage.values() if one == "recompute"]) >= 4
    tuner.detach()


class Convolutions(nn.Module):
    """Blocks whose single passes need more memory than the step that probes them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def test_probe_memory_counts_toward_the_budget_but_excludes_no_plan(accelerator: ModuleType) -> None:
    torch.manual_seed(0)
    model = Convolutions().to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    images, labels = torch.randn(16, 3, 16, 16, device=DEVICE), torch.randint(10, (16,)).to(DEVICE)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    for _ in range(2):
        torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = accelerator.stats()["allocated_bytes.all.peak"]
    least = accelerator.stats()["allocated_bytes.all.current"]
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    budget = int(least + 0.85 * (peak - least))
    tuner = autotune.attach(model, optimizer, memory_budget_bytes=budget, runs_dir=None, limits=LIVELY)
    for _ in range(30):
        for _ in tuner.micro_batches(images):
            tuner.backward(loss())
        tuner.step()
    assert not tuner.status["trips"]
    assert accelerator.stats()["allocated_bytes.all.peak"] <= budget
    tuner.detach()


@pytest.mark.some(2)
@pytest.mark.parametrize("lie", [10**400, True, float("inf"), -1, "much"])
def test_invalid_budget_keeps_the_last_valid_one(accelerator: ModuleType, lie: object) -> None:
    loop, told = Loop(), [0]

    def budget() -> Any:
        told[0] += 1
        return lie if told[0] % 3 == 0 else 2**30

    tuner = autotune.attach(loop.model, loop.optimizer, memory_budget_bytes=budget, runs_dir=None, limits=LIVELY)
    loop.attached(tuner, 8, accelerator)
    assert tuner.attached
    assert tuner.status["memory_budget_bytes"] == 2**30
    tuner.detach()


def test_attaching_leaves_nothing_and_keeps_the_users_memory_statistics(accelerator: ModuleType) -> None:
    loop = Loop()
    loop.step()
    before = allocated(accelerator)
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    accelerator.calls.clear()
    tuner = autotune.attach(loop.model, loop.optimizer, policy="planner", runs_dir=None, limits=LIVELY)
    loop.attached(tuner, 30, accelerator)
    tuner.detach()
    del tuner
    assert accelerator.calls["reset_peak_memory_stats"] == 0
    assert allocated(accelerator) == before


def test_driver_is_not_queried_at_every_step(accelerator: ModuleType) -> None:
    loop = Loop()
    tuner = autotune.attach(loop.model, loop.optimizer, policy="planner", runs_dir=None, limits=LIVELY)
    loop.attached(tuner, 30, accelerator)
    accelerator.calls.clear()
    loop.attached(tuner, 20, accelerator)
    assert accelerator.calls["mem_get_info"] <= 20 / LIVELY.decide_every
    tuner.detach()


# 7


class Unit(nn.Module):
    """Two products with dropout in between, drawn on request from the device's own generator."""

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(64, 64), nn.Linear(64, 64), draws
        self.own = torch.Generator(DEVICE).manual_seed(0) if draws else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        if self.own is not None:
            hidden = hidden * torch.rand(hidden.shape, generator=self.own, device=DEVICE)
        return x + self.down(hidden)


def lock_of(unit: nn.Module, dtype: torch.dtype = torch.float32) -> str | None:
    unit = unit.to(DEVICE, dtype).train()
    handed = torch.randn(4, 32, 64, device=DEVICE, dtype=dtype, requires_grad=True)
    return storage_lock(unit, unit.forward, (handed,), {})


@pytest.mark.parametrize("seed", range(4))
def test_nondeterministic_summation_locks_no_unit(accelerator: ModuleType, seed: int) -> None:
    torch.manual_seed(seed)
    accelerator.noise(True)
    assert lock_of(Unit()) is None
    assert lock_of(device_jobs.Block()) is None
    assert lock_of(device_jobs.Block(), torch.bfloat16) is None


def test_deterministic_algorithms_make_the_run_bit_identical(accelerator: ModuleType) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        accelerator.noise(True)
        assert lock_of(Unit()) is None
        # A different summation order cannot be caused by the device now.
        assert "gradients" in str(lock_of(Rounding()))
    finally:
        torch.use_deterministic_algorithms(False)


class Rounding(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        backward = torch._C._current_graph_task_id() != -1
        return x + self.down(torch.relu(self.up(x)) * (1 + 1e-7 * backward))


def test_unit_that_draws_random_numbers_is_not_mistaken_for_rounding(accelerator: ModuleType) -> None:
    accelerator.noise(True)
    assert "differ" in str(lock_of(Unit(draws=True)))


def test_unit_that_recomputes_differently_is_locked_on_a_device_that_rounds(accelerator: ModuleType) -> None:
    class Forgetful(Unit):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Recomputed in backward, it computes something else.
            backward = torch._C._current_graph_task_id() != -1
            return x + self.down(torch.relu(self.up(x)) * (1.01 if backward else 1.0))

    accelerator.noise(True)
    assert lock_of(Forgetful()) is not None


def outcome(value: float) -> _Outcome:
    return _Outcome([torch.tensor([1.0 + value])], [], {}, [], writes=False, barred=None)


@pytest.mark.parametrize(
    ("saving", "recomputing", "locked"),
    [
        # An atomic sum that differs now and then: in one pass that recomputes, and in none of three that save.
        ([0, 0, 0], [0, 1e-6, 0], False),
        ([0, 1e-7, 0], [0, 0, 1e-6], False),
        # Recomputation that always rounds otherwise.
        ([0, 0, 0], [1e-6, 1e-6, 1e-6], True),
        # Passes that differ by more than rounding explains.
        ([0, 0, 0], [0, 1e-2, 0], True),
        ([0, 1e-2, 0], [0, 0, 0], True),
    ],
)
def test_recomputation_may_differ_as_repeated_passes_do(
    saving: list[float], recomputing: list[float], *, locked: bool
) -> None:
    made = {False: map(outcome, saving), True: map(outcome, recomputing)}
    differs = outcome(1e-2 if max(recomputing) > 1e-3 else 1e-6)
    reason = _judged(outcome(0.0), differs, lambda *, recomputes: next(made[recomputes]))
    assert (reason is not None) == locked, reason


# 8


def test_step_time_includes_all_work_of_the_device(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine(meter_memory=False)
    running.run(2)
    monkeypatch.setattr(time, "perf_counter", accelerator.clock)
    torch.fake.synchronize()  # type: ignore[attr-defined]
    began = accelerator.clock()
    seconds = running.run(4).step_s
    torch.fake.synchronize()  # type: ignore[attr-defined]
    assert sum(seconds) == pytest.approx(accelerator.clock() - began, rel=0.02)


def test_profile_predicts_device_time_rather_than_launch_time(
    accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", accelerator.clock)
    known = profiled(accumulation_choices=(1,))
    running = engine(device_jobs.make(accumulation_choices=(1,)), meter_memory=False)
    running.run(2)
    for plan in some_plans(running.space, 2):
        running.apply(plan)
        running.run(1)
        found = running.run(2).seconds_per_step
        assert found is not None
        assert seconds_per_step(known, plan) == pytest.approx(found, rel=0.1), str(plan)


def test_parts_of_a_step_are_timed_on_the_device(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", accelerator.clock)
    options = EngineOptions(discard_steps=0, statistics_every=None, meter_memory=False)
    running = WatchedEngine(device_jobs.make(), device=DEVICE, options=options)
    running.run(2)
    window, seconds, _ = running.timed()
    within = sum(value for (phase, _), value in seconds.items() if phase != "update")
    # Launching the kernels takes a hundredth of that time.
    assert within > 0.3 * window.step_s[0]


def test_engine_splits_a_step_in_device_time(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", accelerator.clock)
    running = engine(meter_memory=False)
    running.run(3)
    accelerator.calls.clear()
    window = running.run(3)
    found = window.parts
    assert found is not None
    assert found.step_s == pytest.approx(sum(window.step_s) / len(window.step_s), rel=0.02)
    # Launching the kernels of both passes takes a hundredth of that time.
    assert found.compute_s > 0.3 * found.step_s
    # Once for the time of the step, and once more when nothing runs.
    assert accelerator.calls["synchronize"] <= 2 * 3


def test_attached_run_splits_steps_in_device_time_and_waits_for_the_device_only_at_decisions(
    accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", accelerator.clock)
    loop = Loop()
    tuner = autotune.attach(loop.model, loop.optimizer, policy="planner", runs_dir=None, limits=LIVELY)
    every = LIVELY.decide_every
    loop.attached(tuner, 5 * every, accelerator)
    accelerator.calls.clear()
    loop.attached(tuner, every - 1, accelerator)
    assert accelerator.calls["Event.record"] > 0
    assert accelerator.calls["synchronize"] == 0
    found = autotune.StepParts.from_json(tuner.status["parts"])
    assert found.compute_s > 0.3 * found.step_s
    tuner.detach()


def test_matrix_product_rate_is_measured_on_the_device(
    accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", accelerator.clock)
    monkeypatch.setattr("autotune.mechanics.flops._ACCELERATORS_SIDES", (256,))
    accelerator.speed(flop_s=1e-9)
    assert matmul_peak(torch.float32, DEVICE) < 1.1e9


def test_attached_run_measures_device_time(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", accelerator.clock)
    loop = Loop()
    tuner = autotune.attach(loop.model, loop.optimizer, policy="planner", runs_dir=None, limits=LIVELY)
    loop.attached(tuner, 40, accelerator)
    torch.fake.synchronize()  # type: ignore[attr-defined]
    began = accelerator.clock()
    loop.attached(tuner, 10, accelerator)
    torch.fake.synchronize()  # type: ignore[attr-defined]
    each = (accelerator.clock() - began) / 10
    assert tuner.status["predicted_s"] == pytest.approx(each, rel=0.1)
    tuner.detach()


# 9: decisions of policies if storage follows each batch


class Reserving:
    """A policy that only decides how much device memory stays free."""

    name = "reserving"

    def __init__(self, reserve_frac: Any) -> None:
        self.reserve_frac = reserve_frac

    def begin(self, profile: Profile, budget_bytes: int | None) -> Any:
        return profile.space.baseline()

    def decide(self, observation: Any, plan: Any) -> Any:
        return plan


def recomputed_under(reserve_frac: Any, fake: ModuleType, own_budget: int | None = None) -> int:
    """Return the number of recomputed units on a device that barely fits the largest plan."""
    fake.capacity(int(1.3 * plain_peak(fake)))
    fake.small_segments(64)
    loop = Loop()
    tuner = autotune.attach(
        loop.model,
        loop.optimizer,
        Reserving(reserve_frac),
        memory_budget_bytes=own_budget,
        runs_dir=None,
        limits=LIVELY,
    )
    loop.attached(tuner, 24, fake)
    assert tuner.attached
    found = sum(one == "recompute" for one in tuner.plan.storage.values())
    tuner.detach()
    del loop, tuner
    fake.reset()
    return found


def test_policy_decides_how_much_device_memory_stays_free(accelerator: ModuleType) -> None:
    assert recomputed_under(0.0, accelerator) < recomputed_under(0.4, accelerator)


@pytest.mark.parametrize("wrong", [1.0, -0.1, "much", float("nan"), None, True])
def test_invalid_reserve_reserves_nothing(wrong: Any) -> None:
    assert reserve_of(Reserving(wrong)) == 0.0


def test_user_defined_budget_is_read_in_time_and_needs_no_reserve(accelerator: ModuleType) -> None:
    budget = int(0.9 * plain_peak(accelerator))
    assert recomputed_under(0.0, accelerator, budget) == recomputed_under(0.2, accelerator, budget)


def test_profile_is_announced_once_although_it_is_measured_before_the_engine_opens(
    accelerator: ModuleType, tmp_path: Path
) -> None:
    told: list[str] = []

    class Told(Silent):
        def stage(self, title: str, total: float) -> None:
            told.append(title)

    autotune.tune(device_jobs.make(accumulation_choices=(1,)), "exact", steps=45, runs_dir=tmp_path, reporter=Told())
    assert told == [
        "stage 1 of 3: profile the units, once",
        "stage 2 of 3: measure the baseline",
        "stage 3 of 3: tune with exact",
    ]
