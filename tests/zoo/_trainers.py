"""Train with transformers' Trainer, or a subclass of it, in the zoo's runs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from autotune.live.integrations.transformers import AutotuneCallback
from zoo import Run
from zoo._frameworks import Ended, Watch

SETTINGS = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "report_to": [],
    "logging_steps": 1,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class _Attached(AutotuneCallback):
    """The callback, which keeps the tuner's status before it detaches."""

    def __init__(self, run: Run) -> None:
        super().__init__(**run.arguments())
        self._run = run

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._run.tuner = Ended(self.tuner)
        super().on_train_end(*args, **kwargs)


class _Watching(TrainerCallback):
    """A callback that detects where steps begin and end; batches are seen when the model is called."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._begins = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Any, **_: Any) -> None:
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._handle = model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._begins and model.training:
            self._begins = False
            self._watch.begin_step(model, self._optimizer, (args, kwargs))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begins = True

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._watch.end_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._handle.remove()


def train_with(trainer: Trainer, run: Run) -> None:
    """Train, attached or not as the run says; record the Trainer's losses and the trained model."""
    attached = _Attached(run) if run.is_attached else None
    if attached is not None:
        trainer.add_callback(attached)
    trainer.add_callback(_Watching(Watch(run, attached)))
    trainer.train()
    names = ("loss", "eval_loss", "grad_norm")
    run.log(*[row[name] for row in trainer.state.log_history for name in names if name in row])
    run.keep(trainer.model, trainer.optimizer.optimizer)
