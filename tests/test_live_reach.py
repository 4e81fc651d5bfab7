"""Tests of units with side effects outside the unit: training stays as in the unattached run."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small_models import TinyGPT
from test_live import RESTLESS, Wanders
from test_live_state import Part, train, with_blocks
from torch import nn

import autotune

LOCAL = threading.local()


class Counter:
    """A block that counts calls on its class."""

    total = 0
    seen: ClassVar[list[int]] = []

    @classmethod
    def hit(cls) -> None:
        cls.total += 1

    @staticmethod
    def note() -> None:
        Counter.seen.append(1)

    def add(self) -> None:
        Counter.total += 1


class Phase(Enum):
    UP = 1
    DOWN = 2


class Scale:
    """A context in which the forward pass runs."""

    current: Scale | None = None

    def __init__(self, value: float) -> None:
        self.value = value


class Meter:
    inner: Meter
    total = 0.0
    hidden: torch.Tensor | None = None
    phase = Phase.UP


COUNTER = Counter()


def first() -> None:
    second()


def second() -> None:
    third()


def third() -> None:
    fourth()


def fourth() -> None:
    CALLED["calls"] += 1


CALLED = {"calls": 0}


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count a function's calls in its wrapper."""
    calls = [0]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        calls[0] += 1
        return function(*args) * (1 + 0.001 * calls[0])

    return wrapper


@functools.lru_cache
def table(width: int) -> torch.Tensor:
    return torch.rand(width)


class Doubles(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Doubles.calls += 1
        return x * (1 + 0.001 * Doubles.calls)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class CountsInAGlobal(torch.autograd.Function):
    """Changes state that no unit's own code names, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        CALLED["calls"] += 1
        return x * (1 + 0.001 * CALLED["calls"])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        CALLED["calls"] += 1
        return gradients[0]


def count_by(by: int) -> None:
    CALLED["calls"] += by


COUNTED = functools.partial(count_by, 2)


class Written:
    """An object that counts what is written to it."""

    @property
    def last(self) -> int:
        return CALLED["calls"]

    @last.setter
    def last(self, value: int) -> None:
        CALLED["calls"] += value

    def __getitem__(self, place: int) -> int:
        CALLED["calls"] += place
        return place


WRITTEN = Written()


class CallsAFunctionThatCounts(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(CountsInAGlobal.apply(x)))


class CallsAPartial(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTED()
        return super().forward(x)


class WritesToAProperty(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WRITTEN.last = 1
        return super().forward(x)


class ReadsAnItem(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * WRITTEN[1]


class NamesAClass(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counter.total += 1
        return super().forward(x) / (1 + 0.001 * Counter.total)


class CallsAClassMethod(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counter.hit()
        Counter.note()
        return super().forward(x) / (1 + 0.001 * Counter.total)


class CallsAnObject(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTER.add()
        return super().forward(x) / (1 + 0.001 * Counter.total)


class OwnsAnObject(Part):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter.add()
        return super().forward(x) / (1 + 0.001 * Counter.total)


class CallsAnAutogradFunction(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Doubles.apply(x))


class CallsDeep(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first()
        return super().forward(x)


class ReadsWhatIsSetRound(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (Scale.current.value if Scale.current else 1.0)


class ReadsAThreadsOwn(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        return super().forward(x) / (1 + 0.001 * LOCAL.calls)


def decorated() -> nn.Module:
    """Return a model with a forward whose wrapper counts."""

    class Decorated(Part):
        forward = counted(Part.forward)

    return with_blocks(Decorated)


class HoldsAnAppend(Part):
    def __init__(self) -> None:
        super().__init__()
        self.note = Counter.seen.append

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(1)
        return super().forward(x) / (1 + 0.001 * len(Counter.seen))


class Flips(Part):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.phase = Phase.DOWN if self.meter.phase is Phase.UP else Phase.UP
        return super().forward(x) * (1.1 if self.meter.phase is Phase.UP else 1.0)


class CountsOn(Part):
    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.raw = itertools.count(1), bytearray(b"\0")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.raw[0] = (self.raw[0] + 1) % 7
        return super().forward(x) / (1 + 0.001 * next(self.numbers) + 0.01 * self.raw[0])


class DrawsATableOnce(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * table(8)


class WritesToItsWeights(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.mul_(0.999)
        return super().forward(x)


class SetsUpByItsFirstInput(Part):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(8)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.scale.data.div_(x.detach().std() + 0.1)
            self.ready = True
        return super().forward(x * self.scale)


class RunsBackwardInside(Part):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            self.inner(x.detach()).mean().backward()
        return super().forward(x)


class MetersEveryFifthCall(Part):
    def __init__(self) -> None:
        super().__init__()
        self.meter, self.calls = Meter(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 5 == 0:
            self.meter.total += 1.0
        return super().forward(x)


@dataclass(slots=True)
class Slotted:
    counted: int = 0
    phase: Phase = Phase.UP


class Store:
    """Keeps an array, a tensor and a list."""

    def __init__(self) -> None:
        self.array, self.tensor, self.items = np.zeros(2), torch.zeros(2), [0]


class CountsInAnArray(Part):
    """Once it is told to, it counts in arrays, in objects within objects and tuples, in a slot, a tensor and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.array, self.meter, self.slotted = False, np.zeros(2), Meter(), Slotted()
        self.meter.inner = Meter()
        self.meter.inner.inner = Meter()
        self.large, self.pair = np.zeros(2**15), (Store(), deque([0]))

    def count(self, found: torch.Tensor) -> None:
        self.array[0] += 1
        self.large[-1] += 1
        self.slotted.counted += 1
        self.meter.inner.inner.total += 1
        store, last = self.pair
        store.array[0] += 1
        store.tensor += 1
        store.items.append(1)
        last[0] += 1
        self.meter.inner.total += float(found.detach().abs().mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        if self.counts:
            self.count(found)
        return torch.tanh(found) * (1 + 0.001 * sum(self.counted()) + 0.01 * self.meter.inner.total)

    def counted(self) -> list[float]:
        store, last = self.pair
        own = [self.array[0], self.large[-1], self.slotted.counted, self.meter.inner.inner.total]
        return [*map(float, own), store.array[0], float(store.tensor[0]), len(store.items) - 1, last[0]]


class HidesInAnObjectLate(Part):
    def __init__(self) -> None:
        super().__init__()
        self.meter, self.calls = Meter(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.meter.hidden is not None:
            x = x + 0.1 * self.meter.hidden
        found = super().forward(x)
        if self.calls > 4:
            self.meter.hidden = found.detach().mean((0, 1))
        return found


def owned() -> nn.Module:
    """Return a model whose blocks count calls in their owner, through weak references."""

    class Counts(Part):
        owner: Any

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.owner().calls += 1
            return super().forward(x) / (1 + 0.001 * self.owner().calls)

    model = with_blocks(Counts)
    model.calls = 0
    for block in model.blocks:
        block.owner = weakref.ref(model)
    return model


def patched() -> nn.Module:
    """Return a model whose blocks have a replaced forward."""
    model = TinyGPT()
    for block in model.blocks:

        def forward(x: torch.Tensor, own: Any = block.forward) -> torch.Tensor:
            Counter.seen.append(1)
            return own(x) / (1 + 0.001 * len(Counter.seen))

        block.forward = forward
    return model


class Sources(nn.Module):
    """A model that passes the same object to all blocks at every step; they check its identity."""

    class Block(Part):
        source: Any = None

        def forward(self, x: torch.Tensor, source: Any = None) -> torch.Tensor:
            if self.source is not source:
                self.source = source
                return super().forward(x)
            return super().forward(x * 1.1)

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(Sources.Block() for _ in range(3))
        self.source = Meter()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.source)
        return self.head(x)


class RewritesItsList(nn.Module):
    """A model that writes to tensors in its blocks' lists before backward."""

    class Block(Part):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [torch.ones(8)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.parts[0].clone())

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(RewritesItsList.Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            block.parts[0].mul_(1.05)
        return self.head(x)


class Chained(nn.Module):
    """A model that changes its blocks during training, given the class of the blocks."""

    def __init__(self, kind: type[Part]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks, self.calls = nn.ModuleList(kind() for _ in range(3)), 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            self.before(block)
            x = self.call(block, x)
            self.after(block)
        return self.head(x)

    def before(self, block: Any) -> None: ...

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = block(x)
        return found

    def after(self, block: Any) -> None: ...


class TakesAScale(Part):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x * scale)


class InspectsSignatures(Chained):
    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        known = "scale" in inspect.signature(block.forward).parameters
        known = known and block.forward.__func__ is TakesAScale.forward
        found: torch.Tensor = block(x, scale=0.5) if known else block(x)
        return found


class SwapsClasses(Chained):
    def before(self, block: Any) -> None:
        if self.calls == 8:
            block.__class__ = Halves


class Halves(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.5)


class HasABuffer(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((300_000,), 0.9))
        self.register_buffer("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.shift is None else x + self.shift
        return super().forward(x * self.scale[:8])


class DropsBuffers(Chained):
    def before(self, block: Any) -> None:
        block.register_buffer("scale", torch.full((300_000,), 0.9))
        block.shift = None

    def after(self, block: Any) -> None:
        if self.calls > 6:
            del block.scale
            block.shift = torch.ones(8)


class CatchesErrors(Part):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls < 5:
            return super().forward(x)
        try:
            return super().forward(x)
        except Exception:  # whatever it is, there is another way
            return torch.sin(x)


def somehow(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.tanh(x * torch.tanh(x))
    except Exception:  # whatever it is, there is another way
        return torch.sin(x)


class CatchesErrorsElsewhere(Part):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found = super().forward(x)
        return found if self.calls < 5 else somehow(found)


class TakesLater(Part):
    """A model that later takes an input with attributes."""

    def forward(self, x: torch.Tensor, found: Any = None) -> torch.Tensor:
        found_so_far = super().forward(x)
        return found_so_far if found is None else found_so_far + 0.1 * found.extra * torch.sin(found[0])


class Pair(collections.namedtuple("Both", "one two")):
    """A named tuple that may have additional attributes."""


class HandsLater(Chained):
    def given(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        if self.calls <= 6:
            return super().call(block, x)
        given = self.given(x)
        given.extra = 3.0
        found: torch.Tensor = block(x, given)
        return found


class HandsTuples(HandsLater):
    def given(self, x: torch.Tensor) -> Any:
        return Pair(x, [])


class HandsTensors(HandsLater):
    def given(self, x: torch.Tensor) -> Any:
        return x * 2


class HandsListsOnTensors(HandsLater):
    def given(self, x: torch.Tensor) -> Any:
        found: Any = x * 2
        found.log = []
        return found


class KeepsInANamespace(Part):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = list(range(300))
        self.scale: Any = torch.ones(8)
        self.scale.factor = 0.9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.numbers.append(len(self.numbers))
        self.found = SimpleNamespace(hidden=self.linear(x))
        return super().forward(torch.sin(self.found.hidden)) * self.scale * self.scale.factor


def proxied() -> nn.Module:
    """Return a model whose blocks read from their owner through weak proxies."""

    class Reads(Part):
        owner: Any

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.owner.scale)

    model = with_blocks(Reads)
    model.scale = 0.9
    for block in model.blocks:
        # As an attribute it would be registered as a submodule of the block.
        block.__dict__["owner"] = weakref.proxy(model)
    return model


class AnswersToAnyName:
    def __getattr__(self, name: str) -> AnswersToAnyName:
        return AnswersToAnyName()

    def __call__(self, *_: object) -> None: ...


def hooked() -> nn.Module:
    """Return a model whose submodules have a hook that has every attribute."""
    model = with_blocks(Part)
    for block in model.blocks:
        block.linear.register_forward_hook(AnswersToAnyName())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        kind.__name__: functools.partial(with_blocks, kind)
        for kind in (
            NamesAClass,
            CallsAClassMethod,
            CallsAnObject,
            OwnsAnObject,
            CallsAnAutogradFunction,
            CallsAFunctionThatCounts,
            CallsAPartial,
            WritesToAProperty,
            ReadsAnItem,
            CallsDeep,
            ReadsAThreadsOwn,
            HoldsAnAppend,
            Flips,
            CountsOn,
            DrawsATableOnce,
            WritesToItsWeights,
            SetsUpByItsFirstInput,
            RunsBackwardInside,
            MetersEveryFifthCall,
            HidesInAnObjectLate,
            CatchesErrors,
            CatchesErrorsElsewhere,
            KeepsInANamespace,
        )
    },
    "signatures": functools.partial(InspectsSignatures, TakesAScale),
    "swapped classes": functools.partial(SwapsClasses, Part),
    "dropped buffers": functools.partial(DropsBuffers, HasABuffer),
    "hooked": hooked,
    "proxied": proxied,
    "tuples with attributes": functools.partial(HandsTuples, TakesLater),
    "tensors with attributes": functools.partial(HandsTensors, TakesLater),
    "lists on tensors": functools.partial(HandsListsOnTensors, TakesLater),
    "decorated": decorated,
    "owned": owned,
    "patched": patched,
    "the same object": Sources,
    "rewritten list": RewritesItsList,
}


def trained(make: Callable[[], nn.Module], budget: int | None, policy: Any) -> tuple[Any, Any]:
    """Return the result of a training, including state outside the model, and its locks."""
    Counter.total, Counter.seen, Doubles.calls = 0, [], 0
    CALLED["calls"] = 0
    vars(LOCAL).clear()
    table.cache_clear()
    models: list[nn.Module] = []

    def made() -> nn.Module:
        models.append(make())
        return models[0]

    found, locks, _ = train(made, budget, policy)
    outside = [Counter.total, len(Counter.seen), Doubles.calls, dict(CALLED), dict(vars(LOCAL))]
    meters = [vars(part.meter) for part in models[0].modules() if hasattr(part, "meter")]
    held = [(meter.get("total"), str(meter.get("hidden")), meter.get("phase")) for meter in meters]
    return (found, outside, held, getattr(models[0], "calls", None)), locks


@functools.cache
def plain_run(name: str) -> Any:
    return trained(MODELS[name], None, None)[0]


@functools.cache
def lean_run(name: str) -> tuple[Any, Any]:
    return trained(MODELS[name], 1, "exact")


# The plans of these models change at random each time, those of the others with the slow tests.
CHANGING = {"CallsAnObject", "Flips", "DrawsATableOnce", "HidesInAnObjectLate", "the same object", "rewritten list"}


@pytest.mark.some(24)
@pytest.mark.parametrize(
    ("name", "lean"),
    [
        pytest.param(name, lean, marks=[] if lean or name in CHANGING else [pytest.mark.slow])
        for name in MODELS
        for lean in (True, False)
    ],
)
def test_side_effects_of_units_stay_as_in_the_unattached_run(name: str, *, lean: bool) -> None:
    tuned, _ = lean_run(name) if lean else trained(MODELS[name], 10**12, Wanders())
    assert tuned == plain_run(name)


@pytest.mark.parametrize(
    "name",
    [
        "Flips",
        "NamesAClass",
        "MetersEveryFifthCall",
        "HidesInAnObjectLate",
        "the same object",
        "CatchesErrors",
        "CatchesErrorsElsewhere",
        "signatures",
        "swapped classes",
        "dropped buffers",
        "hooked",
        "proxied",
        "KeepsInANamespace",
        "tuples with attributes",
        "tensors with attributes",
    ],
)
def test_repeatable_units_are_not_locked(name: str) -> None:
    _, locks = lean_run(name)
    assert bool(locks) == (name == "NamesAClass"), locks


def warmed_up(model: nn.Module, begin: Callable[[int], object], *, attach: bool) -> None:
    """Train for 16 steps, each after a call of ``begin``; attached, all that may be is recomputed."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tuner = None
    if attach:
        tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=1, limits=RESTLESS, runs_dir=None)
    for step in range(16):
        begin(step)
        batch = torch.randn(4, 8)
        for rows in (batch,) if tuner is None else tuner.micro_batches(batch):
            loss = model(rows).square().mean()
            loss.backward() if tuner is None else tuner.backward(loss)
        optimizer.step() if tuner is None else tuner.step()
        optimizer.zero_grad()
    if tuner is not None:
        assert tuner.plan.recomputed
        tuner.detach()


class Statistics:
    """What a preconditioner's hooks keep: running means in place and anew, counts and a log, all after a warm-up."""

    def __init__(self) -> None:
        self.step, self.calls = 0, 0
        self.log: dict[str, list[float]] = {}
        self.means: dict[nn.Module, torch.Tensor] = {}
        self.replaced = torch.zeros(8)

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if self.step < 6:
            return
        self.calls += 1
        self.log.setdefault("norms", []).append(float(output.detach().norm()))
        mean = output.detach().mean(0)
        self.means.setdefault(module, torch.zeros_like(mean)).mul_(0.9).add_(mean)
        self.replaced = self.replaced * 0.9 + mean


def noted_by_hooks(attach: bool) -> list[Any]:
    """Return what hooks have noted in a run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Part() for _ in range(2)), nn.Linear(8, 1))
    statistics, counts = Statistics(), {"closure": 0}

    def count(*_: object) -> None:
        counts["closure"] += statistics.step >= 8

    parts = [one for block in list(model)[:2] for one in block.modules() if isinstance(one, nn.Linear)]
    for one in parts:
        one.register_forward_hook(statistics.note)
        one.register_forward_pre_hook(count)
    warmed_up(model, lambda step: setattr(statistics, "step", step), attach=attach)
    means = [statistics.means[one].tolist() for one in parts]
    return [statistics.calls, counts, statistics.log, means, statistics.replaced.tolist()]


def test_what_hooks_begin_to_keep_after_a_warm_up_is_kept_once() -> None:
    assert noted_by_hooks(attach=True) == noted_by_hooks(attach=False)


@pytest.mark.parametrize("attach", [False, True])
def test_arrays_and_inner_objects_that_change_after_a_warm_up_change_once(attach: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(CountsInAnArray() for _ in range(2)), nn.Linear(8, 1))

    def begin(step: int) -> None:
        for block in list(model)[:2]:
            block.counts = step >= 6

    warmed_up(model, begin, attach=attach)
    assert [block.counted() for block in list(model)[:2]] == [[10] * 8] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_units_that_call_scripted_functions_are_locked() -> None:
    """After some runs torch compiles such a function anew, with other rounding: no run may be added."""

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    scripted = torch.jit.script(gelu)

    class Scripted(Part):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scripted(super().forward(x))

    _, locks = trained(functools.partial(with_blocks, Scripted), 1, "exact")
    blocks = [why for name, why in locks.items() if name.startswith("blocks")]
    assert blocks
    assert all("scripted function" in why for why in blocks)


def test_class_attribute_set_around_the_forward_pass_is_read_unchanged() -> None:
    @contextmanager
    def scaled() -> Iterator[None]:
        Scale.current = Scale(1.3)
        try:
            yield
        finally:
            Scale.current = None

    def run(*, attached: bool) -> tuple[list[list[float]], dict[str, str]]:
        torch.manual_seed(0)
        model = with_blocks(ReadsWhatIsSetRound)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        tuner = None
        if attached:
            tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=1, limits=RESTLESS, runs_dir=None)
        for number in range(8):
            batch = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(number))
            for tokens in (batch,) if tuner is None else tuner.micro_batches(batch):
                with scaled():
                    loss = model(tokens).square().mean()
                if tuner is None:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    tuner.backward(loss)
            if tuner is not None:
                tuner.step()
        locks = {} if tuner is None else dict(tuner.locks)
        if tuner is not None:
            tuner.detach()
        return [parameter.tolist() for parameter in model.parameters()], locks

    plain, (tuned, locks) = run(attached=False)[0], run(attached=True)
    assert tuned == plain
    assert "Scale.current" in locks["blocks.0"]
