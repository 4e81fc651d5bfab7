"""Trace a step without computing it: fake tensors have shapes and lifetimes, but no values and no memory.

Every operator is intercepted to record what it would allocate, compute and move. Temporary memory inside a kernel is
not seen, so estimated peaks are slightly low.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autotune.cost_model.measured_rates import Work
from autotune.mechanics.memory_meter import dense_parts
from autotune.mechanics.step_trace import Place, StepTracer
from autotune.mechanics.watching_hooks import yielding_saved_hooks

# Returns the estimated seconds of a call of an operator.
OperatorTime = Callable[[Work], float]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Run the body with another value of an attribute."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Run the body with fused attention, as on a GPU; dropout is turned off because the CPU's kernel lacks it.

    The function itself is replaced, because a mode would not reach recomputation, which runs inside backward.
    """
    original = F.scaled_dot_product_attention

    def fused(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **rest: Any
    ) -> Any:
        return original(query, key, value, attn_mask, 0.0, *more, **rest)

    with _replaced(F, "scaled_dot_product_attention", fused):
        yield


@contextmanager
def fake_8_bit_states() -> Iterator[None]:
    """Run the body with optimizers of bitsandbytes that take fake parameters: states as they are, and no arithmetic.

    An update reads and writes states and parameter once, and reads the gradient. The library must be loaded already.
    """
    library = sys.modules.get("bitsandbytes.optim.optimizer")
    if library is None:
        yield
        return

    def fill_qmap(self: Any) -> None:
        self.name2qmap = {name: torch.empty(256) for name in ("dynamic", "udynamic")}

    @torch.no_grad()
    def update_step(self: Any, _group: Any, parameter: torch.Tensor, _gindex: int, _pindex: int) -> None:
        for name in {"state1", "state2"} & {*self.state[parameter]}:
            self.state[parameter][name].add_(0)
        parameter.add_(parameter.grad)  # type: ignore[arg-type]  # a parameter that is updated has a gradient

    with ExitStack() as replacing:
        replacing.enter_context(_replaced(library.Optimizer8bit, "fill_qmap", fill_qmap))
        for kind in (library.Optimizer1State, library.Optimizer2State):
            replacing.enter_context(_replaced(kind, "update_step", update_step))
        yield


@contextmanager
def fake_conversions() -> Iterator[None]:
    """Run the body with module conversions (``to``, ``half``) replacing fake parameters, which torch cannot swap."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def converted(tensor: torch.Tensor, convert: Any) -> torch.Tensor:
        # A shared parameter stays shared. The original is kept alive, so that its id is not reused.
        if id(tensor) not in made:
            with torch.no_grad():
                other = convert(tensor)
            other = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
            made[id(tensor)] = tensor, other
        return made[id(tensor)][1]

    def apply(self: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
        # A later conversion may convert the same tensors again.
        made.clear()
        for module in self.modules() if recurse else [self]:
            for owned in (module._parameters, module._buffers):
                for name, tensor in owned.items():
                    if tensor is not None:
                        owned[name] = converted(tensor, convert)  # type: ignore[assignment]
        return self

    with _replaced(nn.Module, "_apply", apply):
        yield


class _Operators(TorchDispatchMode):
    """A mode that passes every operator to the tracer."""

    def __init__(self, tracer: FakeTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, scratch = func(*args, **kwargs), None
        if "mkldnn_rnn_layer" in str(func._overloadpacket):
            result, scratch = _with_workspaces(func, args, result)
        self._tracer.note(func, args, kwargs, result, scratch)
        return result


class FakeTracer(StepTracer):
    """A tracer of steps on fake tensors.

    Attributes:
        seconds: estimated seconds by place, for all traced micro-batches.

    Args:
        model: a model of fake tensors.
        units: names of the units.
        operator_time: returns the estimated seconds of an operator.
        allocated: returns the bytes that the allocator counts for a block of a given size.
    """

    def __init__(
        self, model: nn.Module, units: Iterable[str], operator_time: OperatorTime, allocated: Callable[[int], int]
    ) -> None:
        super().__init__(model, units, torch.device("cpu"))
        self._operator_time = operator_time
        self._allocated = allocated
        self._clock = 0
        self._marks: list[float] = []
        self._changes: list[tuple[float, int, int]] = []
        self._alive: dict[int, Any] = {}
        self.seconds: dict[Place, float] = {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace one optimizer step, which the body runs."""
        with (
            self.watch,
            yielding_saved_hooks(self._pack, self._give_way),
            _Operators(self),
        ):
            yield
        self.trace = self._assemble(self._marks, self._changes)

    def know(self, resident: Iterable[torch.Tensor]) -> None:
        """Register tensors that exist before the step.

        Args:
            resident: the tensors.
        """
        for tensor in parts_of(list(resident)):
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = storage

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, scratch: torch.Tensor | None = None) -> None:
        """Record the allocations and the estimated time of one operator.

        Args:
            func: the operator.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: its result.
            scratch: memory that it needs besides while it runs; ``None`` for none.
        """
        made = parts_of(result)
        if not made:
            # Most calls only ask for a tensor's device.
            return
        given = {self._address(leaf) for leaf in parts_of((args, kwargs))}
        for tensor in [*made, *([] if scratch is None else [scratch])]:
            self._see_storage(tensor.untyped_storage())
        views = all(self._address(tensor) in given for tensor in made) and not func._schema.is_mutable
        if self.watch.places and not views:
            seconds = self._operator_time(work_of(func, args, kwargs, result))
            self.seconds[self.watch.place] = self.seconds.get(self.watch.place, 0.0) + seconds

    def _see_storage(self, storage: Any) -> None:
        address = storage._cdata
        if address in self._alive:
            return
        self._alive[address] = weakref.ref(storage, lambda _: self._release(address, size))
        size = self._allocated(storage.nbytes())
        self._changes.append((self._tick(), size, address))

    def _release(self, address: int, size: int) -> None:
        del self._alive[address]
        self._changes.append((self._tick(), -size, address))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _mark(self) -> None:
        self._marks.append(self._tick())

    def _address(self, tensor: torch.Tensor) -> int:
        return next((part.untyped_storage()._cdata for part in dense_parts(tensor)), id(tensor))


def parts_of(tree: Any) -> list[torch.Tensor]:
    """Return the dense tensors of a tree, and those that its sparse ones consist of."""
    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [part for tensor in found for part in dense_parts(tensor)]


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Return what a call of an operator computes and moves."""
    leaves = parts_of((args, kwargs, result))
    moved = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    formats = [leaf.dtype for leaf in leaves if leaf.is_floating_point()]
    return Work(
        operator=_name(func, args),
        operations=_operations(func, args, kwargs, result),
        moved_bytes=moved,
        dtype=str(formats[0] if formats else torch.int64).removeprefix("torch."),
    )


def _name(func: Any, args: Any) -> str:
    """Return an operator's name, with what decides which kernel runs: the size of a head, the kind of convolution."""
    name = str(func._overloadpacket)
    if "scaled_dot_product" in name and isinstance(args[0], torch.Tensor):
        return f"{name}/{args[0].shape[-1]}"
    if name in ("aten.convolution", "aten.convolution_backward"):
        weight, groups = (args[2], args[9]) if "backward" in name else (args[1], args[8])
        return f"{name}/{'grouped' if groups > 1 else f'{weight.dim() - 2}d'}"
    return name


def _with_workspaces(func: Any, args: Any, result: Any) -> tuple[Any, torch.Tensor]:
    """Return a fake LSTM layer's result with oneDNN's workspace, which torch leaves empty, and its scratch.

    Fitted to layers of 16 to 512 channels in 32 and 16 bits: the workspace within 2 %, the scratch within 15 %.
    """
    rows, weights, hidden = args[0], args[1].numel() + args[2].numel(), args[1].shape[0] // 4
    steps, samples, size = rows.shape[0], rows.shape[1], rows.element_size()
    backward = "backward" in str(func._overloadpacket)
    packed = weights * (size + 4) if backward and size < 4 else weights * size
    scratch = rows.new_empty(packed + (16 * steps * samples * hidden if size == 4 else 0), dtype=torch.uint8)
    if backward:
        return result, scratch
    kept = rows.new_empty(samples * hidden * (steps * (25 + 9 * size) + 40), dtype=torch.uint8)
    return (*result[:-1], kept), scratch


def _operations(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return an operator's floating-point operations as torch counts them; 0 for one that torch does not count."""
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    name = str(func._overloadpacket)
    if "mkldnn_rnn_layer" in name:
        # A product of each step with both matrices; in backward, two of each.
        products = args[0].shape[:2].numel() * (args[1].numel() + args[2].numel())
        return float(2 * products * (1 + ("backward" in name)))
    if "scaled_dot_product" not in name:
        return 0.0
    # Torch does not count the CPU's fused kernel. The first argument of its backward is the output's gradient.
    backward = "backward" in name
    query, key, value = [leaf for leaf in args if isinstance(leaf, torch.Tensor)][backward : backward + 3]
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    products = 2.0 * pairs * (query.shape[3] + value.shape[3])
    # Backward recomputes the scores and computes four products where forward computes two.
    return 2.5 * products if backward else products
