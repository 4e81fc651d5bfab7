"""Tests of planning for an absent device: fake tensors need the memory that real ones need."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny_job
import torch
import torch.nn.functional as F
from small_jobs import adamw, convolution_job, gpt_job, image_batches, perceptron_job, token_batches
from small_models import TinyConvolution, TinyGPT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune import Job, JobError
from autotune.cli.main import run
from autotune.cli.plan import _rows
from autotune.cost_model.device_table import DEVICES, find_device
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import solve
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import InputError
from autotune.launching import launched, split
from autotune.plan import Plan, Precision
from autotune.profiling.estimator import estimate
from autotune.profiling.profiler import ProfilerOptions, profile

A100 = find_device("a100")
# The same rates with CPU memory: blocks of any size and no workspaces.
ON_CPU = replace(A100, block_bytes=1, workspace_bytes=0, context_bytes=0, tf32=None)
QUICK = ProfilerOptions(seconds=1.0, max_rounds=2, calibration_plans=2)


@pytest.fixture(scope="module")
def tiny() -> Profile:
    """Return the estimate of the tiny job for the A100."""
    return estimate(tiny_job.few_k(), A100)


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


class OnlyConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3))


# Large enough that the state of the CPU's generator, which recomputed units keep outside a GPU's memory, is small.
@pytest.mark.slow
@pytest.mark.parametrize("make", [large_gpt, large_convolution])
# Only in the precisions that this machine computes fast: emulated ones have large workspaces.
def test_estimated_peaks_match_real_steps(make, measuring_precisions) -> None:
    job = without_foreach(make())
    measured, estimated = profile(job, device_name="here", options=QUICK), estimate(job, ON_CPU)
    assert estimated.estimated
    assert not measured.estimated
    assert estimated.units == measured.units
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(10):
        plan = measured.space.sample(generator)
        ratios.append(peak_bytes(estimated, plan) / peak_bytes(measured, plan))
    # The workspace inside kernels is not counted.
    assert 0.85 < min(ratios) <= max(ratios) < 1.1


def test_estimate_allocates_nothing_and_leaves_the_generators_alone() -> None:
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


def test_estimated_time_falls_with_lower_precision_and_rises_with_recomputation() -> None:
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


def test_step_that_depends_on_tensor_values_is_named() -> None:
    job = gpt_job(loss=lambda model, batch: model(batch[:, :-1]).mean() * (2.0 if batch.sum().item() > 0 else 1.0))
    with pytest.raises(JobError, match="depends on values"):
        estimate(job, A100)


def test_estimate_can_be_used_for_planning(tiny: Profile) -> None:
    above = peak_bytes(tiny, tiny.space.baseline()) - A100.workspace_bytes
    budget = A100.workspace_bytes + int(above * 0.8)
    assert solve(tiny, budget).peak_bytes <= budget


def test_blocks_are_rounded_up_like_the_allocator_does(tiny: Profile) -> None:
    assert [A100.allocated(size) for size in (0, 1, 512, 513, 2**30 + 1)] == [0, 512, 512, 1024, 2**30 + 512]
    assert [ON_CPU.allocated(size) for size in (0, 1, 513)] == [0, 1, 513]
    on_gpu, on_cpu = tiny, estimate(tiny_job.one_k(), ON_CPU)
    parameters = list(tiny_job.Network().parameters())
    # Weights and two moments; the step counters stay in host memory.
    exact = [3 * parameter.numel() * 4 for parameter in parameters]
    rounded = [3 * A100.allocated(parameter.numel() * 4) for parameter in parameters]
    assert on_cpu.static_bytes == sum(exact)
    assert on_gpu.static_bytes == sum(rounded) + A100.workspace_bytes
    for table in on_gpu.tables:
        costs = [cost for segment in table.segments for cost in segment.costs.values()]
        sizes = [cost.saved_bytes for cost in costs] + [boundary.size_bytes for boundary in table.boundaries]
        sizes += [table.batch_bytes, table.update_peak_bytes, *(segment.gradient_bytes for segment in table.segments)]
        sizes += [peak for cost in costs for peak in (*cost.forward_peak_bytes, *cost.backward_peak_bytes)]
        assert not any(size % A100.block_bytes for size in sizes)


def test_every_peak_includes_the_workspaces_of_both_threads() -> None:
    job, spec = perceptron_job(accumulation_choices=(1, 2)), find_device("h100")
    found, without = estimate(job, spec), estimate(job, replace(spec, workspace_bytes=0))
    for precision in (Precision.FP32, Precision.BF16):
        plan = found.space.plan(accumulation_steps=2, precision=precision)
        assert peak_bytes(found, plan) - peak_bytes(without, plan) == 2 * 32 * 2**20


@pytest.mark.parametrize(
    ("device", "per_thread"),
    [
        ("t4", 8_519_680),
        ("a100", 8_519_680),
        ("rtx4090", 8_519_680),
        ("h100", 32 * 2**20),
        ("b200", 32 * 2**20),
        ("rtx5090", 32 * 2**20),
        ("mi300x", 76 * 2**20),
        ("mi355x", 76 * 2**20),
    ],
)
def test_workspaces_match_the_gpu_generation(device: str, per_thread: int) -> None:
    assert find_device(device).workspace_bytes == 2 * per_thread


def test_convolutions_use_tf32_by_default_and_products_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {
        "convolution": convolution_job(
            model=OnlyConvolutions,
            loss=lambda model, batch: F.cross_entropy(model(batch["images"]), batch["labels"]),
            accumulation_choices=(1,),
        ),
        "product": perceptron_job(accumulation_choices=(1,)),
    }
    # Computation is so slow that nothing else matters.
    devices = {
        key: replace(
            spec,
            flops={precision: rate / 1e12 for precision, rate in spec.flops.items()},
            tf32=None if spec.tf32 is None else spec.tf32 / 1e12,
        )
        for key in ("a100", "v100", "mi300x")
        for spec in [find_device(key)]
    }

    def baseline_s() -> dict[tuple[str, str], float]:
        found = {
            (name, key): estimate(job, spec)
            for name, job in jobs.items()
            for key, spec in devices.items()
            if (name, key) != ("product", "v100")
        }
        return {key: seconds_per_step(profile, profile.space.baseline()) for key, profile in found.items()}

    before = baseline_s()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.set_float32_matmul_precision("high")
    try:
        factors = {key: seconds / before[key] for key, seconds in baseline_s().items()}
    finally:
        torch.set_float32_matmul_precision("highest")
    assert factors == pytest.approx(
        {
            ("convolution", "a100"): 156 / 19.5,
            ("convolution", "v100"): 1.0,
            ("convolution", "mi300x"): 1.0,
            ("product", "a100"): 19.5 / 156,
            ("product", "mi300x"): 163.4 / 653.7,
        },
        rel=1e-3,
    )


def test_device_table_names_its_sources_and_rejects_other_devices() -> None:
    for spec in DEVICES.values():
        assert spec.source
        assert spec.memory_bytes > 0
        assert all(rate >= spec.flops[Precision.FP32] for rate in spec.flops.values())
        assert spec.precisions[0] is Precision.FP32
        assert spec.tf32 is None or spec.flops[Precision.FP32] <= spec.tf32 < spec.flops[Precision.BF16]
        assert spec.workspace_bytes > 0
        assert spec.usable_bytes == spec.memory_bytes - 500 * 10**6
    assert DEVICES["mi355x"].tf32 is None


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA GB200", "gb200"),
        ("B200", "b200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX 5090", "rtx5090"),
        ("4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_devices_are_recognized_by_their_torch_names(name: str, key: str) -> None:
    assert find_device(name) is DEVICES[key]
    assert find_device(DEVICES[key].name) is DEVICES[key]


@pytest.mark.parametrize(
    "name", ["abacus", "", "NVIDIA", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 3090 Ti", "cpu"]
)
def test_other_devices_are_rejected(name: str) -> None:
    with pytest.raises(InputError, match="h200"):
        find_device(name)


def test_command_plans_and_marks_the_result_as_an_estimate(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    job = tiny_job.__file__ + ":job"
    path = tmp_path / "plan.json"
    assert run(["plan", job, "--device", "h200", "--memory-budget", "99.9%", "--json", "--output", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimated"] is True
    assert document["predicted"]["peak_bytes"] <= document["memory_budget_bytes"]
    assert Plan.from_json(document["plan"]) == Plan.from_json(json.loads(path.read_text()))
    assert document["workspace_bytes"] == 64 * 2**20
    assert run(["plan", tiny_job.__file__ + ":one_k", "--device", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "estimated, not measured" in shown
    assert "64.0 MiB of library workspaces" in shown
    assert "the driver's context takes 476.8 MiB" in shown


def test_no_plan_that_is_said_to_fit_is_faster_than_the_exact_one(tiny: Profile) -> None:
    # The fastest plan is within this budget, but not within the margin below it.
    budget = int(peak_bytes(tiny, tiny.space.plan(accumulation_steps=1, precision=Precision.BF16)) * 1.001)
    rows = _rows(tiny, solve(tiny, budget).plan, budget)
    fitting = {row["name"]: row["seconds_per_step"] for row in rows if row["fits"]}
    assert fitting["exact"] == min(fitting.values())
    assert "uniform-bf16" not in fitting


def test_whole_device_excludes_the_memory_of_the_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", tiny_job.__file__ + ":one_k", "--device", "NVIDIA GeForce RTX 4090", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["context_bytes"] == 500 * 10**6
    assert document["memory_budget_bytes"] == int((24 * 10**9 - 500 * 10**6) * 0.9)


def test_budget_below_the_optimizer_update_gives_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job.__file__ + ":one_k"
    assert run(["plan", job, "--device", "h200", "--memory-budget", "1KiB"]) == 2
    message = capsys.readouterr().err
    assert "needs more" in message
    assert "at least" in message


class Encoder(nn.Module):
    """A model of torch's own layers, converted during construction, with a weight shared by two parts."""

    def __init__(self, *, convert: bool) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)]
        self.embedding, self.layers, self.head = nn.Embedding(64, 32), nn.ModuleList(layers), nn.Linear(32, 64)
        self.head.weight = self.embedding.weight
        if convert:
            self.to(torch.bfloat16).float()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_built_in_layers_and_conversions_are_estimated() -> None:
    plain, converted = (
        estimate(tiny_job.make(model=lambda convert=convert: Encoder(convert=convert), accumulation_choices=(1,)), A100)
        for convert in (False, True)
    )
    # Shared weights stay shared.
    assert converted.static_bytes == plain.static_bytes


def test_estimate_of_many_k_covers_all_and_round_trips() -> None:
    choices = (1, 2, 3, 4, 6, 8)
    found = estimate(perceptron_job(accumulation_choices=choices), A100)
    assert found.accumulation_choices == choices
    assert Profile.from_json(found.to_json()) == found


@pytest.mark.parametrize("choices", ["adamw8bit", "release", "adamw8bit+release"])
def test_lean_optimizers_need_the_memory_that_they_need_in_training(choices: str) -> None:
    pytest.importorskip("bitsandbytes")
    job = launched(
        replace(large_gpt(), clip_norm=None, accumulation_choices=(1,)), split(f"job+{choices}", where="test")[1]
    )
    found, measured = estimate(job, ON_CPU), profile(job, device_name="cpu", options=ProfilerOptions.lean())
    assert found.static_bytes == pytest.approx(measured.static_bytes, rel=0.001)
    plan = found.space.baseline().changed(storage=found.space.leanest().storage)
    assert peak_bytes(found, plan) == pytest.approx(peak_bytes(measured, plan), rel=0.005)
