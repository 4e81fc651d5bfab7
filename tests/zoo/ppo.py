"""PPO: rollouts without a graph, then epochs of minibatches over one rollout, of which the last is short."""

import torch
from torch import nn
from torch.distributions import Categorical

from zoo import WIDTH, Residual, Run

ACTORS, LENGTH, MINIBATCH = 8, 9, 28


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, WIDTH), *[Residual() for _ in range(3)])
        self.actor, self.critic = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, states: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        hidden = self.body(states)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


@torch.no_grad()
def rollout(model: ActorCritic, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return states, actions, their log probabilities, advantages and returns, and the final state."""
    seen = []
    for _ in range(LENGTH):
        policy, values = model(state)
        actions = policy.sample()
        seen.append((state, actions, policy.log_prob(actions), values))
        state = 0.9 * state + 0.1 * torch.randn(ACTORS, 4) + 0.1 * actions[:, None]
    states, actions, log_probabilities, values = (torch.cat(part) for part in zip(*seen, strict=True))
    advantages = torch.randn(len(values))
    return states, actions, log_probabilities, advantages, values + advantages, state


def train(run: Run) -> None:
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, eps=1e-5)
    tuner = run.attach(model, optimizer, clip_norm=0.5)
    state = torch.zeros(ACTORS, 4)
    for _ in range(run.steps // 6):
        *data, state = rollout(model, state)
        for _ in range(2):
            for rows in torch.randperm(ACTORS * LENGTH).split(MINIBATCH):
                for states, actions, before, advantages, returns in tuner.micro_batches([part[rows] for part in data]):
                    policy, values = model(states)
                    ratio = (policy.log_prob(actions) - before).exp()
                    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                    errors = (values - returns).square()
                    loss = 0.5 * errors.mean() - clipped.mean() - 0.01 * policy.entropy().mean()
                    tuner.backward(loss)
                tuner.step()
                run.log(loss)
    run.keep(model, optimizer)
