"""Sketches of gradients, short enough to keep: the distance of two sketches estimates that of the gradients.

Each element is added to one of a few thousand sums; which one, and with which sign, is drawn by its place. On average,
the squared norm of the sums is that of the gradient; with 4096 sums its standard deviation is 2 %. Unlike a sample of
elements, a sketch sees an error wherever it is.

Source: count sketch (Charikar, Chen and Farach-Colton, 2002).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

_SUMS = 4096
# Elements that are added at once, few because memory may be scarce; and by how much sums and signs shift from one such
# piece to the next: not by the same number, so that elements that share a sum again do not share their signs.
_PIECE, _SHIFT, _SIGNS_SHIFT = 4 * _SUMS, 7919, 104_729


def sketches(gradients: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return a sketch of each gradient, on the host; the gradient itself if it is no longer than a sketch.

    Of a gradient that is spread over ranks, it is one of this rank's part.

    Args:
        gradients: the gradients; ``None`` stays ``None``.
    """
    drawn: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    return [None if one is None else _sketch(one, drawn) for one in gradients]


def _sketch(gradient: torch.Tensor, drawn: dict[torch.device, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    own = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach()
    if own.layout is not torch.strided:
        own = own.cpu().to_dense()
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    if own.numel() <= _SUMS:
        return own.reshape(-1).cpu().clone()
    dtype = torch.promote_types(own.dtype, torch.float32)
    if own.device not in drawn:
        drawn[own.device] = _draw(own.device)
    places, signs = drawn[own.device]
    sums = torch.zeros(_SUMS, dtype=dtype, device=own.device)
    for number, piece in enumerate(_pieces(own)):
        first, other = number * _SHIFT % _PIECE, number * _SIGNS_SHIFT % _PIECE
        signed = piece.to(dtype) * signs[other : other + len(piece)]
        sums.index_add_(0, places[first : first + len(piece)], signed)
    return sums.cpu()


def _draw(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and the sign of each place, the same each time; the run's own generators are left alone."""
    host, generator = torch.device("cpu"), torch.Generator("cpu").manual_seed(0)
    places = torch.randint(0, _SUMS, (2 * _PIECE,), generator=generator, dtype=torch.int32, device=host)
    signs = torch.randint(0, 2, (2 * _PIECE,), generator=generator, device=host).mul_(2).sub_(1).to(torch.float32)
    return places.to(device), signs.to(device)


def _pieces(own: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in pieces that depend on its shape alone, without a copy of the whole."""
    rows = max(_PIECE * own.shape[0] // own.numel(), 1)
    for some in own.split(rows):
        yield from some.reshape(-1).split(_PIECE)
