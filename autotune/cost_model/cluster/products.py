"""Seconds of a block's operations on one rank: matrix products by shape, attention kernels, and what moves memory."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost_model.cluster.constants import Constants
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.machines import Machine
from autotune.cost_model.cluster.transformer import Transformer

# Tile of a product's result that one multiprocessor computes at a time: the largest of cuBLAS and CUTLASS.
_TILE = (128, 256)
# Elements to which sizes should be aligned: 128 bytes.
_ALIGNED = 64
# A causal mask leaves half of the scores to compute.
_CAUSAL = 0.5
# The backward pass of attention has five products for the forward pass's two. Source: FlashAttention-2, section 3.
_ATTENTION_BACKWARD = 2.5
# Width of a head that attention's softmax costs as much as: heads of 64 reach 0.9 of the rate of heads of 128.
# Source: FlashAttention-2, figures 4 and 6.
_HEAD_LOSS = 16
# Bytes moved for one score where scores are kept: product, mask, softmax and dropout forward; twice that backward.
_SCORE_BYTES = (12.0, 24.0)
# Bytes moved for one logit by a fused loss: written, read twice, overwritten, and read by the projection's gradients.
_FUSED_LOSS_BYTES = 12.0
# Share of a block's products that are run again under selective checkpointing, which saves every other product.
SELECTIVE_SHARE = 0.5
# Operations launched by one block, forward and backward, without fusion.
_LAUNCHES = (18, 36)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one pass through one block.

    Attributes:
        products: matrix products of linear layers.
        attention: attention's own products and softmax.
        memory: operations bound by memory bandwidth.
        launches: host time to launch the operations.
    """

    products: float
    attention: float
    memory: float
    launches: float

    @property
    def total(self) -> float:
        """Return the seconds of the pass; the host runs ahead of the device unless it is the slower of both."""
        return max(self.products + self.attention + self.memory, self.launches)


def sustained_flops(machine: Machine, constants: Constants) -> float:
    """Return the operations per second of 16-bit products at the clock that the power limit leaves.

    Args:
        machine: the device.
        constants: the model's constants.
    """
    needed = machine.peak_flops / 1e12 * constants.watts_per_teraflops * machine.joules_per_flop
    return machine.peak_flops * float(min(1.0, (machine.watts / needed) ** constants.power_exponent))


def product_seconds(m: int, n: int, k: int, machine: Machine, constants: Constants, *, gain: float = 1.0) -> float:
    """Return the seconds of a product of an m x k with a k x n matrix of 16-bit numbers.

    Args:
        m: rows of the result.
        n: columns of the result.
        k: inner length.
        machine: the device.
        constants: the model's constants.
        gain: rate over that of 16-bit products.

    Returns:
        The larger of the time to compute, with the idle parts of tiles and waves and unaligned sizes, and the time to
        move the three matrices.
    """
    rows, columns = -(-m // _TILE[0]) * _TILE[0], -(-n // _TILE[1]) * _TILE[1]
    waves = rows * columns / (_TILE[0] * _TILE[1] * machine.processors)
    share = constants.gemm_share * waves / (waves + constants.wave_loss) * k / (k + constants.depth_loss)
    share *= (1 - constants.alignment_loss) ** _halvings(n, k)
    computing = 2.0 * rows * columns * k / (sustained_flops(machine, constants) * share * gain)
    moving = 2.0 * (m * k + k * n + m * n) / (machine.bandwidth * constants.bandwidth_share)
    return max(computing, moving)


def _halvings(n: int, k: int) -> int:
    """Return how often the alignment of the less aligned of two sizes halves below the best one."""
    lowest = min(_ALIGNED, n & -n, k & -k)
    return (_ALIGNED // lowest).bit_length() - 1


def block_seconds(
    model: Transformer, layout: Layout, machine: Machine, constants: Constants
) -> tuple[Seconds, Seconds, Seconds]:
    """Return the seconds of one micro-batch in one block: forward, backward, and what is run again in between.

    Args:
        model: the transformer.
        layout: the layout; its tensor and context parallelism divide the work.
        machine: the device.
        constants: the model's constants.
    """
    gain = constants.float8_gain if layout.float8 else 1.0
    forward = backward = 0.0
    for share, (m, n, k) in _shapes(model, layout):
        forward += share * product_seconds(m, n, k, machine, constants, gain=gain)
        inputs = product_seconds(m, k, n, machine, constants, gain=gain)
        backward += share * (inputs + layout.trainable * product_seconds(k, n, m, machine, constants, gain=gain))
    attention = _attention(model, layout, machine, constants)
    memory = _memory(model, layout, machine, constants)
    launch = constants.kernel_s * (constants.fused_traffic if layout.fuses else 1.0)
    passes = (
        Seconds(forward, attention[0], memory[0], launch * _LAUNCHES[0]),
        Seconds(backward, attention[1], memory[1], launch * _LAUNCHES[1]),
    )
    return (*passes, _again(passes[0], layout))


def _again(forward: Seconds, layout: Layout) -> Seconds:
    """Return the seconds of what is recomputed, the mean of all blocks."""
    share = 0.0 if layout.checkpointing == "none" else layout.checkpointed
    products = share * (SELECTIVE_SHARE if layout.checkpointing == "selective" else 1.0)
    attention = 0.0 if layout.checkpointing == "selective" else share
    return Seconds(
        products * forward.products,
        attention * forward.attention,
        share * forward.memory,
        products * forward.launches,
    )


def _shapes(model: Transformer, layout: Layout) -> list[tuple[float, tuple[int, int, int]]]:
    """Return the share of the blocks that has a product, and its rows, columns and inner length on one rank."""
    tokens, tp = layout.tokens, layout.tp
    queries, keys = max(1, model.attention_width // tp), max(model.head_dim, model.kv_width // tp)
    attention = [(tokens, queries + 2 * keys, model.hidden), (tokens, model.hidden, queries)]
    found = [(1.0, shape) for shape in attention]
    sparse = model.sparse_share
    layers = [(1 - sparse, tokens, model.dense_ffn if model.experts > 1 else model.ffn)]
    layers += [(sparse, _routed(model, tokens), model.ffn), (sparse, tokens, model.shared_ffn)]
    for share, rows, width in layers:
        if share and width:
            ffn = max(1, width // tp)
            found.append((share, (rows, ffn * (2 if model.gated else 1), model.hidden)))
            found.append((share, (rows, model.hidden, ffn)))
    return found


def _routed(model: Transformer, tokens: int) -> int:
    """Return the rows of the products of all experts, each of which fills whole tiles; tokens are divided evenly."""
    each = -(-tokens * model.active // model.experts)
    return model.experts * -(-each // _TILE[0]) * _TILE[0]


def _attention(model: Transformer, layout: Layout, machine: Machine, constants: Constants) -> tuple[float, float]:
    """Return attention's seconds, forward and backward."""
    scores = layout.tokens * layout.sequence * max(1, model.heads // layout.tp)
    rate = sustained_flops(machine, constants) * constants.gemm_share
    if layout.fused_attention:
        rate *= constants.attention_share * (1.0 if layout.tuned else machine.attention_factor)
        rate *= model.head_dim / (model.head_dim + _HEAD_LOSS)
        # Tiles on the diagonal of a causal mask are computed as a whole.
        rate *= layout.sequence / (layout.sequence + _TILE[0])
        forward = 4.0 * scores * model.head_dim * _CAUSAL / rate
        return forward, _ATTENTION_BACKWARD * forward
    aligned = (1 - constants.alignment_loss) ** _halvings(model.head_dim, model.head_dim)
    computing = 4.0 * scores * model.head_dim / (rate * aligned)
    moving = [scores * one / (machine.bandwidth * constants.bandwidth_share) for one in _SCORE_BYTES]
    return computing + moving[0], 2 * computing + moving[1]


def _memory(model: Transformer, layout: Layout, machine: Machine, constants: Constants) -> tuple[float, float]:
    """Return the seconds of cheap operations, forward and backward.

    Elements per token: two normalisations and two residual additions read and write ten times the hidden size, the
    copies of queries, keys and values read and write them once, and the activation function reads and writes its width
    (with a gate, two functions do). The backward pass moves about half as much again, and what biases and weights of
    normalisations reduce.
    """
    split = layout.tp if layout.sequence_parallel else 1
    # Tokens are copied for each of their experts, whose results are added up.
    streams = (10.0 + 4.0 * model.sparse_share * model.active) * model.hidden / split
    ffn = (5.0 if model.gated else 2.0) * model.active_ffn
    inner = (2.0 * (model.attention_width + 2 * model.kv_width) + ffn) / layout.tp
    factor = constants.traffic * (constants.fused_traffic if layout.fuses else 1.0)
    forward = 2.0 * layout.tokens * (streams + inner) * factor / (machine.bandwidth * constants.bandwidth_share)
    return forward, 1.5 * forward


def head_seconds(model: Transformer, layout: Layout, machine: Machine, constants: Constants) -> float:
    """Return the seconds of the output projection and the loss for one micro-batch, forward and backward.

    Args:
        model: the transformer.
        layout: the layout; tensor parallelism splits the vocabulary.
        machine: the device.
        constants: the model's constants.
    """
    columns = -(-model.vocab // layout.tp)
    products = sum(
        product_seconds(*shape, machine, constants)
        for shape in (
            (layout.tokens, columns, model.hidden),
            (layout.tokens, model.hidden, columns),
            (columns, model.hidden, layout.tokens),
        )
    )
    each = _FUSED_LOSS_BYTES if layout.fused_loss else constants.loss_bytes
    moved = each * layout.tokens * columns
    return products + moved / (machine.bandwidth * constants.bandwidth_share)
