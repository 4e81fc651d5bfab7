"""Longformer: a sliding window, and the first token seen by all."""

import torch
from transformers import LongformerConfig, LongformerForMaskedLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = LongformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=40,
        attention_window=8,
        pad_token_id=0,
    )
    model = LongformerForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps, length=24):
        for micro in tuner.micro_batches(batch):
            loss = model(
                input_ids=micro,
                labels=micro,
                global_attention_mask=(torch.arange(micro.shape[1]) < 1).long().expand_as(micro),
            ).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
