"""YOLOS detects objects: its loss matches predictions to targets with scipy."""

import torch
from transformers import YolosConfig, YolosForObjectDetection

from autotune import Settings
from zoo import Run, images


def train(run: Run) -> None:
    config = YolosConfig(
        image_size=[16, 16],
        patch_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_detection_tokens=6,
        hidden_dropout_prob=0.1,
        num_labels=5,
    )
    model = YolosForObjectDetection(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=0.1, settings=Settings(accumulation_choices=(1,)))
    for pixels, classes in images(run.steps):
        boxes = torch.rand(len(pixels), 2, 4) * 0.3 + 0.2
        for pictures, kinds, places in tuner.micro_batches((pixels, classes, boxes)):
            labels = [{"class_labels": kind.repeat(2), "boxes": box} for kind, box in zip(kinds, places, strict=True)]
            loss = model(pixel_values=pictures, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
