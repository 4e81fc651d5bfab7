"""What each storage does to one call of a unit.

An act calls the unit's forward so that autograd keeps what the storage keeps. It leaves nothing behind but the call's
graph, so a switch to another storage needs no undoing, and graphs that are alive stay as they are.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from autotune.choices import COMPILED_STORAGES, DEFAULT_STORAGES, STORAGES, STORAGES_VARIABLE, Storage
from autotune.errors import InputError
from autotune.mechanics.activations import Recomputation
from autotune.mechanics.compiled_units import compiled, missing_compiler
from autotune.mechanics.compressed import compressed
from autotune.mechanics.offloaded import offloaded
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


logger = logging.getLogger(__name__)


def _saved(_unit: Recomputation, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a unit's forward as it is; an engine keeps its weights gathered."""
    return forward(*args, **kwargs)


# Every storage but ``save``, which calls the forward as it is.
ACTS: Mapping[Storage, StorageAct] = {
    Storage.GATHERED: _saved,
    **{one: functools.partial(compiled, budget=one.compile_budget) for one in COMPILED_STORAGES},
    Storage.SELECTIVE: functools.partial(selective, costly=False),
    Storage.COMPRESS8: functools.partial(compressed, bits=8),
    Storage.COMPRESS4: functools.partial(compressed, bits=4),
    Storage.REBUILD: functools.partial(selective, costly=True),
    Storage.OFFLOAD: offloaded,
    Storage.GATHERED_RECOMPUTE: Recomputation.run,
    Storage.RECOMPUTE: Recomputation.run,
}


def offered(asked: Iterable[str] | None, no_copies_beside: str = "") -> tuple[Storage, ...]:
    """Return the storages that plans may choose, from the fastest to the leanest, ``save`` and ``recompute`` included.

    Storages that :func:`excluded` names are left out.

    Args:
        asked: further storages of a job; ``None`` for none. The environment variable ``AUTOTUNE_STORAGES`` decides
            instead if it is set, such as ``selective,compress8``.
        no_copies_beside: why the device cannot copy activations to the host while it computes, which leaves out the
            storages that do; empty if it can.

    Raises:
        InputError: if the variable names something else than a storage.
    """
    names, barred = _named(asked), excluded(asked, no_copies_beside)
    for storage, reason in barred.items():
        _warn_once(f"the storage {storage} is left out: {reason}")
    return tuple(one for one in STORAGES if (one in names or one in DEFAULT_STORAGES) and one not in barred)


def excluded(asked: Iterable[str] | None, no_copies_beside: str = "") -> dict[Storage, str]:
    """Return the storages that were asked for but that this machine lacks the means for, each with the reason.

    Args:
        asked: as for :func:`offered`.
        no_copies_beside: as for :func:`offered`.

    Raises:
        InputError: as :func:`offered` does.
    """
    wanted = [storage for storage in STORAGES if storage in _named(asked)]
    uncompiled = (missing_compiler() or "") if any(one in COMPILED_STORAGES for one in wanted) else ""

    def reason(storage: Storage) -> str:
        if storage.keeps_gathered:
            return "no weights are sharded; --engine fsdp2 shards them"
        return uncompiled if storage in COMPILED_STORAGES else no_copies_beside * storage.needs_accelerator

    return {storage: why for storage in wanted if (why := reason(storage))}


def _named(asked: Iterable[str] | None) -> set[str]:
    """Return the names of the storages that were asked for."""
    text = os.environ.get(STORAGES_VARIABLE, "").strip()
    names = {name.strip() for name in text.split(",") if name.strip()} if text else set(asked or ())
    for name in sorted(names.difference(STORAGES)):
        raise InputError(f"names {name!r}", where=STORAGES_VARIABLE, allowed=list(STORAGES))
    return names


@functools.cache
def _warn_once(text: str) -> None:
    """Log a warning, once in this process: several steps of one command find the same."""
    logger.warning("%s", text)
