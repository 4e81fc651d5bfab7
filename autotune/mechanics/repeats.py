"""Find out, on a sample of its calls, whether a unit that is recomputed in backward repeats its forward pass.

What a recomputation saves for backward is compared, by one number for each tensor, with what the forward pass saved. On
a host the numbers are compared at once; on an accelerator later, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autotune.mechanics.devices import is_accelerator

# The first calls are compared, and then ever fewer, up to one in so many.
_RAREST = 256
# An accelerator need not repeat itself to the last bit.
_ROUNDING = 1e-3


def is_due(call: int) -> bool:
    """Tell whether a unit's call, by its number from 1, is one of those that are compared."""
    return call & (call - 1) == 0 or call % _RAREST == 0


class Repeats:
    """Compare what a call saves for backward with what its recomputations save.

    Attributes:
        differs: whether a recomputation differed; on an accelerator a tensor, whose value is known there only.
    """

    def __init__(self) -> None:
        self._then: list[float | torch.Tensor] = []
        self._now: list[float | torch.Tensor] = []
        self.differs: bool | torch.Tensor = False

    @contextmanager
    def first(self, watch: AbstractContextManager[Any]) -> Iterator[None]:
        """Run the forward pass, within what else watches it."""
        with _noting(self._then), watch:
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a recomputation, which may end before all is computed."""
        self._now = []
        with _noting(self._now):
            try:
                yield
            finally:
                self._compare()

    def _compare(self) -> None:
        for one, two in zip(self._then, self._now, strict=False):
            if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
                self.differs = self.differs | ~torch.isclose(one, two, _ROUNDING, 0.0, equal_nan=True)
            elif one != two and (one == one or two == two):
                self.differs = True


@contextmanager
def _noting(numbers: list[float | torch.Tensor]) -> Iterator[None]:
    """Run the body, and note a number for each tensor that the hooks which are active take in."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    if top is None:
        yield
        return
    pack, unpack = top

    def noting(tensor: torch.Tensor) -> Any:
        found = _number(tensor)
        if found is not None:
            numbers.append(found)
        return pack(tensor)

    with saved_tensors_hooks(noting, unpack):
        yield


def _number(tensor: torch.Tensor) -> float | torch.Tensor | None:
    """Return what tells a tensor's values from others; ``None`` where nothing does, or where nothing computed them."""
    if isinstance(tensor, nn.Parameter) or type(tensor) is not torch.Tensor:
        return None
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    with torch.no_grad():
        # In the tensor's own format: another one would be computed by way of a copy, for which no room was planned.
        found: torch.Tensor = torch.linalg.vector_norm(tensor.detach())
    return found if is_accelerator(tensor.device) else float(found)
