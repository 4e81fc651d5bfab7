"""Updates during the backward pass: the same training, with one gradient at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune import Job
from autotune.catalog import load_job
from autotune.cost_model.memory_model import peak_bytes
from autotune.engines.deepspeed_engine import DeepSpeedEngine
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import InputError, JobError
from autotune.launching import launched, split
from autotune.mechanics.releasing import released as release_in_backward
from autotune.plan import Precision, Storage
from autotune.profiling.profiler import ProfilerOptions, profile

TIED = "tied"


class Tied(nn.Module):
    """A stack of blocks between an embedding and a head that shares its weights, with frozen parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(4)
        )
        self.blocks[1][1].weight.requires_grad_(False)  # type: ignore[index,union-attr]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embedding.weight.T


def tied(kind: str = "AdamW", shape: tuple[int, int] = (8, 16), **changes: object) -> Job:
    def batches(seed: int) -> object:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(40, shape, generator=generator)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def built(parameters: object) -> torch.optim.Optimizer:
        given = list(parameters)  # type: ignore[call-overload]
        groups = [{"params": given[:3], "weight_decay": 0.1}, {"params": given[3:], "lr": 3e-3}]
        return getattr(torch.optim, kind)(groups, lr=1e-2)  # type: ignore[no-any-return]

    fields = {
        "name": TIED,
        "model": Tied,
        "batches": batches,
        "loss": loss,
        "optimizer": built,
        "evaluate": lambda _model: 0.0,
        "batch_size": shape[0],
        "clip_norm": None,
        "max_steps": 50,
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


def released(job: Job) -> Job:
    return launched(job, split("job+release", where="test")[1])


def trained(job: Job, steps: int = 6, plan: object = None) -> tuple[TorchEngine, list[float | None]]:
    engine = TorchEngine(job, seed=3, options=EngineOptions(discard_steps=0))
    if plan is not None:
        engine.apply(plan(engine.space))  # type: ignore[operator]
    return engine, [engine.run(1).loss for _ in range(steps)]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor", "RMSprop"])
@pytest.mark.parametrize("plan", ["baseline", "leanest"])
def test_released_gradients_train_to_the_same_bits(optimizer: str, plan: str) -> None:
    plain, losses = trained(tied(optimizer), plan=lambda space: getattr(space, plan)().changed(accumulation_steps=1))
    own, other = trained(released(tied(optimizer)), plan=lambda space: getattr(space, plan)())
    assert losses == other
    for one, two in zip(plain.model.parameters(), own.model.parameters(), strict=True):
        assert torch.equal(one, two)
        assert two.grad is None
    state, released_state = plain.snapshot().optimizer, own.snapshot().optimizer
    assert state["param_groups"] == released_state["param_groups"]
    torch.testing.assert_close(state["state"], released_state["state"], rtol=0, atol=0)


@pytest.mark.parametrize("choice", ["lion", "adamw8bit", "adamw"])
def test_released_gradients_train_to_the_same_bits_with_optimizers_of_other_libraries(choice: str) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("pytorch_optimizer")
    jobs = [launched(tied(), split(f"job+{choice}{more}", where="test")[1]) for more in ("", "+release")]
    (plain, losses), (own, other) = (trained(replace(job, accumulation_choices=(1,)), steps=4) for job in jobs)
    assert losses == other
    assert all(map(torch.equal, plain.model.parameters(), own.model.parameters()))


def test_an_optimizer_that_clips_all_gradients_together_is_refused() -> None:
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(InputError, match="Lamb may not update one parameter at a time"):
        TorchEngine(launched(tied(), split("job+lamb+release", where="test")[1]))


def test_what_a_step_writes_to_a_group_is_written_once() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            super().step()

    model, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    optimizer = Counting([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    for _ in range(2):
        with release_in_backward(optimizer, seen.append):
            model(torch.ones(1, 3)).sum().backward()
    assert [group["steps"] for group in optimizer.param_groups] == [2, 2]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert len(seen) == 8


def test_a_snapshot_is_taken_over_by_a_run_without_release() -> None:
    own, _ = trained(released(tied()), steps=3)
    other = TorchEngine(tied(), seed=3, options=EngineOptions(discard_steps=0, statistics_every=None))
    other.restore(own.snapshot())
    assert own.run(2).loss == other.run(2).loss


def test_the_peak_falls_by_the_gradients() -> None:
    job = tied("SGD", shape=(4, 2))
    peaks = []
    for one in (job, released(job)):
        engine, _ = trained(one)
        peaks.append(engine.run(1).peak_bytes or 0)
        sizes = [parameter.nbytes for parameter in engine.model.parameters() if parameter.requires_grad]
    assert peaks[0] - peaks[1] > 0.5 * (sum(sizes) - max(sizes))


@pytest.mark.parametrize("shape", [(4, 2), (8, 32)], ids=str)
def test_peaks_of_released_plans_are_predicted(shape: tuple[int, int]) -> None:
    job, generator = released(tied(shape=shape)), np.random.default_rng(0)
    found = profile(job, device_name="cpu", options=ProfilerOptions.lean())
    engine, _ = trained(job, steps=1)
    for _ in range(6):
        plan = found.space.sample(generator)
        engine.apply(plan)
        engine.run(1)
        assert peak_bytes(found, plan) == pytest.approx(engine.run(1).peak_bytes, rel=0.002)


def test_the_gradient_can_be_asked_for_and_changes_nothing() -> None:
    engine, _ = trained(released(tied()), steps=2)
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    gradient = engine.gradient(engine.space.baseline())
    assert sum(one is not None for one in gradient) == len(before) - 1
    assert all(map(torch.equal, before, engine.model.parameters()))
    assert engine.run(1).failure is None


def test_only_one_micro_batch_and_no_scaled_precision_are_offered() -> None:
    space = TorchEngine(released(tied())).space
    assert space.accumulation_choices == (1,)
    assert Precision.FP16 not in space.precisions
    assert Storage.RECOMPUTE in space.storages


def test_a_loss_that_is_not_finite_changes_no_weight() -> None:
    job = tied()
    engine, _ = trained(released(replace(job, loss=lambda model, batch: job.loss(model, batch) * torch.nan)), steps=0)
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    assert engine.run(1).failure == "non_finite"
    assert all(map(torch.equal, before, engine.model.parameters()))


def test_a_gradient_that_is_not_finite_is_told_since_it_was_applied() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) * 0).square().sum().sqrt()

    engine, _ = trained(released(tied(loss=loss)), steps=0)
    with pytest.raises(JobError, match="a gradient that is not finite was applied"):
        engine.run(1)


def test_an_exception_of_the_backward_pass_after_the_first_update_is_raised() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: object, *_gradients: torch.Tensor) -> torch.Tensor:
            raise ValueError("halfway")

    class Broken(Tied):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x: torch.Tensor = Raises.apply(self.embedding(tokens))
            return self.blocks[0](x) @ self.embedding.weight.T

    engine, _ = trained(released(tied(model=Broken)), steps=0)
    with pytest.raises(JobError, match="halfway"):
        engine.run(1)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in engine.model.parameters())


def test_jobs_whose_gradients_are_clipped_or_updated_together_are_refused() -> None:
    with pytest.raises(InputError, match="clip_norm=None"):
        released(load_job("digits"))

    class Together(torch.optim.SGD):
        pass

    with pytest.raises(InputError, match="Together may not update one parameter at a time"):
        TorchEngine(released(tied(optimizer=lambda parameters: Together(list(parameters)))))


def test_deepspeed_refuses_to_release() -> None:
    with pytest.raises(InputError, match="DeepSpeed keeps the gradients"):
        DeepSpeedEngine(released(tied()))


def refused(model: type[nn.Module], message: str) -> None:
    engine, _ = trained(released(tied(model=model)), steps=0)
    with pytest.raises(JobError, match=message):
        engine.run(1)


def test_a_gradient_that_comes_in_parts_is_told() -> None:
    class Shared(Tied):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for _ in range(2):
                x = x + checkpoint(self.blocks[0], x, use_reentrant=True)
            return x @ self.embedding.weight.T

    refused(Shared, "given its gradient in several parts")


def test_a_weight_that_is_read_after_its_update_is_told() -> None:
    class Reads(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 40)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = nn.functional.linear(self.blocks[0](self.embedding(tokens)), self.head.weight.detach())
            return self.head(x @ self.head.weight.detach())

    refused(Reads, "reads a weight again after its update")


def test_what_a_backward_pass_within_the_loss_left_is_updated() -> None:
    job = tied()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        (model(batch).square().mean() * 0.1).backward()
        return model.embedding.weight.square().mean()  # type: ignore[operator,union-attr,return-value]

    plain, losses = trained(replace(job, loss=loss, accumulation_choices=(1,)))
    own, other = trained(released(replace(job, loss=loss)))
    assert losses == other
    assert all(map(torch.equal, plain.model.parameters(), own.model.parameters()))


def test_an_interrupted_step_is_forgotten() -> None:
    engine, _ = trained(released(tied()), steps=2)
    block = engine.model.blocks[0]  # type: ignore[index]
    hook = block.register_full_backward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run(1)
    hook.remove()
    engine.job = replace(engine.job, loss=lambda model, batch: model(batch).sum() * torch.nan)
    assert engine.run(1).failure == "non_finite"


def interrupted(*_arguments: object) -> None:
    raise KeyboardInterrupt
