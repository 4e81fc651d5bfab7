"""Tests of ``autotune plan`` on many devices: from a job, a configuration or numbers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_job
import torch
from test_cluster_model import LLAMA_CONFIG

from autotune.cli.main import run
from autotune.profiling.transformer_shape import transformer_of

JOB = f"{Path(__file__).parent / 'tiny_job.py'}:job"
SIZES = ["--layers", "16", "--hidden", "2048", "--heads", "16", "--vocab", "50304", "--seq", "2048"]
ON = ["--device", "h100", "--devices", "16"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_plans_from_numbers_are_estimates_with_time_memory_and_what_binds(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, *SIZES, *ON)
    assert document["estimated"] is True
    best = document["plans"][0]
    assert best["estimated"] is True
    assert best["layout"]["devices"] == 16
    assert sum(best["memory"].values()) == pytest.approx(best["peak_bytes"])
    assert sum(best["seconds"].values()) == pytest.approx(best["seconds_per_step"])
    assert set(best["memory"]) >= {"weights", "gradients", "optimizer", "activations", "gathers", "context"}
    assert 0 < best["mfu"] < 1
    assert best["fits"]
    assert best["binds"]
    rates = [one["tokens_per_s"] for one in document["plans"]]
    assert rates == sorted(rates, reverse=True)
    assert document["answers"][0]["search"]["proven"] is True


def test_a_plan_that_is_given_back_is_predicted_alike(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *SIZES, *ON)["plans"][0]
    layout = found["layout"]
    names = ("replicas", "shard", "tp", "pp", "cp", "micro_batch", "checkpointing", "checkpointed", "virtual_stages")
    parts = [f"{name}={layout[name]}" for name in names]
    parts += [f"k={layout['micro_batches']}", f"zero={layout['zero_stage']}"]
    document = planned(capsys, *SIZES, *ON, "--plan", ",".join(parts))
    assert len(document["plans"]) == 1
    assert document["plans"][0] == found


def test_the_printed_table_says_that_it_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *SIZES, *ON, "--top", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "estimated, not measured" in out
    assert "Memory of the first plan's fullest rank: weights" in out
    assert "no other layout is faster" in out


def test_a_configuration_file_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG))
    document = planned(capsys, "--config", str(path), *ON)
    assert document["model"]["parameters"] == pytest.approx(8.03e9, rel=1e-3)
    assert document["sequence"] == 8192
    assert run(["plan", "--config", str(path), *ON, "--seq", "200000"]) == 2
    assert "exceed the model's 131072 positions" in capsys.readouterr().err


def test_a_job_describes_its_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, "charlm", *ON, "--global-batch", "64")
    assert document["model"]["layers"] == 6
    assert document["plans"][0]["layout"]["global_batch"] == 64


def test_transformers_of_hugging_face_are_read_from_their_configuration() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from autotune import Job

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )

    def batches(seed: int) -> Any:
        while True:
            yield torch.zeros((4, 16), dtype=torch.long)

    job = Job(
        name="llama",
        model=lambda: LlamaForCausalLM(config),
        batches=batches,
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        evaluate=lambda model: 0.0,
        target=0.0,
        batch_size=4,
    )
    found, sequence = transformer_of(job)
    assert sequence == 16
    with torch.device("meta"):
        parameters = sum(one.numel() for one in LlamaForCausalLM(config).parameters())
    # A final normalisation is not counted.
    assert found.parameters == parameters - config.hidden_size


def test_several_numbers_of_devices_are_answered_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, *SIZES, "--device", "h100", "--devices", "32,8")
    assert [one["devices"] for one in document["answers"]] == [8, 32]
    assert document["plans"] == document["answers"][1]["plans"]


def test_the_best_plan_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    document = planned(capsys, *SIZES, *ON, "--output", str(path))
    assert json.loads(path.read_text()) == document["plans"][0]


def test_frozen_parameters_leave_room_for_larger_micro_batches_or_models(capsys: pytest.CaptureFixture[str]) -> None:
    full, lora = (planned(capsys, *SIZES, *ON, "--trainable", share)["plans"][0] for share in ("100%", "0.5%"))
    assert lora["memory"]["optimizer"] < full["memory"]["optimizer"]
    assert lora["tokens_per_s"] > full["tokens_per_s"]


def test_links_and_nodes_are_those_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(
        capsys, *SIZES, *ON, "--per-node", "4", "--link", "100Gbit/s", "--inner-link", "50GB/s", "--plan", "tp=4"
    )
    machine = document["machine"]
    assert (machine["per_node"], machine["node_link"], machine["link"]) == (4, 12.5e9, 50e9)
    quick = planned(capsys, *SIZES, *ON, "--plan", "tp=4")
    assert quick["plans"][0]["tokens_per_s"] > document["plans"][0]["tokens_per_s"]


def test_one_device_is_planned_as_before_unless_a_number_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, f"{tiny_job.__file__}:one_k", "--device", "h100")
    assert document["job"] == tiny_job.job().name
    assert "alternatives" in document
    assert "answers" not in document


BAD: dict[str, tuple[list[str], str]] = {
    "unknown device": ([*SIZES, "--device", "h10", "--devices", "8"], "did you mean 'h100'"),
    "impossible mesh": ([*SIZES, *ON, "--plan", "tp=3"], "a mesh of 3 does not divide 16 devices"),
    "mesh across nodes": ([*SIZES, *ON, "--plan", "tp=16"], "tp=16 exceeds the 8 devices of a node"),
    "heads that do not divide": ([*SIZES[:4], "--heads", "15", *SIZES[6:], *ON], "15 heads do not divide"),
    "kv heads": ([*SIZES, *ON, "--kv-heads", "5"], "16 heads cannot share 5"),
    "no sequence": ([*SIZES[:-2], *ON], "--seq is missing"),
    "missing sizes": (["--layers", "2", *ON], "--hidden, --heads, --vocab missing"),
    "no model": (ON, "missing"),
    "no job": (["--device", "h100"], "no job is named"),
    "no devices": ([*SIZES, "--device", "h100", "--devices", "none"], "whole numbers from 1"),
    "two models on one device": ([JOB, "--device", "h100", "--layers", "3"], "JOB cannot be combined with --layers"),
    "option of many devices": ([JOB, "--device", "h100", "--seq", "64"], "--seq is for layouts of many devices"),
    "link of one device": ([JOB, "--device", "h100", "--inner-link", "9GB/s"], "--inner-link is for layouts of many"),
    "figure of one device": (
        [JOB, "--device", "h100", "--figure", "no.png"],
        "--figure is for layouts of many devices",
    ),
    "node of one device": ([JOB, "--device", "h100", "--per-node", "4"], "--per-node is for layouts of many devices"),
    "no products of 8 bits": (
        [*SIZES, "--device", "a100", "--devices", "8", "--plan", "float8=yes"],
        "--plan: float8=yes: NVIDIA A100",
    ),
    "unknown choice": ([*SIZES, *ON, "--plan", "tpp=2"], "did you mean 'tp'"),
    "rate without unit": ([*SIZES, *ON, "--link", "400"], "a rate with its unit"),
    "share as budget": ([*SIZES, *ON, "--memory-budget", "50%"], "a size, as in 70GiB"),
    "all parameters and more": ([*SIZES, *ON, "--trainable", "200%"], "a share above 0"),
    "missing configuration": (["--config", "nowhere.json", *ON], "nowhere.json"),
    "empty number of devices": ([*SIZES, "--device", "h100", "--devices", ""], "whole numbers from 1"),
    "configuration and sizes": (["--config", __file__, *SIZES, *ON], "--config cannot be combined with --layers"),
    "job and sizes": ([JOB, "--kv-heads", "2", *ON], "JOB cannot be combined with --kv-heads"),
    "two descriptions": ([JOB, "--config", __file__, *ON], "--config cannot be combined with JOB"),
    "not a transformer": (["digits", *ON], "is not recognised as a transformer"),
    "too large": ([*SIZES, *ON, "--memory-budget", "1GiB"], "no layout of 16 devices fits"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD[case]
    assert run(["plan", *arguments]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autotune: ")]
    assert len(told) == 1
    assert message in told[0]


UNUSED: dict[str, tuple[list[str], str]] = {
    "export": (["--export", "megatron"], "cannot be combined with --export"),
    "output": (["--output", "{}/plan.json"], "cannot be combined with --output"),
    "tokens": (["--tokens", "1T"], "cannot be combined with --tokens"),
    "figure": (["--tokens", "1T", "--figure", "{}/front.png"], "cannot be combined with --tokens"),
    "failures": (["--failures", "0.001"], "cannot be combined with --failures"),
    "several numbers": (["--devices", "8,16"], "cannot be combined with several --devices"),
}


@pytest.mark.parametrize("case", UNUSED)
def test_options_that_finding_limits_would_ignore_are_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = UNUSED[case]
    arguments = [one.format(tmp_path) for one in arguments]
    assert run(["plan", *SIZES, *ON, "--find", "micro-batch", *arguments]) == 2
    assert f"--find: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_figure_and_an_output_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one"
    same = ["--figure", str(path), "--output", f"{tmp_path}/../{tmp_path.name}/one"]
    assert run(["plan", *SIZES, *ON, "--tokens", "1B", *same]) == 2
    assert "--output: is also the file of --figure" in capsys.readouterr().err
    assert not path.exists()


def test_nothing_is_written_if_the_chosen_plan_cannot_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure, output = tmp_path / "front.png", tmp_path / "settings"
    written = ["--tokens", "1B", "--figure", str(figure), "--output", str(output)]
    assert run(["plan", *SIZES, *ON, *written, "--export", "deepspeed", "--plan", "pp=2"]) == 2
    assert "no setting for pp=2" in capsys.readouterr().err
    assert run(["plan", *SIZES, *ON, *written, "--within", "1m"]) == 2
    assert "no plan is within the given time" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
