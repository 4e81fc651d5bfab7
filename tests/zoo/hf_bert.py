"""BERT learns to fill in masked words, which are drawn anew for each batch."""

import torch
from transformers import BertConfig, BertForMaskedLM

from zoo import VOCABULARY, Run, texts

MASK = 4


def train(run: Run) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        masked = torch.rand(batch.shape) < 0.15
        labels = batch.masked_fill(~masked, -100)
        for ids, targets in tuner.micro_batches((batch.masked_fill(masked, MASK), labels)):
            loss = model(input_ids=ids, labels=targets).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
