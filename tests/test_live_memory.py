"""Tests that an attached run never exceeds its current memory budget; every real step is metered."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import TinyGPT
from test_live import RESTLESS, gpt_loss, seeded
from torch import nn

import autotune
from autotune.cost_model.solver import SAFETY_MARGIN
from autotune.live import lessons
from autotune.live.decisions import Decisions
from autotune.live.live_knowledge import Knowledge
from autotune.live.placement import Placements
from autotune.live.prediction_scores import Expected, Score
from autotune.live.step_uses import Tracing
from autotune.mechanics import controls, randomness
from autotune.mechanics.cutting import split
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors
from autotune.plan import Plan, PlanSpace, Precision, Storage
from autotune.units import find_units

SHORT, LONG = 12, 48
CPU = torch.device("cpu")


def model() -> nn.Module:
    return TinyGPT(width=32, blocks=4, dropout=0.2)


def batches(lengths: Iterable[int]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for length in lengths:
        yield torch.randint(0, 11, (8, length), generator=generator)


def train_on(trained: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    gpt_loss(trained, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


class Twin:
    """A run without a tuner, bit-identical under the tuner's plans, that meters each step.

    The twin is metered because the tuner traces steps of its own, and only one profiler can run at a time.
    """

    def __init__(self) -> None:
        with randomness.isolated():
            seeded()
            self.model = model()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
            self.random = randomness.capture()

    def peak_bytes(self, plan: Plan, batch: torch.Tensor) -> int:
        meter = MemoryMeter(CPU)
        controls.apply(self.model, plan)
        with randomness.isolated():
            randomness.restore(self.random)
            with meter.metering(resident_tensors(self.model, self.optimizer, [batch])):
                train_on(self.model, self.optimizer, batch)
            self.random = randomness.capture()
        assert meter.peak_bytes is not None
        return meter.peak_bytes


@functools.cache
def needs() -> tuple[int, int]:
    """Return the bytes of a step with the largest batch, under the leanest plan and under the baseline."""
    twin = Twin()
    space = PlanSpace(units=find_units(twin.model), accumulation_choices=(1,), precisions=(Precision.INHERIT,))
    batch = torch.zeros(8, LONG, dtype=torch.long)
    peaks = []
    for recomputed in (space.recomputable, ()):
        plan = space.plan(accumulation_steps=1, precision=space.precisions[0], recomputed=recomputed)
        peaks.append([twin.peak_bytes(plan, batch) for _ in range(2)][-1])
    return peaks[0], peaks[1]


@dataclass
class Step:
    """The budget and the peaks of a step."""

    budget: int
    twin: int
    own: int | None
    traced: int | None
    plan: Plan

    @property
    def largest(self) -> int:
        return max(self.twin, self.own or 0, self.traced or 0)


def metered_run(
    lengths: Iterable[int], budget: Callable[[int], int], policy: Any = "exact", storages: tuple[str, ...] = ()
) -> tuple[list[Step], dict[str, Any]]:
    """Train attached, and return each step's budget and peaks: the twin's, its own, and the traced one."""
    now, twin = 0, Twin()
    seeded()
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    tuner = autotune.attach(
        trained,
        optimizer,
        policy,
        memory_budget_bytes=lambda: budget(now),
        limits=RESTLESS,
        runs_dir=None,
        settings=autotune.Settings(storages=storages),
    )
    controller: Any = tuner._controller
    steps = []
    for now, batch in enumerate(batches(lengths)):
        meter = MemoryMeter(CPU)
        for micro in tuner.micro_batches(batch):
            plan = tuner.plan
            traced = isinstance(controller.run.profiler._use, Tracing)
            with contextlib.ExitStack() as stack:
                if not traced:
                    stack.enter_context(meter.metering(resident_tensors(trained, optimizer, [micro])))
                tuner.backward(gpt_loss(trained, micro))
                tuner.step()
        peak = tuner.status["measured_peak_bytes"] if traced else None
        steps.append(Step(budget(now), twin.peak_bytes(plan, batch), meter.peak_bytes, peak, plan))
    status = {**tuner.status, "locks": controller.run.locks}
    tuner.detach()
    for one, two in zip(twin.model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, two)
    return steps, status


def assert_within(steps: list[Step], status: dict[str, Any], *, known_to_fit: bool = True) -> None:
    assert status["attached"], status
    if known_to_fit:
        assert not status["over_budget_steps"]
    # On a busy machine the profile takes fewer steps.
    assert sum(step.traced is not None for step in steps) >= 2
    # The first step probes each unit on copies of its inputs.
    over = {number: step for number, step in enumerate(steps) if number > 0 and step.largest > step.budget}
    assert not over
    # The tuner holds no memory of its own while a step runs, but for numbers by which it compares recomputed tensors.
    assert all(step.own <= step.twin + 500 for step in steps[1:] if step.own is not None)


@pytest.fixture(scope="module")
def bounds() -> tuple[int, int]:
    return needs()


def wave(number: int) -> float:
    """Return a share of the memory range that is small at first, and then rises and falls, abruptly and slowly."""
    return [0.0, 0.0, 1.0, 0.1, 0.6][number % 5] if number < 12 else abs(math.sin(number / 5))


def ragged(seed: int, count: int) -> list[int]:
    return [int(length) for length in np.random.default_rng(seed).integers(SHORT, LONG + 1, count)]


@pytest.mark.slow
def test_variable_length_steps_respect_a_changing_budget_from_the_second_step(bounds: tuple[int, int]) -> None:
    low, high = bounds
    # The largest batches come first, while nothing is known.
    lengths = [LONG, LONG, LONG, *ragged(0, 27)]
    steps, status = metered_run(lengths, lambda n: int(low * 1.03 + wave(n) * (high - low)))
    assert status["placed"] >= 12
    assert_within(steps, status)
    # Otherwise nothing would have been tested.
    assert sum(step.largest > 0.9 * step.budget for step in steps) >= 5


@pytest.mark.slow
def test_lengths_beyond_all_seen_respect_a_tight_budget(bounds: tuple[int, int]) -> None:
    low, _ = bounds
    lengths = [int(length) for length in np.linspace(SHORT, LONG, 28)]
    steps, status = metered_run(lengths, lambda _: int(low * 1.1))
    assert status["placed"] >= 5
    assert_within(steps, status)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ppo", "greedy"])
@pytest.mark.parametrize("seed", range(4))
def test_random_budget_per_step_is_never_exceeded(seed: int, policy: str, bounds: tuple[int, int]) -> None:
    low, high = bounds
    drawn = np.random.default_rng(100 + seed).uniform(low * 1.03, high * 1.05, 100).astype(int)
    steps, status = metered_run(ragged(seed, 100), lambda n: int(drawn[n]), policy)
    # The number varies with the timing noise of a tiny model.
    assert status["placed"] >= 20
    # While the growth law of memory is unknown, possibly no plan is known to fit a long batch; then
    # the leanest plan runs, and it fits.
    assert_within(steps, status, known_to_fit=False)


def test_storages_that_had_no_room_while_costs_were_learnt_are_learnt_later(bounds: tuple[int, int]) -> None:
    low, high = bounds
    steps, status = metered_run(
        [LONG] * 60, lambda n: int(low * 1.04 if n < 25 else (low + high) / 2), storages=("selective", "rebuild")
    )
    early, late = ({one for step in part for one in step.plan.storage.values()} for part in (steps[:25], steps[25:]))
    assert not early & {Storage.SELECTIVE, Storage.REBUILD}
    assert late >= {Storage.SELECTIVE, Storage.REBUILD}, status["locks"]
    assert_within(steps, status)


def any_that_fits(draw: random.Random) -> Callable[..., Plan | None]:
    """Return what draws one of the plans that fit; which is the fastest depends on measured times."""
    fastest = Placements.fastest

    def drawn(self: Placements, room: float, length: float, rows: Any = None, *, samples: int = 0) -> Plan | None:
        plans = self.plans if rows is None else [self.plans[int(row)] for row in rows]
        fitting = [plan for plan in plans if self.peak_bytes(plan, length, samples) <= room]
        return draw.choice(fitting) if fitting else fastest(self, room, length, rows, samples=samples)

    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_budget_is_never_exceeded_by_storages_between_saving_and_recomputing(
    seed: int, bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Placements, "fastest", any_that_fits(random.Random(seed)))
    low, high = bounds
    drawn = np.random.default_rng(200 + seed).uniform(low * 1.03, high * 1.05, 60).astype(int)
    steps, status = metered_run(ragged(seed, 60), lambda n: int(drawn[n]), storages=("selective", "rebuild"))
    used = {storage for step in steps for storage in step.plan.storage.values()}
    assert used & {Storage.SELECTIVE, Storage.REBUILD}, status["locks"]
    assert_within(steps, status, known_to_fit=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_at_any_length_needs_more_than_predicted(
    seed: int, bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions of every profile of a run are compared with the peaks of the plans that run afterwards.

    The running plans, and so the traced steps, are random: a policy may choose any fitting plan.
    """
    low, high = bounds
    draw = random.Random(seed)
    monkeypatch.setattr(Placements, "fastest", any_that_fits(draw))
    drawn = np.random.default_rng(100 + seed).uniform(low * 1.03, high * 1.05, 30).astype(int)
    known = []
    adopt = Decisions._adopt

    def remembered(self: Decisions, *arguments: Any) -> None:
        adopt(self, *arguments)
        assert self._run.placements is not None
        known.append(self._run.placements)

    monkeypatch.setattr(Decisions, "_adopt", remembered)
    steps, status = metered_run(ragged(seed, 30), lambda n: int(drawn[n]), "ppo")
    assert_within(steps, status, known_to_fit=False)
    twin, needed = Twin(), {}
    for batch in batches([LONG, LONG]):
        train_on(twin.model, twin.optimizer, batch)
    for placements in known:
        traced = placements.profile.tables[0].batch_bytes / (8 * 8)
        for plan in draw.sample(placements.plans, min(20, len(placements.plans))):
            for length in (SHORT, 20, 28, 36, 44, LONG):
                key = (str(plan.storage), length)
                if key not in needed:
                    needed[key] = twin.peak_bytes(plan, next(batches([length])))
                assert needed[key] <= placements.peak_bytes(plan, length / traced) * 1.001, (plan, length, traced)
    assert len(known) >= 3


def test_outputs_that_a_loop_keeps_until_the_next_step_are_counted() -> None:
    held: list[torch.Tensor] = []
    trained = TinyGPT(tokens=256, width=16, blocks=4)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    tuner = autotune.attach(trained, optimizer, "exact", memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    batch = torch.randint(0, 256, (4, 97), generator=torch.Generator().manual_seed(3))

    def step() -> None:
        for micro in tuner.micro_batches(batch):
            logits = trained(micro[:, :-1])
            # The previous outputs are released here.
            held[:] = [logits]
            tuner.backward(F.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten()))
            del logits
        tuner.step()

    for _ in range(12):
        step()
    status = tuner.status
    assert not any(storage == "recompute" for storage in tuner.plan.storage.values())
    meter = MemoryMeter(CPU)
    held.clear()
    # A profile of several steps shows memory that a step holds from the previous one.
    with meter.metering(resident_tensors(trained, optimizer, [batch])):
        for _ in range(3):
            step()
    assert status["predicted_peak_bytes"] >= meter.peak_bytes * 0.995
    assert status["measured_peak_bytes"] >= meter.peak_bytes * 0.995
    tuner.detach()


def test_predictions_are_scored_before_any_switch(bounds: tuple[int, int]) -> None:
    low, high = bounds
    seen: list[float] = []
    for length in (SHORT, LONG):
        seeded()
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
        budget = (low + high) // 2
        tuner = autotune.attach(trained, optimizer, "exact", memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None)
        for batch in batches([length] * 20):
            for micro in tuner.micro_batches(batch):
                tuner.backward(gpt_loss(trained, micro))
                tuner.step()
        controller: Any = tuner._controller
        assert tuner.status["acting"]
        assert controller.run.profiler.knowledge.scores
        seen += [score.short_frac for score in controller.run.profiler.knowledge.scores]
        tuner.detach()
    assert max(seen) <= SAFETY_MARGIN


def test_profile_that_underestimates_a_peak_never_acts(
    bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hopeful(Placements):
        def peak_bytes(self, plan: Plan, length: float, samples: int = 0) -> float:
            return 0.98 * super().peak_bytes(plan, length, samples)

    monkeypatch.setattr(lessons, "Placements", Hopeful)
    low, high = bounds
    steps, status = metered_run([LONG] * 30, lambda _: (low + high) // 2)
    assert not status["acting"]
    assert re.fullmatch(r"a peak was predicted [\d.]+% too low", status["locks"]["profile"])
    # Earlier trials are reverted: under a budget, the leanest plan continues.
    assert all(set(step.plan.storage.values()) == {Storage.RECOMPUTE} for step in steps[-5:])


def test_whoever_predicts_a_peak_too_low_once_costs_are_learnt_again_acts_no_more(
    bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hopeful(Placements):
        def peak_bytes(self, plan: Plan, length: float, samples: int = 0) -> float:
            return 0.98 * super().peak_bytes(plan, length, samples)

    seeded()
    trained = model()
    trained.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    tuner = autotune.attach(
        trained, optimizer, "exact", memory_budget_bytes=sum(bounds) // 2, limits=RESTLESS, runs_dir=None
    )
    plans = []
    for number, batch in enumerate(batches([LONG] * 50)):
        if number == 20:
            assert tuner.status["acting"]
            assert "profile" not in tuner.locks
            monkeypatch.setattr(lessons, "Placements", Hopeful)
            trained.blocks[0].requires_grad_(True)
        for micro in tuner.micro_batches(batch):
            plans.append(tuner.plan)
            tuner.backward(gpt_loss(trained, micro))
            tuner.step()
    assert "too low" in tuner.locks["profile"]
    assert not tuner.status["acting"]
    assert any(event["event"] == "locked" and event["what"] == "profile" for event in tuner.events)
    assert all(set(plan.storage.values()) == {Storage.RECOMPUTE} for plan in plans[-5:])
    tuner.detach()


@pytest.mark.slow
def test_single_low_prediction_is_checked_by_another_step(
    bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high = bounds
    monkeypatch.setattr(lessons, "TRACES", 3)
    score = Knowledge._score

    def scores_of(short: int | None) -> tuple[list[Score], dict[str, Any]]:
        known: list[Knowledge] = []

        def noted(self: Knowledge, expected: Expected, *arguments: Any) -> None:
            if len(self.scores) == short:
                expected = replace(expected, peak_bytes=0.9 * expected.peak_bytes)
            score(self, expected, *arguments)
            known.append(self)

        monkeypatch.setattr(Knowledge, "_score", noted)
        _, status = metered_run([LONG] * 30, lambda _: (low + high) // 2)
        return known[-1].scores, status

    wrong = 0
    # The number also depends on timing.
    for short in range(len(scores_of(None)[0])):
        scores, status = scores_of(short)
        wrong += sum(score.is_short for score in scores)
        assert not scores[-1].is_short
        assert status["acting"]
    assert wrong


def test_memory_allocated_later_by_the_loop_is_not_a_prediction_error(bounds: tuple[int, int]) -> None:
    _, high = bounds
    seeded()
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    first = next(trained.parameters())
    tuner = autotune.attach(trained, optimizer, "exact", memory_budget_bytes=2 * high, limits=RESTLESS, runs_dir=None)
    for number, batch in enumerate(batches([LONG] * 20)):
        if number == 2:
            # For example an average of the weights or a table of samples, allocated in a step whose peak is predicted.
            optimizer.state[first]["held"] = torch.zeros(high // 2, dtype=torch.uint8)
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(trained, micro))
            tuner.step()
    controller: Any = tuner._controller
    assert tuner.status["acting"]
    assert controller.run.profiler.knowledge.scores
    assert max(score.short_frac for score in controller.run.profiler.knowledge.scores) <= SAFETY_MARGIN
    tuner.detach()


def test_unreachable_budget_is_reported_once_with_the_smallest_reachable_one(caplog: pytest.LogCaptureFixture) -> None:
    lowest, _ = needs()
    with caplog.at_level("WARNING", logger="autotune"):
        metered_run([LONG] * 16, lambda _: lowest // 2)
    (said,) = [record.getMessage() for record in caplog.records if "no plan fits" in record.getMessage()]
    smallest = int(re.search(r"is (\d+) bytes", said)[1])  # type: ignore[index]
    assert lowest * 0.99 <= smallest <= lowest * 1.05
    caplog.clear()
    with caplog.at_level("WARNING", logger="autotune"):
        _, status = metered_run([LONG] * 16, lambda _: smallest)
    assert not [record for record in caplog.records if "no plan fits" in record.getMessage()]
    assert not status["over_budget_steps"]


# ------------------------------------------------------------------------------------------------------ cut batches


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("mode", ["rounding", pytest.param("tolerant", marks=pytest.mark.slow)])
def test_no_step_is_uncut_again_once_only_cut_batches_fit(mode: str) -> None:
    seeded()
    trained = nn.Sequential(*(Residual() for _ in range(5)))
    optimizer = torch.optim.AdamW(trained.parameters())
    # The whole batch needs 6.7 MiB even if all is recomputed, eight pieces 3.7 MiB.
    budget, tried, cut = 4 * 2**20, 0, set()
    with autotune.attach(
        trained, optimizer, mode=mode, memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None
    ) as tuner:
        for _ in range(36):
            for micro in tuner.micro_batches(torch.randn(64, 16, 64)):
                tried += tuner.probing
                cut.add(len(micro))
                tuner.backward(trained(micro).square().mean())
            tuner.step()
        status = tuner.status
    assert tried
    assert min(cut) <= 8
    # A trial's passes are not the loop's own calls: they once made each later step look new, to be run whole.
    assert status["over_budget_steps"] == 0
    assert status["predicted_peak_bytes"] <= budget


@pytest.mark.parametrize("mode", ["rounding", "tolerant"])
@pytest.mark.parametrize("kind", ["a short last batch", pytest.param("random shapes", marks=pytest.mark.slow)])
def test_batches_of_other_shapes_are_cut_from_their_first_step_on(mode: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ([(16, 48)] * 7 + [(3, 48)]) * 5
    if kind == "random shapes":
        draw = np.random.default_rng(1)
        shapes = [(int(draw.integers(1, 17)), int(draw.integers(8, 49))) for _ in range(60)]
    seeded()
    trained = TinyGPT(width=32, blocks=4, dropout=0.0)
    optimizer = torch.optim.AdamW(trained.parameters())
    # Recomputed whole, a batch of 16 x 48 tokens needs 1.6 MB; in eight pieces 0.49 MB, in four 0.66 MB.
    budget = 545_000 if kind == "random shapes" else 793_000
    with autotune.attach(trained, optimizer, mode=mode, memory_budget_bytes=budget, runs_dir=None) as tuner:
        for number, shape in enumerate(shapes):
            if number == 4:
                begun = tuner.status["over_budget_steps"]
            for micro in tuner.micro_batches(torch.randint(0, 11, shape, generator=generator)):
                tuner.backward(gpt_loss(trained, micro))
            tuner.step()
        assert tuner.status["over_budget_steps"] == begun
        assert "profile" not in tuner.locks


@dataclass
class CutStep:
    """A batch, the numbers of its pieces and of its trial passes, and the measured peak."""

    shape: tuple[int, int]
    pieces: int
    tried: int
    plan: Plan
    peak: int


def cut_run(shapes: Iterable[tuple[int, int]], share: float) -> tuple[list[CutStep], int, dict[str, Any]]:
    """Train attached within a share of what the largest batch needs; return each step, the budget and the status."""
    shapes = list(shapes)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 11, shape, generator=generator) for shape in shapes]

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        seeded()
        trained = TinyGPT(width=32, blocks=4, dropout=0.0)
        return trained, torch.optim.AdamW(trained.parameters())

    trained, optimizer = new()
    needs, meter = [], MemoryMeter(CPU)
    for text in [max(texts, key=torch.Tensor.numel)] * 2:
        with meter.metering(resident_tensors(trained, optimizer, [text])):
            train_on(trained, optimizer, text)
        needs.append(meter.peak_bytes or 0)
    budget = int(share * max(needs))
    trained, optimizer = new()
    steps = []
    with autotune.attach(trained, optimizer, mode="rounding", memory_budget_bytes=budget, runs_dir=None) as tuner:
        controller: Any = tuner._controller
        for text in texts:
            pieces = tried = 0
            meter = MemoryMeter(CPU)
            with contextlib.ExitStack() as stack:
                for micro in tuner.micro_batches(text):
                    if not stack._exit_callbacks and not isinstance(controller.run.profiler._use, Tracing):
                        stack.enter_context(meter.metering(resident_tensors(trained, optimizer, [text])))
                    pieces, tried = pieces + (not tuner.probing), tried + tuner.probing
                    tuner.backward(gpt_loss(trained, micro))
                plan = tuner.plan
                tuner.step()
            peak = meter.peak_bytes or tuner.status["measured_peak_bytes"]
            steps.append(CutStep((text.shape[0], text.shape[1]), pieces, tried, plan, peak))
        status = {**tuner.status, "locks": dict(tuner.locks), "predicted": controller.run.placements.peak_bytes}
        status["share"] = controller.run.phase.share
        status["plans"] = controller.run.placements.plans
        status["ks"] = {plan.accumulation_steps for plan in controller.run.profiler.knowledge.seen}
    return steps, budget, status


def over(steps: Sequence[CutStep], budget: int) -> list[CutStep]:
    """Return the steps over the budget, but for those with trial passes.

    A trial keeps samples of two gradients, as large as those of a small model are themselves.
    """
    return [step for step in steps if step.peak > budget and not step.tried]


@pytest.mark.parametrize("seed", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_batches_that_cannot_be_cut_equally_fit_and_are_predicted_as_they_are(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = [16, 16, 3, *draw.choice([3, 5, 9, 13, 16], 60)]
    steps, budget, status = cut_run([(int(size), 48) for size in sizes], 0.4)
    assert not over(steps[2:], budget)
    plans = [plan for plan in status["plans"] if plan.accumulation_steps in (4, 8)]
    assert plans
    seeded()
    trained = TinyGPT(width=32, blocks=4, dropout=0.0)
    optimizer = torch.optim.AdamW(trained.parameters())
    train_on(trained, optimizer, torch.zeros(1, 48, dtype=torch.long))
    for plan in draw.choice(np.array(plans, dtype=object), 12):
        controls.apply(trained, plan)
        for size in (3, 5, 9, 13, 16):
            needed = peak_of_pieces(trained, optimizer, plan, torch.zeros(size, 48, dtype=torch.long))
            # Two of nine samples in eight pieces: predicted as equal ones, the peak was 12 to 16 % too low.
            assert needed <= 1.001 * status["predicted"](plan, status["share"](8 * size * 48), size), (plan, size)


def peak_of_pieces(trained: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, batch: torch.Tensor) -> int:
    """Return the peak of a step whose batch is cut as the plan says, of a model that follows it."""
    meter = MemoryMeter(CPU)
    with meter.metering(resident_tensors(trained, optimizer, [batch])):
        for piece in split(batch, plan.accumulation_steps):
            gpt_loss(trained, piece).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert meter.peak_bytes is not None
    return meter.peak_bytes


def test_small_batches_are_not_cut_because_large_ones_were_seen_first() -> None:
    draw = np.random.default_rng(5)
    shapes = [(8, 48), (8, 48), (4, 24), (8, 24), (4, 8), (4, 24), (16, 8), (16, 48)]
    shapes += [(int(draw.choice([4, 8, 16])), int(draw.choice([8, 24, 48]))) for _ in range(60)]
    steps, budget, status = cut_run(shapes, 0.8)
    assert not over(steps, budget)
    # The first batch after the trials was too large for a step with smaller k, and none was ever made. Which of them is
    # the fastest later depends on measured times.
    assert status["ks"] >= {1, 4}


def test_first_batches_of_one_sample_do_not_forbid_to_cut_later_ones() -> None:
    shapes = [(1, 48)] * 3 + [(16, 48)] * 30
    steps, budget, status = cut_run(shapes, 0.3)
    assert "accumulation_steps" not in status["locks"]
    assert max(step.pieces for step in steps) > 1
    assert not over(steps[20:], budget)
    steps, budget, status = cut_run([(1, 48)] * 24, 0.9)
    assert "cannot be cut" in status["locks"]["accumulation_steps"]


def test_batches_far_larger_than_the_known_ones_run_under_the_leanest_plan() -> None:
    shapes = [(16, 48)] + [(4, 16)] * 50 + [(16, 48)] * 4
    steps, budget, _ = cut_run(shapes, 0.35)
    # Of a batch twelve times as large as the profiled one nothing is predicted: it once ran whole, at 2.9 times this.
    assert not over(steps[1:], budget)
    assert steps[51].pieces == 8


def test_traces_after_the_run_has_changed_do_not_let_a_plan_run_whose_peak_is_unknown() -> None:
    shapes = [(8, 24)] * 40 + [(16, 48), (1, 48), (3, 48), (16, 40)] + [(16, 48)] * 12
    steps, budget, _ = cut_run(shapes, 0.35)
    assert not over(steps[2:], budget)


def test_batches_that_the_loop_accumulates_are_not_taken_for_cut_ones() -> None:
    """Seven samples are not cut in four pieces where the loop accumulates four batches: eight need more than them."""
    seeded()
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    low, high = needs()
    budget, peaks, predicted = (low + high) // 2, [], []
    tuner = autotune.attach(
        trained, optimizer, accumulation_steps=4, memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None
    )
    controller: Any = tuner._controller
    for number in range(48):
        texts = [torch.randint(0, 11, (7 if number < 24 else 8, LONG)) for _ in range(4)]
        meter = MemoryMeter(CPU)
        with contextlib.ExitStack() as stack:
            for text in texts:
                for micro in tuner.micro_batches(text):
                    if text is texts[0] and not isinstance(controller.run.profiler._use, Tracing):
                        stack.enter_context(meter.metering(resident_tensors(trained, optimizer, [text])))
                    tuner.backward(gpt_loss(trained, micro) / 4)
            tuner.step()
        predicted.append(tuner.status["predicted_peak_bytes"] or 0)
        peaks.append(meter.peak_bytes or tuner.status["measured_peak_bytes"])
    assert tuner.status["acting"], tuner.locks["profile"]
    assert any(storage is Storage.SAVE for name, storage in tuner.plan.storage.items() if name.startswith("blocks"))
    tuner.detach()
    assert max(peaks[2:]) <= budget
    assert all(told >= 0.99 * peak for told, peak in zip(predicted[24:], peaks[24:], strict=True))
