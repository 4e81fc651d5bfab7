"""Settings of other programs that launch a layout of many devices: torchtitan, Megatron-LM, DeepSpeed, Accelerate.

Each program has the layouts that its settings express: a search for it looks for no others, and no others are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from autotune.cost_model.cluster.choices import option_of
from autotune.cost_model.cluster.estimate import Estimate
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.transformer import Transformer
from autotune.errors import InputError

_HEAD = "estimated by autotune plan, not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A program, and the layouts that its settings express.

    Attributes:
        write: returns the settings of an estimate.
        allowed: values that a field of the layout may have, the default first; other fields may have any value.
        states: how the program keeps weights and reduces gradients, by field of the layout.
        suits: whether the settings express how a layout divides a model's blocks.
    """

    write: Callable[[Estimate], str]
    allowed: Mapping[str, tuple[Any, ...]]
    states: Mapping[str, Any] = field(default_factory=dict)
    suits: Callable[[Transformer, Layout], bool] = lambda model, layout: True


def _stage_blocks(model: Transformer, layout: Layout) -> tuple[int, bool]:
    """Return the blocks of one virtual stage, and whether the embedding and the head count as one block each."""
    stages = layout.pp * layout.virtual_stages
    weighed = model.layers % stages != 0
    return (model.layers + (2 if weighed else 0)) // stages, weighed


def to_torchtitan(estimate: Estimate) -> str:
    """Return sections of a torchtitan configuration (TOML).

    Args:
        estimate: the layout.

    Source: ``JobConfig`` of torchtitan 0.2, the last version that reads TOML.
    """
    layout = estimate.layout
    local = layout.micro_batch * (layout.micro_batches if layout.pp > 1 else 1)
    lines = [
        f"# {_HEAD}; for torchtitan 0.2",
        *_torchtitan_model(layout),
        "[training]",
        f"local_batch_size = {local}",
        f"seq_len = {layout.sequence}",
        f"global_batch_size = {layout.global_batch}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {layout.replicas}",
        f"data_parallel_shard_degree = {layout.shard}",
        f"tensor_parallel_degree = {layout.tp}",
        f"enable_async_tensor_parallel = {str(layout.async_tp).lower()}",
        f"context_parallel_degree = {layout.cp}",
        f"pipeline_parallel_degree = {layout.pp}",
        *_torchtitan_stages(estimate.model, layout),
        "",
        "[activation_checkpoint]",
        f'mode = "{layout.checkpointing}"',
    ]
    if layout.checkpointing == "selective":
        lines.append('selective_ac_option = "op"')
    return "\n".join([*lines, "", "[compile]", f"enable = {str(layout.compiled).lower()}"]) + "\n"


def _torchtitan_model(layout: Layout) -> list[str]:
    """Return the sections of float8, as far as it is used."""
    if not layout.float8:
        return []
    section = ["[quantize.linear.float8]", "enable_fsdp_float8_all_gather = true", 'filter_fqns = ["output"]']
    return ["[model]", 'converters = ["float8"]', "", *section, ""]


def _torchtitan_stages(model: Transformer, layout: Layout) -> list[str]:
    """Return the settings of pipeline stages; torchtitan takes two virtual stages unless it knows their blocks."""
    if layout.pp == 1:
        return []
    blocks, weighed = _stage_blocks(model, layout)
    schedule = "Interleaved1F1B" if layout.virtual_stages > 1 else "1F1B"
    return [
        f'pipeline_parallel_schedule = "{schedule}"',
        f"pipeline_parallel_microbatch_size = {layout.micro_batch}",
        f"pipeline_parallel_layers_per_stage = {blocks}",
        *(f"pipeline_parallel_{end}_stage_less_layers = {int(weighed)}" for end in ("first", "last")),
    ]


def to_megatron(estimate: Estimate) -> str:
    """Return arguments of Megatron-LM's ``pretrain_gpt.py``.

    Args:
        estimate: the layout.

    Source: Megatron-LM's ``arguments.py`` and ``transformer_config.py``.
    """
    layout, model = estimate.layout, estimate.model
    arguments: dict[str, Any] = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.dense_ffn if model.experts > 1 else model.ffn,
        "num-attention-heads": model.heads,
        "seq-length": layout.sequence,
        "max-position-embeddings": max(model.positions, layout.sequence),
        "position-embedding-type": "learned_absolute" if model.learned_positions else "rope",
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": layout.global_batch,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
    }
    flags = {
        "bf16": True,
        "use-distributed-optimizer": True,
        "grad-reduce-in-bf16": layout.reduce_bytes == 2,
        # Estimates hide reductions and gathers except where whole stages wait for one another.
        **dict.fromkeys(("overlap-grad-reduce", "overlap-param-gather"), layout.pp == 1 or layout.virtual_stages > 1),
        "use-flash-attn": layout.fused_attention,
        "group-query-attention": model.kv_heads != model.heads,
        "swiglu": model.gated,
        "disable-bias-linear": model.gated,
        "untie-embeddings-and-output-weights": not model.tied,
        "sequence-parallel": layout.sequence_parallel and layout.tp > 1,
        "tp-comm-overlap": layout.async_tp,
        "cross-entropy-loss-fusion": layout.fused_loss,
        **dict.fromkeys(
            ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"),
            _stage_blocks(model, layout)[1],
        ),
    }
    if model.kv_heads != model.heads:
        arguments["num-query-groups"] = model.kv_heads
    if model.attention_width != model.hidden:
        arguments["kv-channels"] = model.head_dim
    if model.gated:
        arguments["normalization"] = "RMSNorm"
    if model.experts > 1:
        arguments |= {"num-experts": model.experts, "moe-router-topk": model.active, "moe-ffn-hidden-size": model.ffn}
    if model.shared_ffn:
        arguments["moe-shared-expert-intermediate-size"] = model.shared_ffn
    if layout.float8:
        arguments["fp8-format"] = "hybrid"
    if layout.virtual_stages > 1:
        arguments["num-layers-per-virtual-pipeline-stage"] = _stage_blocks(model, layout)[0]
    lines = [f"--{name} {value}" for name, value in arguments.items()]
    lines += [f"--{name}" for name, used in flags.items() if used]
    told = f"# {model.dense_layers} blocks are dense: name the others with --moe-layer-freq"
    notes = [told] if model.experts > 1 and model.dense_layers else []
    return "\n".join([f"# {_HEAD}", *notes, *lines, *_megatron_recompute(estimate)]) + "\n"


def _megatron_recompute(estimate: Estimate) -> list[str]:
    """Return the arguments of recomputation; a share of the blocks is counted for each virtual stage."""
    layout = estimate.layout
    if layout.checkpointing == "none":
        return []
    blocks = round(layout.checkpointed * estimate.model.layers / layout.pp / layout.virtual_stages)
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {max(1, blocks)}"]


def _megatron_suits(model: Transformer, layout: Layout) -> bool:
    """Return whether every virtual stage recomputes a whole number of blocks."""
    share = layout.checkpointed if layout.checkpointing == "full" else 1.0
    blocks = share * model.layers / layout.pp / layout.virtual_stages
    return share == 1 or (blocks >= 1 and abs(blocks - round(blocks)) < 1e-9)


def to_deepspeed(estimate: Estimate) -> str:
    """Return a DeepSpeed configuration (JSON).

    Args:
        estimate: the layout.

    Source: DeepSpeed's configuration reference, which ignores names that it does not know.
    """
    layout = estimate.layout
    script = "the script checkpoints the activations of every block" if layout.checkpointing == "full" else ""
    found: dict[str, Any] = {
        "comment": "; ".join(filter(None, (_HEAD, script))),
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        # DeepSpeed 0.19.3 and later clips by default.
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.zero_stage, "overlap_comm": True},
    }
    if layout.tp > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tp}
    return json.dumps(found, indent=2) + "\n"


def to_accelerate(estimate: Estimate) -> str:
    """Return a configuration file for ``accelerate launch`` (YAML).

    Args:
        estimate: the layout.

    Source: Accelerate's FSDP settings, version 2.
    """
    layout, machine = estimate.layout, estimate.machine
    parallelism = {
        "parallelism_config_dp_replicate_size": layout.replicas,
        "parallelism_config_dp_shard_size": layout.shard,
        "parallelism_config_tp_size": layout.tp,
        "parallelism_config_cp_size": layout.cp,
    }
    settings = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": "true",
        "fsdp_activation_checkpointing": str(layout.checkpointing == "full").lower(),
    }
    nodes = -(-layout.devices // machine.per_node)
    lines = [
        f"# {_HEAD}",
        f"# in the script: DataLoader(batch_size={layout.micro_batch}) and",
        f"# Accelerator(gradient_accumulation_steps={layout.micro_batches})",
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: FSDP",
        "mixed_precision: bf16",
        f"num_machines: {nodes}",
        f"num_processes: {layout.devices}",
        "fsdp_config:",
        *(f"  {name}: {value}" for name, value in settings.items()),
        "parallelism_config:",
        *(f"  {name}: {value}" for name, value in parallelism.items()),
    ]
    if layout.compiled:
        lines += ["dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_use_regional_compilation: true"]
    return "\n".join(lines) + "\n"


# Settings that are part of the script, or of nothing, where a program has no setting for them.
_NEVER = dict.fromkeys(("float8", "async_tp", "offload", "fused_loss"), (False,))
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "torchtitan": Target(
            write=to_torchtitan,
            allowed={
                "zero_stage": (3,),
                "checkpointed": (1.0,),
                "fused_attention": (True,),
                "sequence_parallel": (True,),
                "offload": (False,),
                "fused_loss": (False,),
                "trainable": (1.0,),
            },
            states={"fp32_weights": True, "reduce_bytes": 4},
        ),
        "megatron": Target(
            write=to_megatron,
            # Its "selective" recomputes the core of attention alone, which is another choice than the estimate's.
            allowed={
                "zero_stage": (1,),
                "checkpointing": ("none", "full"),
                "compiled": (True,),
                "offload": (False,),
                "trainable": (1.0,),
            },
            states={"fp32_weights": False},
            suits=_megatron_suits,
        ),
        "deepspeed": Target(
            write=to_deepspeed,
            allowed={
                **dict.fromkeys(("pp", "cp", "replicas"), (1,)),
                "checkpointing": ("none", "full"),
                "checkpointed": (1.0,),
                "compiled": (False,),
                "sequence_parallel": (False,),
                **_NEVER,
            },
            states={"fp32_weights": False, "reduce_bytes": 2},
        ),
        "accelerate": Target(
            write=to_accelerate,
            allowed={
                "zero_stage": (3,),
                "pp": (1,),
                "checkpointing": ("none", "full"),
                "checkpointed": (1.0,),
                "sequence_parallel": (False,),
                **_NEVER,
            },
            # Gradients are reduced in the type of the mixed precision.
            states={"fp32_weights": True, "reduce_bytes": 2},
        ),
    }
)


def find_target(name: str) -> Target:
    """Return a program by its name.

    Args:
        name: name of the program.

    Raises:
        InputError: if the program is unknown.
    """
    if name not in TARGETS:
        raise InputError(f"is {name!r}", where="--export", allowed=TARGETS, given=name)
    return TARGETS[name]


def require_expressed(name: str, values: Mapping[str, Any]) -> None:
    """Refuse choices that a program's settings do not express.

    Args:
        name: name of the program.
        values: choices by field of the layout.

    Raises:
        InputError: if the program is unknown, or has no setting for a choice.
    """
    target = find_target(name)
    kept = {key: (value,) for key, value in target.states.items()}
    for key, allowed in {**target.allowed, **kept}.items():
        if key in values and values[key] not in allowed:
            raise InputError(
                f"has no setting for {option_of(key, values[key])}",
                where=f"--export {name}",
                allowed=[option_of(key, one) for one in allowed],
            )


def export_layout(estimate: Estimate, name: str) -> str:
    """Return the settings of a program that launch a layout.

    Args:
        estimate: the layout.
        name: name of the program.

    Raises:
        InputError: if the program is unknown or cannot express the layout.
    """
    target, layout = find_target(name), estimate.layout
    unused = {"checkpointed"} if layout.checkpointing == "none" else set()
    require_expressed(name, {key: value for key, value in asdict(layout).items() if key not in unused})
    if not target.suits(estimate.model, layout):
        raise InputError(
            f"cannot recompute {layout.checkpointed:.0%} of the blocks of a stage",
            where=f"--export {name}",
            allowed="--plan checkpointed=1",
        )
    return target.write(estimate)
