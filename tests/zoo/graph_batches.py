"""A graph network whose batch is a dictionary of node features, edges and a sparse adjacency matrix."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.neighbours, self.edges = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        source, target = edge_index
        messages = torch.zeros_like(x).index_add(0, target, self.edges(x[source] - x[target]).relu())
        return x + F.gelu(self.own(x) + torch.sparse.mm(adjacency, self.neighbours(x)) + messages)


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([GraphConvolution() for _ in range(4)]), nn.Linear(WIDTH, 3)

    def forward(self, graph: dict[str, torch.Tensor]) -> torch.Tensor:
        x = graph["x"]
        for layer in self.layers:
            x = layer(x, graph["edge_index"], graph["adjacency"])
        return self.head(x)


def graphs(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for x in points(steps, rows=30):
        edges = torch.randint(0, 30, (2, 90), generator=generator)
        adjacency = torch.sparse_coo_tensor(edges, torch.full((90,), 1 / 3), (30, 30), check_invariants=True).coalesce()
        labels = torch.randint(0, 3, (30,), generator=generator)
        found.append({"x": x, "edge_index": edges, "adjacency": adjacency, "labels": labels})
    return found


def train(run: Run) -> None:
    model = GraphNetwork()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tuner = run.attach(model, optimizer)
    for batch in graphs(run.steps):
        for graph in tuner.micro_batches(batch):
            loss = F.cross_entropy(model(graph), graph["labels"])
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
