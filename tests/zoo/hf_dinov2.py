"""DINOv2: layer scales, and whole branches that are dropped for some samples."""

import torch
from transformers import Dinov2Config, Dinov2ForImageClassification

from zoo import Run, images


def train(run: Run) -> None:
    config = Dinov2Config(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=16,
        patch_size=4,
        drop_path_rate=0.2,
        num_labels=5,
    )
    model = Dinov2ForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in images(run.steps):
        for pixels, labels in tuner.micro_batches(batch):
            loss = model(pixel_values=pixels, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
