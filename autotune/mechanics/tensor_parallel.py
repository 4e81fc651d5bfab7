"""Divide the layers of a model between ranks that compute the same samples (tensor parallelism).

Layers are divided by torch's ``parallelize_module``. Nothing of the model's own code is changed, so code that counts on
whole layers computes something else: a step is tried divided and whole, and must be the same.

Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.errors import JobError, one_line
from autotune.mechanics import randomness
from autotune.mechanics.buffers import copy_buffers, write_buffers
from autotune.mechanics.collectives import of_all_ranks
from autotune.mechanics.model_stages import floor_of, is_close, rounding_of

_WHERE = "engine fsdp2"
# Characters of an exception that are shown.
_QUOTED = 200
_REMEDY = "a mesh without tp, or a plan of tensor parallelism that leaves such layers whole"
# By name, as transformers calls them: whether a layer's outputs are divided, or its inputs, and the style.
STYLES: Mapping[str, tuple[bool, Callable[[], Any]]] = {
    "colwise": (True, ColwiseParallel),
    "rowwise": (False, RowwiseParallel),
    "colwise_gather_output": (True, lambda: ColwiseParallel(output_layouts=Replicate())),
    "colwise_rep": (True, lambda: ColwiseParallel(output_layouts=Replicate())),
    "embedding_rowwise": (False, lambda: RowwiseParallel(input_layouts=Replicate())),
}


def plan_of(model: nn.Module, given: Mapping[str, str] | None, ranks: int) -> dict[str, str]:
    """Return the style of each layer that is divided, by name.

    Args:
        model: the model.
        given: style by pattern of names such as ``blocks.*.up``, one of :data:`STYLES`; ``None`` for the model's own,
            its attribute ``tp_plan``, which models of transformers have.
        ranks: number of ranks that share each sample.

    Raises:
        JobError: if there is no plan, a style is unknown, a pattern names no layer, or a layer cannot be divided.
    """
    patterns = given if given is not None else getattr(model, "tp_plan", None)
    if not patterns:
        allowed = "Job(tensor_parallel={'blocks.*.up': 'colwise', ...}), or a model with a tp_plan"
        raise JobError("the job has no plan of tensor parallelism", where=_WHERE, allowed=allowed)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Embedding)}
    found: dict[str, str] = {}
    for pattern, style in patterns.items():
        if style not in STYLES:
            raise JobError(f"the style of {pattern} is {style!r:.40}", where="tensor_parallel", allowed=list(STYLES))
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            problem, allowed = f"{pattern} names no layer of the model", "names of nn.Linear or nn.Embedding"
            raise JobError(problem, where="tensor_parallel", allowed=allowed)
        found |= dict.fromkeys(names, style)
    for name, style in found.items():
        _require_divisible(name, layers[name], style, ranks)
    return found


def _require_divisible(name: str, layer: nn.Module, style: str, ranks: int) -> None:
    by_output = STYLES[style][0]
    if isinstance(layer, nn.Embedding):
        what, size = ("features", layer.embedding_dim) if by_output else ("entries", layer.num_embeddings)
    else:
        assert isinstance(layer, nn.Linear)
        what, size = ("outputs", layer.out_features) if by_output else ("inputs", layer.in_features)
    if size % ranks:
        problem, allowed = f"{name} has {size} {what}, which tp={ranks} does not divide", "a tp that divides them"
        raise JobError(problem, where="--mesh", allowed=allowed)


def divide(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divide layers of a model in place; layers that have the same weight still have the same one after it.

    Args:
        model: the model, the same on each rank.
        plan: result of :func:`plan_of`.
        mesh: the ranks that share each sample, a mesh of one dimension.

    Raises:
        JobError: if layers that have the same weight are not divided alike.
    """
    tied: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((name, key))
    # Kept alive, so that no two have the same id.
    whole = list(model.parameters())
    parallelize_module(model, mesh, {name: STYLES[style][1]() for name, style in plan.items()})
    for places in (tied[id(parameter)] for parameter in whole):
        first, *others = [(model.get_submodule(name), key) for name, key in places]
        one = getattr(*first)
        for module, key in others:
            other = getattr(module, key)
            if isinstance(one, DTensor) != isinstance(other, DTensor) or _placed(one) != _placed(other):
                names = " and ".join(".".join(filter(None, place)) for place in places)
                problem = f"{names} are one parameter, and are not divided alike"
                raise JobError(problem, where="tensor_parallel", allowed="the same division, or none, of both")
            setattr(module, key, one)


def _placed(parameter: nn.Parameter) -> object:
    return parameter.placements if isinstance(parameter, DTensor) else None


@contextmanager
def same_step(model: nn.Module, loss: Callable[[], torch.Tensor], seed: int) -> Iterator[None]:
    """Refuse a model whose step is another one after the body, which divides it.

    The step is made in the modes in which the model trains; its gradients are dropped, and buffers restored.

    Args:
        model: the model, whole.
        loss: function that computes the loss of a micro-batch, the same on all ranks that share its samples.
        seed: random seed of the step, the same on these ranks.

    Raises:
        JobError: if the divided model's loss, gradients or random numbers are others than the whole model's.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            words = f"{name} normalizes over a batch, which ranks that share samples would count several times"
            raise JobError(words, where=_WHERE, allowed="a mesh without tp")
    buffers = copy_buffers(model)
    with randomness.isolated():
        expected = _step(model, loss, seed)
        drawn = randomness.capture()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    _clear(model, buffers)
    yield
    problem: str | None = None
    with randomness.isolated():
        try:
            found = _step(model, loss, seed)
        except Exception as error:  # noqa: BLE001 - whatever the model's code raises tells that it cannot be divided
            problem = f"its loss raises {one_line(error)[:_QUOTED]}"
        else:
            problem = _difference(model, expected, found, gradients)
            if problem is None and randomness.drawn(drawn):
                problem = "it draws random numbers for divided layers, as dropout does, which ranks would draw alike"
    _clear(model, buffers)
    problem = next(filter(None, of_all_ranks(problem)), None)
    if problem is not None:
        raise JobError(f"the model cannot be divided like this: {problem}", where=_WHERE, allowed=_REMEDY)


def _step(model: nn.Module, loss: Callable[[], torch.Tensor], seed: int) -> float:
    """Make the passes of a step, and return the loss."""
    randomness.seed_all(seed)
    found = loss()
    if found.requires_grad:
        found.backward()
    return float(found.detach())


def _clear(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    write_buffers(model, buffers)


def _difference(model: nn.Module, expected: float, found: float, gradients: Mapping[str, torch.Tensor]) -> str | None:
    """Return how a divided step differs from a whole one beyond rounding; ``None`` if it does not."""
    if not math.isclose(found, expected, rel_tol=rounding_of(model), abs_tol=1e-6):
        return f"its loss is {found:.6g} divided and {expected:.6g} whole"
    floor = floor_of(gradients.values())
    for name, parameter in model.named_parameters():
        own: Any = parameter.grad
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        if not is_close(whole, gradients.get(name), floor):
            return f"the gradient of {name} is another one divided than whole"
    return None
