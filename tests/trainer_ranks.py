"""Entry point that torchrun starts: one rank of trainings by frameworks' Trainers, alone and attached, compared."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import test_integrations_lightning as by_lightning
import test_integrations_transformers as by_transformers
import torch
import torch.distributed as dist
from test_live import token_batches
from torch import nn


def lora() -> Any:
    """Return a model of which only adapters are trained."""
    peft = __import__("peft")
    return peft.get_peft_model(by_transformers.llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def own_batches(count: int) -> Iterator[Any]:
    """Yield the batches of this rank."""
    for number, batch in enumerate(token_batches(count * dist.get_world_size())):
        if number % dist.get_world_size() == dist.get_rank():
            yield batch


def has_a_tuner(model: nn.Module) -> bool:
    """Return whether something of a tuner is on a model."""
    return any(
        "autotune" in f"{type(part.__dict__.get('forward'))} {part._forward_pre_hooks} {part._forward_hooks}"
        for part in model.modules()
    )


def is_same_on_all_ranks(model: nn.Module) -> bool:
    """Return whether all ranks have the same weights, to the bit."""
    own = torch.cat([part.detach().flatten() for part in model.parameters()])
    weights = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, own)
    return all(torch.equal(one, own) for one in weights)


def runs_of_transformers(folder: Path, **options: Any) -> list[Any]:
    """Return a training by transformers, alone and attached."""
    return [by_transformers.train(folder, attached=attached, **options) for attached in (False, True)]


def runs_of_lightning(folder: Path, **options: Any) -> list[Any]:
    """Return a training by Lightning, alone and attached."""
    options |= {"devices": dist.get_world_size(), "strategy": "ddp", "use_distributed_sampler": False}
    return [by_lightning.train(folder, batches=own_batches, attached=one, **options) for one in (False, True)]


# Switches of plans in each attached training.
LEAST = 5

WAYS: dict[str, tuple[Callable[..., list[Any]], Any, dict[str, Any]]] = {
    "transformers": (runs_of_transformers, by_transformers, {"max_steps": 14}),
    "lightning": (runs_of_lightning, by_lightning, {"max_steps": 14}),
    "accumulating": (runs_of_transformers, by_transformers, {"gradient_accumulation_steps": 2, "max_steps": 30}),
    "recomputing": (runs_of_transformers, by_transformers, {"gradient_checkpointing": True}),
    "adapters": (runs_of_transformers, by_transformers, {"model": lora, "gradient_checkpointing": True}),
    "lightning-accumulating": (runs_of_lightning, by_lightning, {"accumulate_grad_batches": 2, "max_epochs": 2}),
}


def main() -> None:
    """Train one way after another; fail where a training differs by being attached."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for way in sys.argv[2:]:
        run, module, options = WAYS[way]
        plain, tuned = run(Path(sys.argv[1]) / way / str(dist.get_rank()), **options)
        module.assert_identical(plain, tuned)
        tuner = tuned.callback.tuner
        assert tuner.detached_because == "the training ended", (way, tuner.detached_because)
        assert tuner.status["switches"] >= LEAST, (way, tuner.status["switches"])
        trained = getattr(tuned.trainer, "model_wrapped", tuned.trainer.model)
        assert not has_a_tuner(trained), way
        assert is_same_on_all_ranks(trained), way
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
