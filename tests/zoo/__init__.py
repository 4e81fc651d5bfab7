"""Training loops as people write them. ``test_zoo.py`` checks that each trains the same when attached.

Every module here is one loop: ``train(run)`` builds its model, data and optimizer, calls ``run.attach`` where a user
would call ``autotune.attach``, trains ``run.steps`` steps in its own way, logs each loss by ``run.log`` and passes what
it has trained to ``run.keep``. It must be bit-identical each time. A module may define:

``LOCKED``
    units that cannot be recomputed exactly, with a part of the reason; otherwise no unit may be locked.
``BY_CHANCE``
    that locked units vary at random.
``REFUSED``
    a part of the message with which ``attach`` rejects the loop.
``OBSERVED``
    a part of the reason why nothing can be switched.
``SURPRISES``
    steps that need more memory than any before, unpredictably: only these may exceed the budget.
``SPREAD``
    share by which peaks of like steps differ unpredictably: by so much, the budget may be exceeded.
``STAYS_LEAN``
    why only the leanest plan is used under a budget.
``MODES``
    the modes besides ``exact`` that it can run in: ``rounding``, ``tolerant``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

import autotune
from autotune.mechanics import controls
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors
from autotune.mechanics.trees import tensors
from autotune.plan import Plan

WIDTH, VOCABULARY = 16, 13


class Alone:
    """A stand-in for the tuner in an unattached loop; under given plans, it meters the memory of each step.

    Attributes:
        probing: always false, because there are no trial passes.
    """

    probing = False

    def __init__(
        self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None = None
    ) -> None:
        self._run, self._model, self._optimizer, self._clip_norm = run, model, optimizer, clip_norm

    def micro_batches(self, batch: Any, count: Any = None) -> Iterator[Any]:
        """Yield the batch whole."""
        self.begin_step(batch)
        yield batch

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient."""
        loss.backward()

    def unscale(self) -> float:
        """Return the 2-norm of the gradient."""
        return float(nn.utils.get_total_norm([p.grad for p in self._model.parameters() if p.grad is not None]))

    def step(self) -> bool:
        """Clip, update, and clear the gradients."""
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.end_step()
        return True

    def begin_step(self, batch: Any) -> None:
        """Apply the step's plan, and start metering."""
        plans = self._run.plans
        if plans is not None:
            # An earlier step may have ended with an exception.
            self.end_step()
            self._run.meters = True
            controls.apply(self._model, plans[min(len(self._run.peaks), len(plans) - 1)])
            self._meter = MemoryMeter(torch.device("cpu"))
            # The rest of a slice's storage does not belong to the step.
            shown = [leaf.clone() for leaf in tensors(batch)]
            resident = [*resident_tensors(self._model, self._optimizer, []), *shown]
            if self._run.clears_within:
                gradients = {id(parameter.grad) for parameter in self._model.parameters()}
                resident = [tensor for tensor in resident if id(tensor) not in gradients]
            self._run.metered.enter_context(self._meter.metering(resident))

    def end_step(self, **_: Any) -> None:
        """Stop metering the step."""
        if self._run.meters:
            self._run.metered.close()
            self._run.meters = False
            self._run.peaks.append(self._meter.peak_bytes or 0)

    def next_micro_batch(self, batch: Any) -> None:
        """Do nothing."""

    def tell_phase(self, name: str) -> None:
        """Do nothing."""

    def detach(self, reason: str = "") -> None:
        """Do nothing."""

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


class Recorded:
    """A wrapper of a tuner that records the plan and budget of each step."""

    def __init__(self, run: Run, tuner: autotune.LiveTuner) -> None:
        self._run, self._tuner = run, tuner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tuner, name)

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        self._tuner.__exit__(*_)

    def micro_batches(self, batch: Any, count: Any = None) -> Iterator[Any]:
        """Yield what the tuner yields."""
        begun = False
        for micro in self._tuner.micro_batches(batch, count):
            if not self._tuner.probing and not begun:
                self._run.used.append(self._tuner.plan)
                begun = True
            yield micro

    def begin_step(self, batch: Any) -> None:
        """Begin a step."""
        self._tuner.begin_step(batch)
        self._run.used.append(self._tuner.plan)


class Run:
    """One run of a loop: unattached, attached, or unattached under given plans with its memory metered.

    Args:
        attaching: arguments of ``attach``; ``None`` trains unattached.
        plans: a plan for each step.
        steps: number of steps.
        budget: the budget of a step, by its number.

    Attributes:
        used: plan of each step of an attached run.
        peaks: peak bytes of each step under a given plan.
        losses: logged losses.
        kept: trained models, optimizers and tensors.
        drawn: the states of the generators at the end.
        tuner: the tuner.
        metered: the meter of the running step; `meters` tells whether there is one.
        status: the tuner's last status; `locks` are its locks.
    """

    def __init__(
        self,
        attaching: dict[str, Any] | None = None,
        *,
        plans: Sequence[Plan] | None = None,
        steps: int = 24,
        budget: Callable[[int], int] | None = None,
    ) -> None:
        self.attaching, self.plans, self.steps, self.budget = attaching, plans, steps, budget
        self.used: list[Plan] = []
        self.peaks: list[int] = []
        self.losses: list[float] = []
        self.kept: list[Any] = []
        self.tuner: Any = None
        # Whether gradients alive at the start of a step are cleared in it, which a CPU profiler does not see.
        self.clears_within = False
        self.metered, self.meters = ExitStack(), False

    @property
    def is_attached(self) -> bool:
        """Tell whether the loop should be attached."""
        return self.attaching is not None

    def arguments(self, **options: Any) -> dict[str, Any]:
        """Return the arguments of ``autotune.attach``, or of a framework's callback."""
        assert self.attaching is not None
        budget = self.budget
        given = {} if budget is None else {"memory_budget_bytes": lambda: budget(len(self.used))}
        return {"runs_dir": None, **options, **self.attaching, **given}

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        """Return a tuner of the model, or a stand-in for an unattached loop."""
        if self.attaching is None:
            return Alone(self, model, optimizer, options.get("clip_norm"))
        self.tuner = autotune.attach(model, optimizer, **self.arguments(**options))
        return Recorded(self, self.tuner)

    def log(self, *losses: torch.Tensor | float) -> None:
        """Record losses."""
        self.losses += [float(loss.detach() if isinstance(loss, torch.Tensor) else loss) for loss in losses]

    def keep(self, *trained: Any) -> None:
        """Record copies of models, optimizers or tensors."""
        self.kept += [one.state_dict() if hasattr(one, "state_dict") else one for one in trained]

    def finish(self) -> Run:
        """Record the states of the generators, and detach."""
        self.drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
        if self.tuner is not None:
            self.status, self.locks = dict(self.tuner.status), dict(self.tuner.locks)
            self.tuner.detach()
        return self


class Block(nn.Module):
    """A block of attention and a feed-forward network, with dropout."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mix = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mix(self.second(x))


class Residual(nn.Module):
    """A feed-forward network on a residual path."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x)


class Stack(nn.Module):
    """A language model of an embedding, blocks and a head."""

    def __init__(self, blocks: Sequence[nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, width), nn.ModuleList(blocks)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small_gpt(blocks: int = 4, dropout: float = 0.1) -> Stack:
    """Return a small transformer."""
    return Stack([Block(dropout=dropout) for _ in range(blocks)])


def texts(steps: int, rows: int = 4, length: int = 16) -> Iterator[torch.Tensor]:
    """Yield token ids, of shape (rows, length)."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def points(steps: int, rows: int = 16, width: int = WIDTH) -> Iterator[torch.Tensor]:
    """Yield points, of shape (rows, width)."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield torch.randn(rows, width, generator=generator)


def images(steps: int, rows: int = 4, side: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield images of shape (rows, 3, side, side), and one of five classes for each."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield torch.randn(rows, 3, side, side, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next tokens."""
    scores = model(tokens[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
