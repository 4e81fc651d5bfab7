"""Tests of operation counts against manual counts, and of the device's peak rate."""

import time

import torch
import torch.nn.functional as F
from torch import nn

from autotune.mechanics.flops import matmul_peak, step_flops


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_operations_of_two_layers_are_counted_exactly():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    forward = 2 * (5 * 4 * 8 + 5 * 8 * 3)
    # Gradients of both weights and of the second layer's input; the first layer's input needs none.
    backward = 2 * (5 * 4 * 8 + 2 * 5 * 8 * 3)
    assert step_flops(model, mean_square, torch.ones(5, 4)) == forward + backward


def test_convolution_is_counted_by_its_output():
    model = nn.Conv2d(3, 6, 3, padding=1, bias=False)
    forward = 2 * (2 * 6 * 8 * 8) * (3 * 3 * 3)
    assert step_flops(model, mean_square, torch.ones(2, 3, 8, 8)) == 2 * forward


def test_fused_attention_is_counted():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.project(x)
            return F.scaled_dot_product_attention(x, x, x)

    projected = step_flops(nn.Linear(8, 8), mean_square, torch.ones(2, 1, 16, 8))
    product = 2 * (2 * 16 * 16 * 8)
    # Two products in the forward pass, four in the backward pass.
    assert step_flops(Attention(), mean_square, torch.ones(2, 1, 16, 8)) == projected + 6 * product


def test_doubled_work_counts_twice_and_leaves_no_gradient():
    model = nn.Linear(4, 8)
    once, twice = (step_flops(model, mean_square, torch.ones(size, 4)) for size in (3, 6))
    assert twice == 2 * once
    assert model.weight.grad is None


def test_measured_peak_rate_exceeds_that_of_thin_products():
    left, right = torch.ones(1, 64), torch.ones(64, 1)
    began = time.perf_counter()
    for _ in range(100):
        left @ right
    assert matmul_peak(torch.float32) > 100 * 2 * 64 / (time.perf_counter() - began)
