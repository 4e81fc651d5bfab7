"""Gemma 3: layers attend in a sliding window and in full in turn."""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
    )
    model = Gemma3ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps, rows=2, length=12):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
