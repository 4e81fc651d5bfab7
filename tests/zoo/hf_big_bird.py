"""BigBird: sparse attention that draws its blocks by numpy."""

import torch
from transformers import BigBirdConfig, BigBirdForMaskedLM

from zoo import VOCABULARY, Run, texts

WHY = "NumPy's generator"
LOCKED = {f"bert.encoder.layer.{number}": WHY for number in range(3)}


def train(run: Run) -> None:
    config = BigBirdConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
        attention_type="block_sparse",
        block_size=4,
        num_random_blocks=2,
    )
    model = BigBirdForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps, rows=2, length=48):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
