"""Configurations for DeepSpeed, Accelerate, torchtitan and transformers' Trainer, and what they cannot express."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune import knobs
from autotune.choices import DEFAULT_STORAGES, Storage
from autotune.engines.deepspeed_config import STAGES
from autotune.mesh import Mesh
from autotune.pipeline import Pipeline
from autotune.plan import Plan, Precision
from autotune.report.export_targets import Export, Launched

PLAN_FILE, TITAN_FILE = "plan.json", "torchtitan.options"
# Lines of Python that apply a plan's choices for single units to a model.
APPLY = (
    "import autotune",
    f'autotune.apply(model, autotune.Plan.load("{PLAN_FILE}"))',
)


def to_deepspeed(launched: Launched) -> Export:
    """Return a DeepSpeed configuration with the plan's micro-batch, k, ZeRO stage, precision and clipping."""
    plan = launched.plan
    stage = plan.launch.zero_stage or 0
    assert stage in STAGES
    config: dict[str, Any] = {
        "train_batch_size": launched.samples,
        "train_micro_batch_size_per_gpu": launched.micro_samples,
        "gradient_accumulation_steps": launched.k,
        "gradient_clipping": launched.clip_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    notes, files = [], {}
    uniform = plan.uniform_reduced
    if uniform is not None:
        config["torch_autocast"] = {"enabled": True, "dtype": uniform.dtype}
    elif any(precision.is_reduced for precision in plan.precision.values()):
        notes.append(
            "precision differs from unit to unit, which a configuration cannot express: the units stay in fp32 unless "
            "autotune's own DeepSpeed engine trains them"
        )
    stored = plan.by_storage.items()
    if stored:
        own = plan.changed(precision=dict.fromkeys(plan.precision, Precision.INHERIT))
        attached = f'autotune.attach(engine=engine, policy="{PLAN_FILE}", limits=autotune.Limits(gain_frac=-1.0))'
        # An attached run places no others.
        places = set(plan.by_storage) <= set(DEFAULT_STORAGES)
        how = attached if places else f'autotune.apply(engine.module, autotune.Plan.load("{PLAN_FILE}"))'
        files[PLAN_FILE] = own.to_json()
        notes.append(
            f"{' and '.join(f'{len(names)} units are {one.label} ({_listed(names)})' for one, names in stored)}: "
            f"after deepspeed.initialize, {'tuner = ' * places}{how}"
        )
    launch = replace(plan.launch, zero_stage=None)
    if knobs.communication(launch.knobs).reduces_in_16_bit:
        config["communication_data_type"] = "bf16"
        launch = replace(launch, knobs=knobs.without(launch.knobs, knobs.REDUCE))
    if held := own_launch(plan.changed(launch=launch)):
        notes.append(f"not included: {held}")
    files["ds_config.json"] = config
    command = f"torchrun --nproc-per-node {launched.ranks} train.py --deepspeed --deepspeed_config ds_config.json"
    return Export(files=files, command=command, notes=tuple(notes))


def to_accelerate(launched: Launched) -> Export:
    """Return a configuration for ``accelerate launch`` with the plan's ranks, mesh and precision; k is in the command.

    The file can contain k only in its DeepSpeed section, but ``Accelerator()`` reads k from the environment. Source of
    the names: Accelerate's FSDP2 and parallelism configurations, 2026.
    """
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        # Also used without GPUs, because no other value starts several processes.
        "distributed_type": "MULTI_GPU" if launched.ranks > 1 else "NO",
        "num_machines": 1,
        "num_processes": launched.ranks,
        "machine_rank": 0,
        "mixed_precision": str(launched.autocast or "no"),
        "use_cpu": False,
    }
    mesh, sharding = launched.plan.launch.layout, []
    parallelism: dict[str, int] = {}
    if mesh is not None and mesh.shard > 1:
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(launched.kinds),
            "fsdp_reshard_after_forward": not launched.keeps_gathered,
        }
        if mesh.dp > 1:
            parallelism = {"dp_replicate_size": mesh.dp, "dp_shard_size": mesh.shard}
        sharding = _gathered_notes(launched)
    if mesh is not None and mesh.tp > 1:
        parallelism = {"dp_replicate_size": mesh.dp, "dp_shard_size": mesh.shard, "tp_size": mesh.tp}
        sharding = [*sharding, "layers are divided as the model's own tp_plan says: a model of transformers"]
    if parallelism:
        config["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in parallelism.items()}
    launched = _without_mesh(launched)
    clip = f"accelerator.clip_grad_norm_(model.parameters(), {launched.clip_norm:g})"
    alone = "without GPUs, put ACCELERATE_USE_CPU=true before the command; otherwise each rank trains alone"
    notes = [
        *([alone] if launched.ranks > 1 else []),
        f"micro-batches are the script's own: DataLoader(..., batch_size={launched.micro_samples}) on each of "
        f"{launched.ranks} ranks, its loop under `with accelerator.accumulate(model):`",
        *([f"clipping is the script's own: if accelerator.sync_gradients: {clip}"] if launched.clip_norm else []),
        *sharding,
        *_not_held(launched, "before accelerator.prepare"),
    ]
    command = (
        f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={launched.k} accelerate launch --config_file accelerate.json train.py"
    )
    return Export(files={"accelerate.json": config, **_plan_file(launched)}, command=command, notes=tuple(notes))


def to_transformers(launched: Launched) -> Export:
    """Return ``TrainingArguments`` with the plan's micro-batch, k, precision and clipping, as a JSON file.

    They also contain recomputation if the plan recomputes every n-th layer.
    """
    every = launched.every_n_layers
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": launched.micro_samples,
        "gradient_accumulation_steps": launched.k,
        "bf16": launched.autocast is Precision.BF16,
        "fp16": launched.autocast is Precision.FP16,
        "max_grad_norm": launched.clip_norm,
    }
    if every is not None:
        arguments["activation_checkpointing"] = True
        arguments["activation_checkpointing_kwargs"] = {"use_reentrant": False, "every_n_layers": every}
        launched = replace(launched, plan=launched.plan.changed(storage={}))
    notes = [
        'TrainingArguments: (args,) = HfArgumentParser(TrainingArguments).parse_json_file("training_args.json")',
        *([] if every is None else ["activation_checkpointing with every_n_layers needs transformers 5.24 or later"]),
        *_not_held(launched, "before Trainer(model, args, ...)"),
    ]
    command = f"torchrun --nproc-per-node {launched.ranks} train.py training_args.json"
    return Export(files={"training_args.json": arguments, **_plan_file(launched)}, command=command, notes=tuple(notes))


def to_torchtitan(launched: Launched) -> Export:
    """Return torchtitan's options for the plan's micro-batch, k, precision, clipping and storage.

    They can express a mesh of ranks, and one storage in all layers: recomputing, torchtitan's own selection of
    operations, or compiling under a budget of memory. Source of the names: torchtitan's ``TrainingConfig``,
    ``ParallelismConfig``, ``ActivationCheckpointConfig`` and ``CompileConfig``, 2026.
    """
    mesh, sharding = launched.plan.launch.layout, {}
    gathered = _gathered_notes(launched)
    if mesh is not None:
        reshards = {True: "never", False: "always", None: "default"}[launched.keeps_gathered]
        sharding = {
            "parallelism.data_parallel_replicate_degree": mesh.dp,
            "parallelism.data_parallel_shard_degree": mesh.shard,
            "parallelism.fsdp_reshard_after_forward": reshards,
            **({"parallelism.tensor_parallel_degree": mesh.tp} if mesh.tp > 1 else {}),
        }
    launched = _without_mesh(launched)
    plan = launched.plan
    used = {plan.storage_of(name) for name in launched.stored} or {Storage.SAVE}
    mode, budget = _titan_mode(next(iter(used))) if len(used) == 1 else (None, 0.0)
    kinds = set(plan.precision.values())
    options: dict[str, Any] = {
        "training.local_batch_size": launched.micro_samples,
        "training.global_batch_size": launched.samples,
        # 0 would scale every gradient to nothing.
        "training.max_norm": launched.clip_norm or "inf",
        "activation_checkpoint.mode": mode or "none",
        **sharding,
    }
    if kinds != {Precision.INHERIT}:
        options["training.mixed_precision_param"] = "bfloat16" if kinds == {Precision.BF16} else "float32"
    if budget:
        options["activation_checkpoint.memory_budget"] = budget
    if budget or plan.launch.compile:
        options["compile.enable"] = None
    others = "" if mesh else ", which adds its own parallelism"
    notes = [f"the model must be one of torchtitan's{others}; k follows from the two batch sizes", *gathered]
    if mode is None:
        lists = "; ".join(f"{one.label}: {_listed(names)}" for one, names in plan.by_storage.items())
        notes.append(f"not included, as layers differ or there is no such mode: {lists}")
    if mode == "selective":
        notes.append("which operations are selected is torchtitan's own choice")
    if not any(kinds <= {one} for one in (Precision.BF16, Precision.FP32)):
        lists = "; ".join(f"{one}: {_listed(names)}" for one, names in _by_precision(plan).items())
        notes.append(f"not included, as torchtitan has bfloat16 or float32 for the whole model: {lists}")
    if launch := own_launch(plan.changed(launch=replace(plan.launch, compile=None))):
        notes.append(f"not included: {launch}")
    text = "".join(f"--{name}\n" if value is None else f"--{name} {value}\n" for name, value in options.items())
    command = f"torchrun --nproc-per-node {launched.ranks} -m torchtitan.train $(cat {TITAN_FILE})"
    return Export(files={TITAN_FILE: text}, command=command, notes=tuple(notes))


def _without_mesh(launched: Launched) -> Launched:
    """Return a plan whose mesh and gathered weights are expressed elsewhere."""
    plan = launched.plan
    storage = {name: one.released for name, one in plan.storage.items()}
    return replace(launched, plan=plan.changed(storage=storage, launch=replace(plan.launch, mesh=None)))


def _gathered_notes(launched: Launched) -> list[str]:
    """Return a note on units that keep their weights gathered, if only some of them do."""
    if launched.keeps_gathered is not None:
        return []
    kept = [name for name in launched.stored if launched.plan.storage_of(name).keeps_gathered]
    each = f"for these, module.set_reshard_after_forward(False) after fully_shard(): {_listed(kept)}"
    return [f"not included, as units differ in whether their weights stay gathered after forward; {each}"]


def _titan_mode(storage: Storage) -> tuple[str | None, float]:
    """Return torchtitan's mode for a storage of all layers, ``None`` if it has none; and the budget of compiled ones.

    Its ``selective`` keeps operations of a fixed list, such as matrix products and attention.
    """
    if storage is Storage.SAVE:
        return "none", 0.0
    if storage.compile_budget:
        return "memory_budget", storage.compile_budget
    if storage.recomputes:
        return "full", 0.0
    is_partial = storage.exact and storage.extra_forwards > 0 and not storage.needs_accelerator
    return ("selective" if is_partial else None), 0.0


def _plan_file(launched: Launched) -> dict[str, Any]:
    return {} if launched.by_unit is None else {PLAN_FILE: launched.by_unit.to_json()}


def _not_held(launched: Launched, when: str) -> list[str]:
    """Return notes on what a configuration cannot express: single units, and launch settings.

    Args:
        launched: the plan.
        when: the point in the script at which the choices for single units must be applied.
    """
    notes, own = [], launched.by_unit
    if own is not None:
        lists = [f"{precision}: {_listed(names)}" for precision, names in _by_precision(own).items()]
        lists += [f"{storage.label}: {_listed(names)}" for storage, names in own.by_storage.items()]
        notes.append(f"choices for single layers are not included ({'; '.join(lists)}): {when}, {'; '.join(APPLY)}")
    if launch := own_launch(launched.plan):
        notes.append(f"not included: {launch}")
    return notes


def own_launch(plan: Plan) -> str:
    """Return the launch settings of a plan that only another configuration or the script itself can contain."""
    chosen = plan.launch.to_json()
    if stage := chosen.pop("zero_stage", 0):
        chosen["zero_stage"] = f"{stage} (autotune export --to deepspeed does)"
    if mesh := chosen.pop("mesh", None):
        able = "accelerate or torchtitan" if Mesh.parse(mesh).tp > 1 else "accelerate, torchtitan or python"
        chosen["mesh"] = f"{mesh} (autotune export --to {able} does)"
    if pipeline := chosen.pop("pipeline", None):
        ranks = Pipeline.parse(pipeline).ranks
        chosen["pipeline"] = f"{pipeline} (torchtitan has --parallelism.pipeline_parallel_degree={ranks})"
    if text := chosen.get("knobs"):
        chosen["knobs"] = f"{text} ({knobs.code_of(text)})"
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def _by_precision(plan: Plan) -> dict[Precision, list[str]]:
    lists: dict[Precision, list[str]] = {}
    for name, precision in plan.precision.items():
        lists.setdefault(precision, []).append(name)
    return lists


def _listed(names: Sequence[str]) -> str:
    """Return names of units in one printable line, because modules may have any names."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)
