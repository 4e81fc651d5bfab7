"""Planning for a device that is not there: fake tensors need what real ones need."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_job
import torch
from small_jobs import adamw, convolution_job, gpt_job, image_batches, token_batches
from small_models import TinyConvolution, TinyGPT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune import Job, JobError
from autotune.cli.main import run
from autotune.engines.estimator import estimate
from autotune.engines.profiler import ProfilerOptions, profile
from autotune.errors import InputError
from autotune.physics.devices import DEVICES, find_device
from autotune.physics.memory_model import peak_bytes
from autotune.physics.solver import solve
from autotune.physics.time_model import seconds_per_step
from autotune.plan import Plan, Precision

A100 = find_device("a100")
QUICK = ProfilerOptions(seconds=1.0, max_rounds=2, calibration_plans=2)


def without_foreach(job: Job) -> Job:
    """Return the job with the optimizer that a CPU run uses, so that its temporaries are the same."""
    return Job(**{**{name: getattr(job, name) for name in Job.__dataclass_fields__}, "optimizer": plain_adamw})


def plain_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def large_gpt() -> Job:
    return gpt_job(
        model=lambda: TinyGPT(width=96), batches=lambda seed: token_batches(seed, size=16, length=48), batch_size=16
    )


def large_convolution() -> Job:
    return convolution_job(
        model=lambda: TinyConvolution(width=48), batches=lambda seed: image_batches(seed, size=128), batch_size=128
    )


# Large enough that the state of the CPU's generator, which recomputed units keep outside a GPU's memory, is small.
@pytest.mark.slow
@pytest.mark.parametrize("make", [large_gpt, large_convolution])
def test_estimated_peaks_are_those_that_a_real_step_shows(make) -> None:
    job = without_foreach(make())
    measured, estimated = profile(job, device_name="here", options=QUICK), estimate(job, A100)
    assert estimated.estimated
    assert not measured.estimated
    assert estimated.units == measured.units
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(10):
        plan = measured.space.sample(generator)
        ratios.append(peak_bytes(estimated, plan) / peak_bytes(measured, plan))
    # Kernels' own workspace is not seen.
    assert 0.85 < min(ratios) <= max(ratios) < 1.1


def test_nothing_is_allocated_and_the_generators_stay() -> None:
    made: list[torch.Tensor] = []

    def model() -> nn.Module:
        network = nn.Sequential(nn.Linear(10**6, 10**6, bias=False), nn.Linear(10**6, 1, bias=False))
        made.append(network[0].weight)
        return network

    job = Job(
        name="huge",
        model=model,
        batches=lambda seed: iter([torch.zeros(2, 10**6)]),
        loss=lambda network, batch: network(batch).square().mean(),
        optimizer=adamw,
        evaluate=lambda network: 0.0,
        target=1.0,
        batch_size=2,
        accumulation_choices=(1, 2),
    )
    state = torch.get_rng_state()
    found = estimate(job, A100)
    assert isinstance(made[0], FakeTensor)
    assert torch.equal(torch.get_rng_state(), state)
    # Weights, gradients and two moments of 4 TB each.
    assert peak_bytes(found, found.space.baseline()) > 16e12


def test_time_falls_with_precision_and_rises_with_recomputation() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x)

    job = Job(
        name="wide",
        model=Wide,
        batches=lambda seed: iter([torch.zeros(8192, 4096)]),
        loss=lambda network, batch: network(batch).square().mean(),
        optimizer=adamw,
        evaluate=lambda network: 0.0,
        target=1.0,
        batch_size=8192,
        accumulation_choices=(1,),
    )
    found = estimate(job, A100)
    space = found.space
    plans = {
        "fp32": space.baseline(),
        "bf16": space.plan(accumulation_steps=1, precision=Precision.BF16),
        "recomputed": space.plan(accumulation_steps=1, precision=Precision.BF16, recomputed=space.recomputable),
    }
    seconds = {name: seconds_per_step(found, plan) for name, plan in plans.items()}
    assert seconds["bf16"] < seconds["recomputed"] < seconds["fp32"]
    # Eleven products of 8192 x 4096 x 4096 (no gradient of the data is needed), at the table's rate, and a little.
    products = 11 * 2 * 8192 * 4096**2
    assert seconds["fp32"] == pytest.approx(products / (19.5e12 * 0.6), rel=0.1)


def test_a_step_that_depends_on_values_is_named() -> None:
    job = gpt_job(loss=lambda model, batch: model(batch[:, :-1]).mean() * (2.0 if batch.sum().item() > 0 else 1.0))
    with pytest.raises(JobError, match="depends on values"):
        estimate(job, A100)


def test_an_estimate_can_be_planned_with() -> None:
    found = estimate(tiny_job.make(), A100)
    budget = int(peak_bytes(found, found.space.baseline()) * 0.8)
    assert solve(found, budget).peak_bytes <= budget


def test_the_table_names_its_sources_and_refuses_other_devices() -> None:
    for spec in DEVICES.values():
        assert spec.source
        assert spec.memory_bytes > 0
        assert all(rate >= spec.flops[Precision.FP32] for rate in spec.flops.values())
        assert spec.precisions[0] is Precision.FP32
    with pytest.raises(InputError, match="h200"):
        find_device("abacus")


def test_the_command_plans_and_says_that_it_estimated(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    job = tiny_job.__file__ + ":job"
    path = tmp_path / "plan.json"
    assert run(["plan", job, "--device", "h200", "--memory-budget", "80%", "--json", "--output", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimated"] is True
    assert document["predicted"]["peak_bytes"] <= document["memory_budget_bytes"]
    assert Plan.from_json(document["plan"]) == Plan.from_json(json.loads(path.read_text()))
    assert run(["plan", job, "--device", "h200"]) == 0
    assert "estimated, not measured" in capsys.readouterr().out


def test_a_budget_that_the_update_alone_exceeds_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job.__file__ + ":job"
    assert run(["plan", job, "--device", "h200", "--memory-budget", "1KiB"]) == 2
    message = capsys.readouterr().err
    assert "needs more" in message
    assert "at least" in message
