"""REINFORCE: actions are sampled from the policy, and their log-probabilities are weighted by their returns."""

import torch
from torch import nn
from torch.distributions import Categorical

from autotune import Settings
from zoo import WIDTH, Residual, Run, points


def train(run: Run) -> None:
    policy = nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, 4))
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    tuner = run.attach(policy, optimizer, settings=Settings(accumulation_choices=(1,)))
    baseline = 0.0
    for states in points(run.steps):
        for state in tuner.micro_batches(states):
            actions = Categorical(logits=policy(state))
            chosen = actions.sample()
            earned = state.gather(1, chosen[:, None]).squeeze(1)
            loss = -(actions.log_prob(chosen) * (earned - baseline)).mean() - 0.01 * actions.entropy().mean()
            tuner.backward(loss)
        tuner.step()
        baseline = 0.9 * baseline + 0.1 * float(earned.mean())
        run.log(loss, baseline)
    run.keep(policy, optimizer)
