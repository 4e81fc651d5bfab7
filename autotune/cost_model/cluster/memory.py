"""Peak memory of the fullest rank of a layout, split by what it holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autotune.cost_model.cluster.constants import Constants
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.transformer import Transformer

# Bytes of a number of 8 bits, of 16 bits, and of fp32.
_NARROW, _HALF, _FULL = 1, 2, 4
# Elements of a bucket in which DeepSpeed reduces gradients and gathers weights; one of each is in use.
# Source: DeepSpeed's defaults for reduce_bucket_size and allgather_bucket_size.
_BUCKET = 5e8
# Blocks whose gathered weights are alive at once: the one that computes, and the next one.
_GATHERED = 2
# Bytes kept for one score where attention materialises scores: softmax's result, dropout's mask and its result.
# Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1.
_SCORE_BYTES = 5
# Bytes of one logit under a fused loss: itself, and a copy while the projection's gradient is computed. Losses over a
# vocabulary that ranks share need another fp32 temporary. Source: torch.distributed.tensor.parallel.loss.
_FUSED_LOGIT = 4.0
# Bytes of one logit in Megatron-LM's loss: itself, its softmax in fp32, which becomes its gradient in place, and the
# gradient in 16 bits. Source: megatron.core.tensor_parallel.cross_entropy.
_PARALLEL_LOGIT = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of the fullest rank at its peak; their sum is the peak.

    Attributes:
        weights: weights that the rank owns.
        gradients: gradients that it owns.
        optimizer: moments, and fp32 copies of 16-bit weights.
        activations: what blocks save between forward and backward.
        working: the block in its backward pass, and the loss.
        gathers: weights and gradients gathered for computing, buckets of reductions, and what the update needs beyond
            the activations that are free by then.
        context: what lies outside the allocator.
        fragmentation: what the allocator reserves and cannot use while enough is free.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    gathers: float
    context: float
    fragmentation: float

    @property
    def total(self) -> float:
        """Return the peak as the driver counts it."""
        return float(sum(asdict(self).values()))

    @property
    def reserved(self) -> float:
        """Return the peak as the allocator counts it."""
        return self.total - self.context

    @property
    def needed(self) -> float:
        """Return the peak without fragmentation, which the allocator returns before it fails."""
        return self.total - self.fragmentation


def predict_memory(model: Transformer, layout: Layout, constants: Constants) -> MemoryParts:
    """Return the predicted peak of the fullest rank.

    Args:
        model: the transformer.
        layout: the layout.
        constants: the model's constants.
    """
    stages = [0] if layout.pp == 1 else [0, layout.pp - 1]
    return max((_stage(model, layout, constants, stage) for stage in stages), key=lambda parts: parts.total)


def saved_bytes(model: Transformer, layout: Layout) -> float:
    """Return the bytes that one block saves of one micro-batch on one rank without checkpointing.

    Args:
        model: the transformer.
        layout: the layout; tensor parallelism splits the inner tensors.

    A gate's activation and its product are two tensors, of which fused kernels save one. Transformer Engine saves the
    inputs of 8-bit products in 8 bits, that of attention's projection beside the result that attention itself needs.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), eq. 1 to 4, without dropout.
    """
    narrow = _NARROW if layout.float8 and layout.tuned else _HALF
    # Tokens are copied for each of their experts, and so are the results, which are weighted.
    routed = (_HALF + narrow) * model.sparse_share * model.active
    streams = (2 * _HALF + 2 * narrow + routed) * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    attention = _HALF * (2 * model.attention_width + 2 * model.kv_width)
    attention += narrow * model.attention_width if narrow < _HALF else 0
    gate = (3 - layout.fuses) if model.gated else 1
    inner = attention + (_HALF * gate + narrow) * model.active_ffn
    scores = 0.0
    if not layout.fused_attention:
        scores = _SCORE_BYTES * model.heads / layout.tp * layout.sequence * layout.tokens
    return layout.tokens * (streams + inner / layout.tp) + scores


def _boundary(model: Transformer, layout: Layout) -> float:
    """Return the bytes of one block's input."""
    return _HALF * layout.tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)


def _kept_per_block(model: Transformer, layout: Layout) -> float:
    """Return the bytes that a block keeps of one micro-batch between forward and backward, the mean of all blocks."""
    saved = saved_bytes(model, layout)
    if layout.checkpointing == "none":
        return saved
    return layout.checkpointed * _kept_when_checkpointed(model, layout) + (1 - layout.checkpointed) * saved


def _kept_when_checkpointed(model: Transformer, layout: Layout) -> float:
    """Return the bytes that a checkpointed block keeps of one micro-batch."""
    if layout.checkpointing == "full":
        return 0.0 if layout.offload else _boundary(model, layout)
    ffn = (2 if model.gated else 1) * model.active_ffn
    results = 2 * model.hidden + model.attention_width + 2 * model.kv_width + ffn
    attention = model.attention_width
    return _boundary(model, layout) + _HALF * layout.tokens * (attention + results / 2) / layout.tp


def _in_flight(layout: Layout, stage: int) -> float:
    """Return the micro-batches whose activations a stage holds under 1F1B.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; interleaving adds (stages - 1)/(stages x chunks).
    """
    depth: float = layout.pp - stage
    if layout.virtual_stages > 1:
        depth = layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.virtual_stages))
    return min(layout.micro_batches, depth)


def _stage(model: Transformer, layout: Layout, constants: Constants, stage: int) -> MemoryParts:
    """Return the memory of one pipeline stage."""
    first, last = stage == 0, stage == layout.pp - 1
    layers = model.layers / layout.pp
    ends: float = (model.embedding_parameters if first else 0) + (model.head_parameters if last else 0)
    if last and not first and model.tied:
        ends += model.hidden * model.vocab
    parameters = (layers * model.layer_parameters + ends) / layout.tp
    block = model.layer_parameters / layout.tp
    weights, gradients, optimizer = _states(layout, parameters)
    activations = layers * _kept_per_block(model, layout) * _in_flight(layout, stage)
    working = _working(model, layout, constants, last=last)
    update = _update(layout, parameters)
    # Memory of activations is free by the update, but in pieces: the allocator reserves more until it runs out.
    pieces = min(update, activations + working)
    gathers = _gathers(layout, parameters, block) + update - pieces
    allocated = weights + gradients + optimizer + activations + working + gathers + pieces
    return MemoryParts(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        working=working,
        gathers=gathers,
        context=constants.context_bytes,
        fragmentation=constants.fragmentation * allocated + pieces,
    )


def _states(layout: Layout, parameters: float) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and the optimizer's states on one rank."""
    trained = layout.trainable * parameters
    split = [layout.sharding if layout.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    if layout.fp32_weights:
        return (
            _FULL * parameters / split[0],
            _FULL * trained / split[1],
            layout.optimizer_bytes * trained / split[2],
        )
    return (
        _HALF * parameters / split[0],
        _HALF * trained / split[1],
        (layout.optimizer_bytes + _FULL) * trained / split[2],
    )


def _working(model: Transformer, layout: Layout, constants: Constants, *, last: bool) -> float:
    """Return the bytes of the block in its backward pass, or of the loss where that is more."""
    saved = saved_bytes(model, layout)
    # What is recomputed is alive in addition to what was kept; otherwise only gradients are.
    block = (constants.working - (1.0 if layout.checkpointing == "none" else 0.0)) * saved
    gathered = _HALF * layout.tokens * model.hidden if layout.tp > 1 and layout.sequence_parallel else 0.0
    return max(block + 2 * gathered, _loss(model, layout, constants) + gathered if last else 0.0)


def _loss(model: Transformer, layout: Layout, constants: Constants) -> float:
    """Return the bytes that the loss holds."""
    each = _PARALLEL_LOGIT if layout.tuned else constants.logit_bytes + (_FULL if layout.tp > 1 else 0)
    return (_FUSED_LOGIT if layout.fused_loss else each) * layout.tokens * model.vocab / layout.tp


def _gathers(layout: Layout, parameters: float, block: float) -> float:
    """Return the bytes of gathered weights, gradients before their reduction, and buckets."""
    if layout.keeps_gathered:
        return (_HALF + layout.reduce_bytes * layout.trainable) * parameters
    if layout.gathers:
        return block * (_GATHERED * _HALF + _GATHERED * layout.reduce_bytes * layout.trainable)
    # Megatron-LM reduces and gathers in place.
    if layout.tuned or layout.sharding * layout.replicas == 1:
        return 0.0
    return min(_BUCKET, layout.trainable * parameters) * _HALF * 2


def _update(layout: Layout, parameters: float) -> float:
    """Return the bytes that the update needs when all activations are free: fp32 gradients of the rank's share."""
    return 0.0 if layout.fp32_weights else _FULL * layout.trainable * parameters / layout.sharding
