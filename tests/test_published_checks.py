"""Estimates of runs that no constant was fitted to: Megatron-LM in 8 bits on nodes of eight H100, as NVIDIA published.

Every dense model of two tables is here. What the tables do not say is assumed to be the same for all: gradients of 16
bits, no recomputation, collectives of tensor parallelism that overlap, and states that are sharded as ZeRO stage 1 (or
3, where the table says that weights are sharded).

Sources: NVIDIA NeMo, docs/source/performance/performance_summary.md (24.07); Megatron Bridge,
docs/performance-summary.md (25.11).
"""

from __future__ import annotations

import statistics
from typing import Any

from autotune.cost_model.cluster.constants import fitted
from autotune.cost_model.cluster.estimate import Estimate, estimate_layout
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.machines import find_machine
from autotune.cost_model.cluster.transformer import Transformer


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51_200, **others: Any) -> Transformer:
    return Transformer.of_sizes(layers=layers, hidden=hidden, heads=heads, vocab=vocab, **others)


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Transformer:
    return gpt(layers, hidden, heads, vocab, kv_heads=kv_heads, ffn=ffn, gated=True)


MODELS = {
    "GPT3-5B": gpt(24, 4096, 32, tied=True),
    "GPT3-20B": gpt(44, 6144, 48, tied=True),
    "GPT3-175B": gpt(96, 12_288, 96, tied=True),
    "LLAMA2-7B": llama(32, 4096, 32, 32, 11_008, 32_000),
    "LLAMA2-13B": llama(40, 5120, 40, 40, 13_824, 32_000),
    "LLAMA2-70B": llama(80, 8192, 64, 8, 28_672, 32_000),
    "Nemotron-8B": gpt(32, 4096, 32, 256_000),
    "Nemotron-22B": gpt(40, 6144, 48, 256_000, kv_heads=8),
    "Nemotron-340B": gpt(96, 18_432, 96, 256_000, kv_heads=8),
    "LLAMA3-8B": llama(32, 4096, 32, 8, 14_336, 128_256),
    "LLAMA3-70B": llama(80, 8192, 64, 8, 28_672, 128_256),
    "LLAMA3-405B": llama(126, 16_384, 128, 8, 53_248, 128_256),
}
# Model, devices, global batch, micro-batch, sequence, tp, pp, cp, virtual stages, ZeRO stage, tokens/s of one device.
RUNS = [
    ("GPT3-5B", 64, 2048, 4, 2048, 1, 1, 1, 1, 1, 22_521),
    ("GPT3-20B", 64, 256, 2, 2048, 2, 1, 1, 1, 1, 5851),
    ("GPT3-175B", 128, 256, 1, 2048, 4, 8, 1, 6, 1, 726),
    ("GPT3-175B", 512, 2048, 2, 2048, 4, 8, 1, 6, 1, 782),
    ("LLAMA2-7B", 8, 128, 1, 4096, 1, 1, 1, 1, 1, 16_847),
    ("LLAMA2-13B", 16, 128, 1, 4096, 1, 4, 1, 10, 1, 8646),
    ("LLAMA2-70B", 64, 128, 1, 4096, 4, 4, 1, 20, 1, 1707),
    ("Nemotron-8B", 64, 256, 4, 4096, 2, 1, 1, 1, 1, 12_701),
    ("Nemotron-22B", 64, 256, 2, 4096, 2, 4, 1, 10, 1, 4256),
    ("Nemotron-340B", 128, 32, 1, 4096, 8, 8, 1, 12, 1, 322),
    ("LLAMA3-8B", 8, 128, 1, 8192, 1, 1, 2, 1, 1, 12_036),
    ("LLAMA3-70B", 64, 128, 1, 8192, 4, 4, 2, 5, 1, 1533),
    ("LLAMA3-8B", 8, 128, 1, 8192, 1, 1, 1, 1, 3, 14_451),
    ("LLAMA3-70B", 64, 128, 1, 8192, 4, 8, 1, 5, 1, 1602),
    ("LLAMA3-405B", 1024, 512, 1, 8192, 8, 8, 2, 8, 1, 292),
]


def estimates() -> list[tuple[Estimate, float]]:
    found = []
    for name, devices, batch, micro_batch, sequence, tp, pp, cp, virtual, stage, rate in RUNS:
        shard = devices // (tp * pp * cp)
        layout = Layout(
            shard=shard,
            tp=tp,
            pp=pp,
            cp=cp,
            micro_batch=micro_batch,
            micro_batches=batch // (shard * micro_batch),
            sequence=sequence,
            zero_stage=stage,
            virtual_stages=virtual,
            compiled=True,
            float8=True,
            async_tp=tp > 1,
            fp32_weights=False,
            reduce_bytes=2,
        )
        found.append((estimate_layout(MODELS[name], layout, find_machine("h100"), fitted()), rate))
    return found


def test_runs_of_another_program_are_estimated_without_a_fit_to_them() -> None:
    errors = [one.tokens_per_s / one.layout.devices / rate - 1 for one, rate in estimates()]
    assert statistics.median(map(abs, errors)) <= 0.06
    assert max(map(abs, errors)) <= 0.18
    assert abs(statistics.mean(errors)) <= 0.05


def test_runs_that_were_published_are_not_refused() -> None:
    for one, _ in estimates():
        assert one.memory.needed <= one.machine.capacity_bytes, one.layout
