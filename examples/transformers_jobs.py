"""Jobs of two models of transformers, a Llama and a ViT with random weights and data, for the benchmarks of techniques.

autotune bench peers --job examples/transformers_jobs.py:llama --memory-budgets 40%,30%,20% --peers sqrt
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from autotune import Job

VOCABULARY, LENGTH, CLASSES, PIXELS = 512, 256, 10, 64


def tokens(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(VOCABULARY, (8, LENGTH), generator=generator)


def images(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(16, 3, PIXELS, PIXELS, generator=generator),
            torch.randint(CLASSES, (16,), generator=generator),
        )


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def image_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    pixels, labels = batch
    return model(pixel_values=pixels, labels=labels).loss


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def llama() -> Job:
    """Return a Llama of 6 layers and 5 M parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Job(
        name="hf_llama",
        model=partial(LlamaForCausalLM, config),
        batches=tokens,
        loss=language_loss,
        optimizer=adamw,
        evaluate=lambda model: float(language_loss(model, next(tokens(-1)))),
        batch_size=8,
        accumulation_choices=(1, 2, 4),
    )


def vit() -> Job:
    """Return a ViT of 6 layers and 3 M parameters on 256 patches."""
    config = ViTConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=PIXELS,
        patch_size=4,
        num_labels=CLASSES,
        attn_implementation="sdpa",
    )
    return Job(
        name="hf_vit",
        model=partial(ViTForImageClassification, config),
        batches=images,
        loss=image_loss,
        optimizer=adamw,
        evaluate=lambda model: float(image_loss(model, next(images(-1)))),
        batch_size=16,
        accumulation_choices=(1, 2, 4),
    )


if __name__ == "__main__":
    for job in (llama(), vit()):
        model = job.model()
        loss = job.loss(model, next(iter(job.batches(0))))
        print(f"{job.name}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, loss {loss:.3f}")
