"""Tests of settings of other programs: they say what the estimate assumes, and what they cannot say is refused."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cluster_search import HUGE, SEVEN

from autotune.cli.main import run
from autotune.cost_model.cluster.constants import fitted
from autotune.cost_model.cluster.estimate import Estimate, estimate_layout
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.machines import find_machine
from autotune.cost_model.cluster.search import Question, layouts
from autotune.cost_model.cluster.transformer import Transformer
from autotune.errors import InputError
from autotune.report.layout_export import TARGETS, export_layout

H100 = find_machine("h100")
BASE = ["plan", "--layers", "16", "--hidden", "2048", "--heads", "16", "--vocab", "50304", "--seq", "2048"]
BASE += ["--device", "h100", "--devices", "8"]
MEGATRON: dict[str, Any] = {"zero_stage": 1, "fp32_weights": False, "reduce_bytes": 2, "compiled": True}
DEEPSPEED: dict[str, Any] = {"fp32_weights": False, "reduce_bytes": 2, "sequence_parallel": False}
ACCELERATE: dict[str, Any] = {"reduce_bytes": 2, "sequence_parallel": False}
OWN: dict[str, dict[str, Any]] = {
    "torchtitan": {},
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
}


def laid_out(model: Transformer = SEVEN, **choices: Any) -> Estimate:
    layout = Layout(sequence=8192, micro_batch=2, micro_batches=8, **choices)
    return estimate_layout(model, layout, H100, fitted())


def megatron(model: Transformer = SEVEN, **choices: Any) -> list[str]:
    return export_layout(laid_out(model, **{**MEGATRON, **choices}), "megatron").splitlines()


def test_torchtitan_gets_its_parallelism_and_batches() -> None:
    estimate = laid_out(replicas=2, shard=4, tp=2, pp=4, cp=2, checkpointing="selective", compiled=True)
    found = tomllib.loads(export_layout(estimate, "torchtitan"))
    degrees = {name: value for name, value in found["parallelism"].items() if name.endswith("degree")}
    assert math.prod(degrees.values()) == estimate.layout.devices
    assert found["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert found["training"] == {"local_batch_size": 16, "seq_len": 8192, "global_batch_size": 128}
    assert found["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert found["compile"] == {"enable": True}


@pytest.mark.parametrize(("model", "pp", "virtual"), [(SEVEN, 4, 1), (SEVEN, 4, 4), (HUGE, 16, 1), (HUGE, 16, 8)])
def test_torchtitan_makes_as_many_virtual_stages_as_the_estimate_has(model: Transformer, pp: int, virtual: int) -> None:
    estimate = laid_out(model, shard=4, pp=pp, virtual_stages=virtual)
    found = tomllib.loads(export_layout(estimate, "torchtitan"))["parallelism"]
    weighed = found["pipeline_parallel_first_stage_less_layers"] + found["pipeline_parallel_last_stage_less_layers"]
    # As torchtitan counts them.
    stages = math.ceil((model.layers + weighed) / found["pipeline_parallel_layers_per_stage"])
    assert stages == pp * virtual
    assert found["pipeline_parallel_schedule"] == ("1F1B" if virtual == 1 else "Interleaved1F1B")


def test_torchtitan_gets_float8_and_asynchronous_tensor_parallelism() -> None:
    found = tomllib.loads(export_layout(laid_out(tp=4, float8=True, async_tp=True, compiled=True), "torchtitan"))
    assert found["model"] == {"converters": ["float8"]}
    assert found["parallelism"]["enable_async_tensor_parallel"] is True
    assert found["quantize"]["linear"]["float8"]["enable_fsdp_float8_all_gather"] is True


def test_megatron_gets_arguments_of_its_layout() -> None:
    lines = megatron(shard=4, tp=4, pp=4, virtual_stages=2, checkpointing="full", checkpointed=0.5)
    for line in (
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 4",
        "--global-batch-size 64",
        "--num-query-groups 8",
        "--grad-reduce-in-bf16",
        "--sequence-parallel",
        "--num-layers-per-virtual-pipeline-stage 4",
        "--recompute-num-layers 2",
        "--swiglu",
        "--normalization RMSNorm",
        "--disable-bias-linear",
        "--position-embedding-type rope",
    ):
        assert line in lines
    assert "--grad-reduce-in-bf16" not in megatron(reduce_bytes=4)
    assert "--overlap-grad-reduce" in lines
    assert "--overlap-grad-reduce" in megatron(shard=8)
    assert "--overlap-grad-reduce" not in megatron(shard=8, pp=4)


def test_megatron_gets_the_model_that_was_estimated() -> None:
    assert not any(line.startswith("--kv-channels") for line in megatron())
    assert "--kv-channels 256" in megatron(replace(SEVEN, head_dim=256))
    plain = megatron(Transformer.of_sizes(layers=24, hidden=2048, heads=16, vocab=50_304, tied=True))
    gpt = Transformer.of_sizes(
        layers=24, hidden=2048, heads=16, vocab=50_304, tied=True, learned_positions=True, positions=8192
    )
    assert "--position-embedding-type learned_absolute" in megatron(gpt)
    for line in ("--swiglu", "--normalization RMSNorm", "--disable-bias-linear"):
        assert line not in plain


def test_megatron_counts_the_embedding_and_the_head_where_blocks_alone_do_not_divide() -> None:
    lines = megatron(HUGE, tp=8, pp=16, virtual_stages=8, shard=2)
    assert "--account-for-embedding-in-pipeline-split" in lines
    assert "--account-for-loss-in-pipeline-split" in lines
    assert "--num-layers-per-virtual-pipeline-stage 1" in lines
    assert "--account-for-loss-in-pipeline-split" not in megatron(pp=4)


def test_deepspeed_gets_batches_that_multiply_and_a_word_on_what_the_script_does() -> None:
    estimate = laid_out(shard=8, tp=2, checkpointing="full", **DEEPSPEED)
    found = json.loads(export_layout(estimate, "deepspeed"))
    ranks = estimate.layout.devices // 2
    product = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * ranks
    assert found["train_batch_size"] == product
    assert found["zero_optimization"]["stage"] == 3
    assert found["tensor_parallel"] == {"autotp_size": 2}
    assert "the script checkpoints the activations" in found["comment"]


def test_accelerate_gets_a_configuration_whose_names_it_knows() -> None:
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions}
    estimate = laid_out(replicas=2, shard=8, checkpointing="full", compiled=True, **ACCELERATE)
    found = yaml.safe_load(export_layout(estimate, "accelerate"))
    assert (found["num_machines"], found["num_processes"]) == (2, 16)
    assert set(found["parallelism_config"]) <= known
    assert set(found["fsdp_config"]) <= known
    assert set(found["dynamo_config"]) <= known
    assert found["fsdp_config"]["fsdp_activation_checkpointing"] is True
    eager = export_layout(laid_out(shard=8, **ACCELERATE), "accelerate")
    assert "dynamo_config" not in yaml.safe_load(eager)


@pytest.mark.parametrize(
    ("target", "choices", "message"),
    [
        ("torchtitan", {"zero_stage": 1}, "no setting for zero=1"),
        ("torchtitan", {"checkpointing": "full", "checkpointed": 0.5}, "no setting for checkpointed=0.5"),
        ("torchtitan", {"offload": True}, "no setting for offload=yes"),
        ("megatron", {"zero_stage": 3}, "no setting for zero=3"),
        ("megatron", {"checkpointing": "selective"}, "no setting for checkpointing=selective"),
        ("megatron", {"offload": True}, "no setting for offload=yes"),
        ("megatron", {"checkpointing": "full", "checkpointed": 0.3}, "cannot recompute 30% of the blocks"),
        ("deepspeed", {"pp": 2}, "no setting for pp=2"),
        ("deepspeed", {"cp": 2}, "no setting for cp=2"),
        ("deepspeed", {"replicas": 2}, "no setting for replicas=2"),
        ("deepspeed", {"checkpointing": "selective"}, "no setting for checkpointing=selective"),
        ("deepspeed", {"checkpointing": "full", "checkpointed": 0.5}, "no setting for checkpointed=0.5"),
        ("deepspeed", {"compiled": True}, "no setting for compile=yes"),
        ("deepspeed", {"float8": True}, "no setting for float8=yes"),
        ("accelerate", {"pp": 2}, "no setting for pp=2"),
        ("accelerate", {"checkpointing": "selective"}, "no setting for checkpointing=selective"),
        ("accelerate", {"async_tp": True}, "no setting for async_tp=yes"),
        ("accelerate", {"float8": True}, "no setting for float8=yes"),
        ("accelerate", {"reduce_bytes": 4}, "no setting for reduce_bytes=4"),
        ("accelerat", {}, "did you mean 'accelerate'"),
    ],
)
def test_programs_that_cannot_express_a_layout_are_refused(target: str, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        export_layout(laid_out(**{**OWN.get(target, {}), **choices}), target)


@pytest.mark.parametrize("name", TARGETS)
def test_every_layout_of_a_search_for_a_program_can_be_exported(name: str) -> None:
    target = TARGETS[name]
    settings = {key: values[0] for key, values in target.allowed.items()}
    question = Question(
        model=SEVEN,
        machine=H100,
        devices=16,
        sequence=8192,
        global_batch=64,
        budget_bytes=H100.capacity_bytes,
        allowed=target.allowed,
        states=target.states,
        suits=target.suits,
        base=Layout(**settings),
    )
    found = list(layouts(question))
    assert len(found) > 20
    for one in found:
        assert export_layout(estimate_layout(SEVEN, one, H100, fitted()), name)


@pytest.mark.parametrize("name", TARGETS)
def test_the_search_finds_what_the_program_can_express(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings"
    assert run([*BASE, "--export", name, "--output", str(path), "--json"]) == 0
    assert path.read_text() == json.loads(capsys.readouterr().out)["exported"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--export", "deepspeed", "--plan", "replicas=2"], "--export deepspeed: has no setting for replicas=2"),
        (["--export", "torchtitan", "--plan", "offload=yes"], "--export torchtitan: has no setting for offload=yes"),
        (["--export", "megatron", "--trainable", "1%"], "--export megatron: has no setting for trainable=0.01"),
        (["--export", "deepspeed", "--plan", "compile=yes"], "has no setting for compile=yes"),
    ],
)
def test_given_choices_that_a_program_cannot_express_are_refused_before_the_search(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*BASE, *arguments]) == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if one.startswith("autotune: "))
    assert message in line
