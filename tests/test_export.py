"""Exports: what other programs are launched with holds the plan, and what it cannot hold is said."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_job
from ranks import run_on_ranks

from autotune import Launch, Plan, PlanError, Precision, TorchEngine
from autotune.cli.main import run
from autotune.errors import InputError
from autotune.report.export import export

TESTS = Path(__file__).parent


def a_plan(**changes: Any) -> Plan:
    engine = TorchEngine(tiny_job.make())
    plan = engine.space.plan(accumulation_steps=2, precision=Precision.BF16, recomputed=["blocks.0", "blocks.2"])
    engine.close()
    return plan.changed(launch=Launch(zero_stage=1), **changes)


def test_a_configuration_holds_the_plan() -> None:
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


def test_under_adaptive_batching_a_step_has_k_batches() -> None:
    config = export(a_plan(), tiny_job.make(batching="adaptive"), "deepspeed").files["ds_config.json"]
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (16, 8)


def test_what_a_configuration_cannot_hold_is_said() -> None:
    plan = a_plan()
    mixed = plan.changed(precision={**plan.precision, "head": Precision.FP32})
    made = export(mixed, tiny_job.make(), "deepspeed")
    assert "torch_autocast" not in made.files["ds_config.json"]
    assert any("differs from unit to unit" in note for note in made.notes)


def test_what_cannot_be_launched_is_refused() -> None:
    with pytest.raises(PlanError, match=r"8 samples .* k=2 .* 3 ranks .*allowed: a batch size that 6 divides"):
        export(a_plan(), tiny_job.make(), "deepspeed", ranks=3)
    with pytest.raises(InputError, match="target is 'onnx'"):
        export(a_plan(), tiny_job.make(), "onnx")


def test_the_command_writes_the_files_and_says_how_to_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(a_plan().to_json()))
    command = ["export", str(tmp_path / "mine.json"), "--job", str(TESTS / "tiny_job.py"), "--out", str(tmp_path)]
    assert run([*command, "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "launch: torchrun --nproc-per-node 2" in said
    assert json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"] == {"stage": 1}
    assert run([*command, "--to", "json"]) == 0
    assert run([*command, "--to", "nothing"]) == 2
    assert run([*command[:-1], str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_launches_the_export_and_does_what_the_plan_says(tmp_path: Path) -> None:
    for name, document in export(a_plan(), tiny_job.make(clip_norm=0.7), "deepspeed", ranks=2).files.items():
        (tmp_path / name).write_text(json.dumps(document))
    run_on_ranks("exported_rank.py", tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["updates"] == found["global_steps"] == 80
    assert (found["k"], found["sizes"], found["dtypes"]) == (2, [2], ["torch.bfloat16"])
    assert (found["stage"], found["clip"]) == (1, 0.7)
    assert found["recomputed"] == ["blocks.0", "blocks.2"], found["status"]
