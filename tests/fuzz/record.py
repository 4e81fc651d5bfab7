"""Record the documents that the document fuzzer mutates: ``python tests/fuzz/record.py``, run in the repository root.

Every document in ``tests/fuzz/specimens`` comes from a real run of a tiny job. Folders are named after the command that
wrote them; absolute paths of the recording machine become relative, and its device name becomes ``DEVICE``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SPECIMENS = HERE / "specimens"
# Name of the recording machine in specimens.
DEVICE = "the device of the recording"
# Left out: pages, pictures, files that only libraries read, and further large documents of the same kind.
_LEFT_OUT = (
    *(".html", ".png", ".svg", ".db", ".pt", ".md", ".log", ".writer", ".tracking", "comparison-tiny.json"),
    *("compare/profile.json", "jobs-tiny/profile.json", "jobs-narrow/profile.json", "fine-tune/policy/manifest.json"),
    *("fine-tune/policy/policy.safetensors", "search/recipe.toml", "search/searched.json"),
)
_RECIPE = """version = 1
seeds = [4, 9]
[jobs]
training = 2
validation = 2
shallowest = 2
deepest = 2
windows = 4
[strengths]
length = 0.2
jitter = 0.1
switch_windows = 0.1
[planner]
rise = 0.1
[ppo]
decisions = 80
lanes = 4
batch = 8
epochs = 2
learning_rate = 0.1
width = 8
"""
_CARBON = "time,gCO2/kWh\n" + "".join(f"2026-03-01T{hour:02}:00:00+00:00,{180 + 7 * hour}\n" for hour in range(24))


def record(runs: Path) -> dict[str, Path]:
    """Run everything once and return the folders by name."""
    import tiny_job

    import autotune
    from autotune import commands

    job = tiny_job.make(evaluate_every=4, target=4.2, max_steps=24)
    reference = "tests/fuzz/several.py:tiny"
    settings: dict[str, Any] = {"memory_budget": "90%", "steps": 48, "runs_dir": runs}
    found = {
        "tune": commands.tune(job, "optuna", trials=4, **settings),
        "tune-exact": commands.tune(job, "exact", lean=True, **settings),
        "compare": commands.compare(job, ["paper", "random", "planner"], seeds=2, trials=3, lean=True, **settings),
        "jobs": _compared_jobs([reference, "tests/fuzz/several.py:narrow"], runs),
    }
    recipe = runs / "recipe.toml"
    recipe.write_text(_RECIPE)
    found["train"] = commands.train(commands.TrainRequest(recipe=recipe, processes=1), runs_dir=runs)
    search = commands.TrainRequest(recipe=recipe, trials=1, decisions=32, processes=1)
    found["search"] = commands.train(search, runs_dir=runs)
    found["fine-tune"] = commands.fine_tune(commands.FineTuneRequest(job=job, windows=8), runs_dir=runs)
    found["reproduce"] = _reproduced(runs)
    folders = {name: Path(document["run"]) for name, document in found.items()}
    for entry in found["jobs"]["jobs"]:
        folders[f"jobs-{entry['job']}"] = Path(entry["run"])
    folders["attach"] = _attached(runs)
    assert autotune.__version__
    return folders


def _compared_jobs(jobs: list[str], runs: Path) -> dict[str, Any]:
    """Compare an arm on several jobs."""
    from autotune import commands
    from autotune.campaign.trusted_inputs import TrustedInputs
    from autotune.io.progress import Silent
    from autotune.records.requests import CompareOptions

    options = CompareOptions(seeds=2, memory_budget="90%", steps=48)
    return commands.compare_jobs(jobs, ["paper"], options, TrustedInputs(jobs=jobs), runs, Silent())


def _reproduced(runs: Path) -> dict[str, Any]:
    """Reproduce a table of the paper with tiny jobs instead of its own."""
    import math

    import tiny_job

    from autotune import commands
    from autotune.paper import experiments

    tasks = {
        architecture: experiments.Experiment(
            architecture=architecture,
            reference="tests/fuzz/several.py:tiny",
            items=tiny_job.LENGTH,
            item_unit="bytes/s",
            quality_unit="perplexity of bytes",
            quality=math.exp,
            at_most=0.5,
        )
        for architecture in (experiments.CONVOLUTION, experiments.TRANSFORMER)
    }
    experiments.SCALES = {**experiments.SCALES, "cpu": tasks}  # what `cpu` names here
    return commands.reproduce("table1", scale="cpu", seeds=2, runs_dir=runs)


def _attached(runs: Path) -> Path:
    from test_live import Wanders
    from test_report_attached import attach_and_train

    return attach_and_train(runs, Wanders(), 24)


def _policy(folder: Path) -> None:
    """Save a policy that chooses plans without a planner, with a narrow network to keep it small."""
    from autotune.agents.policy_folder import Training, save_policy
    from autotune.agents.scratch_network import PolicyNetwork

    training = Training(job="tiny", seed=0, windows=4, steps=8, memory_budget_bytes=None)
    save_policy(folder, PolicyNetwork(8), training)


def _loose(runs: Path, folder: Path) -> None:
    """Write documents outside runs: a recipe, carbon intensities, a convergence model, a measurement, a plan."""
    import tiny_job

    from autotune.io.files import write_json
    from autotune.profiling.convergence_runs import measure_convergence

    (folder / "recipe.toml").write_text(_RECIPE)
    (folder / "carbon.csv").write_text(_CARBON)
    write_json(folder / "convergence.json", measure_convergence(tiny_job.make(max_steps=24)).to_json())
    trial = json.loads(next(runs.glob("*-tune-*/trials.jsonl")).read_text().splitlines()[-1])
    write_json(folder / "measurement.json", trial["measurement"])
    write_json(folder / "launched.json", {**trial["plan"], "launch": {"zero_stage": 1, "optimizer": "sgd"}})


def _sent(folder: Path) -> None:
    """Send a run's records for a tracking server, so that the run has a cursor."""
    from autotune.records.tracking import send_pending

    own = Path(tempfile.mkdtemp())
    shutil.copytree(folder, own / "tune")
    del os.environ["MLFLOW_TRACKING_URI"]
    send_pending(own)
    shutil.copy(own / "tune" / "tracking-sent.json", folder)
    shutil.rmtree(own)


def resealed(line: str) -> str:
    """Return a journal record with its correct checksum."""
    record = json.loads(line)
    if isinstance(record, dict) and record.pop("crc32", None) is not None:
        record["crc32"] = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    return json.dumps(record) + "\n"


def _kept(source: Path, target: Path, names: dict[str, str]) -> None:
    """Copy a folder's documents without data about this machine."""
    for path in sorted(source.rglob("*")):
        out = target / path.relative_to(source)
        spool = path.name == "tracking.jsonl" and target.name != "tune"
        seed = path.name.startswith("seed-") or path.parent.parent.name == "trials"
        if not path.is_file() or str(out).endswith(_LEFT_OUT) or spool or seed:
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            shutil.copyfile(path, out)
            continue
        text = path.read_text()
        for before, after in names.items():
            text = text.replace(before, after)
        if path.name == "journal.jsonl":
            text = "".join(resealed(line) for line in text.splitlines())
        out.write_text(text)


def main() -> None:
    """Record all specimens."""
    import platform

    from autotune.mechanics.devices import device_name

    os.environ["MLFLOW_TRACKING_URI"] = "nowhere:"
    runs = Path(tempfile.mkdtemp()) / "runs"
    folders = record(runs)
    _sent(folders["tune"])
    loose = runs / "loose"
    loose.mkdir()
    _loose(runs, loose)
    _policy(runs / "policy")
    folders |= {"loose": loose, "policy": runs / "policy"}
    names = {path.name: name for name, path in folders.items()}
    names |= {str(runs): "runs", str(HERE.parents[1]) + "/": "", device_name(): DEVICE, platform.platform(): "Linux"}
    shutil.rmtree(SPECIMENS, ignore_errors=True)
    for name, path in folders.items():
        _kept(path, SPECIMENS / name, names)
    shutil.rmtree(runs.parent)
    print(sum(path.stat().st_size for path in SPECIMENS.rglob("*") if path.is_file()), "bytes")  # noqa: T201


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    main()
