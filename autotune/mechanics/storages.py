"""What each storage does to one call of a unit.

An act calls the unit's forward so that autograd keeps what the storage keeps. It leaves nothing behind but the call's
graph, so a switch to another storage needs no undoing, and graphs that are alive stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from autotune.choices import Storage
from autotune.mechanics.activations import Recomputation


class StorageAct(Protocol):
    """The act of a storage, on every call of a unit in training."""

    def __call__(
        self, unit: Recomputation, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], /
    ) -> Any:
        """Return the outputs of ``forward``, bit-identical to a plain call, as are all gradients.

        Args:
            unit: the unit's module, and the state of its recomputation.
            forward: the unit's forward in its precision.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """


# Every storage but ``save``, which calls the forward as it is.
ACTS: Mapping[Storage, StorageAct] = {
    Storage.RECOMPUTE: Recomputation.run,
}
