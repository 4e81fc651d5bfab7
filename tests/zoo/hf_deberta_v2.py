"""DeBERTa: relative positions in attention, with its own dropout."""

import torch
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=40,
        relative_attention=True,
        pos_att_type="p2c|c2p",
        position_buckets=8,
        share_att_key=True,
        num_labels=3,
    )
    model = DebertaV2ForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for ids, labels in tuner.micro_batches((batch, batch.sum(1) % 3)):
            loss = model(input_ids=ids, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
