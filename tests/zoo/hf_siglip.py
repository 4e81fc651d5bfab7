"""SigLIP: the loss judges each pair of a batch independently."""

import torch
from transformers import SiglipConfig, SiglipModel

from autotune import Settings
from zoo import VOCABULARY, Run, images, texts


def train(run: Run) -> None:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config={**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "projection_size": 16},
        vision_config={**tower, "image_size": 16, "patch_size": 4},
    )
    model = SiglipModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, settings=Settings(accumulation_choices=(1,)))
    for (pixels, _), words in zip(images(run.steps), texts(run.steps), strict=True):
        for pictures, captions in tuner.micro_batches((pixels, words)):
            loss = model(input_ids=captions, pixel_values=pictures, return_loss=True).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
