"""Phi: rotary positions on a part of each head, and parallel attention and feed-forward layers."""

import torch
from transformers import PhiConfig, PhiForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = PhiConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        resid_pdrop=0.1,
        attention_dropout=0.1,
    )
    model = PhiForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
