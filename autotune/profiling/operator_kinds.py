"""Kinds of operators, from their names."""

from __future__ import annotations

from collections.abc import Mapping

UPDATE, OTHER = "optimizer update", "pointwise and reductions"
# Parts of operators' names by kind; the first kind with a part that occurs in a name is the operator's.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("scaled_dot_product", "_attention"),
    "convolutions": ("convolution",),
    "matrix products": (".mm", "addmm", "bmm", ".mv", "addmv", ".dot"),
    "recurrent layers": ("rnn", "lstm", "gru"),
    "normalisation and softmax": ("layer_norm", "batch_norm", "group_norm", "rms_norm", "softmax"),
    "embedding and indexing": ("embedding", "index", "gather", "scatter", "nll_loss"),
    "copies and conversions": ("copy", "clone", ".cat", "fill", "zero"),
}
KINDS = (*_KINDS, OTHER, UPDATE)


def kind_of(operator: str) -> str:
    """Return the kind of an operator that is not part of an update, from its name, as in ``aten.mm``."""
    return next((kind for kind, parts in _KINDS.items() if any(part in operator for part in parts)), OTHER)
