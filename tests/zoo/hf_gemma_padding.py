"""A Gemma over texts of different lengths, padded on the left, with the padding out of the loss."""

import torch
from transformers import GemmaConfig, GemmaForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = GemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
    )
    model = GemmaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for words in texts(run.steps):
        padding = torch.arange(words.shape[1]) < torch.randint(0, 10, (len(words), 1))
        batch = {
            "input_ids": words.masked_fill(padding, 0),
            "attention_mask": (~padding).long(),
            "labels": words.masked_fill(padding, -100),
        }
        for micro in tuner.micro_batches(batch, count=lambda part: int((part["labels"][:, 1:] != -100).sum())):
            loss = model(**micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
