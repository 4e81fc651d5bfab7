"""From some step on, the loop stores saved tensors in half the bits."""

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks

from zoo import Run, next_token_loss, small_gpt, texts


def compressed(tensor: torch.Tensor) -> object:
    whole = tensor.dtype is torch.float32 and not isinstance(tensor, torch.nn.Parameter)
    return tensor.bfloat16() if whole else tensor


def restored(kept: torch.Tensor) -> torch.Tensor:
    return kept.float() if kept.dtype is torch.bfloat16 else kept


def train(run: Run) -> None:
    model = small_gpt(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        hooks = saved_tensors_hooks(compressed, restored) if number >= 4 else contextlib.nullcontext()
        for micro in tuner.micro_batches(batch):
            with hooks:
                loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
