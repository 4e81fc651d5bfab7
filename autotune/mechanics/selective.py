"""Keep some of a unit's activations until its backward pass, and compute the others from them when they are needed.

While the unit runs, its operations are recorded below autograd and autocast. When it has run, the tensors that autograd
has saved are divided: a minimum cut of the recorded graph (:mod:`autotune.mechanics.recorded_graph`) finds the fewest
bytes from which all of them can be computed again by operations that may be repeated. Only these stay. In the backward
pass the recorded operations themselves run again, so no code of the user's does; an operation of whose results backward
needs nothing does not. Random operations are never repeated: what they drew is kept, a mask in one bit per number.

Whatever is not understood is kept: tensor subclasses, results of operations that may not be repeated, and tensors that
were written to in place other than by arithmetic.

Source: the cut is that of PyTorch's partitioner for compiled functions (Chen, He and Li, 2022), here for code as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.compiled import CompiledForward, is_compiled
from autotune.mechanics.activations import Recomputation
from autotune.mechanics.compressed import mask_from_bits, mask_in_bits
from autotune.mechanics.devices import accelerator_kind
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.recorded_graph import GroupFacts, kept_groups
from autotune.mechanics.repeats import is_due
from autotune.mechanics.trees import tensors
from autotune.mechanics.watching_hooks import keeps

_aten = torch.ops.aten
# Sources that autograd has not saved are copied up to this size.
_SMALL_BYTES = 2**16
_KINDS = (torch.Tensor, nn.Parameter, FakeTensor)
_WRITTEN = "one of the variables needed for gradient computation has been modified by an inplace operation"
_SOURCE_WRITTEN = "a tensor from which its activations are computed was written to before its backward pass"

# Operations beside arithmetic by element and views that take little time per byte of their results.
_CHEAP = (
    *("native_layer_norm", "native_group_norm", "_fused_rms_norm", "_softmax", "_log_softmax", "_to_copy", "glu"),
    *("cat", "stack", "roll", "flip", "repeat", "tril", "triu", "constant_pad_nd", "_unsafe_view", "_reshape_copy"),
    *("embedding", "gather", "index", "index_select", "mean", "sum", "var", "var_mean", "amax", "amin", "cumsum"),
    *("linalg_vector_norm", "avg_pool2d", "max_pool2d_with_indices", "upsample_nearest2d", "upsample_bilinear2d"),
)
# Further operations that may be repeated, given enough time.
_COSTLY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv", "addmv", "dot")


class _Kind(Enum):
    """How an operation is repeated."""

    ALIAS, MASK, DROPOUT, NORM, STATISTICS, CHEAP, COSTLY, IN_PLACE, NEVER = range(9)


_SPECIAL = {
    _aten.detach.default: _Kind.ALIAS,
    _aten.alias.default: _Kind.ALIAS,
    _aten.bernoulli_.float: _Kind.MASK,
    _aten.bernoulli.p: _Kind.MASK,
    _aten.native_dropout.default: _Kind.DROPOUT,
    _aten.native_batch_norm.default: _Kind.NORM,
    _aten._native_batch_norm_legit.default: _Kind.NORM,
    _aten.cudnn_batch_norm.default: _Kind.STATISTICS,
    _aten.miopen_batch_norm.default: _Kind.STATISTICS,
}


@functools.cache
def _described(func: Any) -> tuple[_Kind, tuple[tuple[int, str], ...]]:
    """Return how an operation is repeated, and the places and names of the arguments that it writes to."""
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = str(func.overloadpacket).removeprefix("aten.")
    by_element = torch.Tag.pointwise in func.tags
    if func in _SPECIAL:
        kind = _SPECIAL[func]
    elif torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten" or name == "as_strided":
        kind = _Kind.NEVER
    elif writes:
        kind = _Kind.IN_PLACE if by_element and [place for place, _ in writes] == [0] else _Kind.NEVER
    elif func.is_view or by_element or name in _CHEAP:
        kind = _Kind.CHEAP
    else:
        kind = _Kind.COSTLY if name in _COSTLY else _Kind.NEVER
    return kind, writes


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Value:
    """A tensor that the unit used or made.

    Attributes:
        group: number of its storage, at one version, among all.
        geometry: dtype, offset, size and strides.
        op: the operation that can make it again; ``None`` for one that must be kept.
        place: its place among the operation's results.
        tensor: the tensor; while the unit runs, of every value that may be kept; afterwards, of those that are.
        version: the version of ``tensor`` that holds the value.
        saved: how often autograd has saved it.
        again: the value computed again, until autograd has asked for it that often.
        awaited: how often autograd will still ask for it in this backward pass.
        digest: a number that stands for its elements, if it is checked.
    """

    group: int
    geometry: tuple[Any, ...]
    op: _Op | None
    place: int
    tensor: torch.Tensor | None
    version: int = 0
    saved: int = 0
    again: torch.Tensor | None = None
    awaited: int = 0
    digest: torch.Tensor | None = None

    def restored(self) -> torch.Tensor:
        """Return the value, when autograd asks for it."""
        if self.tensor is not None:
            if self.tensor._version != self.version:
                raise RuntimeError(_WRITTEN)
            return self.tensor
        if not self.awaited:
            _maker(self).call.await_all()
        self.awaited -= 1
        found = _computed(self) if self.again is None else self.again
        self.again = found if self.awaited else None
        return found


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a unit.

    Attributes:
        unit: the unit, to report to.
        saved: the values that autograd has saved, as far as they are alive.
        operations: number of recorded operations that may be repeated.
        repeated: number of operations that were repeated since a backward pass began.
    """

    unit: Recomputation
    saved: list[weakref.ref[_Value]] = field(default_factory=list)
    operations: int = 0
    repeated: int = 0

    def lacking(self) -> list[_Value]:
        """Return the values that autograd will still ask for and that must be computed again."""
        found = (reference() for reference in self.saved)
        return [one for one in found if one is not None and one.awaited and one.tensor is None and one.again is None]

    def await_all(self) -> None:
        """Expect another backward pass."""
        self.repeated = 0
        for reference in self.saved:
            value = reference()
            if value is not None:
                value.awaited = value.saved


@dataclass(slots=True, eq=False)
class _Op:
    """A recorded operation that may be repeated.

    Attributes:
        run: the operation.
        args: its positional arguments, with values instead of tensors.
        kwargs: its keyword arguments.
        sources: the values among the arguments.
        call: the call that recorded it.
        made: its results, as far as they are alive.
    """

    run: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    sources: Sequence[_Value]
    call: _Call
    made: list[weakref.ref[_Value] | None] = field(default_factory=list)


def _filled(argument: Any, of: Callable[[_Value], torch.Tensor]) -> Any:
    """Return an argument with tensors instead of values."""
    if type(argument) is _Value:
        return of(argument)
    return [_filled(one, of) for one in argument] if type(argument) in (list, tuple) else argument


def _computed(wanted: _Value) -> torch.Tensor:
    """Compute a value again, with all on the way to it; what autograd will ask for later is remembered."""
    call = _maker(wanted).call
    order, uses = _plan_of([wanted])
    call.repeated += len(order)
    if call.repeated > 2 * call.operations:
        # Long chains: all that backward will ask for is computed at once, each operation one time.
        order, uses = _plan_of([wanted, *call.lacking()])
        call.repeated = 0
    found: dict[_Value, torch.Tensor] = {}

    def of(value: _Value) -> torch.Tensor:
        if value.tensor is not None:
            if value.tensor._version != value.version:
                call.unit.bar_late(_SOURCE_WRITTEN)
            return value.tensor
        if value.again is not None:
            return value.again
        uses[value] -= 1
        return found[value] if uses[value] else found.pop(value)

    with torch.no_grad(), _without_autocast():
        for op in order:
            results = op.run(
                *(_filled(one, of) for one in op.args), **{name: _filled(one, of) for name, one in op.kwargs.items()}
            )
            _remember(op, results, uses, found)
            del results
    result = found.pop(wanted) if wanted in found else wanted.again
    assert result is not None
    return result


def _remember(op: _Op, results: Any, uses: Mapping[_Value, int], found: dict[_Value, torch.Tensor]) -> None:
    """Note what an operation has computed again, as far as it is needed."""
    for place, result in enumerate(results if isinstance(results, tuple | list) else (results,)):
        reference = op.made[place] if place < len(op.made) else None
        value = None if reference is None else reference()
        if value is None or value.tensor is not None:
            continue
        _check(value, result, op.call.unit)
        if value.awaited and value.again is None:
            value.again = result
        elif value in uses:
            found[value] = result


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Run the body without autocast: recorded operations have their casts."""
    with ExitStack() as stack:
        for kind in ("cpu", *accelerator_kind()):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _plan_of(wanted: Sequence[_Value]) -> tuple[list[_Op], dict[_Value, int]]:
    """Return the operations that compute some values, in order, and how often each value on the way is used."""
    order: dict[_Op, None] = {}
    uses: dict[_Value, int] = dict.fromkeys(wanted, 1)
    waiting: list[tuple[_Op, bool]] = [(_maker(value), False) for value in reversed(wanted)]
    while waiting:
        op, is_ready = waiting.pop()
        if op in order:
            continue
        lacking = [value for value in op.sources if value.tensor is None and value.again is None]
        if is_ready:
            order[op] = None
            for value in lacking:
                uses[value] = uses.get(value, 0) + 1
            continue
        waiting.append((op, True))
        waiting += [(_maker(value), False) for value in lacking if _maker(value) not in order]
    return list(order), uses


def _maker(value: _Value) -> _Op:
    assert value.op is not None
    return value.op


def _check(value: _Value, result: torch.Tensor, unit: Recomputation) -> None:
    """Compare a value that was computed again with the first one, by their digests."""
    if value.digest is not None:
        found = _digest(result)
        if found.dtype == value.digest.dtype:
            # Else they are of different kinds, because one of the tensors is aligned in memory and the other is not.
            unit.note_difference(~torch.isclose(found, value.digest, 0, 0, equal_nan=True))
        value.digest = None


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number by which a tensor is compared, on its device, without a copy, for which no memory was planned.

    It is a sum over the tensor's bits; of a part of another tensor, whose elements lie apart, it is the norm. Of whole
    numbers that lie apart it is their sum, which needs a copy.
    """
    own = tensor.detach()
    own = own.permute(sorted(range(own.dim()), key=own.stride, reverse=True))
    is_aligned = own.nbytes % 8 == 0 and own.storage_offset() * own.itemsize % 8 == 0
    if own.is_contiguous() and is_aligned and not (own.is_conj() or own.is_neg()):
        return own.view(-1).view(torch.int64).sum()
    if own.itemsize > 1 and (own.is_floating_point() or own.is_complex()):
        norm: torch.Tensor = torch.linalg.vector_norm(own)
        return norm
    numbers = own.view(torch.uint8) if own.itemsize == 1 else own
    # Each kind of digest has another dtype.
    return numbers.sum(dtype=torch.int64).to(torch.int32)


def selective(
    unit: Recomputation,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    costly: bool,
) -> Any:
    """Call a unit's forward so that autograd keeps few bytes, from which it computes the others again.

    A unit with compiled code keeps all that it saves.

    Args:
        unit: the unit's module.
        forward: its forward.
        args: positional arguments.
        kwargs: keyword arguments.
        costly: whether matrix products and convolutions may be repeated, too; attention is not.
    """
    if unit.compiled is None:
        unit.compiled = has_compiled_code(unit.module)
    if unit.compiled or not unit.may_repeat():
        return forward(*args, **kwargs)
    recorder = _Recorder(unit, costly=costly)
    try:
        with saved_tensors_hooks(recorder.pack, _Value.restored), recorder:
            result = forward(*args, **kwargs)
    except BaseException:
        recorder.drop()
        raise
    recorder.finish(result)
    return result


# Stands for a tensor that is not understood.
_STRANGER = _Value(-1, (), None, 0, None)


def has_compiled_code(module: nn.Module) -> bool:
    """Return whether a part of a module is compiled, or names a compiled function: a mode would run it uncompiled."""
    for part in module.modules():
        if is_compiled(part):
            return True
        own = vars(part).get("forward")
        if isinstance(getattr(own, "original", own), CompiledForward):
            return True
        for kind in type(part).__mro__:
            function = vars(kind).get("forward")
            if isinstance(function, FunctionType):
                known = (function.__globals__.get(name) for name in function.__code__.co_names)
                if any(hasattr(one, "_torchdynamo_orig_callable") for one in (function, *known)):
                    return True
    return False


class _Recorder(TorchDispatchMode):
    """Recorder of the operations of one call of a unit, and of the tensors that autograd saves in it.

    Args:
        unit: the unit.
        costly: whether matrix products and convolutions may be repeated.
    """

    def __init__(self, unit: Recomputation, *, costly: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit, self._call = unit, _Call(unit)
        self._repeated = {_Kind.CHEAP, _Kind.COSTLY} if costly else {_Kind.CHEAP}
        own = [*unit.module.parameters(), *unit.module.buffers()]
        self._free = frozenset(one.untyped_storage()._cdata for one in own if type(one) in _KINDS)
        # Values by storage, number of writes to it, and geometry; and groups by the first two.
        self._values: dict[tuple[Any, ...], _Value] = {}
        self._writes: dict[int, int] = {}
        self._groups: dict[tuple[int, int], int] = {}
        # Of each group: bytes, the groups that it is made from, and its key, with a reference that keeps the storage's
        # address from being used again; and the groups that cannot be made again.
        self._sizes: list[int] = []
        self._made_from: list[tuple[int, ...]] = []
        self._keys: list[tuple[tuple[int, int], StorageWeakRef]] = []
        self._fixed: set[int] = set()
        # Groups of tensors that the unit was given, its own weights excepted.
        self._outside: set[int] = set()
        self._all: list[_Value] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, writes = _described(func)
        if kind is _Kind.ALIAS:
            return func(*args, **kwargs)
        sources: list[_Value] = []
        known = [self._noted(one, sources) for one in args]
        named = {name: self._noted(one, sources) for name, one in kwargs.items()} if kwargs else kwargs
        result = func(*args, **kwargs)
        for place, name in writes:
            self._count_write(args[place] if place < len(args) else kwargs.get(name))
        if kind in (_Kind.NORM, _Kind.STATISTICS) and not writes and args[5]:
            # The schema does not say that running statistics are written to.
            self._count_write(args[3:5])
        results = result if isinstance(result, tuple | list) else (result,)
        self._add_results(self._repetition(func, kind, args, known, named, sources, results), results)
        return result

    def _noted(self, argument: Any, sources: list[_Value]) -> Any:
        """Return an argument with values instead of tensors; the values are added to the sources."""
        if isinstance(argument, torch.Tensor):
            if not _is_known(argument):
                sources.append(_STRANGER)
                return argument
            value = self._value_of(argument)
            sources.append(value)
            return value
        return [self._noted(one, sources) for one in argument] if type(argument) in (list, tuple) else argument

    def _count_write(self, argument: Any) -> None:
        for one in argument if isinstance(argument, list | tuple) else (argument,):
            if _is_known(one):
                key = one.untyped_storage()._cdata
                self._writes[key] = self._writes.get(key, 0) + 1

    def _repetition(
        self,
        func: Any,
        kind: _Kind,
        args: Sequence[Any],
        known: Sequence[Any],
        named: Mapping[str, Any],
        sources: Sequence[_Value],
        results: Sequence[Any],
    ) -> _Op | None:
        """Return the operation that makes the results again; ``None`` if they must be kept."""
        if kind is _Kind.NEVER or not sources or _STRANGER in sources:
            return None
        if kind in self._repeated:
            return _Op(func, known, named, sources, self._call)
        if kind is _Kind.IN_PLACE and _is_dense(args[0]):
            # On a copy, which has the same strides.
            return _Op(_on_copy(func), known, named, sources, self._call)
        if kind is _Kind.MASK and results[0].numel():
            # Of a mask of zeros and ones that was drawn at random, the bits are kept.
            bits = mask_in_bits(results[0] != 0)
            kept = self._add(bits.packed, None, 0)
            return _Op(mask_from_bits, (kept, bits.like, results[0].dtype), {}, (kept,), self._call)
        if kind is _Kind.DROPOUT and args[2] is not False:
            self._add(results[1], None, 1)
            mask, scale = self._value_of(results[1]), 1 / (1 - args[1]) if args[1] < 1 else 0.0
            return _Op(_dropped, (known[0], mask, scale), {}, (sources[0], mask), self._call)
        if kind is _Kind.NORM and args[5] is True:
            # Without the running statistics, which a repetition must not change again.
            own = [value for value in known[:3] if isinstance(value, _Value)]
            return _Op(_aten.native_batch_norm.default, (*known[:3], None, None, *known[5:]), {}, own, self._call)
        return None

    def _add_results(self, op: _Op | None, results: Sequence[Any]) -> None:
        for place, one in enumerate(results):
            value = self._add(one, op, place) if _is_known(one) else None
            if op is not None:
                op.made.append(None if value is None or value.op is not op else weakref.ref(value))

    def _value_of(self, tensor: torch.Tensor) -> _Value:
        """Return the value that a tensor holds; one from outside the unit is kept."""
        known = len(self._sizes)
        value = self._add(tensor, None, 0)
        if value.group == known and self._sizes[known]:
            self._outside.add(known)
        return value

    def _add(self, tensor: torch.Tensor, op: _Op | None, place: int) -> _Value:
        """Return the value that a tensor holds; if it is not known, it is added as a result of an operation."""
        storage = tensor.untyped_storage()._cdata
        key = storage, self._writes.get(storage, 0)
        geometry: tuple[Any, ...] = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj() or tensor.is_neg():
            # Such a view has other numbers than its storage.
            op, geometry = None, (*geometry, tensor.is_conj(), tensor.is_neg())
        found = self._values.get((key, geometry))
        if found is not None:
            return found
        group = self._groups.setdefault(key, len(self._sizes))
        if group == len(self._sizes):
            is_free = storage in self._free and not key[1]
            self._sizes.append(0 if is_free else tensor.untyped_storage().nbytes())
            self._made_from.append(() if op is None else tuple(sorted({value.group for value in op.sources})))
            self._keys.append((key, StorageWeakRef(tensor.untyped_storage())))
        if op is None:
            # It cannot be made again, so its storage must be kept.
            self._fixed.add(group)
        value = _Value(group, geometry, op, place, tensor if group in self._fixed else None)
        self._values[key, geometry] = value
        self._all.append(value)
        return value

    def pack(self, tensor: torch.Tensor) -> _Value:
        """Return the value of a tensor that autograd saves."""
        if not _is_known(tensor):
            kept = tensor.detach()
            return _Value(-1, (), None, 0, kept, kept._version)
        value = self._value_of(tensor)
        if not value.saved:
            self._call.saved.append(weakref.ref(value))
        value.saved += 1
        value.awaited = value.saved
        value.tensor, value.version = tensor, tensor._version
        return value

    def finish(self, result: Any) -> None:
        """Decide what is kept, and let go of the rest.

        Args:
            result: what the unit returns. The caller may write to it, and to what the unit was given, unless autograd
                has saved it; so nothing is computed from these.
        """
        returned = {one.untyped_storage()._cdata for one in tensors(result) if _is_known(one)}
        saved = {value.group for value in self._all if value.saved}
        held: dict[int, torch.Tensor] = {}
        for value in self._all:
            if value.tensor is not None:
                held.setdefault(value.group, value.tensor)
        written = {group for group, (key, _) in enumerate(self._keys) if self._writes.get(key[0], 0) != key[1]}
        # A saved tensor that was written to, in a way that autograd has not noticed or that has left it alone, is kept
        # as it is now, and says nothing of what it was.
        fixed = self._fixed | (written & saved)
        fixed |= {group for group, sources in enumerate(self._made_from) if not (written & saved).isdisjoint(sources)}
        facts = tuple(
            GroupFacts(
                nbytes=size,
                made_from=None if group in fixed else sources,
                is_saved=group in saved,
                # What backward needs can be kept in any case: autograd has saved it.
                can_stay=group in saved
                or (group in held and group not in written and group not in self._outside and key[0] not in returned),
            )
            for group, (size, sources, (key, _)) in enumerate(
                zip(self._sizes, self._made_from, self._keys, strict=True)
            )
        )
        try:
            kept = kept_groups(facts)
        except any_error() as error:  # whatever fails here, the run goes on
            self._unit.barred = f"{type(error).__name__}: {error}"
            kept = frozenset(saved)
        self._unit.selections += 1
        checks = self._unit.checks and is_due(self._unit.selections)
        for value in self._all:
            if value.group in kept and (value.saved or value.group not in written):
                # A bias, which backward itself does not need, may be updated before it is used again.
                may_change = not self._sizes[value.group] and value.group not in saved
                _keep(value, held[value.group], may_change=may_change)
            else:
                if checks and value.saved and value.tensor is not None:
                    value.digest = _digest(value.tensor)
                value.tensor = None
        keeps(value.tensor for value in self._all if value.tensor is not None)
        self._clear()

    def drop(self) -> None:
        """Let go of all tensors, after the unit has failed."""
        for value in self._all:
            value.tensor = None
        self._clear()

    def _clear(self) -> None:
        self._call.operations = len({value.op for value in self._all if value.op is not None})
        self._values, self._all, self._keys = {}, [], []


def _keep(value: _Value, held: torch.Tensor, *, may_change: bool) -> None:
    """Make a value keep its tensor, without a graph.

    Args:
        value: the value.
        held: some tensor with the same storage.
        may_change: whether a small one must be copied.
    """
    value.op = None
    if value.tensor is None:
        dtype, *geometry = value.geometry
        value.tensor = torch.empty(0, dtype=dtype, device=held.device).set_(held.untyped_storage(), *geometry)
    value.tensor = value.tensor.detach()
    if may_change and value.tensor.nbytes <= _SMALL_BYTES:
        value.tensor = value.tensor.clone()
    if not value.saved:
        value.version = value.tensor._version


def _is_known(one: Any) -> bool:
    """Return whether something is a plain tensor."""
    return isinstance(one, torch.Tensor) and type(one) in _KINDS and one.layout is torch.strided and not one.is_nested


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a copy of a tensor has the same strides."""
    return tensor.is_contiguous() or tensor.stride() == torch.empty_like(tensor, device="meta").stride()


@functools.cache
def _on_copy(func: Any) -> Callable[..., Any]:
    """Return an operation in place, on a copy of its first argument."""
    return lambda first, *others, **named: func(first.clone(), *others, **named)


def _dropped(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the result of dropout with a known mask."""
    return x.mul(mask).mul_(scale)
