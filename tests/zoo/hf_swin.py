"""Swin: shifted windows, and paths dropped at random."""

import torch
from transformers import SwinConfig, SwinForImageClassification

from zoo import Run, images


def train(run: Run) -> None:
    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.2,
        num_labels=5,
    )
    model = SwinForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in images(run.steps, side=32):
        for pixels, labels in tuner.micro_batches(batch):
            loss = model(pixel_values=pixels, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
