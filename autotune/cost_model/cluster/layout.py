"""How a training step is laid out over devices: the choices that ``autotune plan`` predicts and searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from autotune.errors import InputError

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
_ZERO_STAGES = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to train on many devices; every rank does the same, except that pipeline stages hold different layers.

    Attributes:
        replicas: groups that hold equal copies of the states and reduce gradients between them.
        shard: ranks over which the states are sharded as ``zero_stage`` says.
        tp: ranks of tensor parallelism.
        pp: pipeline stages.
        cp: ranks over which one sequence is split; they share in the sharding of the states.
        micro_batch: sequences of one micro-batch on one rank.
        micro_batches: micro-batches of one optimizer step (k).
        sequence: tokens of one sequence.
        checkpointing: "none", "selective" (every other product and cheap operations are recomputed), or "full".
        checkpointed: share of the blocks to which that applies; the others keep all.
        zero_stage: states that are sharded over ``shard``: 0 none, 1 optimizer, 2 and gradients, 3 and weights.
        compiled: whether torch.compile fuses the blocks.
        float8: whether the blocks' linear layers compute in float8.
        fused_attention: whether attention keeps no scores in memory (FlashAttention); else it materialises them.
        fused_loss: whether the loss keeps only 16-bit logits and overwrites them with their gradient.
        sequence_parallel: whether tensor parallelism also splits what lies between its products.
        async_tp: whether the collectives of tensor parallelism overlap its products.
        virtual_stages: model chunks per pipeline stage (interleaved schedules).
        offload: whether checkpointed activations move to the host.
        fp32_weights: whether ranks keep fp32 weights and cast them where used (FSDP), instead of 16-bit weights with
            fp32 copies in the optimizer (Megatron-LM, DeepSpeed).
        reduce_bytes: bytes of one gradient element in reductions.
        optimizer_bytes: bytes per parameter of the optimizer's moments.
        trainable: share of the parameters that are trained; the others are frozen, as under LoRA.

    Raises:
        InputError: if a number is not positive or a choice is unknown.
    """

    replicas: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    sequence: int = 2048
    checkpointing: Checkpointing = "none"
    checkpointed: float = 1.0
    zero_stage: int = 3
    compiled: bool = False
    float8: bool = False
    fused_attention: bool = True
    fused_loss: bool = False
    sequence_parallel: bool = True
    async_tp: bool = False
    virtual_stages: int = 1
    offload: bool = False
    fp32_weights: bool = True
    reduce_bytes: int = 4
    optimizer_bytes: float = 8
    trainable: float = 1.0

    def __post_init__(self) -> None:
        counts = ("replicas", "shard", "tp", "pp", "cp", "micro_batch", "micro_batches", "sequence", "virtual_stages")
        for name in counts:
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}", where="layout", allowed="1 or more")
        if self.checkpointing not in CHECKPOINTING:
            raise InputError(f"checkpointing is {self.checkpointing!r}", where="layout", allowed=CHECKPOINTING)
        if self.zero_stage not in _ZERO_STAGES:
            raise InputError(f"zero_stage is {self.zero_stage}", where="layout", allowed=_ZERO_STAGES)
        for name in ("trainable", "checkpointed"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}", where="layout", allowed="above 0, at most 1")

    @property
    def devices(self) -> int:
        """Return the number of ranks."""
        return self.replicas * self.shard * self.tp * self.pp * self.cp

    @property
    def sharding(self) -> int:
        """Return the ranks over which states are sharded."""
        return self.shard * self.cp

    @property
    def tokens(self) -> int:
        """Return the tokens of one micro-batch on one rank."""
        return -(-self.micro_batch * self.sequence // self.cp)

    @property
    def global_batch(self) -> int:
        """Return the sequences of one optimizer step."""
        return self.micro_batch * self.micro_batches * self.replicas * self.shard

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one optimizer step on all ranks."""
        return self.global_batch * self.sequence

    @property
    def gathers(self) -> bool:
        """Return whether weights are gathered layer by layer."""
        return self.zero_stage == 3 and self.sharding > 1

    @property
    def tuned(self) -> bool:
        """Return whether blocks run on kernels written for the device, as Megatron-LM runs them on Transformer Engine.

        Programs with 16-bit weights have them where operations are fused or products are of 8 bits: attention is that
        of cuDNN or FlashAttention-3, and inputs of 8-bit products are saved in 8 bits.
        """
        return not self.fp32_weights and self.fused_attention and (self.compiled or self.float8)

    @property
    def fuses(self) -> bool:
        """Return whether cheap operations are fused, by torch.compile or by kernels of their own."""
        return self.compiled or self.tuned

    @property
    def keeps_gathered(self) -> bool:
        """Return whether gathered weights stay until the step ends, as FSDP keeps them in pipelines."""
        return self.gathers and self.pp > 1
