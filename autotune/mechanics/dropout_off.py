"""Turn off dropout, but no other part of a model's training mode.

The functions are replaced where models look them up, in ``torch.nn.functional``. Code that has imported one by its name
keeps it, so whoever turns dropout off must still see whether random numbers were drawn.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Of each function the place and the name of an argument, and its value without dropout.
_NEUTRAL: dict[str, tuple[int, str, Any]] = {
    **dict.fromkeys(
        ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"),
        (2, "training", False),
    ),
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
}

_lock = threading.Lock()
# The threads in which dropout is off, and what is replaced meanwhile: the replacements and the functions, by name.
_threads: list[int] = []
_replaced: dict[str, tuple[Any, Any]] = {}


def turn_off(model: nn.Module | None = None) -> Callable[[], None]:
    """Turn dropout off in this thread and in autograd's own ones, until the returned function is called.

    That of torch's dropout modules is, too: they call the functions. Models that other threads train keep theirs.

    Args:
        model: a model whose recurrent networks, which draw by themselves, have no dropout meanwhile.
    """
    thread, ended = threading.get_ident(), False
    modules = () if model is None else model.modules()
    rates = [(module, module.dropout) for module in modules if isinstance(module, nn.RNNBase)]
    for module, _ in rates:
        module.dropout = 0.0
    with _lock:
        if not _threads:
            for name, neutral in _NEUTRAL.items():
                former = getattr(F, name)
                _replaced[name] = _without_dropout(former, *neutral), former
                setattr(F, name, _replaced[name][0])
        _threads.append(thread)

    def end() -> None:
        nonlocal ended
        with _lock:
            if ended:
                return
            ended = True
            for module, rate in rates:
                module.dropout = rate
            _threads.remove(thread)
            if not _threads:
                for name, (own, former) in _replaced.items():
                    if getattr(F, name) is own:
                        setattr(F, name, former)
                _replaced.clear()

    return end


def _is_off() -> bool:
    """Return whether dropout is off where this is called."""
    if torch.compiler.is_compiling():
        # What is compiled now is not used once the functions are as they were.
        return bool(_threads)
    # Threads of autograd are not known to Python.
    return bool(_threads) and (
        threading.get_ident() in _threads or isinstance(threading.current_thread(), threading._DummyThread)
    )


def _without_dropout(former: Callable[..., Any], place: int, name: str, value: Any) -> Callable[..., Any]:
    @functools.wraps(former)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _is_off():
            if len(args) > place:
                args = (*args[:place], value, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: value}
        return former(*args, **kwargs)

    return function
