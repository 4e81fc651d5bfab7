"""Jobs from the objects of a training loop: a model, a loader, a loss, an optimizer and a scheduler.

A job is trained many times. It therefore keeps copies of what the loop had when the job was made, and each run begins
with copies of these; the loop's own objects are never changed.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autotune.compiled import is_compiled
from autotune.errors import JobError, a_kind
from autotune.host_generators import Draws
from autotune.job import Job

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

WHERE = "from_loader"
# Batches whose mean loss is the metric where no evaluation is given, and the seed that they are drawn with.
_EVALUATED, _EVALUATION_SEED = 4, 20_011
# Index of targets that cross-entropy leaves out, unless it is given another one.
_IGNORED = -100

_T = TypeVar("_T")


def job_of(
    model: nn.Module | Callable[[], nn.Module],
    loader: Iterable[Any],
    loss: Callable[..., torch.Tensor] | None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
    *,
    scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
    evaluate: Callable[[nn.Module], float] | Iterable[Any] | None = None,
    batch_size: int | None = None,
    **settings: Any,
) -> Job:
    """Return the job that :meth:`autotune.job.Job.from_loader` describes.

    Raises:
        JobError: if something cannot be rebuilt for each run; the message says what, and the remedy.
    """
    kept = _Kept(model, optimizer, scheduler)
    batches = _Batches(loader)
    computed, count = _loss_of(loss, kept.model)
    if settings.get("count") is None:
        settings["count"] = count
    size = batches.size if batch_size is None else batch_size
    if size is None:
        raise JobError("loader has no batch_size", where=WHERE, allowed="batch_size=, the samples of its batches")
    if settings.get("accumulation_choices") is None:
        uneven = isinstance(loss, nn.Module) and getattr(loss, "weight", None) is not None
        settings["accumulation_choices"] = tuple(k for k in (1, 2, 4) if k == 1 or (k <= size and not uneven))
    return Job(
        name=settings.pop("name", None) or type(kept.model).__name__.lower(),
        model=kept.build_model,
        batches=batches.of_seed,
        loss=computed,
        optimizer=kept.build_optimizer,
        scheduler=None if scheduler is None else kept.build_scheduler,
        evaluate=_evaluation(evaluate, computed, batches),
        batch_size=size,
        **settings,
    )


class _Kept:
    """What each run of the job begins with.

    Attributes:
        model: the model, or the function that builds it.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        optimizer, scheduler = _unwrapped(optimizer, "optimizer"), _unwrapped(scheduler, "scheduler")
        is_built = isinstance(optimizer, torch.optim.Optimizer)
        _check_model(model, optimizer)
        _check_scheduler(scheduler, optimizer)
        self.model, self._optimizer, self._scheduler = model, optimizer, scheduler
        memo: dict[int, Any] = {}
        if isinstance(model, nn.Module):
            self.model = _copied("model", model, memo | _on_host(model))
            for own, kept in zip(model.parameters(), self.model.parameters(), strict=True):
                memo[id(own)] = kept
        if is_built:
            _check_optimizer(optimizer, model)
            self._optimizer = memo[id(optimizer)] = _twin(optimizer, memo)
            trained = set(self._trained())
            for group in self._optimizer.param_groups:
                group["params"] = [one for one in group["params"] if one in trained]
        if is_built and scheduler is not None and not _is_builder(scheduler):
            self._scheduler = _copied("scheduler", scheduler, memo)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def build_model(self) -> nn.Module:
        if not isinstance(self.model, nn.Module):
            built: nn.Module = self.model()
            return built
        return _copied("model", self.model, {})

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            made: torch.optim.Optimizer = self._optimizer(parameters)
            return made
        memo = {id(kept): new for kept, new in zip(self._trained(), parameters, strict=True)}
        built = _twin(self._optimizer, memo)
        # Moves its state to the devices of the parameters.
        built.load_state_dict(built.state_dict())
        return built

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        if _is_builder(self._scheduler):
            made: LRScheduler = self._scheduler(optimizer)
            return made
        copied: LRScheduler = _copied("scheduler", self._scheduler, {id(self._optimizer): optimizer})
        return copied


class _Batches:
    """The batches of a loader, anew for each seed.

    Attributes:
        size: samples of a batch; ``None`` if the loader does not say.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
            raise JobError(
                f"loader is {a_kind(loader)}, which cannot be read again",
                where=WHERE,
                allowed="a DataLoader, or another iterable that begins anew each time",
            )
        shares = getattr(getattr(loader, "sampler", None), "num_replicas", 1)
        if shares > 1:
            raise JobError(
                f"loader reads one of {shares} ranks' shares", where=WHERE, allowed="a loader of all samples"
            )
        with contextlib.suppress(TypeError, NotImplementedError):
            if not len(loader):  # type: ignore[arg-type]
                raise JobError(
                    "loader has no batches", where=WHERE, allowed="at least one batch; with drop_last, a whole one"
                )
        self._loader = loader
        size = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        self.size: int | None = size

    def of_seed(self, seed: int) -> Iterator[Any]:
        """Return the batches of one pass, as the loader gives them after ``torch.manual_seed(seed)``.

        Nothing else that draws changes them, and they change nothing else's draws.
        """
        draws = Draws(seed)
        with draws.own():
            batches = iter(_reseeded(self._loader, seed))
        while True:
            with draws.own():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


def loaded_with(
    batches: Callable[[int], Iterator[Any]], *, workers: int | None = None, pinned: bool | None = None
) -> Callable[[int], Iterator[Any]] | None:
    """Return the same batches from a DataLoader with other options; ``None`` if they come from no DataLoader.

    Args:
        batches: the ``batches`` of a job.
        workers: number of processes that prepare batches; ``None`` for the loader's own.
        pinned: whether batches are put into pinned memory; ``None`` for the loader's own choice.
    """
    own = getattr(batches, "__self__", None)
    loader = own._loader if isinstance(own, _Batches) else None
    if not isinstance(loader, torch.utils.data.DataLoader):
        return None
    again = copy.copy(loader)
    # A DataLoader refuses new values of some of these after its construction.
    parts = vars(again)
    parts["_iterator"] = None
    if workers is not None:
        parts["num_workers"] = workers
        parts["prefetch_factor"] = loader.prefetch_factor or 2
    if pinned is not None:
        parts["pin_memory"] = pinned
    return _Batches(again).of_seed


def _reseeded(loader: Iterable[Any], seed: int) -> Iterable[Any]:
    """Return a loader over the same data whose own generators have a seed; the loader itself is not changed."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    again = copy.copy(loader)
    parts = vars(again)
    parts["_iterator"] = None
    if loader.generator is not None:
        parts["generator"] = _seeded(loader.generator, seed)
    sampler = parts["sampler"] = _sampler(loader.sampler, seed)
    if loader.batch_sampler is not None:
        groups = parts["batch_sampler"] = _sampler(loader.batch_sampler, seed)
        inner = getattr(groups, "sampler", None)
        if inner is not None:
            groups.sampler = sampler if inner is loader.sampler else _sampler(inner, seed)
    return again


def _sampler(sampler: Any, seed: int) -> Any:
    again = copy.copy(sampler)
    if isinstance(getattr(again, "generator", None), torch.Generator):
        again.generator = _seeded(again.generator, seed)
    if callable(getattr(again, "set_epoch", None)):
        again.set_epoch(seed)
    return again


def _seeded(generator: torch.Generator, seed: int) -> torch.Generator:
    return torch.Generator(generator.device).manual_seed(seed)


def _loss_of(
    loss: Callable[..., torch.Tensor] | None, model: object
) -> tuple[Callable[[nn.Module, Any], torch.Tensor], Callable[[Any], int] | None]:
    """Return ``(model, batch) -> loss`` and what counts the items of a batch; ``None`` counts samples."""
    if loss is None:
        return own_loss, labels_counted(shifted="ForCausalLM" in str(getattr(model, "loss_type", "")))
    if not callable(loss):
        raise JobError(f"loss is {loss!r}", where=WHERE, allowed="a function, a loss module, or None")
    if getattr(loss, "__module__", None) == "torch.nn.functional":
        name = getattr(loss, "__name__", "a function")
        raise JobError(
            f"loss is {name}, which takes outputs and targets",
            where=WHERE,
            allowed="a loss module such as nn.MSELoss(), or a function of the model and a batch",
        )
    if not isinstance(loss, nn.Module):
        return loss, None
    criterion = loss
    if getattr(criterion, "reduction", "mean") != "mean":
        raise JobError(f"loss has the reduction {criterion.reduction!r}", where=WHERE, allowed="mean")

    def computed(model: nn.Module, batch: Any) -> torch.Tensor:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            told = "loss=function(model, batch), or batches of inputs and targets"
            raise JobError(f"a batch is {a_kind(batch)} and not a pair", where="loss", allowed=told)
        result: torch.Tensor = criterion(model(batch[0]), batch[1])
        return result

    ignored = getattr(criterion, "ignore_index", None)
    if ignored is None:
        return computed, None
    return computed, lambda batch: _items(batch[1], ignored)


_UNCOUNTED = "count=function(batch); or loss=function(model, batch) for a model that computes no loss itself"


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that a model computes itself, as Hugging Face's do for a batch with labels."""
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise JobError(
            "the model's output has no loss", where="loss", allowed="a loss function, or labels in the batch"
        )
    found: torch.Tensor = loss
    return found


def labels_counted(*, shifted: bool) -> Callable[[Any], int]:
    """Return a function that counts the labels of a batch that bear loss.

    Args:
        shifted: whether the model predicts each label from those before it, so that the first one is left out.
    """

    def count(batch: Any) -> int:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            raise JobError("a batch has no tensor of labels", where="count", allowed=_UNCOUNTED)
        return _items(labels[..., 1:] if shifted else labels, _IGNORED)

    return count


def _items(targets: torch.Tensor, ignored: int) -> int:
    if targets.is_floating_point():
        return targets.shape[0]
    return int((targets != ignored).sum())


class Few:
    """The first batches of what a function returns, which are read once, when they are first needed.

    Args:
        read: returns the batches.
    """

    def __init__(self, read: Callable[[], Iterable[Any]]) -> None:
        self._read = read
        self._batches: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self._batches = self._batches or list(itertools.islice(self._read(), _EVALUATED))
        return iter(self._batches)


def _evaluation(
    evaluate: Any, loss: Callable[[nn.Module, Any], torch.Tensor], batches: _Batches
) -> Callable[[nn.Module], float]:
    """Return the evaluation: the given function, the mean loss of a loader, or that of a few training batches."""
    if callable(evaluate):
        chosen: Callable[[nn.Module], float] = evaluate
        return chosen
    if evaluate is not None and (not isinstance(evaluate, Iterable) or isinstance(evaluate, Iterator)):
        raise JobError(f"evaluate is {evaluate!r}", where=WHERE, allowed="a function of the model, a loader, or None")
    judged: Iterable[Any] = Few(lambda: batches.of_seed(_EVALUATION_SEED)) if evaluate is None else evaluate

    def mean_loss(model: nn.Module) -> float:
        device = next(model.parameters()).device
        losses = [float(loss(model, _moved(batch, device)).detach()) for batch in judged]
        if not losses:
            raise JobError("there are no batches", where="evaluate", allowed="at least one batch")
        return sum(losses) / len(losses)

    return mean_loss


def _moved(batch: Any, device: torch.device) -> Any:
    whole = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, whole)


def _check_model(model: Any, optimizer: Any) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise JobError(f"model is in {type(model).__name__}", where=WHERE, allowed="the module in it: model.module")
    if is_compiled(model):
        raise JobError(
            "model is compiled as a whole", where=WHERE, allowed="the module before torch.compile, with +compile"
        )
    if isinstance(model, nn.Module) and "_original_forward" in vars(model):
        raise JobError("model was prepared by accelerate", where=WHERE, allowed="the model before accelerator.prepare")
    if not callable(model):
        raise JobError(f"model is {model!r}", where=WHERE, allowed="a module, or a function that builds it")
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"optimizer is {optimizer!r}", where=WHERE, allowed="an optimizer, or a function of parameters")
    if not isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            "model is a function, and optimizer has the parameters of another model",
            where=WHERE,
            allowed="a function (parameters) -> optimizer",
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(f"{kind} evaluates the loss several times a step", where=WHERE, allowed="another optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise JobError(
            "optimizer updates a parameter that is not the model's",
            where=WHERE,
            allowed="the model that it was made for",
        )
    hooks = vars(optimizer).get("_optimizer_step_pre_hooks"), vars(optimizer).get("_optimizer_step_post_hooks")
    if any(hooks):
        raise JobError(
            "optimizer has hooks on its step, which belong to one loop",
            where=WHERE,
            allowed="an optimizer without hooks, or a function (parameters) -> optimizer",
        )


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    if scheduler is None:
        return
    if not _is_builder(scheduler):
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise JobError(
                f"scheduler is {scheduler!r}", where=WHERE, allowed="a torch scheduler, or a function (optimizer) -> it"
            )
        if scheduler.optimizer is not optimizer:
            raise JobError("scheduler was made for another optimizer", where=WHERE, allowed="the one of this loop")
        require_stepped(scheduler, where=WHERE)


def require_stepped(scheduler: LRScheduler, *, where: str) -> None:
    """Refuse a scheduler that cannot be stepped after each update without further arguments.

    Raises:
        JobError: naming the scheduler.
    """
    named = list(inspect.signature(type(scheduler).step).parameters.values())[1:]
    if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in named):
        raise JobError(
            f"{type(scheduler).__name__} needs a metric at each step",
            where=where,
            allowed="a scheduler that is stepped after each update",
        )


def _is_builder(scheduler: Any) -> bool:
    return callable(scheduler) and not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)


def _unwrapped(value: Any, part: str) -> Any:
    """Return what accelerate wrapped."""
    return getattr(value, part) if type(value).__name__.startswith("Accelerated") else value


def _on_host(model: nn.Module) -> dict[int, Any]:
    """Return copies in the host's memory of tensors on accelerators, so that copying the model takes none of theirs."""
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.device.type != "cpu" and type(parameter) is nn.Parameter:
            copies[id(parameter)] = nn.Parameter(parameter.detach().cpu(), parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.device.type != "cpu" and type(buffer) is torch.Tensor:
            copies[id(buffer)] = buffer.detach().cpu()
    return copies


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, groups, settings and state over the parameters in ``memo``.

    Its constructor is not called: an optimizer does not record all of its arguments.
    """
    twin = type(optimizer).__new__(type(optimizer))
    # A scheduler shadows ``step`` with a function that is bound to the former optimizer.
    parts = {name: value for name, value in vars(optimizer).items() if name != "step" and not name.endswith("_hooks")}
    twin.__setstate__(_copied("optimizer", parts, memo))
    return twin


def _copied(part: str, value: _T, memo: dict[int, Any]) -> _T:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise JobError(
            f"{part} cannot be copied: {type(error).__name__}: {error}",
            where=WHERE,
            allowed="a function that builds it",
        ) from error
