"""Tests of attached runs that may compress activations: after trials, within the budget, and not where it harms."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_live import RESTLESS, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import autotune
from autotune import AttachError, Settings, find_units
from autotune.choices import Precision, Storage
from autotune.live.allowed_plans import AllowedPlans
from autotune.live.lessons import Lessons
from autotune.live.storage_trials import StorageTrials
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors
from autotune.plan import PlanSpace
from autotune.profiling.trial_passes import Attempt, storage_lock

ROWS, WIDTH, BLOCKS = 24, 64, 12
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.live.attach.useful_precisions", lambda _: (Precision.FP32,))


class Block(nn.Module):
    """A block with a residual path; if it is wild, one of many saved numbers is much larger than the others."""

    def __init__(self, *, wild: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.wild = wild

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if self.wild:
            mask = torch.zeros_like(hidden)
            mask[..., ::32] = 1e5
            hidden = torch.where(mask > 0, mask, hidden)
            # The large numbers do not matter for the result, only for how the others are rounded.
            weight = torch.where(torch.arange(4 * WIDTH) % 32 == 0, 0.0, self.down.weight)
            return x + F.linear(hidden, weight, self.down.bias)
        return x + self.down(hidden)


class Network(nn.Module):
    """Blocks in a row; those of some numbers are wild, after a number of steps."""

    def __init__(self, wild: tuple[int, ...] = (), *, after: int = 0, checkpointed: int = -1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self._wild, self._after, self._checkpointed, self.steps = wild, after, checkpointed, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            block.wild = number in self._wild and self.steps >= self._after
            x = checkpoint(block, x, use_reentrant=False) if number == self._checkpointed else block(x)
        return self.head(x)


class Compresses:
    """A policy that compresses every unit that may be."""

    name = "compresses"

    def __init__(self, k: int) -> None:
        self._k = k

    def decide(self, observation: Any, plan: autotune.Plan) -> autotune.Plan:
        space = observation.space
        for storage in filter(lambda one: one.approximates, space.storages):
            names = [name for name in space.recomputable if storage in space.storages_of(name)]
            plan = plan.changed(storage={**plan.storage, **dict.fromkeys(names, storage)})
        return plan.changed(accumulation_steps=self._k)


def needed(network: Network, plan: autotune.Plan, rows: int) -> int:
    """Return the peak of a step under a plan in bytes."""
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    autotune.apply(network, plan)
    for _ in range(2):
        meter, batch = MemoryMeter(CPU), torch.randn(rows, 4, WIDTH)
        with meter.metering(resident_tensors(network, optimizer, [batch])):
            network(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert meter.peak_bytes is not None
    return meter.peak_bytes


@functools.cache
def budget_of(share: float, rows: int = ROWS) -> int:
    """Return a budget between what recomputing everything and what saving everything needs."""
    units = [f"blocks.{number}" for number in range(BLOCKS)]
    low, high = (
        needed(Network(), autotune.Plan(storage=dict.fromkeys(units, storage)), rows)
        for storage in (Storage.RECOMPUTE, Storage.SAVE)
    )
    return int(low + share * (high - low))


def trained(
    network: Network,
    *,
    steps: int,
    accumulated: int = 1,
    rows: int = ROWS,
    low: Callable[[Any, int], bool] = lambda *_: False,
    share: float = 0.7,
    storages: tuple[str, ...] = ("compress8",),
    choices: tuple[int, ...] = (1,),
    spoilt: Callable[[int], object] = lambda _: False,
    skips: Callable[[Any, int], bool] = lambda *_: False,
    look: Callable[[Any, int], None] = lambda *_: None,
) -> Any:
    """Train attached, and return the tuner and the plan of each step; no metered step is over its budget."""
    buffers = sum(buffer.nbytes for buffer in network.buffers())
    budget = budget_of(share, rows) + buffers
    seeded()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    now = [budget]
    tuner = autotune.attach(
        network,
        optimizer,
        Compresses(choices[-1]),
        mode="tolerant",
        memory_budget_bytes=lambda: now[0],
        limits=RESTLESS,
        runs_dir=None,
        accumulation_steps=accumulated,
        settings=Settings(storages=storages, accumulation_choices=choices),
    )
    plans = []
    for number in range(steps):
        network.steps = number
        now[0] = budget_of(0.1, rows) + buffers if low(tuner, number) else budget
        batches, meter = [torch.randn(rows, 4, WIDTH) for _ in range(accumulated)], MemoryMeter(CPU)
        for micro in itertools.chain.from_iterable(map(tuner.micro_batches, batches)):
            look(tuner, number)
            # Metering is slow.
            metered = accumulated == 1 and not (tuner.learning or tuner.probing or number % 4)
            with meter.metering(resident_tensors(network, optimizer, [micro])) if metered else contextlib.nullcontext():
                loss = network(micro).square().mean() * (math.nan if spoilt(number) else 1.0)
                if is_skipped := skips(tuner, number):
                    continue
                tuner.backward(loss)
        if not is_skipped:
            tuner.step()
        plans.append(tuner.plan)
        if number and tuner.attached and meter.peak_bytes is not None:
            assert meter.peak_bytes <= now[0]
    return tuner, plans


def compressed(plan: autotune.Plan) -> set[str]:
    return {name for name, storage in plan.storage.items() if storage.approximates}


@pytest.mark.parametrize("storage", ["compress8", "compress4"])
def test_units_are_compressed_where_that_fits_the_budget(storage: str) -> None:
    tuner, plans = trained(Network(), steps=40, storages=(storage,))
    assert tuner.attached
    assert any(map(compressed, plans)), tuner.locks
    assert not tuner.status["over_budget_steps"]


def test_what_had_no_room_while_costs_were_learnt_is_tried_later() -> None:
    tuner, plans = trained(Network(wild=(7,)), steps=100, low=lambda _, number: number < 30)
    assert not any(map(compressed, plans[:30]))
    assert re.match("in blocks.7: it changes the gradient", tuner.locks["compress8"])
    assert compressed(plans[-1])


def test_units_that_compression_spoils_keep_exact_storages() -> None:
    tuner, plans = trained(Network(wild=(7, 10)), steps=40)
    assert tuner.attached
    assert not any({"blocks.7", "blocks.10"} & compressed(plan) for plan in plans)
    assert "blocks.10" in tuner.locks["compress8"]


def test_a_unit_that_compression_spoils_later_is_locked_then_and_it_alone() -> None:
    tuner, plans = trained(Network(wild=(10,), after=25), steps=90)
    assert tuner.attached
    assert any("blocks.10" in compressed(plan) for plan in plans)
    assert re.match("in blocks.10: it changes the gradient", tuner.locks["compress8"])
    assert compressed(plans[-1])
    assert "blocks.10" not in compressed(plans[-1])


def test_only_the_first_of_accumulated_batches_is_tried_and_none_is_cut() -> None:
    network, tried, sizes = Network(wild=(7, 10)), [], []
    network.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    seen = []

    def look(tuner: Any, number: int) -> None:
        tried.append((number, tuner.probing))

    tuner, plans = trained(network, steps=40, accumulated=3, rows=64, look=look)
    assert set(sizes) == {64}
    for number in {number for number, is_trial in tried if is_trial}:
        seen.append([is_trial for one, is_trial in tried if one == number])
    assert seen
    assert all(one[-3:] == [False] * 3 for one in seen)
    assert set(re.findall(r"blocks.\d+", tuner.locks["compress8"].partition(":")[0])) <= {"blocks.7", "blocks.10"}
    assert any(map(compressed, plans))


@pytest.mark.slow
def test_what_is_in_doubt_while_the_budget_is_low_is_not_locked() -> None:
    network, doubts = Network(wild=(9,), after=25), []

    def low(tuner: Any, number: int) -> bool:
        trials = tuner._controller.run.profiler._lessons.trials
        if trials.doubted() is not None:
            doubts.append(number)
        return bool(doubts) and number < doubts[0] + 80

    tuner, _ = trained(network, steps=200, low=low)
    assert doubts
    assert re.match("in blocks.9: it changes the gradient", tuner.locks["compress8"])


def test_batches_that_are_not_finite_lock_nothing() -> None:
    tuner, plans = trained(Network(), steps=100, spoilt=lambda number: 25 < number < 80)
    assert tuner.attached
    assert "compress8" not in tuner.locks
    assert compressed(plans[-1])


def test_a_batch_that_the_loop_skips_in_a_late_trial_locks_nothing() -> None:
    skipped: set[int] = set()

    def skips(tuner: Any, number: int) -> bool:
        if tuner.probing and number > 20 and not skipped:
            skipped.add(number)
        return number in skipped

    tuner, plans = trained(Network(), steps=60, skips=skips)
    assert skipped
    assert "compress8" not in tuner.locks
    assert compressed(plans[-1])


@pytest.mark.parametrize("number_of_bytes", [2**12, 2**23])
def test_buffers_that_the_model_does_not_write_to_leave_room_for_trials(number_of_bytes: int) -> None:
    network = Network()
    network.register_buffer("table", torch.zeros(number_of_bytes, dtype=torch.uint8))
    _, plans = trained(network, steps=40)
    assert any(map(compressed, plans))


def test_sparse_gradients_can_be_compared() -> None:
    seeded()
    table = nn.Embedding(500, WIDTH, sparse=True)
    outcomes = []
    for factor in (1.0, 1.5):
        table(torch.tensor([3, 7])).square().sum().mul(factor).backward()
        outcomes.append(Attempt(training=True).outcome([table.weight]))
        table.weight.grad = None
    assert storage_lock(outcomes[0], outcomes[0], {"table": table}) is None
    assert "the gradient of the model by 50.0%" in str(storage_lock(*outcomes, {"table": table}))


@pytest.mark.parametrize("width", [64, 256])
def test_what_compression_spoils_is_found_at_any_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setitem(globals(), "WIDTH", width)
    seeded()
    blocks, batch = nn.Sequential(Block(), Block(wild=True), Block()), torch.randn(ROWS, 4, width)
    parameters, outcomes = [*blocks.parameters()], []
    for storage in (Storage.SAVE, Storage.COMPRESS8):
        autotune.apply(blocks, autotune.Plan(storage=dict.fromkeys("012", storage)))
        attempt = Attempt(training=True)
        blocks(batch).square().mean().backward()
        outcomes.append(attempt.outcome(parameters))
        blocks.zero_grad()
    assert "changes the gradient" in str(storage_lock(*outcomes, {"1": blocks[1]}))
    assert storage_lock(outcomes[0], outcomes[0], {"1": blocks[1]}) is None


def allowed_plans() -> AllowedPlans:
    storages = (Storage.SAVE, Storage.COMPRESS8, Storage.RECOMPUTE)
    units = tuple(find_units(Network()))
    return AllowedPlans(
        PlanSpace(units=units, accumulation_choices=(1,), precisions=(Precision.INHERIT,), storages=storages)
    )


def test_what_fails_once_in_a_late_trial_and_not_again_is_not_locked() -> None:
    allowed = allowed_plans()
    names = ["blocks.0", "blocks.1", "blocks.2"]
    for fails_again in (False, True):
        trials = StorageTrials(allowed)
        trials.note(Storage.COMPRESS8, names, None)
        trials.note_late(dict.fromkeys(names, Storage.COMPRESS8), "it was off once")
        seen = []
        while (doubted := trials.doubted()) is not None:
            seen.append([*doubted[1]])
            storage, tried = doubted
            # What is not an answer does not count as one.
            trials.note_late(dict.fromkeys(names[:2], storage), "another question")
            reason = "all together are" if fails_again and len(tried) == 3 else None
            trials.note_late(dict.fromkeys(tried, storage), reason)
        assert seen == [names[:1], names[1:], names]
        assert ("compress8" in allowed.locks) is fails_again
    assert allowed.locks["compress8"] == "in blocks.1 and blocks.2: it was off once"


def test_trials_that_show_nothing_end() -> None:
    allowed = allowed_plans()
    trials, names = StorageTrials(allowed), ["blocks.0", "blocks.1"]
    for _ in range(20):
        assert trials.next(Storage.COMPRESS8, names) == names
    trials.note(Storage.COMPRESS8, names, "too far off")
    planned = 0
    while trials.next(Storage.COMPRESS8, names):
        planned += 1
    assert planned == 32
    assert "showed no finite gradients" in allowed.locks["compress8"]


def test_where_copies_of_what_the_model_writes_to_have_no_room_nothing_is_tried() -> None:
    network, tried = Network(), []
    network.register_buffer("seen", torch.zeros(2**22))
    network.register_forward_pre_hook(lambda module, _: (module.seen.add_(1.0), None)[1])
    trained(network, steps=40, look=lambda tuner, _: tried.append(tuner.probing))
    assert not any(tried)


def test_blocks_under_checkpoints_of_the_loop_do_not_lock_the_others() -> None:
    network = Network(checkpointed=11)
    tuner, plans = trained(network, steps=40, share=1.2)
    assert "compress8" not in tuner.locks
    assert compressed(plans[-1])


def test_cuts_are_judged_by_exact_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def lean(lessons: Lessons, _: Any) -> autotune.Plan:
        return lessons._allowed.plan(2, Precision.INHERIT, lean=True)

    monkeypatch.setattr(Lessons, "_likeliest_lean", lean)
    tuner, plans = trained(Network(), steps=60, storages=("compress4",), choices=(1, 2))
    assert "accumulation_steps" not in tuner.locks
    assert sum(bool(compressed(plan)) and plan.accumulation_steps == 2 for plan in plans) > 15


def test_a_tuner_that_is_detached_in_a_trial_pass_leaves_the_model_as_it_was() -> None:
    network = Network()

    def look(tuner: Any, number: int) -> None:
        if tuner.probing and number > 3:
            tuner.detach()

    tuner, _ = trained(network, steps=30, look=look)
    assert not tuner.attached
    assert all("forward" not in block.__dict__ for block in network.blocks)


def test_trial_passes_stay_in_their_mode_whatever_the_loop_sets() -> None:
    network = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), nn.Linear(4, 1))
    with Attempt(training=True).undone(network, ()):
        network.train()
        network[0].train()
        assert not network[0][1].training
        assert network.eval() is network
        assert network.training
    assert network[0][1].training
    assert all("train" not in vars(module) for module in network.modules())


def test_a_loop_that_is_left_in_a_trial_pass_leaves_the_model_as_it_was() -> None:
    network = Network()
    network.dropout, network.norm = nn.Dropout(0.1), nn.BatchNorm1d(4)
    network.register_forward_pre_hook(lambda module, given: module.dropout(module.norm(given[0])))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    left, tuners = [], []

    def train() -> None:
        seeded()
        with autotune.attach(
            network,
            optimizer,
            Compresses(1),
            mode="tolerant",
            memory_budget_bytes=budget_of(0.7),
            limits=RESTLESS,
            runs_dir=None,
            settings=Settings(storages=("compress8",)),
        ) as tuner:
            for number in range(30):
                pieces = tuner.micro_batches(torch.randn(ROWS, 4, WIDTH))
                for micro in pieces:
                    if tuner.probing and number > 2:
                        left.append(pieces)
                        tuners.append(tuner)
                        raise KeyboardInterrupt
                    tuner.backward(network(micro).square().mean())
                tuner.step()

    with pytest.raises(KeyboardInterrupt):
        train()
    assert network.training
    assert network.dropout.training
    assert "train" not in network.__dict__
    assert all("forward" not in block.__dict__ for block in network.blocks)
    network(torch.randn(ROWS, 4, WIDTH)).square().mean().backward()
    batch = torch.randn(ROWS, 4, WIDTH)
    state, seen = torch.get_rng_state(), network.norm.running_mean.clone()
    # Nothing is undone once more.
    left[0].close()
    assert not tuners[0].probing
    assert [len(micro) for micro in tuners[0].micro_batches(batch)] == [ROWS]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(network.norm.running_mean, seen)
    assert all(parameter.grad is not None for parameter in network.head.parameters())


@pytest.mark.parametrize("mode", ["exact", "rounding"])
def test_approximate_storages_need_mode_tolerant(mode: str) -> None:
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    with pytest.raises(AttachError, match=rf"'compress8'.*mode is {mode} \(allowed: mode='tolerant'"):
        autotune.attach(network, optimizer, mode=mode, runs_dir=None, settings=Settings(storages=("compress8",)))
