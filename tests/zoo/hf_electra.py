"""ELECTRA's discriminator detects replaced words."""

import torch
from transformers import ElectraConfig, ElectraForPreTraining

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = ElectraConfig(
        vocab_size=VOCABULARY,
        embedding_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=40,
    )
    model = ElectraForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        exchanged = torch.rand(batch.shape) < 0.5
        for ids, labels in tuner.micro_batches((batch.where(exchanged, batch.flip(1)), exchanged.long())):
            loss = model(input_ids=ids, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
