"""Falcon: parallel attention and feed-forward layers, with ALiBi and one head of keys and values."""

import torch
from transformers import FalconConfig, FalconForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        alibi=True,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    model = FalconForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
