"""LBFGS evaluates its loss any number of times per step and is rejected, because steps cannot be told apart."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts

REFUSED = "LBFGS"


def train(run: Run) -> None:
    model = small_gpt(dropout=0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    run.attach(model, optimizer)
    for batch in texts(run.steps):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = next_token_loss(model, batch)
            loss.backward()
            return loss

        run.log(optimizer.step(closure))
    run.keep(model, optimizer)
