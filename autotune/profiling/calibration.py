"""Measure the rates of this machine's operators, from real steps of small networks.

The networks are a transformer, a convolutional network, a recurrent one and a perceptron, each in several sizes and in
every format that the machine computes efficiently. Their operators run in the order and with the caches that training
has; what a step takes beyond them is the time of Python and of autograd.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from autotune.choices import DEFAULT_STORAGES
from autotune.cost_model.device_table import DeviceSpec, find_device
from autotune.cost_model.measured_rates import OTHER, PRODUCT, MeasuredRates, Sample
from autotune.mechanics import controls, devices
from autotune.mechanics.precision import computing_in, useful_precisions
from autotune.mechanics.randomness import isolated, seed_all
from autotune.plan import Plan, Precision
from autotune.profiling.operator_kinds import kind_of
from autotune.profiling.operator_times import TimedCall, timed_calls

# Steps of each network that are timed as a whole, and by operator.
_WHOLE_STEPS, _WATCHED_STEPS = 3, 2
# Calls of one operator whose operations and bytes are within this factor are one sample.
_BIN = 2.0
# Units that compute nothing, and steps in which recomputing them is timed.
_IDLE_UNITS, _IDLE_STEPS = 20, 10
# The least share of a call's measured time that is not due to watching it.
_LEAST_SHARE = 0.2


class _Block(nn.Module):
    """A block with fused attention, and GELU or a gate between its linear layers."""

    def __init__(self, width: int, heads: int, *, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(2 * width if gated else 4 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return as many rows."""
        mixed = self.mixed(self.first(rows))
        parts = mixed.chunk(3, dim=-1) if self.gated else mixed.unflatten(-1, (3, -1)).unbind(-2)
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        attended = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        rows = rows + F.dropout(self.joined(attended.transpose(1, 2).flatten(2)), 0.1)
        inner: torch.Tensor = self.wide(self.second(rows))
        gate, value = inner.chunk(2, dim=-1)
        found: torch.Tensor = rows + self.narrow(F.silu(gate) * value if self.gated else F.gelu(inner))
        return found


class _Transformer(nn.Module):
    """Two blocks between embeddings and a head over the vocabulary."""

    def __init__(self, width: int, heads: int, length: int, vocab: int, *, gated: bool) -> None:
        super().__init__()
        self.shape, self.vocab = (length,), vocab
        self.embedding, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, gated=gated) for _ in range(2)))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the tokens themselves."""
        rows = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return F.cross_entropy(self.head(self.blocks(rows)).flatten(0, 1).float(), tokens.flatten())

    def inputs(self, samples: int) -> torch.Tensor:
        """Return a batch."""
        return torch.randint(0, self.vocab, (samples, *self.shape))


class _Convolutions(nn.Module):
    """Convolutions with batch normalisation, a residual and pooling."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.point = nn.Conv2d(2 * width, width, 1)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the loss of a class that is the same for all images."""
        rows = self.first(images)
        rows = F.max_pool2d(rows + self.second(rows), 2)
        rows = F.adaptive_avg_pool2d(self.point(self.down(rows)), 1).flatten(1)
        return F.cross_entropy(self.head(rows).float(), torch.zeros(len(images), dtype=torch.long, device=rows.device))

    def inputs(self, samples: int) -> torch.Tensor:
        """Return a batch."""
        return torch.randn(samples, 3, self.side, self.side)


class _Grouped(nn.Module):
    """Depthwise convolutions between pointwise ones, grouped ones, transposed ones and group normalisation."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.depthwise = nn.ModuleList(
            nn.Conv2d(width, width, size, padding=size // 2, groups=width) for size in (3, 7)
        )
        self.grouped = nn.Conv2d(width, width, 3, padding=1, groups=4, bias=False)
        self.wide, self.narrow = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.norm, self.up = nn.GroupNorm(4, width), nn.ConvTranspose2d(width, 8, 2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs."""
        rows = self.first(images)
        for depthwise in self.depthwise:
            rows = rows + self.narrow(F.relu6(self.wide(self.norm(depthwise(rows)))))
        found: torch.Tensor = self.up(F.silu(self.grouped(rows)))
        return found.float().square().mean()

    def inputs(self, samples: int) -> torch.Tensor:
        """Return a batch."""
        return torch.randn(samples, 3, self.side, self.side)


class _Spatial(nn.Module):
    """Convolutions of one or three dimensions."""

    def __init__(self, width: int, side: int, dimensions: int) -> None:
        super().__init__()
        self.shape = (side,) * dimensions
        kind: type[nn.Conv1d | nn.Conv3d] = nn.Conv1d if dimensions == 1 else nn.Conv3d
        self.layers = nn.Sequential(
            kind(1, width, 3, padding=1), nn.ReLU(), kind(width, width, 3, padding=1), nn.GELU()
        )
        self.down = kind(width, 2 * width, 3, stride=2, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs."""
        found: torch.Tensor = self.down(self.layers(images))
        return found.float().square().mean()

    def inputs(self, samples: int) -> torch.Tensor:
        """Return a batch."""
        return torch.randn(samples, 1, *self.shape)


class _Recurrent(nn.Module):
    """An LSTM or a GRU, and a cell of one's own in a loop."""

    def __init__(self, width: int, length: int, kind: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.shape = (length, width)
        self.layer, self.cell = kind(width, width, batch_first=True), nn.Linear(2 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs."""
        rows = self.layer(rows)[0]
        state = rows[:, 0]
        for place in range(min(rows.shape[1], 8)):
            state = torch.tanh(self.cell(torch.cat([state, rows[:, place]], dim=-1)))
        return F.mse_loss(state.float(), torch.zeros_like(state, dtype=torch.float32))

    def inputs(self, samples: int) -> torch.Tensor:
        """Return a batch."""
        return torch.randn(samples, *self.shape)


class _Perceptron(nn.Module):
    """Linear layers of one width with ReLU, sigmoid and dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs."""
        for number, layer in enumerate(self.layers):
            rows = F.dropout(F.relu(layer(rows)), 0.1) * torch.sigmoid(rows) if number % 2 else F.relu(layer(rows))
        return rows.float().square().mean()

    def inputs(self, samples: int) -> torch.Tensor:
        """Return a batch."""
        return torch.randn(samples, self.width)


class _Tables(nn.Module):
    """Tables, sums of their rows, batch normalisation, and sorting, sums and masks along a dimension."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.table, self.bag = nn.Embedding(rows, width), nn.EmbeddingBag(rows, width)
        self.norm, self.mixed = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs."""
        found: torch.Tensor = self.mixed(self.norm(self.bag(keys) + self.table(keys[:, 0])))
        found = found.sort(dim=-1).values + found.cumsum(dim=-1) + torch.fft.fft(found.float()).real
        found = found.masked_fill(found > found.topk(4, dim=-1).values[:, -1:], 0.0).clamp(-3.0, 3.0)
        return ((found.abs() + 1.0).pow(1.5).log() * found.sin()).exp().float().mean()

    def inputs(self, samples: int) -> torch.Tensor:
        """Return a batch."""
        return torch.randint(0, self.rows, (samples, 32))


_Network = _Transformer | _Convolutions | _Grouped | _Spatial | _Recurrent | _Perceptron | _Tables


@dataclass(frozen=True, slots=True)
class _Workload:
    """A network, the samples of its batches, and its optimizer."""

    make: Callable[[], _Network]
    samples: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-4, weight_decay=0.01)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-4, momentum=0.9, weight_decay=1e-4)


WORKLOADS = (
    _Workload(lambda: _Perceptron(8), 8, _adam),
    _Workload(lambda: _Perceptron(64), 32, _adam),
    _Workload(lambda: _Perceptron(256), 1, _adam),
    _Workload(lambda: _Perceptron(1024), 1, _sgd),
    _Workload(lambda: _Perceptron(2048), 8, _sgd),
    _Workload(lambda: _Perceptron(256), 64, _sgd),
    _Workload(lambda: _Perceptron(1024), 128, _adam),
    _Workload(lambda: _Transformer(64, 4, 32, 64, gated=False), 8, _adam),
    _Workload(lambda: _Transformer(128, 4, 64, 1024, gated=False), 1, _adam),
    _Workload(lambda: _Transformer(128, 2, 64, 128, gated=True), 8, _adam),
    _Workload(lambda: _Transformer(96, 6, 256, 256, gated=False), 8, _adam),
    _Workload(lambda: _Transformer(256, 8, 128, 256, gated=True), 32, _adam),
    _Workload(lambda: _Transformer(256, 8, 512, 256, gated=True), 4, _adam),
    _Workload(lambda: _Transformer(256, 4, 256, 256, gated=False), 16, _adam),
    _Workload(lambda: _Transformer(256, 2, 512, 256, gated=False), 4, _adam),
    _Workload(lambda: _Transformer(512, 8, 256, 8192, gated=False), 4, _adam),
    _Workload(lambda: _Transformer(768, 12, 512, 16384, gated=True), 1, _sgd),
    _Workload(lambda: _Convolutions(8, 8), 32, _sgd),
    _Workload(lambda: _Convolutions(16, 16), 64, _sgd),
    _Workload(lambda: _Convolutions(32, 8), 64, _sgd),
    _Workload(lambda: _Convolutions(64, 32), 32, _adam),
    _Workload(lambda: _Convolutions(96, 8), 64, _sgd),
    _Workload(lambda: _Convolutions(128, 16), 16, _sgd),
    _Workload(lambda: _Convolutions(32, 64), 2, _sgd),
    _Workload(lambda: _Grouped(32, 32), 16, _adam),
    _Workload(lambda: _Grouped(64, 16), 4, _adam),
    _Workload(lambda: _Grouped(128, 32), 8, _sgd),
    _Workload(lambda: _Spatial(16, 16, 3), 4, _sgd),
    _Workload(lambda: _Spatial(32, 1024, 1), 8, _adam),
    _Workload(lambda: _Tables(64, 1000), 64, _adam),
    _Workload(lambda: _Tables(256, 20_000), 256, _sgd),
    _Workload(lambda: _Recurrent(64, 16), 16, _adam),
    _Workload(lambda: _Recurrent(128, 32, nn.GRU), 8, _adam),
    _Workload(lambda: _Recurrent(256, 32), 32, _adam),
)


def calibrated(device: torch.device, *, on_progress: Callable[[float], None] = lambda _share: None) -> DeviceSpec:
    """Return a device of this machine with measured rates; a CPU computes with this process's threads.

    Args:
        device: the device.
        on_progress: called with the share that is done.

    Raises:
        EngineError: if torch's profiler cannot time the device.
        InputError: if it is an accelerator that the device table does not have.
    """
    formats = [one for one in useful_precisions(device.type) if one.dtype]
    calls: list[TimedCall] = []
    rests: list[float] = []
    with isolated():
        seed_all(0)
        for number, workload in enumerate(WORKLOADS):
            for precision in formats:
                try:
                    found, whole_s = _measured(workload, precision, device)
                except RuntimeError as error:
                    if not precision.is_reduced or devices.is_out_of_memory(error):
                        raise
                    # Some machines lack a kernel, as oneDNN lacks that of a 16-bit LSTM on CPUs with AVX2 alone.
                    continue
                calls += found
                rests.append((whole_s * _WATCHED_STEPS - sum(call.seconds for call in found)) / len(found))
            on_progress((number + 1) / len(WORKLOADS))
    rest = statistics.median(rests)
    # Watching each call takes longer than what Python and autograd do between calls.
    calls = [call for call in calls if call.work.operations or call.work.moved_bytes]
    calls = [replace(call, seconds=max(call.seconds + min(rest, 0.0), _LEAST_SHARE * call.seconds)) for call in calls]
    rates = MeasuredRates(
        samples=_samples(calls), alike=_alike(calls), call_s=max(rest, 0.0), recompute_s=_recompute_s(device)
    )
    if devices.is_accelerator(device):
        return replace(find_device(devices.device_name(device)), measured=rates)
    return DeviceSpec(
        name=devices.device_name(device),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        bandwidth=rates.bandwidth,
        flops={one: rates.highest_rate(one.dtype) for one in formats},
        source="measured",
        is_cpu=True,
        measured=rates,
    )


def _measured(workload: _Workload, precision: Precision, device: torch.device) -> tuple[list[TimedCall], float]:
    """Return the calls of some steps of a network, and the median seconds of a step that is not watched."""
    model = workload.make().to(device)
    batch, optimizer = model.inputs(workload.samples).to(device), workload.optimizer(model.parameters())

    def step() -> None:
        with computing_in(precision, device.type):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched() -> None:
        for _ in range(_WATCHED_STEPS):
            step()

    step()
    seconds = [devices.seconds_of(step, device) for _ in range(_WHOLE_STEPS)]
    calls = timed_calls(device, watched)
    return calls, statistics.median([*seconds, *(devices.seconds_of(step, device) for _ in range(_WHOLE_STEPS))])


def _recompute_s(device: torch.device) -> float:
    """Return the seconds that recomputing a unit takes besides its operators: that of a unit that computes nothing."""
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Identity() for _ in range(_IDLE_UNITS))).to(device)
    rows = torch.randn(8, 8, device=device)
    plan = Plan(storage=dict.fromkeys(map(str, range(1, 1 + _IDLE_UNITS)), DEFAULT_STORAGES[-1]))

    def step() -> None:
        model(rows).sum().backward()

    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_IDLE_STEPS):
        for recomputed, found in seconds.items():
            controls.apply(model, plan if recomputed else Plan())
            found.append(devices.seconds_of(step, device))
    controls.remove(model)
    kept, again = (statistics.median(found) for found in seconds.values())
    return max(again - kept, 0.0) / _IDLE_UNITS


def _alike(calls: Iterable[TimedCall]) -> dict[str, str]:
    """Return the operator of each kind that took most time, which stands for others of its kind."""
    seconds: dict[str, Counter[str]] = {}
    for call in calls:
        if not call.work.operations:
            seconds.setdefault(kind_of(call.work.operator), Counter())[call.work.operator] += call.seconds  # type: ignore[assignment]
    found = {kind: total.most_common(1)[0][0] for kind, total in seconds.items()}
    return {**found, PRODUCT: "aten.mm", OTHER: "aten.add"}


def _samples(calls: Iterable[TimedCall]) -> dict[str, dict[str, tuple[Sample, ...]]]:
    """Return calls by operator and format; the median of those that do about the same, since some are interrupted."""
    sorted_calls: dict[str, dict[str, dict[tuple[int, int], list[TimedCall]]]] = {}
    for call in calls:
        work = call.work
        formats = sorted_calls.setdefault(work.operator, {}).setdefault(work.dtype, {})
        formats.setdefault((_bin(work.operations), _bin(work.moved_bytes)), []).append(call)
    return {
        name: {dtype: tuple(_sample(own) for _, own in sorted(bins.items())) for dtype, bins in formats.items()}
        for name, formats in sorted(sorted_calls.items())
    }


def _bin(amount: float) -> int:
    return round(math.log(max(amount, 1.0), _BIN))


def _sample(calls: Sequence[TimedCall]) -> Sample:
    return Sample(
        statistics.fmean(call.work.operations for call in calls),
        statistics.fmean(call.work.moved_bytes for call in calls),
        max(statistics.median(call.seconds for call in calls), 1e-9),
    )
