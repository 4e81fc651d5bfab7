"""A mixture of experts with a shared one, and the load balancing of its routers in the loss."""

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen2MoeForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            out = model(input_ids=micro, labels=micro, output_router_logits=True)
            tuner.backward(out.loss)
        tuner.step()
        run.log(out.loss, out.aux_loss)
    run.keep(model, optimizer)
