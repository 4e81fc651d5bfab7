"""Tests of what newcomers do: wrong types, models in place of jobs, odd evaluations, and jobs of an exact length."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_job
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune
from autotune import InputError, Job, Plan, Precision
from autotune.cli.main import run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Counting(nn.Sequential):
    """A model that writes to buffers of its own in each forward pass, whatever its mode."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls.add_(1)
            self.mean.mul_(0.9).add_(x.mean(0))
        return super().forward(x + self.mean)


ROWS = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))


def loop_of(make: Callable[[], nn.Module] = Counting, rows: int = 80) -> tuple[nn.Module, DataLoader, Any]:
    torch.manual_seed(0)
    model = make()
    loader = DataLoader(TensorDataset(ROWS[:rows], ROWS[:rows].cumsum(1).tanh()), batch_size=32)
    return model, loader, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(steps: int, rows: int) -> list[torch.Tensor]:
    model, loader, optimizer = loop_of(rows=rows)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    done = 0
    while done < steps:
        for x, y in loader:
            if done < steps:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
                done += 1
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(("steps", "rows"), [(6, 64), pytest.param(7, 80, marks=pytest.mark.slow), (11, 80)])
def test_a_run_without_a_target_makes_the_users_own_updates_and_no_more(steps: int, rows: int, tmp_path: Path) -> None:
    model, loader, optimizer = loop_of(rows=rows)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    seen: list[list[torch.Tensor]] = []

    def evaluate(model: nn.Module) -> float:
        seen.append([value.clone() for value in model.state_dict().values()])
        return 1.0

    job = Job.from_loader(
        model, loader, nn.MSELoss(), optimizer, rates, max_steps=steps, evaluate=evaluate, clip_norm=None
    )
    found = autotune.compare(job, ["recompute-all"], seeds=2, runs_dir=tmp_path)
    assert {run["steps"] for arm in found["arms"] for run in arm["runs"] if arm["name"] == "baseline"} == {steps}
    expected = trained(steps, rows)
    # The last evaluation of each run of both arms, except in 16 bits.
    assert sum(all(map(torch.equal, one, expected)) for one in seen) >= 2


def test_checkpoint_leaves_no_hook_on_the_optimizer() -> None:
    model, loader, optimizer = loop_of(lambda: nn.Sequential(*(Block() for _ in range(3))))
    autotune.checkpoint(model, memory_budget="8GB")
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    autotune.detach(model)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    Job.from_loader(model, loader, nn.MSELoss(), optimizer, max_steps=2)


def test_a_tuner_detached_within_a_forward_pass_leaves_after_it() -> None:
    model, loader, optimizer = loop_of(lambda: nn.Sequential(*(Block() for _ in range(3))))
    tuner = autotune.checkpoint(model, memory_budget="8GB")
    handle = model[1].register_forward_hook(lambda *_: tuner.detach())
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def attached_under_a_plan() -> None:
    model, _, optimizer = loop_of()
    autotune.apply(model, Plan(storage=dict.fromkeys("012", "recompute")))
    autotune.attach(model, optimizer, runs_dir=None)


def test_a_budget_may_be_a_number_of_bytes(tmp_path: Path) -> None:
    found = autotune.tune(tiny_job.make(), "exact", memory_budget=2**30, runs_dir=tmp_path)
    assert found["measured"]["memory_budget_bytes"] == 2**30


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda runs: autotune.tune(tiny_job.make(), memory_budget=0.8, runs_dir=runs), "memory budget is 0.8"),
        (lambda runs: autotune.tune(nn.Linear(2, 2), runs_dir=runs), "job: is a Linear .*Job.from_loader"),
        (lambda runs: autotune.compare(tiny_job.make(), "sqrt", runs_dir=runs), r"arms is 'sqrt' .*\['sqrt'\]"),
        (lambda runs: autotune.tune(tiny_job.make(), memory_budget=-1, runs_dir=runs), "memory budget is -1 "),
        (lambda runs: autotune.compare(tiny_job.make(), ["sqrt"], seeds="2", runs_dir=runs), "seeds is '2'"),
        (lambda runs: autotune.compare(tiny_job.make(), ["sqrt"], seeds=-1, runs_dir=runs), "-1 .*at least 2, at most"),
        (lambda runs: autotune.compare(tiny_job.make(), None, runs_dir=runs), "arms is None .*a list of names"),
        (lambda runs: autotune.compare(tiny_job.make(), [Plan()], runs_dir=runs), "an arm is a Plan .*a plan file"),
        (lambda runs: autotune.tune(tiny_job.make(), steps="x", runs_dir=runs), "tune: steps is 'x' .*whole number"),
        (lambda runs: autotune.tune(tiny_job.make(), lean="x", runs_dir=runs), "tune: lean is 'x'"),
        (lambda runs: attached_under_a_plan(), r"runs under a plan already .*autotune.detach\(model\)"),
        (lambda runs: autotune.apply(nn.Linear(2, 2), "plan.json"), "plan is 'plan.json' .*Plan.load"),
        (lambda runs: autotune.apply("model", Plan()), "model is 'model' .*torch.nn.Module"),
        (lambda runs: Plan.load(None), "path is None .*a plan file or a run directory"),
    ],
)
def test_wrong_types_are_refused_in_one_sentence_before_anything_is_written(
    call: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["0"], ["apply: the plan does not name '1', '2' and leaves that part as it is"]),
        (["0", "1", "2"], []),
        ([], []),
    ],
)
def test_units_that_a_plan_does_not_name_are_told(
    names: list[str], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    autotune.apply(model, Plan(precision=dict.fromkeys(names, Precision.FP32)))
    assert caplog.messages == told


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_plan_for_compiled_units_is_told_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    model[1].compile()
    autotune.apply(model, Plan(storage=dict.fromkeys("012", "save")))
    assert caplog.messages == []
    autotune.apply(model, Plan(storage=dict.fromkeys("012", "recompute")))
    assert caplog.messages == ["apply: '1' is compiled as a whole, and compiled code does not follow the plan"]


def test_a_function_of_torch_in_place_of_a_loss_is_refused_with_what_to_give_instead() -> None:
    model, loader, optimizer = loop_of()
    with pytest.raises(InputError, match=r"loss is mse_loss, which takes outputs and targets .*nn.MSELoss\(\)"):
        Job.from_loader(model, loader, F.mse_loss, optimizer, max_steps=2)


ODD = """
import torch
from torch import nn
import tiny_job

def none():
    return tiny_job.make(evaluate=lambda model: None)

def two():
    return tiny_job.make(evaluate=lambda model: torch.ones(2))

model = nn.Linear(2, 2)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "evaluate returned NoneType (allowed: a number)"),
        ("two", "evaluate returned Tensor (allowed: a number)"),
        ("model", "'model' is not an autotune.Job"),
    ],
)
def test_odd_jobs_of_a_file_end_in_one_line(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    line = ["compare", f"{tmp_path / 'odd.py'}:{name}", "--arms", "sqrt", "--seeds", "2"]
    assert run([*line, "--runs-dir", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]
    assert not any("Traceback" in one for one in said)


def trainer(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(20, (16, 8))]
    settings = {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "max_steps": 3, **changes}
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    arguments = transformers.TrainingArguments("out", **settings)
    return transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows)


def test_a_trainer_with_neftune_is_refused_and_callbacks_that_are_not_called_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="neftune_noise_alpha is set"):
        Job.from_trainer(trainer(neftune_noise_alpha=5.0))

    class Freezes(transformers.TrainerCallback):
        pass

    plain = trainer()
    with caplog.at_level(logging.WARNING):
        Job.from_trainer(plain)
        plain.add_callback(Freezes())
        Job.from_trainer(plain)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("autotune")]
    assert told == ["the job does not call the Trainer's callbacks: Freezes"]
