"""Jobs from the objects of a loop: they train as that loop does, bit for bit, and leave its objects alone."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_jobs import differences
from tiny_job import Network, mean_loss
from torch import nn
from torch.optim.lr_scheduler import (
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune import Job, JobError, TorchEngine
from autotune.catalog import load_job
from autotune.errors import InputError
from autotune.launching import launched
from autotune.plan import Launch, Plan
from autotune.report.plan_export import export

STEPS, BATCH = 8, 4


class Texts(Dataset):
    """Rows of bytes, one of them drawn anew from python's generator, as augmentations are."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.arange(index, index + 9) % 256
        row[0] = random.randrange(256)
        return row


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randint(256, (9,)) for _ in itertools.count())


def network() -> Network:
    torch.manual_seed(1)
    return Network()


def loader(**changes: Any) -> DataLoader:
    return DataLoader(Texts(), **{"batch_size": BATCH, "shuffle": True, **changes})


def grouped(model: nn.Module, kind: Any = torch.optim.AdamW, **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, one of them without weight decay."""
    plain = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
    return kind(groups, lr=1e-2, **settings)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: grouped(model, betas=(0.8, 0.99)),
    "SGD": lambda model: grouped(model, torch.optim.SGD, momentum=0.9, nesterov=True),
    "RAdam": lambda model: grouped(model, torch.optim.RAdam),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler] | None] = {
    "none": None,
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[2e-2, 5e-3], total_steps=STEPS),
    "lambda": lambda optimizer: LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: (step + 1) / 3), StepLR(optimizer, 2, 0.5)], [3]
    ),
}


def own_loop(
    model: nn.Module, batches: Iterator[Any], optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = STEPS
) -> list[float]:
    """Return the losses of a plain loop."""
    losses = []
    model.train()
    for batch in itertools.islice(batches, steps):
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(engine: TorchEngine, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        window = engine.run(1)
        assert window.failure is None, window.failure_detail
        assert window.loss is not None
        found.append(window.loss)
    return found


@pytest.mark.some(8)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("built", [False, True], ids=["objects", "functions"])
def test_the_baseline_is_the_users_own_loop_bit_for_bit(optimizer: str, scheduler: str, built: bool):
    model, make, schedule = network(), OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
    own = make(model)
    scheduled = None if schedule is None else schedule(own)
    if built:
        # The optimizer's groups are of the loop's own making, so a function gets the parameters of one group.
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduled = None
        job = Job.from_loader(
            model, loader(), mean_loss, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), max_steps=STEPS
        )
    else:
        job = Job.from_loader(model, loader(), mean_loss, own, scheduled, max_steps=STEPS)
    engine = TorchEngine(job, seed=3, device="cpu")
    found = trained(engine, STEPS - 3)
    torch.manual_seed(3)
    expected = own_loop(model, job.batches(3), own, scheduled, STEPS - 3)
    assert found == expected
    assert differences(dict(engine.model.named_parameters()), dict(model.named_parameters())) == []
    rates = [[group["lr"] for group in one.param_groups] for one in (engine.update.optimizer, own)]
    assert rates[0] == rates[1]


def test_clipping_over_several_groups_is_that_of_the_models_parameters_bit_for_bit():
    model = network()
    own = grouped(model)
    job = Job.from_loader(model, loader(), mean_loss, own, clip_norm=0.1)
    engine = TorchEngine(job, seed=3, device="cpu")
    found = trained(engine, 5)
    torch.manual_seed(3)
    expected = []
    for batch in itertools.islice(job.batches(3), 5):
        loss = mean_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        own.step()
        own.zero_grad()
        expected.append(loss.item())
    assert found == expected
    assert differences(dict(engine.model.named_parameters()), dict(model.named_parameters())) == []


def test_a_job_begins_with_what_the_loop_had_when_it_was_made():
    model = network()
    own = grouped(model)
    scheduler = LambdaLR(own, lambda step: 0.9**step)
    own_loop(model, iter(loader()), own, scheduler, 3)
    job = Job.from_loader(model, loader(), mean_loss, own, scheduler)
    expected = copy.deepcopy(model.state_dict())
    first = trained(TorchEngine(job, seed=0, device="cpu"), 3)
    own_loop(model, iter(loader()), own, scheduler, 3)
    engine = TorchEngine(job, seed=0, device="cpu")
    assert differences(engine.model.state_dict(), expected) == []
    assert engine.update.optimizer.state_dict()["state"][0]["step"] == 3
    assert engine.update.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**3)
    assert trained(engine, 3) == first


def test_training_a_job_changes_nothing_of_the_loop():
    generator = torch.Generator().manual_seed(5)
    model, data = network(), loader(generator=generator)
    own = grouped(model)
    scheduler = OneCycleLR(own, max_lr=1e-2, total_steps=STEPS)
    before = copy.deepcopy([model.state_dict(), own.state_dict(), scheduler.state_dict(), generator.get_state()])
    torch.manual_seed(9)
    random.seed(9)
    states = torch.get_rng_state(), random.getstate()
    job = Job.from_loader(model, data, mean_loss, own, scheduler)
    trained(TorchEngine(job, seed=0, device="cpu"), 3)
    after = [model.state_dict(), own.state_dict(), scheduler.state_dict(), generator.get_state()]
    assert str(after[1:3]) == str(before[1:3])
    assert differences(after[0], before[0]) == []
    assert torch.equal(after[3], before[3])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batches_of_a_seed_are_those_of_the_loader_after_that_seed(workers: int):
    data = loader(num_workers=workers)
    job = Job.from_loader(network(), data, mean_loss, grouped)
    torch.manual_seed(7)
    random.seed(7)
    expected = list(data)
    again = list(job.batches(7))
    assert [batch.shape[0] for batch in again] == [4, 4, 4, 4, 4, 2]
    assert all(map(torch.equal, expected, again))
    assert not all(map(torch.equal, again, job.batches(8)))


def test_a_loaders_own_generator_gets_the_seed_too_and_a_stream_need_not_end():
    data = loader(generator=torch.Generator().manual_seed(0))
    job = Job.from_loader(network(), data, mean_loss, grouped)
    assert all(map(torch.equal, job.batches(1), job.batches(1)))
    assert not all(map(torch.equal, job.batches(1), job.batches(2)))
    stream = Job.from_loader(network(), DataLoader(Stream(), batch_size=3), mean_loss, grouped)
    one, two = (list(itertools.islice(stream.batches(seed), 4)) for seed in (1, 1))
    assert all(map(torch.equal, one, two))
    assert stream.batch_size == 3


def test_a_snapshot_restores_rates_and_momenta_of_a_scheduler():
    model = network()
    own = grouped(model)
    job = Job.from_loader(model, loader(), mean_loss, own, OneCycleLR(own, max_lr=2e-2, total_steps=STEPS))
    engine = TorchEngine(job, seed=0, device="cpu")
    trained(engine, 3)
    snapshot = engine.snapshot()
    settings = copy.deepcopy([{**group, "params": None} for group in engine.update.optimizer.param_groups])
    expected = trained(engine, 4)
    engine.restore(snapshot)
    assert [{**group, "params": None} for group in engine.update.optimizer.param_groups] == settings
    assert trained(engine, 4) == expected
    other = TorchEngine(job, seed=0, device="cpu")
    other.restore(snapshot)
    assert trained(other, 4) == expected


def test_rates_stay_after_the_schedulers_end_and_an_early_end_is_an_error():
    def job(steps: int, max_steps: int) -> Job:
        return Job.from_loader(
            network(),
            loader(),
            mean_loss,
            torch.optim.SGD,
            lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps, cycle_momentum=False),
            max_steps=max_steps,
        )

    engine = TorchEngine(job(5, 5), device="cpu")
    trained(engine, 5)
    rate = engine.update.optimizer.param_groups[0]["lr"]
    trained(engine, 3)
    assert engine.update.optimizer.param_groups[0]["lr"] == rate
    with pytest.raises(
        JobError, match=r"scheduler raised at step 4: .*\(allowed: a scheduler for max_steps = 20 steps"
    ):
        trained(TorchEngine(job(3, 20), device="cpu"), 5)


def test_a_loss_module_takes_pairs_and_counts_the_targets_that_it_does_not_ignore():
    pairs = [(torch.randn(4, 8), torch.tensor([0, 1, -100, 2]))] * 3
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    job = Job.from_loader(model, pairs, nn.CrossEntropyLoss(), torch.optim.SGD, batch_size=4)
    assert job.count is not None
    assert job.count(pairs[0]) == 3
    assert job.evaluate(model) == pytest.approx(nn.CrossEntropyLoss()(model(pairs[0][0]), pairs[0][1]).item())
    engine = TorchEngine(job, device="cpu")
    whole, cut = (engine.gradient(Plan(accumulation_steps=k)) for k in (1, 2))
    for one, two in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, two)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    assert Job.from_loader(model, pairs, weighted, torch.optim.SGD, batch_size=4).accumulation_choices == (1,)


def test_the_metric_is_the_given_one_or_the_mean_loss_of_a_loader_or_of_some_training_batches():
    model, validation = network(), loader(shuffle=False, batch_size=11)
    given = Job.from_loader(model, loader(), mean_loss, grouped, evaluate=lambda model: 4.0)
    assert given.evaluate(model) == 4.0
    with torch.no_grad():
        model.eval()
        whole = Job.from_loader(model, loader(), mean_loss, grouped, evaluate=validation)
        assert whole.evaluate(model) == pytest.approx(5.5, abs=0.5)
        few = Job.from_loader(model, loader(), mean_loss, grouped)
        assert few.evaluate(model) == few.evaluate(model)
    assert few.target is None


def frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = grouped(model)
    model.embedding.requires_grad_(False)
    return model, optimizer


def test_frozen_parameters_in_the_optimizer_do_no_harm():
    model, optimizer = frozen()
    engine = TorchEngine(Job.from_loader(model, loader(), mean_loss, optimizer), device="cpu")
    trained(engine, 2)
    assert torch.equal(engine.model.embedding.weight, model.embedding.weight)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: dict) -> Uncopyable:
        raise RuntimeError("held by a driver")


def hooked() -> dict[str, Any]:
    model = network()
    optimizer = grouped(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return {"model": model, "optimizer": optimizer}


def on_plateau() -> dict[str, Any]:
    model = network()
    optimizer = grouped(model)
    return {"model": model, "optimizer": optimizer, "scheduler": ReduceLROnPlateau(optimizer)}


def cyclic() -> dict[str, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    function = CyclicLR(optimizer, 0.1, 0.2, scale_fn=Texts().__getitem__, cycle_momentum=False)
    return {"model": model, "optimizer": optimizer, "scheduler": function}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "iterator": (lambda: {"loader": iter(loader())}, "cannot be read again"),
    "no loader": (lambda: {"loader": 3}, "loader is an int"),
    "no batch size": (lambda: {"loader": [torch.ones(2, 9)]}, r"loader has no batch_size \(allowed: batch_size="),
    "no batching": (lambda: {"loader": loader(batch_size=None, shuffle=False)}, "loader has no batch_size"),
    "ranks": (
        lambda: {"loader": loader(shuffle=False, sampler=torch.utils.data.DistributedSampler(Texts(), 2, 0))},
        "one of 2 ranks' shares",
    ),
    "other parameters": (lambda: {"optimizer": grouped(network())}, "a parameter that is not the model's"),
    "closure": (
        lambda: {"model": (model := network()), "optimizer": torch.optim.LBFGS(model.parameters())},
        "LBFGS evaluates the loss several times a step",
    ),
    "hooks": (hooked, "hooks on its step"),
    "no optimizer": (lambda: {"optimizer": "adamw"}, "optimizer is 'adamw'"),
    "function and object": (lambda: {"model": network, "optimizer": grouped(network())}, "parameters of another model"),
    "no model": (lambda: {"model": None, "optimizer": torch.optim.SGD}, "model is None"),
    "uncopyable": (
        lambda: {"model": Uncopyable(2, 2), "optimizer": torch.optim.SGD},
        r"model cannot be copied: RuntimeError: held by a driver \(allowed: a function that builds it\)",
    ),
    "parallel": (lambda: {"model": nn.DataParallel(network()), "optimizer": torch.optim.SGD}, r"model\.module"),
    "compiled": (
        lambda: {"model": torch.compile(network(), backend="eager"), "optimizer": torch.optim.SGD},
        "compiled as a whole",
    ),
    "plateau": (on_plateau, "ReduceLROnPlateau needs a metric at each step"),
    "no scheduler": (lambda: {"scheduler": "cosine"}, "scheduler is 'cosine'"),
    "another's scheduler": (lambda: {"scheduler": StepLR(grouped(network()), 2)}, "made for another optimizer"),
    "sum": (lambda: {"loss": nn.MSELoss(reduction="sum")}, r"the reduction 'sum' \(allowed: mean\)"),
    "no loss": (lambda: {"loss": 3}, "loss is 3"),
    "no evaluation": (lambda: {"evaluate": 3}, "evaluate is 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rebuilt_is_refused_in_one_sentence(case: str):
    make, message = REFUSED[case]
    model = network()
    given = {"model": model, "loader": loader(), "loss": mean_loss, "optimizer": grouped(model), **make()}
    with pytest.raises(JobError, match=message) as raised:
        Job.from_loader(**given)
    assert "\n" not in str(raised.value)


def test_a_function_that_returns_no_scheduler_is_refused_before_anything_is_measured():
    for build, message in ((lambda optimizer: 3, "scheduler returned 3"), (ReduceLROnPlateau, "needs a metric")):
        job = Job.from_loader(network(), loader(), mean_loss, torch.optim.SGD, build)
        with pytest.raises(JobError, match=message):
            TorchEngine(job, device="cpu")


def test_a_scheduler_goes_with_fixed_batching_its_own_optimizer_and_no_other_schedule():
    job = Job.from_loader(network(), loader(), mean_loss, torch.optim.SGD, lambda optimizer: StepLR(optimizer, 2))
    with pytest.raises(InputError, match=r"\+lion cannot be combined with a scheduler"):
        launched(job, Launch(optimizer="lion"))
    with pytest.raises(JobError, match=r"scheduler is .*allowed: None with a schedule, or with adaptive batching"):
        Job(**{**{name: getattr(job, name) for name in Job.__slots__}, "batching": "adaptive"})


def test_an_exported_script_steps_the_scheduler():
    job = Job.from_loader(network(), loader(), mean_loss, torch.optim.SGD, lambda optimizer: StepLR(optimizer, 2))
    script = export(Plan(), job, "python", reference="mine.py:job").files["train_tuned.py"]
    assert "scheduled = LearningRates(job, optimizer, job.total_samples)" in script
    assert "        optimizer.zero_grad()\n        scheduled.advance()\n" in script
    assert (
        "LearningRates" not in export(Plan(), load_job("digits"), "python", reference="digits").files["train_tuned.py"]
    )
    compile(script, "train_tuned.py", "exec")


def test_loader_without_a_batch_is_rejected_at_once():
    few = torch.utils.data.TensorDataset(torch.zeros(3, 4), torch.zeros(3, 1))
    loader = DataLoader(few, batch_size=8, drop_last=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InputError, match=r"loader has no batches.*drop_last"):
        Job.from_loader(model, loader, nn.MSELoss(), optimizer, max_steps=2)
