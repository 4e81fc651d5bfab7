"""A thread prepares batches during training and draws from the generators of Python and numpy."""

import queue
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch

from zoo import VOCABULARY, Run, next_token_loss, small_gpt


def prefetched(steps: int) -> Iterator[torch.Tensor]:
    ready: queue.Queue[torch.Tensor] = queue.Queue(maxsize=4)

    def prepare() -> None:
        for _ in range(steps):
            text = np.random.randint(0, VOCABULARY, (4, 64))  # noqa: NPY002
            rows = []
            for row in text:
                start = random.randint(0, 48)
                kept = [token if random.random() > 0.1 else 0 for token in row[start : start + 16]]
                rows.append(np.array(kept))
            ready.put(torch.from_numpy(np.stack(rows)))

    thread = threading.Thread(target=prepare, daemon=True)
    thread.start()
    for _ in range(steps):
        yield ready.get()
    thread.join()


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in prefetched(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
