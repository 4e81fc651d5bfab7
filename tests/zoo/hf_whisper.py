"""Whisper: convolutions over a spectrogram, an encoder, and a decoder with a cache."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=16,
        max_target_positions=24,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = WhisperForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for words in texts(run.steps, length=12):
        for sounds, labels in tuner.micro_batches((torch.randn(len(words), 8, 32), words)):
            loss = model(input_features=sounds, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
