"""Two BERTs, the second of which attends to the first, translate."""

import warnings

import torch
from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**sizes), BertConfig(**sizes))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = EncoderDecoderModel(config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps, length=24):
        for source, target in tuner.micro_batches((batch[:, :14], batch[:, 14:].contiguous())):
            loss = model(input_ids=source, labels=target).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
