"""Tests of launch options: other optimizers, compiled units, and how plans record them."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import tiny_job
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autotune
from autotune import TorchEngine, commands, optimizers
from autotune.campaign.trusted_inputs import TrustedInputs
from autotune.catalog import load_job
from autotune.cli.main import run
from autotune.cost_model.memory_model import peak_bytes
from autotune.engines.job_checks import build_model, build_optimizer
from autotune.errors import InputError, PlanError
from autotune.io.progress import Silent
from autotune.launching import compiled, launched, split, suffix
from autotune.plan import Launch, Plan, Precision
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.records.requests import CompareOptions
from autotune.report.campaign_run import read_campaign
from autotune.report.writing import page_for

JOB = Path(tiny_job.__file__)
RATES = st.floats(min_value=1e-6, max_value=1.0).map(lambda rate: float(f"{rate:g}"))
LAUNCHES = st.builds(
    Launch,
    optimizer=st.sampled_from(sorted(optimizers.KINDS)),
    learning_rate=st.none() | RATES,
    compile=st.sampled_from([None, True]),
    fp32=st.sampled_from([None, "fp32", "tf32"]),
    knobs=st.sampled_from([None, "fused", "foreach+attention=math+threads=12", "workers=2+pinned"]),
)


@given(
    launch=LAUNCHES | st.just(Launch(compile=True)), name=st.sampled_from(["charlm", "a/b.py:job", "exact", "p.json"])
)
def test_launch_suffix_of_a_name_round_trips(launch: Launch, name: str) -> None:
    assert split(name + suffix(launch), where="there") == (name, launch)


@pytest.mark.parametrize("name", ["charlm", "c" * 300, "c++/job.py", "a+b/job.py:job", "+lion", "runs/x.json"])
def test_names_without_a_launch_suffix_stay_unchanged(name: str) -> None:
    assert split(name, where="there") == (name, Launch())


def test_folder_named_like_a_suffix_is_that_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine+lion"
    folder.mkdir()
    assert split(str(folder), where="there") == (str(folder), Launch())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("charlm+leon", r"job: \+leon is unknown \(allowed: compile, fp32, tf32, adamw, adamw8bit, lamb, lion, sgd"),
        ("charlm+sophia", r"optimizer sophia estimates curvature"),
        ("charlm+lion+sgd", r"\+sgd is not allowed here"),
        ("charlm+compile+compile", r"\+compile is not allowed here"),
        ("charlm+tf32+fp32", r"\+fp32 is not allowed here"),
        ("charlm+tf32=1", r"\+tf32=1 is not allowed here"),
        ("charlm+lion=fast", r"\+lion=fast has no valid learning rate"),
        ("charlm+lion=0", r"allowed: a number above 0"),
        ("charlm+lion=inf", r"allowed: a number above 0"),
    ],
)
def test_invalid_launch_option_is_one_line_and_exit_code_2(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=message):
        load_job(name)
    assert run(["tune", name, "--runs-dir", str(tmp_path / "runs")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_missing_library_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(optimizers.importlib, "import_module", missing)
    with pytest.raises(
        InputError, match=r"pytorch_optimizer is not installed \(allowed: pip install .*pytorch-optimizer"
    ):
        load_job("charlm+lion")


def test_learning_rate_requires_its_optimizer() -> None:
    with pytest.raises(PlanError, match="needs an optimizer"):
        Launch(learning_rate=0.1)
    for rate in (0, -1.0, float("nan"), float("inf"), True, "0.1"):
        with pytest.raises(PlanError, match=r"launch\.learning_rate"):
            Launch(optimizer="lion", learning_rate=rate)  # type: ignore[arg-type]
    plan = Plan(launch=Launch(optimizer="lion", learning_rate=3e-4, compile=True))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert str(plan).endswith("optimizer lion, learning_rate 0.0003, compile True")


def grouped() -> torch.optim.Optimizer:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    return torch.optim.AdamW(
        [
            {"params": first.parameters(), "weight_decay": 0.1},
            {"params": second.parameters(), "weight_decay": 0.0, "lr": 4e-3},
        ],
        lr=2e-3,
        betas=(0.8, 0.95),
    )


@pytest.mark.parametrize("name", sorted(optimizers.KINDS))
@pytest.mark.parametrize("rate", [None, 5e-3])
def test_parameter_groups_keep_their_parameters_relative_rates_and_decay_per_step(
    name: str, rate: float | None
) -> None:
    own = grouped()
    made = optimizers.converted(own, name, rate)
    for old, new in zip(own.param_groups, made.param_groups, strict=True):
        assert all(a is b for a, b in zip(old["params"], new["params"], strict=True))
        assert new["lr"] * new["weight_decay"] == pytest.approx(old["lr"] * old["weight_decay"])
    assert made.param_groups[1]["lr"] == pytest.approx(2 * made.param_groups[0]["lr"])
    assert made.param_groups[0]["lr"] == pytest.approx(optimizers.KINDS[name].rate * 2e-3 if rate is None else rate)
    if optimizers.KINDS[name].betas:
        assert tuple(made.param_groups[0]["betas"]) == (0.8, 0.95)


def test_optimizer_without_a_default_rule_requires_a_learning_rate() -> None:
    own = torch.optim.Adagrad(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"learning rate of Adagrad .*\+lion=3e-4"):
        optimizers.converted(own, "lion")
    assert optimizers.converted(own, "lion", 1e-3).param_groups[0]["lr"] == 1e-3


def wide() -> autotune.Job:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(256, 256)
            self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
            self.head = nn.Linear(256, 256)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return self.head(x)

    return tiny_job.make(name="wide", model=Wide)


@pytest.mark.parametrize("name", sorted(optimizers.KINDS))
def test_each_optimizer_learns_and_its_snapshot_is_complete(name: str) -> None:
    # The rule would convert this job's rate, which is high for Adam, to one at which SGD diverges.
    engine = TorchEngine(launched(wide(), Launch(optimizer=name, learning_rate=0.05 if name == "sgd" else None)))
    before = engine.evaluate()
    engine.run(5)
    snapshot = engine.snapshot()
    first = engine.run(10)
    engine.restore(snapshot)
    assert engine.run(10).loss == first.loss
    assert first.failure is None
    assert engine.evaluate() < before


@pytest.mark.slow
def test_8_bit_optimizer_states_take_less_memory_and_the_profile_reflects_it() -> None:
    job, options = wide(), ProfilerOptions.lean()
    peaks = {}
    for name in ("adamw", "adamw8bit", "lion"):
        changed = launched(job, Launch(optimizer=name))
        found = profile(changed, device_name="here", options=options)
        plan = found.space.baseline()
        engine = TorchEngine(changed)
        engine.apply(plan)
        engine.run(2)
        peaks[name] = engine.run(3).peak_bytes
        assert peak_bytes(found, plan) >= peaks[name]
        assert peak_bytes(found, plan) == pytest.approx(peaks[name], rel=0.02)
    weights = 4 * sum(parameter.numel() for parameter in build_model(job).parameters())
    # Optimizer states of 2 x 4, 2 x 1 and 1 x 4 bytes, minus the update's temporaries, one tensor at a time.
    assert peaks["adamw"] - peaks["adamw8bit"] > weights
    assert peaks["adamw"] - peaks["lion"] > 0.5 * weights


# Warnings of the compiler are not ours.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_units_train_like_uncompiled_units_under_every_kind_of_plan() -> None:
    plain = TorchEngine(tiny_job.make(model=undropped()))
    compiled = TorchEngine(launched(tiny_job.make(model=undropped()), Launch(compile=True)))
    space = plain.space
    assert compiled.space.units == space.units
    names = space.recomputable
    for plan in (
        space.baseline(),
        space.plan(accumulation_steps=2, precision=Precision.FP32, recomputed=names[:2]),
        space.plan(accumulation_steps=1, precision=Precision.BF16, recomputed=names),
    ):
        windows = []
        for engine in (plain, compiled):
            engine.apply(plan)
            windows.append(engine.run(3))
        assert windows[1].failure is None, windows[1].failure_detail
        assert windows[1].loss == pytest.approx(windows[0].loss, rel=2e-3)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())


def undropped() -> type[nn.Module]:
    class Network(tiny_job.Network):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.dropout = nn.Identity()

    return Network


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_copy_of_a_compiled_model_uses_its_own_weights_and_can_be_pickled() -> None:
    model = compiled(tiny_job.Network(), tiny_job.job()).eval()
    tokens = next(tiny_job.batches(0))[:, :-1]
    before = model(tokens)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(copied(tokens), before, atol=1e-5)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert not copied(tokens).any()
    assert torch.allclose(model(tokens), before, atol=1e-5)


@pytest.mark.slow
def test_found_plan_records_its_launch_options_and_trains_with_them_as_an_arm(tmp_path: Path) -> None:
    found = autotune.tune(f"{JOB}:job+lion=1e-3", "random", memory_budget="90%", steps=60, runs_dir=tmp_path)
    assert found["plan"]["launch"] == {"optimizer": "lion", "learning_rate": 1e-3}
    assert json.loads((Path(found["run"]) / "config.json").read_text())["job"] == "tiny+lion=0.001"
    path = Path(found["run"]) / "plan.json"
    page = page_for(read_campaign(Path(found["run"])))
    assert '<th scope="row">tuned</th>' in page.text
    assert Plan.load(path).launch == Launch(optimizer="lion", learning_rate=1e-3)
    document = autotune.compare(str(JOB), [str(path), "baseline+lion=1e-3"], seeds=2, runs_dir=tmp_path)
    by_name = {arm["name"]: arm["runs"] for arm in document["arms"]}
    assert {arm["name"]: arm["plan"].get("launch") for arm in document["arms"]} == {
        "baseline": None,
        "plan": {"optimizer": "lion", "learning_rate": 1e-3},
        "baseline+lion=0.001": {"optimizer": "lion", "learning_rate": 1e-3},
    }
    losses = {name: [run["final_metric"] for run in runs] for name, runs in by_name.items()}
    assert losses["plan"] != losses["baseline"]
    assert losses["plan"] == pytest.approx(losses["baseline+lion=0.001"], rel=0.02)
    assert build_optimizer(load_job(f"{JOB}:job+lion"), tiny_job.Network()).__class__.__name__ == "Lion"


@pytest.mark.slow
def test_arms_are_searched_with_their_launch_options_and_the_campaign_resumes(tmp_path: Path) -> None:
    arms = ["exact", "exact+lion=2e-3", "random+lion=2e-3"]
    document = autotune.compare(str(JOB), arms, memory_budget="60%", seeds=2, steps=60, runs_dir=tmp_path)
    by_name = {arm["name"]: arm for arm in document["arms"]}
    assert list(by_name) == ["baseline", "exact", "exact+lion=0.002", "random+lion=0.002"]
    assert by_name["exact+lion=0.002"]["plan"]["launch"] == {"optimizer": "lion", "learning_rate": 0.002}
    assert by_name["exact"]["plan"].get("launch") is None
    assert by_name["exact+lion=0.002"]["tuning_steps"] > 0
    folder = Path(document["run"])
    (folder / "comparison.json").unlink()
    again = autotune.resume(folder, job=str(JOB))
    assert [arm["runs"] for arm in again["arms"]] == [arm["runs"] for arm in document["arms"]]
    assert [arm["plan"] for arm in again["arms"]] == [arm["plan"] for arm in document["arms"]]
    assert (folder / "report.html").is_file()


class Told(Silent):
    """A reporter that records the titles of stages."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def stage(self, title: str, total: float) -> None:
        self.titles.append(title)


def test_stages_are_numbered_up_to_their_announced_count(tmp_path: Path) -> None:
    told = Told()
    arms = ["recompute-all", "exact", "random+lion=2e-3"]
    autotune.compare(f"{JOB}:one_k", arms, seeds=2, steps=45, runs_dir=tmp_path, reporter=told)
    assert [title.partition(": ")[0] for title in told.titles] == [f"stage {1 + i} of 7" for i in range(7)]
    told.titles.clear()
    autotune.tune(f"{JOB}:one_k", method="exact", steps=45, runs_dir=tmp_path, reporter=told)
    assert [title.partition(": ")[0] for title in told.titles] == [f"stage {1 + i} of 3" for i in range(3)]


def compare_jobs(jobs: list[str], arms: list[str], runs: Path) -> None:
    commands.compare_jobs(jobs, arms, CompareOptions(), TrustedInputs(jobs=jobs, arms=arms), runs, Silent())


def test_impossible_launch_options_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    other = tmp_path / "plan.json"
    other.write_text(json.dumps({"version": 1, "accumulation_steps": 1, "launch": {"compile": True}}))
    with pytest.raises(InputError, match=r"the plan is launched with \+compile, and the job with \+lion"):
        autotune.compare(f"{JOB}:job+lion", [str(other)], seeds=2, runs_dir=runs)
    adagrad = tiny_job.make(optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
    with pytest.raises(InputError, match="no rule of thumb converts the learning rate of Adagrad"):
        autotune.compare(adagrad, ["exact", "exact+lion"], seeds=2, runs_dir=runs)
    with pytest.raises(InputError, match="a plan file fits one job"):
        compare_jobs([str(JOB), f"{JOB}:never_met"], [f"{other}+lion"], runs)
    with pytest.raises(InputError, match="launched differently from the job"):
        compare_jobs([str(JOB), f"{JOB}:job+lion"], ["exact+compile"], runs)
    for arms, message in (
        (["best+lion"], "arm 'best' is unknown"),
        (["exact+leon"], r"--arms: \+leon is unknown"),
    ):
        with pytest.raises(InputError, match=message):
            autotune.compare(str(JOB), arms, seeds=2, runs_dir=runs)
    with pytest.raises(InputError, match=r"launched differently from the job .* the job without \+lion"):
        autotune.compare(f"{JOB}:job+lion", ["exact+sgd"], seeds=2, runs_dir=runs)
    assert not runs.exists()
