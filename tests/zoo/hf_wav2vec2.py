"""wav2vec 2.0 learns speech by CTC, with spans masked by numpy and layers dropped at random."""

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from zoo import VOCABULARY, Run, texts


def train(run: Run) -> None:
    config = Wav2Vec2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.2,
        mask_time_prob=0.3,
        mask_time_length=2,
        ctc_loss_reduction="mean",
    )
    model = Wav2Vec2ForCTC(config).train()
    model.freeze_feature_encoder()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for words in texts(run.steps, length=5):
        for sounds, labels in tuner.micro_batches((torch.randn(len(words), 800), words.clamp(min=1))):
            loss = model(input_values=sounds, labels=labels).loss
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
