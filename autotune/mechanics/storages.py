"""What each storage does to one call of a unit.

An act calls the unit's forward so that autograd keeps what the storage keeps. It leaves nothing behind but the call's
graph, so a switch to another storage needs no undoing, and graphs that are alive stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from autotune.choices import DEFAULT_STORAGES, STORAGES, STORAGES_VARIABLE, Storage
from autotune.errors import InputError
from autotune.mechanics.activations import Recomputation
from autotune.mechanics.compressed import compressed
from autotune.mechanics.selective import selective


class StorageAct(Protocol):
    """The act of a storage, on every call of a unit in training."""

    def __call__(
        self, unit: Recomputation, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], /
    ) -> Any:
        """Return the outputs of ``forward``, bit-identical to a plain call, as are all gradients of an exact storage.

        Args:
            unit: the unit's module, and the state of its recomputation.
            forward: the unit's forward in its precision.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """


# Every storage but ``save``, which calls the forward as it is.
ACTS: Mapping[Storage, StorageAct] = {
    Storage.SELECTIVE: partial(selective, costly=False),
    Storage.COMPRESS8: partial(compressed, bits=8),
    Storage.COMPRESS4: partial(compressed, bits=4),
    Storage.REBUILD: partial(selective, costly=True),
    Storage.RECOMPUTE: Recomputation.run,
}


def offered(asked: Iterable[str] | None) -> tuple[Storage, ...]:
    """Return the storages that plans may choose, from the fastest to the leanest, ``save`` and ``recompute`` included.

    Args:
        asked: further storages of a job; ``None`` for none. The environment variable ``AUTOTUNE_STORAGES`` decides
            instead if it is set, such as ``selective,compress8``.

    Raises:
        InputError: if the variable names something else than a storage.
    """
    text = os.environ.get(STORAGES_VARIABLE, "").strip()
    names = {name.strip() for name in text.split(",")} if text else set(asked or ())
    for name in sorted(names.difference(STORAGES)):
        raise InputError(f"names {name!r}", where=STORAGES_VARIABLE, allowed=list(STORAGES))
    return tuple(storage for storage in STORAGES if storage in names or storage in DEFAULT_STORAGES)
