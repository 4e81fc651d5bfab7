"""Tests that the fake accelerator behaves like a GPU wherever other tests rely on it."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import fake_accelerator
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(fake_accelerator.reason() is not None, reason=str(fake_accelerator.reason()))

MIB = 2**20
BACKWARD = "w = torch.ones(1, device='fake', requires_grad=True); w.sum().backward(); print(w.grad.item())"


def bytes_on_device(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="fake")


def child(code: str, environment: dict[str, str] | None = None) -> str:
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


# ---- presence


def test_import_registers_nothing() -> None:
    path = fake_accelerator.__path__[0].rsplit("/", 1)[0]
    code = f"""
import sys; sys.path.insert(0, {path!r})
import torch, fake_accelerator, fake_accelerator.fixtures
print(torch._C._get_privateuse1_backend_name(), torch.accelerator.current_accelerator())
torch.ones(1, requires_grad=True).sum().backward()
fake_accelerator.load().present(True)
{BACKWARD}
fake_accelerator._settle()
"""
    assert child(code) == "privateuseone None\n1.0"


def test_child_process_gets_the_device_through_its_environment(accelerator: ModuleType) -> None:
    code = f"import torch; print(torch.accelerator.current_accelerator(), torch.fake.mem_get_info()[1])\n{BACKWARD}"
    assert child(code, fake_accelerator.child_environment(capacity=4 * MIB)) == f"fake {4 * MIB}\n1.0"


def test_torch_reports_no_accelerator_while_the_device_is_absent(accelerator: ModuleType) -> None:
    accelerator.present(False)
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() is None
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert torch.accelerator.device_count() == 0
    assert not torch.fake.is_available()
    assert torch.fake.device_count() == 0
    assert not torch.fake.is_initialized()
    with pytest.raises(RuntimeError, match="no device is present"):
        torch.ones(1, device="fake")
    with pytest.raises(RuntimeError, match="no device is present"):
        torch.fake.synchronize()


def test_cpu_works_while_the_device_is_absent(accelerator: ModuleType) -> None:
    accelerator.present(False)
    torch.manual_seed(0)
    weight = torch.randn(3, requires_grad=True)
    threads = set()
    weight.register_hook(lambda _: threads.add(threading.get_ident()))
    checkpoint(lambda w: w.pow(2).sum(), weight, use_reentrant=False).backward()
    assert torch.equal(weight.grad, 2 * weight.detach())
    assert threads == {threading.get_ident()}
    assert not weight.is_pinned()


def test_present_device_is_the_accelerator(accelerator: ModuleType) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("fake")
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    assert torch.get_device_module("fake") is torch.fake
    assert torch.fake.get_device_properties(0).total_memory == torch.fake.mem_get_info()[1]
    assert torch.fake.get_device_name()
    with torch.fake.device(0):
        assert torch.ones(1, device="fake").device == torch.device("fake", 0)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.fake.set_device(1)


def test_changed_controls_are_listed_until_reset(accelerator: ModuleType) -> None:
    accelerator.noise()
    accelerator.vanish()
    accelerator.capacity(MIB)
    with accelerator.without("bf16"):
        assert accelerator.switched().keys() == {"present", "noise", "vanished", "capacity", "without"}
    accelerator.reset()
    assert accelerator.switched() == {"present": True}


# ---- memory


def test_blocks_are_rounded_and_split_like_cuda_blocks(accelerator: ModuleType) -> None:
    def held(num_bytes: int) -> tuple[int, int]:
        before = accelerator.stats()
        kept.append(bytes_on_device(num_bytes))
        after = accelerator.stats()
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current")
        return tuple(after[name] - before[name] for name in names)

    kept: list[torch.Tensor] = []
    assert held(1) == (512, 2 * MIB)
    assert held(513) == (1024, 0)
    assert held(MIB) == (MIB, 0)
    assert held(MIB) == (MIB, 2 * MIB)
    assert held(MIB + 1) == (MIB + 512, 20 * MIB)
    assert held(10 * MIB) == (10 * MIB, 0)
    # The rest of a large segment is not split off if it is at most 1 MiB.
    assert held(8 * MIB) == (9 * MIB - 512, 0)
    assert held(11 * MIB) == (11 * MIB + MIB, 12 * MIB)
    assert accelerator.stats()["requested_bytes.all.current"] == sum(map(len, kept))


def test_freed_neighbours_are_merged(accelerator: ModuleType) -> None:
    first, second, third = (bytes_on_device(4 * MIB) for _ in range(3))
    del first, third
    reserved = torch.fake.memory_reserved()
    del second
    whole = bytes_on_device(20 * MIB)
    assert torch.fake.memory_reserved() == reserved == whole.nbytes


def test_statistics_follow_tensors(accelerator: ModuleType) -> None:
    kept, dropped = bytes_on_device(MIB), bytes_on_device(2 * MIB)
    del dropped
    assert torch.fake.memory_allocated() == torch.accelerator.memory_allocated() == MIB
    assert torch.fake.max_memory_allocated() == torch.accelerator.max_memory_allocated() == 3 * MIB
    assert torch.fake.memory_stats()["allocated_bytes.large_pool.peak"] == 2 * MIB
    assert torch.accelerator.memory_stats()["allocation.all.allocated"] == 2
    torch.accelerator.reset_peak_memory_stats()
    assert torch.fake.max_memory_allocated() == kept.nbytes
    torch.accelerator.empty_cache()
    assert torch.fake.memory_reserved() == torch.fake.max_memory_reserved() - 20 * MIB == 2 * MIB


def test_full_device_releases_its_cache_before_it_fails(accelerator: ModuleType) -> None:
    accelerator.capacity(40 * MIB)
    kept = bytes_on_device(20 * MIB)
    bytes_on_device(20 * MIB)
    assert torch.fake.mem_get_info() == (0, 40 * MIB)
    small = bytes_on_device(1)
    assert torch.fake.memory_stats()["num_alloc_retries"] == 1
    accelerator.others(15 * MIB)
    assert torch.fake.mem_get_info()[0] == 3 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"fake out of memory.*Tried to allocate 20\.00 MiB"):
        bytes_on_device(20 * MIB)
    assert torch.fake.memory_stats()["num_ooms"] == 1
    assert torch.fake.memory_allocated() == kept.nbytes + 512 * small.nbytes


def test_nth_allocation_fails_once(accelerator: ModuleType) -> None:
    accelerator.fail_at(3)
    kept = [bytes_on_device(1) for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        bytes_on_device(1)
    kept.append(bytes_on_device(1))
    assert accelerator.calls["allocations"] == 4


def test_small_segments_fragment_with_small_tensors(accelerator: ModuleType) -> None:
    accelerator.small_segments(64)
    kept = [bytes_on_device(16 * 1024) for _ in range(8)]
    assert torch.fake.memory_reserved() == 128 * 1024
    del kept[::2]
    # There is enough free memory, but not in one piece.
    kept.append(bytes_on_device(32 * 1024))
    assert torch.fake.memory_reserved() == 192 * 1024
    with pytest.raises(RuntimeError, match="needs an empty device"):
        accelerator.small_segments(2048)


def test_storages_are_resized_in_place(accelerator: ModuleType) -> None:
    tensor = torch.arange(256.0, device="fake")
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert (storage.nbytes(), torch.fake.memory_allocated()) == (0, 0)
    storage.resize_(2048)
    tensor.copy_(torch.ones(256))
    assert (storage.nbytes(), torch.fake.memory_allocated()) == (2048, 2048)
    assert storage.data_ptr() == tensor.data_ptr() != 0
    storage.resize_(1024)
    assert torch.equal(tensor[:256:2][:128].cpu(), torch.ones(128))


def test_profiler_sees_every_byte_of_the_device_and_no_host_copy(
    accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first profiler of a process decides whether all later ones write to stderr.
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    layer, batch = nn.Linear(64, 64).to("fake"), torch.ones(8, 64, device="fake")
    before = accelerator.stats()["allocated_bytes.all.current"]
    with torch.profiler.profile(profile_memory=True) as profiler, torch.profiler.record_function("all"):
        layer(batch).sum().backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert {e.device_type() for e in events} == {torch._C._autograd.DeviceType.PrivateUse1}
    assert before + sum(e.nbytes() for e in events) == accelerator.stats()["allocated_bytes.all.current"]


# ---- random numbers


def test_device_has_its_own_random_generator(accelerator: ModuleType) -> None:
    torch.manual_seed(0)
    of_the_cpu = torch.get_rng_state()
    first = F.dropout(torch.ones(64, device="fake")), torch.randn(4, device="fake"), torch.randperm(9, device="fake")
    assert torch.equal(torch.get_rng_state(), of_the_cpu)
    torch.manual_seed(0)
    torch.randn(1)
    again = F.dropout(torch.ones(64, device="fake")), torch.randn(4, device="fake"), torch.randperm(9, device="fake")
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], F.dropout(torch.ones(64, device="fake")))


def test_restored_generator_state_repeats_dropout(accelerator: ModuleType) -> None:
    ones = torch.ones(256, device="fake")
    one, every = torch.fake.get_rng_state(), torch.fake.get_rng_state_all()
    first = F.dropout(ones, 0.3)
    torch.fake.set_rng_state(one, "fake:0")
    assert torch.equal(F.dropout(ones, 0.3), first)
    torch.fake.set_rng_state_all(every)
    assert torch.equal(F.dropout(ones, 0.3), first)
    with torch.random.fork_rng(devices=[0], device_type="fake"):
        torch.fake.set_rng_state(one)
        assert torch.equal(F.dropout(ones, 0.3), first)
    assert set(first.tolist()) == {0.0, float(torch.tensor(1 / 0.7))}


def test_generators_can_be_created_on_the_device(accelerator: ModuleType) -> None:
    generator = torch.Generator(device="fake").manual_seed(3)
    assert generator.device.type == "fake"
    drawn = torch.rand(4, device="fake", generator=generator)
    assert torch.equal(drawn, torch.rand(4, device="fake", generator=generator.manual_seed(3)))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="fake", generator=torch.Generator())


# ---- kernels


class Block(nn.Module):
    """A block with every layer that the project's jobs use."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.project = nn.Linear(16, 48, bias=False)
        self.convolution = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.batch_norm = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(48, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm(self.embedding(tokens))).chunk(3, -1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        planes = torch.relu(self.batch_norm(self.convolution(attended.unsqueeze(1))))
        return self.head(self.dropout(planes.permute(0, 2, 1, 3).flatten(2)))


def train(
    device: str,
    steps: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    dropout: float = 0.0,
    recompute: bool = False,
) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Block(dropout).to(device)
    trained = optimizer(model.parameters(), lr=0.01)
    tokens = (torch.arange(36).reshape(4, 9) % 11).to(device)
    losses = []
    for _ in range(steps):
        out = checkpoint(model, tokens, use_reentrant=False) if recompute else model(tokens)
        loss = F.cross_entropy(out.flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trained.step()
        trained.zero_grad()
        losses.append(loss.detach().cpu())
    return model, losses


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_model_trains_as_on_the_cpu(accelerator: ModuleType, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    on_cpu, losses = train("cpu", optimizer=optimizer)
    on_device, same = train("fake", optimizer=optimizer)
    torch.testing.assert_close(same, losses)
    torch.testing.assert_close(on_device.cpu().state_dict(), on_cpu.state_dict(), rtol=1e-3, atol=1e-4)
    assert accelerator.calls["kernels"] > 100


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_train_as_on_the_cpu(accelerator: ModuleType, layer: type[nn.Module]) -> None:
    on_cpu, batch = layer(4, 6, num_layers=2), torch.randn(3, 2, 4)
    on_device = copy.deepcopy(on_cpu).to("fake")
    for model, at in ((on_cpu, "cpu"), (on_device, "fake")):
        model(batch.to(at))[0].pow(2).sum().backward()
    gradients = [parameter.grad.cpu() for parameter in on_device.parameters()]
    torch.testing.assert_close(gradients, [parameter.grad for parameter in on_cpu.parameters()])
    with torch.inference_mode():
        assert on_device(batch.to("fake"))[0].device.type == "fake"


def test_recomputed_step_repeats_its_dropout(accelerator: ModuleType) -> None:
    plain, losses = train("fake", dropout=0.5)
    recomputed, same = train("fake", dropout=0.5, recompute=True)
    assert losses[0] == same[0]
    # Only batch norm's statistics are updated twice.
    assert torch.equal(plain.head.weight, recomputed.head.weight)


def test_backward_runs_in_the_device_thread(accelerator: ModuleType) -> None:
    weight, threads = torch.ones(4, device="fake", requires_grad=True), set()
    weight.register_hook(lambda _: threads.add(threading.get_ident()))
    (weight * 2).sum().backward()
    assert threads
    assert threads != {threading.get_ident()}


def test_results_are_on_the_device_and_views_share_storage(accelerator: ModuleType) -> None:
    base = torch.zeros(4, 6, device="fake")
    base[1].add_(1)
    base.t().view(2, 3, 4).select(1, 0)[:] = 2
    base.unfold(1, 2, 2)[3].fill_(5)
    mirror = torch.zeros(4, 6)
    mirror[1].add_(1)
    mirror.t().view(2, 3, 4).select(1, 0)[:] = 2
    mirror.unfold(1, 2, 2)[3].fill_(5)
    assert torch.equal(base.cpu(), mirror)
    out = torch.empty(0, device="fake")
    assert torch.add(base, 1, out=out) is out
    assert torch.equal(out.cpu(), mirror + 1)
    assert torch.equal(torch.nonzero(base).cpu(), torch.nonzero(mirror))
    assert base[torch.tensor([1, 3])].device.type == "fake"
    assert "device='fake:0'" in repr(base)


def test_tensors_on_different_devices_cannot_be_mixed(accelerator: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="fake") + torch.ones(2)
    assert (torch.ones(2, device="fake") + torch.tensor(1.0)).tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_products_but_not_norms(accelerator: ModuleType, dtype: torch.dtype) -> None:
    layer, batch = nn.Linear(4, 4).to("fake"), torch.randn(2, 4, device="fake")
    for cache in (True, False):
        with torch.autocast("fake", dtype=dtype, cache_enabled=cache):
            out = layer(batch)
            assert (
                out.dtype == (out @ out.t()).dtype == F.scaled_dot_product_attention(*[batch[None]] * 3).dtype == dtype
            )
            assert F.layer_norm(out, (4,)).dtype == out.softmax(-1).dtype == out.sum().dtype == torch.float32
            assert F.mse_loss(out, batch).dtype == torch.float32
            F.cross_entropy(layer(batch), torch.zeros(2, dtype=torch.long, device="fake")).backward()
        assert torch.is_autocast_cache_enabled()
    assert layer.weight.grad.dtype == torch.float32


def test_autocast_caches_a_cast_weight(accelerator: ModuleType) -> None:
    layer, batch = nn.Linear(4, 4).to("fake"), torch.randn(2, 4, device="fake")

    def copies(cache: bool) -> int:
        before = accelerator.calls["copies"]
        with torch.autocast("fake", dtype=torch.bfloat16, cache_enabled=cache):
            layer(batch), layer(batch)
        return accelerator.calls["copies"] - before

    assert copies(cache=False) == 6
    assert copies(cache=True) == 4


def test_scaler_skips_steps_that_overflow(accelerator: ModuleType) -> None:
    weight = torch.ones(4, device="fake", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("fake", init_scale=4.0)
    for gradient, expected in ((float("inf"), 1.0), (0.5, 0.5)):
        scaler.scale((weight * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert weight.tolist() == [expected] * 4
    assert scaler.get_scale() == 2.0


def test_copies_are_deep_and_files_load_on_any_device(accelerator: ModuleType) -> None:
    model = Block().to("fake")
    twin = copy.deepcopy(model)
    weight = model.head.weight.detach()
    for same in (twin.head.weight, weight.clone(), copy.deepcopy(weight), weight.cpu().to("fake")):
        assert torch.equal(same, weight)
        assert same.data_ptr() != weight.data_ptr()
        assert same.device.type == "fake"
    assert copy.deepcopy(weight.untyped_storage()).device.type == "fake"
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for place in ("cpu", None):
        file.seek(0)
        loaded = torch.load(file, map_location=place, weights_only=True)["head.weight"]
        assert loaded.device.type == (place or "fake")
        assert torch.equal(loaded.cpu(), weight.cpu())


@pytest.mark.parametrize("pinned", [False, True])
def test_activations_can_be_offloaded_to_the_host_and_back(accelerator: ModuleType, pinned: bool) -> None:
    weight = torch.randn(8, device="fake", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        out = (weight.exp() * weight).sum()
    out.backward()
    kept = weight.detach().cpu()
    torch.testing.assert_close(weight.grad.cpu(), kept.exp() * (1 + kept))
    assert torch.ones(1).pin_memory().is_pinned()


# ---- time


def test_unsynchronized_measurement_sees_only_kernel_launches(accelerator: ModuleType) -> None:
    batch = torch.ones(256, 256, device="fake")

    def measured(synchronise: bool) -> float:
        torch.fake.synchronize()
        begin = accelerator.clock()
        for _ in range(10):
            batch @ batch
        if synchronise:
            torch.fake.synchronize()
        return accelerator.clock() - begin

    assert measured(synchronise=False) < 0.01 * measured(synchronise=True)
    assert measured(synchronise=True) == pytest.approx(measured(synchronise=True), rel=1e-9)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.accelerator.synchronize(),
        lambda x: torch.fake.current_stream().synchronize(),
    ],
    ids=["item", "cpu", "nonzero", "equal", "accelerator", "stream"],
)
def test_host_waits_for_the_values_it_reads(accelerator: ModuleType, wait: Callable[[torch.Tensor], object]) -> None:
    batch = torch.ones(1024, device="fake")
    accelerator.speed(kernel_s=1.0)
    begin = accelerator.clock()
    batch.add_(1)
    assert accelerator.clock() - begin < 0.001
    wait(batch)
    assert accelerator.clock() - begin > 0.999


def test_host_and_device_work_in_parallel(accelerator: ModuleType) -> None:
    batch = torch.ones(1024, device="fake")
    accelerator.speed(kernel_s=1.0)
    begin = accelerator.clock()
    batch.add_(1)
    accelerator.host_work(3.0)
    torch.fake.synchronize()
    assert accelerator.clock() - begin == pytest.approx(3.0, rel=1e-3)


def test_asynchronous_copy_does_not_wait(accelerator: ModuleType) -> None:
    source, target = torch.ones(4), torch.empty(4, device="fake")
    accelerator.speed(kernel_s=1.0)
    begin = accelerator.clock()
    target.copy_(source, non_blocking=True)
    assert accelerator.clock() - begin < 0.001
    target.copy_(source)
    assert accelerator.clock() - begin > 1.999


def test_events_measure_device_time(accelerator: ModuleType) -> None:
    begin, end = (torch.fake.Event(enable_timing=True) for _ in range(2))
    batch = torch.ones(1024, device="fake")
    accelerator.speed(kernel_s=1.0)
    begin.record()
    batch.add_(1)
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(1000, rel=1e-3)
    assert accelerator.calls["Event.record"] == 2
    with torch.fake.stream(torch.fake.Stream()) as _:
        assert torch.fake.current_stream() != torch.fake.default_stream()
    assert torch.fake.current_stream() == torch.fake.default_stream()


def test_products_take_half_the_time_in_16_bits(accelerator: ModuleType) -> None:
    def seconds(dtype: torch.dtype) -> float:
        batch = torch.ones(256, 256, device="fake", dtype=dtype)
        torch.fake.synchronize()
        begin = accelerator.clock()
        torch.mm(batch, batch)
        torch.fake.synchronize()
        return accelerator.clock() - begin

    accelerator.speed(kernel_s=0, byte_s=1e-12)
    assert seconds(torch.float32) == pytest.approx(2 * seconds(torch.bfloat16), rel=0.01)


# ---- what goes wrong


def gradient() -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randn(16, 16, device="fake", requires_grad=True)
    (weight @ torch.randn(16, 16, device="fake")).pow(2).sum().backward()
    return weight.grad


def test_noise_is_one_unit_in_the_last_place(accelerator: ModuleType) -> None:
    exact = gradient()
    assert torch.equal(gradient(), exact)
    accelerator.noise()
    noisy, other = gradient(), gradient()
    assert not torch.equal(noisy, other)
    steps = (noisy.cpu().view(torch.int32) - exact.cpu().view(torch.int32)).abs()
    assert steps.max() == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(gradient(), exact)
    finally:
        torch.use_deterministic_algorithms(False)


def test_noise_leaves_forward_passes_unchanged(accelerator: ModuleType) -> None:
    accelerator.noise()
    left, right = torch.randn(2, 16, 16, device="fake", requires_grad=True)
    seen = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(a @ b)
        return seen[-1].relu()

    checkpoint(product, left, right, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    ("lack", "function"),
    [
        ("peak statistics", "reset_peak_memory_stats"),
        ("peak statistics", "max_memory_allocated"),
        ("statistics", "memory_stats"),
        ("memory info", "mem_get_info"),
        ("events", "Event"),
    ],
)
def test_device_can_lack_functions(accelerator: ModuleType, lack: str, function: str) -> None:
    with accelerator.without(lack):
        assert not hasattr(torch.fake, function)
    assert hasattr(torch.fake, function)


def test_torch_cannot_use_a_function_that_the_device_lacks(accelerator: ModuleType) -> None:
    kept = bytes_on_device(1)
    with accelerator.without("peak statistics", "events"):
        with pytest.raises(NotImplementedError, match="reset_peak_memory_stats"):
            torch.accelerator.reset_peak_memory_stats()
        with pytest.raises(NotImplementedError, match="events"):
            torch.Event("fake").record()
        stats = torch.fake.memory_stats()
        assert stats["allocated_bytes.all.current"] == 512 * kept.nbytes
        assert not any(name.endswith("peak") for name in stats)
    torch.accelerator.reset_peak_memory_stats()


@pytest.mark.parametrize(("lack", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_device_can_lack_a_precision(accelerator: ModuleType, lack: str, dtype: torch.dtype) -> None:
    halves = torch.ones(2, 2, device="fake", dtype=dtype)
    with accelerator.without(lack):
        assert dtype not in torch.fake.get_amp_supported_dtype()
        with pytest.raises(NotImplementedError, match="not implemented for"):
            halves @ halves
    assert (halves @ halves).tolist() == [[2, 2], [2, 2]]


def test_lost_device_fails_every_call_until_it_returns(accelerator: ModuleType) -> None:
    weight = torch.ones(2, device="fake", requires_grad=True)
    loss = (weight * 2).sum()
    accelerator.vanish()
    for work in (loss.item, loss.cpu, loss.backward, torch.fake.synchronize, lambda: weight + 1):
        with pytest.raises(RuntimeError, match="fake error: device lost"):
            work()
    accelerator.vanish(False)
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2]


def test_calls_are_counted_through_every_api(accelerator: ModuleType) -> None:
    kept = bytes_on_device(1)
    accelerator.calls.clear()
    torch.fake.synchronize()
    torch.accelerator.synchronize()
    assert accelerator.calls["synchronize"] == 2
    kept.add_(1)
    assert (accelerator.calls["kernels"], accelerator.calls.statistics()) == (1, 0)
    torch.fake.memory_allocated()
    torch.accelerator.memory_stats()
    torch.fake.mem_get_info()
    assert accelerator.calls.statistics() == 3
    assert set(accelerator.calls) == {"synchronize", "kernels", "memory_allocated", "memory_stats", "mem_get_info"}
