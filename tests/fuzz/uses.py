"""Uses of documents: each loads one mutated document with the package and continues with it if it was accepted.

A use either ends normally or raises one of the package's own errors. It raises ``several.Trained`` if a document led to
training, which the fuzzer's jobs do not do.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import several
import tiny_job
import torch
from documents import Form
from record import DEVICE, SPECIMENS
from replay_engine import read_trace, space_of
from small_models import TinyGPT

from autotune import commands
from autotune.agents.policy_folder import load_policy
from autotune.agents.recipe import read_recipe, recipe_of
from autotune.agents.recipe_space import space_around
from autotune.campaign.policy_training import validation_env
from autotune.cli import main
from autotune.cost_model.carbon import Intensity, schedule
from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.plan_pool import PoolSettings, make_pool
from autotune.cost_model.price_solver import PriceSolver
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import pareto_front, solve
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.torch_engine import TorchEngine
from autotune.errors import InputError
from autotune.io.files import read_json
from autotune.job import Job
from autotune.live.attach import attach
from autotune.live.decision_log import read_log
from autotune.live.replaying import replay
from autotune.measurement import Measurement
from autotune.mechanics import flops
from autotune.mechanics.devices import device_name
from autotune.paper import experiments
from autotune.plan import Plan
from autotune.profiling.job_shape import profile_key
from autotune.profiling.profile_cache import cache_path, read_profile
from autotune.profiling.profile_index import indexed_profile, remember
from autotune.records import tracking
from autotune.records.tracking_spool import artifact_of, read_cursor, read_rows
from autotune.report.alternatives import other_steps, other_units
from autotune.report.explanation import unit_costs
from autotune.report.plan_export import TARGETS, export
from autotune.simulator.convergence import Convergence

_JOBS = Path(__file__).resolve().parent / "several.py"
_REFERENCE = f"{_JOBS}:untrained_tiny"
_REFERENCES = [_REFERENCE, f"{_JOBS}:untrained_narrow"]
_SPACE = TorchEngine(several.tiny()).space
# Budget for the solver, which some plans of the specimen exceed.
_BUDGETS = (None, 450_000, 2**40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of one document.

    Attributes:
        name: name in reports.
        folder: the specimen's folder.
        file: the document in it that is mutated.
        run: runs the use, given the folder of the mutant and the mutant's path.
        share: number of mutants relative to other uses; below 1 if a use is slow.
        without: documents that are removed first, so that a run is unfinished.
        beside: other specimens in the same folder of runs.
        refused: whether even the recorded document is rejected, because it is the wrong kind for this use.
    """

    name: str
    folder: str
    file: str
    run: Callable[[Path, Path], object]
    share: float = 1.0
    without: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    refused: bool = False

    @property
    def form(self) -> Form:
        """Return the format of the document."""
        forms: Mapping[str, Form] = {".json": "json", ".jsonl": "lines", ".toml": "toml", ".csv": "text"}
        return forms.get(Path(self.file).suffix, "bytes")


def laid_out(use: Use, runs: Path) -> Path:
    """Copy the specimens of a use into a folder of runs, as if written here; return the folder of the use."""
    if use.folder == "index":
        _index(runs)
        return runs / use.folder
    for name in (use.folder, *use.beside):
        target = runs / name
        shutil.copytree(SPECIMENS / name, target)
        for path in target.rglob("*.json*"):
            path.write_text(_of_here(path.read_text(), runs))
    for name in use.without:
        (runs / use.folder / name).unlink()
    if use.folder in ("tune-exact", "compare", "reproduce"):
        _cache(runs, runs / use.folder)
    return runs / use.folder


def _of_here(text: str, runs: Path) -> str:
    text = text.replace(DEVICE, device_name()).replace("tests/fuzz/several.py:", f"{_JOBS}:untrained_")
    return text.replace('"runs/', f'"{runs}/')


def _cache(runs: Path, folder: Path) -> None:
    """Put a profile into the cache under the recorded job's key, and a copy next to the run's."""
    key = profile_key(several.untrained(), device_name())
    path = cache_path(several.untrained(), runs, key, "-lean")
    path.parent.mkdir(exist_ok=True)
    found = read_json(SPECIMENS / "tune-exact" / "profile.json")
    text = json.dumps({**found, "fingerprint": key, "device": device_name()})
    path.write_text(text)
    if folder.name == "tune-exact":
        (folder / "cached.json").write_text(text)


def _index(runs: Path) -> None:
    (runs / "index" / "profiles").mkdir(parents=True)
    path = runs / "index" / "profiles" / "tiny.json"
    shutil.copy(SPECIMENS / "tune-exact" / "profile.json", path)
    remember(_REFERENCE, path, runs / "index")


# ------------------------------------------------------------------------------------------------------------- plans


def plan_of_the_space(folder: Path, path: Path) -> None:
    plan = Plan.load(path)
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan)
    assert hash(plan) is not None
    _SPACE.check(plan, where=str(path))


def plan_exported(folder: Path, path: Path) -> None:
    plan = Plan.load(path)
    for target in TARGETS:
        with contextlib.suppress(InputError):
            export(plan, several.tiny(), target, reference=_REFERENCE).to_json()


def plan_attached(folder: Path, path: Path) -> None:
    _attached_steps(path)


# ----------------------------------------------------------------------------------------------------------- profiles


def profile_predicts(folder: Path, path: Path) -> None:
    found = read_profile(path)
    generator = np.random.default_rng(0)
    for plan in (found.space.baseline(), found.space.leanest(), *(found.space.sample(generator) for _ in range(2))):
        with contextlib.suppress(InputError):
            _finite(peak_bytes(found, plan), seconds_per_step(found, plan))
            unit_costs(found, plan)
    assert Profile.from_json(found.to_json()) == found


def profile_solved(folder: Path, path: Path) -> None:
    found = read_profile(path)
    for budget in _BUDGETS:
        with contextlib.suppress(InputError):
            solution = solve(found, budget)
            _finite(solution.peak_bytes, solution.seconds_per_step, solution.objective)


def profile_priced(folder: Path, path: Path) -> None:
    found = read_profile(path)
    arrays = CostArrays([found])
    jobs = np.zeros(3, dtype=np.int64)
    PriceSolver(arrays).solve(jobs, np.array([0.0, 450_000.0, math.inf]))
    make_pool(arrays, PoolSettings(size=16, worlds=2, budgets=4, changes=64))


def profile_shown(folder: Path, path: Path) -> None:
    found = read_profile(path)
    plan = found.space.leanest()
    with contextlib.suppress(InputError):
        unit_costs(found, plan)
        other_units(found, plan, 450_000)
        other_steps(found, plan, 450_000)
    with contextlib.suppress(InputError):
        pareto_front(found, points=4)


def _finite(*values: float) -> None:
    assert all(math.isfinite(value) for value in values), values


def convergence(folder: Path, path: Path) -> None:
    found = Convergence.from_json(read_json(path), where=str(path))
    loss = found.loss.at(3.0)
    found.metric.along(np.linspace(0.0, 100.0, 5))
    found.noise_scale(max(loss, 1e-3))
    found.squared_error(_SPACE.leanest())
    for metric in (4.0, 1.0):
        found.steps_to(metric, 8.0)
    assert Convergence.from_json(found.to_json()) == found


def measurement(folder: Path, path: Path) -> None:
    found = Measurement.from_json(read_json(path), where=str(path))
    assert found.throughput is None or found.throughput == found.throughput
    assert found.sample_j is None or found.sample_j == found.sample_j
    assert found.within_budget in (True, False)
    assert Measurement.from_json(found.to_json()) == found


# --------------------------------------------------------------------------------------------------------------- runs


def resumed(folder: Path, path: Path) -> None:
    document = commands.resume(folder, job=several.untrained())
    _show(document)


def resumed_jobs(folder: Path, path: Path) -> None:
    document = commands.resume(folder, job=_REFERENCES)
    _show(document)


def put_together(folder: Path, path: Path) -> None:
    _show(commands.resume(folder.parent / "jobs", job=_REFERENCES))


def reproduced(folder: Path, path: Path) -> None:
    commands.resume(folder)


def train_resumed(folder: Path, path: Path) -> None:
    # Stops after the recipe and the run, because training processes are tested elsewhere.
    from autotune.commands.training import TrainRequest, _resumed

    request = TrainRequest(resume=folder, trials=1 if folder.name == "search" else None)
    _, _, run = _resumed(request, folder)
    run.close()


def _show(document: dict[str, Any]) -> None:
    """Print a document as ``autotune resume`` does."""
    from autotune.cli.compare import show, show_jobs
    from autotune.cli.console import console
    from autotune.report.terminal_tables import tuned_line

    output = console(as_json=False)
    if "together" in document:
        show_jobs(document, output, as_json=True)
    elif "arms" in document:
        show(document, output, as_json=True)
    else:
        tuned_line(document)


def reported(folder: Path, path: Path) -> None:
    _command("report", folder, "--csv", folder / "csv", "--figures", folder / "drawn", "--json")


def reported_shortly(folder: Path, path: Path) -> None:
    _command("report", folder, *(() if folder.name == "attach" else ("--carbon-intensity", "300")))


def explained(folder: Path, path: Path) -> None:
    _command("explain", folder, "--job", _REFERENCE, "--runs-dir", folder.parent)


def exported(folder: Path, path: Path) -> None:
    _command("export", folder, "--job", _REFERENCE, "--to", "accelerate", "--out", folder)


class CommandError(Exception):
    """A command's error output that does not look like an error of the package."""


def _command(*arguments: object) -> None:
    """Run the command line in this process, and raise the error in its one line of output, if any."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run([str(argument) for argument in arguments])
    said = [line for line in err.getvalue().splitlines() if not line.startswith("WARNING")]
    if code != 0 and not (code in (1, 2) and len(said) == 1 and said[0].startswith("autotune: ")):
        raise CommandError(f"exit {code}: {err.getvalue()[:300]!r}")
    if code != 0:
        raise InputError(said[0].removeprefix("autotune: "))


def trace(folder: Path, path: Path) -> None:
    found = read_trace(path)
    space_of(found)


# -------------------------------------------------------------------------------------------------------- decision logs


def replayed(folder: Path, path: Path) -> None:
    replay(path, None)
    read_log(folder)


def replayed_again(folder: Path, path: Path) -> None:
    replay(folder, _attachable(), steps=4)


def replayed_by_command(folder: Path, path: Path) -> None:
    _command("replay", folder)
    _command("replay", path, "--json")


def watched(folder: Path, path: Path) -> None:
    _command("watch", folder, "--once")
    _command("watch", folder, "--json")


def log_attached(folder: Path, path: Path) -> None:
    _attached_steps(path)


def _attachable() -> Job:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def batches(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(11, (4, 7), generator=generator) for _ in itertools.count())

    return tiny_job.make(model=lambda: TinyGPT(width=16, blocks=6, dropout=0.2), loss=loss, batches=batches)


def _attached_steps(policy: Path) -> None:
    job = _attachable()
    model = job.model()
    tuner = attach(model, torch.optim.SGD(model.parameters(), 1e-3), policy, memory_budget_bytes=10**7, runs_dir=None)
    try:
        for batch in itertools.islice(job.batches(0), 3):
            for micro in tuner.micro_batches(batch):
                tuner.backward(job.loss(model, micro))
            tuner.step()
    finally:
        tuner.detach()


# ------------------------------------------------------------------------------------------------------------ tracking


def spooled(folder: Path, path: Path) -> None:
    read_cursor(folder)
    for row in read_rows(folder):
        if row is not None and row["kind"] == "artifact":
            with contextlib.suppress(InputError, OSError):
                artifact_of(folder, row)


def tracked_again(folder: Path, path: Path) -> None:
    tracker = tracking.Tracker(folder.parent, folder, "again")
    tracker.metrics({"x": 1.0})
    tracker.close()


def sent(folder: Path, path: Path) -> None:
    """Send to a database that MLflow made once, because making one takes seconds."""
    runs, made = folder.parent, folder.parents[1] / "mlflow.db"
    if made.exists():
        shutil.copy(made, runs)
    before = os.environ.pop("MLFLOW_TRACKING_URI")
    try:
        tracking.send_pending(runs)
    finally:
        os.environ["MLFLOW_TRACKING_URI"] = before
    if not made.exists() and (runs / "mlflow.db").exists():
        shutil.copy(runs / "mlflow.db", made)


# ------------------------------------------------------------------------------------------------------------- others


def policy(folder: Path, path: Path) -> None:
    load_policy(path.parent)


def recipe(folder: Path, path: Path) -> None:
    found = read_recipe(path)
    assert recipe_of(found.to_json()) == found
    assert found.sha256
    with contextlib.suppress(InputError):
        space_around(found.ppo)


def recipe_judged(folder: Path, path: Path) -> None:
    found = read_recipe(path)
    jobs = found.jobs
    if jobs.validation * jobs.deepest * jobs.windows > 200:
        return
    env = validation_env(found, lanes=4)
    env.reset()


def index(folder: Path, path: Path) -> None:
    indexed_profile(_REFERENCE, folder)


def carbon(folder: Path, path: Path) -> None:
    found = Intensity.parse(str(path))
    assert str(found)
    found.mean(found.begin_s + 1, found.begin_s + 2)
    schedule(found, 1800.0, found.begin_s)


def cached(folder: Path, path: Path) -> None:
    """Resume a tuning whose job has a cached profile."""
    runs = folder.parent
    key = profile_key(several.untrained(), device_name())
    shutil.copyfile(path, cache_path(several.untrained(), runs, key, "-lean"))
    resumed(folder, path)


def point_tables_at_tiny_jobs() -> None:
    """Replace the jobs of a table of the paper by jobs that do not train, and look for peak rates in small products."""
    flops._SIDES = (128, 256)
    tasks = {
        architecture: experiments.Experiment(
            architecture=architecture,
            reference=_REFERENCE,
            items=tiny_job.LENGTH,
            item_unit="bytes/s",
            quality_unit="perplexity of bytes",
            quality=math.exp,
            at_most=0.5,
        )
        for architecture in (experiments.CONVOLUTION, experiments.TRANSFORMER)
    }
    experiments.SCALES = {**experiments.SCALES, "cpu": tasks}


# Documents of a comparison on several jobs, read from the folder of one job.
_UNFINISHED = ("../jobs/jobs.json",)


def _uses() -> list[Use]:
    found = SimpleNamespace(all=[])

    def use(name: str, document: str, run: Callable[[Path, Path], object], share: float = 1.0, **more: Any) -> None:
        folder, _, file = document.partition("/")
        found.all.append(Use(name=name, folder=folder, file=file, run=run, share=share, **more))

    use("plan: read", "tune/plan.json", plan_of_the_space)
    use("launched plan: read", "loose/launched.json", plan_of_the_space)
    use("plan: export", "tune/plan.json", plan_exported, 0.2)
    use("launched plan: export", "loose/launched.json", plan_exported, 0.2)
    use("plan: export by command", "tune/plan.json", exported, 0.05)
    use("plan: attach", "tune/plan.json", plan_attached, 0.02)
    use("profile: predict", "tune-exact/profile.json", profile_predicts)
    use("profile: solve", "tune-exact/profile.json", profile_solved, 0.15)
    use("profile: price", "tune-exact/profile.json", profile_priced, 0.15)
    use("profile: show", "tune-exact/profile.json", profile_shown, 0.1)
    use("profile: report", "tune-exact/profile.json", reported_shortly, 0.05)
    use("profile: explain", "tune-exact/profile.json", explained, 0.05)
    use("cached profile: resume", "tune-exact/cached.json", cached, 0.05, without=("tuned.json",))
    use("convergence", "loose/convergence.json", convergence)
    use("measurement", "loose/measurement.json", measurement)
    for verb in ("tune", "compare", "jobs", "reproduce", "train", "search", "fine-tune", "attach"):
        _configs(verb, use)
    for verb in ("tune", "compare", "attach"):
        use(f"config of {verb}: report", f"{verb}/config.json", reported_shortly, 0.1)
    use("environment: report", "tune/environment.json", reported_shortly, 0.15)
    use("environment: report compare", "compare/environment.json", reported_shortly, 0.1)
    use("environment: resume", "tune/environment.json", resumed, 0.1, without=("tuned.json",))
    use("journal of tune: resume", "tune/journal.jsonl", resumed, 0.1, without=("tuned.json",))
    use("journal of compare: resume", "compare/journal.jsonl", resumed, 0.1, without=("comparison.json",))
    use("journal of reproduce: resume", "reproduce/journal.jsonl", reproduced, 0.1, without=("reproduction.json",))
    use("comparison: resume", "compare/comparison.json", resumed)
    use("comparison: report", "compare/comparison.json", reported_shortly, 0.1)
    use("comparison: report with figures", "compare/comparison.json", reported, 0.02)
    use("tuned: resume", "tune/tuned.json", resumed)
    use("tuned: report", "tune/tuned.json", reported_shortly, 0.1)
    kept = ("jobs", "jobs-narrow")
    use(
        "comparison of one of jobs: resume",
        "jobs-tiny/comparison.json",
        put_together,
        0.3,
        beside=kept,
        without=_UNFINISHED,
    )
    use("jobs: resume", "jobs/jobs.json", resumed_jobs)
    use("reproduction: resume", "reproduce/reproduction.json", reproduced)
    use("trials: read", "tune/trials.jsonl", trace)
    use("trials: report", "tune/trials.jsonl", reported_shortly, 0.1)
    use("trials: report compare", "compare/trials.jsonl", reported_shortly, 0.05)
    use("trials: explain", "tune/trials.jsonl", explained, 0.1)
    use("log: replay", "attach/decisions.jsonl", replayed)
    use("log: replay by command", "attach/decisions.jsonl", replayed_by_command, 0.05)
    use("log: watch", "attach/decisions.jsonl", watched, 0.05)
    use("log: replay with a job", "attach/decisions.jsonl", replayed_again, 0.02)
    use("log: attach", "attach/decisions.jsonl", log_attached, 0.02)
    use("log: report", "attach/decisions.jsonl", reported_shortly, 0.2)
    use("spool", "tune/tracking.jsonl", spooled)
    use("cursor", "tune/tracking-sent.json", spooled)
    use("spool: taken up", "tune/tracking.jsonl", tracked_again, 0.05)
    use("spool: send", "tune/tracking.jsonl", sent, 0.01, without=("tracking-sent.json",))
    use("cursor: send", "tune/tracking-sent.json", sent, 0.01)
    use("manifest", "policy/manifest.json", policy)
    use("manifest of levers", "train/policy/manifest.json", policy)
    use("weights", "policy/policy.safetensors", policy)
    use("recipe", "loose/recipe.toml", recipe)
    use("recipe: judge", "loose/recipe.toml", recipe_judged, 0.1)
    use("index", "index/profiles/index.json", index, 0.3)
    use("carbon", "loose/carbon.csv", carbon)
    return list(found.all)


def _configs(verb: str, use: Callable[..., None]) -> None:
    document = f"{verb}/config.json"
    if verb in ("train", "search"):
        use(f"config of {verb}: resume", document, train_resumed)
    elif verb == "jobs":
        beside = ("jobs-tiny", "jobs-narrow")
        use("config of jobs: resume", document, resumed_jobs, 0.2, without=("jobs.json",), beside=beside)
        use("config of one of jobs: resume", "jobs-tiny/config.json", resumed_jobs, 0.1, beside=("jobs", "jobs-narrow"))
    elif verb in ("tune", "compare", "reproduce"):
        result = {"tune": "tuned.json", "compare": "comparison.json", "reproduce": "reproduction.json"}[verb]
        run = reproduced if verb == "reproduce" else resumed
        use(f"config of finished {verb}: resume", document, run)
        use(f"config of {verb}: resume", document, run, 0.2, without=(result,))
    else:
        use(f"config of {verb}: resume", document, resumed, refused=True)


USES = {use.name: use for use in _uses()}
