"""CLIP: two towers, and a loss that compares all pairs of a batch."""

import torch
from transformers import CLIPConfig, CLIPModel

from autotune import Settings
from zoo import VOCABULARY, Run, images, texts


def train(run: Run) -> None:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**tower, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    model = CLIPModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, settings=Settings(accumulation_choices=(1,)))
    for (pixels, _), words in zip(images(run.steps), texts(run.steps), strict=True):
        for pictures, captions in tuner.micro_batches((pixels, words)):
            loss = model(input_ids=captions, pixel_values=pictures, return_loss=True).loss
            tuner.backward(loss)
        tuner.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)
        run.log(loss)
    run.keep(model, optimizer)
