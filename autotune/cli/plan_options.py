"""Options of ``autotune plan`` that describe a transformer and many devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.arguments import input_path, output_file

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
Find = Annotated[
    str | None,
    typer.Option("--find", help="Show what just fits: devices, sequence or micro-batch."),
]
Export = Annotated[
    str | None,
    typer.Option("--export", help="Settings for torchtitan, megatron, deepspeed or accelerate."),
]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Tokens of the whole run, as in 300B, for its costs.")]
Price = Annotated[str | None, typer.Option("--price", help="Price of one device and hour, as in 2.5USD.")]
Watts = Annotated[
    float | None, typer.Option("--watts", min=0.001, max=1e6, help="Mean power of one device; its limit by default.")
]
Carbon = Annotated[
    str | None, typer.Option("--carbon-intensity", help="Grams of CO2 per kWh: a number, or a CSV file of a series.")
]
Within = Annotated[str | None, typer.Option("--within", help="Choose the cheapest plan that ends within, as in 2d.")]
WithinCost = Annotated[
    str | None, typer.Option("--within-cost", help="Choose the fastest plan that costs at most, as in 10000USD.")
]
Failures = Annotated[
    float | None,
    typer.Option("--failures", min=1e-12, max=1.0, help="Failures of one device in a day, as in 0.0005."),
]
SnapshotTime = Annotated[
    float, typer.Option("--snapshot-time", min=0.001, max=86_400, help="Seconds for which a snapshot stops a run.")
]
RestartTime = Annotated[
    float, typer.Option("--restart-time", min=0, max=86_400, help="Seconds from a failure until training goes on.")
]
Figure = Annotated[
    Path | None,
    typer.Option("--figure", callback=output_file, help="PNG file for the plans that no other beats in time and cost."),
]
