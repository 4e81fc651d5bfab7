"""A Llama in bfloat16 by autocast, with weights in 32 bits."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=micro, labels=micro).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
