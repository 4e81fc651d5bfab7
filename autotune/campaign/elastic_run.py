"""Train a job on as many ranks as there are: whenever their number changes, a plan is chosen for it anew.

Every rank runs :func:`train_elastically`, started by ``torchrun``, which starts all of them again if one is lost or
joins. They find the training state of the last snapshot, whatever number of ranks has written it, and the profiles of
the numbers of ranks that there were before, in one folder that all ranks see.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

from autotune import knobs
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import SAFETY_MARGIN, Solution, smallest, solve
from autotune.engines.fsdp2_engine import Fsdp2Engine
from autotune.engines.rendezvous import join_ranks
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import AutotuneError, BudgetError, EngineError, InputError
from autotune.io.files import append_json_line, read_json, read_json_lines, write_json
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.mechanics import devices
from autotune.mechanics.collectives import of_first_rank
from autotune.mesh import Mesh
from autotune.profiling.job_shape import profile_key
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.profiling.tracing_engine import watched_ranks

Value = TypeVar("Value")

MESHES = ("shard", "dp", "all")
LOG, RAN_OUT = "elastic.jsonl", "out-of-memory.jsonl"
_STATE, _PART = "state-", ".part"
# Snapshots that are kept: if the last one cannot be read, the one before it is loaded.
_KEPT = 2
# Share of the predicted peak of a plan for which memory ran out that other plans may have.
_LEANER = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """How a job is trained on changing ranks.

    Attributes:
        budget_bytes: memory budget of each rank; ``None`` for none.
        mesh: ``shard`` divides the model between all ranks, ``dp`` gives each a whole one, and ``all`` measures every
            layout and takes the fastest that fits.
        save_every: optimizer steps from one snapshot to the next.
        tolerant: whether plans may compute in 16 bits; otherwise the job's own precision stays, and runs differ by
            rounding alone, whatever ranks they had.
        seed: random seed for weights, batches and training.
        patience_s: seconds that a rank waits for the others.

    Raises:
        InputError: if a value is not allowed.
    """

    budget_bytes: int | None = None
    mesh: str = "shard"
    save_every: int = 100
    tolerant: bool = False
    seed: int = 0
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        if self.mesh not in MESHES:
            raise InputError(f"mesh is {self.mesh!r}", where="--mesh", allowed=MESHES)

    def meshes(self, ranks: int) -> list[Mesh]:
        """Return the layouts of a number of ranks to choose from."""
        return {"shard": [Mesh(shard=ranks)], "dp": [Mesh(dp=ranks)], "all": Mesh.all_of(ranks)}[self.mesh]


def train_elastically(
    job: Job, folder: Path, options: ElasticOptions, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Train a job to its last sample; every rank of a process group calls this with the same arguments.

    Args:
        job: the job; its batches are the global ones, whatever the number of ranks.
        folder: folder of the run, which all ranks see; a run that it contains is continued.
        options: how to train.
        reporter: shows progress; given to the first rank alone.

    Returns:
        ``steps``, ``samples``, ``metric``, ``ranks``, ``mesh`` and ``plan``, on every rank.

    Raises:
        BudgetError: if no plan fits this number of ranks.
        EngineError: if a snapshot cannot be written.
        InputError: if the folder contains another run.
        JobError: if the job cannot be trained on ranks exactly.
    """
    device = devices.device_kind()
    join_ranks(device, timedelta(seconds=options.patience_s))
    run = _ElasticRun(job, folder, options, device, reporter or Silent())
    try:
        return run.train()
    finally:
        run.close()


class _ElasticRun:
    """One rank's part of a run, until the number of ranks changes."""

    def __init__(self, job: Job, folder: Path, options: ElasticOptions, device: str, reporter: Reporter) -> None:
        self._folder, self._options, self._device = folder, options, device
        self._reporter = reporter
        self._rank, self._ranks = distributed.get_rank(), distributed.get_world_size()
        # The last rank sends nothing to others.
        sent = job.launch.knobs if self._ranks > 1 else knobs.of_one_rank(job.launch.knobs)
        self._job = replace(job, launch=replace(job.launch, knobs=sent))
        self._device_name = devices.device_name()
        self._engine: Fsdp2Engine | None = None
        self._on_first_rank(self._require_own_folder)

    def train(self) -> dict[str, Any]:
        """Choose a plan, load the last snapshot, and train to the end."""
        mesh, solution = self._choose()
        with self._noting_memory(solution):
            engine = self._engine = self._begun(mesh, solution)
        k = solution.plan.accumulation_steps
        self._note("started", steps=engine.progress.steps, mesh=str(mesh), plan=solution.plan.to_json())
        total = math.ceil(self._job.total_samples / self._job.batch_size)
        self._reporter.stage(f"{self._job.name} on {self._ranks} ranks ({mesh}), k = {k}", total)
        while engine.progress.samples < self._job.total_samples:
            left = math.ceil((self._job.total_samples - engine.progress.samples) / self._job.batch_size)
            with self._noting_memory(solution):
                window = engine.run(min(self._options.save_every, left))
            if window.failure is not None:
                raise EngineError(f"training ends with {window.failure}: {window.failure_detail}")
            self._save(engine)
            self._note(
                "trained",
                steps=engine.progress.steps,
                samples=engine.progress.samples,
                loss=window.loss,
                seconds_per_step=window.seconds_per_step,
                peak_bytes=window.peak_bytes,
            )
            self._reporter.advance(engine.progress.steps)
        found = {
            "steps": engine.progress.steps,
            "samples": engine.progress.samples,
            "metric": engine.evaluate(),
            "ranks": self._ranks,
            "mesh": str(mesh),
            "plan": solution.plan.to_json(),
        }
        self._note("ended", steps=found["steps"], metric=found["metric"])
        return found

    def _begun(self, mesh: Mesh, solution: Solution) -> Fsdp2Engine:
        """Return the engine, under its plan and with the state of the last snapshot."""
        engine = Fsdp2Engine(
            self._job,
            mesh=str(mesh),
            seed=self._options.seed,
            device=self._device,
            options=EngineOptions(statistics_every=None),
        )
        engine.apply(solution.plan)
        self._load_last(engine)
        return engine

    def close(self) -> None:
        """Release the model."""
        if self._engine is not None:
            self._engine.close()

    # The plan.

    def _choose(self) -> tuple[Mesh, Solution]:
        """Return the fastest layout and plan that fits, by profiles of this number of ranks."""
        profiles = [(mesh, self._profile(mesh)) for mesh in self._options.meshes(self._ranks)]
        if not self._options.tolerant:
            profiles = [(mesh, _in_own_precision(measured)) for mesh, measured in profiles]
        return self._on_first_rank(lambda: fastest(profiles, self._options.budget_bytes, self._failed()))

    def _profile(self, mesh: Mesh) -> Profile:
        """Return the profile of a layout, measured now unless the folder has it."""
        path = self._folder / f"profile-{mesh}.json"
        key = self._on_first_rank(lambda: profile_key(self._job, self._device_name))
        known = self._on_first_rank(lambda: _known(path, key))
        if known is not None:
            return known
        made = profile(
            self._job,
            device_name=self._device_name,
            fingerprint=key,
            device=self._device,
            options=ProfilerOptions.lean(self._options.seed),
            make_engine=functools.partial(watched_ranks(Fsdp2Engine), mesh=str(mesh), no_room=[]),
        )
        self._on_first_rank(lambda: write_json(path, made.to_json()))
        return of_first_rank(made)

    def _failed(self) -> list[float]:
        """Return the predicted peaks of the plans for which memory ran out on this number of ranks."""
        path = self._folder / RAN_OUT
        rows = read_json_lines(path) if path.exists() else []
        return [row["peak_bytes"] for row in rows if row["ranks"] == self._ranks]

    # Snapshots.

    def _load_last(self, engine: Fsdp2Engine) -> None:
        """Load the last snapshot that can be read; without one, training begins."""
        found = self._on_first_rank(lambda: snapshots(self._folder))
        for folder in found:
            try:
                engine.load(folder)
            except EngineError as error:
                if folder == found[-1]:
                    raise
                self._note("skipped", folder=folder.name, reason=str(error))
            else:
                return

    def _save(self, engine: Fsdp2Engine) -> None:
        """Write a snapshot, which counts once it is complete, and remove older ones."""
        done = self._folder / f"{_STATE}{engine.progress.steps:09d}"
        part = done.with_name(done.name + _PART)
        self._on_first_rank(lambda: shutil.rmtree(part, ignore_errors=True))
        engine.save(part)

        def complete() -> None:
            # Of a former attempt that was lost between writing and noting it.
            shutil.rmtree(done, ignore_errors=True)
            part.rename(done)
            for old in snapshots(self._folder)[_KEPT:]:
                shutil.rmtree(old, ignore_errors=True)

        self._on_first_rank(complete)

    # What ranks have in common.

    def _on_first_rank(self, do: Callable[[], Value]) -> Value:
        """Run a function on the first rank, and return what it returns on every one.

        Raises:
            AutotuneError: what it raises, on every rank.
        """
        found: tuple[Any, Exception | None] = (None, None)
        if self._rank == 0:
            try:
                found = (do(), None)
            except AutotuneError as error:
                found = (None, error)
            except OSError as error:
                found = (None, EngineError(f"the folder of the run cannot be used: {error}"))
        value, failed = of_first_rank(found)
        if failed is not None:
            raise failed
        returned: Value = value
        return returned

    def _require_own_folder(self) -> None:
        """Make the folder of the run, or refuse that of another one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        about = {"version": 1, "job": self._job.name, "seed": self._options.seed}
        path = self._folder / "elastic.json"
        if not path.exists():
            write_json(path, about)
        elif (found := read_json(path)) != about:
            raise InputError(
                f"contains a run of {found!r:.100}", where=str(self._folder), allowed=f"a new folder, or one of {about}"
            )

    def _note(self, event: str, **told: Any) -> None:
        """Append a row to the run's log."""
        if self._rank == 0:
            append_json_line(self._folder / LOG, {"event": event, "ranks": self._ranks, **_finite(told)})

    @contextmanager
    def _noting_memory(self, solution: Solution) -> Iterator[None]:
        """Note that memory ran out in the body, for the next start, when a leaner plan is chosen."""
        try:
            yield
        except Exception as error:
            if devices.is_out_of_memory(error):
                append_json_line(self._folder / RAN_OUT, {"ranks": self._ranks, "peak_bytes": solution.peak_bytes})
            raise


def fastest(
    profiles: list[tuple[Mesh, Profile]], budget_bytes: int | None, failed: list[float]
) -> tuple[Mesh, Solution]:
    """Return the fastest layout and plan within a budget.

    Args:
        profiles: the layouts and their profiles.
        budget_bytes: memory budget of a rank; ``None`` for none.
        failed: predicted peaks, in bytes, of plans for which memory ran out: others must need less.

    Raises:
        BudgetError: if no plan fits.
    """
    limits = [] if budget_bytes is None else [budget_bytes]
    if failed:
        limit, leanest = int(_LEANER * min(failed)), min(smallest(measured).peak_bytes for _, measured in profiles)
        # The leanest plan is the last that is tried.
        limits.append(max(limit, math.ceil(leanest / (1 - SAFETY_MARGIN)) + 1) if leanest < min(failed) else limit)
    found: list[tuple[Mesh, Solution]] = []
    refused: BudgetError | None = None
    for mesh, measured in profiles:
        try:
            found.append((mesh, solve(measured, min(limits, default=None))))
        except BudgetError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda pair: pair[1].seconds_per_step)


def _in_own_precision(profile: Profile) -> Profile:
    """Return a profile whose plans keep the job's own precision."""
    own = profile.precisions[:1]
    return replace(profile.offering(lambda _, choice: choice.partition("/")[0] in own), precisions=own)


def snapshots(folder: Path) -> list[Path]:
    """Return the complete snapshots in a folder, the last one first."""
    found = (path for path in folder.glob(f"{_STATE}*") if path.name[len(_STATE) :].isdigit() and path.is_dir())
    return sorted(found, key=lambda path: int(path.name[len(_STATE) :]), reverse=True)


def _known(path: Path, key: str) -> Profile | None:
    """Return the profile in a file; ``None`` if it is of another job, or cannot be read."""
    try:
        found = Profile.from_json(read_json(path), where=str(path))
    except (AutotuneError, OSError):
        return None
    return found if found.fingerprint == key else None


def _finite(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of which numbers that are not finite are ``None``."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in told.items()
    }
