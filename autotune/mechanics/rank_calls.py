"""Compare what ranks call and exchange in a step, so that ranks that differ are refused before weights mix.

FSDP2 gathers and reduces weights in the order in which each rank calls its units. Ranks that call different units, as
routing by samples or random skipping makes them, would exchange weights of different units: silently if they have the
same size, and otherwise with an abort or a wait without end.
"""

from __future__ import annotations

import functools
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from autotune.errors import JobError
from autotune.mechanics.collectives import of_all_ranks, of_first_rank, wrapped_collectives

# Calls of a step that are compared one by one; all later ones together, at the step's end.
_COMPARED = 2**15
_WORD = 8
# Kinds of calls; the kind is the upper part of a call's code.
_UNIT, _EXCHANGE, _END = range(3)
_BITS = 40
# Pieces of so many bits are summed over ranks, and so are their squares, exactly in float64 for up to 1,024 ranks.
_PIECE_BITS, _SHIFTS = 16, (0, 16, 32)


class RankCalls:
    """The calls of a step on this rank, which are compared with those of the other ranks.

    Ranks of one machine write their calls to shared memory, and each compares its own before it goes on; whichever
    comes later notices a difference before anything is exchanged. Ranks elsewhere agree at the end of the step, in a
    collective that is sent anyway.

    Args:
        names: names of the modules whose calls :meth:`watch` notes.
        engine: the engine's name, in messages.
    """

    def __init__(self, names: Sequence[str], engine: str) -> None:
        self._names = names
        self._engine = engine
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        self._table = _shared_table(self._rank, self._world)
        self._steps = 0
        self._count = 0
        self._hash = 0
        self._on = False

    def watch(self, model: nn.Module) -> list[Any]:
        """Note each call of the named modules, until the returned handles are removed."""

        def noted(index: int) -> Callable[..., None]:
            return lambda *_: self._note(_UNIT, index)

        modules = [model.get_submodule(name) for name in self._names]
        return [one.register_forward_pre_hook(noted(index), prepend=True) for index, one in enumerate(modules)]

    def begin(self) -> None:
        """Begin a step, or any other work that all ranks do together."""
        self._steps += 1
        self._count = self._hash = 0
        self._on = True
        if self._table is not None:
            self._put(1, 0)
            self._put(0, self._steps)

    def end(self, gradients: Sequence[bool]) -> None:
        """End the step's calls.

        Args:
            gradients: for each trained parameter, whether it has a gradient.
        """
        self._note(_END, hash(tuple(gradients)) & ((1 << _BITS) - 1))
        self._on = False

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Note the body's collectives, too."""

        def noting(call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(call)
            def noted(*arguments: Any, **named: Any) -> Any:
                if self._on:
                    given = (*arguments, *named.values())
                    self._note(_EXCHANGE, sum(one.numel() for one in given if isinstance(one, torch.Tensor)))
                return call(*arguments, **named)

            return noted

        with wrapped_collectives(noting):
            yield

    def pieces(self) -> list[float]:
        """Return what :meth:`require_same` needs the sums of, over all ranks."""
        values = [self._hash >> shift & ((1 << _PIECE_BITS) - 1) for shift in _SHIFTS]
        return [float(one) for value in values for one in (value, value * value)]

    def require_same(self, sums: Sequence[float]) -> None:
        """Compare all calls of the step.

        Args:
            sums: the sums of all ranks' :meth:`pieces`.

        Raises:
            JobError: if ranks have called different modules, or have gradients of different parameters.
        """
        # The variance of a value over the ranks is zero only if it is the same on all.
        if any(total * total != self._world * squares for total, squares in zip(sums[::2], sums[1::2], strict=True)):
            raise different_calls(self._engine)

    def _note(self, kind: int, value: int) -> None:
        if not self._on:
            return
        code, place = kind << _BITS | value, self._count
        self._count += 1
        self._hash = hash((self._hash, code))
        if self._table is None or place >= _COMPARED:
            return
        self._put(2 + place, code)
        self._put(1, self._count)
        for rank in range(self._world):
            if rank != self._rank and self._get(rank, 0) == self._steps and self._get(rank, 1) > place:
                other = self._get(rank, 2 + place)
                if other != code:
                    raise different_calls(self._engine, self._difference({self._rank: code, rank: other}))

    def _difference(self, codes: dict[int, int]) -> str:
        if all(code >> _BITS == _END for code in codes.values()):
            return "their gradients are of different parameters"
        return ", and ".join(f"rank {rank} {self._told(code)}" for rank, code in sorted(codes.items()))

    def _told(self, code: int) -> str:
        kind, value = code >> _BITS, code & ((1 << _BITS) - 1)
        if kind == _UNIT:
            return f"calls {self._names[value] or 'the model'}"
        return f"exchanges {value} values" if kind == _EXCHANGE else "calls no more"

    def _put(self, place: int, value: int) -> None:
        assert self._table is not None
        self._table[self._rank * (_COMPARED + 2) + place] = value

    def _get(self, rank: int, place: int) -> int:
        assert self._table is not None
        return self._table[rank * (_COMPARED + 2) + place]


def different_calls(engine: str, how: str = "") -> JobError:
    """Return the error of ranks that call different parts of the model.

    Args:
        engine: the engine's name.
        how: what each of two ranks calls; empty if unknown.
    """
    return JobError(
        f"ranks call different parts of the model in one step{how and f': {how}'}",
        where=f"engine {engine}",
        allowed="--engine torch, or a model that uses the same weights whatever the samples and random numbers",
    )


def _shared_table(rank: int, world: int) -> memoryview | None:
    """Return memory that the ranks of the first rank's machine share; ``None`` where the system offers none."""
    size, mark = world * (_COMPARED + 2) * _WORD, secrets.token_hex(8)
    own = os.memfd_create(f"ranks-{mark}") if rank == 0 and hasattr(os, "memfd_create") else None
    if own is not None:
        os.ftruncate(own, size)
    place, mark = of_first_rank((Path(f"/proc/{os.getpid()}/fd/{own}"), mark))
    found = None
    try:
        # Another machine may have a process of the same number.
        if str(place.readlink()).startswith(f"/memfd:ranks-{mark}"):
            with place.open("r+b") as file:
                found = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
    except OSError:
        pass
    # No rank closes it before all have opened it.
    of_all_ranks(place)
    if own is not None:
        os.close(own)
    return found
