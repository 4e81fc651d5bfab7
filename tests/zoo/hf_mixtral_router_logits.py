"""A Mixtral whose loss includes the load balancing of its routers, whose logits the layers return."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        router_aux_loss_coef=0.1,
        output_router_logits=True,
    )
    model = MixtralForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            out = model(input_ids=micro, labels=micro)
            tuner.backward(out.loss)
        tuner.step()
        run.log(out.loss, out.aux_loss)
    run.keep(model, optimizer)
