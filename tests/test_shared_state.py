"""Tests of state that copies of a unit share with it, or that a unit reaches by two ways."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from test_late_state import LATE, WIDTH, Mix, assert_same, trained
from torch import nn

from autotune.mechanics.buffers import copy_buffers, drop_constants

Use = Callable[[nn.Module, torch.Tensor], Any]
FACTOR = 0.01


class Block(Mix):
    """A residual block scaled by what ``by`` returns of the block and its activation, once it is active."""

    def __init__(self, by: Use, **held: Any) -> None:
        super().__init__()
        self.by = by
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, handed: Any = None) -> torch.Tensor:
        inner = torch.tanh(self.up(x))
        return x + self.down(inner * (self.by(self, inner) if self.active else 1.0))


class Count:
    def __init__(self, **held: Any) -> None:
        self.n = 0
        vars(self).update(held)

    def up(self, by: int = 1) -> float:
        self.n += by
        return 1 + FACTOR * self.n

    def scaled(self, by: float, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return output * (1 + by * self.n)


class Single(Count):
    def __deepcopy__(self, memo: Any) -> Single:
        return self


Logged = type("Logged", (Count,), {"__module__": "logging_of_a_user"})
NAMED = Count()
KEPT: list[Count] = []


def counter() -> Callable[[], float]:
    n = 0

    def up() -> float:
        nonlocal n
        n += 1
        return 1 + FACTOR * n

    return up


def with_named() -> Block:
    NAMED.n = 0
    return Block(lambda block, _: block.meters[0].up(), meters=[NAMED])


def with_weak_reference() -> Block:
    KEPT.append(Count())
    return Block(lambda block, _: block.held.parent().up(), held=Count(parent=weakref.ref(KEPT[-1])))


def with_partial_hook() -> Block:
    block = Block(lambda *_: 1.0, n=0)
    block.up.register_forward_hook(functools.partial(Count.scaled, block, FACTOR))
    return block


def with_keyword_hook() -> Block:
    block = Block(lambda *_: 1.0)

    def hook(_module: Any, _args: Any, output: torch.Tensor, *, found: list[int]) -> torch.Tensor:
        if block.active:
            found.append(1)
        return output * (1 + FACTOR * len(found))

    hook.__kwdefaults__ = {"found": []}
    block.up.register_forward_hook(hook)  # type: ignore[arg-type]
    return block


def with_counting_hook(count: Any) -> Block:
    block = Block(lambda *_: 1.0)
    if isinstance(count, torch.Tensor):
        block.register_buffer("n", count)
    else:
        block.n = count

    def hook(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if block.active:
            block.n += 1
        return output * (1 + FACTOR * float(block.n))

    block.up.register_forward_hook(hook)
    return block


class Wrapped(Block):
    """A block that wraps a method of its own, as metrics do, so that its copies call the method of the original."""

    def __init__(self) -> None:
        super().__init__(lambda block, _: block.counted(), n=0)
        counted = self.counted
        self.counted = lambda: counted()  # type: ignore[method-assign]

    def counted(self) -> float:
        self.n += 1
        return 1 + FACTOR * self.n


def grown(held: dict[str, int]) -> float:
    held["n"] += 1
    return 1 + FACTOR * held["n"]


def item_of(factory: Any) -> Callable[[], Block]:
    return lambda: Block(
        lambda block, _: 1 + FACTOR * block.ids[len(block.ids)], ids=collections.defaultdict(factory())
    )


SHARED: dict[str, Callable[[], Block]] = {
    "partial of a method": lambda: Block(lambda block, _: block.call(), call=functools.partial(Count().up, 1)),
    "closure in a list": lambda: Block(lambda block, _: block.calls[0](), calls=[counter()]),
    "closure in a tuple": lambda: Block(lambda block, _: block.calls[0](), calls=(counter(),)),
    "closure in an object": lambda: Block(lambda block, _: block.held.call(), held=Count(call=counter())),
    "class of a module whose name begins like a library's": lambda: Block(lambda b, _: b.held.up(), held=Logged()),
    "object that is its own copy": lambda: Block(lambda block, _: block.held.up(), held=Single()),
    "global in a list": with_named,
    "weak reference in an object": with_weak_reference,
    "method as a default": item_of(lambda: Count().up),
    "hook by partial": with_partial_hook,
    "default of a hook's keyword": with_keyword_hook,
    "hook that counts in its block": lambda: with_counting_hook(0),
    "hook that counts in a buffer of its block": lambda: with_counting_hook(torch.zeros(())),
    "method that its block wraps": Wrapped,
}


def check(make: Callable[[], Block], late: int, look: Callable[[list[Block]], Any]) -> None:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        blocks = [make() for _ in range(3)]
        model = nn.Sequential(*blocks)
        try:
            found.append(trained(model, functools.partial(look, blocks), lambda: None, late, attached=attached))
        finally:
            KEPT.clear()
    (seen, weights), (others, own) = found
    assert seen == others
    assert all(map(torch.equal, weights, own))


def count_of(blocks: list[Block]) -> list[Any]:
    """Return what shows of the blocks' state without running their code: numbers in them and in their objects."""
    held = (one for block in blocks for one in (block, *vars(block).values()))
    return [vars(one)["n"] for one in held if hasattr(one, "__dict__") and "n" in vars(one)]


@pytest.mark.parametrize("late", [0, LATE])
@pytest.mark.parametrize("kind", SHARED)
def test_what_copies_share_is_changed_once_or_locked(kind: str, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if late and "weak" in kind:
        pytest.skip("what is outside of a unit and begins to change late is a known limit")
    reasons = ("it changes", "its code can reach")
    monkeypatch.setattr("test_late_state.LOCKED", reasons if late == 0 else ())
    check(SHARED[kind], late, count_of)


def test_an_iterator_as_a_default_is_locked_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_late_state.LOCKED", ("its code can reach ids, an iterator",))
    check(item_of(lambda: itertools.count(1).__next__), 0, lambda blocks: [dict(block.ids) for block in blocks])


def renamed(block: Any, _: Any) -> float:
    if "odd" in vars(block):
        del block.odd
        block.even = True
        return 1.1
    vars(block).pop("even", None)
    block.odd = True
    return 0.9


def registering(block: Any, inner: torch.Tensor) -> Any:
    if not hasattr(block, "mean"):
        block.register_buffer("mean", torch.zeros(inner.shape[-1]))
        block.norm = nn.BatchNorm1d(inner.shape[-1], affine=False)
    block.mean.mul_(0.9).add_(inner.detach().mean(0))
    return 1 + FACTOR * block.mean.mean() + FACTOR * block.norm(inner).mean() + FACTOR * block.norm.num_batches_tracked


def hooking_weights(block: Any, _: Any) -> float:
    if not getattr(block, "hooked", False):
        block.hooked = True
        block.down.weight.register_hook(lambda gradient: gradient * 0.5)
    return 1.0


def tracked(norm: Any, inner: torch.Tensor) -> Any:
    return 1 + 0.1 * norm(inner).mean() + FACTOR * float(norm.num_batches_tracked)


def feature(block: Any, inner: torch.Tensor) -> Any:
    return 1 + FACTOR * block.feats["up"].mean()


def with_features() -> Block:
    block = Block(feature)
    feats = block.feats = {}

    def keep(_module: Any, _args: Any, output: torch.Tensor) -> None:
        if block.active:
            feats["up"] = output

    block.up.register_forward_hook(keep)
    return block


def with_list_and_object() -> Block:
    held = Count(items=[])

    def by(block: Any, _: Any) -> float:
        block.items.append(1)
        return 1 + FACTOR * len(block.held.items)

    return Block(by, held=held, items=held.items)


def mean_in(block: Any, inner: torch.Tensor) -> Any:
    return 1 + FACTOR * block.state["mean"].mul_(0.9).add_(inner.detach().mean()).clone()


LATE_STATE: dict[str, tuple[Callable[[], Block], Callable[[list[Any]], Any]]] = {
    "attribute that is renamed": (lambda: Block(renamed), lambda blocks: ["odd" in vars(one) for one in blocks]),
    "first buffer and part": (
        lambda: Block(registering),
        lambda blocks: [float(buffer.sum()) for one in blocks for buffer in one.buffers()],
    ),
    "generator of torch in an object": (
        lambda: Block(lambda b, _: torch.rand((), generator=b.held.g), held=Count(g=torch.Generator().manual_seed(1))),
        lambda blocks: [one.held.g.get_state().sum().item() for one in blocks],
    ),
    "generator of NumPy in an object": (
        lambda: Block(lambda b, _: float(b.held.g.random()), held=Count(g=np.random.default_rng(1))),
        lambda blocks: [one.held.g.bit_generator.state["state"] for one in blocks],
    ),
    "generator of Python in an object": (
        lambda: Block(lambda b, _: b.held.g.random(), held=Count(g=random.Random(1))),
        lambda blocks: [one.held.g.getstate() for one in blocks],
    ),
    "hook on a weight": (
        lambda: Block(hooking_weights),
        lambda bs: [len(b.down.weight._backward_hooks or ()) for b in bs],
    ),
    "tensor in a dictionary": (
        lambda: Block(mean_in, state={"mean": torch.zeros(())}),
        lambda blocks: [float(one.state["mean"]) for one in blocks],
    ),
    "dictionary that holds a module": (
        lambda: Block(lambda b, _: grown(b.state), state={"teacher": nn.Linear(2, 2), "n": 0}),
        lambda blocks: [one.state["n"] for one in blocks],
    ),
    "module in a list": (
        lambda: Block(lambda b, inner: tracked(b.hidden[0], inner), hidden=[nn.BatchNorm1d(3 * WIDTH, affine=False)]),
        lambda blocks: [float(buffer.sum()) for one in blocks for buffer in one.hidden[0].buffers()],
    ),
    "module in a tuple": (
        lambda: Block(lambda b, inner: tracked(b.hidden[0], inner), hidden=(nn.BatchNorm1d(3 * WIDTH, affine=False),)),
        lambda blocks: [float(buffer.sum()) for one in blocks for buffer in one.hidden[0].buffers()],
    ),
    "method of a list": (
        lambda: Block(lambda b, _: b.note(1) or 1 + FACTOR * len(b.note.__self__), note=[].append),
        lambda blocks: [len(one.note.__self__) for one in blocks],
    ),
    "chain of dictionaries": (
        lambda: Block(lambda b, _: grown(b.state), state=collections.ChainMap({"n": 0})),
        lambda blocks: [one.state["n"] for one in blocks],
    ),
    "features that a hook keeps": (with_features, lambda blocks: [sorted(one.feats) for one in blocks]),
    "list of an object and of the block": (with_list_and_object, lambda blocks: [len(one.items) for one in blocks]),
}


@pytest.mark.parametrize("kind", LATE_STATE)
def test_what_is_reached_by_two_ways_or_made_late_is_changed_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tensor in a container that is written to in place is seen to be only after the step.
    reasons = {"tensor": ("its inputs are written to",), "generator": ("its code may draw from",)}
    monkeypatch.setattr("test_late_state.LOCKED", reasons.get(kind.partition(" ")[0], ()))
    make, look = LATE_STATE[kind]
    check(make, LATE, look)


def test_a_context_that_leads_to_its_model_keeps_the_features_of_a_pass() -> None:
    class Context:
        def __init__(self, owner: Any) -> None:
            self.owner, self.features = [owner], dict[str, torch.Tensor]()

    def by(block: Any, inner: torch.Tensor) -> Any:
        block.context.features["last"] = inner.mean()
        return 1 + FACTOR * block.context.features["last"]

    def make() -> Block:
        block = Block(by)
        block.context = Context(block)  # type: ignore[assignment]
        return block

    check(make, 0, lambda blocks: [sorted(one.context.features) for one in blocks])  # type: ignore[attr-defined]


class Bank(nn.Module):
    """A part whose buffer is larger than what is copied before each call, and written to in each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(300, 100))

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        self.bank.mul_(0.9).add_(inner.detach().mean())
        return inner * (1 + self.bank.mean())


def test_a_list_of_its_own_parts_does_not_lock_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Block:
        bank = Bank()
        return Block(lambda block, inner: block.bank(inner).mean(), bank=bank, refs=[bank])

    monkeypatch.setattr("test_late_state.LOCKED", ())
    check(make, 0, lambda blocks: [float(one.bank.bank.sum()) for one in blocks])  # type: ignore[attr-defined]


def with_graph(layout: torch.layout, *, is_buffer: bool, fades: bool) -> Block:
    def by(block: Any, inner: torch.Tensor) -> torch.Tensor:
        if fades:
            block.graph.mul_(0.99)
        return torch.sparse.mm(block.graph, inner)

    block = Block(by)
    graph = (torch.eye(32) + torch.eye(32).roll(1, 0)).to_sparse(layout=layout)
    if is_buffer:
        block.register_buffer("graph", graph, persistent=False)
    else:
        block.graph = graph
    return block


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("is_buffer", "fades"),
    [
        pytest.param(True, False, id="buffer that is read"),
        pytest.param(True, True, id="buffer that is written to"),
        pytest.param(False, False, id="attribute that is read"),
    ],
)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_block_with_a_sparse_tensor_is_recomputed(
    layout: torch.layout, is_buffer: bool, fades: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_late_state.LOCKED", ())
    check(lambda: with_graph(layout, is_buffer=is_buffer, fades=fades), 0, lambda _: None)


def test_a_large_sparse_buffer_is_known_to_be_constant() -> None:
    block, places = nn.Module(), torch.arange(2**17).expand(2, -1)
    graph = torch.sparse_coo_tensor(places, torch.ones(2**17), is_coalesced=True, check_invariants=True)
    block.register_buffer("graph", graph)
    copies = copy_buffers(block)
    assert drop_constants(block, copies)
    assert not copies
    assert not copy_buffers(block)


@contextmanager
def scope(entered: list[int]) -> Iterator[None]:
    with torch.profiler.record_function("block"):
        yield
    entered.extend(entered[:1])


class Scoped(Block):
    @scope([])
    def forward(self, x: torch.Tensor, handed: Any = None) -> torch.Tensor:
        return super().forward(x)


ENTERED = [1]


class Counted(Block):
    @scope(ENTERED)
    def forward(self, x: torch.Tensor, handed: Any = None) -> torch.Tensor:
        return super().forward(x)


def test_a_forward_that_a_context_manager_decorates_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_late_state.LOCKED", ())
    check(lambda: Scoped(lambda *_: 1.0), 0, lambda _: None)


def test_what_a_decorating_context_manager_changes_locks_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_late_state.LOCKED", ("it changes what scope is given",))

    def make() -> Block:
        ENTERED[:] = [1]
        return Counted(lambda *_: FACTOR * len(ENTERED))

    check(make, 0, lambda _: len(ENTERED))


class Reader(nn.Module):
    def __init__(self, book: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("book", book)

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        return torch.softmax(inner @ self.book.t(), -1) @ self.book


def read_and_updated(block: Any, inner: torch.Tensor) -> Any:
    found = block.read(inner.detach())
    block.book.mul_(0.9).add_(inner.detach()[:8], alpha=0.1)
    return found


@pytest.mark.parametrize("late", [0, LATE])
def test_a_buffer_that_is_registered_twice_is_recomputed_as_one(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Block:
        block = Block(read_and_updated)
        block.register_buffer("book", torch.randn(8, 3 * WIDTH))
        block.read = Reader(block.book)
        return block

    monkeypatch.setattr("test_late_state.LOCKED", ())
    check(make, late, lambda blocks: [float(one.book.sum()) for one in blocks])  # type: ignore[operator]


def drawn(width: int) -> torch.Tensor:
    return torch.randn(width)


@functools.cache
def drawn_table(_number: int, width: int) -> torch.Tensor:
    return drawn(width)


@functools.cache
def waves(_number: int, width: int) -> torch.Tensor:
    return torch.arange(width).cos()


class Draws(Block):
    """A block that draws random numbers besides what its table consists of."""

    def __init__(self, table: Callable[[int, int], torch.Tensor], number: int) -> None:
        super().__init__(lambda block, inner: block.table(block.number, inner.shape[1]), number=number)
        self.table = table

    def forward(self, x: torch.Tensor, handed: Any = None) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1)


@pytest.mark.parametrize("table", [drawn_table, waves])
def test_results_that_blocks_keep_are_drawn_as_often_as_without(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ("its code can reach table, a cache of results that may be drawn at random",)
    monkeypatch.setattr("test_late_state.LOCKED", reasons if table is drawn_table else ())
    numbers = itertools.cycle(range(3))

    def make() -> Block:
        table.cache_clear()
        return Draws(table, next(numbers))

    check(make, 0, lambda _: torch.get_rng_state().sum().item())


class Halving(Mix):
    """A block that halves the gradient of its input by a hook."""

    def forward(self, x: torch.Tensor, handed: Any = None) -> torch.Tensor:
        x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


class Decoder(nn.Module):
    """Blocks of which the first is handed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(32, WIDTH))
        self.blocks = nn.Sequential(*(Halving() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks(self.latent) + x
        return found


def test_a_hook_on_what_a_block_is_handed_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_late_state.LOCKED", ())
    assert_same(lambda: (Decoder(), lambda: None), 0)


class Key:
    pass


KEYS = [Key() for _ in range(100)]


def noting(block: Any, _: Any) -> float:
    key = KEYS[len(block.noted)]
    if isinstance(block.noted, weakref.WeakSet):
        block.noted.add(key)
    else:
        block.noted[key] = key
    return 1 + FACTOR * len(block.noted)


def unused(_block: Any, _: Any) -> float:
    return 1.0


@pytest.mark.parametrize("use", [unused, noting])
@pytest.mark.parametrize("kind", [weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet])
def test_a_weak_container_locks_a_block_only_if_its_code_names_it(
    kind: Any, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = (f"its code may change noted, a {kind.__name__}",)
    monkeypatch.setattr("test_late_state.LOCKED", reasons if use is noting else ())
    check(lambda: Block(use, noted=kind()), LATE, lambda blocks: [len(one.noted) for one in blocks])  # type: ignore[arg-type]
