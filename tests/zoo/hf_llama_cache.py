"""A Llama that fills its cache of keys and values during training, which is its default."""

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
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            out = model(input_ids=micro, labels=micro)
            assert out.past_key_values.get_seq_length() == micro.shape[1]
            tuner.backward(out.loss)
        tuner.step()
        run.log(out.loss)
    run.keep(model, optimizer)
