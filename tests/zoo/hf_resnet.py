"""A ResNet with BatchNorm."""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

from zoo import Run, images


def train(run: Run) -> None:
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
        num_labels=5,
    )
    model = ResNetForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in images(run.steps, side=32):
        for pixels, labels in tuner.micro_batches(batch):
            loss = model(pixel_values=pixels, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
