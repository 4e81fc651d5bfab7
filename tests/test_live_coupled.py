"""Tests that batches are not cut any more once a loss is seen to couple their samples, however late that begins."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_live import RESTLESS
from test_live_modes import Holds
from torch import nn
from torch.nn.utils import prune

import autotune
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors
from autotune.profiling.trial_passes import Outcome, k_lock
from autotune.profiling.trial_state import ModelState, Writes

CPU, WIDTH = torch.device("cpu"), 32
# Gradients of float64 repeat, so that any difference is due to cuts.
Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(F.gelu(self.up(rows)))


def square(out: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return out.square().mean()


def batch_mean_from(first: int) -> Loss:
    """Return a loss that depends on the batch's mean from a step on, also in pieces of a few samples."""

    def loss(out: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
        plain = square(out, labels, number)
        return plain + 10 * out.mean((0, 1)).square().sum() if number >= first else plain

    return loss


def pairs_from(first: int) -> Loss:
    """Return a supervised contrastive loss: pieces that hold no two samples of one label do not show it."""

    def loss(out: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
        plain, same = square(out, labels, number), (labels[:, None] == labels).fill_diagonal_(False)
        if number < first or not same.any():
            return plain
        near = F.normalize(out.mean(1), dim=-1)
        return plain + (same * (1 - near @ near.T)).sum() / len(labels)

    return loss


def trained(
    loss: Loss, rows: int, share: float | None, steps: int, **attach: Any
) -> tuple[list[int], dict[str, str], list[int]]:
    """Train attached; return the pieces of each step outside of trials, the locks, and the numbers of trial steps."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(rows, 16, WIDTH, generator=generator), torch.arange(rows) % (rows // 2)) for _ in range(steps)
    ]

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        return model, torch.optim.SGD(model.parameters(), 1e-3)

    model, optimizer = new()
    meter = MemoryMeter(CPU)
    with meter.metering(resident_tensors(model, optimizer, list(batches[0]))):
        square(model(batches[0][0]), batches[0][1], 0).backward()
    budget = 10**9 if share is None else int(share * (meter.peak_bytes or 0))
    model, optimizer = new()
    pieces, tried = [0] * steps, []
    with autotune.attach(
        model, optimizer, mode="rounding", memory_budget_bytes=budget, runs_dir=None, **attach
    ) as tuner:
        for number, batch in enumerate(batches):
            for micro, labels in tuner.micro_batches(batch):
                pieces[number] += not tuner.probing
                tried += [number] if tuner.probing else []
                tuner.backward(loss(model(micro), labels, number))
            tuner.step()
            optimizer.zero_grad()
        return pieces, dict(tuner.locks), sorted(set(tried))


def test_batches_stay_whole_after_a_late_trial_has_shown_that_samples_are_coupled() -> None:
    """A lock of k once held for the step of the trial alone, because the profile kept the k that were traced."""
    pieces, locks, tried = trained(batch_mean_from(20), 16, None, 120, policy=Holds(2), limits=RESTLESS)
    assert 2 in pieces[:20]
    found = next(number for number in tried if number >= 20)
    assert "depends on the others" in locks["accumulation_steps"]
    assert set(pieces[found:]) == {1}


@pytest.mark.parametrize("rows", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_late_trials_are_made_where_only_cut_batches_ever_fitted(rows: int) -> None:
    """All traced plans had the same k, which then counted as whole batches."""
    pieces, locks, tried = trained(batch_mean_from(8), rows, 0.3, 120)
    assert max(pieces) > 1
    assert any(number >= 8 for number in tried)
    assert "accumulation_steps" in locks
    assert set(pieces[-20:]) == {1}


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_coupling_that_small_pieces_do_not_show_is_found_by_halves_of_whole_batches(first: int) -> None:
    pieces, locks, _ = trained(pairs_from(first), 8, 0.45, 12)
    assert "accumulation_steps" in locks
    assert set(pieces[:4]) == {1}
    assert set(pieces) == {1}


def test_choices_of_k_that_are_close_together_do_not_end_the_run() -> None:
    pieces, locks, _ = trained(square, 8, 0.6, 30, settings=autotune.Settings(accumulation_choices=(3, 4)))
    assert max(pieces) >= 3
    assert "accumulation_steps" not in locks


class OwnNorm(Block):
    """Normalises over the batch in training only."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows - rows.mean((0, 1)) if self.training else rows)


class Balanced(Block):
    """Adds a term to the loss in training only, which depends on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.term: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = super().forward(rows)
        self.term = rows.mean((0, 1)).square().sum() if self.training else None
        return rows


class Counting(Block):
    """Keeps a running mean of what it gets, which changes no gradient of this step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(rows.detach().mean((0, 1)), 0.1)
        return super().forward(rows)


class Dropping(Block):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(rows), 0.1, self.training)


class Attends(nn.Module):
    """Attends within each sample, with dropout by functions and within a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rate = 0.1 if self.training else 0.0
        rows = rows + self.recurrent(rows)[0]
        mixed = F.scaled_dot_product_attention(rows, rows, rows, None, rate)
        return F.dropout(F.alpha_dropout(mixed, rate, True), rate) + F.dropout1d(rows, p=rate)


class OwnNoise(Block):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.older = torch.Generator().manual_seed(3), np.random.RandomState(3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = super().forward(rows)
        if not self.training:
            return rows
        return (
            rows
            + torch.randn(rows.shape, generator=self.noise)
            + torch.from_numpy(self.older.randn(len(rows), 1, 1)).float()
        )


class Remembering(Block):
    """Records in training outside of its buffers, but not how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.total, self.lengths = list[int](), torch.zeros(()), Counter[int]()
        self.sums: dict[str, Any] = {"rows": 0, "nested": [torch.zeros(1)]}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += [1] * len(rows)
            self.sums["rows"] += len(rows)
            self.sums["nested"][0] += len(rows)
            self.total += len(rows)
            self.lengths[rows.shape[1]] += len(rows)
            self.latest = rows
        return super().forward(rows)


class Calls(Block):
    """Counts its calls in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(rows)


class Teaching(Block):
    """Keeps a slow copy of its weights, which are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            for weight in self.slow.parameters():
                weight.data = 0.9 * weight.data + 0.1
        return super().forward(rows)


class Codebook(Block):
    """Moves a weight that the optimizer trains, by a mean over the batch, and makes a new weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.sums = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = rows.detach().mean((0, 1)).to(self.codes.dtype)
            self.codes.data.mul_(0.9).add_(mean)
            self.sums = nn.Parameter(0.9 * self.sums.detach() + mean)
        return super().forward(rows * self.codes + self.sums)


class Constants(Block):
    """Has buffers of many kinds that no pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nan", torch.tensor([math.nan, 1.0]))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("complex", torch.ones(2, dtype=torch.complex64))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.ones(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows * self.complex.real[0])


class Feeding(Block):
    """Holds what another thread writes to while batches are tried."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: deque[int] = deque(maxlen=10**6)
        self.memory.extend(range(20_000))
        self.loader: Queue[int] = Queue(maxsize=4)
        self.thread = threading.Thread(target=self.fill, daemon=True)
        self.thread.start()

    def fill(self) -> None:
        for number in range(200):
            self.loader.put(number)
            self.memory.append(number)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return super().forward(rows)


def with_terms(model: nn.Module) -> torch.Tensor:
    terms = [part.term for part in model.modules() if isinstance(part, Balanced) and part.term is not None]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def trained_blocks(kind: type[Block], dropout: nn.Module | None = None) -> tuple[nn.Module, int, dict[str, str]]:
    """Train 40 steps, attached with k = 2; return the model, the number of pieces, and the locks."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(), dropout or nn.Identity(), kind())
    optimizer, generator = torch.optim.SGD(model.parameters(), 1e-3), torch.Generator().manual_seed(1)
    pieces = 0
    with autotune.attach(
        model, optimizer, mode="rounding", policy=Holds(2), limits=RESTLESS, memory_budget_bytes=10**9, runs_dir=None
    ) as tuner:
        for _ in range(40):
            for micro in tuner.micro_batches(torch.randn(8, 16, WIDTH, generator=generator)):
                pieces += not tuner.probing
                tuner.backward(model(micro).square().mean() + with_terms(model))
            tuner.step()
            optimizer.zero_grad()
        return model, pieces, dict(tuner.locks)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnNorm, "depends on the others"),
        (Balanced, "depends on the others"),
        (Counting, "'0.mean'"),
        (Calls, "'0.calls'"),
        (Teaching, "'0.slow.weight'"),
        (Codebook, "depends on the others"),
    ],
)
@pytest.mark.parametrize("dropout", [None, nn.Dropout(0.1), Attends()])
def test_what_couples_samples_in_training_alone_locks_k(
    kind: type[Block], reason: str, dropout: nn.Module | None
) -> None:
    model, pieces, locks = trained_blocks(kind, dropout)
    assert pieces == 40
    assert all(part.dropout == 0.1 for part in model.modules() if isinstance(part, nn.GRU))
    assert reason in locks["accumulation_steps"]


@pytest.mark.parametrize("kind", [Block, Dropping, OwnNoise, Constants])
def test_random_numbers_and_constants_lock_nothing(kind: type[Block]) -> None:
    _, pieces, locks = trained_blocks(kind, nn.Dropout(0.1))
    assert pieces > 40
    assert "accumulation_steps" not in locks


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_trials_leave_no_trace_in_the_state_of_modules(noise: float) -> None:
    class Noise(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows + noise * torch.randn_like(rows) if self.training and noise else rows

    # If random numbers are drawn, trials run a second time, in evaluation mode.
    model, _, locks = trained_blocks(Remembering, Noise())
    assert "accumulation_steps" not in locks
    for part in model.modules():
        if isinstance(part, Remembering):
            rows = [len(part.seen), part.sums["rows"], int(part.sums["nested"][0]), int(part.total), part.lengths[16]]
            assert rows == [8 * 40] * 5
            assert list(part.lengths) == [16]


def test_untrained_weights_that_passes_write_to_are_restored() -> None:
    model, _, _ = trained_blocks(Teaching)
    torch.manual_seed(0)
    weight = Teaching().slow.weight.data
    for _ in range(40):
        weight = 0.9 * weight + 0.1
    assert isinstance(model, nn.Sequential)
    assert torch.equal(model[0].slow.weight, weight)


@pytest.mark.parametrize("kind", [Codebook, Teaching])
def test_runs_with_weights_that_the_model_writes_to_are_bit_identical_where_k_is_locked(kind: type[Block]) -> None:
    """Trial passes once moved weights that are trained, by up to 78 % of the loss."""
    model, _, _ = trained_blocks(kind)
    torch.manual_seed(0)
    alone = nn.Sequential(kind(), nn.Identity(), kind())
    optimizer, generator = torch.optim.SGD(alone.parameters(), 1e-3), torch.Generator().manual_seed(1)
    for _ in range(40):
        alone(torch.randn(8, 16, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = zip(model.state_dict().items(), alone.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in states)


@pytest.mark.parametrize("through_data", [False, True])
def test_writes_to_a_few_elements_are_seen(through_data: bool) -> None:
    """Only evenly spaced elements were compared once, which the rows of a memory bank are not among."""
    model = nn.Embedding(50_000, 16)
    model.register_buffer("bank", torch.zeros(50_000, 16))
    writes = Writes(model)
    with torch.no_grad():
        for tensor in (model.weight, model.bank):
            (tensor.data if through_data else tensor)[777] += 0.5
    writes.look(updated=False)
    assert writes.names == {"weight", "bank"}


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table[[5, 8]].neg_().flip(0),
        lambda table: table.flip(0),
        lambda table: table.index_select(1, torch.tensor([1, 0, *range(2, 16)])),
        lambda table: torch.where(torch.arange(16) % 2 == 1, -table, table),
        lambda table: torch.where(torch.tensor([True, False] * 8), table, table.roll(2, 1)),
    ],
)
def test_values_that_move_or_change_signs_are_seen(write: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The sum of all bits is the same after most of these."""
    model = nn.Module()
    model.register_buffer("bank", torch.rand(50_000, 16) + 1)
    writes = Writes(model)
    changed = write(model.bank)
    model.bank[: len(changed)] = changed
    writes.look(updated=False)
    assert writes.names == {"bank"}


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_buffers_of_any_format_and_layout_are_compared() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("float8", torch.zeros(2**21, dtype=torch.float8_e4m3fn))
    model.register_buffer("transposed", torch.randn(512, 1024).t())
    model.register_buffer("complex", torch.randn(2**18, dtype=torch.complex64))
    model.register_buffer("imaginary", torch.randn(2**19, dtype=torch.complex64).conj().imag)
    model.register_buffer("whole", torch.zeros(2**19, dtype=torch.int64))
    model.register_buffer("odd", torch.randn(2**20 + 1)[1:])
    model.register_buffer("quantised", torch.quantize_per_tensor(torch.randn(2**21), 0.1, 0, torch.qint8))
    model.register_buffer("nan", torch.full((2**19,), math.nan))
    writes = Writes(model)
    writes.look(updated=False)
    assert not writes.names
    assert not ModelState(model).lost
    model.float8.view(torch.uint8)[5] = 1
    model.complex[7] *= 1j
    model.transposed[3, 5] += 1e-6
    model.nan[11] = 0
    model.imaginary[13] = 9
    writes.look(updated=False)
    assert writes.names == {"float8", "complex", "transposed", "nan", "imaginary"}


@pytest.mark.parametrize("at", [2, 3])
def test_what_a_model_does_to_itself_in_trials_is_undone(at: int) -> None:
    """Hooks and parametrizations that a trial pass registered once stayed, without what belongs to them."""

    class Renewing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            if self.calls == at and self.training:
                self.up.register_forward_hook(lambda _module, _args, out: out * 0.5)
                prune.l1_unstructured(self.down, "weight", 0.5)
            return super().forward(rows)

    model, _, _ = trained_blocks(Renewing)
    parts = [part for part in model.modules() if isinstance(part, Renewing)]
    assert [len(part.up._forward_hooks) for part in parts] == [1, 1]
    assert all("weight_orig" in part.down._parameters for part in parts)


def test_gradients_that_differ_in_their_imaginary_parts_differ() -> None:
    one, two = torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.complex64) + 1j
    outcomes = [Outcome(1.0, [gradient], {}) for gradient in (one, two)]
    assert "differs by 100.00%" in (k_lock(*outcomes, 1e-4) or "")


def test_large_buffers_that_no_pass_writes_to_are_not_copied() -> None:
    class Table(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2**19))
            self.register_buffer("mean", torch.zeros(2**19) if writes else torch.zeros(1))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean += 1
            return super().forward(rows)

    for writes in (False, True):
        model = Table()
        writing = Writes(model)
        model(torch.randn(2, WIDTH))
        writing.look(updated=False)
        assert writing.names == ({"mean"} if writes else frozenset())
        assert ModelState(model, writing.names).copied_bytes == (2**21 if writes else 4)


def test_trials_leave_to_other_threads_what_is_theirs() -> None:
    """Entries of a loader's queue were once lost, and its thread never woke again."""
    model, _, _ = trained_blocks(Feeding)
    assert isinstance(model, nn.Sequential)
    for part in (model[0], model[2]):
        assert [part.loader.get(timeout=30) for _ in range(200)] == list(range(200))
        part.thread.join(30)
        assert list(part.memory)[20_000:] == list(range(200))
