"""Every fourth batch runs out of memory in a block, in forward, after it or in backward, and is skipped."""

import torch

from zoo import Block, Run, Stack, next_token_loss, texts


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Greedy(Block):
    """A block that runs out of memory on request."""

    place = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.place == "forward":
            out_of_memory()
        return y


def train(run: Run) -> None:
    model = Stack([Block(), Greedy(), Block(), Greedy()])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    greedy = model.blocks[3]
    model.blocks[1].mix[0].weight.register_hook(lambda _: out_of_memory() if greedy.place == "backward" else None)
    for number, batch in enumerate(texts(run.steps)):
        greedy.place = ("forward", "between", "backward")[number // 4 % 3] if number % 4 == 3 else ""
        try:
            for micro in tuner.micro_batches(batch):
                loss = next_token_loss(model, micro)
                if greedy.place == "between":
                    out_of_memory()
                tuner.backward(loss)
            tuner.step()
            run.log(loss)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
    run.keep(model, optimizer)
