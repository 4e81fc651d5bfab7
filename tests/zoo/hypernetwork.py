"""A hypernetwork: it generates another network's weights from a task, and is tuned."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from zoo import WIDTH, Residual, Run, points


class Hypernetwork(nn.Module):
    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.shapes = {name: weight.shape for name, weight in target.named_parameters()}
        self.blocks = nn.Sequential(*[Residual(dropout=0.1) for _ in range(4)])
        self.heads = nn.ModuleDict(
            {name.replace(".", "_"): nn.Linear(WIDTH, shape.numel()) for name, shape in self.shapes.items()}
        )

    def forward(self, task: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.blocks(task)
        found = {name: self.heads[name.replace(".", "_")](x) for name in self.shapes}
        return {name: 0.1 * weight.view(self.shapes[name]) for name, weight in found.items()}


def train(run: Run) -> None:
    target = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1)).requires_grad_(False)
    model = Hypernetwork(target)
    tasks = nn.Embedding(4, WIDTH)
    optimizer = torch.optim.Adam([*model.parameters(), *tasks.parameters()], 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(points(run.steps)):
        task = torch.tensor(number % 4)
        for x in tuner.micro_batches(batch):
            found = functional_call(target, model(tasks(task)), (x,))
            loss = F.mse_loss(found.squeeze(1), x[:, number % 4])
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, tasks, optimizer)
