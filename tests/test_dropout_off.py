"""Tests of turning off dropout that models apply by functions."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune.mechanics import dropout_off

ROWS = torch.ones(2, 2, 8, 8)


def dropped(rows: torch.Tensor) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5)
    return F.dropout(rows, 0.5, True, True) + F.feature_alpha_dropout(rows, training=True) + F.dropout2d(attended)


def draws(function: object = dropped) -> bool:
    """Return whether a function draws random numbers."""
    before = torch.get_rng_state()
    assert callable(function)
    function(ROWS.clone())
    return not torch.equal(before, torch.get_rng_state())


def test_functions_are_as_they_were_at_the_end() -> None:
    functions = F.dropout, F.scaled_dot_product_attention
    ends = [dropout_off.turn_off() for _ in range(2)]
    assert F.dropout is not functions[0]
    ends[0]()
    ends[0]()
    assert not draws()
    ends[1]()
    assert (F.dropout, F.scaled_dot_product_attention) == functions
    assert draws()


def test_functions_that_were_replaced_meanwhile_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    # The function that is there now is put back at the end.
    monkeypatch.setattr(F, "dropout", F.dropout)
    end = dropout_off.turn_off()
    inner = F.dropout
    own = F.dropout = lambda *args, **kwargs: inner(*args, **kwargs)  # type: ignore[assignment]
    end()
    assert F.dropout is own
    assert draws()


def test_other_threads_keep_their_dropout() -> None:
    end, found = dropout_off.turn_off(), list[bool]()
    thread = threading.Thread(target=lambda: found.append(draws()))
    thread.start()
    thread.join()
    end()
    assert found == [True]


def test_layers_that_use_the_functions_have_no_dropout() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.5, batch_first=True)
    end = dropout_off.turn_off()
    assert not draws(lambda _: layer(torch.ones(2, 3, 8)))
    end()
    assert draws(lambda _: layer(torch.ones(2, 3, 8)))


def test_recomputation_in_the_backward_pass_has_no_dropout_either() -> None:
    end, rows = dropout_off.turn_off(), ROWS.clone().requires_grad_()
    checkpoint(lambda one: F.dropout(one).sin(), rows, use_reentrant=False, preserve_rng_state=False).sum().backward()
    end()
    assert torch.equal(rows.grad, ROWS.cos())


@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_is_compiled_meanwhile_has_dropout_again(fullgraph: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dropped, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        end = dropout_off.turn_off()
        assert not draws(compiled)
        end()
        assert draws(compiled)
