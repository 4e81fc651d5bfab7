"""Tests of attaching to compiled models: blocks are switched without recompilation, whole models are only observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import TinyGPT
from test_live import RESTLESS, Trace, Wanders, assert_identical, gpt_loss, shape_of, token_batches, train
from torch import nn

import autotune

# Deprecation warnings inside the compiler do not matter here.
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """A block with dropout and without a counter, which would be a constant of the compiled code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        scores = (query @ key.transpose(-2, -1)).softmax(-1)
        return x + F.dropout(self.out(F.gelu(scores @ value)), 0.2, self.training)


def plain_gpt() -> nn.Module:
    model = TinyGPT(width=16, blocks=0)
    model.blocks = nn.ModuleList(Block(16) for _ in range(5))
    return model


def compiled_blocks(backend: str) -> nn.Module:
    model: Any = plain_gpt()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(run: Callable[[], Trace]) -> tuple[Trace, dict[str, int]]:
    """Return a run, and the numbers of graphs that were compiled in it, of their calls, and of breaks.

    Frames are not counted: a weak dictionary's callback that happens to run within a compiled block is one, too.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trace = run()
    found = {**counters["stats"], "breaks": sum(counters["graph_break"].values())}
    return trace, found


@pytest.mark.parametrize(
    ("backend", "ragged"),
    [
        # With this backend, torch marks outputs of varying size with attributes.
        ("aot_eager", True),
        pytest.param("eager", True, marks=pytest.mark.slow),
        pytest.param("eager", False, marks=pytest.mark.slow),
        pytest.param("aot_eager", False, marks=pytest.mark.slow),
    ],
)
def test_individually_compiled_blocks_are_switched_without_recompilation(backend: str, ragged: bool) -> None:
    def model() -> nn.Module:
        return compiled_blocks(backend)

    def batches(count: int) -> Iterator[torch.Tensor]:
        return token_batches(count, ragged=ragged)

    plain, before = counted(lambda: train(model, batches, gpt_loss, 40))
    tuned, after = counted(
        lambda: train(model, batches, gpt_loss, 40, policy=Wanders(), memory_budget_bytes=10**9, limits=RESTLESS)
    )
    assert tuned.status["switches"] >= 25  # type: ignore[attr-defined]
    assert not any(name.startswith("blocks") for name in tuned.tuner.locks)
    assert all(after[name] <= before[name] for name in after), (before, after)
    assert after["unique_graphs"] == before["unique_graphs"] <= 2
    assert_identical(plain, tuned)
    assert list(plain.model.state_dict()) == list(tuned.model.state_dict())
    assert shape_of(plain.model) == shape_of(tuned.model)


@pytest.mark.parametrize("way", ["torch.compile", pytest.param("model.compile", marks=pytest.mark.slow)])
def test_model_compiled_as_a_whole_is_only_observed(way: str) -> None:
    def model() -> nn.Module:
        made = plain_gpt()
        if way == "model.compile":
            made.compile(backend="eager")
            return made
        compiled: nn.Module = torch.compile(made, backend="eager")  # type: ignore[assignment]
        return compiled

    plain, before = counted(lambda: train(model, token_batches, gpt_loss, 12))
    tuned, after = counted(
        lambda: train(model, token_batches, gpt_loss, 12, policy="exact", memory_budget_bytes=1000, limits=RESTLESS)
    )
    assert "compiled as a whole" in tuned.tuner._facts.locks["units"]
    assert tuned.status["stage"] == "observe"  # type: ignore[attr-defined]
    assert tuned.status["attached"]  # type: ignore[attr-defined]
    assert tuned.status["placed"] == 0  # type: ignore[attr-defined]
    assert after == before
    assert_identical(plain, tuned)


@pytest.mark.slow
def test_block_compiled_in_place_is_left_alone_with_a_remedy() -> None:
    model: Any = plain_gpt()
    for block in model.blocks:
        block.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with autotune.attach(model, optimizer, "exact", memory_budget_bytes=1000, runs_dir=None) as tuner:
        for batch in token_batches(3):
            for micro in tuner.micro_batches(batch):
                tuner.backward(gpt_loss(model, micro))
            tuner.step()
        assert all("block = torch.compile(block)" in tuner.locks[f"blocks.{number}"] for number in range(5))
        assert all("forward" not in block.__dict__ for block in model.blocks)
