"""Tests of stepping: the optimizer gets the gradient of the whole batch however it is split."""

from __future__ import annotations

import copy
import math
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small_models import Perceptron
from torch import nn
from torch.utils._pytree import tree_flatten

from autotune import JobError
from autotune.cost_model.paper_equations import clipped
from autotune.mechanics.cutting import WholeTensors, count_items, num_samples, split, weights
from autotune.mechanics.stepping import Update

Pair = namedtuple("Pair", "inputs targets")

IGNORED = -100


# -------------------------------------------------------------------------------------------------- splitting


@given(st.integers(1, 40), st.integers(1, 50))
def test_pieces_differ_by_at_most_one_sample_and_are_complete_and_in_order(samples, pieces):
    batch = torch.arange(samples)
    cut = split(batch, pieces)
    sizes = [len(piece) for piece in cut]
    assert len(cut) == min(pieces, samples)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(cut), batch)


@given(st.integers(1, 40), st.integers(1, 50))
def test_largest_piece_is_the_batch_over_k_rounded_up(samples, pieces):
    assert max(len(piece) for piece in split(torch.arange(samples), pieces)) == math.ceil(
        samples / min(pieces, samples)
    )


def test_pieces_are_views_not_copies():
    batch = torch.zeros(4, 2)
    for piece in split(batch, 2):
        piece += 1
    assert torch.equal(batch, torch.ones(4, 2))


def test_single_piece_is_the_batch_itself():
    batch = {"inputs": torch.ones(3)}
    assert split(batch, 1) == [batch]
    assert split(batch, 1)[0] is batch


@pytest.mark.parametrize(
    "batch",
    [
        (torch.arange(6), torch.arange(6) * 10),
        [torch.arange(6), torch.arange(6) * 10],
        {"inputs": torch.arange(6), "targets": torch.arange(6) * 10},
        Pair(torch.arange(6), torch.arange(6) * 10),
        {"deep": [(torch.arange(6),), {"more": torch.arange(6) * 10}]},
    ],
    ids=["tuple", "list", "dict", "namedtuple", "nested"],
)
def test_piece_has_the_structure_of_its_batch_and_keeps_samples_together(batch):
    shape = tree_flatten(batch)[1]
    for index, piece in enumerate(split(batch, 3)):
        assert type(piece) is type(batch)
        piece_leaves, piece_shape = tree_flatten(piece)
        assert piece_shape == shape
        first, second = piece_leaves
        assert first.tolist() == [2 * index, 2 * index + 1]
        assert torch.equal(second, first * 10)


def test_values_that_are_not_per_sample_are_passed_whole_to_every_piece():
    table = torch.arange(5)
    scalar = torch.tensor(3.0)
    batch = {"inputs": torch.arange(6), "table": table, "scalar": scalar, "name": "x", "none": None, "k": 6}
    for piece in split(batch, 2):
        assert piece["table"] is table
        assert piece["scalar"] is scalar
        assert (piece["name"], piece["none"], piece["k"]) == ("x", None, 6)
        assert len(piece["inputs"]) == 3


@pytest.mark.parametrize("batch", [torch.tensor(1.0), {}, (), None, "text", [1, 2], {"inputs": torch.ones(0, 3)}])
def test_batch_without_samples_is_rejected(batch):
    with pytest.raises(JobError, match=r"a batch has no samples \(allowed: tensors with samples in dimension 0\)"):
        num_samples(batch)
    with pytest.raises(JobError, match="a batch has no samples"):
        split(batch, 2)


# ------------------------------------------------------------------------------------------ counting, weighing


def test_items_are_samples_unless_the_job_counts_them():
    batch = (torch.ones(6, 4), torch.ones(6))
    assert count_items(batch, None) == 6
    assert count_items(batch, lambda batch: batch[0].numel()) == 24


@pytest.mark.parametrize("value", [0, 3, 3.0, np.int64(3), torch.tensor(3), torch.tensor([3.0])])
def test_whole_number_of_any_type_is_a_valid_count(value):
    result = count_items(torch.ones(4), lambda batch: value)
    assert result == int(value)
    assert type(result) is int


@pytest.mark.parametrize(
    "value",
    [
        -1,
        1.5,
        True,
        None,
        "3",
        "many",
        float("nan"),
        float("inf"),
        [3],
        torch.tensor([1, 2]),
        torch.tensor(True),
        torch.tensor(float("nan")),
    ],
    ids=str,
)
def test_count_that_is_not_a_whole_number_is_rejected_in_one_line(value):
    with pytest.raises(JobError, match=r"^count: count returned .* \(allowed: a whole number >= 0\)$"):
        count_items(torch.ones(4), lambda batch: value)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_weights_are_proportional_to_the_items(counts):
    shares = weights(counts)
    if sum(counts) == 0:
        assert shares == [0.0] * len(counts)
    else:
        assert sum(shares) == pytest.approx(1, rel=1e-12)
        assert shares == [count / sum(counts) for count in counts]


# ------------------------------------------------------------------------------------------- the same gradient


def ragged_case(generator: np.random.Generator, dtype: torch.dtype) -> tuple[Perceptron, Any, int]:
    """Return a model, a batch with some items ignored, and a k that may exceed the samples."""
    width, samples, length = (int(generator.integers(low, high)) for low, high in ((8, 17), (1, 13), (4, 9)))
    torch.manual_seed(int(generator.integers(2**31)))
    model = Perceptron(width).to(dtype)
    targets = torch.randint(width, (samples, length))
    targets[torch.rand(samples, length) < generator.uniform(0, 0.8)] = IGNORED
    if generator.random() < 0.5:
        # Samples without items lead to pieces without items.
        targets[: int(generator.integers(samples + 1))] = IGNORED
    batch = {"inputs": torch.randn(samples, length, width, dtype=dtype), "nested": [targets], "table": [1, "x"]}
    return model, batch, int(generator.integers(1, samples + 3))


def item_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["nested"][0].flatten(), ignore_index=IGNORED)


def item_count(batch: Any) -> int:
    return int((batch["nested"][0] != IGNORED).sum())


def accumulated(model: nn.Module, batch: Any, k: int, *, autocast: bool) -> tuple[torch.Tensor, list[int]]:
    """Return the gradient that the optimizer would get, and the items of each piece."""
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=None)
    pieces = split(batch, k)
    counts = [count_items(piece, item_count) for piece in pieces]
    for piece, weight in zip(pieces, weights(counts), strict=True):
        # A mean over zero items is not a number, so such pieces have weight 0 and are left out.
        if weight > 0:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = item_loss(model, piece)
            update.backward(loss, weight)
    update.unscale()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([gradient.reshape(-1) for gradient in gradients]), counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [(torch.float64, False, 1e-12), (torch.float32, False, 1e-5), (torch.float32, True, 2e-2)],
    ids=["fp64", "fp32", "bf16"],
)
def test_accumulated_gradient_equals_that_of_the_whole_batch_in_1000_uneven_cases(dtype, autocast, bound):
    generator = np.random.default_rng(0)
    errors, empty_pieces, short_batches, without_items, several = [], 0, 0, 0, 0
    while len(errors) < 1000:
        model, batch, k = ragged_case(generator, dtype)
        exact = copy.deepcopy(model).double()
        gradient, counts = accumulated(model, batch, k, autocast=autocast)
        if sum(counts) == 0:
            assert not gradient.any()
            without_items += 1
            continue
        item_loss(exact, {**batch, "inputs": batch["inputs"].double()}).backward()
        expected = torch.cat([parameter.grad.reshape(-1) for parameter in exact.parameters()])
        errors.append(float((gradient.double() - expected).norm() / expected.norm()))
        empty_pieces += 0 in counts
        short_batches += k > num_samples(batch)
        several += len(counts) > 1
    assert max(errors) <= bound
    # Each kind of case occurred.
    assert min(empty_pieces, short_batches, without_items) >= 20
    assert several >= 500


def test_mean_of_means_would_differ():
    generator = np.random.default_rng(1)
    worst = 0.0
    for _ in range(50):
        model, batch, k = ragged_case(generator, torch.float64)
        pieces = [piece for piece in split(batch, k) if item_count(piece)]
        if len(pieces) < 2:
            continue
        exact = copy.deepcopy(model)
        item_loss(exact, batch).backward()
        for piece in pieces:
            (item_loss(model, piece) / len(pieces)).backward()
        expected = torch.cat([parameter.grad.reshape(-1) for parameter in exact.parameters()])
        seen = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        worst = max(worst, float((seen - expected).norm() / expected.norm()))
    assert worst > 0.1


# -------------------------------------------------------------------------------------------------- the update


def update_of(model: nn.Module, **options: Any) -> Update:
    settings = {"clip_norm": None, **options}
    return Update(torch.optim.SGD(model.parameters(), lr=0.5), **settings)


def with_gradient(update: Update, gradient: float) -> None:
    """Accumulate this gradient in every parameter."""
    update.backward(sum((p * gradient).sum() for p in update.parameters), 1.0)


def test_update_is_made_once_and_clears_the_gradients():
    model = Perceptron()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    update = update_of(model)
    with_gradient(update, 1.0)
    assert update.finish(update.unscale())
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old - 0.5)
        assert parameter.grad is None


def test_norm_covers_all_parameters_together():
    model = Perceptron()
    update = update_of(model)
    with_gradient(update, 2.0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert update.unscale() == pytest.approx(2 * math.sqrt(count), rel=1e-6)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clipping_scales_the_gradient_by_the_factor_of_equation_12(size, limit):
    model = Perceptron()
    update = update_of(model, clip_norm=limit)
    with_gradient(update, size)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = update.unscale()
    update.clip(norm)
    for parameter, old in zip(model.parameters(), before, strict=True):
        # torch adds 1e-6 to the norm.
        torch.testing.assert_close(parameter.grad, old * clipped(norm, limit), rtol=1e-5 + 1e-6 / norm, atol=0)
        if norm <= limit:
            assert torch.equal(parameter.grad, old)


def test_gradients_are_not_clipped_without_a_limit():
    model = Perceptron()
    update = update_of(model, clip_norm=None)
    with_gradient(update, 1e10)
    update.clip(update.unscale())
    assert all(torch.equal(p.grad, torch.full_like(p, 1e10)) for p in model.parameters())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradient_never_reaches_a_weight(scaled, bad):
    model = Perceptron()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    update = update_of(model, clip_norm=1.0)
    update.scaled = scaled
    with_gradient(update, 1.0)
    with_gradient(update, bad)
    norm = update.unscale()
    assert not math.isfinite(norm)
    update.clip(norm)
    assert not update.finish(norm)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
    with_gradient(update, 1.0)
    assert update.finish(update.unscale())


@pytest.mark.parametrize("scaled", [False, True])
def test_abandoned_step_changes_neither_weights_nor_the_scale(scaled):
    model = Perceptron()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    update = update_of(model)
    update.scaled = scaled
    state = update.state_dict()
    with_gradient(update, 1.0)
    assert not update.finish(update.unscale(), abandon=True)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert update.state_dict()["scale"] == state["scale"]
    assert update.state_dict()["_growth_tracker"] == state["_growth_tracker"]


@pytest.mark.parametrize("scaled", [False, True])
def test_step_without_a_backward_pass_does_nothing(scaled):
    model = Perceptron()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    update = update_of(model, clip_norm=1.0)
    update.scaled = scaled
    norm = update.unscale()
    assert norm == 0.0
    update.clip(norm)
    assert not update.finish(norm)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_discarding_clears_the_accumulated_gradients():
    model = Perceptron()
    update = update_of(model)
    with_gradient(update, 1.0)
    update.discard()
    assert all(parameter.grad is None for parameter in model.parameters())
    with_gradient(update, 3.0)
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in model.parameters())


def test_loss_scale_state_can_be_saved_and_restored():
    model = Perceptron()
    update = update_of(model, init_scale=8.0, growth_interval=2)
    update.scaled = True
    with_gradient(update, math.inf)
    update.finish(update.unscale())
    with_gradient(update, 1.0)
    update.finish(update.unscale())
    state = copy.deepcopy(update.state_dict())
    assert update.loss_scale == 4.0
    with_gradient(update, 1.0)
    update.finish(update.unscale())
    assert update.loss_scale == 8.0
    update.load_state_dict(state)
    assert update.loss_scale == 4.0
    with_gradient(update, 1.0)
    update.finish(update.unscale())
    assert update.loss_scale == 8.0


def test_parameters_without_gradient_are_ignored():
    model = Perceptron()
    update = update_of(model, clip_norm=1.0)
    update.backward(model.layers[0].weight.sum(), 1.0)
    norm = update.unscale()
    assert norm == pytest.approx(3.0)
    update.clip(norm)
    before = model.layers[1].weight.detach().clone()
    assert update.finish(norm)
    assert torch.equal(model.layers[1].weight, before)


def test_batch_of_a_custom_mapping_type_is_split_and_keeps_its_type():
    class Encoding(UserDict):
        pass

    batch = Encoding(ids=torch.arange(6).reshape(3, 2), extra={"mask": torch.ones(3)}, name="text")
    first, second = split(batch, 2)
    assert type(first) is Encoding
    assert first["ids"].tolist() == [[0, 1], [2, 3]]
    assert second["ids"].tolist() == [[4, 5]]
    assert second["extra"]["mask"].shape == (1,)
    assert first["name"] == second["name"] == "text"
    assert batch["ids"].shape == (3, 2)


def test_tensor_that_once_differed_from_the_batch_size_is_never_split():
    whole = WholeTensors()
    scales = torch.arange(6)
    whole.note({"rows": torch.zeros(8, 2), "scales": scales})
    pieces = whole.split({"rows": torch.zeros(6, 2), "scales": scales}, 2)
    assert [len(piece["rows"]) for piece in pieces] == [3, 3]
    assert all(torch.equal(piece["scales"], scales) for piece in pieces)


def test_tensors_that_always_matched_the_batch_size_are_split():
    whole = WholeTensors()
    for rows in (8, 6):
        whole.note([torch.zeros(rows, 2), torch.zeros(rows)])
    assert [len(piece[1]) for piece in whole.split([torch.zeros(6, 2), torch.zeros(6)], 3)] == [2, 2, 2]
