"""Jobs from a Hugging Face Trainer: its model, data, loss, optimizer and scheduler, as its training would use them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autotune.errors import JobError, a_kind, one_line
from autotune.job import Job
from autotune.own_loop import Few, job_of, labels_counted

logger = logging.getLogger(__name__)

WHERE = "from_trainer"
# Packages whose own ``training_step`` the job repeats: one forward pass, its loss, one backward pass.
_KNOWN_STEPS = ("transformers.trainer", "autotune.")


def job_of_trainer(trainer: Any, *, max_steps: int | None, evaluate: Any, **settings: Any) -> Job:
    """Return the job that :meth:`autotune.job.Job.from_trainer` describes.

    Raises:
        JobError: if the Trainer does more than a job can repeat; the message says what, and the remedy.
    """
    _check(trainer)
    args = trainer.args
    size = args.train_batch_size * args.gradient_accumulation_steps
    loader = _train_loader(trainer, size)
    steps = _steps(trainer, loader)
    optimizer, scheduler = _made(trainer, steps)
    loss = _loss_of(trainer)
    if evaluate is None and trainer.eval_dataset is not None:
        evaluate = Few(lambda: _plain(trainer.get_eval_dataloader()))
    return job_of(
        trainer.model,
        loader,
        loss,
        optimizer,
        scheduler=scheduler,
        evaluate=evaluate,
        batch_size=size,
        max_steps=steps if max_steps is None else max_steps,
        clip_norm=args.max_grad_norm or None,
        count=_count_of(trainer),
        **settings,
    )


def _check(trainer: Any) -> None:
    """Refuse Trainers whose training a job would not repeat."""
    kinds = type(trainer).__mro__
    if not any(kind.__name__ == "Trainer" and kind.__module__.startswith("transformers.") for kind in kinds):
        raise JobError(f"trainer is {a_kind(trainer)}", where=WHERE, allowed="a transformers.Trainer")
    args = trainer.args
    owner = next(kind for kind in kinds if "training_step" in vars(kind))
    if not owner.__module__.startswith(_KNOWN_STEPS):
        raise JobError(
            f"{owner.__name__} has a training_step of its own",
            where=WHERE,
            allowed="a Trainer that overrides compute_loss, or Job.from_loader with that step's loss",
        )
    if args.deepspeed or args.fsdp or args.world_size > 1 or args.n_gpu > 1:
        what = "DeepSpeed" if args.deepspeed else "FSDP" if args.fsdp else f"{max(args.world_size, args.n_gpu)} devices"
        raise JobError(
            f"the Trainer trains by {what}",
            where=WHERE,
            allowed="a Trainer of one device; its global batch is cut between ranks by --engine deepspeed --ranks N",
        )
    if getattr(args, "neftune_noise_alpha", None) is not None:
        raise JobError(
            "neftune_noise_alpha is set, and the noise is added by the Trainer's own loop",
            where=WHERE,
            allowed="neftune_noise_alpha=None, or a compute_loss that adds the noise",
        )
    own = [type(one).__name__ for one in trainer.callback_handler.callbacks if not _is_known(one)]
    if own:
        logger.warning("the job does not call the Trainer's callbacks: %s", ", ".join(own))
    if args.torch_compile:
        raise JobError("torch_compile is set", where=WHERE, allowed="torch_compile=False, with +compile")
    if trainer.train_dataset is None:
        raise JobError("the Trainer has no train_dataset", where=WHERE, allowed="Trainer(train_dataset=...)")


def _is_known(callback: object) -> bool:
    """Return whether a callback is one of transformers or of this package, which leave the training as it is."""
    return type(callback).__module__.startswith(("transformers.", "autotune."))


def _train_loader(trainer: Any, size: int) -> Any:
    """Return the Trainer's loader with the batches of whole updates: accumulated batches are one batch here."""
    former = trainer._train_batch_size
    try:
        trainer._train_batch_size = size
        return _plain(trainer.get_train_dataloader())
    finally:
        trainer._train_batch_size = former


def _plain(loader: Any) -> Any:
    """Return the loader that accelerate wrapped, whose batches stay on the host."""
    return getattr(loader, "base_dataloader", loader)


def _steps(trainer: Any, loader: Any) -> int:
    """Return the number of updates of the Trainer's training."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        length = len(loader)
    except TypeError as error:
        raise JobError(
            "the length of train_dataset is not known", where=WHERE, allowed="TrainingArguments(max_steps=...)"
        ) from error
    return max(math.ceil(float(args.num_train_epochs) * length), 1)


def _made(trainer: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer and the scheduler that the Trainer would make; the Trainer's own stay as they are."""
    former = trainer.optimizer, trainer.lr_scheduler
    created = getattr(trainer, "_created_lr_scheduler", False)
    try:
        trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    except Exception as error:
        # The libraries of some optimizers are not installed with transformers.
        raise JobError(
            f"the Trainer cannot make its optimizer or scheduler ({one_line(error)})",
            where=WHERE,
            allowed="a Trainer that can train",
        ) from error
    else:
        return trainer.optimizer, trainer.lr_scheduler
    finally:
        trainer.optimizer, trainer.lr_scheduler = former
        trainer._created_lr_scheduler = created


def _loss_of(trainer: Any) -> Callable[[nn.Module, Any], torch.Tensor]:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        # compute_loss may take parts out of its inputs.
        found: torch.Tensor = trainer.compute_loss(model, dict(batch), num_items_in_batch=_items(trainer, batch))
        return found

    return loss


def _items(trainer: Any, batch: Mapping[str, Any]) -> Any:
    """Return the number of labels by which the Trainer divides a batch's loss; ``None`` if the model does."""
    device = next(leaf.device for leaf in batch.values() if isinstance(leaf, torch.Tensor))
    return trainer.get_batch_samples(iter([batch]), 1, device)[1]


def _count_of(trainer: Any) -> Callable[[Mapping[str, Any]], int]:
    counted = labels_counted(shifted=False)

    def count(batch: Mapping[str, Any]) -> int:
        items = _items(trainer, batch)
        return counted(batch) if items is None else int(items)

    return count
