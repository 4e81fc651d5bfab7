"""The engines that train a job, by the names that ``--engine`` and worker processes use.

A new engine is a class with the constructor of :class:`autotune.TorchEngine` and an entry in :data:`ENGINES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune import knobs
from autotune.engines.deepspeed_config import STAGES, require_sendable
from autotune.errors import InputError
from autotune.mesh import MESH_FORM, Mesh
from autotune.pipeline import PIPELINE_FORM, Pipeline
from autotune.plan import Launch

# The engine that needs no process of its own.
DEFAULT_ENGINE = "torch"


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine that is not imported yet.

    Attributes:
        module: the module with its class.
        name: name of the class.
        options: names of the :class:`RankOptions` that the class takes as arguments.
        requires: optional libraries that it needs, by module.
        has_ranks: whether it synchronises several processes, as a ``RankEngine`` does; others train in one.
        has_profile: whether the costs of units add up to those of its steps, so that it can be profiled.
    """

    module: str
    name: str
    options: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    has_ranks: bool = False
    has_profile: bool = True

    def load(self) -> Any:
        """Import and return the class."""
        return getattr(importlib.import_module(self.module), self.name)


ENGINES: dict[str, EngineEntry] = {
    DEFAULT_ENGINE: EngineEntry("autotune.engines.torch_engine", "TorchEngine"),
    "deepspeed": EngineEntry(
        "autotune.engines.deepspeed_engine",
        "DeepSpeedEngine",
        ("zero_stage", "config"),
        requires=("deepspeed",),
        has_ranks=True,
    ),
    "fsdp2": EngineEntry("autotune.engines.fsdp2_engine", "Fsdp2Engine", ("mesh",), has_ranks=True),
    "pipeline": EngineEntry(
        "autotune.engines.pipeline_engine", "PipelineEngine", ("mesh",), has_ranks=True, has_profile=False
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Options of an engine that trains a job in processes of its own.

    Attributes:
        count: number of processes.
        zero_stage: ZeRO stage, 0 to 3.
        config: the user's own DeepSpeed configuration; ``None`` for none.
        mesh: with FSDP2, replicas, shards and ranks that share layers, such as ``dp=2,shard=2`` or ``shard=2,tp=2``,
            where ``None`` shards over all processes; of a
            pipeline, its layout such as ``pipe=2,schedule=gpipe``, where ``None`` is 1F1B.
        engine: the engine's name in :data:`ENGINES`.
    """

    count: int = 2
    zero_stage: int = 0
    config: Mapping[str, Any] | None = None
    mesh: str | None = None
    engine: str = "deepspeed"

    def __post_init__(self) -> None:
        known = [name for name in ENGINES if name != DEFAULT_ENGINE]
        if self.engine not in known:
            raise InputError(f"engine is {self.engine!r}", where="ranks", allowed=known)
        where = f"engine {self.engine}"
        if type(self.count) is not int or self.count < 1:
            raise InputError(f"ranks is {self.count!r}", where=where, allowed="a whole number >= 1")
        if self.count > 1 and not ENGINES[self.engine].has_ranks:
            raise InputError(f"ranks is {self.count}", where=where, allowed="1: it trains in one process")
        if type(self.zero_stage) is not int or self.zero_stage not in STAGES:
            raise InputError(f"ZeRO stage is {self.zero_stage!r}", where=where, allowed=STAGES)
        mesh = self.whole_mesh
        if mesh.ranks != self.count:
            problem = f"mesh {self.mesh} is for {mesh.ranks} ranks, and there are {self.count}"
            raise InputError(problem, where="--mesh", allowed=MESH_FORM if isinstance(mesh, Mesh) else PIPELINE_FORM)

    @property
    def layout(self) -> str:
        """Return the layout of the ranks in a few words, such as ``zero-2`` or ``dp=2,shard=2``."""
        options = ENGINES[self.engine].options
        if "zero_stage" in options:
            return f"zero-{self.zero_stage}"
        return str(self.whole_mesh) if "mesh" in options else "alike"

    @property
    def whole_mesh(self) -> Mesh | Pipeline:
        """Return the mesh of FSDP2, or the layout of a pipeline."""
        if self.engine == "pipeline":
            return Pipeline(ranks=self.count) if self.mesh is None else Pipeline.parse(self.mesh)
        return Mesh(shard=self.count) if self.mesh is None else Mesh.parse(self.mesh)

    def launched(self, launch: Launch) -> Launch:
        """Return the launch choices of a job's plans on these ranks.

        Args:
            launch: the job's own launch choices.
        """
        options, mesh = ENGINES[self.engine].options, self.whole_mesh
        if isinstance(mesh, Pipeline):
            return replace(launch, pipeline=str(mesh))
        if "mesh" in options:
            return replace(launch, mesh=str(mesh))
        return replace(launch, zero_stage=self.zero_stage) if "zero_stage" in options else launch

    def require_sendable(self, text: str | None) -> None:
        """Refuse knobs that send gradients or weights as these ranks cannot, or to no others.

        Args:
            text: the knobs of a job.

        Raises:
            InputError: naming the knobs.
        """
        options, mesh = ENGINES[self.engine].options, self.whole_mesh
        if isinstance(mesh, Pipeline):
            if sent := knobs.of_ranks(text):
                raise InputError(f"+{sent} is not possible", where="engine pipeline", allowed="--engine fsdp2")
        elif "mesh" in options:
            knobs.require_receivers(text, mesh)
        elif "zero_stage" in options:
            require_sendable(text)

    def arguments(self) -> dict[str, Any]:
        """Return the engine class's arguments beyond those common to all engines."""
        return {name: getattr(self, name) for name in ENGINES[self.engine].options}
