"""Compressed activations: what is kept of them, and how much the gradient is off."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny_job
import torch
import torch.nn.functional as F
from torch import nn

from autotune import EngineOptions, InputError, JobError, Plan, Storage, TorchEngine
from autotune.choices import COMPILED_STORAGES
from autotune.cost_model.memory_model import peak_bytes
from autotune.mechanics import compressed, controls
from autotune.mechanics.compressed import _rounded, mask_in_bits
from autotune.mechanics.storage_acts import offered
from autotune.profiling.profiler import ProfilerOptions, profile

UNCOMPILED = [one for one in Storage if not (one in COMPILED_STORAGES or one.needs_accelerator or one.keeps_gathered)]
COMPRESSED = [storage for storage in UNCOMPILED if not storage.exact]
# The relative error of the gradient that each storage may cause in these blocks.
LIMITS = {"compress8": 0.02, "compress4": 0.3}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.LSTM(64, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x)[0]


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(8, 8, 16, 32).to(memory_format=torch.channels_last)).flatten(1)


BLOCKS: list[Callable[[], nn.Module]] = [
    lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
    lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True, activation="gelu"),
    Attention,
    Recurrent,
    Images,
    lambda: nn.Sequential(nn.Linear(64, 256), nn.Softplus(), nn.Linear(256, 64), nn.Softmax(-1)),
]


class Model(nn.Module):
    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit


def pass_of(model: Model, plan: Plan, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of the unit under a plan, and the gradient of its parameters and input."""
    controls.apply(model, plan)
    model.zero_grad()
    torch.manual_seed(seed)
    x = torch.randn(8, 64, 64, requires_grad=True)
    output = model.unit(x)
    (output * torch.randn_like(output)).sum().backward()
    controls.remove(model)
    assert x.grad is not None
    return output.detach(), torch.cat([x.grad.flatten(), *(one.grad.flatten() for one in model.parameters())])


@pytest.mark.parametrize("storage", COMPRESSED)
@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_output_is_exact_and_the_gradient_nearly(storage: Storage, block: int) -> None:
    torch.manual_seed(1)
    model = Model(BLOCKS[block]())
    output, gradient = pass_of(model, Plan())
    other, approximate = pass_of(model, Plan(storage={"unit": storage}))
    assert torch.equal(output, other)
    error = float((gradient - approximate).norm() / gradient.norm())
    assert 0 < error < LIMITS[storage]


@pytest.mark.parametrize("storage", COMPRESSED)
def test_a_run_repeats_and_leaves_the_generators_alone(storage: Storage) -> None:
    torch.manual_seed(1)
    model = Model(BLOCKS[0]())
    plan = Plan(storage={"unit": storage})
    first, second = pass_of(model, plan), pass_of(model, plan)
    assert torch.equal(first[1], second[1])
    pass_of(model, Plan())
    state = torch.get_rng_state()
    pass_of(model, plan)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("bits", "share"), [(8, 0.27), (4, 0.145)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_are_restored_within_a_step_and_in_place(bits: int, share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = torch.randn(2, 6, 70, 50)
    for tensor in (whole, whole.transpose(1, 3), whole[:, :, 1:-1, 3:], whole.to(memory_format=torch.channels_last)):
        tensor = tensor.to(dtype)
        kept = _rounded(tensor, bits, 0)
        found = kept.restored()
        assert (found.shape, found.dtype) == (tensor.shape, dtype)
        if tensor.is_contiguous():
            assert found.stride() == tensor.stride()
        step = float(kept.scale.max()) * (0.5 if bits == 8 else 1.0)
        assert float((found - tensor).abs().double().max()) <= 1.02 * step + 0.02
        held = sum(one.nbytes for one in (kept.codes, kept.scale, kept.lowest))
        assert held <= share * 4 * tensor.numel() + 1024


def test_four_bits_round_to_the_number_on_average() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(4096)
    mean = torch.stack([_rounded(tensor, 4, number).restored() for number in range(400)]).mean(0)
    kept = _rounded(tensor, 4, 0)
    inner = tensor != kept.lowest.expand(-1, 256).flatten()
    # The standard error is at most half a step over the root of 400.
    error = ((mean - tensor) / kept.scale.expand(-1, 256).flatten())[inner].abs()
    assert float(error.quantile(0.95)) < 0.06


def test_what_is_zero_after_relu_stays_zero_and_nothing_else_becomes_zero() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(5000).relu()
    for bits in (8, 4):
        assert torch.equal(_rounded(tensor, bits, 0).restored() > 0, tensor > 0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_tensor_with_infinite_or_undefined_numbers_is_kept_as_it_is(bad: float, bits: int) -> None:
    tensor = torch.randn(4096)
    tensor[300] = bad
    assert _rounded(tensor, bits, 0) is None


class Masked(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, -1))
        mask = torch.full((8, 1, 64, 64), float("-inf")).triu(1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = (q @ k.transpose(-1, -2) / 4 + mask).log_softmax(-1).exp()
        return x + self.out((mixed + scores @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("storage", COMPRESSED)
def test_masks_of_minus_infinity_give_finite_gradients(storage: Storage) -> None:
    torch.manual_seed(1)
    model = Model(Masked())
    _, gradient = pass_of(model, Plan())
    _, approximate = pass_of(model, Plan(storage={"unit": storage}))
    assert float((gradient - approximate).norm() / gradient.norm()) < LIMITS[storage]


@pytest.mark.parametrize("shape", [(5,), (8, 3), (4, 7, 9), (1,)])
def test_masks_are_exact(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.5
    kept = mask_in_bits(mask)
    assert torch.equal(kept.restored(), mask)
    assert kept.packed.nbytes == -(-mask.numel() // 8)
    turned = mask.transpose(0, -1)
    assert torch.equal(mask_in_bits(turned).restored(), turned)


@pytest.mark.parametrize("storage", COMPRESSED)
def test_double_backward_and_a_retained_graph_work(storage: Storage) -> None:
    model = Model(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()))
    x = torch.randn(64, 64, requires_grad=True)

    def penalty() -> torch.Tensor:
        (gradient,) = torch.autograd.grad(model.unit(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), model.unit[0].weight)[0]

    exact = penalty()
    controls.apply(model, Plan(storage={"unit": storage}))
    assert float((penalty() - exact).norm() / exact.norm()) < 2 * LIMITS[storage]
    loss = model.unit(x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


@pytest.mark.parametrize("storage", COMPRESSED)
def test_no_memory_stays_after_the_graph(storage: Storage) -> None:
    model = Model(BLOCKS[0]())
    controls.apply(model, Plan(storage={"unit": storage}))
    gc.disable()
    try:
        x = torch.randn(8, 64, 64, requires_grad=True)
        output, alive = model.unit(x), weakref.ref(x)
        del output, x
        assert alive() is None
    finally:
        gc.enable()


def test_only_exact_storages_are_offered_unless_others_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job.make(storages=["compress8", "recompute"])
    engine = TorchEngine(job)
    assert engine.space.storages == ("save", "compress8", "recompute")
    engine.close()
    assert offered(None) == ("save", "recompute")
    monkeypatch.setenv("AUTOTUNE_STORAGES", "compress4")
    assert offered(["selective"]) == ("save", "compress4", "recompute")
    monkeypatch.setenv("AUTOTUNE_STORAGES", "zip")
    with pytest.raises(
        InputError,
        match=r"AUTOTUNE_STORAGES: names 'zip' \(allowed: save, gathered, compiled, selective, compiled50, compress8",
    ):
        offered(None)


@pytest.mark.parametrize("storages", ["recompute", ["zip"], [3], 3])
def test_a_job_with_other_storages_is_refused(storages: object) -> None:
    with pytest.raises(
        JobError,
        match=r"storages is .*allowed: a list of some of save, gathered, compiled, selective, compiled50, compress8",
    ):
        tiny_job.make(storages=storages)


def test_a_plan_with_a_storage_that_was_not_offered_is_refused() -> None:
    engine = TorchEngine(tiny_job.make())
    with pytest.raises(InputError, match=r"is 'compress8', which AUTOTUNE_STORAGES does not name \(allowed: recompute"):
        engine.apply(Plan(storage={"blocks.0": "compress8"}))
    engine.close()


@pytest.mark.parametrize("storage", COMPRESSED)
def test_training_goes_on_nearly_as_without_compression(storage: Storage) -> None:
    losses = {}
    for choice in (Storage.SAVE, storage):
        engine = TorchEngine(
            replace(tiny_job.make(), storages=UNCOMPILED), options=EngineOptions(discard_steps=0, meter_memory=False)
        )
        engine.apply(engine.space.plan(accumulation_steps=1, precision="fp32", storage=choice))
        losses[choice] = engine.run(30).loss
        engine.close()
    assert losses[storage] == pytest.approx(losses[Storage.SAVE], rel=0.02)


class Wide(tiny_job.Block):
    """A block that squares numbers of very different sizes, of which rounding leaves only the largest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(tiny_job.WIDTH)
        scale[0] = 1e6
        squared = (self.norm(x) * scale).square() / scale.square()
        return x + self.down(F.gelu(self.up(squared)))


class WideNetwork(tiny_job.Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(3))


def test_a_profile_tells_the_error_of_the_gradient_and_leaves_out_what_puts_it_too_far_off() -> None:
    options = ProfilerOptions.lean()
    one_k = tiny_job.make(storages=UNCOMPILED, accumulation_choices=(1,))
    found = profile(one_k, device_name="here", options=options)
    assert found.space.storages == tuple(UNCOMPILED)
    told = [warning for warning in found.warnings if "puts the gradient of a step off by" in warning]
    late = "after 20 steps of training, "
    assert [warning.split()[0] for warning in told if not warning.startswith(late)] == COMPRESSED
    assert [warning.removeprefix(late).split()[0] for warning in told if warning.startswith(late)] == COMPRESSED
    found = profile(replace(one_k, model=WideNetwork), device_name="here", options=options)
    assert found.space.storages == tuple(storage for storage in UNCOMPILED if storage.exact)
    assert sum(warning.endswith("so no plan may use it") for warning in found.warnings) == 2


class Headless(tiny_job.Network):
    """Blocks with large activations, without a head that would need more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(tiny_job.WIDTH, 512), nn.Tanh(), nn.Linear(512, tiny_job.WIDTH)) for _ in range(3)
        )
        self.head = nn.Identity()


def test_no_peak_is_predicted_too_low_between_profiled_k(monkeypatch: pytest.MonkeyPatch) -> None:
    # Numbers that are rounded at once: more than those of a tensor at k = 4, fewer than at k = 1.
    monkeypatch.setattr(compressed, "_AT_ONCE", 2**15)
    job = tiny_job.make(
        model=Headless,
        loss=lambda model, batch: model(batch[:, :-1]).square().mean(),
        evaluate=lambda _model: 0.0,
        storages=COMPRESSED,
        accumulation_choices=(1, 2, 4),
    )
    found = profile(job, device_name="here", options=ProfilerOptions.lean())
    assert any("k = 2 is interpolated" in warning for warning in found.warnings)
    engine = TorchEngine(job, options=EngineOptions(discard_steps=1))
    names = found.space.recomputable
    for mixed in (dict.fromkeys(names, "compress8"), dict.fromkeys(names, "compress4"), {names[-1]: "compress4"}):
        engine.apply(found.space.baseline().changed(accumulation_steps=2, storage=mixed))
        measured = engine.run(2).peak_bytes
        assert measured is not None
        assert 0.9999 * measured <= peak_bytes(found, engine.plan) <= 1.2 * measured
