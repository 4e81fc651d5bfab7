"""RWKV: a recurrence over time with a state that layers pass on."""

import torch
from transformers import RwkvConfig, RwkvForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = RwkvConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        context_length=32,
    )
    model = RwkvForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
