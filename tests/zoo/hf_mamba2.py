"""Mamba 2: state spaces with heads, computed in chunks."""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_heads=4,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=8,
    )
    model = Mamba2ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
