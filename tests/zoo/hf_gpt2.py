"""GPT-2 from its config, with dropout, clipping and a warm-up."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=4, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 4, run.steps)
    model.train()
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        schedule.step()
        run.log(loss)
    run.keep(model, optimizer)
