"""Tests of precision: the dtype of a unit's computation and of its output."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from autotune import Precision
from autotune.errors import InputError
from autotune.mechanics import known_precisions as known
from autotune.mechanics import precision as precision_module
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


def test_device_is_probed_once(measuring_precisions):
    before = torch.get_rng_state()
    excluded = excluded_precisions("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert excluded_precisions("cpu") is excluded
    # Every 16-bit format is either useful, after fp32, or excluded with a reason.
    useful = useful_precisions("cpu")
    assert useful[0] is Precision.FP32
    assert sorted([*useful, *excluded]) == ["bf16", "fp16", "fp32"]
    for reason in excluded.values():
        assert "cpu" in reason or "bf16 is fast" in reason


def test_fp16_is_not_offered_beside_a_fast_bf16_unless_it_is_named(measuring_precisions, monkeypatch):
    monkeypatch.setattr(precision_module, "_ratio", lambda *_: 0.5)
    assert useful_precisions("cpu") == (Precision.FP32, Precision.BF16)
    assert "AUTOTUNE_PRECISIONS=fp32,bf16,fp16" in excluded_precisions("cpu")[Precision.FP16]


@pytest.mark.parametrize(
    ("named", "useful"),
    [
        ("fp32", ["fp32"]),
        ("bf16", ["fp32", "bf16"]),
        (" fp16 , fp32", ["fp32", "fp16"]),
        ("bf16,fp16", ["fp32", "bf16", "fp16"]),
    ],
)
def test_the_user_names_the_useful_precisions(named, useful, measuring_precisions, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_PRECISIONS", named)
    monkeypatch.setattr(precision_module, "_ratio", pytest.fail)
    assert list(map(str, useful_precisions("cpu"))) == useful
    assert all("not among AUTOTUNE_PRECISIONS" in reason for reason in excluded_precisions("cpu").values())


@pytest.mark.parametrize("named", ["fp4", "bf16 fp16", "bf16,", "inherit"])
def test_a_name_that_is_no_precision_is_refused(named, measuring_precisions, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_PRECISIONS", named)
    with pytest.raises(InputError, match=r"AUTOTUNE_PRECISIONS: names .* \(allowed: fp32, bf16, fp16, fp8\)"):
        excluded_precisions("cpu")


def test_what_another_process_has_found_is_not_measured_again(measuring_precisions, monkeypatch):
    measured = excluded_precisions("cpu")
    told = known.to_json()
    known.forget()
    monkeypatch.setattr(precision_module, "_ratio", pytest.fail)
    known.keep_all(told)
    assert excluded_precisions("cpu") == measured
    known.keep_all({"cpu": {"fp16": "slow elsewhere"}})
    assert useful_precisions("cpu") == (Precision.FP32, Precision.BF16)
