"""RoBERTa classifies tokens, some of which have no label."""

import torch
from transformers import RobertaConfig, RobertaForTokenClassification

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=40,
        num_labels=3,
    )
    model = RobertaForTokenClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for ids, labels in tuner.micro_batches((batch, (batch % 3).masked_fill(batch == 0, -100))):
            loss = model(input_ids=ids, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
