"""Two forked workers load and augment the batches."""

import torch
from torch.utils.data import DataLoader, Dataset

from zoo import VOCABULARY, Run, next_token_loss, small_gpt


class Texts(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        text = torch.arange(index, index + 16) % VOCABULARY
        return torch.where(torch.rand(16) < 0.1, 0, text)


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(Texts(), 4, shuffle=True, num_workers=2, multiprocessing_context="fork")
    tuner = run.attach(model, optimizer)
    for _ in range(run.steps // len(loader)):
        for batch in loader:
            for micro in tuner.micro_batches(batch):
                loss = next_token_loss(model, micro)
                tuner.backward(loss)
            tuner.step()
            run.log(loss)
    run.keep(model, optimizer)
