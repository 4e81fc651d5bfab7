"""Retries of a Trainer's step that ran out of memory, with its batch cut into more micro-batches.

The result is as if the batch had been cut that way from the beginning. With several ranks, all must enter the same
collectives. So a step that is unlike earlier ones is *rehearsed*: each rank runs it alone, and the gradients are
averaged once memory has sufficed on all ranks. In other steps of several ranks, the error ends the run as it would
without the tuner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import first_line
from autotune.live.tuner import LiveTuner
from autotune.mechanics import devices, randomness
from autotune.mechanics.buffers import copy_buffers, drop_constants, write_buffers
from autotune.mechanics.trees import tensors
from autotune.plan import Plan
from autotune.profiling.step_signature import Signature, Trained, contents_of, signature_of

Pass = Callable[[Any], torch.Tensor]


class Retry:
    """Runs the micro-batches of each step, and runs a step again if memory ran out in it.

    Generators, buffers and gradients are restored before a retry. Attributes that a loss or a model writes are not.

    Args:
        tuner: the tuner, which cuts the batches.
        model: the model as the Trainer calls it.
        optimizer: the model's optimizer.
        rehearses: whether several ranks rehearse steps, which only helps if k may be raised.
    """

    def __init__(
        self, tuner: LiveTuner, model: nn.Module, optimizer: torch.optim.Optimizer, *, rehearses: bool
    ) -> None:
        self._tuner = tuner
        self._model = model
        spread = isinstance(model, DistributedDataParallel) and dist.get_world_size(model.process_group) > 1
        self._ranks = _Ranks(tuner, model, optimizer) if spread and rehearses else None
        # Message of the last out-of-memory error.
        self._ran_out: str | None = None

    def run(self, batch: Any, run_one: Pass) -> torch.Tensor:
        """Run a step's micro-batches, forward and backward; return the step's loss.

        Args:
            batch: the step's batch.
            run_one: runs one micro-batch and returns its share of the step's loss.

        Raises:
            Exception: any exception of a micro-batch; an out-of-memory error only if the step cannot be retried.
        """
        again = False
        while True:
            attempt = _Attempt(self._tuner, self._model, batch, self._ranks, again=again)
            attempt.run(run_one, self._refuse_wrong_cuts)
            k, reason = attempt.settle()
            if k is None:
                assert attempt.loss is not None
                return attempt.loss
            # Outside of any except block, because its traceback would keep the attempt's tensors alive.
            self._tuner.raise_k(k, reason)
            devices.release(devices.device_of(self._model))
            attempt.start.restore()
            self._ran_out, again = reason, True

    def _refuse_wrong_cuts(self) -> None:
        """Raise if a batch did not fit and trial passes show that it must not be cut."""
        why = self._tuner.locks.get("accumulation_steps")
        if self._ran_out is not None and why is not None:
            raise torch.OutOfMemoryError(f"{self._ran_out} The batch may not be cut: {why}")


class _Attempt:
    """One run of a step's micro-batches.

    Attributes:
        start: the state at the beginning of the step.
        loss: the step's loss, once it has run.

    Args:
        tuner: the tuner, which cuts the batch.
        model: the model as the Trainer calls it.
        batch: the step's batch.
        ranks: this rank among several; ``None`` for a single rank.
        again: whether memory ran out for the same batch before.
    """

    def __init__(self, tuner: LiveTuner, model: nn.Module, batch: Any, ranks: _Ranks | None, *, again: bool) -> None:
        self._tuner, self._model, self._batch, self._again = tuner, model, batch, again
        self.start = _Start(model, batch)
        self._ranks = ranks
        self._rehearsed: _Ranks | None = None
        self._error: Exception | None = None
        self.loss: torch.Tensor | None = None

    def run(self, run_one: Pass, check: Callable[[], None]) -> None:
        """Run the micro-batches; keep an out-of-memory error if the step can be retried or other ranks must know.

        Args:
            run_one: runs one micro-batch.
            check: called before the first micro-batch.
        """
        pieces: Any = self._tuner.micro_batches(self._batch)
        losses: list[torch.Tensor] = []
        try:
            # Closed explicitly: an exception's traceback would keep the generator open until a later step.
            with closing(pieces):
                for piece in pieces:
                    if self._ranks is None and self._larger_k() is not None:
                        self.start.copy()
                    if self._tuner.probing:
                        self._run_beside(piece, run_one)
                        continue
                    if not losses:
                        check()
                        self._begin()
                    with nullcontext() if self._rehearsed is None else alone(self._model):
                        losses.append(run_one(piece))
            self.loss = torch.stack(losses).sum()
        except Exception as error:
            recovers = self._rehearsed is not None or (self._ranks is None and self._larger_k() is not None)
            if not recovers or not devices.is_out_of_memory(error):
                raise
            self._error = error

    def settle(self) -> tuple[int | None, str]:
        """Return the k to retry the step with, and the reason; ``None`` if no retry is needed.

        Raises:
            Exception: the attempt's error, if the batch cannot be cut further.
        """
        error, self._error = self._error, None
        reason = "another rank ran out of memory." if error is None else first_line(error)
        k = 0.0 if error is None else self._larger_k() or math.inf
        if self._rehearsed is not None:
            k = self._rehearsed.settle(k)
        if k == math.inf:
            raise error or torch.OutOfMemoryError(f"{reason} The batch can be cut no further")
        if k > 0.0:
            return int(k), reason
        self.start.keep()
        return None, ""

    def _larger_k(self) -> int | None:
        return self._tuner.larger_k if self.start.is_clean else None

    def _begin(self) -> None:
        """Agree with the other ranks, if any, on a rehearsal, and copy the state at its beginning."""
        ranks = self._ranks
        if ranks is not None and (self._again or ranks.rehearses(self._batch)):
            ranks.share_buffers()
            self._rehearsed = ranks
            self.start.copy()

    def _run_beside(self, piece: Any, run_one: Pass) -> None:
        try:
            run_one(piece)
        except Exception as error:
            if self._ranks is None and devices.is_out_of_memory(error) and self._larger_k() is not None:
                raise
            # If the caller's code causes the error, the real pass of the step raises it again.
            self._tuner.failed_beside(error)


class _Start:
    """The state at the beginning of a step: generators, buffers, and the versions of the batch's tensors.

    Args:
        model: the model.
        batch: the step's batch.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._model = model
        self._random: randomness.RandomState | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._leaves = [leaf for leaf in tensors(batch) if not leaf.is_inference()]
        self._versions = [leaf._version for leaf in self._leaves]
        # Gradients that other code has made cannot be restored.
        self._is_bare = all(parameter.grad is None for parameter in model.parameters())

    def copy(self) -> None:
        """Copy generators and buffers; this may itself run out of memory."""
        if self._random is None:
            self._buffers = copy_buffers(self._model)
            self._random = randomness.capture()

    @property
    def is_clean(self) -> bool:
        """Whether the step can be run again: its batch is unmodified, and it began without gradients."""
        return self._is_bare and self._versions == [leaf._version for leaf in self._leaves]

    def keep(self) -> None:
        """Note that the step has run, so that buffers found to be constant are not copied again."""
        drop_constants(self._model, self._buffers)

    def restore(self) -> None:
        """Restore generators and buffers."""
        if self._random is not None:
            write_buffers(self._model, self._buffers)
            randomness.restore(self._random)


class _Ranks:
    """One rank of several that train a model in ``DistributedDataParallel``.

    The ranks agree on a rehearsal in the tuner's own process group, which a rank may have left. The rehearsal itself
    uses the run's process group, with the same collectives whether or not the step succeeds.

    Args:
        tuner: the tuner, which cuts the batches.
        model: the model.
        optimizer: the model's optimizer.
    """

    def __init__(self, tuner: LiveTuner, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self._tuner, self._model, self._optimizer = tuner, model, optimizer
        self._world = dist.get_world_size(model.process_group)
        self._trained = Trained(model.module)
        named = model.module.named_parameters()
        ignored = set(model.parameters_to_ignore)
        self._parameters = [one for name, one in named if one.requires_grad and name not in ignored]
        # Allocated in advance, because there is no room for it once memory has run out.
        self._largest = torch.zeros(1, device=devices.device_of(model))
        # For each plan, the steps that were rehearsed under it.
        self._known: dict[Plan, list[Signature]] = {}

    def rehearses(self, batch: Any) -> bool:
        """Return whether to rehearse the next step: on some rank it is unlike earlier steps.

        Args:
            batch: the step's batch.
        """
        if self._model.static_graph:
            # DDP learns the graph from the hooks of the first step, which a rehearsal would also run.
            return False
        plan = self._tuner.plan
        # The signature includes the optimizer's state, which the first update allocates.
        signature = signature_of(contents_of(batch).shapes, self._trained, self._optimizer, 1)
        known = self._known.setdefault(plan, [])
        is_new = not any(former.covers(signature) for former in known)
        found = self._tuner.largest([float(is_new)])
        # A rank that could not agree has left, so the second agreement fails.
        if not found or not found[0] or self._tuner.largest([1.0]) is None:
            return False
        self._known[plan] = [*(former for former in known if not signature.covers(former)), signature]
        return True

    def share_buffers(self) -> None:
        """Copy the first rank's buffers, as DDP does before the first forward pass of a step."""
        if self._model.will_sync_module_buffers():
            self._model._sync_buffers()
            self._model.require_forward_param_sync = False

    def settle(self, k: float) -> float:
        """Average the gradients over the ranks, if memory sufficed on all of them.

        Args:
            k: 0 if memory sufficed on this rank, else the k to try next; infinite if there is none.

        Returns:
            0 if the gradients were averaged, else the largest ``k`` over the ranks.
        """
        self._largest.fill_(k)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._model.process_group)
        found = float(self._largest)
        if not found:
            self._average()
            self._model.require_forward_param_sync = True
        return found

    def _average(self) -> None:
        if self._model.find_unused_parameters:
            # DDP's reducer has recorded which parameters got gradients. A backward pass through one parameter, times 0,
            # makes it average all gradients and clear its record, as for parameters that a loss does not use.
            used = [parameter for parameter in self._parameters if parameter.grad is not None]
            nothing = min(used, key=torch.numel).sum() * 0.0
            self._model.reducer.prepare_for_backward([nothing])
            nothing.backward()
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= self._world
            dist.all_reduce(parameter.grad, group=self._model.process_group)


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Run the body with no collectives in the passes of a model in ``DistributedDataParallel``."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    former = model.__dict__.get("forward")
    model.__dict__["forward"] = model.module
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if former is not None:
            model.__dict__["forward"] = former
