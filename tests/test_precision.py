"""Tests of precision: the dtype of a unit's computation and of its output."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from autotune import Precision
from autotune.mechanics.precision import canonical, computing_in, excluded_precisions, useful_precisions

Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.INHERIT, torch.float32),
        (Precision.FP32, torch.float32),
        (Precision.BF16, torch.bfloat16),
        (Precision.FP16, torch.float16),
    ],
)
def test_matrix_products_run_in_the_precision_and_weights_stay_fp32(precision, dtype):
    layer = nn.Linear(4, 4)
    with computing_in(precision, "cpu"):
        output = layer(torch.ones(2, 4))
    assert output.dtype is dtype
    assert layer.weight.dtype is torch.float32
    output.sum().backward()
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.INHERIT, torch.float16),
        (Precision.FP32, torch.float32),
        (Precision.BF16, torch.bfloat16),
        (Precision.FP16, torch.float16),
    ],
)
def test_only_inherit_keeps_an_outer_autocast(precision, dtype):
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        with computing_in(precision, "cpu"):
            inside = layer(torch.ones(2, 4))
        outside = layer(torch.ones(2, 4))
    assert inside.dtype is dtype
    assert outside.dtype is torch.float16


def test_outer_autocast_is_restored_even_after_an_exception():
    with pytest.raises(KeyError, match="user"), computing_in(Precision.BF16, "cpu"):
        raise KeyError("user")
    assert not torch.is_autocast_enabled("cpu")


def test_only_16_bit_floating_tensors_are_cast():
    tree = {
        "half": torch.ones(2, dtype=torch.float16),
        "nested": [torch.ones(2, dtype=torch.bfloat16), (torch.ones(2, dtype=torch.float64), None)],
        "pair": Pair(torch.ones(1, dtype=torch.bfloat16), "text"),
        "whole": torch.ones(2, dtype=torch.int64),
        "flag": torch.ones(2, dtype=torch.bool),
        "number": 3,
    }
    result = canonical(tree)
    assert result["half"].dtype is torch.float32
    assert isinstance(result["nested"], list)
    assert result["nested"][0].dtype is torch.float32
    assert result["nested"][1][0] is tree["nested"][1][0]
    assert result["nested"][1][1] is None
    assert isinstance(result["pair"], Pair)
    assert result["pair"].first.dtype is torch.float32
    assert result["pair"].second == "text"
    assert result["whole"] is tree["whole"]
    assert result["flag"] is tree["flag"]
    assert result["number"] == 3


def test_fp32_tensor_is_returned_unchanged():
    tensor = torch.ones(2)
    assert canonical(tensor) is tensor


def test_cast_output_keeps_its_gradient():
    leaf = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    canonical(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2, dtype=torch.bfloat16))


def test_fp32_is_always_useful_and_first():
    useful = useful_precisions("cpu")
    assert useful[0] is Precision.FP32
    assert Precision.INHERIT not in useful


def test_every_16_bit_format_is_either_useful_or_excluded_with_a_reason():
    excluded = excluded_precisions("cpu")
    assert set(excluded) | set(useful_precisions("cpu")) == {Precision.FP32, Precision.BF16, Precision.FP16}
    assert not set(excluded) & set(useful_precisions("cpu"))
    for reason in excluded.values():
        assert "cpu" in reason


def test_device_is_probed_once():
    assert excluded_precisions("cpu") is excluded_precisions("cpu")


def test_probing_draws_no_random_numbers():
    excluded_precisions.cache_clear()
    before = torch.get_rng_state()
    excluded_precisions("cpu")
    assert torch.equal(torch.get_rng_state(), before)
