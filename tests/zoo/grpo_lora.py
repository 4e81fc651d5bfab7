"""Group-relative policy optimisation: texts of several lengths, and reference scores with the adapters switched off."""

import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from zoo import VOCABULARY, Run, texts

PROMPT, GROUP, EPOCHS = 6, 4, 2


def scores(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found = model(input_ids=ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return found.gather(-1, ids[:, PROMPT:, None])[..., 0]


def written(model: Any, prompts: torch.Tensor, length: int) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        ids = model.generate(
            input_ids=prompts.repeat_interleave(GROUP, 0),
            attention_mask=torch.ones(len(prompts) * GROUP, PROMPT),
            do_sample=True,
            max_new_tokens=length,
            min_new_tokens=3,
        )
    model.train()
    return ids


def advantages(ids: torch.Tensor) -> torch.Tensor:
    rewards = (ids[:, PROMPT:] == 5).float().sum(1).view(-1, GROUP)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def train(run: Run) -> None:
    warnings.simplefilter("ignore")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for number, prompts in enumerate(texts(run.steps, rows=2, length=PROMPT)):
        ids = written(model, prompts, 3 + number % 5)
        batch = ids, (ids[:, PROMPT:] != 0).float(), advantages(ids)
        former = None
        for _ in range(EPOCHS):
            for part, mask, advantage in tuner.micro_batches(batch):
                own = scores(model, part)
                with torch.no_grad(), model.disable_adapter():
                    reference = scores(model, part)
                if former is None:
                    former = own.detach()
                ratio = (own - former).exp()
                penalty = (reference - own).exp() - (reference - own) - 1
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = -((gain - 0.04 * penalty) * mask).sum() / mask.sum()
                tuner.backward(loss)
            tuner.step()
            run.log(loss)
    run.keep(model, optimizer)
