"""A Llama whose loss also reads the attention weights and the hidden states of its layers."""

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
        num_key_value_heads=1,
        attention_dropout=0.1,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            out = model(input_ids=micro, labels=micro, output_attentions=True, output_hidden_states=True)
            sharpness = torch.stack([weights.square().mean() for weights in out.attentions]).mean()
            sizes = torch.stack([states.square().mean() for states in out.hidden_states]).mean()
            loss = out.loss + 0.1 * sharpness + 0.01 * sizes
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
