"""Train one job on the ranks of a process group under any plan: what all such engines share.

Every rank runs the same program with the same arguments and calls the same methods in the same order. Each batch of the
job is split into one share per rank, and each share into k micro-batches, so that the update equals that of a single
process.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from autotune import knobs
from autotune.engines.torch_engine import EngineOptions, Snapshot, TorchEngine
from autotune.errors import EngineError, InputError, JobError
from autotune.job import Job
from autotune.mechanics import cutting, devices, randomness
from autotune.mechanics.collectives import of_all_ranks, of_first_rank
from autotune.mechanics.cutting import Cutting
from autotune.mechanics.energy_meter import EnergyMeter, estimate
from autotune.mechanics.gradient_stats import GradientProbe
from autotune.mechanics.rank_probe import RankProbe, RankUpdate
from autotune.mechanics.rank_shares import cut_for_ranks, deal_to_ranks, shares_of
from autotune.mechanics.trees import tensors
from autotune.plan import Plan, Precision

# Distance between the seeds of the ranks' generators, for example for dropout.
_RANK_STRIDE = 7919
# Distance between the seeds of a run that continues after one step or after another.
_STEP_STRIDE = 1_000_003


class RankEngine(TorchEngine, ABC):
    """An engine that trains one job on the ranks of a process group.

    A step that raises on one rank leaves the others waiting. Its exception is therefore raised, to end the process;
    the launcher (:class:`autotune.IsolatedEngine`, ``torchrun``) then ends the other ranks.

    Args:
        job: the job; its batches are the global ones.
        seed: random seed for weights, batches and training.
        device: ``cpu``, or an accelerator's type; each rank takes the device with its local rank. ``None`` for the
            accelerator of this machine, if any.
        options: how to measure.

    Attributes:
        title: the library's name, in messages.
        unscaled_because: why losses are not scaled for precisions that need it.
        not_asked_because: why precisions that only ``AUTOTUNE_PRECISIONS`` offers are left out.
        unreleased_because: why gradients cannot be released during the backward pass.
        rank: number of this process.
        world: number of ranks.

    Raises:
        InputError: if ranks were started with different arguments, or the job releases gradients.
        JobError: if the job cannot be used, or a batch has fewer samples than there are ranks.
    """

    recovers = False
    title: str
    unscaled_because: str
    not_asked_because: str
    unreleased_because: str

    def __init__(
        self, job: Job, *, seed: int = 0, device: str | None = None, options: EngineOptions | None = None
    ) -> None:
        if knobs.releases(job.launch.knobs):
            problem = f"+{knobs.RELEASE} is not possible: {self.unreleased_because}"
            raise InputError(problem, where=f"job {job.name!r}", allowed="--engine torch")
        device = device or devices.device_kind(_ranks_here())
        self.connect(device)
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        if job.batch_size < self.divides_by:
            raise JobError(
                f"batch_size is {job.batch_size}, and there are {self.world} ranks",
                where=f"job {job.name!r}",
                allowed="at least one sample for each rank",
            )
        where = devices.rank_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        self._bearing: list[bool] = []
        super().__init__(job, seed=seed, device=where, options=options)
        if self.share:
            self.seed_rank(seed)
        self._require_same_everywhere(seed)

    def seed_rank(self, seed: int, steps: int = 0) -> None:
        """Give this rank the random generators of its share of the samples.

        Args:
            seed: the run's random seed.
            steps: the steps of the run so far.
        """
        with randomness.isolated():
            randomness.seed_all(seed + self.share * _RANK_STRIDE + steps * _STEP_STRIDE)
            self._random = randomness.capture()

    @abstractmethod
    def connect(self, device: str) -> None:
        """Join the process group of the ranks, or make one of this process alone.

        Args:
            device: ``cpu``, or an accelerator's type.
        """

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """Return the engine's own arguments by name, which must be the same on all ranks."""

    @property
    def divides_by(self) -> int:
        """Return the number of parts into which ranks divide a batch."""
        return self.world

    @property
    def share(self) -> int:
        """Return the number of the part of each batch that this rank computes; some may compute the same."""
        return self.rank

    @property
    def ranked(self) -> RankUpdate:
        """Return the object that makes the updates."""
        assert isinstance(self.update, RankUpdate)
        return self.update

    def energy_meter(self) -> EnergyMeter:
        """Return this machine's meter; for several GPUs, only an estimate, because a rank sees only its own."""
        if self.world > 1 and devices.is_accelerator(self.device):
            return estimate(self.options.watts)
        return super().energy_meter()

    def apply(self, plan: Plan) -> None:
        """Make the next steps run under a plan, the same on every rank.

        Raises:
            PlanError: if the plan lies outside the space; the previous plan stays.
            EngineError: if another rank applies another plan.
        """
        if not self._same_everywhere(plan.to_json()):
            raise EngineError("ranks were given different plans; apply the same plan on every rank")
        super().apply(plan)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot that was taken on this rank of a group of the same size."""
        self.ranked.settle()
        super().restore(snapshot)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights, masters and buffers by name."""
        return self.ranked.tensors(self.model)

    def resident(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that live on this rank before a step begins."""
        return self.ranked.resident(self.model, batches)

    def gradient(self, plan: Plan, batches: list[Any] | None = None) -> list[torch.Tensor | None]:
        """Refuse: no rank has the whole gradient.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"the gradient is spread over {self.world} ranks and cannot be returned")

    def agreed(self, value: float) -> float:
        """Return the maximum of a value over all ranks."""
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        return float(shared)

    def gathered(self, values: Sequence[float]) -> list[Sequence[float]]:
        """Return the values of all ranks, in their order: one collective, once a window."""
        own = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.world)]
        distributed.all_gather(found, own)
        return [one.tolist() for one in found]

    def total(self, losses: Sequence[torch.Tensor]) -> float:
        """Return the mean loss per item of the whole step."""
        shared = self.loss_here(losses)
        distributed.all_reduce(shared)
        return float(shared)

    def loss_here(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of the mean loss per item of the whole step."""
        own = torch.stack([loss.float() for loss in losses]).sum() if losses else torch.tensor(float("nan"))
        return own.to(self.device) / self.world

    def may_split(self) -> bool:
        """Return whether a step may be split in two to measure the noise scale; several ranks need no split."""
        return self.world == 1 and super().may_split()

    def shares(self, pieces: Sequence[Any]) -> cutting.Shares:
        """Return this rank's micro-batches of a step.

        Under fixed batching, consecutive pieces of a batch go to one rank; under adaptive batching, each batch is split
        between the ranks. All ranks run the same number of micro-batches: one without loss-bearing items is replaced by
        one with such items, at weight 0.
        """
        cutting = Cutting.of(self.job)
        if self.job.batching == "fixed":
            grid = cut_for_ranks(self._pending[0], self.divides_by, len(pieces), cutting)
        else:
            grid = deal_to_ranks(pieces, self.divides_by, cutting)
        found, self._bearing = shares_of(grid, self.share, self.job.count)
        return found

    def probe(self) -> GradientProbe:
        """Return the probe that observes a sampled step's gradients on all ranks."""
        return RankProbe(self.ranked, self._bearing)

    def restrict_space(self) -> None:
        """Remove choices that ranks do not support; rank 0 decides, since the measured timings of ranks may differ."""
        space = self.space
        precisions = tuple(one for one in space.precisions if not one.needs_loss_scaling and not one.asked_only)
        for precision in Precision:
            if precision.needs_loss_scaling:
                self.locks[f"precision {precision}"] = self.unscaled_because
            elif precision.asked_only and precision in space.precisions:
                self.locks[f"precision {precision}"] = self.not_asked_because
        for storage in space.storages:
            if storage.approximates:
                self.locks[f"storage {storage}"] = "no rank has the whole gradient, whose error must be measured"
        choices = space.accumulation_choices
        if space.k_splits:
            choices = tuple(k for k in choices if k * self.divides_by <= self.job.batch_size)
        precisions, self.locks = of_first_rank((precisions, self.locks))
        self.fp32_borders = "borders" in self.locks
        storages = tuple(one for one in space.storages if not one.approximates)
        self.space = replace(space, precisions=precisions, accumulation_choices=choices, storages=storages)

    def _require_same_everywhere(self, seed: int) -> None:
        first = [float(leaf.double().sum()) for leaf in tensors(self._pending[0])]
        arguments = {
            "job": self.job.name,
            "seed": seed,
            **self.settings(),
            "model": [(name, list(self.ranked.whole_shape(one))) for name, one in self.model.named_parameters()],
            "options": str(self.options),
            "first batch": [str(value) for value in first],
        }
        told = of_all_ranks({name: _digest(value) for name, value in arguments.items()})
        for name in arguments:
            if len({one[name] for one in told}) > 1:
                raise InputError(
                    f"{name} differs between ranks", where=f"engine {self.title.lower()}", allowed="the same on each"
                )

    def _same_everywhere(self, document: Any) -> bool:
        return len(set(of_all_ranks(_digest(document)))) == 1


def _ranks_here() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
