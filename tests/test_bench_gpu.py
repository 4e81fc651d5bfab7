"""Tests of the GPU benchmark command, on this machine's CPU with real steps of small jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import device_jobs
import fake_accelerator
import pytest
import tiny_job
import torch
from torch import nn

from autotune.bench import gpu_parts
from autotune.bench.bench_gpu import GpuBenchSettings, bench_gpu, lines, run_in_process
from autotune.catalog import load_job
from autotune.cli.main import run
from autotune.engines.job_checks import classify
from autotune.engines.worker_processes import WorkersError
from autotune.errors import InputError, one_line
from autotune.measurement import Failure
from autotune.mechanics import devices
from autotune.records.run_directory import benchmark_folder

JOB = str(Path(__file__).parent / "tiny_job.py")
ARMS = ["baseline", "paper", "uniform-bf16", "sqrt", "exact", "ppo"]
Found = dict[str, Any]
without_accelerator = pytest.mark.skipif(devices.device_kind() != "cpu", reason="there is an accelerator")

# Packages available next to a bare torch installation, and those carried to the machine: see the README.
CARRIED = {
    *("annotated_doc", "annotated_types", "autotune", "gymnasium", "farama_notifications", "pydantic", "pydantic_core"),
    *("rich", "safetensors", "scipy", "shellingham", "typer", "typing_inspection"),
}
OF_TORCH = {"torch", "torchgen", "functorch", "numpy", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2"}
BARE = """
import sys, sysconfig
import importlib.machinery

class Carried(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        place = str(found and (found.origin or list(found.submodule_search_locations or [""])[0]))
        top = name.partition(".")[0]
        if "site-packages" in place and top not in ALLOWED and not top.startswith("_"):
            return None
        return found

sys.meta_path[:] = [Carried if one is importlib.machinery.PathFinder else one for one in sys.meta_path]
"""


def here(asked: Mapping[str, Any], limit_s: float) -> Iterator[Found]:
    """Run a part in this process."""
    assert limit_s > 0
    try:
        for found in gpu_parts.PARTS[asked["part"]](json.loads(json.dumps(asked))):
            yield json.loads(json.dumps(found))
    except InputError:
        raise
    except Exception as error:
        raise WorkersError(classify(error), one_line(error)) from error


class Fake:
    """A fake that answers for each part without running it, and records the calls."""

    def __init__(self, **failing: Exception) -> None:
        self.failing = failing
        self.asked: list[str] = []

    def __call__(self, asked: Mapping[str, Any], limit_s: float) -> Iterator[Found]:
        name = asked["arm"] if asked["part"] == "arm" else asked["part"]
        self.asked.append(name)
        machine = {"machine": {"device": "a device"}, "environment": {}, "kind": "cpu", "folder": "a-device"}
        jobs = [{"reference": one, "job": one} for one in ("first", "second")]
        known = {"profile": {}, "baseline": {"peak_bytes": 100}}
        budget = {"share": 0.6, "bytes": 60, "plan": 0, "fits": True, "speedup": 1.5}
        answers = {
            "machine": {**machine, "jobs": jobs, "arms": ["baseline", "exact", "attached"]},
            "answers": {**known, "answers": {"memory": {"yes": True, "worst_frac": 0.01}}},
            "known": known,
            "attached": {
                "attached": {"act": {"ratio_median": 1.01 if self.asked.count("known") else 1.2, "identical": True}}
            },
        }
        yield answers.get(name, {name: {"budgets": [budget]}})
        if name in self.failing:
            raise self.failing[name]


def kept_in(kept: list[Found]) -> Any:
    return lambda document: kept.append(json.loads(json.dumps(document)))


def test_document_is_kept_after_every_part_and_states_how_it_ended() -> None:
    kept: list[Found] = []
    fake = Fake()
    document = bench_gpu(GpuBenchSettings(), keep=kept_in(kept), run_part=fake)
    assert fake.asked == ["machine", "answers", *ARMS[:1], "exact", "attached", "known", *ARMS[:1], "exact", "attached"]
    assert [one["ended"] for one in kept] == ["not yet"] * (len(kept) - 1) + ["complete"]
    arms = [sum(len(job["arms"]) for job in one["jobs"]) for one in kept]
    assert sorted(set(arms)) == [0, 1, 2, 3, 4]
    assert kept[-1] == json.loads(json.dumps(document))
    assert "peaks predicted within 5 %: yes (1.0%)" in lines(document)[0]
    # The job with the largest overhead counts, here the first of two.
    assert document["answers"]["attach"] == {"yes": False, "frac": pytest.approx(0.2), "identical": True}
    assert "attached for at most 3 % of the time: no (20.0%)" in lines(document)[0]
    assert "first (baseline 100 B): baseline 60% 1.50x; exact 60% 1.50x" in lines(document)[0]


def test_arm_that_runs_out_of_memory_in_the_optimizer_is_reported_and_keeps_its_results() -> None:
    failing = WorkersError(Failure.OUT_OF_MEMORY, "OutOfMemoryError: no room in optimizer.step")
    document = bench_gpu(GpuBenchSettings(), keep=lambda _: None, run_part=Fake(baseline=failing))
    assert [(one["part"], one["out_of_time"]) for one in document["left_out"]] == [
        ("first: baseline", False),
        ("second: baseline", False),
    ]
    assert document["left_out"][0]["why"].startswith("out_of_memory: OutOfMemoryError: no room in")
    assert set(document["jobs"][0]["arms"]) == {"baseline", "exact"}
    assert document["ended"] == "complete"


def test_part_that_takes_too_long_is_reported_and_the_next_one_runs() -> None:
    late = WorkersError(Failure.TIMEOUT, "no answer within 9 s")
    document = bench_gpu(GpuBenchSettings(), keep=lambda _: None, run_part=Fake(exact=late))
    assert document["ended"] == "out of time"
    assert "attached" in document["jobs"][0]
    assert "first: exact left out (timeout: no answer within 9 s)" in lines(document)[0]


def test_part_without_time_left_is_reported_and_not_run() -> None:
    fake = Fake()
    document = bench_gpu(GpuBenchSettings(seconds=7.0), keep=lambda _: None, run_part=fake)
    assert (fake.asked, document["machine"], document["ended"]) == ([], None, "out of time")
    assert "machine left out (no time was left)" in lines(document)[0]


def test_interrupted_benchmark_is_marked_as_interrupted() -> None:
    kept: list[Found] = []

    def interrupted(_asked: Mapping[str, Any], _limit_s: float) -> Iterator[Found]:
        raise KeyboardInterrupt
        yield {}

    with pytest.raises(KeyboardInterrupt):
        bench_gpu(GpuBenchSettings(), keep=kept_in(kept), run_part=interrupted)
    assert [one["ended"] for one in kept] == ["interrupted"]


def test_every_arm_has_every_budget_and_predictions_next_to_measurements() -> None:
    asked = {"job": JOB, "device": "cpu", "seed": 0, "data": None, "arms": None}
    (machine,) = here({"part": "machine", "jobs": [JOB], **asked}, 1)
    assert machine["arms"] == [*ARMS, "attached"]
    assert machine["machine"]["torch"] == torch.__version__
    assert machine["machine"]["fp32"] == devices.fp32_arithmetic("cpu")
    found: Found = {}
    for part in here({"part": "known", **asked}, 1):
        found |= part
    peak = found["baseline"]["peak_bytes"]
    assert found["baseline"]["predicted_peak_bytes"] == pytest.approx(peak, rel=0.01)
    arm = {"part": "arm", "profile": found["profile"], "peak_bytes": peak, "shares": [1.0, 0.6], "rounds": 2, **asked}
    for name in ("baseline", "exact"):
        first, last = (each[name] for each in here({**arm, "arm": name}, 1))
        assert (first["rounds"], last["rounds"]) == (1, 2)
        assert [one["bytes"] for one in last["budgets"]] == [peak, int(0.6 * peak)]
        for one in last["budgets"]:
            plan = last["plans"][one["plan"]]
            assert one["fits"] == (plan["failure"] is None and plan["peak_bytes"] <= one["bytes"])
            assert one["speedup"] > 0
        for plan in last["plans"]:
            assert plan["predicted_peak_bytes"] == pytest.approx(plan["peak_bytes"], rel=0.01)
            assert plan["predicted_seconds_per_step"] > 0
        assert [one["fits"] for one in last["budgets"]] == [True, name == "exact"]


def test_passes_of_one_model_are_repeatable_on_a_cpu_with_and_without_recomputation() -> None:
    engine = gpu_parts._engine(load_job(JOB), {"seed": 0, "device": "cpu"})
    assert gpu_parts._repeats(engine) == {"yes": True, "repeated_frac": 0.0, "recomputed_frac": 0.0}
    engine.close()


@pytest.mark.slow
def test_command_answers_the_key_questions_first_and_then_measures_every_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--jobs", JOB, "--rounds", "2", "--runs-dir", str(tmp_path), "--json"]
    assert run(["bench", "gpu", *options]) == 0
    document = json.loads((benchmark_folder(tmp_path) / "gpu-command-on-cpu.json").read_text())
    assert json.loads(capsys.readouterr().out) == document
    assert (document["left_out"], document["ended"]) == ([], "complete")
    assert set(document["answers"]) == {"memory", "time", "exact", "attach"}
    assert document["answers"]["memory"]["yes"]
    assert document["answers"]["exact"]["yes"]
    (job,) = document["jobs"]
    assert list(job["arms"]) == ARMS
    assert job["attached"]["act"]["identical"]
    assert document["environment"]["packages"]["torch"] == torch.__version__


@pytest.mark.slow
def test_gpu_benchmark_runs_on_an_accelerator_in_separate_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := fake_accelerator.reason()) is not None:
        pytest.skip(why)
    for name, value in fake_accelerator.child_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = f"{device_jobs.__file__}:job"
    settings = GpuBenchSettings(jobs=(job,), rounds=2, attached_steps=20)
    document = bench_gpu(settings, keep=lambda _: None)
    assert (document["device"], document["left_out"]) == ("Fake accelerator", [])
    assert document["machine"]["total_bytes"] >= document["machine"]["free_bytes"] > 0
    assert document["answers"]["memory"]["yes"]
    assert document["answers"]["exact"]["yes"]
    assert list(document["jobs"][0]["arms"]) == ARMS


NO_ROOM = """
import tiny_job
import torch

class Large(torch.optim.AdamW):
    def step(self, *arguments):
        raise torch.OutOfMemoryError("no room for the states")

def job():
    return tiny_job.make(name="large", optimizer=Large)
"""


def test_out_of_memory_in_the_optimizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(NO_ROOM)
    (tmp_path / "tiny_job.py").symlink_to(JOB)
    asked = {"part": "known", "job": str(tmp_path / "large.py"), "device": "cpu", "seed": 0, "data": None, "arms": None}
    with pytest.raises(InputError, match="out_of_memory: OutOfMemoryError: no room for the states"):
        list(here(asked, 1))


HANGING = """
import time
import tiny_job

def job():
    def loss(model, batch):
        time.sleep(3600)

    return tiny_job.make(name="hanging", loss=loss)
"""


@pytest.mark.slow
def test_gpu_benchmark_ends_in_time_even_if_a_part_hangs(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "tiny_job.py").symlink_to(JOB)

    def hangs(asked: Mapping[str, Any], limit_s: float) -> Iterator[Found]:
        return (here if asked["part"] == "machine" else run_in_process)(asked, limit_s)

    kept: list[Found] = []
    settings = GpuBenchSettings(device="cpu", jobs=(f"{tmp_path / 'hanging.py'}",), seconds=11.0)
    document = bench_gpu(settings, keep=kept_in(kept), run_part=hangs)
    assert [(one["part"], one["out_of_time"]) for one in document["left_out"]] == [
        ("hanging: answers", True),
        ("hanging: known", True),
    ]
    assert kept[-1]["ended"] == "out of time"


def test_job_that_the_device_cannot_run_is_reported(tmp_path: Path) -> None:
    asked = {"part": "known", "job": f"{JOB}:loss_raises", "device": "cpu", "seed": 0, "data": None, "arms": None}
    with pytest.raises(InputError, match="no such luck"):
        list(here(asked, 1))


@without_accelerator
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "there is no accelerator here (allowed: cpu, to try the command)"),
        (["--device", "cuda"], "there is no device 'cuda' here (allowed: cpu)"),
        (["--device", "toaster"], "device is 'toaster' (allowed: cpu)"),
        (["--device", "cpu", "--rounds", "1"], "rounds is 1 (allowed: at least 2)"),
    ],
)
def test_invalid_device_is_rejected_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_gpu, "__kwdefaults__", {**bench_gpu.__kwdefaults__, "run_part": here})
    assert run(["bench", "gpu", "--runs-dir", str(tmp_path / "runs"), *options]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]
    assert len(said) == 1
    assert not (tmp_path / "runs").exists()


def test_model_is_built_on_the_device_or_else_moved_there() -> None:
    def reads_a_number() -> nn.Module:
        model = tiny_job.Network()
        model.scale = float(next(model.parameters()).sum())
        return model

    for build in (tiny_job.Network, reads_a_number):
        built: list[str] = []

        def model(build: Any = build, built: list[str] = built) -> nn.Module:
            made = build()
            built.append(next(made.parameters()).device.type)
            return made

        placed = gpu_parts.placed(tiny_job.make(model=model), "meta")
        assert next(placed.model().parameters()).device.type == "meta"
        assert built == (["meta"] if build is tiny_job.Network else ["cpu"])


RUN = f"""
from autotune.bench import gpu_parts
import autotune.cli.bench, autotune.bench.bench_gpu
from autotune.agents.policy_folder import shipped_policy
shipped_policy()
asked = {{"job": {JOB!r}, "device": "cpu", "seed": 0, "data": None, "arms": None, "jobs": [{JOB!r}]}}
asked |= {{"attached_steps": 20, "attaches": True}}
found = {{}}
for part in PARTS:
    more = {{"profile": found.get("profile"), "peak_bytes": 10**9, "shares": [0.5], "rounds": 2, "arm": "ppo"}}
    for one in gpu_parts.PARTS[part]({{**asked, **more}}):
        found |= one
assert found["environment"]
assert "ppo" not in found or found["ppo"]["budgets"][0]["fits"]
"""


@pytest.mark.parametrize(
    "parts", [["machine"], pytest.param(["machine", "answers", "arm"], marks=pytest.mark.slow)], ids=len
)
def test_gpu_parts_need_only_torch_and_carried_packages(parts: list[str]) -> None:
    code = f"ALLOWED, PARTS = {CARRIED | OF_TORCH!r}, {parts!r}\n{BARE}\n{RUN}"
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=one_thread)
    assert (answer.returncode, answer.stderr[-600:]) == (0, "")


def test_unknown_arm_is_rejected_and_known_ones_keep_their_order() -> None:
    asked = {"part": "machine", "device": "cpu", "jobs": [JOB]}
    with pytest.raises(InputError, match=r"--arms: unknown arm 'magic' .*attached"):
        list(here({**asked, "arms": ["magic"]}, 1))
    (machine,) = here({**asked, "arms": ["exact", "baseline"]}, 1)
    assert machine["arms"] == ["exact", "baseline"]


def test_planner_with_two_storages_is_an_arm_of_jobs_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_STORAGES", "selective")
    asked = {"job": JOB, "device": "cpu", "seed": 0, "data": None, "arms": None, "jobs": [JOB]}
    (machine,) = here({"part": "machine", **asked}, 1)
    assert machine["arms"] == [*ARMS, "exact:save-recompute", "attached"]
    found = {key: value for part in here({"part": "known", **asked}, 1) for key, value in part.items()}
    peak = found["baseline"]["peak_bytes"]
    arm = {"part": "arm", "profile": found["profile"], "peak_bytes": peak, "shares": [0.6], "rounds": 2, **asked}
    *_, last = here({**arm, "arm": "exact:save-recompute"}, 1)
    chosen = {one for row in last["exact:save-recompute"]["plans"] for one in row["plan"]["storage"].values()}
    assert chosen <= {"save", "recompute"}


def test_fewer_than_two_rounds_are_rejected() -> None:
    with pytest.raises(InputError, match="rounds is 1"):
        GpuBenchSettings(device="cpu", rounds=1)


def test_models_have_the_sizes_in_their_names() -> None:
    sizes = {}
    for name in ("gpt2_wikitext2:random", "gpt2_wikitext2:billion", "resnet50_cifar10:random"):
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in load_job(name).model().parameters())
    assert sizes["gpt2_wikitext2:random"] == 124_439_808
    assert 1.29e9 < sizes["gpt2_wikitext2:billion"] < 1.33e9
    assert 23.4e6 < sizes["resnet50_cifar10:random"] < 25.6e6
