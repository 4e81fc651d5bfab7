"""Tests of gradient statistics: what the probe reads from a step, and what the monitor computes from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_jobs import squared_loss, vector_batches
from small_models import Perceptron
from torch import nn

from autotune import find_units
from autotune.cost_model.noise_scale import gradient_variance, noise_sample
from autotune.mechanics.cutting import num_samples, split, weights
from autotune.mechanics.gradient_stats import GradientMonitor, GradientProbe, ProbedStep
from autotune.mechanics.stepping import Update


def batch_of(samples: int, dtype: torch.dtype = torch.float32) -> Any:
    return next(vector_batches(3, size=samples, dtype=dtype))


def probed_step(
    model: nn.Module, update: Update, pieces: list[Any], loss: Any = squared_loss
) -> tuple[ProbedStep, float, list[float]]:
    """Return the probe's sample, the norm, and the factors on each micro-batch's gradient."""
    shares = weights([num_samples(piece) for piece in pieces])
    scale = update.loss_scale
    with GradientProbe(update.parameters) as probe:
        for piece, share in zip(pieces, shares, strict=True):
            probe.next_micro_batch()
            update.backward(loss(model, piece), share)
        norm = update.unscale()
    return probe.read(), norm, [share * scale for share in shares]


def gradient_squares(model: nn.Module, batch: Any, loss: Any = squared_loss) -> list[float]:
    gradients = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    return [float(gradient.double().square().sum()) for gradient in gradients]


@pytest.fixture
def model() -> Perceptron:
    torch.manual_seed(0)
    return Perceptron()


def update_of(model: nn.Module, *, scaled: bool = False) -> Update:
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=None, init_scale=2.0**10)
    update.scaled = scaled
    return update


# --------------------------------------------------------------------------------------------------- the probe


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_norms_of_micro_batches_and_total_match_manual_computation(model, scaled, k):
    batch = batch_of(7)
    pieces = split(batch, k)
    by_hand = [gradient_squares(model, piece) for piece in pieces]
    whole = gradient_squares(model, batch)
    update = update_of(model, scaled=scaled)
    probed, norm, scales = probed_step(model, update, pieces)
    assert [id(p) for p in probed.parameters] == [id(p) for p in model.parameters()]
    assert len(probed.micro) == k
    for row, expected, scale in zip(probed.micro, by_hand, scales, strict=True):
        assert [square / scale**2 for square in row] == pytest.approx(expected, rel=1e-5)
    assert probed.whole == pytest.approx(whole, rel=1e-5)
    assert norm == pytest.approx(math.sqrt(sum(whole)), rel=1e-5)


def hooks_of(model: nn.Module) -> list[Any]:
    return [parameter._backward_hooks for parameter in model.parameters() if parameter._backward_hooks]


def test_hooks_exist_only_during_the_step(model):
    with GradientProbe(list(model.parameters())):
        assert len(hooks_of(model)) == 4
    assert hooks_of(model) == []


def test_hooks_are_removed_even_if_the_step_raises(model):
    with pytest.raises(KeyError, match="user"), GradientProbe(list(model.parameters())):
        raise KeyError("user")
    assert hooks_of(model) == []


def test_probed_step_gives_a_bit_identical_gradient(model):
    pieces = split(batch_of(7), 3)
    plain, update = [], update_of(model)
    for piece, share in zip(pieces, weights([num_samples(piece) for piece in pieces]), strict=True):
        update.backward(squared_loss(model, piece), share)
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    update.discard()
    probed_step(model, update, pieces)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), plain, strict=True))


def test_shared_parameter_has_one_norm_of_its_summed_gradient():
    model = Perceptron()
    model.layers[1].weight = model.layers[0].weight
    batch = batch_of(4)
    by_hand = gradient_squares(model, batch)
    probed, _, _ = probed_step(model, update_of(model), [batch])
    assert len(probed.parameters) == 3
    assert probed.micro[0] == pytest.approx(by_hand, rel=1e-5)


def test_parameter_without_gradient_in_a_micro_batch_counts_as_zero_there(model):
    def loss(model: Any, batch: Any) -> torch.Tensor:
        reached = model.layers[0] if float(batch[0][0, 0]) < 0 else model.layers[1]
        return reached(batch[0]).square().mean()

    pieces = [(torch.full((2, 3), -1.0), None), (torch.full((2, 3), 1.0), None)]
    probed, _, _ = probed_step(model, update_of(model), pieces, loss)
    assert [value > 0 for value in probed.micro[0]] == [True, True, False, False]
    assert [value > 0 for value in probed.micro[1]] == [False, False, True, True]


def test_frozen_parameters_and_those_without_gradient_are_ignored(model):
    model.layers[0].weight.requires_grad_(False)
    loss = lambda model, batch: model.layers[0](batch[0]).square().mean()  # noqa: E731
    probed, _, _ = probed_step(model, update_of(model), [batch_of(2)], loss)
    assert [id(p) for p in probed.parameters] == [id(model.layers[0].bias)]


def test_step_without_gradients_gives_no_sample(model):
    with GradientProbe(list(model.parameters())) as probe:
        pass
    assert probe.read() == ProbedStep(parameters=(), sizes=(), micro=(), whole=(), tiny=(), present=())


def test_fp64_model_can_be_probed():
    model = Perceptron().double()
    batch = batch_of(4, torch.float64)
    by_hand = gradient_squares(model, batch)
    probed, _, _ = probed_step(model, update_of(model), [batch])
    assert probed.whole == pytest.approx(by_hand, rel=1e-5)
    assert probed.micro[0] == pytest.approx(by_hand, rel=1e-5)


# ----------------------------------------------------------------------------------------------- the underflow

SMALLEST = 2.0**-24


def underflow_of(values: list[torch.Tensor]) -> tuple[float, ...]:
    """Return the underflow of parameters with the given gradients."""
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
    with GradientProbe(parameters) as probe:
        probe.next_micro_batch()
        sum((p * value).sum() for p, value in zip(parameters, values, strict=True)).backward()
    probed = probe.read()
    return tuple(tiny / max(present, 1.0) for tiny, present in zip(probed.tiny, probed.present, strict=True))


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ([1.0, 1.0, 1.0, 1.0], 0.0),
        ([SMALLEST, -SMALLEST], 0.0),
        ([SMALLEST * 0.99, 1.0], 0.5),
        ([-SMALLEST * 0.5, SMALLEST * 0.25, 1e-30, -1.0], 0.75),
        ([0.0, 0.0, 0.0, SMALLEST / 2], 1.0),
        ([0.0, SMALLEST / 2, 1.0, 1.0], 1 / 3),
        ([0.0, 0.0], 0.0),
    ],
)
def test_underflow_is_the_share_of_nonzero_entries_that_fp16_cannot_represent(values, share):
    assert underflow_of([torch.tensor(values)])[0] == pytest.approx(share, rel=1e-6)


@given(st.lists(st.floats(-(2.0**-20), 2.0**-20, width=32), min_size=1, max_size=50), st.integers(1, 3))
def test_underflow_of_small_parameters_is_exact_and_stored_separately(values, copies):
    tensor = torch.tensor(values)
    magnitudes = tensor.abs()
    expected_some = int((magnitudes > 0).sum())
    expected_tiny = int(((magnitudes > 0) & (magnitudes < SMALLEST)).sum())
    seen = underflow_of([tensor, torch.ones(3)] * copies)
    assert len(seen) == 2 * copies
    for index in range(copies):
        assert seen[2 * index] == pytest.approx(expected_tiny / max(expected_some, 1), abs=1e-6)
        assert seen[2 * index + 1] == 0


def test_underflow_of_a_large_parameter_is_estimated_to_two_digits():
    generator = torch.Generator().manual_seed(0)
    values = torch.where(torch.rand(300, 300, generator=generator) < 0.3, SMALLEST / 2, 1.0)
    assert underflow_of([values])[0] == pytest.approx(0.3, abs=0.05)


# ------------------------------------------------------------------------------------------------- the monitor


def observed(model: nn.Module, k: int, *, scaled: bool = False, samples: int = 8) -> GradientMonitor:
    monitor = GradientMonitor(model, find_units(model))
    pieces = split(batch_of(samples), k)
    probed, norm, scales = probed_step(model, update_of(model, scaled=scaled), pieces)
    monitor.observe(probed, step=5, norm=norm, micro_samples=[num_samples(piece) for piece in pieces], scales=scales)
    return monitor


@pytest.mark.parametrize("scaled", [False, True])
def test_statistics_match_manual_computation(model, scaled):
    batch = batch_of(8)
    micro = [sum(gradient_squares(model, piece)) for piece in split(batch, 4)]
    whole = gradient_squares(model, batch)
    sample = noise_sample(micro, [2] * 4, sum(whole))
    monitor = observed(model, 4, scaled=scaled)
    statistics = monitor.state.latest
    assert statistics.norm == pytest.approx(math.sqrt(sum(whole)), rel=1e-5)
    assert statistics.variance == pytest.approx(gradient_variance(micro, sum(whole)), rel=1e-4)
    assert monitor.state.average.trace == pytest.approx(sample.trace, rel=1e-4)
    assert monitor.state.average.square == pytest.approx(sample.square, rel=1e-4)
    assert statistics.noise_scale == monitor.state.average.noise_scale
    assert statistics.noise_scale_age_steps == 0


@pytest.mark.parametrize("k", [1, 4])
def test_unit_rms_is_the_rms_of_its_parameters(model, k):
    whole = gradient_squares(model, batch_of(8))
    per_unit = observed(model, k).state.latest.per_unit
    assert list(per_unit) == ["layers.0", "layers.1"]
    for unit, squares in zip(per_unit.values(), (whole[:2], whole[2:]), strict=True):
        assert unit.rms == pytest.approx(math.sqrt(sum(squares) / 12), rel=1e-5)


def test_unit_signal_to_noise_uses_only_its_own_gradients(model):
    batch = batch_of(8)
    pieces = [gradient_squares(model, piece) for piece in split(batch, 4)]
    whole = gradient_squares(model, batch)
    per_unit = observed(model, 4).state.latest.per_unit
    for unit, columns in zip(per_unit.values(), (slice(0, 2), slice(2, 4)), strict=True):
        sample = noise_sample([sum(row[columns]) for row in pieces], [2] * 4, sum(whole[columns]))
        assert sample.trace > 0
        expected = max(sample.square, 0.0) / (sample.trace / 8)
        assert unit.signal_to_noise == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_noise_and_variance_are_unknown_with_one_micro_batch(model):
    statistics = observed(model, 1).state.latest
    assert statistics.norm > 0
    assert statistics.noise_scale is None
    assert statistics.noise_scale_age_steps is None
    assert statistics.variance is None
    assert [unit.signal_to_noise for unit in statistics.per_unit.values()] == [None, None]


def test_variance_of_uneven_micro_batches_uses_their_weights(model):
    pieces = split(batch_of(7), 3)
    shares = weights([num_samples(piece) for piece in pieces])
    vectors = []
    for piece in pieces:
        gradients = torch.autograd.grad(squared_loss(model, piece), list(model.parameters()))
        vectors.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    mean = sum(share * vector for share, vector in zip(shares, vectors, strict=True))
    spread = sum(share * float((vector - mean).square().sum()) for share, vector in zip(shares, vectors, strict=True))
    # For equal shares 1/k this is equation 7: a mean square distance times k/(k-1).
    direct = spread / (1 - sum(share**2 for share in shares))
    assert observed(model, 3, samples=7).state.latest.variance == pytest.approx(direct, rel=1e-3)


def test_nonfinite_gradient_is_ignored(model):
    monitor = observed(model, 4)
    before = monitor.state.latest, monitor.state.average
    batch = batch_of(8)
    batch[0][3, 0] = math.nan
    pieces = split(batch, 4)
    probed, norm, scales = probed_step(model, update_of(model), pieces)
    assert math.isnan(norm)
    monitor.observe(probed, step=9, norm=norm, micro_samples=[2] * 4, scales=scales)
    assert (monitor.state.latest, monitor.state.average) == before


def test_noise_scale_age_counts_steps_since_the_last_sample(model):
    monitor = observed(model, 4)
    assert [monitor.aged(step).noise_scale_age_steps for step in (5, 6, 15)] == [0, 1, 10]
    pieces = [batch_of(8)]
    probed, norm, scales = probed_step(model, update_of(model), pieces)
    learnt = monitor.state.latest
    monitor.observe(probed, step=12, norm=norm, micro_samples=[8], scales=scales)
    assert monitor.state.latest.noise_scale == learnt.noise_scale
    assert monitor.state.latest.variance == learnt.variance
    assert monitor.state.latest.noise_scale_age_steps == 7
    assert monitor.aged(20).noise_scale_age_steps == 15


def test_age_is_unknown_before_the_first_sample(model):
    monitor = GradientMonitor(model, find_units(model))
    assert monitor.aged(3) is None
    assert observed(model, 1).aged(30).noise_scale_age_steps is None


def test_unit_underflow_is_the_share_of_all_its_nonzero_entries():
    class Mixed(nn.Module):
        """A unit with 4 tiny gradient entries in one parameter, and 1 large one among zeros in the other."""

        def __init__(self) -> None:
            super().__init__()
            self.tiny, self.sparse = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(12))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return factor * (self.tiny.sum() * SMALLEST / 2 + self.sparse[0])

    model = nn.ModuleDict({"mixed": Mixed()})
    monitor = GradientMonitor(model, find_units(model))
    with GradientProbe(list(model.parameters())) as probe:
        probe.next_micro_batch()
        model["mixed"](torch.ones(())).backward()
    monitor.observe(probe.read(), step=0, norm=1.0, micro_samples=[1], scales=[1.0])
    assert monitor.state.latest.per_unit["mixed"].underflow_frac == pytest.approx(4 / 5)


def test_step_of_one_micro_batch_needs_no_hooks(model: Perceptron) -> None:
    update, seen = update_of(model, scaled=True), []
    for whole in (False, True):
        monitor = GradientMonitor(model, ())
        with GradientProbe(update.parameters, whole=whole) as probe:
            probe.next_micro_batch()
            hooked = [parameter for parameter in model.parameters() if parameter._backward_hooks]
            assert bool(hooked) != whole
            update.backward(squared_loss(model, batch_of(6)), 1.0)
            norm = update.unscale()
        sample = probe.read()
        assert len(sample.micro) == (not whole)
        monitor.observe(sample, step=3, norm=norm, micro_samples=[6], scales=[update.loss_scale])
        update.discard()
        seen.append(monitor.state)
    assert seen[0] == seen[1]
    assert seen[0].latest is not None


@pytest.mark.parametrize("pieces", [1, 2])
def test_sparse_gradients_are_read(pieces: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1))
    update, batch = update_of(model), torch.tensor([[1, 2], [3, 3]])
    with GradientProbe(update.parameters, whole=pieces == 1) as probe:
        for piece in batch.chunk(pieces):
            probe.next_micro_batch()
            update.backward(model(piece).square().mean(), len(piece) / 2)
    dense = [p.grad.to_dense() for p in model.parameters()]
    found = probe.read()
    assert found.whole == pytest.approx([float(gradient.square().sum()) for gradient in dense], rel=1e-5)
    assert found.present[0] == 12.0
    assert len(found.micro) == (0 if pieces == 1 else 2)
