"""Train a job on several ranks, each of which computes some stages of the model."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from autotune import knobs
from autotune.engines.job_checks import ask
from autotune.engines.rank_engine import RankEngine
from autotune.engines.rendezvous import join_ranks
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import InputError, JobError
from autotune.job import Job
from autotune.mechanics import controls, cutting, dropout_off, randomness, stepping
from autotune.mechanics.buffers import copy_buffers, write_buffers
from autotune.mechanics.collectives import of_all_ranks
from autotune.mechanics.gradient_stats import GradientProbe
from autotune.mechanics.model_stages import (
    ModelStages,
    Shapes,
    StageRun,
    floor_of,
    is_close,
    rounding_of,
    shape_of,
    unit_operations,
)
from autotune.mechanics.pipeline_update import PipelineProbe, PipelineUpdate, end_of_stage, require_updated_apart
from autotune.mechanics.trees import map_tensors, tensors
from autotune.mechanics.weight_use import weight_use
from autotune.pipeline import PIPELINE_FORM, Pass, Pipeline, balanced, passes_of, unread
from autotune.plan import Plan, Storage

_WHERE = "engine pipeline"
# A tensor that is being sent, and what waits until it was.
_Sent = tuple[torch.Tensor, Any]
_Value = TypeVar("_Value")
# Micro-batches by which stages are tried, and batches that are looked at for them.
_PIECES, _BATCHES = 3, 6
# Largest difference of a buffer as a share of its change that is due to rounding.
_CHANGE = 1e-2


class PipelineEngine(RankEngine):
    """An engine that trains one job on ranks each of which computes some stages of the model.

    The k micro-batches of a plan go through the stages one after another. Parameters of units are on the rank of their
    stage alone; those that belong to no unit, or that several stages use, are on all ranks, which add up their
    gradients.

    Args:
        job: the job; all ranks read its batches.
        mesh: ranks, schedule and the units of each stage, such as ``pipe=2,schedule=gpipe,units=3/5``; ``None`` for
            1F1B on all ranks, with units divided by their counted operations.
        seed: random seed for weights, batches and training.
        device: ``cpu``, or an accelerator's type; each rank takes the device with its local rank. ``None`` for the
            accelerator of this machine, if any.
        options: how to measure.

    Attributes:
        pipeline: the layout of the ranks, with the units of each stage.

    Raises:
        InputError: if the layout does not fit the ranks, or ranks were started with different arguments.
        JobError: if the job cannot be used, or its model cannot be computed in stages.
    """

    title = "pipeline"
    unscaled_because = "ranks would have to agree on which gradients overflowed"
    not_asked_because = "no rank has the whole gradient, whose error must be measured"
    unreleased_because = "a unit's gradient is there only after all micro-batches"

    def __init__(
        self,
        job: Job,
        *,
        mesh: str | None = None,
        seed: int = 0,
        device: str | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self._asked = None if mesh is None else Pipeline.parse(mesh)
        # What stages were told that they are handed, by a number that is sent in its place later.
        self._known: dict[tuple[int, int], tuple[torch.Tensor, bool, Shapes]] = {}
        self._told: set[tuple[int, int]] = set()
        self._buffers_of: dict[str, int] = {}
        # Three micro-batches, and what a step on two of them must give, until that was tried.
        self._tried: Any = None
        self._expected: Any = None
        super().__init__(job, seed=seed, device=device, options=options)
        with self._own_randomness():
            self._require_exact()
        self._tried = self._expected = None

    def connect(self, device: str) -> None:
        """Join the process group of the ranks, or make one of this process alone."""
        join_ranks(device)

    def settings(self) -> Mapping[str, Any]:
        """Return the layout."""
        return {"mesh": str(self.pipeline)}

    @property
    def absent(self) -> Sequence[nn.Parameter]:
        """Return the parameters of other ranks: NaN that takes no memory."""
        return self._stages.absent

    @property
    def divides_by(self) -> int:
        """Return 1: all ranks compute a part of each sample."""
        return 1

    # ---------------------------------------------------------------------------------------------------- arrangement

    def arranged(self) -> None:
        """Divide the model into stages, and release those of other ranks."""
        asked = self._asked or Pipeline(ranks=self.world)
        names = [unit.name for unit in self.space.units]
        if asked.ranks != self.world:
            problem = f"mesh {asked} is for {asked.ranks} ranks, and there are {self.world}"
            raise InputError(problem, where="--mesh", allowed=PIPELINE_FORM)
        if sent := knobs.of_ranks(self.job.launch.knobs):
            raise InputError(f"+{sent} is not possible", where=_WHERE, allowed="--engine fsdp2")
        if asked.stages > len(names):
            problem = f"{asked} has {asked.stages} stages, and the model {len(names)} units"
            raise InputError(problem, where=_WHERE, allowed="at least one unit in each stage")
        if asked.units and sum(asked.units) != len(names):
            problem = f"{asked} names {sum(asked.units)} units, and the model has {len(names)}"
            raise InputError(problem, where="--mesh", allowed="each unit of the model in one stage")
        self.restrict_space()
        self._tried = self._pieces()
        contained = self._contained(names)
        counts = asked.units or self._balanced(names, asked.stages)
        self.pipeline = replace(asked, units=counts)
        self._stages = ModelStages(self.model, names, counts, where=_WHERE)
        self._is_apart = self._checked(self._stages.require_chain)
        self._expect()
        self._build()
        shared, own = self._stages.shared(contained), range(self.rank, asked.stages, self.world)
        is_trained = [one.requires_grad for one in self.model.parameters()]
        self._stages.keep(own, shared)
        self._trained = list(itertools.compress(self.model.parameters(), is_trained))
        self._leave_out_absent()
        everywhere = set(map(id, shared))
        self._shared = [place for place, one in enumerate(self._trained) if id(one) in everywhere]
        self._own_units = {name for stage in own for name in self._stages.parts[stage]}
        self._leave_out_k()
        self.plan = self.space.baseline()
        self._forward_group, self._backward_group = distributed.new_group(), distributed.new_group()

    def _leave_out_k(self) -> None:
        """Leave out numbers of micro-batches that cannot be interleaved."""
        possible = []
        for k in self.space.accumulation_choices:
            try:
                passes_of(self.pipeline, 0, k)
                possible.append(k)
            except ValueError:
                continue
        if not possible:
            problem = f"no k of {self.space.accumulation_choices} can be interleaved on {self.world} ranks"
            raise InputError(problem, where=_WHERE, allowed=f"an accumulation choice that {self.world} divides")
        self.space = replace(self.space, accumulation_choices=tuple(possible))

    def _contained(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the units whose parameters nothing else uses; each must be called once, in their order."""
        with torch.no_grad():
            use = self._checked(lambda compute: weight_use(self.model, names, compute, where=_WHERE))
        if list(use.calls) != list(names):
            called = ", ".join(use.calls[:8])
            problem = f"the loss calls the units {called}{', ...' if len(use.calls) > 8 else ''}"
            allowed = f"a model that calls each of its {len(names)} units once, in their order"
            raise JobError(problem, where=_WHERE, allowed=allowed)
        return use.contained

    def _balanced(self, names: Sequence[str], stages: int) -> tuple[int, ...]:
        """Return the numbers of units that balance the stages by counted operations, the same in each run."""
        counts, first, last = self._checked(lambda compute: unit_operations(self.model, names, compute))
        # Units without products take time, too.
        least = max(sum(counts), 1.0) / (100 * len(counts))
        return balanced([count + least for count in counts], stages, first=first, last=last)

    def _pieces(self) -> list[Any]:
        """Return three micro-batches whose loss is finite, of as many batches, at the largest k.

        Raises:
            JobError: if no batch has one.
        """
        k = self.space.accumulation_choices[-1] if self.job.batching == "fixed" else 1
        found: list[Any] = []
        for number in range(_BATCHES):
            if number == len(self._pending):
                self._pending.append(ask(self.job, "batches", self._stream.take))
            batch = self._pending[number]
            pieces = cutting.Cutting.of(self.job).pieces(batch, k) if k > 1 else [batch]
            # Of a batch that is always the same, others are taken.
            usable = filter(self._is_usable, pieces[number % len(pieces) :])
            found += itertools.islice(usable, 1)
            if len(found) == _PIECES:
                return found
        if not found:
            problem = f"the loss of the first {_BATCHES} batches is not finite, so that stages cannot be tried"
            raise JobError(problem, where=_WHERE, allowed="a loss that is finite at the first weights")
        return [*found, *[found[-1]] * (_PIECES - len(found))]

    def _is_usable(self, piece: Any) -> bool:
        if not cutting.count_items(piece, self.job.count):
            return False
        with self._unchanged(), torch.no_grad():
            return math.isfinite(float(self._loss(piece)))

    def _checked(self, act: Callable[[Callable[[], torch.Tensor]], _Value]) -> _Value:
        """Return what a function of the loss of a micro-batch returns; dropout is off, and nothing changes."""
        with self._unchanged():
            return act(functools.partial(self._loss, self._tried[0]))

    def _loss(self, piece: Any) -> torch.Tensor:
        found: torch.Tensor = ask(self.job, "loss", functools.partial(self.job.loss, self.model, piece))
        return found

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Turn dropout off during the body, and restore the model's state.

        Raises:
            JobError: if the body draws random numbers, which ranks would draw apart.
        """
        buffers, turn_on = copy_buffers(self.model), dropout_off.turn_off(self.model)
        try:
            with randomness.isolated():
                before = randomness.capture()
                yield
                is_random = randomness.drawn(before)
        finally:
            turn_on()
            write_buffers(self.model, buffers)
            self.model.zero_grad(set_to_none=True)
        if is_random:
            problem = "the model draws random numbers in training, other than dropout, which ranks would draw apart"
            raise JobError(problem, where=_WHERE, allowed="a model without them, or --engine torch or fsdp2")

    # The whole model's loss, gradient and buffers before ranks part, and what they are in a step of all ranks.

    def _expect(self) -> None:
        """Compute what a step on two micro-batches must give; a third one leaves on modules what is wrong for both."""
        controls.apply(self.model, self.plan)
        before = copy_buffers(self.model)
        with self._unchanged():
            losses = []
            for piece in self._tried[:-1]:
                loss = self._loss(piece) / 2
                if loss.requires_grad:
                    loss.backward()
                losses.append(float(loss.detach()))
            gradients = {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}
            self._expected = math.fsum(losses), gradients, before, copy_buffers(self.model)
        with self._unchanged(), torch.no_grad():
            self._loss(self._tried[-1])
        controls.apply(self.model, Plan())

    def _require_exact(self) -> None:
        """Refuse a model whose step on all ranks is another one than at once."""
        loss, gradients, before, after = self._expected
        first, second, _ = self._tried
        missing = -2 % self.world if self.pipeline.stages > self.world else 0
        here = [(first, 0.5), (second, 0.5), *((first, 0.0),) * missing]
        floor = floor_of(gradients.values())
        problem, absent = None, set(map(id, self.absent))
        with self._unchanged():
            self._bearing = [weight > 0 for _, weight in here]
            self.update.begin(len(here))
            found = self.total(self.passes(cutting.Shares(here=tuple(here), items=1, samples=(), weights=()), None))
            self.update.unscale()
            for name, one in self.model.named_parameters():
                if id(one) not in absent and not is_close(one.grad, gradients.get(name), floor):
                    problem = problem or f"the gradient of {name} is another one in stages than at once"
            now = {name: one for name, one in self.model.named_buffers() if name in after}
            same = {name for name, one in now.items() if _same_change(before[name], after[name], one)}
        self.update.discard()
        if not math.isclose(found, loss, rel_tol=rounding_of(self.model), abs_tol=1e-6):
            problem = problem or f"its loss is {found:.6g} in stages and {loss:.6g} at once"
        told = of_all_ranks((problem, sorted(same)))
        problem = next((one for one, _ in told if one is not None), None)
        if problem is not None:
            raise self._stages.refusal(problem)
        self._buffers_of = self._owners([set(names) for _, names in told])

    def _owners(self, same: Sequence[set[str]]) -> dict[str, int]:
        """Return the rank that has the right values of each buffer that belongs to no unit, unless all have them."""
        found, units = {}, tuple(f"{unit.name}." for unit in self.space.units)
        for name, _ in self.model.named_buffers():
            ranks = [rank for rank, one in enumerate(same) if name in one]
            if len(ranks) == self.world or (ranks and name.startswith(units)):
                continue
            if not ranks:
                raise self._stages.refusal(f"buffer {name} has other values in stages than at once")
            found[name] = ranks[-1]
        return found

    def built(self) -> torch.optim.Optimizer:
        """Return the job's optimizer, made for all parameters, over those of this rank."""
        return self._optimizer

    def _build(self) -> None:
        """Make the job's optimizer while all parameters are here: it may tell them apart by their places."""
        trained = [one for one in self.model.parameters() if one.requires_grad]
        require_updated_apart(trained, self.job.optimizer, where=_WHERE)
        self._optimizer = TorchEngine.built(self)

    def _leave_out_absent(self) -> None:
        """Leave out the optimizer's parameters that are on other ranks."""
        absent = set(map(id, self.absent))
        for group in self._optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in absent]
        for parameter in [one for one in self._optimizer.state if id(one) in absent]:
            del self._optimizer.state[parameter]

    def prepared(self, optimizer: torch.optim.Optimizer) -> stepping.Update:
        """Return the update of the job's optimizer over this rank's parameters."""
        return PipelineUpdate(
            optimizer,
            self._trained,
            self._shared,
            absent=self.absent,
            clip_norm=self.job.clip_norm,
            device_type=self.device.type,
            keeps_gradients=self._is_apart,
        )

    def here(self, plan: Plan) -> Plan:
        """Return the part of a plan that concerns this rank's units."""
        return plan.changed(
            precision={name: one for name, one in plan.precision.items() if name in self._own_units},
            storage={name: one for name, one in plan.storage.items() if name in self._own_units},
        )

    # ---------------------------------------------------------------------------------------------------------- steps

    def shares(self, pieces: Sequence[Any]) -> cutting.Shares:
        """Return all micro-batches of a step: each goes through all ranks.

        Where some have no loss-bearing items, and the others cannot be interleaved, one is repeated at weight 0.
        """
        found = TorchEngine.shares(self, pieces)
        missing = -len(found.here) % self.world if self.pipeline.stages > self.world else 0
        self._bearing = [True] * len(found.here) + [False] * missing
        return replace(found, here=found.here + ((found.here[0][0], 0.0),) * missing) if missing else found

    def passes(self, shares: cutting.Shares, probe: GradientProbe | None) -> list[torch.Tensor]:
        """Run this rank's passes in the order of the schedule; only the last stage has losses."""
        pieces, update = [piece for piece, _ in shares.here], self.ranked
        assert isinstance(update, PipelineUpdate)
        ends: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        losses: list[torch.Tensor] = []
        forward, backward = dict[tuple[int, int], list[_Sent]](), dict[Pass, _Sent]()
        waiting = dict[tuple[int, int], Callable[[], None]]()
        # In a sampled step, each micro-batch's whole gradient is there before the next one's.
        early = self._recomputed() if probe is None else None
        last = self.pipeline.stages - 1
        layout = self.pipeline, self.rank, len(pieces)
        for one, late in zip(passes_of(*layout), unread(*layout), strict=True):
            key = one.stage, one.micro
            self._settle([backward.pop(own) for own in list(backward) if own not in late])
            if not one.backward:
                ends[key], shapes = self._forward(one, pieces[one.micro])
                if one.stage < last:
                    forward[key] = self._send_forward(one.stage, ends[key][1], shapes)
                continue
            if one.late:
                waiting.pop(key)()
                continue
            if probe is not None:
                probe.next_micro_batch()
            received, end = self._end(one, *ends.pop(key), shares.here[one.micro][1], forward.pop(key, ()))
            losses += [end.detach()] if end is not None and one.stage == last else []
            waiting[key] = update.begin_backward(end, received, early)
            del end
            if received is not None and received.requires_grad:
                backward[one] = self._send_backward(one.stage, received)
            del received
        self._settle([*itertools.chain.from_iterable(forward.values()), *backward.values()])
        for name, owner in self._buffers_of.items():
            distributed.broadcast(self.model.get_buffer(name), src=owner)
        return losses

    def _end(
        self, one: Pass, received: torch.Tensor | None, result: torch.Tensor, weight: float, sent: Sequence[_Sent]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what the stage was handed, and the number from which its backward pass begins, if there is one.

        Args:
            one: the pass.
            received: what the stage was handed.
            result: what it has computed, which nothing else refers to.
            weight: the micro-batch's share of the step's items.
            sent: the result as it was sent.
        """
        if one.stage == self.pipeline.stages - 1:
            return received, result * weight
        end = None
        if result.requires_grad:
            end = end_of_stage(result, [self._receive_backward(one.stage, result)])
        # The next stage has it, so that its memory is free for the backward pass.
        self._settle(sent)
        return received, end

    def _recomputed(self) -> list[nn.Parameter] | None:
        """Return the parameters of units that do not save; ``None`` if backward passes are not in two parts."""
        if not self.pipeline.splits(self.rank):
            return None
        names = [name for name in self._own_units if self.plan.storage_of(name) is not Storage.SAVE]
        return [one for name in names for one in self.model.get_submodule(name).parameters()]

    def _forward(self, one: Pass, piece: Any) -> tuple[tuple[torch.Tensor | None, torch.Tensor], Shapes]:
        """Run a forward pass; return what the stage was handed and its result, and the shapes of its units' results."""
        received, shapes = self._receive_forward(one.stage)
        run = StageRun(one.stage, received, shapes)
        # A micro-batch that is repeated at weight 0 leaves nothing behind.
        buffers = None if self._bearing[one.micro] else copy_buffers(self.model)
        result = self._stages.forward(run, functools.partial(self.job.loss, self.called, piece))
        if buffers is not None:
            write_buffers(self.model, buffers)
        return (received, result), run.shapes

    def _receive_forward(self, stage: int) -> tuple[torch.Tensor | None, Shapes]:
        """Return what a stage is handed, and the shapes of what the units before it have returned."""
        if stage == 0:
            return None, {}
        head = torch.empty(2, dtype=torch.int64, device=self.device)
        self._receive(head, stage)
        number, size = head.tolist()
        if size:
            told = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._receive(told, stage)
            # From another rank of this run.
            self._known[stage, number] = pickle.loads(bytes(told.tolist()))  # noqa: S301
        like, trained, shapes = self._known[stage, number]
        received = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        self._receive(received, stage)
        return received.requires_grad_(trained), dict(shapes)

    def _receive(self, into: torch.Tensor, stage: int) -> None:
        before = (stage - 1) % self.world
        self._wait(lambda: distributed.recv(into, src=before, group=self._forward_group, tag=stage))

    def _send_forward(self, stage: int, result: torch.Tensor, shapes: Shapes) -> list[_Sent]:
        """Send what a stage has computed, after its description, or the number of one that was sent before."""
        told = pickle.dumps((shape_of(result), result.requires_grad, dict(shapes)))
        number = int.from_bytes(hashlib.sha256(told).digest()[:7], "big")
        is_new = (stage, number) not in self._told
        self._told.add((stage, number))
        head = torch.tensor([number, len(told) if is_new else 0], dtype=torch.int64, device=self.device)
        parts = [head, *([torch.tensor(list(told), dtype=torch.uint8, device=self.device)] if is_new else [])]
        after = (stage + 1) % self.world
        return [
            (part, distributed.isend(part, dst=after, group=self._forward_group, tag=stage + 1))
            for part in (*parts, result.detach().contiguous())
        ]

    def _receive_backward(self, stage: int, result: torch.Tensor) -> torch.Tensor:
        """Return the gradient of what a stage has sent."""
        gradient = torch.empty_like(result, memory_format=torch.contiguous_format)
        after = (stage + 1) % self.world
        self._wait(lambda: distributed.recv(gradient, src=after, group=self._backward_group, tag=stage))
        return gradient

    def _send_backward(self, stage: int, received: torch.Tensor) -> _Sent:
        """Send the gradient of what a stage was handed."""
        sent = torch.zeros_like(received) if received.grad is None else received.grad.contiguous()
        before = (stage - 1) % self.world
        return sent, distributed.isend(sent, dst=before, group=self._backward_group, tag=stage - 1)

    def _settle(self, sent: Sequence[_Sent]) -> None:
        for _, work in sent:
            self._wait(work.wait)

    def _wait(self, act: Callable[[], object]) -> None:
        """Wait for another rank, whose stage computes in the meantime."""
        self.clock.enter("synchronisation")
        act()
        self.clock.enter("compute")

    def total(self, losses: Sequence[torch.Tensor]) -> float:
        """Return the mean loss per item of the whole step, which the last stage knows."""
        known = torch.tensor([0.0, len(losses)], device=self.device)
        if losses:
            known[0] = torch.stack([loss.float() for loss in losses]).sum()
        distributed.all_reduce(known)
        total, count = known.tolist()
        return total if count else math.nan

    def probe(self) -> GradientProbe:
        """Return the probe that observes a sampled step's gradients on all ranks."""
        order = passes_of(self.pipeline, self.rank, len(self._bearing))
        return PipelineProbe(
            self.ranked, self._trained, [one.micro for one in order if one.backward and not one.late], self._bearing
        )

    def evaluate(self) -> float:
        """Return the job's metric in the user's own precision: each unit is computed on its own rank."""
        with self._stages.exchanging(self._exchange):
            return super().evaluate()

    def _exchange(self, stage: int, output: Any) -> Any:
        """Return a unit's output on all ranks."""
        owner = stage % self.world
        own = owner == self.rank
        told = [map_tensors(shape_of, output) if own else None]
        distributed.broadcast_object_list(told, src=owner)
        if not own:
            output = map_tensors(lambda one: torch.empty_like(one, device=self.device), told[0])
        for leaf in tensors(output):
            shared = leaf.contiguous()
            distributed.broadcast(shared, src=owner)
            if shared is not leaf and not own:
                leaf.copy_(shared)
        return output


def _same_change(before: torch.Tensor, after: torch.Tensor, now: torch.Tensor) -> bool:
    """Return whether a buffer has changed as it should, but for rounding."""
    if now.shape != after.shape or before.shape != after.shape:
        return False
    one, two, base = (part.detach().double().nan_to_num() for part in (now, after, before))
    change = torch.linalg.vector_norm(two - base)
    return bool(torch.linalg.vector_norm(one - two) <= _CHANGE * change)
