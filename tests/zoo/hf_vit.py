"""A ViT that classifies images."""

import torch
from transformers import ViTConfig, ViTForImageClassification

from zoo import Run, images


def train(run: Run) -> None:
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        hidden_dropout_prob=0.1,
        num_labels=5,
    )
    model = ViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in images(run.steps):
        for pixels, labels in tuner.micro_batches(batch):
            loss = model(pixel_values=pixels, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
