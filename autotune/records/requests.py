"""Requests: the options of a tuning or a comparison, as ``asked`` in ``config.json`` records them.

A request is built once, from command-line options or keyword arguments; ``autotune resume`` reads the same object from
the document. It contains no secret and decides nothing outside the run directory; inputs that do are in
:class:`autotune.campaign.trusted_inputs.TrustedInputs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

from annotated_types import Interval, Len

from autotune.engines.ray_cluster import ClusterOptions
from autotune.engines.registry import ENGINES, RankOptions
from autotune.io.addresses import without_secrets
from autotune.io.documents import Count, NotNegative, Positive, Seed, document
from autotune.io.files import json_sha256
from autotune.job import Job
from autotune.plan import Launch
from autotune.records.protocol import paired_seeds

Text = Annotated[str, Len(0, 10_000)]
Name = Annotated[str, Len(1, 1_000)]
Names = Annotated[list[Name], Len(1, 1_000)]
Seeds = Annotated[list[Seed], Len(2, 1_000)]


@document
class Ranks:
    """Several processes of one machine that train the job together.

    Attributes:
        count: number of processes.
        zero_stage: ZeRO stage.
        config: SHA-256 of the user's DeepSpeed configuration, which may contain secrets; ``None`` without one.
        mesh: with FSDP2, replicas, shards and ranks that share layers, ``None`` for shards alone; of a pipeline, its
            layout.
        engine: name of the engine.
    """

    count: Annotated[int, Interval(ge=1, le=256)]
    zero_stage: Annotated[int, Interval(ge=0, le=3)]
    config: Text | None = None
    mesh: Text | None = None
    engine: Text = "deepspeed"

    @classmethod
    def of(cls, options: RankOptions | None) -> Ranks | None:
        """Return the recorded form of an engine's options."""
        if options is None:
            return None
        return cls(
            count=options.count,
            zero_stage=options.zero_stage,
            config=digest_of(options.config),
            mesh=options.mesh,
            engine=options.engine,
        )

    def of_layout(self, launch: Launch) -> Ranks:
        """Return the ranks in the layout that a plan was measured in."""
        stage = self.zero_stage if launch.zero_stage is None else launch.zero_stage
        return replace(self, zero_stage=stage, mesh=launch.mesh or launch.pipeline or self.mesh)

    @property
    def flags(self) -> list[str]:
        """Return the options of a command that trains on the same ranks; ``FILE`` stands for the configuration."""
        options = ENGINES[self.engine].options
        flags = ["--engine", self.engine, "--ranks", str(self.count)]
        flags += ["--zero-stage", str(self.zero_stage)] if "zero_stage" in options else []
        flags += [] if self.mesh is None else ["--mesh", self.mesh]
        return flags + ([] if self.config is None else ["--ds-config", "FILE"])


@document
class SearchOptions:
    """Options of every search; see :func:`autotune.tune` for what they mean.

    Attributes:
        gradient_norm: largest gradient norm allowed (eq. 3); ``None`` for no limit.
        storage: address of the database that keeps Optuna's studies, without its password.
        report_to: name of the experiment tracker; ``None`` for that in ``AUTOTUNE_REPORT_TO``, or ``mlflow``.
    """

    memory_budget: Text | None = None
    gradient_norm: Positive | None = None
    steps: Count = 120
    trials: Count | None = None
    seed: Seed = 0
    lean: bool = True
    storage: Text | None = None
    watts: NotNegative | None = None
    report_to: Name | None = None


@document
class Request(SearchOptions):
    """Options that a tuning and a comparison share.

    Attributes:
        job: the job's reference; ``None`` for a job that was given as an object.
        isolate: whether windows run in a worker process.
        ranks: processes that train the job together; ``None`` for one.
        cluster: Ray cluster that measures plans in parallel; ``None`` for this machine.
        weights: weights of time, memory and energy in the objective; ``None`` for time alone.
    """

    job: Text | None
    isolate: bool = False
    ranks: Ranks | None = None
    cluster: ClusterOptions | None = None
    weights: Text | None = None

    @property
    def in_workers(self) -> bool:
        """Return whether windows run in worker processes, which ranks and a cluster imply."""
        return self.isolate or self.ranks is not None or self.cluster is not None


@document
class TuneRequest(Request):
    """Options of a tuning.

    Attributes:
        method: search method.
        knobs: whether free knobs are measured first, and the recommended ones applied to every window.
        tolerant: whether knobs may be recommended that round differently.
        launch_choices: the knobs that are applied, as behind a job's name; empty for none, ``None`` if not yet
            measured.
    """

    method: Name
    knobs: bool = False
    tolerant: bool = False
    launch_choices: Text | None = None


@document
class CompareRequest(Request):
    """Options of a comparison on one job.

    Attributes:
        arms: names of the arms, the baseline first.
        seeds: the paired seeds.
        dips: dips of the memory budget during runs; ``None`` for a constant budget.
        carbon_intensity: grams of CO2 per kWh, or the path of a file with a series of them.
        within: name of the run directory of the comparison on several jobs that contains this one; ``None`` for none.
    """

    arms: Names
    seeds: Seeds
    dips: Text | None = None
    carbon_intensity: Text | None = None
    within: Text | None = None


@document
class CompareOptions(SearchOptions):
    """Options of a comparison except its jobs and arms; ``settings`` in ``config.json`` for several jobs.

    Attributes:
        seeds: number of paired seeds.
        dips: as in :class:`CompareRequest`.
        carbon_intensity: as in :class:`CompareRequest`.
    """

    seeds: Count = 10
    dips: Text | None = None
    carbon_intensity: Text | None = None

    def request(self, job: str | Job, arms: Sequence[str], *, within: str | None = None) -> CompareRequest:
        """Return the request to compare arms on one job.

        Raises:
            InputError: if the number of seeds is not allowed.
        """
        options: dict[str, Any] = {**asdict(self), "seeds": list(paired_seeds(self.seeds, tuning_seed=self.seed))}
        return CompareRequest(job=reference_of(job), arms=list(arms), within=within, **options)


def reference_of(job: str | Job) -> str | None:
    """Return a job's reference; ``None`` for a job that was given as an object."""
    return job if isinstance(job, str) else None


def recorded_address(storage: str | None) -> str | None:
    """Return a database's address without its password, for the record."""
    return None if storage is None else without_secrets(storage)


def digest_of(config: Mapping[str, Any] | None) -> str | None:
    """Return the SHA-256 of a configuration, recorded in its place since it may contain secrets; ``None`` for none."""
    return None if config is None else json_sha256(config)
