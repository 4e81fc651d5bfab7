"""A loop with its own GradScaler for float16: the tuner is told of each phase and makes no update."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        tuner.begin_step(batch)
        tuner.tell_phase("forward")
        with torch.autocast("cpu", torch.float16):
            loss = next_token_loss(model, batch)
        tuner.tell_phase("backward")
        scaler.scale(loss).backward()
        tuner.tell_phase("update")
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        tuner.end_step()
        run.log(loss, scaler.get_scale())
    run.keep(model, optimizer, scaler)
