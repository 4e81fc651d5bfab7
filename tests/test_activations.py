"""Tests of recomputation: outputs, gradients, buffers and generators stay bit-identical."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_jobs import differences, global_generators, momentum_sgd, recomputed
from small_models import ReplacedBuffers, TinyConvolution, TinyGPT
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotune import Plan
from autotune.mechanics import controls
from autotune.mechanics.activations import Recomputation
from autotune.mechanics.randomness import capture, isolated, restore
from autotune.plan import Storage


def spectral_layers(*, parametrized: bool) -> nn.Module:
    wrap = nn.utils.parametrizations.spectral_norm if parametrized else nn.utils.spectral_norm
    return nn.Sequential(*(nn.Sequential(wrap(nn.Linear(3, 3)), nn.Tanh()) for _ in range(2)))


class Counted(nn.Module):
    """A module that writes a count and a moving norm into buffers; the count affects the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("constant", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return torch.tanh(self.linear(x) * self.constant / (1 + self.count))


class Alternating(Counted):
    """A module that writes to its buffer only in every third call, not in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The step decides, not the call: a recomputation belongs to the step of its forward pass.
        if self.training and self.num_steps % 3 == 2:
            self.count += 1
        return torch.tanh(self.linear(x) * self.constant / (1 + self.count))


def image_loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 1, 4, 4)).square().mean()


def vector_loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 3)).square().mean()


def token_loss(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(11, (4, 6))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]] = {
    "dropout": (TinyGPT, token_loss),
    "BatchNorm": (TinyConvolution, image_loss),
    "BatchNorm with a cumulative average": (lambda: TinyConvolution(momentum=None), image_loss),
    "spectral norm by hook": (lambda: spectral_layers(parametrized=False), vector_loss),
    "spectral norm by parametrization": (lambda: spectral_layers(parametrized=True), vector_loss),
    "a buffer that is written to": (lambda: nn.Sequential(Counted(), Counted()), vector_loss),
    "a buffer that is replaced": (ReplacedBuffers, vector_loss),
    "a buffer that is replaced twice a call": (lambda: ReplacedBuffers(clamped=True), vector_loss),
}
UNITS = {
    "dropout": ["blocks.0", "blocks.2"],
    "BatchNorm": ["blocks.0", "blocks.2"],
    "BatchNorm with a cumulative average": ["blocks.0", "blocks.2"],
    "a buffer that is replaced": ["layers.0", "layers.1"],
    "a buffer that is replaced twice a call": ["layers.0", "layers.1"],
}


def train(
    model: nn.Module,
    loss: Callable[[nn.Module], torch.Tensor],
    *,
    steps: int,
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> dict[str, Any]:
    """Train and return the resulting state."""
    optimizer = momentum_sgd(model.parameters())
    losses = []
    with isolated():
        torch.manual_seed(1)
        for step in range(steps):
            before_step(model, step)
            value = loss(model)
            value.backward()
            losses.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": tuple(losses), **copied_state(model), **global_generators()}


def copied_state(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_training_with_recomputed_units_is_bit_identical(name):
    build, loss = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    other = copy.deepcopy(plain)
    units = UNITS.get(name, ["0", "1"])
    controls.apply(other, Plan(storage=recomputed(*units)))
    initial = copied_state(plain)
    expected, seen = train(plain, loss, steps=6), train(other, loss, steps=6)
    assert differences(expected, seen) == []
    assert controls.recomputations(other) == dict.fromkeys(units, 6)
    changed = differences(initial, copied_state(plain))
    # Otherwise the buffers of this case would test nothing.
    assert not list(plain.buffers()) or any(key in dict(plain.named_buffers()) for key in changed)


@pytest.mark.parametrize("name", MODELS)
def test_training_in_bf16_with_recomputed_units_is_bit_identical(name):
    build, loss = MODELS[name]
    units = UNITS.get(name, ["0", "1"])
    results = []
    for storage in ({}, recomputed(*units)):
        torch.manual_seed(0)
        model = build()
        controls.apply(model, Plan(precision=dict.fromkeys(units, "bf16"), storage=storage))
        results.append(train(model, loss, steps=4))
    assert differences(*results) == []
    assert set(controls.recomputations(model).values()) == {4}


def test_buffer_that_changes_only_after_unfreezing_is_updated_once():
    def thaw(model: nn.Module, step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train(step >= 2)

    torch.manual_seed(0)
    plain = TinyConvolution()
    other = copy.deepcopy(plain)
    controls.apply(other, Plan(storage=recomputed("blocks.0", "blocks.1", "blocks.2")))
    expected = train(plain, image_loss, steps=4, before_step=thaw)
    seen = train(other, image_loss, steps=4, before_step=thaw)
    assert int(plain.blocks[0].norm.num_batches_tracked) == 2
    assert differences(expected, seen) == []


def test_buffer_that_changes_only_in_some_steps_is_updated_once():
    def count_steps(model: nn.Module, step: int) -> None:
        for layer in model:
            layer.num_steps = step

    torch.manual_seed(0)
    plain = nn.Sequential(Alternating(), Alternating())
    other = copy.deepcopy(plain)
    controls.apply(other, Plan(storage=recomputed("0", "1")))
    expected = train(plain, vector_loss, steps=6, before_step=count_steps)
    seen = train(other, vector_loss, steps=6, before_step=count_steps)
    assert int(plain[0].count) == 2
    assert differences(expected, seen) == []


def test_unit_called_several_times_in_one_pass_recomputes_each_call_with_its_own_buffers():
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Counted()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(self.layer(x)))

    torch.manual_seed(0)
    plain = Repeated()
    other = copy.deepcopy(plain)
    controls.apply(other, Plan(storage=recomputed("layer")))
    assert differences(train(plain, vector_loss, steps=3), train(other, vector_loss, steps=3)) == []
    assert controls.recomputations(other) == {"layer": 9}


@pytest.mark.parametrize("training", [True, False])
def test_unit_in_evaluation_mode_with_gradients_is_recomputed(training):
    torch.manual_seed(0)
    plain = TinyConvolution().train(training)
    other = copy.deepcopy(plain)
    controls.apply(other, Plan(storage=recomputed("blocks.1")))
    assert differences(train(plain, image_loss, steps=2), train(other, image_loss, steps=2)) == []
    assert controls.recomputations(other) == {"blocks.1": 2}


@pytest.mark.parametrize("kind", ["dropout", "BatchNorm", "a buffer that is written to"])
def test_mode_switched_between_the_passes_changes_no_recomputation(kind):
    make, loss = MODELS[kind]

    def switching(model):
        """Run the forward pass in one mode, and leave the model in the other for the backward pass."""
        value = loss(model)
        model.train(not model.training)
        return value

    torch.manual_seed(0)
    plain = make()
    other = copy.deepcopy(plain)
    units = UNITS.get(kind, ["0", "1"])
    controls.apply(other, Plan(storage=recomputed(*units)))
    # Three steps in training mode, and three in evaluation mode.
    assert differences(train(plain, switching, steps=6), train(other, switching, steps=6)) == []
    assert controls.recomputations(other) == dict.fromkeys(units, 6)


def test_nothing_is_recomputed_without_gradients():
    model = TinyGPT()
    controls.apply(model, Plan(storage=recomputed("blocks.0")))
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    assert controls.recomputations(model) == {"blocks.0": 0}
    assert model.blocks[0].num_calls == 1


def test_nested_and_keyword_arguments_reach_a_recomputed_unit_and_get_gradients():
    class Weighted(nn.Module):
        def forward(self, pair, *, scale, options):
            first, second = pair
            return {"sum": (first * scale + second["deep"]) * options["factor"], "none": None}

    def run(module: nn.Module) -> tuple[torch.Tensor, ...]:
        leaves = [torch.arange(3.0).requires_grad_() for _ in range(3)]
        result = module((leaves[0], {"deep": leaves[1]}), scale=leaves[2], options={"factor": 3})
        assert result["none"] is None
        result["sum"].square().sum().backward()
        return (result["sum"].detach(), *(leaf.grad for leaf in leaves))

    plain, other = nn.ModuleList([Weighted()]), nn.ModuleList([Weighted()])
    controls.apply(other, Plan(storage=recomputed("0")))
    for expected, seen in zip(run(plain[0]), run(other[0]), strict=True):
        assert torch.equal(expected, seen)
    assert controls.recomputations(other) == {"0": 1}


def test_exception_during_recomputation_keeps_the_buffers_of_the_forward_pass():
    class Faulty(Counted):
        broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if self.broken:
                raise KeyError("during recomputation")
            return torch.tanh(self.linear(x) / self.count)

    model = nn.Sequential(Faulty(), Faulty())
    controls.apply(model, Plan(storage=recomputed("0", "1")))
    loss = vector_loss(model)
    held = [model[0].count, model[1].count]
    # The unit's own state is as it was in the forward pass.
    Faulty.broken = True
    with pytest.raises(KeyError, match="during recomputation"):
        loss.backward()
    assert [model[0].count, model[1].count] == held
    assert model[0].count is held[0]
    assert [int(count) for count in held] == [1, 1]


def test_recomputation_repeats_the_random_draws_of_the_forward_pass():
    torch.manual_seed(0)
    plain = TinyGPT(dropout=0.5)
    other = copy.deepcopy(plain)
    controls.apply(other, Plan(storage=recomputed("blocks.0", "blocks.1", "blocks.2")))
    gradients = []
    for model in (plain, other):
        torch.manual_seed(3)
        loss = token_loss(model)
        torch.rand(100)
        state = capture()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state.cpu)
        restore(state)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert differences(*gradients) == []


def test_recomputation_keeps_less_between_forward_and_backward():
    def kept_bytes(model: nn.Module) -> int:
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        # Nothing is recomputed under hooks of the caller, but hooks of torch's modules are allowed.
        note.__module__ = "torch"
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = token_loss(model)
        assert loss.requires_grad
        return sum(storages.values())

    model = TinyGPT()
    seen = []
    for count in range(4):
        controls.apply(model, Plan(storage=recomputed(*(f"blocks.{index}" for index in range(count)))))
        seen.append(kept_bytes(model))
    assert seen == sorted(seen, reverse=True)
    assert seen[3] < 0.7 * seen[0]


def test_recomputation_that_differs_from_its_forward_pass_is_reported_and_disabled(caplog):
    class ReadsSetting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.linear(x) / float(os.environ["HEAT"]))

    def step():
        os.environ["HEAT"] = "0.5"
        loss = unit(torch.ones(2, 4)).sum()
        os.environ["HEAT"] = heat
        loss.backward()

    unit, heat = ReadsSetting(), "0.5"
    controls.apply(nn.ModuleDict({"unit": unit}), Plan(storage={"unit": Storage.RECOMPUTE}))
    recomputation = unit.__dict__["forward"].recomputation
    recomputation.checks = True
    try:
        # A sample of the calls is compared, the 16th the first of them.
        for _ in range(15):
            step()
        assert recomputation.barred is None
        heat = "2.0"
        step()
        assert recomputation.barred == "recomputed, it did not repeat its forward pass"
        assert "may differ" in caplog.text
        step()
        assert recomputation.count == 16
    finally:
        del os.environ["HEAT"]


def test_recomputation_uses_the_flags_of_its_forward_pass():
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(torch.backends.cuda.math_sdp_enabled())
            return torch.tanh(x) * 2

    unit = Looks()
    x = torch.ones(3, requires_grad=True)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = Recomputation(unit).run(unit.forward, (x,), {})
    out.sum().backward()
    assert seen == [False, False]
    assert torch.backends.cuda.math_sdp_enabled()
