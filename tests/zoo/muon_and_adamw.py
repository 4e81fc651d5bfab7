"""Two optimizers: Muon for the matrices of the blocks, AdamW for all other parameters."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
    chosen = set(matrices)
    muon = torch.optim.Muon(matrices, 1e-2, momentum=0.95)
    adamw = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter not in chosen], 1e-3)
    tuner = run.attach(model, muon)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        adamw.step()
        adamw.zero_grad()
        run.log(loss)
    run.keep(model, muon, adamw)
