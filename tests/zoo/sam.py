"""Sharpness-aware minimisation: two passes a step, the second at weights moved uphill."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        tuner.begin_step(batch)
        tuner.tell_phase("forward")
        loss = next_token_loss(model, batch)
        tuner.tell_phase("backward")
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        moves = [(p, 0.05 * p.grad / (norm + 1e-12)) for p in model.parameters()]
        with torch.no_grad():
            for parameter, move in moves:
                parameter.add_(move)
        optimizer.zero_grad()
        tuner.tell_phase("forward")
        sharp = next_token_loss(model, batch)
        tuner.tell_phase("backward")
        sharp.backward()
        tuner.tell_phase("update")
        with torch.no_grad():
            for parameter, move in moves:
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        tuner.end_step()
        run.log(loss, sharp)
    run.keep(model, optimizer)
