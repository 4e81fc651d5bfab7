"""Divide the layers of a model between ranks that compute the same samples (tensor parallelism).

Layers are divided by torch's ``parallelize_module``. Nothing of the model's own code is changed, so code that counts on
whole layers computes something else: a step is tried divided and whole, and must be the same.

Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.errors import InputError, JobError, one_line
from autotune.mechanics import devices, randomness
from autotune.mechanics.buffers import copy_buffers, write_buffers
from autotune.mechanics.collectives import of_all_ranks
from autotune.mechanics.model_stages import floor_of

_WHERE = "engine fsdp2"
# Characters of a difference or an exception that are shown.
_QUOTED = 240
# What is added to parameters whose entries are all the same, times normally distributed numbers.
_STIR = 0.1
_REMEDY = "a mesh without tp, or a plan of tensor parallelism that leaves such layers whole"
# By name, as transformers calls them: whether a layer's outputs are divided, or its inputs, and the style.
STYLES: Mapping[str, tuple[bool, Callable[[], Any]]] = {
    "colwise": (True, ColwiseParallel),
    "rowwise": (False, RowwiseParallel),
    "colwise_gather_output": (True, lambda: ColwiseParallel(output_layouts=Replicate())),
    "colwise_rep": (True, lambda: ColwiseParallel(output_layouts=Replicate())),
    "embedding_rowwise": (False, lambda: RowwiseParallel(input_layouts=Replicate())),
}
# Of modules that every rank has whole, and to whose gradients ranks add what their parts of the features give.
SUMMED = "replicated_with_grad_allreduce"


def plan_of(model: nn.Module, given: Mapping[str, str] | None, ranks: int) -> dict[str, str]:
    """Return the style of each layer that is divided, or whose gradients are summed, by name.

    Args:
        model: the model.
        given: style by pattern of names such as ``blocks.*.up``, one of :data:`STYLES` or
            :data:`SUMMED`; ``None`` for the model's own,
            its attribute ``tp_plan``, which models of transformers have.
        ranks: number of ranks that share each sample.

    Raises:
        JobError: if there is no plan, a style is unknown, a pattern names no layer, or a layer cannot be divided.
    """
    patterns = _own_plan(model) if given is None else given
    if not patterns:
        allowed = "Job(tensor_parallel={'blocks.*.up': 'colwise', ...}), or a model with a tp_plan"
        raise JobError("the job has no plan of tensor parallelism", where=_WHERE, allowed=allowed)
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for pattern, style in patterns.items():
        if not isinstance(style, str) or style not in (*STYLES, SUMMED):
            raise JobError(
                f"the style of {pattern} is {style!r:.40}", where="tensor_parallel", allowed=[*STYLES, SUMMED]
            )
        kinds = (nn.Module,) if style == SUMMED else (nn.Linear, nn.Embedding)
        names = [name for name, one in modules.items() if isinstance(one, kinds) and fnmatchcase(name, pattern)]
        if not names:
            problem, allowed = f"{pattern} names no layer of the model", "names of nn.Linear or nn.Embedding"
            raise JobError(problem, where="tensor_parallel", allowed=allowed)
        found |= dict.fromkeys(names, style)
    if set(found.values()) == {SUMMED}:
        raise JobError("the plan of tensor parallelism divides no layer", where=_WHERE, allowed=list(STYLES))
    for name, style in found.items():
        if style != SUMMED:
            _require_divisible(name, modules[name], style, ranks)
    return found


def _own_plan(model: nn.Module) -> Mapping[str, str] | None:
    """Return the model's own plan; ``None`` if it has none.

    Raises:
        JobError: if its plan is no mapping of names.
    """
    allowed = "styles by name of layers"
    try:
        found = getattr(model, "tp_plan", None)
    except Exception as error:
        problem = f"tp_plan of the model raises {one_line(error)[:_QUOTED]}"
        raise JobError(problem, where=_WHERE, allowed=allowed) from error
    if found is not None and not (isinstance(found, Mapping) and all(isinstance(one, str) for one in found)):
        raise JobError(f"tp_plan of the model is {found!r:.80}", where=_WHERE, allowed=allowed)
    return found


def summed_by(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Return the names of the parameters whose gradients are summed over the ranks that share layers."""
    modules = [(name, model.get_submodule(name)) for name, style in plan.items() if style == SUMMED]
    own = [(name, key) for name, one in modules for key, _ in one.named_parameters(recurse=False)]
    return [".".join(filter(None, place)) for place in own]


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


def divide(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, loss: Callable[[], torch.Tensor], seed: int
) -> None:
    """Divide layers of a model in place; refuse a model that then computes something else.

    A step is made in the modes in which the model trains, and a forward pass in evaluation mode, whole and divided. In
    them, parameters whose entries are all the same, such as a gate that begins at 0, have random entries, if the loss
    is finite with them: they would hide what depends on them. Layers that have the same weight still have the same one
    after it.

    Args:
        model: the model, the same on each rank; its gradients are dropped.
        plan: result of :func:`plan_of`.
        mesh: the ranks that share each sample, a mesh of one dimension.
        loss: function that computes the loss of a micro-batch, the same on all ranks of the mesh.
        seed: random seed of the step, the same on all ranks of the mesh.

    Raises:
        JobError: if the model cannot be divided, or if its losses, gradients, buffers or random numbers are others than
            the whole model's.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            words = f"{name} normalizes over a batch, which ranks that share samples would count several times"
            raise JobError(words, where=_WHERE, allowed="a mesh without tp")
    styles = {name: one for name, one in plan.items() if one != SUMMED}
    with _noting_16_bits([model.get_submodule(name) for name in styles]) as found:
        whole, noise = _tried_with_noise(model, loss, seed)
    tolerances = _tolerances(model, is_coarse=bool(found))
    places = _places(model)
    try:
        # Modules of torch raise what they like for layers that they cannot divide.
        parallelize_module(model, mesh, {name: STYLES[style][1]() for name, style in styles.items()})
        problem = _retied(model, places)
        if problem is None:
            with _stirred(model, noise):
                divided = _tried(model, loss, seed)
            for name in summed_by(model, plan):
                if name in divided.gradients:
                    distributed.all_reduce(divided.gradients[name], group=mesh.get_group())
            problem = _difference(whole, divided, tolerances)
    except InputError as error:
        problem = error.problem
    except Exception as error:  # noqa: BLE001 - whatever torch or the model raises tells that it cannot be divided
        problem = one_line(error)
    problem = next(filter(None, of_all_ranks(problem)), None)
    if problem is not None:
        problem = f"the model cannot be divided like this: {problem[:_QUOTED]}"
        raise JobError(problem, where=_WHERE, allowed=_REMEDY)


def _places(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return for each parameter the modules that have it, with its name there."""
    found: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            found.setdefault(parameter, []).append((name, key))
    return list(found.values())


def _retied(model: nn.Module, places: Sequence[Sequence[tuple[str, str]]]) -> str | None:
    """Make modules that had the same parameter have the same one again; return why they cannot."""
    for several in places:
        first, *others = [(model.get_submodule(name), key) for name, key in several]
        for module, key in others:
            if _placed(getattr(module, key)) != _placed(getattr(*first)):
                names = " and ".join(".".join(filter(None, place)) for place in several)
                return f"{names} are one parameter, and are not divided alike"
            setattr(module, key, getattr(*first))
    return None


def _placed(parameter: nn.Parameter) -> object:
    return parameter.placements if isinstance(parameter, DTensor) else None


def _tried_with_noise(
    model: nn.Module, loss: Callable[[], torch.Tensor], seed: int
) -> tuple[_Tried, dict[str, torch.Tensor]]:
    """Return what a whole model computes with noise in parameters whose entries are all the same, and the noise.

    Where a loss is not finite with it, as that of a small temperature's logarithm, there is less, and at last none.

    Raises:
        JobError: if the loss raises or is not finite without noise either, on any rank.
    """
    for noise in (_noise(model, scaled=False), _noise(model, scaled=True), {}):
        tried, problem = None, None
        try:
            with _stirred(model, noise):
                tried = _tried(model, loss, seed)
            if not math.isfinite(tried.loss):
                problem = f"the loss of the first micro-batch is {tried.loss}"
        except InputError as error:
            problem = error.problem
        except Exception as error:  # noqa: BLE001 - the model's backward pass may raise anything
            problem = one_line(error)
        model.zero_grad(set_to_none=True)
        # All ranks go on with the same noise.
        problem = next(filter(None, of_all_ranks(problem)), None)
        if problem is None and tried is not None:
            return tried, noise
    problem = f"division cannot be tried: {str(problem)[:_QUOTED]}"
    raise JobError(problem, where=_WHERE, allowed="a loss that is finite at the first weights, or a mesh without tp")


def _noise(model: nn.Module, *, scaled: bool) -> dict[str, torch.Tensor]:
    """Return noise for each parameter whose entries are all the same, the same on each rank.

    Args:
        model: the model.
        scaled: whether it is in proportion to the entries, so that these keep their sign.
    """
    draw, found = torch.Generator().manual_seed(0), {}
    for name, parameter in model.named_parameters():
        own = parameter.detach()
        if own.is_floating_point() and own.numel() and bool((own == own.flatten()[0]).all()):
            noise = _STIR * torch.randn(own.shape, generator=draw)
            found[name] = (noise.clamp(-0.5, 0.5) * float(own.flatten()[0]) if scaled else noise).to(own)
    return found


@contextmanager
def _stirred(model: nn.Module, noise: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Add noise to parameters during the body; afterwards they have the bits that they had."""
    changed = []
    for name, added in noise.items():
        own: Any = model.get_parameter(name).detach()
        part: Any = added
        if isinstance(own, DTensor):
            part = distribute_tensor(added, own.device_mesh, own.placements, src_data_rank=None).to_local()
            own = own.to_local()
        changed.append((own, own.clone()))
        own.add_(part)
    try:
        yield
    finally:
        # Some may share their memory.
        for own, former in reversed(changed):
            own.copy_(former)


@contextmanager
def _noting_16_bits(layers: Iterable[nn.Module]) -> Iterator[list[torch.dtype]]:
    """Yield a list that has the 16-bit formats that layers return during the body, as under a loss's own autocast."""
    found: list[torch.dtype] = []

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.dtype in (torch.bfloat16, torch.float16):
            found.append(output.dtype)

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _tolerances(model: nn.Module, *, is_coarse: bool) -> tuple[float, float]:
    """Return the relative differences of losses, and of gradients and buffers, that are due to the order of sums."""
    if is_coarse or any(one.dtype in (torch.bfloat16, torch.float16) for one in model.parameters()):
        return 2e-2, 5e-2
    if any(devices.is_accelerator(one.device) for one in model.parameters()):
        return 1e-4, 1e-2
    return 1e-5, 1e-4


@dataclass(frozen=True, slots=True)
class _Tried:
    """What a model computes from a micro-batch: losses in training and in evaluation, gradients, buffers, and draws."""

    loss: float
    evaluated: float | None
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    random: Sequence[torch.Tensor]


def _tried(model: nn.Module, loss: Callable[[], torch.Tensor], seed: int) -> _Tried:
    """Return what a model computes; afterwards it has no gradients, and its buffers are as they were."""
    before = copy_buffers(model)
    with randomness.isolated():
        randomness.seed_all(seed)
        found = loss()
        if found.requires_grad:
            found.backward()
        random = randomness.drawn_states()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    gradients = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in gradients.items()}
    after = copy_buffers(model)
    model.zero_grad(set_to_none=True)
    write_buffers(model, before)
    evaluated = _evaluated(model, loss, seed)
    write_buffers(model, before)
    return _Tried(float(found.detach()), evaluated, gradients, after, random)


def _evaluated(model: nn.Module, loss: Callable[[], torch.Tensor], seed: int) -> float | None:
    """Return the loss in evaluation mode; ``None`` if there is none."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with randomness.isolated(), torch.no_grad():
            randomness.seed_all(seed)
            return float(loss())
    except Exception:  # noqa: BLE001 - a loss may need what a model returns in training alone
        return None
    finally:
        for module, mode in modes.items():
            module.training = mode


def _difference(whole: _Tried, found: _Tried, tolerances: tuple[float, float]) -> str | None:
    """Return how a divided model differs from the whole one beyond rounding; ``None`` if it does not."""
    of_loss, of_gradient = tolerances
    losses = [("its loss", found.loss, whole.loss), ("its loss in evaluation mode", found.evaluated, whole.evaluated)]
    for what, own, other in losses:
        if not _same_loss(own, other, of_loss):
            shown = ["none" if one is None else f"{one:.6g}" for one in (own, other)]
            return f"{what} is {shown[0]} divided and {shown[1]} whole"
    if found.gradients.keys() != whole.gradients.keys():
        return "other parameters have a gradient divided than whole"
    floor = floor_of(whole.gradients.values())
    for name, gradient in whole.gradients.items():
        if not _is_close(found.gradients[name], gradient, of_gradient, floor):
            return f"the gradient of {name} is another one divided than whole"
    for name, buffer in whole.buffers.items():
        if name not in found.buffers or not _is_close(found.buffers[name], buffer, of_gradient, 1e-6):
            return f"buffer {name} has other values divided than whole"
    if not all(map(torch.equal, found.random, whole.random)):
        return "it draws random numbers for divided layers, as dropout does, which ranks would draw alike"
    return None


def _same_loss(one: float | None, two: float | None, tolerance: float) -> bool:
    if one is None or two is None:
        return one is two
    return math.isclose(one, two, rel_tol=tolerance, abs_tol=1e-6) or (math.isnan(one) and math.isnan(two))


def _is_close(one: torch.Tensor, two: torch.Tensor, tolerance: float, floor: float) -> bool:
    """Return whether two tensors differ by a small share of the second one's norm, or by less than a floor."""
    if one.shape != two.shape:
        return False
    one, two = (part.to_dense() if part.layout is not torch.strided else part for part in (one, two))
    one, two = (part.to("cpu") if part.is_complex() else part.to("cpu", torch.float64) for part in (one, two))
    finite = two.isfinite()
    if not torch.equal(one.isfinite(), finite) or not torch.equal(*(part[~finite].nan_to_num() for part in (one, two))):
        return False
    one, two = one[finite], two[finite]
    return bool(torch.linalg.vector_norm(one - two) <= tolerance * torch.linalg.vector_norm(two) + floor)
