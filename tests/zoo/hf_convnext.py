"""A ConvNeXt that skips whole layers of samples at random."""

import torch
from transformers import ConvNextConfig, ConvNextForImageClassification

from zoo import Run, images


def train(run: Run) -> None:
    config = ConvNextConfig(
        hidden_sizes=[8, 16],
        depths=[2, 3],
        num_stages=2,
        drop_path_rate=0.2,
        num_labels=5,
    )
    model = ConvNextForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in images(run.steps, side=32):
        for pixels, labels in tuner.micro_batches(batch):
            loss = model(pixel_values=pixels, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
