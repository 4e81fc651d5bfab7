"""Storages that keep some activations and compute the others again: bit-identical, in fewer bytes."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_job
import torch
import torch.nn.functional as F
from test_compressed import BLOCKS, Model, pass_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autotune import EngineOptions, Plan, Storage, TorchEngine
from autotune.choices import COMPILED_STORAGES, DEFAULT_STORAGES
from autotune.cost_model.memory_model import peak_bytes
from autotune.mechanics import controls
from autotune.mechanics.memory_meter import MemoryMeter
from autotune.mechanics.recorded_graph import GroupFacts, kept_groups
from autotune.mechanics.selective import _digest, has_compiled_code
from autotune.profiling.profiler import ProfilerOptions, profile

UNCOMPILED = [one for one in Storage if not (one in COMPILED_STORAGES or one.keeps_gathered)]
PARTIAL = [Storage.SELECTIVE, Storage.REBUILD]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * 2)
        ctx.third = x * 3
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] + 0 * ctx.third


def block(forward: Callable[..., torch.Tensor], **parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return the maker of a block with some parts and a forward ``(parts, x)``."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    return Block


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.up(x)
    y.mul_(0.5).add_(1)
    y[:, 3:7] *= 2
    y = F.relu(y, inplace=True)
    z = y.clone()
    z[:, 1] = x[:, 2]
    z.view(-1)[::5].exp_()
    return x + F.silu(z, inplace=False) + y.sigmoid()


def overwritten_source(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.up(x)
    z = y * 1
    kept = z.tanh()
    with torch.no_grad():
        y.zero_()
    return x + kept.exp().sin()


def rotary(self: Any, x: torch.Tensor) -> torch.Tensor:
    q = torch.view_as_complex(self.up(x).float().unflatten(-1, (32, 2)))
    angle = torch.polar(torch.ones(64, 32), torch.outer(torch.arange(64.0), torch.arange(32.0)))
    turned = torch.view_as_real(q * angle).flatten(-2)
    return x + F.gelu(turned) * turned.cos()


def experts(self: Any, x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(0, 1)
    weight, chosen = F.softmax(self.router(flat), -1).topk(2)
    result = torch.zeros_like(flat)
    for number, expert in enumerate((self.first, self.second, self.third)):
        token, place = torch.where(chosen == number)
        result.index_add_(0, token, weight[token, place, None] * F.gelu(expert(flat[token])))
    return x + result.view_as(x)


def recurrent(self: Any, x: torch.Tensor) -> torch.Tensor:
    state, found = torch.zeros(8, 64), []
    for step in range(64):
        state = torch.tanh(self.cell(torch.cat([x[:, step], state], -1)))
        found.append(state)
    return torch.stack(found, 1)


def codebook(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "codes"):
        self.register_buffer("codes", torch.arange(640.0).view(64, 10).sin())
    flat = self.up(x).flatten(0, 1)
    near = (
        flat.square().sum(1, keepdim=True) - 2 * flat @ self.codes + self.codes.square().sum(0, keepdim=True)
    ).argmin(1)
    chosen = F.embedding(near, self.codes.t())
    self.codes.data.copy_(self.codes * 0.9 + 0.1)
    return ((flat - chosen).square() * (chosen + 1).sin() * flat.sin()).view_as(x)


def written_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.up(x).exp()
    z = y * y.sin()
    y.data.mul_(0.5)
    return z + (y + 1).cos()


def strided_anew(y: torch.Tensor) -> torch.Tensor:
    y = y.contiguous() * 2
    y[:, 1:5].mul_(3)
    return y[:, 1:5].as_strided((8, 64, 64), (4096, 64, 1), 0).sin().exp()


def nested(self: Any, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = torch.nested.nested_tensor([x.detach()[0, :3], x.detach()[1, :5]])
        return F.gelu(self.up(x)) + torch.nested.to_padded_tensor(rows.sin(), 0.0).sum()


def linear() -> nn.Module:
    return nn.Linear(64, 64)


HARD: dict[str, Callable[[], nn.Module]] = {
    "in place": block(in_place, up=linear),
    "overwritten": block(overwritten_source, up=linear),
    "rotary": block(rotary, up=linear),
    "experts": block(experts, router=lambda: nn.Linear(64, 3), first=linear, second=linear, third=linear),
    "recurrent": block(recurrent, cell=lambda: nn.Linear(128, 64)),
    "own function": block(lambda self, x: Squared.apply(F.gelu(self.up(x))), up=linear),
    "checkpoint": block(
        lambda self, x: F.silu(checkpoint(lambda y: self.drop(F.gelu(self.up(y))), x, use_reentrant=False)),
        up=linear,
        drop=lambda: nn.Dropout(0.2),
    ),
    "reentrant checkpoint": block(
        lambda self, x: F.silu(checkpoint(lambda y: self.drop(F.gelu(self.up(y))), x, use_reentrant=True)),
        up=linear,
        drop=lambda: nn.Dropout(0.2),
    ),
    "dropouts": block(
        lambda self, x: F.alpha_dropout(
            F.dropout(F.feature_alpha_dropout(self.up(F.dropout1d(x, 0.3)), 0.1), 0.9, inplace=True), 0.2
        ),
        up=linear,
    ),
    "all dropped": block(lambda self, x: F.dropout(self.up(x), 1.0) + F.dropout(x, 0.0).sin(), up=linear),
    "random": block(
        lambda self, x: F.rrelu(self.up(x), training=True) * torch.rand_like(x) + torch.randn(64), up=linear
    ),
    "group norm": block(lambda self, x: F.gelu(self.norm(self.up(x))), up=linear, norm=lambda: nn.GroupNorm(8, 64)),
    "batch norms": block(
        lambda self, x: self.two(F.elu(self.norm(self.up(x.transpose(1, 2)).tanh()), inplace=True)).transpose(1, 2),
        up=lambda: nn.Conv1d(64, 64, 3, padding=1),
        norm=lambda: nn.BatchNorm1d(64),
        two=lambda: nn.BatchNorm1d(64, track_running_stats=False),
    ),
    "frozen batch norm": block(
        lambda self, x: self.norm.eval()(self.up(x).flatten(0, 1)).view_as(x),
        up=linear,
        norm=lambda: nn.BatchNorm1d(64),
    ),
    "tied": block(lambda self, x: F.gelu(F.linear(F.gelu(self.up(x)), self.up.weight.t(), self.up.bias)), up=linear),
    "weight norm": block(
        lambda self, x: F.gelu(self.up(x)), up=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    ),
    "autocast within": block(
        lambda self, x: torch.autocast("cpu", torch.bfloat16)(lambda y: F.gelu(self.up(self.norm(y))))(x).float() * x,
        up=linear,
        norm=lambda: nn.LayerNorm(64),
    ),
    "gradient within": block(
        lambda self, x: (
            x
            + torch.autograd.grad(F.gelu(self.up(x)).square().sum(), self.up.weight, create_graph=True)[0].mean().sin()
            * x
        ),
        up=linear,
    ),
    "no operation": block(lambda self, x: x),
    "views only": block(lambda self, x: x.transpose(1, 2).contiguous().view(8, 64, 64).transpose(1, 2)),
    "dictionary": block(
        lambda self, x: sum({"a": self.up(x).exp().log1p(), "b": x.abs().sqrt().nan_to_num()}.values()), up=linear
    ),
    "einsum": block(lambda self, x: torch.einsum("bij,bkj->bik", self.up(x), x).softmax(-1) @ x, up=linear),
    "gather": block(
        lambda self, x: self.up(x).gather(1, x.argsort(1)).cumsum(1).clamp(-3, 3).sort(2).values.flip(1), up=linear
    ),
    "loop of sums": block(lambda self, x: (lambda y: sum((y * n).sin() for n in range(20)))(self.up(x)), up=linear),
    "pooled": block(
        lambda self, x: F.interpolate(F.max_pool2d(F.relu(self.up(x.unsqueeze(1))), 2), size=(64, 64)).mean(1),
        up=lambda: nn.Conv2d(1, 4, 3, padding=1),
    ),
    "double": block(lambda self, x: F.gelu(self.up(x.double())).float(), up=lambda: nn.Linear(64, 64).double()),
    "gated recurrent": block(lambda self, x: self.cell(x)[0], cell=lambda: nn.GRU(64, 64, batch_first=True)),
    "conjugates": block(
        lambda self, x: (lambda z: (z * z.conj()).real.sin() + (z.conj() * 2).exp().imag + (z - z.conj()).imag.cos())(
            torch.complex(self.up(x), x)
        ),
        up=linear,
    ),
    "statistics before they are updated": block(
        lambda self, x: (
            ((x - self.norm.running_mean) / (self.norm.running_var + 1e-5).sqrt()).sin()
            + self.norm(self.up(x).flatten(0, 1)).view_as(x)
        ),
        up=linear,
        norm=lambda: nn.BatchNorm1d(64),
    ),
    "no dropout": block(lambda self, x: torch.native_dropout(self.up(x), 0.5, False)[0].sin(), up=linear),
    "moving codebook": block(codebook, up=linear),
    "written data": block(written_data, up=linear),
    "strided anew": block(lambda self, x: strided_anew(self.up(x)), up=linear),
    "nested": block(nested, up=linear),
    "spectral": block(lambda self, x: torch.fft.irfft(torch.fft.rfft(self.up(x)) * 2, n=64).tanh(), up=linear),
}
MAKERS: dict[str, Callable[[], nn.Module]] = {**{f"block {n}": one for n, one in enumerate(BLOCKS)}, **HARD}


@pytest.mark.parametrize("storage", PARTIAL)
@pytest.mark.parametrize("name", MAKERS)
def test_output_gradients_and_buffers_are_the_same_to_the_bit(name: str, storage: Storage) -> None:
    torch.manual_seed(1)
    plain = Model(MAKERS[name]())
    other = copy.deepcopy(plain)
    for seed in range(3):
        expected = pass_of(plain, Plan(), seed)
        state = torch.get_rng_state()
        found = pass_of(other, Plan(storage={"unit": storage}), seed)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    for one, two in zip(plain.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)


def kept_bytes(model: Model, storage: Storage | None) -> int:
    """Return the bytes of the storages that stay until backward, without weights and the input."""
    controls.apply(model, Plan(storage={} if storage is None else {"unit": storage}))
    before = {one.untyped_storage()._cdata for one in tensors_alive()}
    x = torch.randn(8, 64, 64, requires_grad=True)
    output = model.unit(x)
    known = before | {x.untyped_storage()._cdata}
    if storage is None:
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            again = model.unit(x)
        found = {one: size for one, size in saved.items() if one not in known}
        del again
    else:
        found = {
            one.untyped_storage()._cdata: one.untyped_storage().nbytes()
            for one in tensors_alive()
            if one.untyped_storage()._cdata not in known | {output.untyped_storage()._cdata}
        }
    controls.remove(model)
    return sum(found.values())


def tensors_alive() -> list[torch.Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]


@pytest.mark.parametrize(
    ("name", "selective", "rebuild"), [("block 1", 0.75, 0.4), ("block 2", 0.9, 0.35), ("loop of sums", 0.1, 0.1)]
)
def test_fewer_bytes_stay(name: str, selective: float, rebuild: float) -> None:
    torch.manual_seed(0)
    model = Model(MAKERS[name]())
    most = kept_bytes(model, None)
    assert kept_bytes(model, Storage.SELECTIVE) <= selective * most
    assert kept_bytes(model, Storage.REBUILD) <= rebuild * most


@pytest.mark.parametrize("storage", [one for one in UNCOMPILED if one not in DEFAULT_STORAGES])
def test_a_written_weight_is_refused_as_without_a_plan(storage: Storage) -> None:
    model = Model(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    controls.apply(model, Plan(storage={"unit": storage}))
    loss = model.unit(torch.randn(64, 64)).sum()
    with torch.no_grad():
        model.unit[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("storage", PARTIAL)
@pytest.mark.parametrize("writes_to", ["input", "output"])
def test_the_caller_may_write_to_what_autograd_has_not_saved(storage: Storage, writes_to: str) -> None:
    def shifted(_self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ x.new_ones(64, 64)
        return y, (x + 1).sin() + (x + 2).sin() + (y + 1).sin() + (y + 2).sin()

    gradients = []
    for choice in (None, storage):
        model = Model(block(shifted)())
        controls.apply(model, Plan(storage={} if choice is None else {"unit": choice}))
        torch.manual_seed(0)
        x = torch.randn(64, 64, requires_grad=True)
        given = x * 1
        y, z = model.unit(given)
        with torch.no_grad():
            (given if writes_to == "input" else y).zero_()
        z.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("storage", PARTIAL)
@pytest.mark.parametrize("width", [64, 20_000])
def test_a_bias_may_be_written_to_between_the_passes_if_it_is_small_and_else_bars_the_unit_with_a_warning(
    storage: Storage, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * x
            return y * (y + self.bias).sin() + (y - self.bias).sin()

    gradients = []
    for choice in (None, storage):
        model = Model(Shifted())
        controls.apply(model, Plan(storage={} if choice is None else {"unit": choice}))
        torch.manual_seed(0)
        x = torch.randn(4, width, requires_grad=True)
        loss = model.unit(x).sum()
        with torch.no_grad():
            model.unit.bias.zero_()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients) == (width == 64)
    barred = model.unit.__dict__["forward"].recomputation.barred
    assert ("was written to before its backward pass" in caplog.text, barred is not None) == (width > 64, width > 64)


@pytest.mark.parametrize("storage", PARTIAL)
def test_retained_graphs_double_backward_and_partial_backward(storage: Storage) -> None:
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 64), nn.GELU()))
    x = torch.randn(64, 64, requires_grad=True)

    def all_of() -> list[torch.Tensor]:
        torch.manual_seed(3)
        output = model.unit(x)
        first = torch.autograd.grad(output.sum(), x, retain_graph=True)[0]
        second = torch.autograd.grad(output.square().sum(), list(model.parameters()), retain_graph=True)
        gradient = torch.autograd.grad(output.sin().sum(), x, create_graph=True)[0]
        third = torch.autograd.grad(gradient.square().sum(), list(model.parameters()), allow_unused=True)
        return [first, *second, *(one for one in third if one is not None)]

    expected = all_of()
    controls.apply(model, Plan(storage={"unit": storage}))
    assert all(map(torch.equal, expected, all_of()))


@pytest.mark.parametrize("storage", PARTIAL)
@pytest.mark.parametrize("name", ["block 0", "in place", "recurrent", "own function"])
def test_no_memory_stays_after_the_graph(name: str, storage: Storage) -> None:
    model = Model(MAKERS[name]())
    controls.apply(model, Plan(storage={"unit": storage}))
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(8, 64, 64, requires_grad=True)
        output, alive = model.unit(x), weakref.ref(x)
        del output, x
        assert alive() is None
        x = torch.randn(8, 64, 64, requires_grad=True)
        alive = weakref.ref(x)
        model.unit(x).sum().backward()
        del x
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("storage", PARTIAL)
def test_a_failing_unit_leaves_nothing_behind(storage: Storage) -> None:
    def fails(_self: Any, x: torch.Tensor) -> torch.Tensor:
        held.append(weakref.ref(y := x.exp()))
        raise ValueError(y.shape)

    held: list[weakref.ref[torch.Tensor]] = []
    model = Model(block(fails)())
    controls.apply(model, Plan(storage={"unit": storage}))
    with pytest.raises(ValueError, match="64"):
        model.unit(torch.randn(64, 64, requires_grad=True))
    gc.collect()
    assert held[0]() is None


@pytest.mark.parametrize("storage", PARTIAL)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_the_same_to_the_bit_with_the_storage_changed_before_every_step(
    storage: Storage, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_PRECISIONS", "fp32,bf16")
    states = []
    for changes in (False, True):
        engine = TorchEngine(
            tiny_job.make(storages=UNCOMPILED), options=EngineOptions(discard_steps=0, meter_memory=False)
        )
        base = engine.space.plan(accumulation_steps=2, precision=precision)
        for step in range(12):
            names = engine.space.recomputable[: step % 4] if changes else ()
            engine.apply(base.changed(storage={**base.storage, **dict.fromkeys(names, storage)}))
            engine.run(1)
        states.append([one.clone() for one in engine.model.parameters()])
        engine.close()
    assert all(map(torch.equal, *states))


def test_the_cut_is_the_smallest_and_computes_least_again() -> None:
    def group(nbytes: int, *sources: int, saved: bool = False, fixed: bool = False, stays: bool = True) -> GroupFacts:
        return GroupFacts(nbytes=nbytes, made_from=None if fixed else sources, is_saved=saved, can_stay=stays)

    source = group(8192, fixed=True)
    # A chain of equal sizes: all saved, so the source is needed for the first in any case.
    assert kept_groups((source, group(8192, 0, saved=True), group(8192, 1, saved=True))) == {1}
    # A small result of a large source stays itself; one that cannot be made again stays.
    assert kept_groups((source, group(512, 0, saved=True))) == {1}
    assert kept_groups((source, group(8192, saved=True, fixed=True))) == {1}
    # Two sources are more than their sum.
    assert kept_groups((source, source, group(8192, 0, 1, saved=True))) == {2}
    # What cannot stay is computed again or avoided.
    assert kept_groups((group(8192, fixed=True, stays=False), group(9000, 0, saved=True))) == {1}
    assert kept_groups((source, group(1, 0, stays=False), group(90000, 1, saved=True))) == {0}
    # Weights cost nothing.
    assert kept_groups((group(0, fixed=True), group(512, 0, saved=True))) == {0}


@torch.compile(backend="eager")
def compiled_sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["part", "part in place", "function"])
def test_a_unit_with_compiled_code_keeps_running_it(kind: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)
            self.part: Any = nn.Sequential(nn.Linear(64, 64), nn.GELU())
            if kind == "part":
                self.part = torch.compile(self.part, backend="eager")
            elif kind == "part in place":
                self.part.compile(backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.part(self.up(x))
            return compiled_sine(y) if kind == "function" else y.sin()

    model = Model(Block())
    expected = pass_of(model, Plan())
    assert has_compiled_code(model)
    for storage in PARTIAL:
        found = pass_of(model, Plan(storage={"unit": storage}))
        assert all(map(torch.equal, expected, found))


class Counted(TorchDispatchMode):
    """Mode that counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("storage", PARTIAL)
def test_long_chains_are_computed_again_in_time_linear_in_their_length(storage: Storage) -> None:
    def chain(_self: Any, x: torch.Tensor) -> torch.Tensor:
        shared = x * 2
        for _ in range(300):
            x = (x + shared).sin()
        return x

    counts = []
    for choice in (None, storage):
        model = Model(block(chain)())
        controls.apply(model, Plan(storage={} if choice is None else {"unit": choice}))
        x = torch.randn(8, 8, requires_grad=True)
        output = model.unit(x * 1).sum()
        for keeps in (True, True, False):
            with Counted() as counted:
                output.backward(retain_graph=keeps)
            counts.append(counted.count)
    plain, others = counts[0], counts[3:]
    assert all(count < plain + 5 * 600 for count in others)


def test_complex_numbers_are_checked_too() -> None:
    model = Model(block(lambda self, x: (torch.complex(x, x).to(torch.complex128) * 2).exp().real.sin().float())())
    controls.apply(model, Plan(storage={"unit": "selective"}))
    recomputation = model.unit.__dict__["forward"].recomputation
    recomputation.checks = True
    for _ in range(40):
        model.unit(torch.randn(8, 8, requires_grad=True)).sum().backward()
    assert recomputation.barred is None
    assert recomputation.selections == 40


class Convolutions(nn.Sequential):
    """Blocks of which each hands on a large tensor that the next one may keep."""

    def __init__(self) -> None:
        def block() -> nn.Module:
            return nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(inplace=True))

        super().__init__(*(block() for _ in range(4)))


class Residual(nn.Module):
    """A block that computes in the format of its input and keeps what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.BatchNorm1d(16), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm(self.mix(x)))


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def convolution_batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 16, 64, generator=generator)


@pytest.mark.parametrize("kind", ["transformer", "convolutions", "residuals"])
def test_peaks_of_mixed_plans_are_predicted(kind: str) -> None:
    job = tiny_job.make(storages=UNCOMPILED, accumulation_choices=(1, 2))
    if kind != "transformer":
        job = replace(
            job,
            model=Convolutions if kind == "convolutions" else Residuals,
            batching="adaptive",
            batches=convolution_batches,
            loss=lambda model, batch: model(batch).square().mean(),
            evaluate=lambda _model: 0.0,
        )
    found = profile(job, device_name="here", options=ProfilerOptions.lean())
    generator = np.random.default_rng(0)
    for _ in range(8):
        plan = found.space.sample(generator)
        engine = TorchEngine(job, options=EngineOptions(discard_steps=1))
        engine.apply(plan)
        measured = engine.run(3).peak_bytes
        engine.close()
        assert measured is not None
        assert 0.998 * measured <= peak_bytes(found, plan) <= 1.002 * measured, plan


@pytest.mark.parametrize("kind", ["whole", "transposed", "part", "odd", "bf16", "complex", "numbers"])
def test_recomputed_tensors_are_compared_without_a_copy(kind: str):
    whole = torch.randn(64, 64, 48)
    tensor = {
        "whole": whole,
        "transposed": whole.transpose(0, 2),
        "part": whole.split(16, dim=-1)[1],
        "odd": whole[1:, 1:, :-1],
        "bf16": whole.to(torch.bfloat16),
        "numbers": whole.mul(100).to(torch.int64),
        "complex": torch.complex(whole, whole)[:, :7],
    }[kind]
    meter = MemoryMeter(torch.device("cpu"))
    with meter.metering([]):
        found = _digest(tensor)
    assert meter.peak_bytes is not None
    assert meter.peak_bytes <= 500
    assert torch.equal(_digest(tensor), found)
    tensor[3, 5, 7] += 1
    assert not torch.equal(_digest(tensor), found)


def test_tensors_of_every_format_are_compared():
    bits, eighth = torch.rand(5, 7) > 0.5, torch.randn(64, 64).to(torch.float8_e4m3fn)
    values = torch.randn(4, 4, dtype=torch.complex64)
    odd = [bits, bits[:, :3], eighth, eighth[1:, :7], values, values.conj(), torch.randn(3, 1).expand(3, 8)]
    for tensor in [*odd, torch.zeros(0), torch.tensor(3.0), torch.full((3, 3), float("nan"))[:, :2]]:
        assert torch.isclose(_digest(tensor), _digest(tensor), 0, 0, equal_nan=True)


class _InPlace(nn.Module):
    """A part of a mask, which lies at an odd place, is written to and used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.inner(x).flatten()
        mask = (values.detach()[:4001] > 0)[1:4001]
        mask.logical_not_()
        return torch.where(mask, values[1:4001].sin(), values[1:4001].cos())


@pytest.mark.parametrize("storage", ["selective", "rebuild"])
def test_tensors_at_odd_places_are_compared_with_their_like(storage: str):
    torch.manual_seed(0)
    model = nn.Sequential(_InPlace())
    controls.apply(model, Plan(storage={"0": storage}))
    unit = model[0].__dict__["forward"].recomputation
    unit.checks = True
    for _ in range(40):
        model(torch.randn(1001, 5)).sum().backward()
    assert unit.selections == 40
    assert unit.barred is None
