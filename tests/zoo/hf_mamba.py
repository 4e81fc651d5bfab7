"""Mamba: state space layers instead of attention."""

import torch
from transformers import MambaConfig, MambaForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=4)
    model = MambaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
