"""A U-Net with attention learns to remove noise from images."""

import torch
from diffusers import DDPMScheduler, UNet2DModel

from zoo import Run, images


def train(run: Run) -> None:
    model = UNet2DModel(
        sample_size=16,
        layers_per_block=2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
    )
    noises = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for clean, _ in images(run.steps):
        noise, times = torch.randn_like(clean), torch.randint(0, 100, (len(clean),))
        for noisy, target, when in tuner.micro_batches((noises.add_noise(clean, noise, times), noise, times)):
            loss = torch.nn.functional.mse_loss(model(noisy, when).sample, target)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
