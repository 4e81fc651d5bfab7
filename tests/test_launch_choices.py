"""Tests of free knobs: they do what they say, can be undone, are measured side by side, and stay with a run."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_job
import torch
import torch.nn.functional as F
from small_jobs import (
    UNMETERED,
    convolution_job,
    differences,
    global_generators,
    gpt_job,
    perceptron_job,
    training_state,
    vector_batches,
)
from torch import nn

import autotune
from autotune import EngineOptions, InputError, Job, Plan, PlanError, TorchEngine, load_job
from autotune.campaign.knob_trials import KnobTrials, recommended
from autotune.campaign.launch_trials import side_by_side
from autotune.campaign.trusted_inputs import TrustedInputs
from autotune.cli.main import run
from autotune.commands import tuning
from autotune.engines.job_checks import build_optimizer
from autotune.errors import BudgetError
from autotune.io.progress import Silent
from autotune.knobs import KNOBS, candidates, settings_of
from autotune.launching import launched, split, suffix, with_knobs
from autotune.mechanics.devices import profiled
from autotune.plan import Launch
from autotune.records.requests import TuneRequest
from autotune.records.run_directory import LAUNCH_CHOICES, RunDirectory
from autotune.records.run_documents import LaunchTrial
from autotune.report.campaign_run import read_campaign
from autotune.report.writing import page_for

HERE = Path(__file__)
TINY = f"{Path(tiny_job.__file__)}:job"
ONE_K = f"{Path(tiny_job.__file__)}:one_k"
SLOW = f"{HERE}:slow_disk"
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}


def unclipped() -> Job:
    """Return the tiny job with gradients that matter for its peak, which are not clipped."""
    return tiny_job.make(clip_norm=None, batch_size=2, batches=lambda seed: small(seed), accumulation_choices=(1,))


def small(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(256, (2, 5), generator=generator)


class SlowDisk(torch.utils.data.Dataset):
    """Samples that take a while to read, as from a disk, which needs no processor."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return tiny_job.TEXT[index : index + tiny_job.LENGTH + 1]


def loader_job(data: Any, **changes: Any) -> Job:
    torch.manual_seed(3)
    model = tiny_job.Network()
    arguments: dict[str, Any] = {
        "model": model,
        "loader": torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
        "loss": tiny_job.mean_loss,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "evaluate": tiny_job.evaluate,
        "target": 3.0,
        "max_steps": 60,
        "name": "loading",
    }
    return Job.from_loader(**(arguments | changes))


def slow_disk() -> Job:
    return loader_job(SlowDisk())


def trained(job: Job, steps: int = 4) -> TorchEngine:
    engine = TorchEngine(job)
    window = engine.run(steps)
    assert window.failure is None, window.failure_detail
    return engine


def numbers(engine: TorchEngine) -> dict[str, Any]:
    """Return the training state without the optimizer's flags, which a knob is meant to change."""
    state = {key: value for key, value in training_state(engine).items() if not key.startswith("optimizer ")}
    inner = engine.update.optimizer.state_dict()["state"]
    return state | {f"state {key} {name}": value for key, own in inner.items() for name, value in own.items()}


def one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_foreach_optimizer_trains_bit_identically_and_fused_one_closely(name: str) -> None:
    job = gpt_job(optimizer=OPTIMIZERS[name])
    own = trained(job)
    foreach = trained(with_knobs(job, "foreach", where="test"))
    assert {group["foreach"] for group in foreach.update.optimizer.param_groups} == {True}
    assert differences(numbers(own), numbers(foreach)) == []
    if name == "RMSprop":
        return
    fused = trained(with_knobs(job, "fused", where="test"))
    assert {group["fused"] for group in fused.update.optimizer.param_groups} == {True}
    # Not weight by weight: Adam moves those whose gradient is 0 up to rounding by rounding errors.
    assert fused.evaluate() == pytest.approx(own.evaluate(), rel=1e-4)


def test_loading_in_other_processes_is_bit_identical_and_leaves_the_loader_alone() -> None:
    job = loader_job(tiny_job.TEXT[:640].unfold(0, tiny_job.LENGTH + 1, 10))
    changed = with_knobs(job, "workers=2", where="test")
    engine = trained(changed)
    assert differences(numbers(trained(job)), numbers(engine)) == []
    assert len(multiprocessing.active_children()) == 2
    engine.close()
    assert not multiprocessing.active_children()
    assert job.batches.__self__._loader.num_workers == 0  # type: ignore[attr-defined]  # a bound method
    assert changed.batches.__self__._loader.num_workers == 2  # type: ignore[attr-defined]  # a bound method


@pytest.mark.parametrize("knobs", ["fused", "foreach", "attention=math"])
def test_snapshot_under_a_knob_is_complete(knobs: str) -> None:
    engine = trained(with_knobs(gpt_job(), knobs, where="test"))
    snapshot = engine.snapshot()
    first = engine.run(3).loss
    after = training_state(engine)
    engine.restore(snapshot)
    assert engine.run(3).loss == first
    assert differences(after, training_state(engine)) == []


def test_fused_optimizer_goes_on_from_the_state_of_a_loop_under_way() -> None:
    model = tiny_job.Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = next(tiny_job.batches(1))
    tiny_job.mean_loss(model, batch).backward()
    optimizer.step()
    job = loader_job(list(batch), model=model, optimizer=optimizer)
    own, fused = (trained(one, 2) for one in (job, with_knobs(job, "fused", where="test")))
    for before, after in zip(own.update.optimizer.state.values(), fused.update.optimizer.state.values(), strict=True):
        assert float(before["step"]) == float(after["step"]) == 3
        assert torch.allclose(before["exp_avg"], after["exp_avg"], rtol=1e-3, atol=1e-6)
    assert optimizer.defaults["fused"] is None


def settings() -> dict[str, Any]:
    kernels = torch.backends.cuda
    return {
        "threads": torch.get_num_threads(),
        "benchmark": torch.backends.cudnn.benchmark,
        "attention": [
            asked()
            for asked in (
                kernels.flash_sdp_enabled,
                kernels.math_sdp_enabled,
                kernels.mem_efficient_sdp_enabled,
                kernels.cudnn_sdp_enabled,
            )
        ],
    }


@pytest.mark.parametrize("knobs", ["threads=7", "attention=math", "cudnn_benchmark"])
def test_settings_of_the_process_are_in_force_in_the_body_only(knobs: str) -> None:
    before, inside = settings(), {}

    def raising() -> None:
        with settings_of(knobs):
            inside.update(settings())
            raise ValueError("in the body")

    with pytest.raises(ValueError, match="in the body"):
        raising()
    assert inside != before
    assert settings() == before


def test_a_knob_leaves_the_job_the_process_and_the_generators_as_they_were() -> None:
    job, before, drawn = gpt_job(), settings(), global_generators()
    own = training_state(trained(job))
    trained(with_knobs(job, "fused+attention=math+threads=3", where="test")).close()
    assert settings() == before
    assert differences(drawn, global_generators()) == []
    assert differences(own, training_state(trained(job))) == []


class Attending(nn.Module):
    """A model with one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 12)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(x)[None, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value)[0, 0])


@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_attention_is_computed_by_the_kernel_that_was_chosen(kernel: str) -> None:
    job = with_knobs(perceptron_job(model=Attending), f"attention={kernel}", where="test")
    engine = TorchEngine(job, options=UNMETERED)
    with profiled() as seen:
        engine.run(1)
    names = {event.key for event in seen.key_averages()}
    assert any(f"_scaled_dot_product_{'attention_math' if kernel == 'math' else 'flash'}" in name for name in names)


def test_channels_last_convolutions_train_like_those_of_the_job_as_it_is() -> None:
    job = convolution_job()
    own, changed = trained(job), trained(with_knobs(job, "channels_last", where="test"))
    weight = changed.model.get_submodule("blocks.0.convolution").weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    assert changed.evaluate() == pytest.approx(own.evaluate(), rel=1e-4)


class OwnOptimizer(torch.optim.SGD):
    """An optimizer of the user's own, whose step nobody knows."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("+fusd", r"\+fusd is unknown .*fused, foreach"),
        ("+fused+foreach", r"\+foreach is not allowed here \(allowed: one of fused, foreach\)"),
        ("+threads=0", r"\+threads=0 has no valid value .*from 1 to 999"),
        ("+threads", r"\+threads has no valid value"),
        ("+attention=fast", r"=math, =flash, =efficient, =cudnn"),
        ("+fused=1", r"\+fused=1 has no valid value \(allowed: \+fused without a value\)"),
        ("+channels_last", r"\+channels_last: the model has no convolutions"),
        ("+workers=2", r"\+workers=2: the batches do not come from a DataLoader"),
        ("+cudnn_benchmark", r"\+cudnn_benchmark: the job does not train on an accelerator"),
        ("+pinned", r"\+pinned: the batches do not come from a DataLoader"),
    ],
)
def test_wrong_knob_is_one_sentence_and_exit_code_2(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = one_line(["tune", TINY + name, "--runs-dir", str(tmp_path / "runs")], capsys)
    with pytest.raises(InputError, match=message):
        raise InputError(error)
    assert not (tmp_path / "runs").exists()


def test_knobs_option_is_refused_where_it_means_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs-dir", str(tmp_path / "runs")]
    assert "measured in this process" in one_line(["tune", TINY, "--knobs", "--isolate", *runs], capsys)
    assert "--tolerant requires --knobs" in one_line(["tune", TINY, "--tolerant", *runs], capsys)
    assert "--only: +quick is unknown" in one_line(["knobs", TINY, "--only", "fused,quick"], capsys)
    assert "fused+threads=2 is more than one knob" in one_line(["knobs", TINY, "--only", "fused+threads=2"], capsys)
    assert "missing.py" in one_line(["knobs", str(tmp_path / "missing.py:job")], capsys)
    assert not (tmp_path / "runs").exists()


def test_optimizer_of_another_library_is_refused() -> None:
    job = with_knobs(gpt_job(optimizer=lambda own: OwnOptimizer(own, lr=0.1)), "foreach", where="test")
    with pytest.raises(InputError, match="OwnOptimizer has no foreach step"):
        build_optimizer(job, nn.Linear(2, 2))


def test_plan_records_knobs_in_one_order_and_refuses_others() -> None:
    found = split("charlm+threads=2+lion=0.1+fused", where="test")
    assert found == ("charlm", Launch(optimizer="lion", learning_rate=0.1, knobs="fused+threads=2"))
    assert suffix(found[1]) == "+lion=0.1+fused+threads=2"
    plan = Plan(launch=Launch(knobs="fused+threads=2"))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for wrong in ("threads=2+fused", "", "fast", 3):
        with pytest.raises(PlanError, match=r"launch\.knobs"):
            Launch(knobs=wrong)  # type: ignore[arg-type]


def test_knobs_are_added_to_the_launch_choices_of_a_job() -> None:
    job = with_knobs(load_job(f"{TINY}+sgd=0.1+threads=1"), "fused", where="test")
    assert (job.name, job.launch.knobs) == ("tiny+sgd=0.1+fused+threads=1", "fused+threads=1")
    assert type(build_optimizer(job, nn.Linear(2, 2))) is torch.optim.SGD
    for text, message in (("threads=2", "not allowed here"), ("lion", "not allowed here|not a free knob")):
        with pytest.raises(InputError, match=message):
            with_knobs(job, text, where="test")


def test_every_knob_but_those_of_several_ranks_has_a_candidate_that_can_be_written_behind_a_name() -> None:
    found = candidates()
    expected = (
        set(KNOBS) - ({"threads"} - {one[:7] for one in found}) - {name for name, one in KNOBS.items() if one.of_ranks}
    )
    assert {name.partition("=")[0] for name in found} == expected
    assert [split(f"charlm+{name}", where="test")[1].knobs for name in found] == found


def trial(choice: str, ratio: float, reach: float, *, exact: bool = True) -> LaunchTrial:
    return LaunchTrial(
        choice=choice, exact=exact, time_ratio=ratio, time_ratio_ci95=[ratio - reach, ratio + reach], difference=0.0
    )


def test_only_knobs_that_are_faster_beyond_doubt_are_recommended_the_fastest_of_each_group() -> None:
    trials = [
        trial("tf32", 0.4, 0.1, exact=False),
        trial("fused", 0.8, 0.1, exact=False),
        trial("foreach", 0.9, 0.05),
        trial("threads=1", 0.95, 0.06),
        trial("threads=4", 0.97, 0.01),
        trial("threads=2", 0.98, 0.01),
        LaunchTrial(choice="pinned", reason="not here"),
    ]
    assert recommended(trials, tolerant=False) == "foreach+threads=4"
    assert recommended(trials, tolerant=True) == "tf32+fused+threads=4"
    assert recommended(trials[-1:], tolerant=True) == ""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tune a job that waits for its data, with its knobs measured first."""
    return autotune.tune(
        SLOW, "random", knobs=True, steps=45, runs_dir=tmp_path_factory.mktemp("runs"), report_to="none"
    )


@pytest.mark.slow
def test_measured_knobs_are_applied_to_every_window_of_a_tuning(tuned: dict[str, Any]) -> None:
    found, folder = tuned["launch_choices"], RunDirectory.open(Path(tuned["run"]))
    assert "workers=2" in found["recommended"].split("+")
    assert folder.read(LAUNCH_CHOICES) == {"version": 1, **found}
    trials = {entry["choice"]: entry for entry in found["trials"]}
    assert trials["workers=2"]["exact"]
    assert trials["workers=2"]["time_ratio_ci95"][1] < 1
    assert trials["foreach"]["difference"] == 0
    assert "accelerator" in trials["cudnn_benchmark"]["reason"]
    assert "scaled_dot_product" in trials["attention=math"]["reason"]
    assert not trials["fused"]["exact"]
    # Both the plan and the baseline that it was measured against have the knobs.
    assert tuned["plan"]["launch"]["knobs"] == found["recommended"]
    assert folder.config.job == f"loading+{found['recommended']}"
    assert folder.config.asked.job == SLOW  # type: ignore[union-attr]  # a tuning


@pytest.mark.slow
def test_reports_tell_what_the_knobs_alone_won_and_how_they_are_set(
    tuned: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_for(read_campaign(Path(tuned["run"]))).text
    assert run(["resume", tuned["run"], "--job", SLOW]) == 0
    for text in (page, capsys.readouterr().out):
        assert "Free knobs alone:" in text
        assert "Knob workers=2: DataLoader(..., num_workers=2)." in text
    assert "--knobs" in page
    export = ["export", f"{tuned['run']}/plan.json", "--job", SLOW, "--to", "transformers", "--out", str(tmp_path)]
    assert run(export) == 0
    assert "num_workers=2" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_resumed_tuning_keeps_its_knobs_without_measuring_them_again(
    tuned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tuned["run"])
    (folder / "tuned.json").unlink()
    monkeypatch.setattr(KnobTrials, "measure", lambda *_: pytest.fail("knobs were measured again"))
    again = autotune.resume(folder, job=SLOW)
    assert again["plan"] == tuned["plan"]
    assert again["launch_choices"] == tuned["launch_choices"]
    with pytest.raises(InputError, match="job 'tiny"):
        autotune.resume(folder, job=TINY)


@pytest.mark.slow
def test_command_measures_knobs_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["knobs", SLOW, "--pairs", "6", "--only", "workers=2,pinned", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["repeat_difference"] == 0
    assert found["recommended"] == "workers=2"
    assert [entry["choice"] for entry in found["trials"]] == ["workers=2", "pinned"]
    assert run(["knobs", SLOW, "--pairs", "6", "--only", "workers=2,pinned"]) == 0
    shown = capsys.readouterr().out
    assert "Not here: pinned (the job does not train on an accelerator; allowed: a job that does)." in shown
    assert f"autotune tune {SLOW}+workers=2" in shown
    assert not list(tmp_path.iterdir())


def unrepeatable() -> Job:
    """Return a job that trains differently each time."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return tiny_job.mean_loss(model, batch) * (1 + time.perf_counter() % 1 * 1e-3)

    return tiny_job.make(loss=loss, name="unrepeatable")


def test_optimizer_of_8_bit_states_is_measured_for_its_memory_and_not_recommended() -> None:
    pytest.importorskip("bitsandbytes")
    wide = {"model": lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))), "batches": wide_batches}
    trials = KnobTrials(pairs=6, only=("adamw8bit",), tolerant=True)
    found = trials.measure(perceptron_job(**wide, optimizer=OPTIMIZERS["AdamW"], evaluate=lambda model: 0.0))
    (lean,) = found.trials
    assert lean.peak_ratio is not None
    assert lean.peak_ratio < 0.9
    assert not lean.exact
    assert found.recommended is None
    assert "the job has SGD" in str(trials.measure(perceptron_job()).trials[0].reason)


def wide_batches(seed: int) -> Any:
    return vector_batches(seed, width=128)


@pytest.mark.slow
def test_no_knob_of_a_job_that_does_not_repeat_itself_counts_as_exact() -> None:
    found = KnobTrials(pairs=6, only=("foreach", "fused")).measure(unrepeatable())
    assert found.repeat_difference > 0
    assert not any(entry.exact for entry in found.trials)
    assert found.recommended is None


def flags(optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Any:
    return optimizer(nn.Linear(2, 2).parameters()).defaults["fused"]


def test_catalog_reference_with_knobs_changes_the_optimizer_and_the_plain_one_does_not() -> None:
    assert flags(load_job(f"{TINY}+fused").optimizer) is True
    assert flags(load_job(TINY).optimizer) is None


def test_launch_choices_are_tuned_within_one_budget_and_measured_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", ONE_K, "--method", "exact", "--memory-budget", "90%", "--steps", "60", "--report-to", "none"]
    arguments += ["--launches", "sgd=0.1, release", "--runs-dir", str(tmp_path)]
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    own, other, refused = (document["launches"][name] for name in ("", "sgd=0.1", "release"))
    assert own["measured"]["memory_budget_bytes"] == other["measured"]["memory_budget_bytes"]
    assert max(one["measured"]["peak_bytes"] for one in (own, other)) <= own["measured"]["memory_budget_bytes"]
    assert other["time_over_first"]["ratio_ci95"][0] <= other["time_over_first"]["ratio_median"]
    assert "clip_norm=None" in refused["refused"]
    best = "sgd=0.1" if other["time_over_first"]["ratio_ci95"][1] < 1 else ""
    assert document["run"] == document["launches"][best]["run"]
    assert Plan.from_json(document["plan"]).launch.optimizer == ("sgd" if best else None)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--launches", "adamw9bit"], r"--launches: \+adamw9bit is unknown"),
        (["--launches", ""], "--launches: names ''"),
        (["--launches", "../x"], "--launches: names '../x'"),
        (["--launches", "sgd", "--isolate"], "cannot be combined with ranks, a cluster or --isolate"),
    ],
)
def test_wrong_launch_choices_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    assert run(["tune", TINY, *extra, "--runs-dir", str(tmp_path)]) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert not [*tmp_path.iterdir()]


def test_the_fastest_launch_choice_wins_if_it_is_beyond_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ratios(found: dict[str, Any], *_rest: object) -> dict[str, Any]:
        assert list(found) == ["", "sgd=0.1", "foreach"]
        bounds = {"sgd=0.1": [0.7, 0.9], "foreach": [0.5, 1.1]}
        return {name: {"ratio_median": sum(pair) / 2, "ratio_ci95": pair} for name, pair in bounds.items()}

    monkeypatch.setattr(tuning, "side_by_side", ratios)
    request = TuneRequest(job=ONE_K, method="exact", steps=60, report_to="none")
    launches = ["sgd=0.1", "foreach"]
    found = tuning.tune_launches(request, TrustedInputs(jobs=[ONE_K]), tmp_path, Silent(), launches=launches)
    assert found["run"] == found["launches"]["sgd=0.1"]["run"]


def test_a_share_that_only_a_launch_choice_meets_is_one_of_the_job_as_it_is(tmp_path: Path) -> None:
    reference = f"{HERE}:unclipped"
    request = TuneRequest(job=reference, method="random", steps=60, report_to="none", memory_budget="93%")
    trusted = TrustedInputs(jobs=[reference])
    found = tuning.tune_launches(request, trusted, tmp_path, Silent(), launches=["release"])
    assert "needs" in found["launches"][""]["refused"]
    assert found["launches"]["release"]["measured"]["memory_budget_bytes"] > 0
    with pytest.raises(InputError, match="--weights"):
        tuning.tune_launches(replace(request, weights="0,1,0"), trusted, tmp_path, Silent(), launches=["release"])


def test_plans_are_measured_in_turn_with_all_their_launch_choices_and_without_those_that_fail() -> None:
    job, seen = unclipped(), []

    def failing() -> nn.Module:
        raise torch.OutOfMemoryError("too large")

    def watched(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        seen.append(torch.optim.AdamW(parameters, lr=1e-3))
        return seen[-1]

    plan = TorchEngine(job).space.baseline()
    fused = launched(replace(job, optimizer=watched), Launch(knobs="fused"))
    found = {"": (job, plan), "large": (replace(job, model=failing), plan), "fused": (fused, plan)}
    ratios = side_by_side(found, 0, Silent())
    assert list(ratios) == ["fused"]
    assert seen[-1].defaults["fused"]


def test_equal_launch_choices_are_tuned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    request = TuneRequest(job=f"{HERE}:unclipped", method="random", steps=60, report_to="none", memory_budget="1GiB")

    def run_budget(request: TuneRequest, *_rest: object) -> dict[str, Any]:
        asked.append(str(request.job))
        raise BudgetError("enough", where="test")

    monkeypatch.setattr(tuning, "run_tuning", run_budget)
    with pytest.raises(BudgetError, match="no launch choice meets"):
        tuning.tune_launches(
            request, TrustedInputs(jobs=[]), tmp_path, Silent(), launches=["foreach+release", "release+foreach"]
        )
    assert [name.rpartition(":")[2] for name in asked] == ["unclipped", "unclipped+foreach+release"]


def test_a_job_with_launch_choices_of_its_own_is_tuned_with_more(tmp_path: Path) -> None:
    reference = f"{HERE}:unclipped+threads=1"
    request = TuneRequest(job=reference, method="random", steps=60, report_to="none", memory_budget="93%")
    trusted = TrustedInputs(jobs=[reference])
    found = tuning.tune_launches(request, trusted, tmp_path, Silent(), launches=["sgd=0.1"])
    assert list(found["launches"]) == ["", "sgd=0.1"]
    launch = Plan.from_json(found["plan"]).launch
    assert (launch.optimizer, launch.knobs) == ("sgd", "threads=1")
    whole = TorchEngine(load_job(reference), options=EngineOptions(statistics_every=None))
    whole.run(1)
    budget = found["launches"]["sgd=0.1"]["measured"]["memory_budget_bytes"]
    assert budget == int(0.93 * (whole.run(1).peak_bytes or 0))
    with pytest.raises(InputError, match="threads"):
        tuning.tune_launches(request, trusted, tmp_path, Silent(), launches=["threads=2"])
