"""Functions called by blocks count their calls: in an array, a default argument, a function, an object and slots."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points

# What an object of the unit itself holds, the last one's slots, is restored, so that it is not locked.
LOCKED = {str(number): "" for number in range(4)}

CALLS = np.zeros(1)


def by_array() -> float:
    CALLS[0] += 1
    return float(CALLS[0])


def by_default(seen: list[int] = []) -> float:  # noqa: B006
    seen.append(1)
    return float(len(seen))


def by_attribute() -> float:
    by_attribute.calls += 1  # type: ignore[attr-defined]
    return float(by_attribute.calls)  # type: ignore[attr-defined]


class Schedule:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return float(self.calls)


@dataclass(slots=True)
class State:
    calls: int = 0


SCHEDULE = Schedule()


class Counts(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.kind, self.state = kind, State()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == 4:
            self.state.calls += 1
            calls = float(self.state.calls)
        else:
            calls = (by_array, by_default, by_attribute, SCHEDULE)[self.kind]()
        return x + self.mix(x) / (1 + 0.01 * calls)


def train(run: Run) -> None:
    CALLS[0], by_attribute.calls, SCHEDULE.calls = 0, 0, 0  # type: ignore[attr-defined]
    by_default.__defaults__[0].clear()  # type: ignore[index]
    model = nn.Sequential(*(Counts(kind) for kind in range(5)), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, 48):
        for micro in tuner.micro_batches(batch):
            loss = F.mse_loss(model(micro), micro.roll(1, 1))
            tuner.backward(loss)
        tuner.step()
        run.log(loss, float(CALLS[0]), float(SCHEDULE.calls), float(model[4].state.calls))
    run.keep(model, optimizer)
