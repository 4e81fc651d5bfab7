"""Find out, on a sample of its calls, whether a unit that is recomputed in backward repeats its forward pass.

What a recomputation saves for backward is compared, by one number for each tensor, with what the forward pass saved. On
a host the numbers are compared at once; on an accelerator later, so that the run does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autotune.mechanics.devices import is_accelerator

# The probe looks at a unit's first call, and traces, whose memory is planned with, follow: comparing begins after them,
# and becomes ever rarer. Numbers of calls are even and odd, since a unit may be called several times in a step.
_COMPARED = frozenset({16, 33, 67, 135})
_AFTER, _EVERY = 135, 257
# Numbers that are kept of one call on an accelerator: as many as fit into the smallest block that its allocator has.
_KEPT = 128
# An accelerator need not repeat itself to the last bit.
_ROUNDING = 1e-3


def is_due(call: int) -> bool:
    """Tell whether a unit's call, by its number from 1, is one of those that are compared."""
    return call in _COMPARED or (call > _AFTER and (call - _AFTER) % _EVERY == 0)


class _Numbers:
    """A number for each tensor that one pass saves: on the host at once, on an accelerator in one block.

    Attributes:
        on_host: the numbers of tensors on the host, by the tensor's place among all.
        on_device: those of tensors on an accelerator, one after the other; ``None`` if there were none.
        places: the places of those tensors among all.
        count: how many tensors there were.
    """

    def __init__(self) -> None:
        self.on_host: dict[int, float] = {}
        self.on_device: torch.Tensor | None = None
        self.places: list[int] = []
        self.count = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Note a tensor's number; parameters, subclasses, sparse and integer tensors are skipped."""
        place, self.count = self.count, self.count + 1
        if isinstance(tensor, nn.Parameter) or type(tensor) is not torch.Tensor:
            return
        if tensor.layout is not torch.strided or not tensor.is_floating_point():
            return
        with torch.no_grad():
            # In the tensor's own format: another one would be computed by way of a copy, for which no room was planned.
            found = torch.linalg.vector_norm(tensor.detach())
            if not is_accelerator(tensor.device):
                self.on_host[place] = float(found)
            elif len(self.places) < _KEPT:
                if self.on_device is None:
                    self.on_device = torch.zeros(_KEPT, device=tensor.device)
                self.on_device[len(self.places)].copy_(found)
                self.places.append(place)


class Repeats:
    """Compare what a call saves for backward with what its recomputations save.

    Attributes:
        differs: whether a recomputation differed; on an accelerator a tensor, whose value is known there only.
    """

    def __init__(self) -> None:
        self._then = _Numbers()
        self.differs: bool | torch.Tensor = False

    @contextmanager
    def first(self, watch: AbstractContextManager[Any]) -> Iterator[None]:
        """Run the forward pass within another context.

        Args:
            watch: the other context.
        """
        with _noting(self._then), watch:
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a recomputation, which may end before all is computed."""
        now = _Numbers()
        with _noting(now):
            try:
                yield
            finally:
                self._compare(now)

    def _compare(self, now: _Numbers) -> None:
        then = self._then
        pairs = ((one, now.on_host.get(place, one)) for place, one in then.on_host.items())
        if any(one != two and (one == one or two == two) for one, two in pairs):
            self.differs = True
        elif then.on_device is not None and now.on_device is not None:
            # A recomputation ends early, and what it saves begins alike.
            count = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(then.places, now.places, strict=False))
            )
            one, two = then.on_device[:count], now.on_device[:count]
            self.differs = self.differs | ~torch.isclose(one, two, _ROUNDING, 0.0, equal_nan=True).all()


@contextmanager
def _noting(numbers: _Numbers) -> Iterator[None]:
    """Run the body, and note a number for each tensor that the active hooks save."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    if top is None:
        yield
        return
    pack, unpack = top

    def noting(tensor: torch.Tensor) -> Any:
        numbers.add(tensor)
        return pack(tensor)

    with saved_tensors_hooks(noting, unpack):
        yield
