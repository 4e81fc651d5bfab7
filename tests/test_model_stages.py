"""Tests of models that are computed in stages within any loss, and of those that cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from small_models import TinyGPT
from torch import nn

from autotune.errors import JobError
from autotune.mechanics.model_stages import ModelStages, StageRun, unit_operations
from autotune.mechanics.weight_use import weight_use

WIDTH = 8
TOKENS = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(1))


class Chain(nn.Module):
    """Blocks in a row, with code before, between and after them."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(7, WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def between(self, hidden: torch.Tensor, _number: int) -> torch.Tensor:
        return self.norm(hidden).tanh()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding[tokens]
        for number, block in enumerate(self.blocks):
            hidden = self.between(block(hidden), number)
        return hidden @ self.embedding.T


class Named(Chain):
    """Hands hidden states by name, beside a mask that needs no gradient; units return tuples."""

    class Unit(nn.Linear):
        def forward(self, mask: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
            return (super().forward(hidden) * mask[..., None],)

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(Named.Unit(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.embedding[tokens], tokens > 1
        for block in self.blocks:
            hidden = block(mask=mask, hidden=hidden)[0]
        return hidden @ self.embedding.T


class Residual(Chain):
    """Uses what the first block returns after the last one."""

    def between(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        if number == 0:
            self.first = hidden
        return hidden + self.first if number == 3 else hidden


class Repeats(Chain):
    def between(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        return self.blocks[0](hidden) if number == 3 else hidden


class Catches(Chain):
    """Handles every exception of a block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding[tokens]
        for block in self.blocks:
            try:
                hidden = block(hidden)
            except Exception:
                hidden = hidden * 2
        return hidden @ self.embedding.T


def loss_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def names_of(model: nn.Module) -> list[str]:
    return [f"blocks.{number}" for number in range(len(model.blocks))]  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [(4,), (1, 3), (2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("kind", [Chain, Named, Catches])
def test_stages_one_after_another_give_the_loss_and_gradient_of_the_model(
    kind: type[Chain], counts: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = kind()
    stages = ModelStages(model, names_of(model), counts, where="here")
    # The embedding is used before the first block and after the last one.
    assert stages.require_chain(loss_of(model)) is (len(counts) == 1)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Residual, Repeats])
def test_models_that_are_no_chain_are_refused(kind: type[Chain]) -> None:
    torch.manual_seed(0)
    model = kind()
    with pytest.raises(JobError, match="here: the model cannot be computed in stages"):
        ModelStages(model, names_of(model), (2, 2), where="here").require_chain(loss_of(model))


def test_units_without_the_next_stage_are_refused() -> None:
    model = Chain()
    stages = ModelStages(model, names_of(model), (2, 2), where="here")
    with pytest.raises(JobError, match="does not call the units of stage 1 after those of stage 0"):
        stages.forward(StageRun(0), lambda: model.embedding.sum())


def test_a_stage_keeps_its_own_parameters_and_the_shared_ones() -> None:
    torch.manual_seed(0)
    model = Chain()
    names, loss = names_of(model), loss_of(model)
    contained = weight_use(model, names, loss).contained
    stages = ModelStages(model, names, (2, 2), where="here")
    shared = stages.shared(contained)
    assert set(map(id, shared)) == {id(model.embedding), *map(id, model.norm.parameters())}
    shapes = {name: one.shape for name, one in model.named_parameters()}
    stages.keep([1], shared)
    assert {name: one.shape for name, one in model.named_parameters()} == shapes
    assert {id(one) for one in stages.absent} == {
        id(one) for name in names[:2] for one in model.get_submodule(name).parameters()
    }
    assert not any(one.requires_grad or one.untyped_storage().nbytes() > 8 for one in stages.absent)
    whole = Chain()
    first = ModelStages(whole, names, (2, 2), where="here")
    run = StageRun(0)
    sent = first.forward(run, loss_of(whole))
    assert run.shapes.keys() == {0, 1}
    assert torch.isfinite(stages.forward(StageRun(1, sent.detach(), run.shapes), loss))


def test_operations_are_counted_by_unit() -> None:
    model = TinyGPT(width=16, blocks=2, dropout=0.0)
    names = ["blocks.0", "blocks.1"]
    counts, before, after = unit_operations(model, names, lambda: model(TOKENS).sum())
    assert counts[0] == counts[1] > 0
    assert before == 0
    assert after > 0
