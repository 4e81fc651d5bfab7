"""Precision ``fp8``: the products of linear layers, their gradients, and where it is left out."""

import copy
import math

import pytest
import tiny_job
import torch
import torch.nn.functional as F
from torch import nn

from autotune import EngineOptions, Plan, Precision, Storage, TorchEngine
from autotune.errors import PlanError
from autotune.mechanics import controls, devices, float8, known_precisions
from autotune.mechanics.float8 import E4M3, E5M2
from autotune.mechanics.precision import computing_in, excluded_precisions, useful_precisions
from autotune.profiling import choice_errors
from autotune.profiling.gradient_error import squared_errors
from autotune.profiling.profiler import ProfilerOptions, profile

FP8 = Precision.FP8
# The largest finite numbers of the formats.
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def quantised(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded numbers in fp32, before they are scaled back, and the scale."""
    scale = tensor.abs().max().float() / LARGEST[dtype]
    return (tensor.float() / scale).to(dtype).float(), scale


def reference(
    x: torch.Tensor, layer: nn.Linear, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output and the gradients of the input, weight and bias, computed plainly."""
    rows, outs = x.flatten(0, -2), gradient.flatten(0, -2)
    (one, one_scale), (own, own_scale) = quantised(rows, E4M3), quantised(layer.weight.detach(), E4M3)
    (back, back_scale) = quantised(outs, E5M2)
    output = ((one @ own.t()) * (one_scale * own_scale)).bfloat16() + layer.bias.detach().bfloat16()
    of_x = ((back @ own) * (back_scale * own_scale)).to(x.dtype)
    of_weight = (back.t() @ one) * (back_scale * one_scale)
    return output.view(gradient.shape), of_x.view(x.shape), of_weight, outs.float().sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_equals_the_plain_product_of_the_rounded_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80)
    x = (torch.randn(4, 8, 48) * 3).to(dtype).requires_grad_()
    gradient = torch.randn(4, 8, 80).bfloat16() * 1e-5
    with computing_in(FP8, "cpu"):
        output = layer(x)
    output.backward(gradient)
    wanted = reference(x.detach(), layer, gradient)
    for found, plain in zip((output, x.grad, layer.weight.grad, layer.bias.grad), wanted, strict=True):
        assert found is not None
        assert found.dtype is plain.dtype
        assert torch.equal(found, plain)
    assert layer.weight.dtype is layer.weight.grad.dtype is torch.float32


def test_the_fast_path_gets_the_layouts_of_a_gpu_and_agrees_with_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    scaled = torch._scaled_mm

    def checked(one: torch.Tensor, other: torch.Tensor, **options: object) -> torch.Tensor:
        # What cuBLASLt needs, and a CPU does not.
        assert one.stride() == (one.shape[1], 1)
        assert other.stride() == (1, other.shape[0])
        assert not any(size % 16 for size in (*one.shape, *other.shape))
        assert {one.dtype, other.dtype} != {E5M2}
        shapes.append((one.shape[0], other.shape[1]))
        return scaled(one, other, **options)

    def seen() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        layer, x = nn.Linear(48, 80), torch.randn(4, 8, 48, requires_grad=True)
        with computing_in(FP8, "cpu"):
            output = layer(x)
        output.square().sum().backward()
        return output, x.grad, layer.weight.grad, layer.bias.grad

    emulated = seen()
    monkeypatch.setattr(devices, "lacks_float8", lambda _: "")
    monkeypatch.setattr(torch, "_scaled_mm", checked)
    for one, two in zip(seen(), emulated, strict=True):
        # The sums may be rounded differently, and an output by one unit of bf16, which the gradient then sees.
        assert float((one - two).detach().float().norm() / two.detach().float().norm()) < 2**-9
    assert shapes == [(32, 80), (32, 48), (80, 48)]


def test_rounding_keeps_the_largest_magnitude_and_is_within_the_formats_steps() -> None:
    torch.manual_seed(0)
    for dtype, step in ((E4M3, 2**-4), (E5M2, 2**-3)):
        for size in (1e-20, 1.0, 1e20):
            tensor = torch.randn(64, 64) * size
            found, scale = float8.rounded(tensor, dtype)
            back = found.float() * scale
            assert float((back.abs().max() / tensor.abs().max() - 1).abs()) < 1e-6
            normal = tensor.abs() > tensor.abs().max() * 1e-2
            assert float(((back - tensor).abs() / tensor.abs())[normal].max()) <= step * 1.001
    assert torch.equal(float8.rounded(torch.zeros(4, 4), E4M3)[0].float(), torch.zeros(4, 4))
    assert bool(float8.rounded(torch.tensor([1.0, math.inf]), E5M2)[0].float().isnan().any())


def test_what_has_no_fast_product_computes_as_under_bf16_autocast() -> None:
    torch.manual_seed(0)
    layer, other = nn.Linear(48, 81), nn.Conv1d(48, 16, 3)
    for module, x in ((layer, torch.randn(32, 48)), (other, torch.randn(2, 48, 9)), (layer, torch.randn(0, 48))):
        with computing_in(Precision.BF16, "cpu"):
            wanted = module(x)
        with computing_in(FP8, "cpu"):
            assert torch.equal(module(x), wanted)
    with computing_in(FP8, "cpu"), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(32, 16))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stepped(precision: Precision, storage: Storage = Storage.SAVE) -> tuple[torch.Tensor, nn.Module]:
    """Return the whole gradient of one step of a small transformer with dropout, and the model."""
    torch.manual_seed(0)
    model = Model()
    names = [f"blocks.{number}" for number in range(3)]
    controls.apply(model, Plan(precision=dict.fromkeys(names, precision), storage=dict.fromkeys(names, storage)))
    x = torch.randn(8, 16, 64)
    output = model(x)
    assert output.dtype is torch.float32
    F.mse_loss(output, x.roll(1, 1)).backward()
    return torch.cat([one.grad.flatten() for one in model.parameters()]), model


def test_the_gradient_of_a_transformer_is_off_by_little_but_by_more_than_in_bf16() -> None:
    exact, _ = stepped(Precision.FP32)
    errors = {one: float((stepped(one)[0] - exact).norm() / exact.norm()) for one in (Precision.BF16, FP8)}
    assert errors[Precision.BF16] < errors[FP8] < 0.15


def test_parameters_and_the_state_dict_are_unchanged() -> None:
    torch.manual_seed(0)
    plain = Model().state_dict()
    _, model = stepped(FP8)
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    assert plain.keys() == model.state_dict().keys()
    assert (
        {one.dtype for one in model.parameters()} == {one.grad.dtype for one in model.parameters()} == {torch.float32}
    )
    assert {type(one) for one in model.modules()} == {type(one) for one in Model().modules()}


@pytest.mark.parametrize("storage", [Storage.SELECTIVE, Storage.REBUILD, Storage.RECOMPUTE])
def test_every_exact_storage_repeats_it(storage: Storage) -> None:
    assert torch.equal(stepped(FP8, storage)[0], stepped(FP8)[0])


def test_linear_layers_keep_their_inputs_in_8_bits() -> None:
    kept: dict[Precision, int] = {}
    layer = nn.Linear(64, 64)
    for precision in (Precision.BF16, FP8):
        kept[precision] = 0

        def count(tensor: torch.Tensor, precision: Precision = precision) -> torch.Tensor:
            kept[precision] += tensor.nbytes * (tensor.numel() == 512 * 64)
            return tensor

        with computing_in(precision, "cpu"), torch.autograd.graph.saved_tensors_hooks(count, lambda one: one):
            layer(torch.randn(512, 64))
    assert kept == {Precision.BF16: 512 * 64 * 2, FP8: 512 * 64}


def test_outside_of_the_unit_and_after_an_exception_nothing_is_changed() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(16, 16)
    plain = layer(x)

    def fail() -> None:
        with computing_in(FP8, "cpu"):
            assert not torch.equal(layer(x), plain)
            raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        fail()
    assert torch.equal(layer(x), plain)
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._len_torch_function_stack() == 0
    model = copy.deepcopy(stepped(FP8)[1])
    controls.remove(model)
    assert model.blocks[0](x[None].repeat(1, 1, 4)).dtype is torch.float32


def test_a_second_derivative_is_refused() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(16, 16, requires_grad=True)
    with computing_in(FP8, "cpu"):
        output = layer(x).sum()
    with pytest.raises(NotImplementedError, match="have no second derivative"):
        torch.autograd.grad(output, x, create_graph=True)


@pytest.fixture
def asked(measuring_precisions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for fp8, bf16 and fp32."""
    monkeypatch.setenv(known_precisions.PRECISIONS_VARIABLE, "fp32,bf16,fp8")


@pytest.fixture
def fast(asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this processor count as one with fast products, computed by emulation."""
    monkeypatch.setattr("autotune.mechanics.precision._reason_against_float8", lambda _: "")


def test_it_is_offered_only_if_asked_for_and_a_cpu_tells_why_it_is_left_out(
    asked: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = excluded_precisions("cpu")[FP8]
    assert [record.getMessage() for record in caplog.records] == [f"the precision fp8 is left out: {reason}"]
    assert reason.startswith("there are no fast products of 8-bit floating-point numbers on cpu, where it is emulated")
    assert "x as long as in fp32" in reason
    assert useful_precisions("cpu") == (Precision.FP32, Precision.BF16)
    engine = TorchEngine(tiny_job.make())
    assert engine.locks["precision fp8"] == reason
    with pytest.raises(PlanError, match="is 'fp8'"):
        engine.apply(engine.space.plan(accumulation_steps=1, precision=FP8))
    monkeypatch.delenv(known_precisions.PRECISIONS_VARIABLE)
    known_precisions.forget()
    assert FP8 not in excluded_precisions("cpu")
    assert FP8 not in useful_precisions("cpu")


def test_a_gpu_has_it_from_compute_capability_8_9_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, lacks in (((8, 6), True), ((8, 9), False), ((9, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        devices.lacks_float8.cache_clear()
        assert bool(devices.lacks_float8("cuda")) is lacks
    devices.lacks_float8.cache_clear()


def test_a_job_trains_in_it_and_its_gradient_error_is_measured(fast: None) -> None:
    engine = TorchEngine(tiny_job.make(), options=EngineOptions(meter_memory=False))
    assert engine.space.precisions == (Precision.FP32, Precision.BF16, FP8)
    assert engine.space.lowest_precision is Precision.BF16
    engine.apply(engine.space.plan(accumulation_steps=1, precision=FP8))
    losses = [engine.run(10).loss for _ in range(4)]
    assert losses[-1] < 0.8 * losses[0]
    errors = squared_errors(engine)
    assert all(0 <= entry["bf16"] <= entry["fp8"] < 0.04 for entry in errors.values())
    assert errors["blocks.0"]["fp8"] > 10 * errors["blocks.0"]["bf16"]


def test_a_profile_tells_the_error_of_the_gradient_and_locks_what_goes_too_far(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ProfilerOptions.lean()
    found = profile(tiny_job.one_k(), device_name="here", options=options)
    assert found.precisions == (Precision.FP32, Precision.BF16, FP8)
    assert "fp8" not in found.uniform_tables
    assert "fp8/recompute" in found.tables[0].segments[3].costs
    early, late = [warning for warning in found.warnings if "fp8 in all units puts the gradient" in warning]
    assert early.startswith("fp8")
    assert late.startswith("after 20 steps of training, fp8")
    monkeypatch.setattr(choice_errors, "_MOST_ERROR", 1e-3)
    strict = profile(tiny_job.one_k(), device_name="here", options=options)
    # An embedding has no linear layer, which alone computes in other numbers.
    assert set(strict.locked) == {"blocks.0", "blocks.1", "blocks.2", "head"}
    assert set(strict.locked.values()) == {("fp8",)}
    assert sum(" is locked in " in warning for warning in strict.warnings) == 4
