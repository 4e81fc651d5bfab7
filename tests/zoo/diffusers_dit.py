"""A DiT under classifier-free guidance: labels are dropped at random inside of the model."""

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel

from zoo import Run, images


def train(run: Run) -> None:
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        num_layers=4,
        sample_size=8,
        patch_size=2,
        norm_num_groups=1,
        num_embeds_ada_norm=100,
    ).train()
    noises = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for clean, labels in images(run.steps, side=8):
        noise, times = torch.randn_like(clean), torch.randint(0, 100, (len(clean),))
        batch = noises.add_noise(clean, noise, times), noise, times, labels
        for noisy, target, when, what in tuner.micro_batches(batch):
            loss = torch.nn.functional.mse_loss(model(noisy, timestep=when, class_labels=what).sample, target)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
