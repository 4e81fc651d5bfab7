"""A law of the bytes held between steps: a count equals that of all tensors, whatever has changed since the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autotune.profiling.held_bytes import Held, HeldBytes


def all_bytes(model: nn.Module, optimizer: Any) -> Held:
    own = [*model.parameters(), *model.buffers()]
    state = [tree_leaves([*entry.values()]) for entry in optimizer.state.values()]
    others = [one for leaves in state for one in leaves if isinstance(one, torch.Tensor)]
    others += [one for group in optimizer.param_groups for one in group["params"]]
    return Held(*(sum({id(one): one.nbytes for one in found}.values()) for found in ([*own, *others], own)))


def first_of(model: Any, optimizer: Any) -> Any:
    return optimizer.state[model[0].weight]


def replace_weight(model: Any, optimizer: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(5, 4))


def replace_owned(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][0] = model[0].weight = nn.Parameter(torch.zeros(6, 4))


def tie(model: Any, optimizer: Any) -> None:
    model[1].weight = model[0].weight


def grow_buffer(model: Any, optimizer: Any) -> None:
    model[1].seen = torch.cat([model[1].seen, torch.zeros(3)])


def grow_data(model: Any, optimizer: Any) -> None:
    model[0].bias.data = torch.zeros(9)


def keep_more(model: Any, optimizer: Any) -> None:
    first_of(model, optimizer)["slow"] = torch.zeros(4, 4)


def keep_another(model: Any, optimizer: Any) -> None:
    first_of(model, optimizer)["exp_avg"] = torch.zeros(7, 7)


def resize(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        first_of(model, optimizer)["exp_avg"].resize_(9, 9)


def keep_another_in_the_same_place(model: Any, optimizer: Any) -> None:
    state = first_of(model, optimizer)
    # The new object is often at the address of the old one.
    size = state.pop("exp_avg").numel()
    state["exp_avg"] = torch.zeros(size + 5)


def keep_history(model: Any, optimizer: Any) -> None:
    first_of(model, optimizer).setdefault("history", deque(maxlen=3)).append(torch.zeros(4))


def keep_a_number(model: Any, optimizer: Any) -> None:
    first_of(model, optimizer)["age"] = 3


def keep_a_weight(model: Any, optimizer: Any) -> None:
    first_of(model, optimizer)["again"] = model[0].weight


def forget(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


@pytest.mark.parametrize(
    "change",
    [
        replace_weight,
        replace_owned,
        tie,
        grow_buffer,
        grow_data,
        keep_more,
        keep_another,
        keep_another_in_the_same_place,
        resize,
        keep_history,
        keep_a_number,
        keep_a_weight,
        forget,
    ],
)
def test_count_after_any_change_is_that_of_all_tensors(change: Callable[[Any, Any], None]) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_buffer("seen", torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters())
    counts = HeldBytes(model, optimizer)
    assert counts.count() == all_bytes(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert counts.count() == all_bytes(model, optimizer)
    for _ in range(20):
        if optimizer.state:
            change(model, optimizer)
        assert counts.count() == all_bytes(model, optimizer)
