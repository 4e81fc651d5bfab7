"""The U-Net of Stable Diffusion, conditioned on texts by cross-attention; a bar shows the progress."""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from tqdm.auto import tqdm

from zoo import VOCABULARY, Run, images, texts


def train(run: Run) -> None:
    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    words = torch.nn.Embedding(VOCABULARY, 16).requires_grad_(False)
    noises = DDPMScheduler(num_train_timesteps=100, prediction_type="v_prediction")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    pairs = zip(images(run.steps, side=8), texts(run.steps, length=6), strict=True)
    for (clean, _), captions in tqdm(pairs, total=run.steps):
        noise, times = torch.randn_like(clean), torch.randint(0, 100, (len(clean),))
        target = noises.get_velocity(clean, noise, times)
        batch = noises.add_noise(clean, noise, times), target, times, captions
        for noisy, wanted, when, tokens in tuner.micro_batches(batch):
            loss = torch.nn.functional.mse_loss(model(noisy, when, words(tokens)).sample, wanted)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
