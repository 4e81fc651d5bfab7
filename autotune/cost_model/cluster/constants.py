"""The constants of the cost model: what each means, its unit, where its first value comes from, and its fitted value.

``prior`` is the value before any published run was looked at and ``spread`` its uncertainty (one standard deviation of
its logarithm). The fit moves a constant as far as the published runs support it: one that they say nothing about stays
at its prior. A constant with a spread of 0 is never fitted.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a constant is, and what was known of it before the fit."""

    text: str
    unit: str
    source: str
    prior: float
    spread: float


def _constant(prior: float, spread: float, unit: str, text: str, source: str) -> Any:
    return field(
        default=prior,
        metadata={"meaning": Meaning(text=text, unit=unit, source=source, prior=prior, spread=spread)},
    )


_ASSUMED = "assumption"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All constants of the model; :func:`meanings` describes them."""

    gemm_share: float = _constant(
        0.85,
        0.08,
        "share of the sustained rate",
        "rate of a large matrix product",
        "about 270 of 312 TFLOP/s on an A100 at 8,192 x 8,192; NVIDIA's matrix multiplication guide",
    )
    watts_per_teraflops: float = _constant(
        1.0,
        0.15,
        "W per TFLOP/s",
        "power that products of 16 bits need at the published clock, in a 4 nm process",
        "an H100 of 700 W reaches about 700 of 989 TFLOP/s",
    )
    power_exponent: float = _constant(
        0.4,
        0.2,
        "exponent",
        "the clock under a power limit follows the limit with this exponent",
        "dynamic power is clock times voltage squared: 1/3 if voltage follows the clock, more where it follows less",
    )
    wave_loss: float = _constant(
        0.3, 0.4, "waves", "tiles of a product that its last wave leaves idle", "uniform remainders would lose 0.5"
    )
    depth_loss: float = _constant(
        128.0, 0.5, "elements", "inner length in which a product's prologue and epilogue would compute", _ASSUMED
    )
    alignment_loss: float = _constant(
        0.1,
        0.5,
        "share per halving",
        "rate lost by each halving of a size's alignment below 64 elements",
        "Anthony et al. 2024 (arXiv:2401.14489), sections 4 and 6",
    )
    attention_share: float = _constant(
        0.6,
        0.15,
        "share of a large product's rate",
        "rate of a fused attention kernel whose heads are wide",
        "FlashAttention-2 (Dao 2023, arXiv:2307.08691), figures 4 to 6: about 0.6 of what products reach",
    )
    traffic: float = _constant(
        1.3,
        0.3,
        "factor",
        "bytes that cheap operations move, over those of a block's tensors read and written once per operation",
        _ASSUMED,
    )
    fused_traffic: float = _constant(
        0.5, 0.25, "factor", "share of that traffic which remains where torch.compile fuses", _ASSUMED
    )
    bandwidth_share: float = _constant(
        0.8, 0.0, "share", "memory bandwidth that large copies reach", "STREAM-like copies on A100 and H100"
    )
    loss_bytes: float = _constant(
        30.0,
        0.3,
        "bytes per logit",
        "bytes moved by the loss for one logit, forward and backward",
        "logits written in 16 bits, read and written in fp32 by the cast, the softmax and its gradient",
    )
    link_share: float = _constant(
        0.75, 0.15, "share", "rate of collectives over that of the link", "NCCL's bus bandwidth on DGX machines"
    )
    exposed_share: float = _constant(
        0.15,
        0.5,
        "share",
        "share of a hidden collective's time by which it slows the computing that hides it",
        _ASSUMED,
    )
    latency_s: float = _constant(
        5e-6, 0.0, "s per node", "time a ring's message takes from one node to the next", "NCCL's latency tables"
    )
    float8_gain: float = _constant(
        1.5,
        0.15,
        "factor",
        "rate of float8 products, casts included, over that of 16 bits",
        "torchao's float8 training figures for matrices of 4,096 to 16,384",
    )
    async_exposed: float = _constant(
        0.5, 0.0, "share", "share of a tensor-parallel collective that stays visible under async TP", _ASSUMED
    )
    kernel_s: float = _constant(
        6e-6, 0.0, "s", "host time to launch one operation", "PyTorch's eager overhead, 5 to 10 microseconds"
    )
    step_s: float = _constant(
        0.015, 0.5, "s", "time of a step that depends on nothing: data, clipping, logging, synchronisation", _ASSUMED
    )
    jitter: float = _constant(
        0.01,
        0.5,
        "share",
        "standard deviation of the ranks' step times, whose slowest rank all others wait for",
        "assumption: 1 % between equal devices",
    )
    context_bytes: float = _constant(
        2.5e9,
        0.3,
        "bytes",
        "memory outside the allocator: the driver's context, loaded kernels, and buffers of collectives",
        "0.5 GB of context and 0.3 to 0.5 GB for each communicator",
    )
    logit_bytes: float = _constant(
        12.0,
        0.15,
        "bytes per logit",
        "memory that the loss holds for one logit",
        "16-bit logits, their fp32 copy and its gradient, and a temporary of 16 bits",
    )
    working: float = _constant(
        1.5,
        0.25,
        "factor",
        "memory of the block in its backward pass, over the activations that it saves",
        "activations, and gradients of about half of them",
    )
    fragmentation: float = _constant(
        0.06,
        0.4,
        "share",
        "memory that the allocator reserves and cannot use, over what it has allocated",
        "reserved over allocated memory of long runs, a few to 30 %",
    )


def meanings() -> dict[str, Meaning]:
    """Return the meaning of each constant by its name."""
    return {one.name: one.metadata["meaning"] for one in fields(Constants)}


def from_values(values: Mapping[str, float]) -> Constants:
    """Return constants with some values given and the others at their priors."""
    return Constants(**{name: float(value) for name, value in values.items()})


@functools.cache
def fitted() -> Constants:
    """Return the constants as fitted to the published runs that the package carries."""
    text = importlib.resources.files(__package__).joinpath("fitted.json").read_text(encoding="utf-8")
    return from_values(json.loads(text)["constants"])
