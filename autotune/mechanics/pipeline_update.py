"""Updates of a pipeline's ranks, each of which has the parameters of its stages and those that all share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import distributed, nn

from autotune.errors import JobError, one_line
from autotune.mechanics.gradient_stats import GradientProbe
from autotune.mechanics.memory_meter import resident_tensors
from autotune.mechanics.rank_probe import RankProbe, RankUpdate
from autotune.mechanics.split_backward import SplitBackward


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        return result.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None]:
        return ctx.gradients.pop(), None


def end_of_stage(result: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return a number from which the backward pass of a stage begins, and whose graph keeps neither argument's memory.

    Args:
        result: what the stage has computed.
        gradients: the gradient of it, which the backward pass takes out.
    """
    found: torch.Tensor = _End.apply(result, gradients)  # type: ignore[no-untyped-call]
    return found


class PipelineUpdate(RankUpdate):
    """Updates in which each rank updates the parameters of its stages, and all update the shared ones alike.

    Args:
        optimizer: the job's optimizer over this rank's parameters.
        trained: the model's trained parameters; those of other ranks have no values here.
        shared: the places of the shared ones among them.
        absent: what is in the place of parameters of other ranks.
        clip_norm: norm at which gradients are clipped; ``None`` for no clipping.
        device_type: the device's type.
        keeps_gradients: whether each parameter has a gradient from one stage alone, so that norms can be observed.
    """

    copies = 1

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[nn.Parameter],
        shared: Sequence[int],
        *,
        absent: Iterable[nn.Parameter],
        clip_norm: float | None,
        device_type: str,
        keeps_gradients: bool,
    ) -> None:
        super().__init__(optimizer, clip_norm=clip_norm, device_type=device_type, order=trained)
        self.keeps_gradients = keeps_gradients
        self._trained, self._absent, self._accumulates = trained, set(map(id, absent)), False
        self._shared = [(place, trained[place]) for place in shared]

    def begin(self, micro_batches: int) -> None:
        """Announce the number of micro-batches of the next update."""
        self._accumulates = micro_batches > 0

    def begin_backward(
        self, end: torch.Tensor | None, received: torch.Tensor | None, early: Collection[nn.Parameter] | None
    ) -> Callable[[], None]:
        """Run the backward pass of one micro-batch in a stage, or its first part.

        Args:
            end: the number from which it begins, such as a result of :func:`end_of_stage`; ``None`` if there is none.
            received: what the stage was handed, whose gradient the first part is for.
            early: the parameters that get their gradients in the first part; ``None`` to run the whole pass.

        Returns:
            The second part, which does nothing after a whole pass.
        """
        self._accumulating = True
        if end is None or early is None or received is None or not received.requires_grad:
            if end is not None:
                end.backward()
            return lambda: None
        now = set(map(id, early))
        own = [one for one in self._trained if id(one) not in self._absent]
        late = [one for one in own if id(one) not in now]
        return SplitBackward(end, received, late, early=[one for one in own if id(one) in now]).finish

    def unscale(self) -> float:
        """Add up the gradients of shared parameters, and return the whole gradient's 2-norm, the same on every rank."""
        if self._shared:
            first = self._shared[0][1]
            there = torch.tensor([one.grad is not None for _, one in self._shared], dtype=torch.float32)
            there = there.to(first.device)
            distributed.all_reduce(there)
            for count, (_, parameter) in zip(there.tolist(), self._shared, strict=True):
                if count:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else _dense(parameter.grad)
                    gradient = gradient.contiguous()
                    distributed.all_reduce(gradient)
                    parameter.grad = gradient
        # Gradients of shared parameters are there on all ranks now.
        self._accumulating = self._accumulates
        return self._norm()

    def _norm(self) -> float:
        """Return the 2-norm of the whole gradient, of the parameters' norms in the order of the model."""
        shards = self.shards()
        norms = torch.zeros(2, len(self._trained), dtype=torch.float64, device=self._trained[0].device)
        if shards:
            where = torch.tensor([place for place, _ in shards], device=norms.device)
            own = torch.stack([norm.double() for norm in torch._foreach_norm([gradient for _, gradient in shards])])
            norms.index_copy_(1, where, torch.stack([own, torch.ones_like(own)]))
        distributed.all_reduce(norms)
        dtype = functools.reduce(torch.promote_types, {one.dtype.to_real() for one in self._trained})
        return float(torch.linalg.vector_norm(norms[0][norms[1] > 0].to(dtype)))

    def shards(self) -> list[tuple[int, torch.Tensor]]:
        """Return the gradients of this rank's stages, and on the first rank those of shared parameters."""
        shared = {place for place, _ in self._shared} if distributed.get_rank() else frozenset[int]()
        return [
            (place, _values(one.grad))
            for place, one in enumerate(self._trained)
            if one.grad is not None and place not in shared
        ]

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's weights and buffers by name."""
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: one for name, one in named.items() if id(one) not in self._absent}

    def resident(self, model: nn.Module, batches: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that are alive on this rank before a step begins."""
        return resident_tensors(model, self.optimizer, batches)

    def settle(self) -> None:
        """Do nothing: no weight is ever gathered."""


class PipelineProbe(RankProbe):
    """Probe of a step whose micro-batches all go through all ranks.

    Args:
        update: the update of the step.
        trained: the model's trained parameters.
        order: the micro-batch of each of this rank's backward passes.
        bearing: for every micro-batch, whether it has loss-bearing items.
    """

    def __init__(
        self, update: RankUpdate, trained: Sequence[nn.Parameter], order: Sequence[int], bearing: Sequence[bool]
    ) -> None:
        super().__init__(update, bearing)
        self._parameters = list(trained)
        self._order = order

    def __enter__(self) -> GradientProbe:
        for place, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._note(place)))
        return self

    def micro_batches(self, own: torch.Tensor) -> torch.Tensor:
        """Return the squared norms of each micro-batch in all stages; see :class:`RankProbe`."""
        whole = own.new_zeros(len(self._bearing), own.shape[1])
        whole.index_add_(0, torch.tensor(self._order, device=own.device), own)
        distributed.all_reduce(whole)
        return whole


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the entries of a gradient that may differ from zero."""
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()


def require_updated_apart(
    parameters: Sequence[nn.Parameter],
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    where: str,
) -> None:
    """Refuse an optimizer whose update of a parameter depends on the others', as a learning rate for all may.

    It is tried on small parameters of as many dimensions as the model's, all together and every second one alone.

    Args:
        parameters: the model's trained parameters.
        build: function that returns the optimizer of parameters.
        where: what needs it, for the error.

    Raises:
        JobError: if the optimizer raises, or makes another update.
    """
    whole = _updated(parameters, build, range(len(parameters)), where)
    for start in (0, 1):
        places = range(start, len(parameters), 2)
        part = _updated(parameters, build, places, where)
        if any(not torch.allclose(part[place], whole[place], rtol=1e-5, atol=1e-8) for place in places):
            raise JobError(
                "the optimizer's update of a parameter depends on the others', which are on other ranks",
                where=where,
                allowed="an optimizer that updates each parameter by itself, such as AdamW, or --engine torch",
            )


def _updated(
    parameters: Sequence[nn.Parameter],
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    places: range,
    where: str,
) -> list[torch.Tensor]:
    """Return small parameters after three updates of those at some places."""
    generator = torch.Generator().manual_seed(0)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        shape = [min(size, 3) for size in like.shape]
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)

    small = [nn.Parameter(drawn(one)) for one in parameters]
    try:
        optimizer = build(list(small))
        kept = {id(small[place]) for place in places}
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) in kept]
        for _ in range(3):
            gradients = [drawn(one) for one in small]
            for place in places:
                small[place].grad = gradients[place]
            optimizer.step()
    except Exception as error:
        problem = f"the optimizer cannot update some parameters alone: {one_line(error):.200}"
        raise JobError(problem, where=where, allowed="an optimizer such as AdamW, or --engine torch") from error
    return [one.detach() for one in small]
