"""Deep Q-learning: a replay buffer, actions by chance or by value, and a target network that follows."""

import copy
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run


def train(run: Run) -> None:
    model = nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, 3))
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    replay: deque[tuple[torch.Tensor, int, float, torch.Tensor]] = deque(maxlen=64)
    state, number = torch.randn(WIDTH), 0
    while number < run.steps:
        with torch.no_grad():
            action = random.randrange(3) if random.random() < 0.3 else int(model(state[None]).argmax())
        following = (state.roll(action) + 0.1 * torch.randn(WIDTH)).clamp(-3, 3)
        replay.append((state, action, float(following[0]), following))
        state = following
        if len(replay) < 16:
            continue
        states, actions, rewards, nexts = zip(*random.sample(list(replay), 16), strict=True)
        batch = torch.stack(states), torch.tensor(actions), torch.tensor(rewards), torch.stack(nexts)
        for now, acted, reward, after in tuner.micro_batches(batch):
            wanted = reward + 0.9 * target(after).max(1).values
            loss = F.smooth_l1_loss(model(now).gather(1, acted[:, None]).squeeze(1), wanted)
            tuner.backward(loss)
        tuner.step()
        number += 1
        if number % 6 == 0:
            target.load_state_dict(model.state_dict())
        run.log(loss)
    run.keep(model, target, optimizer)
