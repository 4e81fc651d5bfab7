"""A teacher is copied from the student during a step, and checkpoints are written there."""

import copy
import io

import torch
from torch import nn

from zoo import WIDTH, Residual, Run, points


def train(run: Run) -> None:
    student = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Residual() for _ in range(3)], nn.Linear(WIDTH, 1))
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.Adam(student.parameters(), 1e-3)
    tuner = run.attach(student, optimizer)
    for batch in points(run.steps, rows=256):
        for micro in tuner.micro_batches(batch):
            with torch.no_grad():
                target = teacher(micro)
            loss = (student(micro) - target - 1).square().mean()
            teacher = copy.deepcopy(student).requires_grad_(False)
            torch.save(student, io.BytesIO())
            tuner.backward(loss)
        tuner.step()
        hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in teacher.modules())
        run.log(loss + hooks)
    run.keep(student, teacher, optimizer)
