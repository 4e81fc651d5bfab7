"""OPT skips layers at random, a different set at each step."""

import torch
from transformers import OPTConfig, OPTForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=40,
        layerdrop=0.2,
    )
    model = OPTForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
