"""Options of ``autotune plan`` that describe a transformer and many devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.arguments import input_path

_LARGEST = 2**31

Devices = Annotated[str | None, typer.Option("--devices", help="Number of devices, or several numbers: 64,128,256.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", callback=input_path, help="A config.json of Hugging Face; weights are not needed."),
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, max=_LARGEST, help="Number of blocks.")]
Hidden = Annotated[int | None, typer.Option("--hidden", min=1, max=_LARGEST, help="Width of the residual stream.")]
Heads = Annotated[int | None, typer.Option("--heads", min=1, max=_LARGEST, help="Number of attention heads.")]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", min=1, max=_LARGEST, help="Number of heads of keys and values.")
]
Ffn = Annotated[int | None, typer.Option("--ffn", min=1, max=_LARGEST, help="Width of the feed-forward layer.")]
Vocab = Annotated[int | None, typer.Option("--vocab", min=1, max=_LARGEST, help="Number of tokens in the vocabulary.")]
Sequence = Annotated[int | None, typer.Option("--seq", min=1, max=_LARGEST, help="Tokens in one sequence.")]
Gated = Annotated[
    bool | None, typer.Option("--gated/--not-gated", help="Feed-forward layers have a gate, as in Llama.")
]
Tied = Annotated[
    bool | None, typer.Option("--tied/--not-tied", help="The output projection has the embedding's weights.")
]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, max=_LARGEST, help="Sequences in one step; about 4 M tokens by default."),
]
Fixed = Annotated[
    str, typer.Option("--plan", help="Choices that are given instead of searched: tp=8,pp=2,checkpointing=full.")
]
Trainable = Annotated[
    str | None, typer.Option("--trainable", help="Share of the parameters that is trained, as in 0.5% for LoRA.")
]
PerNode = Annotated[int, typer.Option("--per-node", min=1, max=1024, help="Devices in one node.")]
Link = Annotated[str | None, typer.Option("--link", help="Rate between nodes, of one node: 3200Gbit/s or 400GB/s.")]
InnerLink = Annotated[str | None, typer.Option("--inner-link", help="Rate inside a node, of one device: 450GB/s.")]
Top = Annotated[int, typer.Option("--top", min=1, max=100, help="Number of layouts to show.")]
