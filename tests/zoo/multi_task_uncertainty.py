"""Three heads on one trunk, with losses weighted by learned uncertainties."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*[Residual(dropout=0.1) for _ in range(4)])
        self.classes, self.values, self.signs = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)
        self.log_variances = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.trunk(x)
        return self.classes(y), self.values(y), self.signs(y).squeeze(1)


def train(run: Run) -> None:
    model = MultiTask()
    optimizer = torch.optim.AdamW(
        [{"params": model.trunk.parameters()}, {"params": [model.log_variances], "lr": 1e-2, "weight_decay": 0.0}], 1e-3
    )
    optimizer.add_param_group(
        {"params": [*(w for n, w in model.named_parameters() if n[:5] not in ("trunk", "log_v"))]}
    )
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps):
        for x in tuner.micro_batches(batch):
            scores, values, signs = model(x)
            losses = torch.stack(
                [
                    F.cross_entropy(scores, x[:, :4].argmax(1)),
                    F.mse_loss(values, x[:, 4:6]),
                    F.binary_cross_entropy_with_logits(signs, (x[:, 6] > 0).float()),
                ]
            )
            loss = (losses * (-model.log_variances).exp() + model.log_variances).sum()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
