"""The second of three accumulated batches sometimes runs out of memory, and the accumulated gradients are dropped."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import Run, images
from zoo.batch_norm_convnet import Bottleneck


def train(run: Run) -> None:
    stem, head = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(stem, *[Bottleneck() for _ in range(4)], head)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    tuner = run.attach(model, optimizer, accumulation_steps=3)
    batches = list(images(3 * run.steps))
    for step in range(run.steps):
        try:
            for number, (pictures, labels) in enumerate(batches[3 * step : 3 * step + 3]):
                if number == 0:
                    tuner.begin_step((pictures, labels))
                else:
                    tuner.next_micro_batch((pictures, labels))
                tuner.tell_phase("forward")
                loss = F.cross_entropy(model(pictures), labels) / 3
                if number == 1 and step % 5 == 4:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                tuner.tell_phase("backward")
                loss.backward()
            tuner.tell_phase("update")
            optimizer.step()
            optimizer.zero_grad()
            tuner.end_step()
            run.log(loss)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
    run.keep(model, optimizer)
