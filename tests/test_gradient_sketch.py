"""Tests of sketches of gradients."""

from __future__ import annotations

import pytest
import torch

from autotune.profiling.gradient_sketch import sketches


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def norm(tensor: torch.Tensor | None) -> float:
    assert tensor is not None
    return float(torch.linalg.vector_norm(tensor.double()))


@pytest.mark.parametrize(
    "shape", [(64, 64), (65, 64), (256, 1024), (1000, 999), (4096, 4096), (3, 700_001), (1_000_000,), (7, 3, 5, 64)]
)
@pytest.mark.parametrize("kind", ["noise", "equal rows", "equal columns", "one column", "one row"])
def test_the_norm_of_a_sketch_is_that_of_the_gradient(shape: tuple[int, ...], kind: str):
    gradient = drawn(*shape)
    if kind == "equal rows":
        gradient[:] = gradient[:1].clone()
    elif kind == "equal columns":
        gradient[:] = gradient[..., :1].clone()
    elif kind == "one column" and gradient[..., 0].numel() > 50:
        gradient = torch.zeros(shape).index_fill_(-1, torch.tensor([1]), 1.0)
    elif kind == "one row":
        gradient = torch.cat([torch.zeros_like(gradient[1:]), gradient[:1]])
    (found,) = sketches([gradient])
    assert norm(found) == pytest.approx(norm(gradient), rel=0.1)


def test_sketches_are_linear_and_depend_on_values_alone():
    one, other = drawn(300, 500), drawn(300, 500, seed=1)
    first, second, difference, transposed, none = sketches([one, other, one - other, one.T.contiguous().T, None])
    torch.testing.assert_close(first - second, difference, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(transposed, first)
    assert none is None


def test_short_gradients_are_their_own_sketch():
    gradient = drawn(64, 64)
    (found,) = sketches([gradient])
    assert torch.equal(found, gradient.reshape(-1))


def test_sparse_and_complex_gradients_have_sketches():
    rows = torch.sparse_coo_tensor(torch.tensor([[3, 900]]), drawn(2, 16), (1000, 16), check_invariants=True)
    values = drawn(100, 100, dtype=torch.complex64)
    sparse, complex_ = sketches([rows, values])
    assert norm(sparse) == pytest.approx(norm(rows.to_dense()), rel=0.1)
    assert norm(complex_) == pytest.approx(norm(torch.view_as_real(values)), rel=0.1)


def test_infinite_gradients_have_infinite_sketches():
    gradient = drawn(100, 100)
    gradient[5, 5] = float("inf")
    (found,) = sketches([gradient])
    assert not torch.isfinite(found).all()


def test_sketches_do_not_depend_on_the_default_device():
    gradient = drawn(100, 100)
    expected = sketches([gradient])[0]
    with torch.device("meta"):
        found = sketches([gradient])[0]
    assert torch.equal(found, expected)
