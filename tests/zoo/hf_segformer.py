"""SegFormer classifies each pixel: stages of attention, and a head with BatchNorm."""

import torch
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from zoo import Run, images


def train(run: Run) -> None:
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        drop_path_rate=0.1,
        num_labels=5,
    )
    model = SegformerForSemanticSegmentation(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in images(run.steps, side=32):
        for pixels, labels in tuner.micro_batches(batch):
            loss = model(pixel_values=pixels, labels=labels[:, None, None].expand(-1, 32, 32)).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
