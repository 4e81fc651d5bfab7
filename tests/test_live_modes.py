"""Tests of k and precision in attached runs: trial passes first, the gradient is kept, and k is locked otherwise."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import TinyConvolution, TinyGPT
from test_live import (
    RESTLESS,
    Trace,
    assert_identical,
    deep_gpt,
    gpt_loss,
    image_batches,
    image_loss,
    profiled_peaks,
    seeded,
)
from torch import nn
from zoo import WIDTH, Residual, points

import autotune
from autotune import AttachError, Settings
from autotune.choices import DEFAULT_STORAGES
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import summed_seconds
from autotune.live.attach import _agreed
from autotune.mechanics.precision import useful_precisions
from autotune.plan import Plan, PlanSpace, Precision, Storage

ADAPTIVE = Settings(batching="adaptive")


class Roams:
    """A policy that proposes another k, placement and precision at each decision."""

    name = "roams"

    def __init__(self, *, precise: bool = False) -> None:
        self.generator = np.random.default_rng(5)
        self.precise = precise
        self.seen: list[Plan] = []

    def decide(self, observation: Any, plan: Plan) -> Plan:
        self.seen.append(plan)
        proposed: Plan = observation.space.sample(self.generator)
        return proposed.changed(precision=plan.precision) if self.precise else proposed


class Holds:
    """A policy that always proposes one k."""

    name = "holds"

    def __init__(self, k: int) -> None:
        self.k = k

    def decide(self, observation: Any, plan: Plan) -> Plan:
        return plan.changed(accumulation_steps=self.k)


class Notes(Holds):
    """A policy that proposes one k and records the profiles it gets."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.profiles: list[Profile] = []

    def begin(self, profile: Profile, budget_bytes: int | None) -> Plan:
        self.profiles.append(profile)
        return profile.space.baseline()


class Mixes(Holds):
    """A policy that proposes one k, with every third unit in 16 bits."""

    def decide(self, observation: Any, plan: Plan) -> Plan:
        lower = observation.space.precisions[-1]
        names = [unit.name for unit in observation.space.units]
        return plan.changed(accumulation_steps=self.k, precision=dict.fromkeys(names[1::3], lower))


def plain_gpt() -> nn.Module:
    return TinyGPT(dropout=0.0).double()


def texts(count: int, *, rows: int = 8) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randint(0, 11, (rows, int(torch.randint(6, 16, (1,), generator=generator))), generator=generator)


def padded(count: int) -> Iterator[torch.Tensor]:
    """Return texts whose rows end early and are padded with -1."""
    generator = torch.Generator().manual_seed(4)
    for tokens in texts(count):
        ends = torch.randint(2, tokens.shape[1], (len(tokens), 1), generator=generator)
        yield tokens.masked_fill(torch.arange(tokens.shape[1]) >= ends, -1)


def padded_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1].clamp(min=0))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-1)


def num_targets(tokens: torch.Tensor) -> int:
    return int((tokens[:, 1:] >= 0).sum())


def train(
    model: Callable[[], nn.Module],
    batches: Iterator[Any],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    count: Callable[[Any], int] | None = None,
    *,
    group: int = 1,
    **attaching: Any,
) -> Trace:
    """Train a new model; unattached, ``group`` batches make one step."""
    seeded()
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    tuner = autotune.attach(trained, optimizer, clip_norm=1.0, runs_dir=None, **attaching) if attaching else None
    losses = []
    held: list[Any] = []
    for batch in batches:
        if tuner is not None:
            total = 0.0
            for micro in tuner.micro_batches(batch, count):
                loss = loss_of(trained, micro)
                tuner.backward(loss)
                if not tuner.probing:
                    total += float(loss.detach()) * (1 if count is None else count(micro))
            tuner.step()
            losses.append(total)
            continue
        held.append(batch)
        if len(held) == group:
            items = [len(one) if count is None else count(one) for one in held]
            for one, number in zip(held, items, strict=True):
                (loss_of(trained, one) * (number / sum(items))).backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            held = []
    return Trace(losses, trained, optimizer, tuner)


def assert_close(one: Trace, two: Trace, tolerance: float) -> None:
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(a)


def ks_of(trace: Trace) -> set[int]:
    return {event["plan"]["accumulation_steps"] for event in trace.tuner.events if event["event"] == "switched"}


@pytest.mark.parametrize(
    ("batches", "loss_of", "count"),
    [
        pytest.param(texts, gpt_loss, None, id="samples", marks=pytest.mark.slow),
        pytest.param(padded, padded_loss, num_targets, id="items"),
    ],
)
def test_run_with_changing_k_learns_the_same_up_to_rounding(batches: Any, loss_of: Any, count: Any) -> None:
    plain = train(plain_gpt, batches(40), loss_of, count)
    tuned = train(
        plain_gpt,
        batches(40),
        loss_of,
        count,
        policy=Roams(),
        mode="rounding",
        memory_budget_bytes=10**9,
        limits=RESTLESS,
    )
    assert "accumulation_steps" not in tuned.tuner.locks
    assert ks_of(tuned) == {1, 2, 4, 8}
    assert_close(plain, tuned, 1e-9)


def contrastive(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    pooled = F.normalize(model(tokens).mean(1), dim=1)
    return F.cross_entropy(pooled @ pooled.T * 5, torch.arange(len(tokens)))


@pytest.mark.parametrize(
    ("model", "batches", "loss_of", "reason"),
    [
        pytest.param(lambda: TinyConvolution(blocks=3), image_batches, image_loss, "BatchNorm", id="batchnorm"),
        pytest.param(plain_gpt, texts, contrastive, "contrastive losses", id="contrastive"),
        pytest.param(plain_gpt, padded, padded_loss, "`count` is wrong or missing", id="no count"),
    ],
)
def test_k_is_locked_if_splitting_changes_the_gradient(model: Any, batches: Any, loss_of: Any, reason: str) -> None:
    plain = train(model, batches(30), loss_of)
    tuned = train(
        model, batches(30), loss_of, policy=Roams(), mode="rounding", memory_budget_bytes=10**9, limits=RESTLESS
    )
    assert reason in tuned.tuner.locks["accumulation_steps"]
    assert tuned.tuner.status["switches"] >= 10
    assert ks_of(tuned) == {1}
    for a, b in zip(plain.state(), tuned.state(), strict=True):
        assert torch.equal(a, b)


class Dropping(TinyConvolution):
    """A model with dropout and BatchNorm, so that k is locked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


def test_trial_passes_leave_no_trace() -> None:
    """Dropout masks, buffers and gradients equal those of a run without trial passes."""
    plain = train(Dropping, image_batches(30), image_loss)
    tuned = train(
        Dropping, image_batches(30), image_loss, policy=Roams(), mode="rounding", memory_budget_bytes=10**9,
        limits=RESTLESS,
    )  # fmt: skip
    assert tuned.tuner.status["switches"] >= 10
    plain.losses = tuned.losses = []
    assert_identical(plain, tuned)


def test_loop_can_tell_trial_passes_from_real_ones() -> None:
    seeded()
    model = plain_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = autotune.attach(model, optimizer, "exact", mode="rounding", memory_budget_bytes=10**9, runs_dir=None)
    passes = []
    for batch in texts(6):
        passes.append([0, 0])
        for micro in tuner.micro_batches(batch):
            passes[-1][tuner.probing] += len(micro)
            tuner.backward(gpt_loss(model, micro))
        tuner.step()
    # Trial passes run the batch twice, cut in two ways; real passes run each sample once per step. One batch is larger
    # than those that ran whole, and is tried in addition.
    assert [real for real, _ in passes] == [8] * 6
    assert [tried for _, tried in passes] == [0, 16, 16, 16, 16, 0]


def test_16_bit_units_follow_the_policy_and_the_run_learns() -> None:
    policy = Roams()
    plain = train(lambda: TinyGPT(dropout=0.0), texts(50), gpt_loss)
    tuned = train(
        lambda: TinyGPT(dropout=0.0), texts(50), gpt_loss, policy=policy, mode="tolerant", memory_budget_bytes=10**9,
        limits=RESTLESS,
    )  # fmt: skip
    used = {precision for plan in policy.seen for precision in plan.precision.values()}
    assert used == {Precision.INHERIT, Precision.BF16}
    assert {storage for plan in policy.seen for storage in plan.storage.values()} == set(DEFAULT_STORAGES)
    assert_close(plain, tuned, 0.05)
    assert not all(torch.equal(a, b) for a, b in zip(plain.state(), tuned.state(), strict=True))


class Cancels(nn.Module):
    """A unit that loses small values in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inside = block(x)
            x = (inside * 100).sin() + (inside * 37).cos()
        return x.square().mean()


def test_precision_that_changes_the_gradient_direction_is_locked() -> None:
    generator = torch.Generator().manual_seed(0)
    tuned = train(
        Cancels,
        (torch.randn(8, 8, generator=generator) for _ in range(30)),
        lambda model, x: model(x),
        policy=Roams(),
        mode="tolerant",
        memory_budget_bytes=10**9,
        limits=RESTLESS,
    )
    assert "changes the gradient" in tuned.tuner.locks["bf16"]
    assert tuned.tuner.status["switches"] >= 10
    precisions = {p for e in tuned.tuner.events if e["event"] == "switched" for p in e["plan"]["precision"].values()}
    assert precisions == {"inherit"}


def test_two_skipped_steps_under_a_lower_precision_trip() -> None:
    seeded()
    model = TinyGPT(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = autotune.attach(
        model, optimizer, Roams(), mode="tolerant", memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None
    )
    skipped = 0
    for batch in texts(60):
        for micro in tuner.micro_batches(batch):
            lower = Precision.BF16 in tuner.plan.precision.values() and not tuner.probing
            loss = gpt_loss(model, micro)
            tuner.backward(loss * float("nan") if lower and skipped < 4 else loss)
        skipped += not tuner.step()
    trips = tuner.status["trips"]
    assert skipped >= 2
    assert trips
    assert "two steps in a row were skipped under a lower precision" in trips[0][1]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("k", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_adaptive_step_consumes_k_batches_weighted_by_their_items(k: int) -> None:
    tuned = train(
        plain_gpt, padded(80), padded_loss, num_targets, policy=Holds(k), mode="tolerant", settings=ADAPTIVE,
        memory_budget_bytes=10**9, limits=RESTLESS,
    )  # fmt: skip
    events = [event for event in tuned.tuner.events if event["event"] == "switched"]
    assert ks_of(tuned) == {k}
    # The steps before the switch: each k was traced once, as were smaller batches, and each precision was timed thrice.
    assert len(events) == 1
    status = tuned.tuner.status
    assert status["plan"].accumulation_steps == k
    assert status["steps"] < 80 // k + 16


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 10**9])
def test_cost_of_k_under_adaptive_batching_includes_one_shared_update(budget: int | None) -> None:
    policy = Notes(2)
    tuned = train(
        plain_gpt, padded(80), padded_loss, num_targets, policy=policy, mode="tolerant", settings=ADAPTIVE,
        memory_budget_bytes=budget, limits=RESTLESS,
    )  # fmt: skip
    controller: Any = tuned.tuner._controller
    # The initial profile, and the one after another k had run.
    for profile in (policy.profiles[0], controller.run.placements.profile):
        update = profile.tables[0].update_s
        assert update > 0
        assert [table.accumulation_steps for table in profile.tables] == [1, 2, 4, 8]
        single = summed_seconds(profile, profile.space.baseline()) - update
        for k in (2, 4, 8):
            seconds = summed_seconds(profile, profile.space.baseline().changed(accumulation_steps=k))
            assert seconds == pytest.approx(k * single + update, rel=1e-6)


@pytest.mark.slow
def test_adaptive_step_time_is_the_sum_over_its_batches_without_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = list(texts(72))
    seeded()
    model = plain_gpt()
    tuner = autotune.attach(
        model, torch.optim.SGD(model.parameters(), 0.05), Holds(4), mode="tolerant", settings=ADAPTIVE,
        limits=RESTLESS, runs_dir=None,
    )  # fmt: skip
    controller: Any = tuner._controller
    after_step, steps, noted = controller.after_step, [], []
    monkeypatch.setattr(controller, "after_step", lambda step: (steps.append(step), after_step(step)))
    monkeypatch.setattr(controller.run.check, "note", noted.append)
    held: list[torch.Tensor] = []
    began, between_s = time.perf_counter(), 0.0
    for number, batch in enumerate(batches):
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(model, micro))
        held.append(batch)
        if not tuner.step():
            ended = time.perf_counter()
            # Only towards the end, when everything is profiled.
            time.sleep(0.05 if number > 40 else 0.0)
            between_s += time.perf_counter() - ended
            continue
        assert steps[-1].seconds <= time.perf_counter() - began - between_s
        began, between_s = time.perf_counter(), 0.0
        assert steps[-1].all_bytes == sum(one.nbytes for one in held)
        # A step longer than the baseline's is not a slower one.
        assert noted[-1] == steps[-1].seconds / steps[-1].all_bytes
        held = []
    assert steps[-1].samples == 4 * 8


@pytest.mark.slow
def test_plan_without_a_known_alternative_runs_as_decided() -> None:
    tuned = train(
        lambda: TinyGPT(width=16, blocks=6, dropout=0.0), texts(80), gpt_loss, policy=Mixes(4), mode="tolerant",
        settings=ADAPTIVE, memory_budget_bytes=10**9, limits=RESTLESS,
    )  # fmt: skip
    status = tuned.tuner.status
    assert status["decided"].accumulation_steps == 4
    assert status["plan"].accumulation_steps == 4
    assert status["plan"].precision == status["decided"].precision


@pytest.mark.slow
def test_adaptive_run_equals_the_same_steps_by_hand() -> None:
    batches = list(padded(110))
    seeded()
    tuned, by_hand = plain_gpt(), plain_gpt()
    by_hand.load_state_dict(tuned.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (tuned, by_hand)]
    tuner = autotune.attach(
        tuned, optimizers[0], Roams(precise=True), mode="tolerant",
        settings=Settings(batching="adaptive", lr_rule="sqrt"),
        memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None, clip_norm=1.0,
    )  # fmt: skip
    sizes, held = [], []
    for batch in batches:
        for micro in tuner.micro_batches(batch, num_targets):
            tuner.backward(padded_loss(tuned, micro))
        held.append(batch)
        if not tuner.step():
            assert optimizers[0].param_groups[0]["lr"] == 0.05
            continue
        items = [num_targets(one) for one in held]
        for one, number in zip(held, items, strict=True):
            (padded_loss(by_hand, one) * (number / sum(items))).backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizers[1].param_groups[0]["lr"] = 0.05 * (sum(items) / items[0]) ** 0.5
        optimizers[1].step()
        optimizers[1].zero_grad()
        sizes.append(len(held))
        held = []
    assert set(sizes) == {1, 2, 4, 8}
    for one, two in zip(tuned.parameters(), by_hand.parameters(), strict=True):
        assert torch.linalg.vector_norm(one - two) <= 1e-9 * torch.linalg.vector_norm(one)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "reckless"}, "mode is 'reckless'"),
        ({"settings": ADAPTIVE}, "adaptive in mode exact"),
        ({"settings": ADAPTIVE, "mode": "tolerant", "accumulation_steps": 2}, "accumulates 2 batches by itself"),
        ({"settings": ADAPTIVE, "mode": "tolerant", "accumulation_steps": "2"}, "accumulation_steps is '2'"),
    ],
)
def test_unavailable_modes_are_rejected_in_one_line(wrong: dict[str, Any], message: str) -> None:
    model = deep_gpt()
    with pytest.raises(AttachError, match=message) as caught:
        autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), runs_dir=None, **wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["fixed", "adaptive"])
@pytest.mark.parametrize("policy", ["exact", "greedy", "planner", "ppo"])
def test_every_named_policy_plans_k_and_precision_within_a_budget(policy: str, batching: Any) -> None:
    """Under a budget that the baseline exceeds, each policy finishes without a trip, and the run learns."""
    lowest, highest = profiled_peaks()
    limits = dataclasses.replace(RESTLESS, gain_frac=0.0)
    tuned = train(
        lambda: TinyGPT(width=16, blocks=4, dropout=0.0), texts(40, rows=4), gpt_loss, policy=policy, mode="tolerant",
        settings=Settings(batching=batching), memory_budget_bytes=int(lowest + 0.6 * (highest - lowest)), limits=limits,
    )  # fmt: skip
    status = tuned.tuner.status
    assert status["attached"], status
    assert status["trips"] == []
    assert status["predicted_peak_bytes"] <= status["memory_budget_bytes"]
    # Losses of a step's pieces add up, and k differs from step to step.
    with torch.no_grad():
        learnt, fresh = (
            np.mean([float(gpt_loss(model, text)) for text in texts(10, rows=4)])
            for model in (tuned.model, TinyGPT(width=16, blocks=4, dropout=0.0))
        )
    assert learnt < fresh - 0.1


class Rotary(nn.Module):
    """A unit that rotates pairs as complex numbers, which bf16 lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*self.mix(self.norm(x)).chunk(2, -1))
        angles = torch.arange(x.shape[1]).unsqueeze(1) * torch.linspace(0.1, 1.0, 8)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return x + torch.cat([turned.real, turned.imag], -1)


class NoBackward(torch.autograd.Function):
    """A unit that passes 16-bit input but fails in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.is_reduced = x.dtype is torch.bfloat16
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if ctx.is_reduced:
            raise NotImplementedError("no kernel for 16 bits")
        return gradient


class OneWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + NoBackward.apply(self.mix(x))


@pytest.mark.parametrize(("block", "said"), [(Rotary, "RuntimeError"), (OneWay, "no kernel for 16 bits")])
def test_model_that_cannot_run_in_16_bits_is_left_unchanged(block: type[nn.Module], said: str) -> None:
    def model() -> nn.Module:
        made = TinyGPT(width=16, blocks=0, dropout=0.0)
        made.blocks = nn.ModuleList(block() for _ in range(4))
        return made

    if Precision.BF16 not in useful_precisions("cpu"):
        pytest.skip("bf16 has no fast path on this machine")
    plain = train(model, texts(12), gpt_loss)
    tuned = train(
        model,
        texts(12),
        gpt_loss,
        policy=Roams(),
        mode="tolerant",
        settings=Settings(accumulation_choices=(1,)),
        memory_budget_bytes=10**9,
        limits=RESTLESS,
    )
    assert tuned.tuner.attached
    assert said in tuned.tuner.locks["bf16"]
    assert ks_of(tuned) == {1}
    assert_close(plain, tuned, 0.0)


@pytest.mark.parametrize("storages", [["compiled"], ["offload"], ["unheard of"], "selective", [3]])
def test_storages_that_no_attached_run_has_are_refused(storages: Any) -> None:
    with pytest.raises(
        AttachError,
        match=r"storages is .* \(allowed: some of save, selective, compress8, compress4, rebuild, recompute\)",
    ):
        Settings(storages=storages)


def test_storages_of_the_environment_that_an_attached_run_cannot_have_are_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AUTOTUNE_STORAGES", "selective,compress8,offload")
    network = deep_gpt()
    tuner = autotune.attach(network, torch.optim.SGD(network.parameters(), 1e-2), runs_dir=None)
    controller: Any = tuner._controller
    assert controller.run.attached.space.storages == (*DEFAULT_STORAGES[:1], Storage.SELECTIVE, *DEFAULT_STORAGES[1:])
    assert {"compress8", "offload"} <= controller.run.attached.locks.keys()
    tuner.detach()


def test_ranks_have_the_default_storages() -> None:
    space = PlanSpace(units=(), accumulation_choices=(1,), precisions=(Precision.INHERIT,), storages=tuple(Storage)[:4])
    locks: dict[str, str] = {}
    ranks: Any = SimpleNamespace(many=True, largest=list)
    assert _agreed(space, locks, ranks).storages == DEFAULT_STORAGES
    assert locks.keys() == {str(storage) for storage in space.storages} - set(DEFAULT_STORAGES)


@pytest.mark.parametrize("samples", [5, 7, 8, 16, 30])
def test_trials_cut_no_batch_into_smaller_pieces_than_plans_do(samples: int) -> None:
    """A loss may be undefined for one sample: of a batch that plans cut in pieces of two, no trial sees less."""
    seeded()
    model = plain_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = autotune.attach(model, optimizer, "exact", mode="rounding", memory_budget_bytes=10**9, runs_dir=None)
    sizes = []
    for number in range(6):
        sizes.append([samples])
        # Batches that are larger than those that ran whole are tried in small pieces.
        for micro in tuner.micro_batches(torch.randint(0, 11, (samples if number > 1 else 2, 12))):
            sizes[-1].append(len(micro) if tuner.probing else samples)
            tuner.backward(gpt_loss(model, micro))
        tuner.step()
    largest_k = max(k for k in (1, 2, 4, 8) if k <= samples)
    assert min(map(min, sizes[2:])) == samples // largest_k


def test_gradients_that_are_always_there_leave_storage_to_be_switched() -> None:
    """A GAN may clear the generator's gradients within its step, and fill them again in the critic's."""

    def trained(tuned: bool) -> tuple[dict[str, torch.Tensor], Any]:
        torch.manual_seed(0)
        generator = nn.Sequential(*[Residual() for _ in range(4)])
        critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer, other = (torch.optim.Adam(model.parameters(), 1e-3) for model in (generator, critic))
        tuner = None
        if tuned:
            settings: dict[str, Any] = {"memory_budget_bytes": 10**9, "limits": RESTLESS, "runs_dir": None}
            tuner = autotune.attach(generator, optimizer, "exact", mode="rounding", **settings)
        for batch in points(24):
            for micro in [batch] if tuner is None else tuner.micro_batches(batch):
                optimizer.zero_grad()
                loss = -critic(generator(micro)).mean()
                loss.backward() if tuner is None else tuner.backward(loss)
            optimizer.step() if tuner is None else tuner.step()
            other.zero_grad()
            critic(generator(batch)).mean().backward()
            other.step()
        return generator.state_dict(), tuner

    alone, _ = trained(tuned=False)
    weights, tuner = trained(tuned=True)
    assert all(torch.equal(weights[name], value) for name, value in alone.items())
    assert "gradients of the loop's own" in tuner.locks["accumulation_steps"]
    assert tuner.status["acting"]
    assert not tuner.plan.recomputed
    assert not tuner.learning
    tuner.detach()


def test_steps_that_begin_beside_gradients_at_times_keep_what_the_budget_allows() -> None:
    """They were lean for good, and a loop's own call before them was taken for a second one within them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual() for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    settings: dict[str, Any] = {"memory_budget_bytes": 10**9, "limits": RESTLESS, "runs_dir": None}
    tuner = autotune.attach(model, optimizer, "exact", mode="rounding", **settings)
    lean = 0
    for number, batch in enumerate(points(72)):
        if number % 3 == 0:
            (1e-3 * model(batch).square().mean()).backward()
        for micro in tuner.micro_batches(batch):
            lean += not tuner.probing and number >= 48 and bool(tuner.plan.recomputed)
            tuner.backward(model(micro).square().mean())
        tuner.step()
    assert not lean
    tuner.detach()


class _Flagged(nn.Module):
    """A model with a scripted part and an attribute that is named like a method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.train = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.train is True
        return self.last(self.dropout(self.scripted(self.first(x))))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_parts_and_odd_names_survive_trial_passes() -> None:
    seeded()
    model = _Flagged()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tried = 0
    with autotune.attach(model, optimizer, mode="rounding", runs_dir=None) as tuner:
        for _ in range(8):
            for micro in tuner.micro_batches(torch.randn(8, 8)):
                tried += tuner.probing
                tuner.backward(model(micro).square().mean())
            tuner.step()
        assert tuner.attached
    assert tried


def test_copies_that_a_loop_makes_in_trial_passes_can_be_set_to_any_mode() -> None:
    seeded()
    model, copies = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)), []
    train = nn.Module.train
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with autotune.attach(model, optimizer, mode="rounding", runs_dir=None) as tuner:
        for _ in range(8):
            for micro in tuner.micro_batches(torch.randn(8, 8)):
                if tuner.probing:
                    copies.append(copy.deepcopy(model))
                tuner.backward(model(micro).square().mean())
            tuner.step()
    assert copies
    assert not any(part.training for part in copies[0].eval().modules())
    assert all(part.training for part in copies[0].train().modules())
    assert b"autotune" not in pickle.dumps(copies[0])
    assert nn.Module.train is train
