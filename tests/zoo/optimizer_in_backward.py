"""One optimizer per parameter, which steps in backward as soon as the gradient exists and then drops it."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizers = {parameter: torch.optim.AdamW([parameter], 1e-3) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    tuner = run.attach(model, optimizers[model.head.weight])
    for batch in texts(run.steps):
        tuner.begin_step(batch)
        tuner.tell_phase("forward")
        loss = next_token_loss(model, batch)
        tuner.tell_phase("backward")
        loss.backward()
        tuner.tell_phase("update")
        tuner.end_step()
        run.log(loss)
    run.keep(model, *optimizers.values())
