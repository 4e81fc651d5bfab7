"""Tests of exports: they contain the plan and report what their format cannot contain."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import exported_job
import pytest
import tiny_job
import torch
from ranks import run_on_ranks
from torch import nn
from watching import Watcher

from autotune import Job, Launch, Plan, PlanError, Precision, TorchEngine
from autotune.cli.main import run
from autotune.errors import InputError
from autotune.mesh import Mesh
from autotune.report.export_targets import Export
from autotune.report.launchers import APPLY
from autotune.report.plan_export import TARGETS, export

TESTS = Path(__file__).parent
EVERYWHERE = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}


def a_plan(**changes: Any) -> Plan:
    engine = TorchEngine(tiny_job.make())
    plan = engine.space.plan(accumulation_steps=2, precision=Precision.BF16, recomputed=["blocks.0", "blocks.2"])
    engine.close()
    return plan.changed(launch=Launch(zero_stage=1), **changes)


def test_configuration_contains_the_plan() -> None:
    made = export(a_plan(), tiny_job.make(clip_norm=0.7), "deepspeed", ranks=2)
    assert made.files["ds_config.json"] == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.7,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    assert made.command.startswith("torchrun --nproc-per-node 2 ")
    assert "blocks.0, blocks.2" in made.notes[0]
    assert Plan.from_json(made.files["plan.json"]).accumulation_steps == 2


def test_step_under_adaptive_batching_has_k_batches() -> None:
    config = export(a_plan(), tiny_job.make(batching="adaptive"), "deepspeed").files["ds_config.json"]
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (16, 8)


def test_export_reports_what_a_configuration_cannot_contain() -> None:
    plan = a_plan()
    mixed = plan.changed(precision={**plan.precision, "head": Precision.FP32})
    made = export(mixed, tiny_job.make(), "deepspeed")
    assert "torch_autocast" not in made.files["ds_config.json"]
    assert any("differs from unit to unit" in note for note in made.notes)


def test_plan_that_cannot_be_launched_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"8 samples .* k=2 .* 3 ranks .*allowed: a batch size that 6 divides"):
        export(a_plan(), tiny_job.make(), "deepspeed", ranks=3)
    with pytest.raises(InputError, match="target is 'onnx'"):
        export(a_plan(), tiny_job.make(), "onnx")


def test_command_writes_the_files_and_prints_how_to_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(a_plan().to_json()))
    command = ["export", str(tmp_path / "mine.json"), "--job", str(TESTS / "tiny_job.py"), "--out", str(tmp_path)]
    assert run([*command, "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "launch: torchrun --nproc-per-node 2" in said
    assert json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"] == {"stage": 1}
    assert run([*command, "--to", "json"]) == 0
    assert run([*command, "--to", "nothing"]) == 2
    assert run([*command[:-1], str(tmp_path / "new" / "folder")]) == 0
    assert (tmp_path / "new" / "folder" / "ds_config.json").is_file()
    assert run([*command[:-1], str(tmp_path / "mine.json")]) == 2
    assert "mine.json: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("target", TARGETS)
def test_plan_that_does_not_fit_the_job_is_rejected_with_the_unit(target: str) -> None:
    plan, job = a_plan(), tiny_job.make()
    with pytest.raises(PlanError, match=r"precision names unknown unit 'tail' \(allowed: embedding, blocks.0, "):
        export(plan.changed(precision={**plan.precision, "tail": Precision.BF16}), job, target)
    with pytest.raises(PlanError, match=r"storage names unknown unit 'head' \(allowed: blocks.0, blocks.1, blocks.2\)"):
        export(plan.changed(storage={"head": "recompute"}), job, target)
    with pytest.raises(PlanError, match=r"accumulation_steps is 3 \(allowed: 1, 2, 4\)"):
        export(plan.changed(accumulation_steps=3), job, target)


def test_single_process_exports_reject_several_ranks_and_scripts_need_a_reference() -> None:
    with pytest.raises(InputError, match=r"json cannot express 2 ranks .allowed: deepspeed, accelerate"):
        export(a_plan(), tiny_job.make(), "json", ranks=2)
    with pytest.raises(InputError, match="a job was given without its reference"):
        export(a_plan(), tiny_job.make(), "python")


def test_a_script_tells_what_it_needs_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan, job = a_plan(), tiny_job.make()
    assert export(plan, job, "python", reference="charlm").notes[0] == "the script needs autotune installed"
    note = export(plan, job, "python", reference="mine.py:job").notes[0]
    assert f"the job mine.py:job: start it in the folder {tmp_path}" in note
    own = export(plan, job, "python", reference=f"{tmp_path}/mine.py:job").notes[0]
    assert own.endswith(f"and the job's file: {tmp_path}/mine.py:job")


def test_plan_fully_contained_in_a_configuration_needs_no_plan_file() -> None:
    plan = a_plan(storage={})
    for target, file in (("accelerate", "accelerate.json"), ("transformers", "training_args.json")):
        made = export(plan.changed(launch=Launch()), tiny_job.make(), target)
        assert list(made.files) == [file]
        assert not any("single layers" in note or "not included" in note for note in made.notes)


def test_other_targets_report_choices_that_only_deepspeed_supports() -> None:
    plan = a_plan().changed(launch=Launch(zero_stage=2, compile=True))
    for target in ("accelerate", "transformers", "python"):
        notes = export(plan, tiny_job.make(), target, reference="tiny").notes
        assert any("not included: compile True, zero_stage 2 (autotune export --to deepspeed" in note for note in notes)


def test_16_bit_reduction_is_in_the_configuration_of_deepspeed() -> None:
    made = export(a_plan().changed(launch=Launch(knobs="fused+reduce=bf16")), tiny_job.make(), "deepspeed", ranks=2)
    assert made.files["ds_config.json"]["communication_data_type"] == "bf16"
    assert any("knobs fused (give" in note for note in made.notes)
    alone = export(a_plan().changed(launch=Launch(knobs="reduce=bf16")), tiny_job.make(), "deepspeed", ranks=2)
    assert not any("not included" in note for note in alone.notes)


@pytest.mark.parametrize(
    ("mesh", "kept", "sharded", "policy"),
    [
        ("dp=2", (), False, "always"),
        ("shard=2", (0, 1, 2), True, "never"),
        ("shard=2", (), True, "always"),
        ("shard=2", (1,), True, "default"),
        ("dp=2,shard=2", (), True, "always"),
        ("shard=2,tp=2", (), True, "always"),
        ("tp=2", (), False, "always"),
    ],
)
def test_mesh_of_ranks_is_in_the_configurations_of_torchtitan_and_accelerate(
    mesh: str, kept: tuple[int, ...], sharded: bool, policy: str
) -> None:
    storage = {f"blocks.{number}": "gathered" if number in kept else "save" for number in range(3)}
    plan = a_plan().changed(accumulation_steps=1, storage=storage, launch=Launch(mesh=mesh))
    layout = Mesh.parse(mesh)
    titan = export(plan, tiny_job.make(), "torchtitan", ranks=layout.ranks)
    lines = str(titan.files["torchtitan.options"]).splitlines()
    assert f"--parallelism.data_parallel_replicate_degree {layout.dp}" in lines
    assert f"--parallelism.data_parallel_shard_degree {layout.shard}" in lines
    assert f"--parallelism.fsdp_reshard_after_forward {policy}" in lines
    assert ("--parallelism.tensor_parallel_degree 2" in lines) == (layout.tp == 2)
    assert f"--training.local_batch_size {tiny_job.make().batch_size // layout.shares}" in lines
    assert "--activation_checkpoint.mode none" in lines
    accelerate = export(plan, tiny_job.make(), "accelerate", ranks=layout.ranks)
    config: Any = accelerate.files["accelerate.json"]
    assert (config["distributed_type"] == "FSDP") == sharded
    if sharded:
        assert config["fsdp_config"]["fsdp_reshard_after_forward"] == (policy != "never")
        assert config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    assert ("parallelism_config" in config) == ((layout.dp > 1 and layout.shard > 1) or layout.tp > 1)
    assert config.get("parallelism_config", {}).get("parallelism_config_tp_size", 1) == layout.tp
    for made in (titan, accelerate):
        differs = [note for note in made.notes if "units differ in whether their weights stay gathered" in note]
        assert len(differs) == (policy == "default")
        assert all("blocks.1" in note and "blocks.0" not in note for note in differs)
        assert not any("mesh" in note for note in made.notes)
        assert any("tp_plan" in note for note in accelerate.notes) == (layout.tp > 1)
    [told] = [note for note in export(plan, tiny_job.make(), "deepspeed", ranks=layout.ranks).notes if "mesh" in note]
    assert ("python" in told) == (layout.tp == 1)
    with pytest.raises(PlanError, match=r"the plan's mesh .* is for . ranks, and --ranks is 8"):
        export(plan, tiny_job.make(), "accelerate", ranks=8)


def test_torchtitan_gets_a_storage_that_all_layers_share() -> None:
    plan = a_plan().changed(launch=Launch())
    blocks = [f"blocks.{number}" for number in range(3)]

    def options(storage: dict[str, str], **changes: Any) -> tuple[list[str], tuple[str, ...]]:
        made = export(plan.changed(storage=storage, **changes), tiny_job.make(clip_norm=0.7), "torchtitan", ranks=2)
        assert made.command == "torchrun --nproc-per-node 2 -m torchtitan.train $(cat torchtitan.options)"
        return str(made.files["torchtitan.options"]).splitlines(), made.notes

    shared = {"recompute": "full", "selective": "selective", "save": "none", "compiled10": "memory_budget"}
    for storage, mode in shared.items():
        lines, notes = options(dict.fromkeys(blocks, storage))
        assert f"--activation_checkpoint.mode {mode}" in lines
        assert ("--compile.enable" in lines) == (storage == "compiled10")
        assert not any("not included" in note for note in notes)
    assert lines == [
        "--training.local_batch_size 2",
        "--training.global_batch_size 8",
        "--training.max_norm 0.7",
        "--activation_checkpoint.mode memory_budget",
        "--training.mixed_precision_param bfloat16",
        "--activation_checkpoint.memory_budget 0.1",
        "--compile.enable",
    ]
    for storage in ({"blocks.0": "recompute"}, dict.fromkeys(blocks, "compress8")):
        lines, notes = options(storage)
        assert "--activation_checkpoint.mode none" in lines
        assert any("not included" in note and "blocks.0" in note for note in notes)
    lines, notes = options({}, precision={**plan.precision, "head": Precision.FP32})
    assert "--training.mixed_precision_param float32" in lines
    assert any("not included, as torchtitan has bfloat16 or float32 for the whole model" in note for note in notes)
    lines, notes = options({}, precision=dict.fromkeys(plan.precision, Precision.FP8))
    assert "--training.mixed_precision_param float32" in lines
    assert any("for the whole model: fp8: embedding" in note for note in notes)
    lines, notes = options({}, precision=dict.fromkeys(plan.precision, Precision.INHERIT))
    assert not any("mixed_precision_param" in line for line in lines)
    assert any("for the whole model: inherit: " in note for note in notes)
    for compile_, storage in ((True, "save"), (False, "compiled")):
        lines, notes = options(dict.fromkeys(blocks, storage), launch=Launch(compile=compile_))
        assert "--compile.enable" in lines
        assert not any("not included" in note for note in notes)


def test_plan_for_some_units_is_not_exported_as_a_whole_model_plan() -> None:
    made = export(Plan(precision={"head": Precision.BF16}), tiny_job.make(), "transformers")
    assert made.files["training_args.json"]["bf16"] is False
    assert made.files["plan.json"]["precision"]["head"] == "bf16"


def uniform(plan: Plan) -> Plan:
    return plan


def mixed(plan: Plan) -> Plan:
    own = {name: Precision.FP32 if name.endswith((".1", "head")) else it for name, it in plan.precision.items()}
    return plan.changed(precision=own)


def scaled(plan: Plan) -> Plan:
    """Return the mixed plan with fp16 instead of bf16, so that losses must be scaled."""
    return mixed(plan.changed(precision=dict.fromkeys(plan.precision, Precision.FP16)))


def dtypes_of(plan: Plan, units: tuple[str, ...]) -> dict[str, list[str]]:
    names = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
    return {unit: [names[plan.precision_of(unit)]] for unit in units}


def seen_of(plan: Plan, units: tuple[str, ...], *, steps: int, sizes: list[int]) -> dict[str, Any]:
    recomputed = [name for name, storage in plan.storage.items() if storage == "recompute"]
    k, dtypes = plan.accumulation_steps, dtypes_of(plan, units)
    return {"steps": steps, "k": [k], "sizes": sizes, "dtypes": dtypes, "recomputed": recomputed}


def script_of(made: Export, folder: Path) -> Path:
    (script,) = made.files
    (folder / script).write_text(str(made.files[script]))
    assert made.command == f"python {script}"
    return folder / script


@pytest.mark.parametrize(
    ("vary", "attribute", "sizes"),
    [
        (mixed, "job", [4]),
        pytest.param(scaled, "adaptive", [8], marks=pytest.mark.slow),
        pytest.param(uniform, "job", [4], marks=pytest.mark.slow),
        pytest.param(scaled, "job", [4], marks=pytest.mark.slow),
        pytest.param(mixed, "adaptive", [8], marks=pytest.mark.slow),
    ],
)
def test_script_runs_by_itself_and_trains_like_the_engine(
    vary: Callable[[Plan], Plan], attribute: str, sizes: list[int], tmp_path: Path
) -> None:
    job: Job = getattr(exported_job, attribute)()
    plan = vary(a_plan()).changed(launch=Launch())
    made = export(plan, job, "python", reference=f"{TESTS / 'exported_job.py'}:{attribute}")
    done = subprocess.run(
        [sys.executable, str(script_of(made, tmp_path))],
        env={**os.environ, **EVERYWHERE, "WATCHED": str(tmp_path / "seen.json")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = 12 if attribute == "job" else 6
    assert json.loads((tmp_path / "seen.json").read_text()) == seen_of(
        plan, exported_job.UNITS, steps=steps, sizes=sizes
    )
    said = json.loads(done.stdout)
    engine = TorchEngine(job)
    # fp16 is not offered on a CPU that emulates it, but a plan for another machine may contain it.
    engine.space = dataclasses.replace(engine.space, precisions=tuple(Precision))
    engine.apply(plan)
    assert engine.run(steps).failure is None
    assert (said["samples"], said["metric"]) == (engine.progress.samples, engine.evaluate())
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "attribute", "choice"),
    [
        ("dp=2", "job", None),
        ("shard=2", "adaptive", None),
        ("dp=2,shard=2", "job", None),
        # No gradient is so large that it would be compressed.
        ("dp=2", "job", "reduce=powersgd999"),
    ],
)
def test_script_on_ranks_trains_like_one_process(mesh: str, attribute: str, choice: str | None, tmp_path: Path) -> None:
    job: Job = getattr(exported_job, attribute)()
    plan = a_plan(accumulation_steps=1)
    plan = plan.changed(precision=dict.fromkeys(plan.precision, Precision.FP32), launch=Launch(mesh=mesh, knobs=choice))
    ranks = Mesh.parse(mesh).ranks
    if "shard" in mesh:
        plan = plan.changed(storage={**plan.storage, "blocks.0": "gathered"})
    made = export(plan, job, "python", ranks=ranks, reference=f"{TESTS / 'exported_job.py'}:{attribute}")
    (script,) = made.files
    (tmp_path / script).write_text(str(made.files[script]))
    assert made.command == f"torchrun --nproc-per-node {ranks} {script}"
    command = [sys.executable, "-m", "torch.distributed.run", *made.command.split()[1:]]
    environment = {**os.environ, **EVERYWHERE}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    engine = TorchEngine(job)
    engine.apply(plan.changed(launch=Launch(), storage={}))
    engine.run(12)
    assert said["samples"] == engine.progress.samples
    assert said["metric"] == pytest.approx(engine.evaluate(), rel=1e-5)
    engine.close()


def test_script_on_ranks_has_the_forms_in_which_they_send_and_tells_the_metric_of_exact_weights() -> None:
    plan = a_plan().changed(launch=Launch(mesh="shard=2", knobs="gather=bf16"))
    plan = plan.changed(precision=dict.fromkeys(plan.precision, Precision.FP32))
    made = export(plan, exported_job.job(), "python", ranks=2, reference="x")
    (script,) = map(str, made.files.values())
    ended = script[script.index("with forms.exact_weights():") :]
    assert "gather_rest(model)" in ended
    assert "        metric = job.evaluate(model)" in ended
    assert not any("not included" in note for note in made.notes)
    compile(script, "script", "exec")


def test_script_for_ranks_rejects_other_meshes_and_fp16() -> None:
    job, plan = exported_job.job(), a_plan().changed(launch=Launch(mesh="dp=2"))
    with pytest.raises(PlanError, match=r"cannot divide layers between ranks, as the plan's mesh tp=2 does"):
        export(plan.changed(launch=Launch(mesh="tp=2")), job, "python", ranks=2, reference="x")
    with pytest.raises(PlanError, match=r"mesh dp=2 is for 2 ranks, and --ranks is 3 .allowed: --ranks 2"):
        export(plan, job, "python", ranks=3, reference="x")
    whole = plan.changed(launch=Launch(mesh="shard=2", knobs="reduce=powersgd2"))
    with pytest.raises(InputError, match=r"is between replicas, of which mesh shard=2 has none"):
        export(whole, job, "python", ranks=2, reference="x")
    with pytest.raises(PlanError, match="ranks would have to agree on which fp16 gradients overflowed"):
        export(scaled(plan), job, "python", ranks=2, reference="x")
    with pytest.raises(PlanError, match=r"and --ranks is 3000 .allowed: at least one sample for each rank"):
        export(plan, job, "python", ranks=3000, reference="x")


def launch(made: Export, folder: Path) -> dict[str, Any]:
    """Export for Accelerate, launch it by its own command with a user's script, and return the record."""
    pytest.importorskip("accelerate")
    for name, document in made.files.items():
        (folder / name).write_text(json.dumps(document))
    size = int(next(note for note in made.notes if "batch_size=" in note).partition("batch_size=")[2].partition(")")[0])
    apply = list(APPLY) if any("; ".join(APPLY) in note for note in made.notes) else []
    (folder / "note.json").write_text(json.dumps({"batch_size": size, "apply": apply}))
    cpu = {"ACCELERATE_USE_CPU": "true"} if any("ACCELERATE_USE_CPU=true" in note for note in made.notes) else {}
    setting, *command = made.command.replace("train.py", f"{TESTS / 'exported_accelerate.py'} {folder}").split()
    name, value = setting.split("=")
    command[0] = str(Path(sys.executable).parent / command[0])
    done = subprocess.run(
        command,
        env={**os.environ, **EVERYWHERE, **cpu, name: value},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.parametrize(("vary", "told"), [pytest.param(uniform, "bf16", marks=pytest.mark.slow), (mixed, "no")])
def test_accelerate_launches_the_export_and_follows_the_plan(
    vary: Callable[[Plan], Plan], told: str, tmp_path: Path
) -> None:
    plan = vary(a_plan()).changed(launch=Launch())
    found = launch(export(plan, exported_job.job(), "accelerate"), tmp_path)
    expected = seen_of(plan, exported_job.UNITS, steps=12, sizes=[4])
    assert found == {**expected, "ranks": 1, "mixed_precision": told}


@pytest.mark.slow
def test_accelerate_launches_two_ranks_with_scaled_losses(tmp_path: Path) -> None:
    plan = scaled(a_plan()).changed(launch=Launch())
    found = launch(export(plan, exported_job.job(), "accelerate", ranks=2), tmp_path)
    expected = seen_of(plan, exported_job.UNITS, steps=12, sizes=[2])
    assert found == {**expected, "ranks": 2, "mixed_precision": "fp16"}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=17,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, 17, (48, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def llama_batches(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    order = torch.randperm(48, generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, 48, 8):
        chosen = [rows()[index] for index in order[start : start + 8]]
        yield {name: torch.stack([row[name] for row in chosen]) for name in ("input_ids", "labels")}


def llama_job() -> Job:
    return tiny_job.make(
        name="llama",
        model=llama,
        batches=llama_batches,
        loss=lambda model, batch: model(**batch).loss,
        evaluate=lambda model: float(model(**next(llama_batches(9))).loss),
        clip_norm=0.7,
    )


LAYERS = ("model.layers.0", "model.layers.1", "model.layers.2", "lm_head")


@pytest.mark.parametrize(
    ("vary", "recomputed"), [(uniform, [0, 1]), (mixed, [0, 2]), (uniform, [0, 2]), (uniform, [0, 1, 2])]
)
def test_trainer_with_the_exported_arguments_follows_the_plan(
    vary: Callable[[Plan], Plan], recomputed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    job = llama_job()
    engine = TorchEngine(job)
    names = [f"model.layers.{number}" for number in recomputed]
    plan = vary(engine.space.plan(accumulation_steps=2, precision=Precision.BF16, recomputed=names))
    engine.close()
    made = export(plan, job, "transformers")
    # User settings in the same file do not concern the plan.
    own = {"output_dir": str(tmp_path / "out"), "max_steps": 6, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    quiet = {"save_strategy": "no", "dataloader_pin_memory": False}
    for name, document in made.files.items():
        extra = {**own, **quiet} if name == "training_args.json" else {}
        (tmp_path / name).write_text(json.dumps({**document, **extra}))
    monkeypatch.chdir(tmp_path)
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (args,) = parser.parse_json_file("training_args.json")
    assert args.max_grad_norm == 0.7
    model = llama()
    # Every n-th layer is what transformers can recompute by itself.
    by_itself = vary is uniform and recomputed in ([0, 2], [0, 1, 2])
    assert bool(args.activation_checkpointing) == by_itself == ("plan.json" not in made.files)
    if not by_itself:
        assert any("; ".join(APPLY) in note and f"recomputed: {', '.join(names)}" in note for note in made.notes)
        exec("\n".join(APPLY), {"model": model})
    watcher = Watcher(model, LAYERS)
    trainer = transformers.Trainer(model, args, train_dataset=rows())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    watcher.close()
    assert watcher.seen() == seen_of(plan, LAYERS, steps=6, sizes=[4])
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_launches_the_export_and_follows_the_plan(tmp_path: Path) -> None:
    for name, document in export(a_plan(), tiny_job.make(clip_norm=0.7), "deepspeed", ranks=2).files.items():
        (tmp_path / name).write_text(json.dumps(document))
    run_on_ranks("exported_rank.py", tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["updates"] == found["global_steps"] == 80
    assert (found["k"], found["sizes"], found["dtypes"]) == (2, [2], ["torch.bfloat16"])
    assert (found["stage"], found["clip"]) == (1, 0.7)
    assert found["recomputed"] == ["blocks.0", "blocks.2"], found["status"]
