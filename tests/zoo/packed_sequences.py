"""Packed sequences of several lengths through stacked LSTM layers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from zoo import VOCABULARY, WIDTH, Run, texts

# Memory depends on the lengths, which are values of the batch, so no shape shows a new maximum: in these steps, they
# are more in all than in any before.
SURPRISES = (1, 3, 15, 21)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.dropout = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Dropout(0.1)

    def forward(self, x: PackedSequence) -> PackedSequence:
        y, _ = self.lstm(x)
        return y._replace(data=x.data + self.dropout(y.data))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            x = layer(x)
        return self.head(pad_packed_sequence(x, batch_first=True, total_length=tokens.shape[1])[0])


def train(run: Run) -> None:
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    generator = torch.Generator().manual_seed(5)
    for tokens in texts(run.steps, rows=6):
        lengths = torch.randint(4, 17, (6,), generator=generator)
        for x, sizes in tuner.micro_batches((tokens, lengths)):
            scores, tags = model(x, sizes), x % 3
            mask = torch.arange(x.shape[1]) < sizes[:, None]
            loss = F.cross_entropy(scores[mask], tags[mask])
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
