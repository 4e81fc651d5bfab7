"""Train a job on several ranks through torch's ``fully_shard`` (FSDP2) under any plan."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from autotune import knobs
from autotune.choices import DEFAULT_STORAGES, STORAGES
from autotune.engines.job_checks import ask
from autotune.engines.rank_engine import RankEngine
from autotune.engines.rendezvous import join_ranks
from autotune.engines.torch_engine import EngineOptions, Progress, TorchEngine
from autotune.errors import InputError, JobError
from autotune.job import Job
from autotune.measurement import Measurement
from autotune.mechanics import cutting, devices, stepping
from autotune.mechanics.agreed_use import contained_units, require_separate_samples
from autotune.mechanics.fully_sharded import (
    FullyShardedProbe,
    FullyShardedUpdate,
    devices_of,
    gather_rest,
    keep_gathered,
    local,
    require_spreadable,
    require_updated_alike,
    spread,
)
from autotune.mechanics.gradient_stats import GradientProbe
from autotune.mechanics.rank_calls import RankCalls
from autotune.mechanics.sent_forms import SentForms
from autotune.mechanics.shared_norm import share_statistics
from autotune.mechanics.spread_state import RunState, read_state, save_state
from autotune.mechanics.tensor_parallel import divide, plan_of, summed_by
from autotune.mesh import MESH_FORM, Mesh
from autotune.plan import Plan

# What torch raises for a view of a tensor whose memory was released.
_RELEASED = "setStorage"
# Largest share by which losses, or squares of gradients, may differ that should be the same: by the order in which
# ranks are added up, and on accelerators by operations that are not repeatable.
_APART, _APART_ON_DEVICES = 1e-12, 1e-4


class Fsdp2Engine(RankEngine):
    """An engine that trains one job on a mesh of ranks, each of which holds a part of the model.

    Each unit gathers its own weights before its forward and backward passes, and releases them after each; a plan may
    keep them gathered in between. Units whose weights the model uses outside their forward are gathered once per step,
    with all weights that belong to no unit.

    Args:
        job: the job; its batches are the global ones.
        mesh: replicas, shards and ranks that share layers, such as ``dp=2,shard=2`` or ``shard=2,tp=2``; ``None``
            shards over all ranks.
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
        self._calls: RankCalls | None = None
        self._watching: list[Any] = []
        self._normalizes = False
        # Ranks that share layers with this one, and the parameters whose gradients they sum.
        self._layers: Any = None
        self._summed: list[str] = []
        self._forms = SentForms()
        super().__init__(job, seed=seed, device=device, options=options)

    def connect(self, device: str) -> None:
        """Join the process group of the ranks, or make one of this process alone."""
        join_ranks(device)

    def settings(self) -> Mapping[str, Any]:
        """Return the mesh."""
        return {"mesh": str(self.mesh)}

    @property
    def divides_by(self) -> int:
        """Return the number of parts into which ranks divide a batch; those that share layers compute the same."""
        return (self._asked or Mesh(shard=self.world)).shares

    @property
    def share(self) -> int:
        """Return the number of the part of each batch that this rank computes."""
        return self.rank * self.divides_by // self.world

    def arranged(self) -> None:
        """Spread the model over the ranks."""
        self.mesh = self._asked or Mesh(shard=self.world)
        if self.mesh.ranks != self.world:
            raise InputError(
                f"mesh {self.mesh} is for {self.mesh.ranks} ranks, and there are {self.world}",
                where="--mesh",
                allowed=MESH_FORM,
            )
        knobs.require_receivers(self.job.launch.knobs, self.mesh)
        self.restrict_space()
        if self.mesh.shard > 1:
            offered = {*self.space.storages, *(one for one in STORAGES if one.keeps_gathered)}
            self.space = replace(self.space, storages=tuple(one for one in STORAGES if one in offered))
        if self.mesh.tp > 1:
            self._leave_out_storages()
        self._spread()

    def _leave_out_storages(self) -> None:
        """Leave out storages that look into the operations of a unit, which are those of torch's divided tensors."""
        others = [one for one in self.space.storages if one.released not in DEFAULT_STORAGES]
        for storage in others:
            self.locks[f"storage {storage}"] = "units have divided layers, into whose operations it cannot look"
        self.space = replace(self.space, storages=tuple(one for one in self.space.storages if one not in others))

    def _spread(self) -> None:
        """Spread the model over the ranks, if they can train it exactly."""
        if self.world > 1:
            require_separate_samples(self.model, self._pending[0], self._loss, self.job.count)
        piece, names = self._piece(), [unit.name for unit in self.space.units]
        contained = contained_units(self.model, names, lambda: self._loss(piece), self._seed + self.share)
        require_spreadable(self.model, contained)
        # Units whose outputs are written to in place gather no weights of their own.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        sent = knobs.communication(self.job.launch.knobs)
        between, layers = devices_of(self.mesh, self.device.type, sent)
        if layers is not None:
            plan = plan_of(self.model, self.job.tensor_parallel, self.mesh.tp)
            self._layers, self._summed = layers, summed_by(self.model, plan)
            divide(self.model, plan, layers, functools.partial(self._loss, piece, trains=True), self._seed + self.share)
        self._forms = spread(self.model, contained, self.mesh, self.device.type, sent=sent, devices=between)
        if self.world > 1:
            self._calls = RankCalls([*contained, ""], "fsdp2")
            self._watching = self._calls.watch(self.model)
            self._normalizes = bool(share_statistics(self.model))

    def prepared(self, optimizer: torch.optim.Optimizer) -> stepping.Update:
        """Return the update of the job's optimizer over this rank's shards."""
        require_updated_alike([one for one in self.model.parameters() if one.requires_grad], self.job.optimizer)
        self._update_apart(optimizer)
        return FullyShardedUpdate(
            self.model,
            optimizer,
            self.mesh,
            clip_norm=self.job.clip_norm,
            device_type=self.device.type,
            calls=self._calls,
            summed=self._summed,
            layers=self._layers,
            average=self._forms.average,
        )

    def _update_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer update one parameter after another, if some are divided and others are not.

        Raises:
            JobError: if it was asked to update several at once.
        """
        if self.mesh.tp == 1:
            return
        for group in optimizer.param_groups:
            asked = [name for name in ("fused", "foreach") if group.get(name)]
            if asked:
                problem = f"the optimizer's {asked[0]} updates several parameters at once, of which some are divided"
                raise JobError(problem, where="engine fsdp2", allowed="an optimizer without it, or a mesh without tp")
            if "foreach" in group:
                group["foreach"] = False

    def apply(self, plan: Plan) -> None:
        """Make the next steps run under a plan, the same on every rank; see :class:`RankEngine`."""
        super().apply(plan)
        if self.mesh.shard > 1:
            keep_gathered(self.model, {name: storage.keeps_gathered for name, storage in self.plan.storage.items()})

    def evaluate(self) -> float:
        """Return the job's metric in the user's own precision, without changing the training state."""
        if self._calls is not None:
            self._calls.begin()
        try:
            with self._forms.exact_weights():
                gather_rest(self.model)
                return super().evaluate()
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise JobError(
                "the metric computes with a weight of a divided layer itself, of which this rank has a part",
                where="engine fsdp2",
                allowed="a metric that calls the model's layers, or a mesh without tp",
            ) from error
        finally:
            self.ranked.settle()

    def continue_at(self, other: Fsdp2Engine) -> None:
        """Continue with the weights and buffers of another engine of the same ranks, and with its next batch.

        The optimizer's state stays.
        """
        other.ranked.settle()
        self.ranked.settle()
        given = other.tensors()
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(given[name])
        self.continue_from(other.progress)

    def next_gradient(self, seed: int) -> list[torch.Tensor | None]:
        """Return this rank's part of the gradient with which the next step would update, without training.

        Args:
            seed: random seed of that step, for example for dropout.
        """
        self.seed_rank(seed)
        kept = self.update.state_dict()
        try:
            found = TorchEngine.gradient(self, self.plan)
        finally:
            self.update.load_state_dict(kept)
            self.ranked.settle()
        return [None if gradient is None else local(gradient) for gradient in found]

    def run(self, steps: int) -> Measurement:
        """Run a window of optimizer steps.

        Raises:
            EngineError: if the engine was closed.
            JobError: if ranks call different parts of the model, or the loss needs gradients of gradients; that step
                has changed no weight.
        """
        with contextlib.nullcontext() if self._calls is None else self._calls.exchanging():
            try:
                return super().run(steps)
            except RuntimeError as error:
                if _RELEASED not in str(error):
                    raise
                raise JobError(
                    "the backward pass needs weights that are released already, as gradients of gradients do",
                    where="engine fsdp2",
                    allowed="a loss that differentiates once, or --engine torch",
                ) from error

    def shares(self, pieces: Sequence[Any]) -> cutting.Shares:
        """Return this rank's micro-batches of a step; see :class:`RankEngine`.

        Raises:
            JobError: if the model has BatchNorm, and a rank's samples have no loss-bearing item.
        """
        found = super().shares(pieces)
        if self._normalizes and not all(self._bearing):
            raise JobError(
                "the samples of a rank have no loss-bearing item, and BatchNorm must see all samples",
                where="engine fsdp2",
                allowed="more samples in a batch, or --engine torch",
            )
        return found

    def total(self, losses: Sequence[torch.Tensor]) -> float:
        """Return the mean loss per item of the whole step, of which all ranks have called the same units."""
        if self._calls is None:
            return super().total(losses)
        own = float(self.loss_here(losses))
        alike = [own, self._sharded.undivided_squares()] if self.mesh.tp > 1 else []
        # Of values that ranks which share layers all have, these sum to 0.
        sign = self.mesh.tp - 1 if self.rank % self.mesh.tp == 0 else -1
        sums = [number for value in alike for number in (sign * value, abs(value))]
        shared = torch.tensor([own, *self._calls.pieces(), *sums], dtype=torch.float64, device=self.device)
        distributed.all_reduce(shared)
        total, *calls = shared.tolist()
        sums = [calls.pop() for _ in sums][::-1]
        self._calls.require_same(calls)
        tolerance = _APART_ON_DEVICES if devices.is_accelerator(self.device) else _APART
        if any(abs(apart) > tolerance * whole for apart, whole in zip(sums[::2], sums[1::2], strict=True)):
            problem = "ranks that share layers have different losses, or gradients of weights that they all have"
            raise JobError(problem, where="engine fsdp2", allowed="a mesh without tp")
        return float(total)

    @property
    def _sharded(self) -> FullyShardedUpdate:
        assert isinstance(self.update, FullyShardedUpdate)
        return self.update

    def close(self) -> None:
        """Release the model's units, gradients and batches, and stop noting its calls."""
        super().close()
        for handle in self._watching:
            handle.remove()

    def save(self, folder: str | Path) -> None:
        """Write the training state to a folder, of which every rank writes its part; the run goes on as without it.

        Unlike a snapshot, it can be loaded by any number of ranks and on any mesh.

        Args:
            folder: an empty or new folder that all ranks see.

        Raises:
            EngineError: if the folder cannot be written.
        """
        self.ranked.settle()
        save_state(self._state(), folder)

    def load(self, folder: str | Path) -> None:
        """Continue from the training state in a folder, whatever mesh has written it.

        Random generators begin anew, from the seed, the rank and the step, since their number may differ; and what
        replicas have not sent yet (PowerSGD) is forgotten.

        Args:
            folder: a folder that :meth:`save` has written for the same job and seed.

        Raises:
            EngineError: if the folder cannot be read, or belongs to another job, seed or model; nothing has changed.
        """
        self.ranked.settle()
        found = read_state(self._state(), folder)
        self.continue_from(Progress(**found.progress))
        found.put_into(self._state())
        self._update_apart(self.update.optimizer)
        self._sharded.forget()
        self.seed_rank(self._seed, self.progress.steps)

    def _state(self) -> RunState:
        return RunState(
            model=self.model,
            optimizer=self.update.optimizer,
            run={"job": self.job.name, "seed": self._seed},
            progress=asdict(self.progress),
        )

    def probe(self) -> GradientProbe:
        """Return the probe that observes a sampled step's gradients on all ranks."""
        return FullyShardedProbe(self.model, self._sharded, self._bearing)

    def _loss(self, batch: Any, *, trains: bool = False) -> torch.Tensor:
        """Return the loss of a batch by the job's own function, with its graph if the batch is to train the model."""
        found: torch.Tensor = ask(self.job, "loss", functools.partial(self.job.loss, self.model, batch))
        return found if trains else found.detach()

    def _piece(self) -> Any:
        """Return the first micro-batch that this rank would run at the largest k."""
        pieces = self._pending if self.job.batching == "adaptive" else [None] * self.space.accumulation_choices[-1]
        here = self.shares(pieces).here
        return here[0][0] if here else self._pending[0]
