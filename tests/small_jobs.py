"""Training jobs with steps of a few milliseconds, and exact comparisons of training states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from small_models import Perceptron, TinyConvolution, TinyGPT
from torch import nn
from torch.utils._pytree import tree_leaves

from autotune import EngineOptions, Job, TorchEngine

UNMETERED = EngineOptions(meter_memory=False)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def next_token_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def token_batches(seed: int, *, size: int = 4, length: int = 6, tokens: int = 11) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(tokens, (size, length), generator=generator)


def gpt_job(**changes: Any) -> Job:
    """Return a job with dropout, AdamW and fixed batching."""
    settings: dict[str, Any] = {
        "name": "tiny-gpt",
        "model": TinyGPT,
        "batches": token_batches,
        "loss": next_token_loss,
        "optimizer": adamw,
        "evaluate": lambda model: next_token_loss(model, next(token_batches(99))).item(),
        "target": 1.0,
        "batch_size": 4,
        "accumulation_choices": (1, 2, 4),
    }
    return Job(**{**settings, **changes})


def image_batches(seed: int, *, size: int = 4) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield {
            "images": torch.randn(size, 1, 4, 4, generator=generator),
            "labels": torch.randint(5, (size,), generator=generator),
        }


def image_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def convolution_job(**changes: Any) -> Job:
    """Return a job with BatchNorm and adaptive batching."""
    settings: dict[str, Any] = {
        "name": "tiny-convolution",
        "model": TinyConvolution,
        "batches": image_batches,
        "loss": image_loss,
        "optimizer": adamw,
        "evaluate": lambda model: image_loss(model, next(image_batches(99))).item(),
        "target": 1.0,
        "batch_size": 4,
        "batching": "adaptive",
        "accumulation_choices": (1, 2, 4),
    }
    return Job(**{**settings, **changes})


def vector_batches(
    seed: int, *, size: int = 8, width: int = 3, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(size, width, generator=generator, dtype=dtype),
            torch.randn(size, width, generator=generator, dtype=dtype),
        )


def squared_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def perceptron_job(**changes: Any) -> Job:
    """Return the cheapest job: two linear layers, plain gradient descent, no clipping."""
    settings: dict[str, Any] = {
        "name": "perceptron",
        "model": Perceptron,
        "batches": vector_batches,
        "loss": squared_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "evaluate": lambda model: squared_loss(model, next(vector_batches(99))).item(),
        "target": 0.1,
        "batch_size": 8,
        "accumulation_choices": (1, 2, 4, 8),
        "clip_norm": None,
    }
    return Job(**{**settings, **changes})


def training_state(engine: TorchEngine) -> dict[str, Any]:
    """Return copies of all state that a step may change: parameters, buffers, optimizer, generators, counters."""
    snapshot = engine.snapshot()
    return {
        **{f"tensor {name}": value for name, value in snapshot.tensors.items()},
        **{f"optimizer {index}": leaf for index, leaf in enumerate(tree_leaves(snapshot.optimizer))},
        "python generator": snapshot.random.python,
        "numpy generator": snapshot.random.numpy,
        "torch generator": snapshot.random.cpu,
        "progress": snapshot.progress,
    }


def weights_of(engine: TorchEngine) -> dict[str, Any]:
    """Return copies of parameters and optimizer state."""
    names = {name for name, _ in engine.model.named_parameters()}
    kept = {f"tensor {name}" for name in names}
    return {key: value for key, value in training_state(engine).items() if key in kept or key.startswith("optimizer ")}


def global_generators() -> dict[str, Any]:
    """Return the states of the global random number generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return the keys whose values are not bit-identical; NaN equals NaN of the same bits."""
    keys = sorted({*first, *second})
    return [key for key in keys if key not in first or key not in second or not same(first[key], second[key])]


def same(first: Any, second: Any) -> bool:
    """Tell whether two values are identical to the last bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        return torch.equal(_bytes(first), _bytes(second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def recomputed(*names: str) -> dict[str, str]:
    """Return a plan's storage with the named units recomputed."""
    return dict.fromkeys(names, "recompute")
