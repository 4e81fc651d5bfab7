"""Train a job on several ranks through torch's ``fully_shard`` (FSDP2) under any plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from autotune.choices import STORAGES
from autotune.engines.rank_engine import RankEngine
from autotune.engines.rendezvous import join_ranks
from autotune.engines.torch_engine import EngineOptions, Progress
from autotune.errors import EngineError, InputError, one_line
from autotune.job import Job
from autotune.mechanics import randomness, stepping
from autotune.mechanics.buffers import copy_buffers, undo_writes
from autotune.mechanics.collectives import of_first_rank
from autotune.mechanics.fully_sharded import (
    FullyShardedProbe,
    FullyShardedUpdate,
    keep_gathered,
    self_contained,
    spread,
)
from autotune.mechanics.gradient_stats import GradientProbe
from autotune.mesh import MESH_FORM, Mesh
from autotune.plan import Plan


class Fsdp2Engine(RankEngine):
    """An engine that trains one job on a mesh of ranks, each of which holds a part of the model.

    Each unit gathers its own weights before its forward and backward passes, and releases them after each; a plan may
    keep them gathered in between. Units whose weights the model uses outside their forward are gathered once per step,
    with all weights that belong to no unit.

    Args:
        job: the job; its batches are the global ones.
        mesh: replicas and shards, such as ``dp=2,shard=2``; ``None`` shards over all ranks.
        seed: random seed for weights, batches and training.
        device: ``cpu``, or an accelerator's type; each rank takes the device with its local rank. ``None`` for the
            accelerator of this machine, if any.
        options: how to measure.

    Attributes:
        mesh: the layout of the ranks.

    Raises:
        InputError: if the mesh does not fit the ranks, or ranks were started with different arguments.
        JobError: if the job cannot be used, or a batch has fewer samples than there are ranks.
    """

    title = "FSDP2"
    unscaled_because = "ranks would have to agree on which gradients overflowed"
    not_asked_because = "no rank has the whole gradient, whose error must be measured"
    unreleased_because = "gradients are reduced before the update"

    def __init__(
        self,
        job: Job,
        *,
        mesh: str | None = None,
        seed: int = 0,
        device: str | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self._asked = None if mesh is None else Mesh.parse(mesh)
        self._seed = seed
        super().__init__(job, seed=seed, device=device, options=options)

    def connect(self, device: str) -> None:
        """Join the process group of the ranks, or make one of this process alone."""
        join_ranks(device)

    def settings(self) -> Mapping[str, Any]:
        """Return the mesh."""
        return {"mesh": str(self.mesh)}

    def arranged(self) -> None:
        """Spread the model over the ranks."""
        self.mesh = self._asked or Mesh(shard=self.world)
        if self.mesh.ranks != self.world:
            raise InputError(
                f"mesh {self.mesh} is for {self.mesh.ranks} ranks, and there are {self.world}",
                where="--mesh",
                allowed=MESH_FORM,
            )
        self.restrict_space()
        if self.mesh.shard > 1:
            offered = {*self.space.storages, *(one for one in STORAGES if one.keeps_gathered)}
            self.space = replace(self.space, storages=tuple(one for one in STORAGES if one in offered))
        names = [unit.name for unit in self.space.units]
        # Units whose outputs are written to in place gather no weights of their own.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        spread(self.model, self._self_contained(names), self.mesh, self.device.type)

    def prepared(self, optimizer: torch.optim.Optimizer) -> stepping.Update:
        """Return the update of the job's optimizer over this rank's shards."""
        return FullyShardedUpdate(
            self.model, optimizer, self.mesh, clip_norm=self.job.clip_norm, device_type=self.device.type
        )

    def apply(self, plan: Plan) -> None:
        """Make the next steps run under a plan, the same on every rank; see :class:`RankEngine`."""
        super().apply(plan)
        if self.mesh.shard > 1:
            keep_gathered(self.model, {name: storage.keeps_gathered for name, storage in self.plan.storage.items()})

    def evaluate(self) -> float:
        """Return the job's metric in the user's own precision, without changing the training state."""
        try:
            return super().evaluate()
        finally:
            self.ranked.settle()

    def save(self, folder: str | Path) -> None:
        """Write the training state to a folder, of which every rank writes its part.

        Unlike a snapshot, it can be loaded by any number of ranks and on any mesh.

        Args:
            folder: an empty or new folder that all ranks see.
        """
        state_dict_saver.save(self._stored(), checkpoint_id=str(folder))

    def load(self, folder: str | Path) -> None:
        """Continue from the training state in a folder, whatever mesh has written it.

        Random generators begin anew, from the seed, the rank and the step, since their number may differ.

        Args:
            folder: a folder that :meth:`save` has written for the same job and seed.

        Raises:
            EngineError: if the folder cannot be read, or belongs to another model.
        """
        stored = self._stored()
        try:
            state_dict_loader.load(stored, checkpoint_id=str(folder))
        except (CheckpointException, OSError, KeyError, RuntimeError, ValueError) as error:
            raise EngineError(f"the training state in {folder} cannot be loaded ({one_line(error)})") from error
        self.continue_from(Progress(**stored["progress"]))
        set_state_dict(
            self.model,
            self.update.optimizer,
            model_state_dict=stored["model"],
            optim_state_dict=stored["optimizer"],
        )
        self.seed_rank(self._seed, self.progress.steps)

    def _stored(self) -> dict[str, Any]:
        """Return the training state as distributed tensors and numbers."""
        self.ranked.settle()
        model, optimizer = get_state_dict(self.model, self.update.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": asdict(self.progress)}

    def probe(self) -> GradientProbe:
        """Return the probe that observes a sampled step's gradients on all ranks."""
        return FullyShardedProbe(self.model, self.ranked, self._bearing)

    def _self_contained(self, names: list[str]) -> list[str]:
        """Return the units that can gather their own weights, the same on all ranks."""
        piece = stepping.split(self._pending[0], stepping.num_samples(self._pending[0]))[0]
        modes = {module: module.training for module in self.model.modules()}
        buffers = copy_buffers(self.model)
        try:
            with randomness.isolated(), torch.no_grad():
                self.model.eval()
                found = self_contained(self.model, names, lambda: self.job.loss(self.model, piece))
        finally:
            undo_writes(self.model, buffers)
            for module, training in modes.items():
                module.training = training
        return of_first_rank(found)
