"""T5: an encoder and a decoder that share relative position biases between their layers."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps, length=24):
        for source, target in tuner.micro_batches((batch[:, :14], batch[:, 14:].contiguous())):
            loss = model(input_ids=source, labels=target).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
