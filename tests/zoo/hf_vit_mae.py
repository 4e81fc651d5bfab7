"""A masked autoencoder that draws its visible patches inside the model."""

import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from zoo import Run, images


def train(run: Run) -> None:
    config = ViTMAEConfig(
        image_size=16,
        patch_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        decoder_hidden_size=16,
        decoder_intermediate_size=32,
        decoder_num_hidden_layers=3,
        decoder_num_attention_heads=2,
    )
    model = ViTMAEForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch, _ in images(run.steps):
        for pixels in tuner.micro_batches(batch):
            loss = model(pixel_values=pixels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
