"""Check, on a sample of calls, whether a unit's recomputation repeats its forward pass.

The norms of the tensors that a recomputation saves for backward are compared with those of the forward pass: on a host
at once, on an accelerator later, so that the run does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

import torch

from autotune.mechanics.devices import is_accelerator
from autotune.mechanics.watching_hooks import seeing_saved

# Comparisons begin after the probe of a unit's first call and after the traces that memory is planned from, and become
# ever rarer. The calls have even and odd numbers, since a unit may be called several times in a step.
_COMPARED = frozenset({16, 33, 67, 135})
_AFTER, _EVERY = 135, 257
# Norms per call that are kept on an accelerator: as many as fit into its allocator's smallest block.
_KEPT = 128
# Relative tolerance on an accelerator, whose results may not repeat to the last bit.
_ROUNDING = 1e-3


def is_due(call: int) -> bool:
    """Return whether a unit's call with this number, counted from 1, is compared."""
    return call in _COMPARED or (call > _AFTER and (call - _AFTER) % _EVERY == 0)


class _Numbers:
    """The norms of the tensors that one pass saves.

    Attributes:
        on_host: norms of tensors on the host, by the tensor's place among all.
        on_device: norms of the first tensors on an accelerator, in one block; ``None`` if there were none.
        places: the places of these tensors among all.
        count: number of tensors.
    """

    def __init__(self) -> None:
        self.on_host: dict[int, float] = {}
        self.on_device: torch.Tensor | None = None
        self.places: list[int] = []
        self.count = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor's norm, and return the tensor.

        Parameters, subclasses, sparse and non-floating tensors are only counted.
        """
        place, self.count = self.count, self.count + 1
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if is_plain and tensor.is_floating_point():
            self._add(tensor, place)
        return tensor

    def _add(self, tensor: torch.Tensor, place: int) -> None:
        with torch.no_grad():
            # In the tensor's own dtype: another one would need a converted copy, for which no memory was planned.
            found = torch.linalg.vector_norm(tensor.detach())
            if not is_accelerator(tensor.device):
                self.on_host[place] = float(found)
            elif len(self.places) < _KEPT:
                if self.on_device is None:
                    self.on_device = torch.zeros(_KEPT, device=tensor.device)
                self.on_device[len(self.places)].copy_(found)
                self.places.append(place)


class Repeats:
    """Comparison of the tensors that a call saves for backward with those that its recomputations save.

    Attributes:
        differs: whether a recomputation differed; on an accelerator a tensor, so that the run does not wait for it.
    """

    def __init__(self) -> None:
        self._then = _Numbers()
        self.differs: bool | torch.Tensor = False

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the forward pass, and record what it saves."""
        with seeing_saved(self._then.add):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a recomputation, which may end early, and compare what it saves."""
        now = _Numbers()
        with seeing_saved(now.add):
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
            # A recomputation may end early, so only the common beginning is compared.
            count = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(then.places, now.places, strict=False))
            )
            one, two = then.on_device[:count], now.on_device[:count]
            self.differs = self.differs | ~torch.isclose(one, two, _ROUNDING, 0.0, equal_nan=True).all()
