"""Shard a model over ranks with torch's ``fully_shard`` (FSDP2), unit by unit, and update the shards.

A mesh has up to three dimensions: replicas, between which gradients are averaged; shards, between which weights,
gradients and optimizer state are divided; and ranks that share layers (:mod:`autotune.mechanics.tensor_parallel`). One
dimension of replicas is data parallelism (DDP), one of shards is full sharding, and both are hybrid sharding (HSDP).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autotune.errors import JobError, one_line
from autotune.knobs import Communication
from autotune.mechanics.collectives import of_all_ranks
from autotune.mechanics.gradient_stats import GradientProbe
from autotune.mechanics.memory_meter import resident_tensors
from autotune.mechanics.powersgd import LowRankAverage
from autotune.mechanics.rank_calls import RankCalls
from autotune.mechanics.rank_probe import RankProbe, RankUpdate
from autotune.mechanics.sent_forms import RoundedGather, SentForms
from autotune.mechanics.trees import map_tensors
from autotune.mesh import Mesh

# A tensor of which this rank has a part, in a snapshot.
_PART = "part_of_rank"
# Name of the dimension of ranks that share layers.
_LAYERS = "tp"
# Characters of an optimizer's exception that are shown.
_QUOTED = 200
# Largest difference of two updates that differ only by rounding, as a share of the update.
_ROUNDING = 1e-3


class FullyShardedUpdate(RankUpdate):
    """Updates of a model that :func:`spread` has spread over ranks.

    Gradients of shards are reduced after each micro-batch, so that no rank ever has the whole gradient; those of
    replicas are averaged after the last.

    Args:
        model: the model, spread over ranks.
        optimizer: the job's optimizer, over the model's parameters as they are now.
        mesh: the layout of the ranks.
        clip_norm: norm at which gradients are clipped; ``None`` for no clipping.
        device_type: the device's type.
        calls: record of the step's calls, which ranks compare; ``None`` on one rank.
        summed: names of parameters whose gradients are summed over the ranks that share layers.
        layers: the ranks that share layers; ``None`` if none do.
        average: what averages gradients between replicas; ``None`` if the model does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        *,
        clip_norm: float | None,
        device_type: str,
        calls: RankCalls | None = None,
        summed: Collection[str] = (),
        layers: DeviceMesh | None = None,
        average: LowRankAverage | None = None,
    ) -> None:
        super().__init__(optimizer, clip_norm=clip_norm, device_type=device_type, order=model.parameters())
        self.model = model
        self.copies, self.sharing = mesh.dp, mesh.tp
        self._mesh = mesh
        self._calls = calls
        self._summed = [one for name, one in model.named_parameters() if name in summed]
        self._layers = layers
        self._average = average
        # What PowerSGD makes of a gradient tells nothing of its noise.
        self.keeps_gradients = average is None
        self._left = 0
        self._gathering = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def begin(self, micro_batches: int) -> None:
        """Set the number of micro-batches that each rank runs in the next update."""
        # Weights that a forward pass without a backward pass has gathered are older than the last update.
        self.settle()
        if self._calls is not None:
            self._calls.begin()
        self._left = micro_batches
        self._mark()

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        """Accumulate the gradient of one micro-batch, and reduce it between shards."""
        super().backward(loss, weight)
        self._left -= 1
        self._mark()

    def _mark(self) -> None:
        if self._mesh.dp == 1 or self._average is not None:
            return
        root: Any = self.model
        if self._mesh.shard == 1:
            root.set_requires_gradient_sync(self._left <= 1)
        else:
            root.set_requires_all_reduce(self._left <= 1)

    def unscale(self) -> float:
        """Return the 2-norm of the reduced gradient, the same on every rank."""
        if self._calls is not None:
            self._calls.end([parameter.grad is not None for parameter in self.parameters])
        for parameter in self._summed:
            if self._layers is not None and parameter.grad is not None:
                distributed.all_reduce(local(parameter.grad), group=self._layers.get_group())
        if self._average is not None:
            self._average([parameter.grad for parameter in self.parameters])
        return super().unscale()

    def finish(self, norm: float, *, abandon: bool = False) -> bool:
        """Step and clear the gradients; a step that is skipped leaves nothing behind that replicas have not sent."""
        if self._average is not None and math.isfinite(norm) and not abandon:
            self._average.keep()
        return super().finish(norm, abandon=abandon)

    def discard(self) -> None:
        """Drop the accumulated gradients, as if the step had not begun."""
        if self._average is not None:
            self._average.drop()
        super().discard()

    def forget(self) -> None:
        """Forget what replicas have not sent yet."""
        if self._average is not None:
            self._average.reset()

    def shards(self) -> list[tuple[int, torch.Tensor]]:
        """Return this rank's part of the reduced gradient, with the parameters' indices; empty parts are left out."""
        found = [(index, local(p.grad)) for index, p in enumerate(self.parameters) if p.grad is not None]
        return [(index, gradient) for index, gradient in found if gradient.numel()]

    def undivided_squares(self) -> float:
        """Return the squared norm of this rank's gradient of parameters that are neither divided nor summed."""
        summed = set(map(id, self._summed))
        alike = [one for one in self.parameters if not _is_divided(one) and id(one) not in summed]
        own = [local(one.grad) for one in alike if one.grad is not None]
        norms = [norm.double() for norm in torch._foreach_norm(own)] if own else []
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def whole_part(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a micro-batch's gradient, with what ranks that share layers add to it.

        Args:
            parameter: one of the update's parameters.
            gradient: its gradient on this rank, before it is reduced.
        """
        if isinstance(gradient, DTensor):
            placement = _placements(parameter)[_LAYERS]
            return gradient.redistribute(placements=[placement]).to_local()
        if self._layers is not None and any(one is parameter for one in self._summed):
            gradient = gradient.clone()
            distributed.all_reduce(gradient, group=self._layers.get_group())
        return gradient

    def repeats(self, parameter: nn.Parameter) -> int:
        """Return how many of the ranks that share layers have this rank's part of a parameter's gradient."""
        return 1 if _is_divided(parameter) else self.sharing

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's weights and buffers by name."""
        self.settle()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: local(tensor) for name, tensor in named.items()}

    def resident(self, model: nn.Module, batches: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that are alive on this rank before a step begins."""
        self.settle()
        kept = [] if self._average is None else self._average.tensors()
        return [*resident_tensors(model, self.optimizer, batches), *kept]

    def settle(self) -> None:
        """Release gathered weights, so that none is older than its shard."""
        for module in self._gathering:
            module.reshard()

    def optimizer_state(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state, without references to the mesh."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return {**state, "state": {key: _parts_of(entry) for key, entry in state["state"].items()}}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`optimizer_state` on this rank of a mesh of the same layout."""
        own = [p for group in self.optimizer.param_groups for p in group["params"]]
        entries = {key: _whole_of(entry, own[key]) for key, entry in state["state"].items()}
        self.optimizer.load_state_dict({**state, "state": entries})

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scaler's state, and what replicas have not sent yet."""
        kept = {} if self._average is None else {"average": self._average.state_dict()}
        return {**super().state_dict(), **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        super().load_state_dict({name: value for name, value in state.items() if name != "average"})
        if self._average is not None:
            self._average.load_state_dict(state["average"])


class FullyShardedProbe(RankProbe):
    """Probe of one optimizer step of a model that is spread over ranks.

    A sharded weight's gradient belongs to the gathered weight, which exists only from the forward pass of its module
    on. Hooks are therefore registered in the first forward pass of the step.

    Args:
        model: the model.
        update: the update of the step.
        bearing: for every micro-batch of every rank, in order of ranks, whether it has loss-bearing items.
    """

    def __init__(self, model: nn.Module, update: FullyShardedUpdate, bearing: Sequence[bool]) -> None:
        super().__init__(update, bearing)
        self._model, self._sharded = model, update
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._unnoted = {
            name: place for name, one in model.named_parameters() if (place := places.get(id(one))) is not None
        }

    def __enter__(self) -> GradientProbe:
        for name, module in self._model.named_modules():
            if _is_spread(module):
                self._handles.append(module.register_forward_pre_hook(self._watch(name)))
        return self

    def _note(self, index: int) -> Any:
        note, parameter = super()._note(index), self._parameters[index]
        return lambda gradient: note(self._sharded.whole_part(parameter, gradient.detach()))

    def _watch(self, prefix: str) -> Callable[..., None]:
        def gathered(module: nn.Module, _args: object) -> None:
            for key, parameter in module.named_parameters(prefix=prefix):
                if key in self._unnoted and _is_gathered(parameter):
                    self._handles.append(parameter.register_hook(self._note(self._unnoted.pop(key))))

        return gathered


def spread(
    model: nn.Module,
    names: Iterable[str],
    mesh: Mesh,
    device_type: str,
    *,
    sent: Communication | None = None,
    devices: DeviceMesh | None = None,
) -> SentForms:
    """Spread a model over ranks in place: each named module with its weights, then all other weights together.

    Args:
        model: the model, which must be the same on each rank.
        names: modules that gather and release their weights by themselves; they must not overlap.
        mesh: the layout of the ranks.
        device_type: the device's type.
        sent: in which form gradients and weights are sent; ``None`` for that of the weights.
        devices: the first result of :func:`devices_of`; ``None`` if no ranks share layers.

    Returns:
        What the model does not send by itself, or not as it is.
    """
    sent = sent or Communication()
    where = devices or devices_of(mesh, device_type, sent)[0]
    average, gather = None, RoundedGather() if sent.gathers_in_16_bit else None
    if sent.gradient_rank:
        average = LowRankAverage(sent.gradient_rank, where["dp"].get_group())
        where = where["shard"]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if sent.reduces_in_16_bit else None)
    act: Any = replicate if where.mesh_dim_names == ("dp",) else fully_shard
    for module in [*(model.get_submodule(name) for name in names), model]:
        gathers = act(module, mesh=where, mp_policy=policy)
        if gather is not None:
            gathers.set_custom_all_gather(gather)
        if device_type == "cpu":
            # It would gather weights before they are needed, to no use where nothing runs beside the computation.
            gathers.set_modules_to_backward_prefetch([gathers])
    # Otherwise the first module that is called would count as the model, even if it is a part of it.
    gathers._get_fsdp_state()._lazy_init()
    return SentForms(average=average, gather=gather)


def gather_rest(model: nn.Module) -> None:
    """Gather the weights that belong to no unit, until the update settles: parts of the model may be called alone."""
    root: Any = model
    root.unshard()


def require_spreadable(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse a model that ``fully_shard`` cannot spread.

    Args:
        model: the model, not spread yet.
        names: the modules that will gather their own weights.

    Raises:
        JobError: if a parameter is a scalar, complex or not contiguous, if a gradient is sparse, or if weights that are
            gathered together have several dtypes.
    """
    dtypes: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and any(one.requires_grad for one in module.parameters(recurse=False)):
            raise JobError(f"{name} has sparse gradients", where="engine fsdp2", allowed="sparse=False")
    for name, parameter in model.named_parameters():
        problem, allowed = _unspreadable(parameter)
        if problem:
            raise JobError(f"parameter {name} {problem}", where="engine fsdp2", allowed=allowed)
        if parameter.requires_grad:
            group = next((one for one in names if name.startswith(f"{one}.")), "")
            dtypes.setdefault(group, set()).add(str(parameter.dtype).removeprefix("torch."))
    for group, found in dtypes.items():
        if len(found) > 1:
            what = f"unit {group} has" if group else "parameters that belong to no unit have"
            problem = f"{what} the dtypes {' and '.join(sorted(found))}"
            raise JobError(problem, where="engine fsdp2", allowed="one dtype in all weights that are gathered together")


def _unspreadable(parameter: nn.Parameter) -> tuple[str, str]:
    """Return why a parameter cannot be spread, and what could be; both empty if it can be."""
    if parameter.dim() == 0:
        return "has no dimension", "parameters of shape (1,) instead"
    if parameter.is_complex():
        return "is complex", "real parameters, such as a last dimension of two"
    if not parameter.is_contiguous():
        return "is not contiguous in memory", "parameters made by .contiguous(), not transposed or channels_last"
    return "", ""


def require_updated_alike(
    parameters: Sequence[nn.Parameter], build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    """Refuse an optimizer that updates parts of parameters otherwise than whole ones.

    It is tried on small parameters of as many dimensions as the model's, whole and spread over the ranks.

    Args:
        parameters: the model's trained parameters, spread over ranks.
        build: function that returns the optimizer of parameters.

    Raises:
        JobError: if the optimizer raises for parts alone, or makes another update.
    """
    generator = torch.Generator().manual_seed(0)
    wholes, parts = [], []
    for one in parameters:
        assert isinstance(one, DTensor)
        shape = [min(size, 2 * one.device_mesh.size() + 1 if place == 0 else 3) for place, size in enumerate(one.shape)]
        drawn = torch.randn(2, *shape, generator=generator).to(one.device, one.dtype)
        whole = nn.Parameter(drawn[0].clone())
        part = nn.Parameter(_distributed(drawn[0], one))
        whole.grad, part.grad = drawn[1].clone(), _distributed(drawn[1], one)
        wholes.append(whole)
        parts.append(part)
    before = [whole.detach().clone() for whole in wholes]
    if _step(build, wholes) is not None:
        # It is not made for such small parameters.
        return
    name = type(build(list(wholes))).__name__
    problem = _step(build, parts)
    if problem is None and not _alike(before, wholes, parts):
        problem = "it makes another update than on whole parameters"
    problem = next(filter(None, of_all_ranks(problem)), None)
    if problem is not None:
        raise JobError(
            f"optimizer {name} cannot update parts of parameters: {problem}",
            where="engine fsdp2",
            allowed="an optimizer that updates each entry by itself, such as AdamW, or --engine torch",
        )


def _distributed(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """Return a tensor that all ranks have, spread like another one; nothing is sent."""
    return distribute_tensor(tensor.clone(), like.device_mesh, like.placements, src_data_rank=None)


def _step(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parameters: list[nn.Parameter]) -> str | None:
    """Make one update, and return what it raised on one line; ``None`` if nothing."""
    try:
        build(list(parameters)).step()
    except Exception as error:  # noqa: BLE001 - whatever an optimizer raises tells that it cannot be used
        return one_line(error)[:_QUOTED]
    return None


def _alike(before: Sequence[torch.Tensor], wholes: Sequence[nn.Parameter], parts: Sequence[nn.Parameter]) -> bool:
    """Return whether this rank's parts were updated as whole parameters were, but for rounding."""
    for former, whole, part in zip(before, wholes, parts, strict=True):
        assert isinstance(part, DTensor)
        own, expected = local(part), local(_distributed(whole.detach(), part))
        moved = (whole.detach() - former).abs().max()
        if own.numel() and (own - expected).abs().max() > _ROUNDING * moved + 1e-6:
            return False
    return True


def devices_of(mesh: Mesh, device_type: str, sent: Communication | None = None) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the devices between which samples are divided, and those that share layers; all ranks must call this.

    Args:
        mesh: the layout of the ranks.
        device_type: the device's type.
        sent: in which form gradients and weights are sent; ``None`` for that of the weights.
    """
    sizes = {"dp": mesh.dp, "shard": mesh.shard, _LAYERS: mesh.tp}
    both = sent is not None and sent.gradient_rank > 0
    names = tuple(name for name in ("dp", "shard") if both or sizes[name] > 1) or ("shard",)
    every = (*names, *([_LAYERS] if mesh.tp > 1 else []))
    found = init_device_mesh(device_type, tuple(sizes[name] for name in every), mesh_dim_names=every)
    if every == names:
        return found, None
    # Norms are then summed in one collective, not along one dimension after another.
    found._flatten("_".join(every))
    return found[names], found[_LAYERS]


def _is_divided(parameter: nn.Parameter) -> bool:
    """Return whether ranks that share layers have different parts of a parameter."""
    return isinstance(_placements(parameter).get(_LAYERS), Shard)


def _placements(parameter: nn.Parameter) -> dict[str, Any]:
    """Return how a parameter is placed along each dimension of its mesh, by name; empty if it is on none."""
    if not isinstance(parameter, DTensor):
        return {}
    return dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False))


def _is_gathered(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is whole, or this rank's part of a divided layer, and not a shard of it."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names == (_LAYERS,)


def keep_gathered(model: nn.Module, names: Mapping[str, bool]) -> None:
    """Set for each named module whether its weights stay gathered from its forward to its backward pass."""
    for name, keeps in names.items():
        module: Any = model.get_submodule(name)
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(not keeps, recurse=False)


def _is_spread(module: nn.Module) -> bool:
    """Return whether a module gathers weights of its own."""
    return isinstance(module, FSDPModule)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _parts_of(entry: Any) -> Any:
    """Replace each distributed tensor in nested containers by this rank's part and its shape."""

    def part(leaf: torch.Tensor) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        return {
            _PART: local(leaf),
            "shape": list(leaf.shape),
            "stride": list(leaf.stride()),
            "sharded": _dimensions(leaf),
        }

    return map_tensors(part, entry)


def _whole_of(entry: Any, parameter: Any) -> Any:
    """Return the entry from which :func:`_parts_of` made this one, on the mesh of a parameter."""
    if isinstance(entry, dict) and _PART in entry:
        placements = parameter.placements
        if entry["sharded"] != _dimensions(parameter):
            placements = [Replicate() if dim < 0 else Shard(dim) for dim in entry["sharded"]]
        shape, stride = torch.Size(entry["shape"]), tuple(entry["stride"])
        return DTensor.from_local(
            entry[_PART], parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )
    if isinstance(entry, dict):
        return {key: _whole_of(value, parameter) for key, value in entry.items()}
    return entry


def _dimensions(tensor: DTensor) -> list[int]:
    """Return the dimension that is divided along each dimension of the mesh; -1 for none."""
    return [one.dim if isinstance(one, Shard) else -1 for one in tensor.placements]
