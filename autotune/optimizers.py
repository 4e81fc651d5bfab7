"""Replace a job's optimizer with another one over the same parameter groups.

Learning rates of different optimizers are not comparable. Unless the user sets one, the learning rate of a group is the
job's own times the ratio of the two kinds' usual rates, from the sources below. The product of weight decay and
learning rate, by which one step shrinks a weight, is preserved. These are rules of thumb: nothing is tuned.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune import extras
from autotune.errors import InputError

if TYPE_CHECKING:
    # Plans refer to these optimizers and are read without torch.
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An optimizer that can be chosen.

    Attributes:
        library: the module that defines it.
        name: its class in that module.
        rate: ratio of its usual learning rate to AdamW's.
        betas: whether it takes Adam's ``betas`` and ``eps`` from the job's own optimizer.
        arguments: additional arguments of its constructor.
    """

    library: str
    name: str
    rate: float
    betas: bool = False
    arguments: Mapping[str, Any]


# Learning rates relative to AdamW's. SGD: 0.1 (He et al. 2016, 3.4) against 1e-3 (Loshchilov & Hutter 2019, 4). Lion:
# 3 to 10 times smaller (Chen et al. 2023, 5). LAMB: 5 / (2^3 * 1000) against 1e-4 for BERT at 512 and 256 sequences
# (You et al. 2020, table 4; Devlin et al. 2019, A.2), divided by the square root of the batch ratio. AdamW with 8-bit
# states is a drop-in replacement (Dettmers et al. 2022, 2).
KINDS: Mapping[str, Kind] = {
    "adamw": Kind(library="torch.optim", name="AdamW", rate=1.0, betas=True, arguments={}),
    "adamw8bit": Kind(
        # It keeps the states of small tensors in 32 bits.
        library="bitsandbytes.optim",
        name="AdamW8bit",
        rate=1.0,
        betas=True,
        arguments={},
    ),
    "lamb": Kind(library="pytorch_optimizer", name="Lamb", rate=4.5, arguments={}),
    "lion": Kind(library="pytorch_optimizer", name="Lion", rate=0.2, arguments={}),
    "sgd": Kind(library="torch.optim", name="SGD", rate=100.0, arguments={"momentum": 0.9, "nesterov": True}),
}
# Optimizers that are not supported, and why.
REFUSED: Mapping[str, str] = {
    "sophia": "estimates curvature with a second backward pass through the graph, which a step here does not keep",
}
_RATE_OF_OWN = {
    **{kind.name.lower(): kind.rate for kind in KINDS.values()},
    **dict.fromkeys(("adam", "nadam", "radam", "adam8bit"), 1.0),
}


def require(name: str, *, where: str) -> None:
    """Refuse an optimizer that is unknown or not supported, or whose library is missing.

    Raises:
        InputError: naming the known optimizers, or the command that installs the library.
    """
    if name in REFUSED:
        raise InputError(f"optimizer {name} {REFUSED[name]}", where=where, allowed=KINDS)
    if name not in KINDS:
        raise InputError(f"optimizer is {name!r}", where=where, allowed=KINDS, given=name)
    _class(name, where)


def converted(own: torch.optim.Optimizer, name: str, learning_rate: float | None = None) -> torch.optim.Optimizer:
    """Return another optimizer over the same parameter groups.

    Args:
        own: the job's own optimizer, before its first step.
        name: name of the new optimizer in :data:`KINDS`.
        learning_rate: learning rate of the first group, the others in proportion; ``None`` follows the rule of thumb.

    Raises:
        InputError: if the library is missing, or no rule of thumb covers the job's own optimizer.
    """
    kind, where = KINDS[name], f"optimizer {name}"
    factor = _factor(own, kind, where) if learning_rate is None else learning_rate / own.param_groups[0]["lr"]
    groups = [
        {
            "params": group["params"],
            "lr": group["lr"] * factor,
            "weight_decay": group.get("weight_decay", 0.0) / factor,
            **({key: group[key] for key in ("betas", "eps") if key in group} if kind.betas else {}),
        }
        for group in own.param_groups
    ]
    made: torch.optim.Optimizer = _class(name, where)(groups, lr=groups[0]["lr"], **kind.arguments)
    return made


def _factor(own: torch.optim.Optimizer, kind: Kind, where: str) -> float:
    known = _RATE_OF_OWN.get(type(own).__name__.lower())
    if known is None:
        raise InputError(
            f"no rule of thumb converts the learning rate of {type(own).__name__}",
            where=where,
            allowed="a learning rate of your own, as in +lion=3e-4",
        )
    return kind.rate / known


def _class(name: str, where: str) -> Any:
    kind = KINDS[name]
    try:
        # Some libraries log missing optional kernels on import.
        logging.getLogger(kind.library.partition(".")[0]).setLevel(logging.ERROR)
        library = importlib.import_module(kind.library)
    except ImportError as error:
        raise extras.missing(kind.library.partition(".")[0], where=where) from error
    return getattr(library, kind.name)
