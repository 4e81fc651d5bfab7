"""ALBERT: one layer, called four times for each batch."""

import torch
from transformers import AlbertConfig, AlbertForMaskedLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=8,
        inner_group_num=2,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=40,
    )
    model = AlbertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for ids, labels in tuner.micro_batches((batch.masked_fill(torch.rand(batch.shape) < 0.15, 4), batch)):
            loss = model(input_ids=ids, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
