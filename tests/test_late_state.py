"""Tests of state that units, their hooks and what they are handed begin to change late, or hold in unusual places."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import early_ends
import numpy as np
import pytest
import torch
from torch import nn

import autotune

WIDTH, LATE, STEPS = 16, 18, 26
# Reasons for which a unit is rightly locked: it changes a global, or a hook that removed itself is gone from then on.
# Blocks that are keys of what they are handed are locked without need, since a copy of them is no such key.
LOCKED = ("it changes what it is handed", "its parts got other hooks", "a probe of it raised KeyError: it may")


class Mix(nn.Module):
    """A residual block, scaled by what ``use`` returns of its object once it is active."""

    def __init__(self, held: Any = None, use: Callable[[Any], float] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.held, self.use, self.active = held, use, False

    def forward(self, x: torch.Tensor, handed: Any = None) -> torch.Tensor:
        given = self.held if handed is None else handed
        scale = self.use(given) if self.active and self.use else 1.0
        return x + self.down(torch.tanh(self.up(x))) * scale


class Handing(nn.Module):
    """Blocks that are handed one object besides their input."""

    def __init__(self, use: Callable[[Any], float], make: Callable[[], Any]) -> None:
        super().__init__()
        self.blocks, self.make = nn.ModuleList(Mix(use=use) for _ in range(3)), make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed = self.make()
        for block in self.blocks:
            x = block(x, handed)
        return x


def trained(model: nn.Module, look: Callable[[], Any], begin: Callable[[], None], late: int, *, attached: bool) -> Any:
    """Return the losses, the state that ``look`` shows after each step, and the weights at the end."""
    seen, optimizer = [], torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = autotune.attach(model, optimizer, memory_budget_bytes=1, runs_dir=None) if attached else None
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if step == late:
            begin()
            for part in model.modules():
                part.active = True  # type: ignore[assignment]
        batch = torch.randn(32, WIDTH, generator=generator)
        for micro in [batch] if tuner is None else tuner.micro_batches(batch):
            loss = model(micro).square().mean()
            loss.backward() if tuner is None else tuner.backward(loss)
        optimizer.step() if tuner is None else tuner.step()
        optimizer.zero_grad()
        seen.append((loss.item(), look()))
    if tuner is not None:
        assert tuner.attached
        locks = {why for name, why in tuner.locks.items() if name not in ("precision", "accumulation_steps")}
        tuner.detach()
        # Only what is recomputed to the end shows that it is restored.
        assert not {why for why in locks if not why.startswith(LOCKED)}
    return seen, [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(make: Callable[[], tuple[nn.Module, Callable[[], Any]]], late: int = LATE, begin: Any = None) -> None:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model, look = make()
        found.append(trained(model, look, begin or (lambda: None), late, attached=attached))
    (seen, weights), (others, own) = found
    assert seen == others
    assert all(map(torch.equal, weights, own))


class Table(dict):  # type: ignore[type-arg]
    """A dictionary that counts what is written to it."""

    writes = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.writes += 1
        super().__setitem__(key, value)

    def up(self) -> float:
        self["n"] = self.get("n", 0) + 1
        return 1 + 0.01 * self.writes


class Private:
    """An object whose class stores the name of its slot in another form."""

    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def up(self) -> float:
        self.__count += 1
        return 1 + 0.01 * self.__count


class ReadOnly:
    """An object with a property of the same name as its attribute."""

    def __init__(self) -> None:
        self.__dict__["count"] = 0

    @property
    def count(self) -> int:
        found: int = self.__dict__["count"]
        return found

    def up(self) -> float:
        self.__dict__["count"] += 1
        return 1 + 0.01 * self.count


class Rising:
    """A descriptor that refuses a value below the present one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, held: Any, owner: type | None = None) -> Any:
        return held.__dict__[self.name]

    def __set__(self, held: Any, value: int) -> None:
        if value < held.__dict__.get(self.name, 0):
            raise ValueError("a count may not fall")
        held.__dict__[self.name] = value


class Validated:
    count = Rising()

    def __init__(self) -> None:
        self.count = 0

    def up(self) -> float:
        self.count += 1
        return 1 + 0.01 * self.count


class Ragged:
    """An object that gets an array of arrays of several lengths."""

    def __init__(self) -> None:
        self.count, self.rows = 0, None

    def up(self) -> float:
        self.count += 1
        if self.rows is None:
            self.rows = np.empty(2, object)
            self.rows[:] = [np.zeros(3), np.ones(2)]
        self.rows[self.count % 2] = np.ones(self.count)
        return 1 + 0.01 * sum(row.sum() for row in self.rows)


class Masked:
    def __init__(self) -> None:
        self.values = np.ma.masked_array(np.zeros(3), mask=[0, 0, 0])

    def up(self) -> float:
        self.values.mask[0] = not self.values.mask[0]
        return 1 + 0.1 * float(self.values.mask[0])


class Item:
    count = 0


class Keyed:
    """An object that counts in the key of a dictionary."""

    def __init__(self) -> None:
        self.table = {Item(): 0}

    def up(self) -> float:
        item = next(iter(self.table))
        item.count += 1
        return 1 + 0.01 * item.count


class Count:
    count = 0

    def up(self) -> float:
        self.count += 1
        return 1 + 0.01 * self.count


def count_in(held: Any) -> float:
    held.found.append(1)
    return 1 + 0.01 * len(held.found)


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "dictionary that counts": (lambda: SimpleNamespace(table=Table()), lambda held: held.table.up()),
    "private slot": (Private, Private.up),
    "property over an attribute": (ReadOnly, ReadOnly.up),
    "descriptor that validates": (Validated, Validated.up),
    "array of arrays": (Ragged, Ragged.up),
    "masked array": (Masked, Masked.up),
    "keys of a dictionary": (Keyed, Keyed.up),
    "namespace": (lambda: SimpleNamespace(found=[]), count_in),
    "bound method": (lambda: Count().up, lambda up: up()),
    "partial": (lambda: functools.partial(count_in, SimpleNamespace(found=[])), lambda held: held()),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_a_block_begins_to_change_late_is_restored(kind: str) -> None:
    make, use = HELD[kind]

    def blocks() -> tuple[nn.Module, Callable[[], Any]]:
        return nn.Sequential(*(Mix(make(), use) for _ in range(3))), lambda: None

    assert_same(blocks)


class Running:
    """Running means that blocks share: one for each, and one for all."""

    def __init__(self) -> None:
        self.means, self.common = {}, torch.zeros(WIDTH)

    def up(self, block: int) -> float:
        self.means.setdefault(block, torch.zeros(WIDTH)).mul_(0.9).add_(1 + block)
        self.common.add_(1)
        return 1 + 0.01 * float(self.means[block][0] + self.common[0])


def test_tensors_that_several_blocks_write_to_are_restored() -> None:
    def blocks() -> tuple[nn.Module, Callable[[], Any]]:
        shared = Running()
        uses = [functools.partial(Running.up, block=number) for number in range(3)]
        return nn.Sequential(*(Mix(shared, use) for use in uses)), lambda: shared.common.tolist()

    assert_same(blocks)


class Own(dict):  # type: ignore[type-arg]
    """A dictionary whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Cell:
    __slots__ = ("found",)

    def __init__(self, found: list[int]) -> None:
        self.found = found


class State:
    count = 0


GLOBAL = State()


def up(held: Any) -> float:
    held.count += 1
    return 1 + 0.01 * held.count


def fresh_state() -> Any:
    GLOBAL.count = 0
    return GLOBAL


def cell_and_list() -> Any:
    found: list[int] = []
    return [Cell(found), found]


def count_in_cell(held: Any) -> float:
    held[0].found.append(1)
    return 1 + 0.01 * len(held[1])


def counting_tensor() -> Any:
    tensor = torch.ones(WIDTH)
    tensor.count = 0  # type: ignore[attr-defined]
    return tensor


HANDED: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "dictionary that is its attributes": (lambda: Own(count=0), up, lambda held: held["count"]),
    "slot and list of one": (cell_and_list, count_in_cell, lambda held: len(held[1])),
    "attribute of a tensor": (counting_tensor, up, lambda held: held.count),
    "global of the script": (fresh_state, up, lambda held: held.count),
}


@pytest.mark.parametrize("kind", HANDED)
def test_what_blocks_are_handed_and_change_is_changed_once(kind: str) -> None:
    make, use, shown = HANDED[kind]

    def blocks() -> tuple[nn.Module, Callable[[], Any]]:
        handed = make()
        return Handing(use, lambda: handed), lambda: shown(handed)

    assert_same(blocks, late=0)


def test_dictionary_and_its_key_may_both_be_handed() -> None:
    def fresh() -> Any:
        key = Item()
        return {"key": key, "table": {key: []}}

    def use(held: Any) -> float:
        held["key"].count += 1
        held["table"][held["key"]].append(1)
        return 1 + 0.01 * len(held["table"][held["key"]])

    assert_same(lambda: (Handing(use, fresh), lambda: None))


class Watch:
    """Hooks that begin to change outputs, log or remove themselves."""

    def __init__(self) -> None:
        self.on, self.count = False, 0

    def by_attribute(self, layer: nn.Module) -> None:
        layer.register_forward_hook(self._scale)

    def _scale(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.count += self.on
        return output * (1 + 0.01 * self.count)

    def by_closure(self, layer: nn.Module) -> None:
        count = 0

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += self.on
            return output * (1 + 0.01 * count)

        layer.register_forward_hook(hook)

    def by_default(self, layer: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, output: torch.Tensor, found: list[int] = []) -> torch.Tensor:  # noqa: B006
            found += [1] * self.on
            return output * (1 + 0.01 * len(found))

        layer.register_forward_hook(hook)

    def by_function(self, layer: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            hook.count += self.on  # type: ignore[attr-defined]
            return output * (1 + 0.01 * hook.count)  # type: ignore[attr-defined]

        hook.count = 0  # type: ignore[attr-defined]
        layer.register_forward_hook(hook)

    def once(self, layer: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            if self.on:
                handle.remove()
            return output * (1.5 if self.on else 1.0)

        handle = layer.register_forward_hook(hook)

    def by_module(self, layer: nn.Module) -> None:
        layer.register_forward_hook(Extractor(self).note)


class Extractor(nn.Module):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self.means = watch, []

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.means += [output.detach().mean()] * self.watch.on
        return output * (1 + 0.01 * len(self.means))


@pytest.mark.parametrize("kind", ["by_attribute", "by_closure", "by_default", "by_function", "once", "by_module"])
def test_what_hooks_begin_to_change_late_is_restored(kind: str) -> None:
    watches: list[Watch] = []

    def blocks() -> tuple[nn.Module, Callable[[], Any]]:
        model, watch = nn.Sequential(*(Mix() for _ in range(3))), Watch()
        watches[:] = [watch]
        for block in model:
            getattr(watch, kind)(block.up)
        return model, lambda: watch.count

    def begin() -> None:
        watches[0].on = True

    assert_same(blocks, begin=begin)


class Hooked(nn.Module):
    """Blocks that have a hook for the time of each forward pass alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Mix() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handles = [block.up.register_forward_hook(scaled, with_kwargs=True) for block in self.blocks]
        x = self.blocks(x)
        for handle in handles:
            handle.remove()
        return x


def scaled(module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    return output * (1.5 + len(kwargs))


def test_hooks_with_keyword_arguments_may_last_for_the_forward_pass_alone() -> None:
    assert_same(lambda: (Hooked(), lambda: None))


class KeyedByBlocks(nn.Module):
    """Blocks that share a dictionary which is keyed by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ByItself() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = SimpleNamespace(found={block: 1 + 0.1 * number for number, block in enumerate(self.blocks)})
        for block in self.blocks:
            x = block(x, scales)
        return x


class ByItself(Mix):
    def forward(self, x: torch.Tensor, scales: Any = None) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * scales.found[self]


def test_dictionary_may_be_keyed_by_the_blocks_that_it_is_handed_to() -> None:
    assert_same(lambda: (KeyedByBlocks(), lambda: None))


class Mode:
    def __init__(self, factor: float) -> None:
        self.factor = factor


FAST, SLOW = Mode(1.5), Mode(0.5)


class ByMode:
    """An object that compares globals by identity, and counts."""

    def __init__(self) -> None:
        self.modes, self.table, self.count = [FAST, SLOW], {FAST: 1.5, SLOW: 0.5}, 0

    def up(self) -> float:
        self.count += 1
        mode = self.modes[self.count % 2]
        return self.table[mode] if mode is FAST else SLOW.factor if mode is SLOW else 0.0


class Low:
    __slots__ = ("count", "found")

    def __init__(self) -> None:
        self.count, self.found = 0, 1.0


class High(Low):
    __slots__ = ("found",)

    def up(self) -> float:
        self.count += 1
        self.found *= 1.01
        return self.found


@pytest.mark.parametrize("make", [ByMode, High])
@pytest.mark.parametrize("late", [0, LATE])
def test_objects_of_handed_objects_and_slots_declared_twice_stay_what_they_are(make: Any, late: int) -> None:
    def blocks() -> tuple[nn.Module, Callable[[], Any]]:
        handed = make()
        return Handing(lambda held: held.up(), lambda: handed), lambda: handed.count

    assert_same(blocks, late=late)


class Ending(nn.Module):
    """A residual block whose last operation is another one once it is active."""

    active = False

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.tanh(self.mix(x))
        return self.end(y) if self.active else torch.tanh(y)

    def end(self, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ByAKernel(Ending):
    def end(self, y: torch.Tensor) -> torch.Tensor:
        return early_ends.of_a_kernel_or_else(y)


class ByAGuard(Ending):
    def end(self, y: torch.Tensor) -> torch.Tensor:
        return early_ends.guarded(y)


class InAScope(Ending):
    def end(self, y: torch.Tensor) -> torch.Tensor:
        return early_ends.scoped(y)


class CountedInAClass(Ending):
    def end(self, y: torch.Tensor) -> torch.Tensor:
        early_ends.Depth.value += 1
        y = torch.tanh(y) / early_ends.Depth.value
        early_ends.Depth.value -= 1
        return y


class CountedInAModule(Ending):
    def end(self, y: torch.Tensor) -> torch.Tensor:
        return early_ends.counted(y)


class NamedByAnAttribute(Ending):
    def __init__(self) -> None:
        super().__init__()
        self.naming = early_ends.Naming()

    def end(self, y: torch.Tensor) -> torch.Tensor:
        with self.naming:
            return torch.tanh(y)


class RetriedByAnAttribute(Ending):
    def __init__(self) -> None:
        super().__init__()
        self.tried = early_ends.retrying(torch.tanh)

    def end(self, y: torch.Tensor) -> torch.Tensor:
        return self.tried(y)


class OfATable(Ending):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"tried": early_ends.retrying(torch.tanh)}

    def end(self, y: torch.Tensor) -> torch.Tensor:
        return self.table["tried"](y)


class Collected(Ending):
    def __init__(self) -> None:
        super().__init__()
        self.collecting = early_ends.Collecting()

    def end(self, y: torch.Tensor) -> torch.Tensor:
        return self.collecting(y)


class CollectedAsText(Collected):
    def __init__(self) -> None:
        super().__init__()
        self.collecting = early_ends.CollectingTexts()


class ByAGroup(Ending):
    def end(self, y: torch.Tensor) -> torch.Tensor:
        return early_ends.of_a_group_or_else(y)


class ByAContextVariable(Ending):
    def end(self, y: torch.Tensor) -> torch.Tensor:
        return early_ends.doubled(y)


class InAFunctionWithin(Ending):
    def end(self, y: torch.Tensor) -> torch.Tensor:
        def named() -> torch.Tensor:
            try:
                return torch.tanh(y)
            except Exception as error:
                raise ValueError("in a block") from error

        return named()


@pytest.mark.parametrize("late", [0, LATE])
@pytest.mark.parametrize(
    "kind",
    [
        ByAKernel,
        ByAGuard,
        InAScope,
        CountedInAClass,
        CountedInAModule,
        NamedByAnAttribute,
        RetriedByAnAttribute,
        OfATable,
        Collected,
        CollectedAsText,
        ByAGroup,
        ByAContextVariable,
        InAFunctionWithin,
    ],
)
def test_recomputations_end_early_only_where_nothing_catches_or_misses_it(kind: type[Ending], late: int) -> None:
    early_ends.depth = early_ends.Depth.value = 0

    def blocks() -> tuple[nn.Module, Callable[[], Any]]:
        return nn.Sequential(*(kind() for _ in range(3))), lambda: (early_ends.depth, early_ends.Depth.value)

    assert_same(blocks, late)


class Interrupting(early_ends.Naming):
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            raise KeyboardInterrupt


class InterruptedAtItsEnd(NamedByAnAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.naming = Interrupting()


def test_interrupts_at_the_end_of_a_recomputation_are_raised() -> None:
    model = nn.Sequential(*(InterruptedAtItsEnd() for _ in range(3)))
    with pytest.raises(KeyboardInterrupt):
        trained(model, lambda: None, lambda: None, LATE, attached=True)


class Irreps(tuple[int, ...]):
    """A tuple without a length, as some libraries have."""

    def __len__(self) -> int:
        raise NotImplementedError


class OfIrreps(Ending):
    def __init__(self) -> None:
        super().__init__()
        self.irreps = Irreps((1, 2))

    def end(self, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(y)


def test_tuples_without_a_length_are_no_reason_to_lock() -> None:
    assert_same(lambda: (nn.Sequential(*(OfIrreps() for _ in range(3))), lambda: None), LATE)
