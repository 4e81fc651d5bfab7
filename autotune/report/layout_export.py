"""Settings of other programs that launch a layout of many devices: torchtitan, Megatron-LM, DeepSpeed, Accelerate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from autotune.cost_model.cluster.estimate import Estimate
from autotune.cost_model.cluster.layout import Layout
from autotune.errors import InputError

_HEAD = "estimated by autotune plan, not measured"


def to_torchtitan(estimate: Estimate) -> str:
    """Return sections of a torchtitan configuration (TOML).

    Source: the sections of torchtitan's ``JobConfig`` of 2025.

    Raises:
        InputError: if the layout keeps 16-bit weights, which torchtitan does not.
    """
    layout = estimate.layout
    _require_stage(layout, 3, "torchtitan")
    mode = layout.checkpointing
    lines = [
        f"# {_HEAD}",
        "[training]",
        f"local_batch_size = {layout.micro_batch * layout.micro_batches}",
        f"seq_len = {layout.sequence}",
        f"global_batch_size = {layout.global_batch}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {layout.replicas}",
        f"data_parallel_shard_degree = {layout.shard}",
        f"tensor_parallel_degree = {layout.tp}",
        f"context_parallel_degree = {layout.cp}",
        f"pipeline_parallel_degree = {layout.pp}",
    ]
    if layout.pp > 1:
        schedule = "Interleaved1F1B" if layout.virtual_stages > 1 else "1F1B"
        lines += [
            f'pipeline_parallel_schedule = "{schedule}"',
            f"pipeline_parallel_microbatch_size = {layout.micro_batch}",
        ]
    else:
        lines[2] = f"local_batch_size = {layout.micro_batch}"
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    if mode == "selective":
        lines.append('selective_ac_option = "op"')
    lines += ["", "[compile]", f"enable = {str(layout.compiled).lower()}"]
    if layout.checkpointed < 1:
        lines.append(f"# {layout.checkpointed:.0%} of the blocks recompute in the estimate; torchtitan recomputes all")
    return "\n".join(lines) + "\n"


def to_megatron(estimate: Estimate) -> str:
    """Return arguments of Megatron-LM's ``pretrain_gpt.py``.

    Source: Megatron-LM's ``arguments.py``.

    Raises:
        InputError: if the layout shards gradients or weights, which Megatron-LM's distributed optimizer does not.
    """
    layout, model = estimate.layout, estimate.model
    if layout.zero_stage:
        _require_stage(layout, 1, "megatron")
    arguments = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.heads,
        "seq-length": layout.sequence,
        "max-position-embeddings": max(model.positions, layout.sequence),
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": layout.global_batch,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
    }
    flags = ["bf16", "use-distributed-optimizer", "use-flash-attn"]
    if model.kv_heads != model.heads:
        flags.append("group-query-attention")
        arguments["num-query-groups"] = model.kv_heads
    if model.gated:
        flags.append("swiglu")
    if not model.tied:
        flags.append("untie-embeddings-and-output-weights")
    if layout.sequence_parallel and layout.tp > 1:
        flags.append("sequence-parallel")
    if layout.virtual_stages > 1:
        arguments["num-layers-per-virtual-pipeline-stage"] = max(1, model.layers // layout.pp // layout.virtual_stages)
    lines = [f"--{name} {value}" for name, value in arguments.items()] + [f"--{name}" for name in flags]
    return "\n".join([f"# {_HEAD}", *lines, *_megatron_recompute(estimate)]) + "\n"


def _megatron_recompute(estimate: Estimate) -> list[str]:
    """Return the arguments of recomputation; a share of the blocks is counted for each stage."""
    layout = estimate.layout
    if layout.checkpointing == "none":
        return []
    if layout.checkpointing == "selective":
        return ["--recompute-activations"]
    blocks = max(1, round(layout.checkpointed * estimate.model.layers / layout.pp / layout.virtual_stages))
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {blocks}"]


def to_deepspeed(estimate: Estimate) -> str:
    """Return a DeepSpeed configuration (JSON). Source: DeepSpeed's configuration reference."""
    layout = estimate.layout
    _refuse_meshes(estimate, "deepspeed", cp=False)
    found: dict[str, Any] = {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        # DeepSpeed 0.19.3 and later clips by default.
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.zero_stage, "overlap_comm": True},
    }
    if layout.replicas > 1:
        found["zero_optimization"]["mics_shard_size"] = layout.shard
    if layout.tp > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tp}
    return json.dumps(found, indent=2) + "\n"


def to_accelerate(estimate: Estimate) -> str:
    """Return a configuration file for ``accelerate launch`` (YAML). Source: Accelerate's FSDP settings, version 2.

    Raises:
        InputError: if the layout has pipeline stages, or keeps 16-bit weights.
    """
    layout, machine = estimate.layout, estimate.machine
    _refuse_meshes(estimate, "accelerate", cp=True)
    _require_stage(layout, 3, "accelerate")
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
    return "\n".join(lines) + "\n"


def _require_stage(layout: Layout, stage: int, target: str) -> None:
    """Refuse a layout whose states are sharded in a way that a target does not have."""
    if layout.zero_stage != stage:
        problem = f"shards states as ZeRO stage {layout.zero_stage}"
        raise InputError(problem, where=f"--export {target}", allowed=f"--plan zero={stage}")


def _refuse_meshes(estimate: Estimate, target: str, *, cp: bool) -> None:
    """Refuse stages, and splits of a sequence, that a configuration file of the target cannot express."""
    layout = estimate.layout
    if layout.pp > 1:
        raise InputError(
            f"has {layout.pp} pipeline stages, which are part of the script", where=f"--export {target}",
            allowed="--plan pp=1",
        )  # fmt: skip
    if not cp and layout.cp > 1:
        raise InputError(f"splits sequences over {layout.cp} ranks", where=f"--export {target}", allowed="--plan cp=1")


EXPORTS: Mapping[str, Callable[[Estimate], str]] = MappingProxyType(
    {"torchtitan": to_torchtitan, "megatron": to_megatron, "deepspeed": to_deepspeed, "accelerate": to_accelerate}
)


# What a layout has to be for a program: the search looks for nothing else.
NEEDS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "torchtitan": {"zero_stage": 3},
        "megatron": {"zero_stage": 1},
        "deepspeed": {"pp": 1, "cp": 1},
        "accelerate": {"zero_stage": 3, "pp": 1},
    }
)


def export_layout(estimate: Estimate, target: str) -> str:
    """Return the settings of a program that launch a layout.

    Args:
        estimate: the layout.
        target: name of the program.

    Raises:
        InputError: if the program is unknown or cannot express the layout.
    """
    if target not in EXPORTS:
        raise InputError(f"is {target!r}", where="--export", allowed=EXPORTS, given=target)
    return EXPORTS[target](estimate)
