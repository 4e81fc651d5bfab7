"""What is copied, pickled, scripted or traced of a model that a tuner is attached to is what it is without one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_live import RESTLESS, seeded
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel

import autotune

STEPS = 6


class Mixes(nn.Module):
    """A block that every way of recording a program understands."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.outer(torch.tanh(self.inner(x)))


class Scaled(Mixes):
    """A block that its owner scales in copies of it, and that says what its copies hold."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "copied": True}


def network(block: type[Mixes] = Mixes) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), *(block() for _ in range(3)), nn.Linear(8, 1))


def names_in(module: nn.Module) -> list[list[str]]:
    return [sorted(vars(part)) for part in module.modules()]


def gradients(module: nn.Module, x: torch.Tensor) -> list[Any]:
    found = module(x).square().mean()
    return [found.item(), *(one.tolist() for one in torch.autograd.grad(found, list(module.parameters())))]


def a_shallow_copy(model: nn.Module, x: torch.Tensor) -> list[Any]:
    other = copy.copy(model[1])
    other.scale = 3.0
    assert other(model[0](x)).grad_fn is not None
    return [names_in(other), other(model[0](x)).tolist(), model[1].scale]


def a_deep_copy(model: nn.Module, x: torch.Tensor) -> list[Any]:
    other = copy.deepcopy(model)
    found = [names_in(other), gradients(other, x)]
    with torch.no_grad():
        other[1].inner.weight.zero_()
    return [*found, gradients(model, x), names_in(copy.copy(other[1])), names_in(copy.deepcopy(model[2]))]


def an_average(model: nn.Module, x: torch.Tensor) -> list[Any]:
    average = AveragedModel(model)
    average.update_parameters(model)
    return [names_in(average), gradients(average.module, x)]


def a_pickle(model: nn.Module, x: torch.Tensor) -> list[Any]:
    kept = pickle.dumps(model)
    assert b"autotune" not in kept
    other = pickle.loads(kept)
    return [names_in(other), gradients(other, x)]


def a_script(model: nn.Module, x: torch.Tensor) -> list[Any]:
    scripted = torch.jit.script(model)
    # Torch optimises a script while it runs, and each run may round in another way.
    return [scripted.code, round(scripted(x).sum().item(), 4)]


def a_scripted_block(model: nn.Module, x: torch.Tensor) -> list[Any]:
    return [torch.jit.script(model[1])(model[0](x)).tolist()]


def a_trace(model: nn.Module, x: torch.Tensor) -> list[Any]:
    traced = torch.jit.trace(model, x)
    return [str(traced.inlined_graph).count("="), *gradients(traced, x)]


def a_graph(model: nn.Module, x: torch.Tensor) -> list[Any]:
    traced = torch.fx.symbolic_trace(model)
    return [len(traced.graph.nodes), *gradients(traced, x)]


def a_graph_of_operations(model: nn.Module, x: torch.Tensor) -> list[Any]:
    traced = make_fx(model)(x)
    return [len(traced.graph.nodes), traced(x).tolist()]


ACTS: list[Callable[[nn.Module, torch.Tensor], list[Any]]] = [
    a_shallow_copy,
    a_deep_copy,
    an_average,
    a_pickle,
    a_script,
    a_scripted_block,
    a_trace,
    a_graph,
    a_graph_of_operations,
]
SCRIPTS = (a_script, a_scripted_block)


def trained(act: Callable[[nn.Module, torch.Tensor], list[Any]], block: type[Mixes], *, attach: bool) -> list[Any]:
    """Train, and do something with the model before some steps, and between the forward and backward pass of others."""
    seeded()
    model = network(block)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    found: list[Any] = []
    tuner: Any = None
    if attach:
        tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=1, limits=RESTLESS, runs_dir=None)
    for number in range(STEPS):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        if number in (1, 4):
            found.append(act(model, x))
        for micro in [x] if tuner is None else tuner.micro_batches(x):
            loss = model(micro).square().mean()
            # Torch's scripts do not allow the hooks with which a step is watched.
            if number == 0 or (number == 3 and act not in SCRIPTS):
                found.append(act(model, x))
            if tuner is None:
                loss.backward()
            else:
                tuner.backward(loss)
        if tuner is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            tuner.step()
            assert set(tuner.plan.recomputed) >= {"1", "2", "3"}
            assert not tuner.locks.keys() & {"1", "2", "3"}, tuner.locks
    if tuner is not None:
        assert tuner.attached
        tuner.detach()
    return [found, names_in(model), [parameter.tolist() for parameter in model.parameters()]]


@pytest.mark.some(4)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("act", ACTS)
def test_what_is_made_of_an_attached_model_is_as_without_a_tuner(act: Any) -> None:
    assert trained(act, Mixes, attach=True) == trained(act, Mixes, attach=False)


@pytest.mark.parametrize("act", [a_shallow_copy, a_deep_copy, a_pickle])
def test_copies_keep_what_their_class_says_that_they_hold(act: Any) -> None:
    assert trained(act, Scaled, attach=True) == trained(act, Scaled, attach=False)


def test_a_forward_of_the_users_own_is_the_copys_too() -> None:
    model = network()
    model[1].forward = lambda x: 2 * Mixes.forward(model[1], x)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with autotune.attach(model, optimizer, "exact", memory_budget_bytes=1, limits=RESTLESS, runs_dir=None) as tuner:
        for _ in tuner.micro_batches(torch.randn(6, 4)):
            own = vars(copy.copy(model[1]))["forward"]
    assert own is vars(model[1])["forward"]
