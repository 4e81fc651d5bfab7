"""XLNet: two streams of attention, which permute the order of words."""

import torch
from transformers import XLNetConfig, XLNetLMHeadModel

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = XLNetConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        d_inner=32,
        n_layer=4,
        n_head=2,
    )
    model = XLNetLMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
