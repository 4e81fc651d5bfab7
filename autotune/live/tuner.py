"""The object that users call in their training loop: it cuts batches, weights losses and makes updates.

The controller decides on the plans. If the controller fails, the tuner detaches and the run goes on; exceptions of the
user's own code are caught only in trial passes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autotune.cost_model.learning_rate import batch_factor
from autotune.errors import AttachError
from autotune.live.attached import Attached, Step, StepAhead
from autotune.live.batch_pieces import Pieces, counted, cut, cutting_of, nothing_to_learn, samples_or_one
from autotune.live.controller import Controller
from autotune.live.kill_switches import reason_to_stop
from autotune.live.limits import Mode, Stage
from autotune.live.run_figures import RunFigures
from autotune.live.running_step import RunningStep
from autotune.live.step_times import StepTimes
from autotune.mechanics import controls, devices
from autotune.mechanics.cutting import Count, Cutting, SampleCost, Trim, WholeTensors
from autotune.mechanics.loop_signals import any_error, errors_ignored
from autotune.mechanics.step_trace import Phase
from autotune.mechanics.stepping import Update
from autotune.plan import Plan
from autotune.profiling.step_signature import Trained, contents_of, signature_of
from autotune.profiling.trial_passes import Attempt, Outcome
from autotune.profiling.trial_state import Writes

logger = logging.getLogger(__name__)

_GRADIENT = operator.attrgetter("grad")
# After this many steps in a row that begin with gradients of the loop's own, these seem to be there always.
_KEPT = 3
# After this many batches in a row whose gradients are gone before a step, another optimizer seems to make updates. A
# loop may skip some batches, for example for a loss that is not finite.
_UNSTEPPED = 8


class LiveTuner:
    """Tuner of a run that trains in the caller's own loop; made by :func:`autotune.attach`.

    Use it as a context manager, or call :meth:`detach` at the end::

        for batch in loader:
            for micro in tuner.micro_batches(batch):
                tuner.backward(loss_of(model, micro))
            tuner.step()

    Attributes:
        attached: whether plans may still be switched.
        detached_because: why the tuner has detached; ``None`` while it is attached.
        folder: the run directory; ``None`` for none.

    Args:
        facts: the run, and how the tuner was attached to it.
        model: the model as the user calls it.
        update: makes the optimizer's updates.
        controller: the controller; ``None`` if a kill switch was set from the beginning.
        stop_file: a file whose appearance detaches the tuner; ``None`` for none.
        folder: the run directory; ``None`` for none.
        on_detach: called once the tuner has detached.
    """

    def __init__(
        self,
        facts: Attached,
        model: nn.Module,
        update: Update,
        controller: Controller | None,
        *,
        stop_file: str | None,
        folder: Path | None,
        on_detach: Callable[[], None],
    ) -> None:
        self._facts = facts
        self._model = model
        self._update = update
        self._controller = controller
        # Once the controller is closed, these are no longer taken.
        self._times = StepTimes.none() if controller is None else controller.run.times
        self._stop_file = stop_file
        self._on_detach = on_detach
        self.folder = folder
        self.attached = controller is not None
        self.detached_because: str | None = None if controller is not None else "a kill switch was set"
        self._parallel = isinstance(model, nn.parallel.DistributedDataParallel)
        self._running: RunningStep | None = None
        self._found_locks: dict[str, str] = {}
        self._last: dict[str, Any] = _idle_figures(facts) if controller is None else controller.summary()
        self._weight = 1.0
        self._largest_bytes = 0
        # The outcome of the current trial pass; ``None`` in the step itself.
        self._beside: Attempt | None = None
        # The gradients that parameters had before the running trial passes; ``None`` beside none.
        self._parked: list[tuple[nn.Parameter, torch.Tensor | None]] | None = None
        # What the model writes to itself; ``None`` before the first step, and in mode ``exact``.
        self._writes: Writes | None = None
        self._is_first = True
        # Until the model is seen to draw random numbers, apart from dropout.
        self._tries_in_training = True
        self._trained = Trained(facts.model)
        # Steps in a row that began with gradients of the loop's own.
        self._num_kept = 0
        # Batches in a row whose gradients were gone before a step.
        self._num_unstepped = 0
        self._told_of_optimizer = False
        self._whole_tensors = WholeTensors()

    # Called by the user's loop.

    def micro_batches(
        self,
        batch: Any,
        count: Count | None = None,
        *,
        split: str = "samples",
        sample_cost: SampleCost | None = None,
        trim: Trim | None = None,
    ) -> Iterator[Any]:
        """Yield the batch in the pieces that the plan requires; run forward and :meth:`backward` for each.

        Args:
            batch: any tree of tensors with samples in dimension 0; leaves without samples are passed on whole.
            count: counts a piece's loss-bearing items; ``None`` counts samples. Needed if k may be larger than 1 and
                the loss is not a mean over samples.
            split: ``samples`` cuts consecutive samples, as many in each piece; ``tokens`` cuts pieces of about equal
                cost, of samples in another order. A batch that stays whole is the same in both.
            sample_cost: ``(batch) -> one number >= 0 per sample``, by which ``tokens`` balances; ``None`` counts the
                items of each sample.
            trim: ``(piece) -> piece`` without padding that none of its samples needs; ``tokens`` then puts samples of
                like cost together. ``None`` leaves all padding.

        Raises:
            AttachError: if the count is not a whole number, or 0 for the whole batch, or the batch cannot be cut so.
        """
        cutting = cutting_of(count, split, sample_cost, trim)
        try:
            k = self._begin(batch)
            if len(self._facts.space.accumulation_choices) > 1:
                self._whole_tensors.note(batch)
            yield from self._passes_beside(batch, cutting)
            # These passes may have shown that the batch must not be cut.
            k = self.plan.accumulation_steps if k > 1 else k
            running = self._running
            if running is None:
                return
            alone = running.batches == 1
            pieces = self._pieces(batch, k, cutting, running)
            if not self._facts.adaptive:
                # A loop that accumulates batches itself sets their weights: only one call's micro-batches can be
                # compared.
                running.weights, running.micro_samples = [], []
            own = self._facts.accumulation_steps
            self._update.begin(len(pieces) if own == 1 else max(own - running.batches + 1, 1))
            for number, (piece, weight) in enumerate(pieces, 1):
                self._weight = weight
                running.weights.append(weight)
                running.micro_samples.append(running.samples if piece is batch and alone else samples_or_one(piece))
                with self._synchronised(last=number == len(pieces) and self._is_full(running)):
                    self._tell_phase("forward")
                    yield piece
        except BaseException:
            # The caller's body raised or left early, or the batch is invalid: stop watching the step.
            self._safely(lambda controller: controller.abandon_step())
            if self._running is not None:
                self._running.left_early = True
            raise

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a micro-batch's mean loss, weighted by its share of the step.

        It takes the loss itself: a scale of your own, such as a ``GradScaler``'s, scales the gradient and the update.

        Raises:
            AttachError: outside of :meth:`micro_batches`, or if the loss is not one number that requires grad.
        """
        running = self._running
        if running is None:
            raise AttachError(
                "backward() was called outside of micro_batches()",
                where="live tuner",
                allowed="for micro in tuner.micro_batches(batch): tuner.backward(loss_of(micro))",
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise AttachError(
                f"backward() was given {_described(loss)}",
                where="live tuner",
                allowed="a tensor of one number that requires grad; no loss scale of your own is needed or allowed",
            )
        if self._beside is not None and self._controller is None:
            # The loop has detached the tuner in a trial pass, which is undone.
            return
        loss = loss.reshape(())
        self._tell_phase("backward")
        try:
            self._update.backward(loss, self._weight)
        except any_error() as error:
            if self._beside is None:
                raise
            self.failed_beside(error)
        self.accumulated(loss.detach() * self._weight)

    def unscale(self) -> float:
        """Unscale the accumulated gradients, for clipping or logging of your own; return their 2-norm."""
        running = self._running
        if running is None:
            return self._update.unscale()
        if running.norm is None:
            self._update.average(running.average)
            running.norm = self._update.unscale()
        return running.norm

    def step(self) -> bool:
        """Clip, update and clear the gradients; then decide about the next steps.

        Returns:
            Whether the optimizer stepped: not if the gradient is not finite, and under adaptive batching only after the
            step's last batch.

        Raises:
            AttachError: if :meth:`backward` was not called before it.
        """
        running = self._running
        if running is None or not running.pending:
            raise AttachError(
                "step() was called without a backward() since the last one",
                where="live tuner",
                allowed="micro_batches(), backward() for each of them, then step()",
            )
        if not self._is_full(running):
            running.left = time.perf_counter()
            return False
        self._tell_time("update")
        norm = self.unscale()
        self._num_unstepped = 0
        if norm == 0.0:
            self._look_at_gradients()
        if self._controller is not None and self._controller.sampling:
            scales = [weight * self._update.loss_scale for weight in running.weights]
            self._safely(lambda controller: controller.before_update(norm, running.micro_samples, scales))
        self._update.clip(norm)
        with self._update.learning_rate_times(self._rate_factor(running)):
            stepped = self._update.finish(norm)
        self._end(running, norm, stepped)
        return stepped

    @property
    def probing(self) -> bool:
        """Return whether the loop's body runs for a trial pass, whose loss must not be logged."""
        return self._beside is not None

    @property
    def learning(self) -> bool:
        """Return whether the running step, or the last one, is used to profile the run."""
        return self._controller is not None and self._controller.run.time.learns

    def detach(self, reason: str = "detach() was called") -> None:
        """Leave the run as it was found: effective at once, or at the end of the step that is running."""
        if self._controller is None:
            self._on_detach()
            return
        controller, self._controller = self._controller, None
        self.attached, self.detached_because = False, reason
        figures: dict[str, Any] = {}
        with contextlib.ExitStack() as left:
            # All of these are done even if a signal arrives meanwhile, from the last to the first.
            left.callback(self._on_detach)
            left.callback(controller.run.ranks.close)
            left.callback(controller.run.log.close)
            left.callback(controls.remove, self._facts.model)
            with errors_ignored():
                # These may fail if the controller is broken.
                self._found_locks, figures = controller.run.locks, controller.summary()
                self._last = figures
            with errors_ignored():
                self._leave_trial()
            with errors_ignored():
                controller.close()
            controls.remove(self._facts.model)
            controller.run.log.write("detached", controller.run.step, reason=reason, locks=self._found_locks, **figures)

    def when_detached(self, call: Callable[[], None]) -> None:
        """Call a function when this tuner is detached, besides what happens then anyway."""
        former = self._on_detach

        def both() -> None:
            former()
            call()

        self._on_detach = both

    def __enter__(self) -> LiveTuner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach("the with block ended" if kind is None else f"{kind.__name__} ended the with block")

    # Read by the user.

    @property
    def plan(self) -> Plan:
        """Return the plan that is applied; the baseline once detached."""
        return self._facts.space.baseline() if self._controller is None else self._controller.run.plan

    @property
    def recomputable(self) -> tuple[str, ...]:
        """Return the names of the units that it may recompute, unless they come to be locked; none if it observes."""
        return self._facts.space.recomputable if self._facts.stage is Stage.ACT else ()

    @property
    def locks(self) -> dict[str, str]:
        """Return the reasons for locks by name, such as ``accumulation_steps``, ``precision`` or a unit's name.

        After memory ran out, the name is ``accumulation_steps < 2`` (or a larger number).
        """
        return {**self._facts.locks, **(self._found_locks if self._controller is None else self._controller.run.locks)}

    @property
    def status(self) -> dict[str, Any]:
        """Return figures of the run until now, or until the tuner detached: steps, plan, switches, trips, ..."""
        if self._controller is None:
            return {**self._last, "attached": False, "detached_because": self.detached_because}
        return {**self._controller.summary(), "attached": True, "detached_because": None}

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the events of the decision log so far; none once detached."""
        return [] if self._controller is None else list(self._controller.run.log.events)

    # For frameworks that run forward, backward and update themselves.

    def begin_step(self, batch: Any) -> None:
        """Begin a step of the caller's own loop; call it before any forward pass, with no graph alive.

        Args:
            batch: its first micro-batch: any tree of tensors with samples in dimension 0; one without samples counts as
                one sample.
        """
        if self._facts.learns_accumulation and self._controller is not None:
            self._controller.run.profiler.learns_accumulation = self._facts.accumulation_steps == 1
        self._begin(batch, bounded=True)

    def recompute_outside_steps(self) -> None:
        """Recompute all that may be in passes of the model until the next step begins, unless the budget is ample."""
        if self._running is None:
            self._safely(lambda controller: controller.run.recompute_outside_steps())

    def next_micro_batch(self, batch: Any) -> None:
        """Begin another micro-batch of the step; nothing is switched before it.

        Args:
            batch: the micro-batch, as for :meth:`begin_step`.
        """
        if self._running is not None:
            self._times.come_back()
            self._running.add(batch)

    def passes_beside(self, batch: Any, count: Count | None = None) -> Iterator[Any]:
        """Yield the pieces of a step's first batch under each plan to try; :meth:`micro_batches` does this itself.

        Run forward and :meth:`backward` for each piece, before the step's own passes; the effects are undone. Most
        steps have no plan to try.

        Args:
            batch: as for :meth:`micro_batches`.
            count: as for :meth:`micro_batches`.
        """
        yield from self._passes_beside(batch, Cutting(count=count))

    def _passes_beside(self, batch: Any, cutting: Cutting) -> Iterator[Any]:
        controller, running = self._controller, self._running
        if controller is None or running is None or running.batches > 1:
            # Further batches of a step do not answer anew what its first one was asked.
            return
        self._is_first = self._writes is None
        if self._writes is None and self._facts.mode is not Mode.EXACT:
            self._safely(lambda _: self._watch_writes())
        if not controller.shadows:
            return
        if any(isinstance(leaf, Iterator) for leaf in tree_leaves(batch)):
            self._safely(lambda controller: controller.lock_shadows("a batch of the run can be read only once"))
            return
        began = time.perf_counter()
        self._times.control()
        outcomes: list[Outcome] = []
        copied, again, is_left = 0, False, False
        # Parameters of another optimizer may have gradients.
        parameters = (*self._facts.model.parameters(), *self._update.parameters)
        parked = self._parked = [(parameter, parameter.grad) for parameter in dict.fromkeys(parameters)]
        try:
            for parameter, _ in parked:
                parameter.grad = None
            outcomes, copied, again = yield from self._attempts_in_modes(controller, batch, cutting)
        except GeneratorExit:
            is_left = self._parked is not parked
            if self._beside is not None and self._beside.left:
                self._beside = None
            raise
        finally:
            if not is_left:
                self._parked = parked
                self._end_trial()
                self._beside = None
            spent = time.perf_counter() - began
            running.own_s += spent
            controller.run.time.spend(spent)
            self._times.begun()
        self._safely(lambda controller: controller.take_shadows(outcomes, copied=copied, again=again))

    def _end_trial(self) -> None:
        """Give parameters the gradients back that they had before trial passes."""
        parked, self._parked = self._parked, None
        if parked is not None:
            self._update.discard()
            for parameter, gradient in parked:
                parameter.grad = gradient

    def _leave_trial(self) -> None:
        """Undo trial passes that the loop may have left, by an exception or because it detaches the tuner."""
        if self._beside is not None and not self._beside.left:
            self._beside.leave()
        self._end_trial()

    def _attempts_in_modes(
        self, controller: Controller, batch: Any, cutting: Cutting
    ) -> Generator[Any, None, tuple[list[Outcome], int, bool]]:
        """Yield the pieces of a batch under each plan; in evaluation mode if the model draws numbers in training.

        Returns:
            The outcomes; the bytes of copies beside them; whether the passes should be run again with another batch.
        """
        # Passes under other storages alone draw the same numbers.
        alike = controller.tries_storages
        if alike or self._tries_in_training:
            outcomes, copied, drew, again = yield from self._attempts(controller, batch, cutting, training=True)
            if again or alike or not drew:
                return outcomes, copied, again
            self._tries_in_training = False
        outcomes, copied, _, again = yield from self._attempts(controller, batch, cutting, training=False)
        return outcomes, copied, again

    def _attempts(
        self, controller: Controller, batch: Any, cutting: Cutting, *, training: bool
    ) -> Generator[Any, None, tuple[list[Outcome], int, bool, bool]]:
        """Yield the pieces of a batch under each plan to try.

        Returns:
            The outcomes; the bytes of copies beside them; whether the passes drew random numbers, and whether they
            should be run again with another batch, because memory ran out or no parameter got a gradient, on any rank.
        """
        outcomes, copied, drew, again = [], 0, False, False
        self._look_at_writes(updated=True)
        written = frozenset[str]() if self._writes is None else self._writes.names
        # Batches that the loop accumulates are not cut.
        cuts = self._facts.accumulation_steps == 1 and not self._facts.adaptive
        for plan in controller.shadows:
            if self._controller is None:
                # The loop's body has detached the tuner.
                break
            self._beside = attempt = Attempt(training)
            undone = attempt.undone(self._facts.model, written)
            with controller.trying(plan) as attempt.failures, undone, self._keeping_buffers():
                k = plan.accumulation_steps if cuts else 1
                for piece, weight in cut(batch, k, cutting, self._whole_tensors).weighed:
                    self._weight = weight
                    with self._synchronised(last=False):
                        yield piece
            outcomes.append(attempt.outcome(self._update.parameters))
            copied = max(copied, attempt.copied_bytes)
            drew |= attempt.drew
            again |= any(map(devices.is_out_of_memory, attempt.failures))
            again |= outcomes[-1].is_empty and not attempt.failures
            self._update.discard()
        # All ranks run the same passes.
        drew, again = map(bool, self.largest([drew, again]) or (False, False))
        return outcomes, copied, drew, again

    def _watch_writes(self) -> None:
        self._writes = Writes(self._facts.model)

    def _look_at_writes(self, *, updated: bool) -> None:
        writes = self._writes
        if writes is not None:
            self._safely(lambda _: writes.look(updated=updated))

    def failed_beside(self, error: Exception) -> None:
        """Record that a pass of :meth:`passes_beside` raised: its plan is locked, and the run goes on."""
        if self._beside is not None:
            # Without the frames, which would keep tensors alive.
            self._beside.failures.append(error.with_traceback(None))

    @property
    def larger_k(self) -> int | None:
        """Return the next larger k into which the running step's batch may be cut; ``None`` if there is none."""
        controller, running = self._controller, self._running
        if controller is None or running is None:
            return None
        k = controller.run.plan.accumulation_steps
        return next((one for one in controller.run.ks if one > k), None) if running.samples > k else None

    def raise_k(self, k: int, reason: str) -> None:
        """Discard the running step, in which memory ran out, and cut batches into ``k`` or more pieces from now on.

        The step's gradients are dropped; the caller restores generators and buffers, and runs the batch again.

        Args:
            k: the value of :attr:`larger_k`; over several ranks, the largest one.
            reason: the message of the out-of-memory error.
        """
        self._running = None
        self._update.discard()
        space = self._facts.space
        kept = tuple(one for one in space.accumulation_choices if one >= k) or space.accumulation_choices
        self._facts = replace(self._facts, space=replace(space, accumulation_choices=kept))
        self._safely(lambda controller: controller.raise_k(k, reason))

    def largest(self, values: Sequence[float]) -> list[float] | None:
        """Return each value's maximum over the ranks; ``None`` if they cannot agree and the tuner has detached."""
        found: list[float] = []
        self._safely(lambda controller: found.extend(controller.run.ranks.largest(values)))
        return found or None

    @property
    def weight(self) -> float:
        """Return the current micro-batch's share of its step."""
        return self._weight

    def accumulated(self, loss: torch.Tensor) -> None:
        """Record that the gradient of the current micro-batch has been accumulated.

        Args:
            loss: its share of the step's loss, detached.
        """
        self._tell_phase("update")
        if self._beside is not None:
            self._beside.losses.append(loss)
        elif self._running is not None:
            self._running.losses.append(loss)
            self._running.pending = True
            if self._is_first:
                self._look_at_writes(updated=False)

    def tell_phase(self, name: Phase) -> None:
        """Begin a micro-batch's ``forward`` or ``backward`` pass, or the ``update`` after it."""
        self._tell_phase(name)

    def go_on(self) -> None:
        """Go on with a forward pass after ``tell_phase("backward")``: the loss calls the model once more."""
        self._tell_time("forward")
        if self._controller is not None:
            self._safely(lambda controller: controller.go_on())

    def end_step(
        self, *, losses: Sequence[torch.Tensor] | None = None, norm: float = float("nan"), stepped: bool = True
    ) -> None:
        """End the step, after its update was made and its gradients were cleared.

        Args:
            losses: weighted losses of its micro-batches, detached; ``None`` for those of :meth:`accumulated`.
            norm: 2-norm of its gradient, if it is known.
            stepped: whether the optimizer stepped.
        """
        if self._running is not None:
            if losses is not None:
                self._running.losses = list(losses)
            self._end(self._running, norm, stepped)

    # Internal.

    def _end(self, running: RunningStep, norm: float, stepped: bool) -> None:
        """Report the step to the controller, which decides about the next ones."""
        if self._controller is not None and self._controller.wants_time:
            devices.synchronize(self._facts.device)
        self._largest_bytes = max(self._largest_bytes, running.size)
        average = running.average
        self._times.control()
        ended = time.perf_counter()
        report = Step(
            seconds=ended - running.began - running.own_s - running.away_s,
            samples=running.samples,
            batch_bytes=running.size,
            all_bytes=running.all_bytes,
            later_bytes=running.later,
            losses=tuple(running.losses if average == 1.0 else [loss * average for loss in running.losses]),
            norm=norm,
            stepped=stepped,
            items=running.num_items,
        )
        self._running = None
        if self._is_first and (writes := self._writes) is not None:
            self._safely(lambda controller: controller.note_writes(writes.names))
        self._safely(lambda controller: controller.after_step(report), since=ended)
        if self._controller is not None:
            self._watch_over(self._controller)
        if self._controller is not None:
            self._controller.end_times(report)

    def _begin(self, batch: Any, *, bounded: bool = False) -> int:
        """Begin a step, or continue one whose gradients are still being accumulated; return k.

        Args:
            batch: the step's batch, or its first micro-batch.
            bounded: whether the caller knows that a step begins here, whatever gradients are alive.
        """
        self._leave_trial()
        self._beside = None
        alone = self._facts.accumulation_steps == 1 and not self._facts.adaptive
        if self._running is not None and self._running.pending and not (alone and self._running.left_early):
            # No complete step() in between: gradients are being accumulated, so nothing may be switched.
            self._look_for_updates()
            self._times.come_back()
            self._running.come_back()
            self._running.add(batch)
            return 1
        if self._controller is not None and (batches := self._controller.run.profiler.accumulated):
            self._safely(lambda controller: self._begin_again(controller, batches))
        ended = self._running is None
        if not ended:
            self._safely(lambda controller: controller.abandon_step())
        self._times.begin()
        running = self._running = RunningStep(time.perf_counter())
        running.add(batch)
        stopped = None if self._controller is None else reason_to_stop(self._stop_file)
        if stopped is not None:
            self.detach(stopped)
        if self._controller is not None and self._parallel and _joins(self._model):
            self._leave_join()
        self._look_at_modules()
        if not bounded and self._must_wait(ended=ended):
            self._safely(lambda controller: controller.wait(running.size))
            return 1
        own = self._facts.accumulation_steps
        # The sizes of later micro-batches are not known: the largest so far is assumed.
        several = own > 1 or self._facts.adaptive
        largest = max(running.size, self._largest_bytes) if several else running.size

        def prepare(controller: Controller) -> None:
            contents = running.first or contents_of(batch)
            signature = signature_of(contents.shapes, self._trained, self._facts.optimizer, controller.run.calls.usual)
            cuts = own == 1 and not self._facts.adaptive and not controller.run.ranks.many
            ahead = StepAhead(
                batch_bytes=running.size,
                largest_bytes=largest,
                samples=running.samples,
                cut_samples=running.samples if cuts else 0,
                signature=signature,
            )
            controller.before_step(ahead)

        self._safely(prepare, since=running.began)
        running.own_s = time.perf_counter() - running.began
        if self._controller is not None and self._controller.wants_time and devices.is_accelerator(self._facts.device):
            # Work that is still queued on the device belongs to earlier steps.
            devices.synchronize(self._facts.device)
            running.began, running.own_s = time.perf_counter(), 0.0
        self._times.begun()
        plan = self.plan
        self._update.scaled = plan.needs_loss_scaling
        if self._facts.adaptive:
            running.wanted = plan.accumulation_steps
        return plan.accumulation_steps if own == 1 else 1

    def _begin_again(self, controller: Controller, batches: int) -> None:
        """Learn the run again, whose loop has been seen to accumulate so many batches."""
        space = replace(self._facts.space, accumulation_choices=(batches,))
        self._facts = replace(self._facts, space=space, accumulation_steps=batches)
        logger.info("step %d: steps have %d backward passes through the model", controller.run.step, batches)
        controller.begin_again(self._facts)
        self._times = controller.run.times

    def _must_wait(self, *, ended: bool) -> bool:
        """Return whether gradients of the loop's own are alive, beside which k and precisions may not be switched.

        If they are there in step after step, both are locked, and storage alone is switched.

        Args:
            ended: whether the step before has ended.
        """
        if ended and self._facts.mode is Mode.EXACT:
            return False
        if all(map(operator.is_, map(_GRADIENT, self._update.parameters), itertools.repeat(None))):
            if self._num_kept < _KEPT:
                self._num_kept = 0
            return False
        if not ended or self._facts.adaptive or self._controller is None or self._controller.run.ranks.many:
            return True
        self._num_kept += 1
        if self._num_kept == _KEPT:
            reason = "gradients of the loop's own are there when its steps begin"
            self._safely(lambda controller: controller.lock_rounding(reason))
        return self._num_kept < _KEPT

    def _look_at_modules(self) -> None:
        """Detach if modules of the model were replaced, removed or added."""
        change = None if self._controller is None else self._controller.run.switcher.change()
        if change is None:
            return
        reason = f"{change} during the run, which the plans do not cover"
        logger.warning(
            "autotune detached itself: %s; the run goes on by itself, without a memory budget: detach() before such a "
            "change, and attach() again after it",
            reason,
        )
        self.detach(reason)

    def _look_at_gradients(self) -> None:
        """Warn once if the optimizer's parameters have no gradients while others of the model have."""
        if any(parameter.grad is not None for parameter in self._update.parameters):
            return
        if any(parameter.grad is not None for parameter in self._facts.model.parameters()):
            self._tell_of_optimizer("none of the attached optimizer's parameters has a gradient, and others have")

    def _look_for_updates(self) -> None:
        """Warn once if gradients are repeatedly gone before :meth:`step` is called."""
        if any(parameter.grad is not None for parameter in self._update.parameters):
            self._num_unstepped = 0
            return
        self._num_unstepped += 1
        if self._num_unstepped >= _UNSTEPPED * self._facts.accumulation_steps:
            self._tell_of_optimizer("gradients are cleared time and again without a call of the tuner's step()")

    def _tell_of_optimizer(self, sign: str) -> None:
        if not self._told_of_optimizer:
            self._told_of_optimizer = True
            logger.warning(
                "another optimizer than the attached one seems to update the model: %s; detach(), attach() again with "
                "the optimizer that is to step, and call the tuner's step() in place of its own",
                sign,
            )

    def _pieces(self, batch: Any, k: int, cutting: Cutting, running: RunningStep) -> list[tuple[Any, float]]:
        """Return the micro-batches of a batch with their weights, and note how many items it has."""
        if self._facts.adaptive:
            found = Pieces(self._whole(batch, cutting.count, running), None)
        else:
            found = cut(batch, k, cutting, self._whole_tensors)
        if found.items is not None:
            running.num_items = (running.num_items or 0) + found.items
        return found.weighed

    def _whole(self, batch: Any, count: Count | None, running: RunningStep) -> list[tuple[Any, float]]:
        """Return a batch as one micro-batch, weighted by its items relative to a step of batches like the first."""
        running.items.append(counted(batch, count))
        if not running.items[0]:
            raise nothing_to_learn()
        return [(batch, running.items[-1] / (running.items[0] * running.wanted))] if running.items[-1] else []

    def _is_full(self, running: RunningStep) -> bool:
        """Return whether a step has all batches that it consumes; once detached, any number is enough."""
        return self._controller is None or running.batches >= running.wanted

    def _rate_factor(self, running: RunningStep) -> float:
        """Return the factor on the learning rate for a step of several batches; 1 without adaptive batching."""
        return batch_factor(self._facts.lr_rule, running.growth, 1.0) if self._facts.adaptive else 1.0

    def _tell_phase(self, name: Any) -> None:
        self._tell_time(name)
        if self._controller is not None and name in self._controller.heard:
            self._safely(lambda controller: controller.tell_phase(name))

    def _tell_time(self, name: Phase) -> None:
        """Note where the time of the step goes; trial passes are the tuner's own."""
        if self._beside is None:
            self._times.phase(name)

    def _synchronised(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Delay the gradients' reduction over ranks until the last micro-batch."""
        if self._parallel and not last:
            return self._model.no_sync()  # type: ignore[operator, no-any-return]
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        """Run the body without copies of the first rank's buffers, which DDP makes in the next pass instead."""
        if not self._parallel:
            yield
            return
        model: Any = self._model
        # If a pass failed on one rank only, the ranks would no longer agree on when to copy.
        shares, model.require_forward_param_sync = model.require_forward_param_sync, False
        try:
            yield
        finally:
            model.require_forward_param_sync = shares

    def _safely(self, call: Callable[[Controller], object], *, since: float | None = None) -> None:
        """Call the controller; if it fails, detach and go on with the user's baseline.

        Args:
            call: called with the controller.
            since: clock reading from which the time counts as the tuner's own; ``None`` for now.
        """
        controller = self._controller
        if controller is None:
            return
        began = time.perf_counter() if since is None else since
        try:
            call(controller)
        except any_error() as error:  # whatever goes wrong in the tuner, the run goes on
            logger.warning("autotune detached itself: %s: %s", type(error).__name__, str(error))
            self.detach(f"{type(error).__name__}: {error}")
        controller.run.time.spend(time.perf_counter() - began)

    def _leave_join(self) -> None:
        """Detach without waiting for the other ranks, which detach themselves."""
        reason = "in join() ranks run different numbers of steps, and cannot agree on any"
        logger.warning("autotune detached itself: %s", reason)
        self.detach(reason)

    def _watch_over(self, controller: Controller) -> None:
        if controller.run.breaker.open:
            trips = controller.run.breaker.trips
            last = trips[-1][1] if trips else "the first rank's, or its overhead"
            self.detach(f"{len(trips)} trips, the last: {last}")
        elif not controller.run.ranks.many and controller.run.too_expensive():
            self.detach(f"its own share of the run's time is {controller.run.overhead_frac():.1%}")


def _idle_figures(facts: Attached) -> dict[str, Any]:
    """Return the figures of a run that a kill switch has left alone from the beginning."""
    plan = facts.space.baseline()
    stage, steps = str(facts.stage), facts.total_steps
    return RunFigures(total_steps=steps, stage=stage, plan=plan, decided=plan, trips=[]).to_dict()


def _joins(model: nn.Module) -> bool:
    """Return whether a model runs within ``join()``, for ranks with uneven numbers of batches."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    return f"a {type(value).__name__}"
