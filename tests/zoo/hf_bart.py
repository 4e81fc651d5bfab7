"""BART as it comes, with dropout and a padded source."""

import torch
from transformers import BartConfig, BartForConditionalGeneration

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
    )
    model = BartForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=0.1)
    for batch in texts(run.steps, length=24):
        for source, target in tuner.micro_batches((batch[:, :14], batch[:, 14:].contiguous())):
            loss = model(input_ids=source, attention_mask=(source != 1).long(), labels=target).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
