"""A ResNet of timm, with BatchNorm and stochastic depth in its blocks."""

import timm
import torch
import torch.nn.functional as F

from zoo import Run, images


def train(run: Run) -> None:
    model = timm.create_model(
        "resnet18",
        pretrained=False,
        num_classes=5,
        channels=(8, 8, 16, 16),
        stem_width=8,
        drop_rate=0.1,
        drop_path_rate=0.1,
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in images(run.steps, side=32):
        for pixels, labels in tuner.micro_batches(batch):
            loss = F.cross_entropy(model(pixels), labels, label_smoothing=0.1)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
