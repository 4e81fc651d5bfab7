"""Tune the objects of a plain training loop, compare the plan with the loop as it is, and apply it.

python examples/plain_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2048, 64)
    loader = DataLoader(TensorDataset(inputs, inputs.cumsum(1).tanh()), batch_size=256, shuffle=True)
    model = nn.Sequential(*(Block() for _ in range(6)))
    loss = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=60)

    # Before the run: the fastest plan within 80 % of the memory that plain fp32 needs, and what it wins on fresh seeds.
    job = autotune.Job.from_loader(model, loader, loss, optimizer, scheduler, max_steps=60)
    found = autotune.tune(job, method="exact", memory_budget="80%")
    plan = autotune.Plan.load(found["run"])
    result = autotune.compare(job, [f"{found['run']}/plan.json"], seeds=2)
    (entry,) = result["against_baseline"]
    print(plan)
    print(f"time {entry['time_ratio']:.2f}, memory {entry['memory_ratio']:.2f} of the baseline's: {entry['verdict']}")

    # The run itself: the loop as it was, with the plan.
    autotune.apply(model, plan)
    for number, (x, y) in enumerate(loader):
        for pieces in zip(x.chunk(plan.accumulation_steps), y.chunk(plan.accumulation_steps), strict=True):
            (loss(model(pieces[0]), pieces[1]) * len(pieces[0]) / len(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number % 4 == 0:
            with torch.no_grad():
                print(f"step {number}: loss {loss(model(x), y).item():.3f}")


if __name__ == "__main__":
    main()
