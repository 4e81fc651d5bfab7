"""Tests of the choice of fp32 arithmetic: set for one run, restored afterwards and named in results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_job
import torch
from torch import nn

from autotune import TorchEngine
from autotune.agents.policy import StaticPolicy
from autotune.campaign import comparison
from autotune.cli.main import run
from autotune.errors import InputError, PlanError
from autotune.io.documents import validated
from autotune.launching import launched
from autotune.mechanics import devices
from autotune.mechanics.devices import arithmetic_shown, fp32_arithmetic, fp32_computed_in, has_tf32
from autotune.paper import table_comparisons
from autotune.paper.experiments import CONVOLUTION, experiments_of
from autotune.plan import Launch, Plan
from autotune.records.protocol import Arm, Protocol
from autotune.records.run_documents import Comparison
from autotune.report.terminal_tables import baseline_shown, plan_lines

JOB = Path(tiny_job.__file__)
PLAIN = {"matrix products": "fp32", "convolutions": "tf32"}
without_tf32 = pytest.mark.skipif(has_tf32("cuda"), reason="there is a GPU with TF32")


def switches() -> list[object]:
    """Return torch's fp32 settings for a GPU, by its older and its newer switches."""
    cudnn: Any = torch.backends.cudnn
    newer = [torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
    return [*newer, torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()]


@pytest.mark.parametrize("choice", ["fp32", "tf32"])
def test_products_and_convolutions_use_the_chosen_arithmetic_and_all_torch_switches_are_readable(choice: str) -> None:
    before = switches()
    with fp32_computed_in(choice):
        assert fp32_arithmetic("cuda") == {"matrix products": choice, "convolutions": choice}
        assert switches()[3:5] == [choice == "tf32"] * 2
    assert switches() == before


def test_settings_are_restored_after_an_exception_and_unchanged_without_a_choice() -> None:
    before = switches()
    with pytest.raises(ValueError, match="in the body"), fp32_computed_in("tf32"):
        raise ValueError("in the body")
    assert switches() == before
    with fp32_computed_in(None):
        assert switches() == before


@pytest.mark.parametrize("chosen", ["tf32", "ieee"])
def test_earlier_user_choice_is_restored(chosen: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = chosen
        with fp32_computed_in("fp32" if chosen == "tf32" else "tf32"):
            assert matmul.fp32_precision != chosen
        assert matmul.fp32_precision == chosen
    finally:
        matmul.fp32_precision = before
    assert fp32_arithmetic("cuda")["matrix products"] == "fp32"


def test_engine_uses_the_arithmetic_of_its_own_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_tf32", lambda _device: True)
    seen: list[dict[str, str]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(fp32_arithmetic("cuda"))
        return tiny_job.mean_loss(model, batch)

    before = switches()
    for launch in (Launch(fp32="tf32"), Launch()):
        engine = TorchEngine(launched(tiny_job.make(loss=loss), launch))
        seen.clear()
        engine.run(1)
        engine.evaluate()
        assert {one["matrix products"] for one in seen} == {launch.fp32 or "fp32"}
        assert switches() == before
        engine.close()


@without_tf32
@pytest.mark.parametrize(
    "command",
    [
        ["tune", f"{JOB}+tf32", "--memory-budget", "70%"],
        ["compare", f"{JOB}", "--arms", "uniform-bf16,baseline+fp32", "--seeds", "2"],
        ["compare", "charlm", "digits", "--arms", "uniform-bf16,baseline+tf32"],
    ],
)
def test_device_without_tf32_is_named_in_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--runs-dir", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err.strip()
    assert "whether fp32 is computed in TF32" in said
    assert "compute capability 8.0 or higher" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_plan_is_read_with_and_without_an_arithmetic() -> None:
    plan = Plan(launch=Launch(fp32="tf32"))
    document = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(document) == plan
    del document["launch"]
    assert Plan.from_json(document) == Plan()
    with pytest.raises(PlanError, match=r"launch\.fp32 is 'bf16' \(allowed: fp32, tf32\)"):
        Plan.from_json({**document, "launch": {"fp32": "bf16"}})


def test_only_accelerator_comparisons_name_the_arithmetic_of_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job.make(max_steps=20)
    arms = [
        Arm(name=name, policy=lambda space: StaticPolicy("baseline", space.baseline())) for name in ("baseline", "twin")
    ]
    names = tuple(arm.name for arm in arms)
    protocol = Protocol(job=job.name, arms=names, seeds=(1, 2), horizon_samples=160, memory_budget_bytes=None)
    plain = comparison.compare(job, arms, protocol, device="a CPU")
    assert "fp32" not in plain
    assert baseline_shown(plain) == "baseline"
    monkeypatch.setattr(comparison, "is_accelerator", lambda _kind: True)
    monkeypatch.setattr(comparison, "fp32_arithmetic", lambda _kind: PLAIN)
    found = comparison.compare(job, arms, protocol, device="a GPU")
    assert found["fp32"] == PLAIN
    assert baseline_shown(found) == "baseline (fp32, convolutions in tf32)"
    assert plan_lines(found)[0].startswith("baseline (fp32, convolutions in tf32)  k=1")
    for document in (plain, found):
        document["run"] = "runs/one"
        validated(Comparison, json.loads(json.dumps(document)), where="it", version=1)
    with pytest.raises(InputError, match="fp32"):
        validated(Comparison, json.loads(json.dumps({**found, "fp32": {"all": "tf32"}})), where="it", version=1)


def test_uniform_arithmetic_is_shown_as_one_word() -> None:
    assert arithmetic_shown({"matrix products": "tf32", "convolutions": "tf32"}) == "tf32"


def test_reproduced_table_adds_a_tf32_baseline_if_the_device_supports_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = experiments_of("cpu")[CONVOLUTION]
    assert has_tf32("cuda") or table_comparisons.tf32_arms(experiment) == []
    monkeypatch.setattr(table_comparisons, "has_tf32", lambda _kind: True)
    monkeypatch.setattr(table_comparisons, "fp32_arithmetic", lambda _kind: PLAIN)
    (arm,) = table_comparisons.tf32_arms(experiment)
    assert (arm.name, arm.job and arm.job.launch) == ("baseline+tf32", Launch(fp32="tf32"))
    monkeypatch.setattr(table_comparisons, "fp32_arithmetic", lambda _kind: {**PLAIN, "matrix products": "tf32"})
    assert table_comparisons.tf32_arms(experiment) == []
