"""An Accelerator with gradient accumulation, which is rejected: its optimizer skips requested updates."""

import torch
from accelerate import Accelerator

from zoo import Run, next_token_loss, small_gpt, texts

REFUSED = "accumulates 2 batches"


def train(run: Run) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(list(texts(run.steps)), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run.attach(model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = next_token_loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss)
    run.keep(model, optimizer)
