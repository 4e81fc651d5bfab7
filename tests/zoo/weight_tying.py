"""The head shares the embedding's weights, and every second block those of the block before it."""

import torch

from zoo import Block, Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    model.head.weight = model.embedding.weight
    for one, two in zip(model.blocks[::2], model.blocks[1::2], strict=True):
        assert isinstance(one, Block)
        assert isinstance(two, Block)
        two.mix[0].weight, two.mix[2].weight = one.mix[0].weight, one.mix[2].weight
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
