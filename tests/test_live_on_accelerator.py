"""Tests of loops on a fake accelerator: bit-identical and within the budget from the first attached step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_live import RESTLESS, Wanders
from torch import nn

import autotune
from autotune.errors import InputError
from autotune.mechanics import devices

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.tanh(self.mix(self.norm(x))), 0.1, self.training)


class Base(nn.Module):
    """A model that passes tokens through blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens.to(self.embedding.weight.device)).to(self.head.weight.device)
        return self.head(self.through(x))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Between(Base):
    """A model that uses one layer several times, between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(WIDTH, WIDTH)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            for block in self.blocks:
                x = self.between(block(self.between(x)))
        return x.float()


@dataclass
class State:
    x: torch.Tensor


class Stated(Block):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.x))


class States(Base):
    """A model that passes an object from block to block."""

    def __init__(self) -> None:
        super().__init__(Stated)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
        return state.x


class Frozen(Block):
    """A model with frozen weights that are much larger than its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((512, 1024), 1e-3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.frozen[0, 0]


class Buffered(Block):
    """A model with a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((512, 1024), 1e-3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.table[0, 0]  # type: ignore[index]


class Masked(Block):
    """A model that takes a mask, which needs hardly any memory."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask[0, 0]


class Masks(Base):
    def __init__(self) -> None:
        super().__init__(Masked)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(1, 1, 1, WIDTH, device=x.device).expand(64, 64, x.shape[1], WIDTH)
        for block in self.blocks:
            x = block(x, mask)
        return x


def on_device(model: nn.Module) -> nn.Module:
    return model.to("fake")


def embedded_on_host(model: nn.Module) -> nn.Module:
    for part in (model.blocks, model.head):
        part.to("fake")  # type: ignore[union-attr]
    return model


LOOPS = {
    "one layer several times in an autocast": lambda: on_device(Between()),
    "objects": lambda: on_device(States()),
    "frozen weights": lambda: on_device(Base(Frozen)),
    "buffers": lambda: on_device(Base(Buffered)),
    "masks": lambda: on_device(Masks()),
    "an embedding on the host": lambda: embedded_on_host(Base()),
}


def train(
    make: Callable[[], nn.Module], fake: ModuleType, attaching: dict[str, Any] | None
) -> tuple[list[Any], list[int], dict[str, str]]:
    """Return the run's result, the device's peak in each step, and the locks."""
    gc.collect()
    torch.manual_seed(0)
    began = fake.stats()["allocated_bytes.all.current"]
    model = make().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    tuner: Any = None
    found: list[Any] = []
    peaks = []
    for step in range(14):
        tokens = torch.randint(0, 50, (16, 32), generator=torch.Generator().manual_seed(step)).to("fake")
        # Attach once the optimizer has state.
        if step == 2 and attaching is not None:
            tuner = autotune.attach(model, optimizer, limits=RESTLESS, runs_dir=None, **attaching)
        torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
        for micro in [tokens] if tuner is None else tuner.micro_batches(tokens):
            loss = F.cross_entropy(model(micro).flatten(0, 1), micro.flatten())
            loss.backward() if tuner is None else tuner.backward(loss)
        if tuner is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            tuner.step()
        peaks.append(fake.stats()["allocated_bytes.all.peak"] - began)
        found.append(float(loss.detach()))
        del loss, micro
    locks = {} if tuner is None else tuner.locks
    if tuner is not None:
        assert tuner.attached, tuner.detached_because
        tuner.detach()
    found += [value.detach().cpu().tolist() for value in model.state_dict().values()]
    found += [torch.get_rng_state().tolist(), torch.fake.get_rng_state().tolist()]  # type: ignore[attr-defined]
    return found, peaks[2:], {name: why for name, why in locks.items() if name.startswith("blocks")}


# These loops run each time, the others with the slow tests.
QUICK = {"objects"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LOOPS]
)
def test_loop_on_an_accelerator_is_bit_identical_and_within_budget(accelerator: ModuleType, name: str) -> None:
    plain, fullest, _ = train(LOOPS[name], accelerator, None)
    lean, leanest, locks = train(LOOPS[name], accelerator, {"policy": "exact", "memory_budget_bytes": 1})
    assert lean == plain
    assert not locks
    ladder = autotune.Settings(storages=("selective", "rebuild"))
    # As if this were the first step on the device: no ability may be asked for within a traced step.
    devices.traces_memory.cache_clear()
    for settings in (None, ladder):
        attaching = {"policy": Wanders(), "memory_budget_bytes": 10**12, "settings": settings}
        assert train(LOOPS[name], accelerator, attaching)[0] == plain
    for share, settings in ((0.0, None), (0.6, None), (0.6, ladder)):
        least = max(leanest) / 0.995 + 1
        budget = int(least + share * max(max(fullest) - least, 0))
        attaching = {"policy": "exact", "memory_budget_bytes": budget, "settings": settings}
        bounded, peaks, _ = train(LOOPS[name], accelerator, attaching)
        assert bounded == plain
        assert max(peaks) <= budget, (peaks, budget)


def test_probing_fits_on_an_almost_full_device(accelerator: ModuleType) -> None:
    _, fullest, _ = train(LOOPS["frozen weights"], accelerator, None)
    gc.collect()
    held = accelerator.stats()["allocated_bytes.all.current"]
    accelerator.capacity(int(held + 1.1 * max(fullest)) + 2**21)
    try:
        _, _, locks = train(LOOPS["frozen weights"], accelerator, {"policy": "exact"})
    finally:
        accelerator.capacity()
    assert not locks


@pytest.mark.parametrize("wrong", ["fake:1000", "fake:70000", 3.5, -1])
def test_invalid_device_is_rejected(accelerator: ModuleType, wrong: Any) -> None:
    with pytest.raises(InputError, match="device"):
        devices.resolved(wrong)
