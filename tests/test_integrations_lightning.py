"""Tests of the callback for Lightning: training stays bit-identical, and nothing of the callback remains."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TinyConvolution, TinyGPT
from test_live import RESTLESS, Wanders, gpt_loss, image_batches, image_loss, seeded, token_batches
from torch import nn

import autotune
from autotune import AttachError

lightning = pytest.importorskip("lightning.pytorch")

from autotune.live.integrations.lightning import AutotuneCallback  # noqa: E402

# Lightning's own warnings, about deprecated torch functions and about performance.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:.*dirpath has changed.*"),
]

BATCHES = 45


class Job(lightning.LightningModule):
    """A user's module."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss_of(self.model, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("checked", self.loss_of(self.model, batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def gpt() -> Job:
    return Job(TinyGPT(width=16, blocks=4, dropout=0.2), gpt_loss)


def convolution() -> Job:
    return Job(TinyConvolution(blocks=4), image_loss)


def ragged(count: int) -> Iterator[torch.Tensor]:
    return token_batches(count, ragged=True)


def loader(batches: Iterator[Any]) -> Any:
    return torch.utils.data.DataLoader(list(batches), batch_size=None)


@dataclasses.dataclass
class Run:
    """The result of a training."""

    trainer: Any
    module: Job
    generator: torch.Tensor
    callback: AutotuneCallback | None

    def events(self, kind: str) -> list[dict[str, Any]]:
        assert self.callback is not None
        assert self.callback.tuner is not None
        assert self.callback.tuner.folder is not None
        rows = (self.callback.tuner.folder / "decisions.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, rows) if event["event"] == kind]


def trainer_for(folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 1.0,
        "default_root_dir": folder,
        **arguments,
    }
    return lightning.Trainer(callbacks=callbacks, **settings)


def train(
    folder: Path,
    job: Callable[[], Job] = gpt,
    batches: Callable[[int], Iterator[Any]] = token_batches,
    *,
    attached: bool,
    policy: object = None,
    budget: Any = 10**9,
    also: tuple[Any, ...] = (),
    **arguments: Any,
) -> Run:
    seeded()
    module = job()
    callback = None
    if attached:
        callback = AutotuneCallback(
            policy or Wanders(), memory_budget_bytes=budget, limits=RESTLESS, runs_dir=folder / "runs"
        )
    trainer = trainer_for(folder, [*([callback] if callback else []), *also], **arguments)
    trainer.fit(module, loader(batches(BATCHES)), loader(batches(2)))
    return Run(trainer, module, torch.get_rng_state(), callback)


def assert_identical(one: Run, two: Run) -> None:
    assert one.module.losses == two.module.losses
    assert torch.equal(one.generator, two.generator)
    for a, b in zip(one.module.state_dict().values(), two.module.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    states = [run.trainer.optimizers[0].state_dict()["state"] for run in (one, two)]
    for key, entry in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in entry.items())
    assert one.trainer.callback_metrics == two.trainer.callback_metrics
    assert one.trainer.global_step == two.trainer.global_step


def assert_untouched(model: nn.Module) -> None:
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("job", "batches"),
    [
        pytest.param(gpt, token_batches, id="dropout", marks=pytest.mark.slow),
        pytest.param(gpt, ragged, id="ragged"),
        pytest.param(convolution, image_batches, id="batchnorm", marks=pytest.mark.slow),
    ],
)
def test_training_with_the_callback_is_bit_identical(job: Any, batches: Any, k: int, tmp_path: Path) -> None:
    # With k = 4 the epoch's last step has a single batch.
    plain = train(tmp_path, job, batches, attached=False, accumulate_grad_batches=k, max_epochs=k)
    tuned = train(tmp_path, job, batches, attached=True, accumulate_grad_batches=k, max_epochs=k)
    assert len(tuned.events("switched")) >= 15
    assert tuned.callback is not None
    assert tuned.callback.tuner is not None
    assert tuned.callback.tuner.detached_because == "the training ended"
    assert_identical(plain, tuned)
    assert_untouched(tuned.module)


def test_training_in_bf16_with_validation_in_between_is_bit_identical(tmp_path: Path) -> None:
    options = {"precision": "bf16-mixed", "val_check_interval": 7}
    plain = train(tmp_path, attached=False, **options)
    tuned = train(tmp_path, attached=True, **options)
    assert len(tuned.events("switched")) >= 15
    assert_identical(plain, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stored", ["save", "recompute"])
def test_peak_is_predicted_although_gradients_are_cleared_within_the_step(stored: str, k: int, tmp_path: Path) -> None:
    class Watches(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            tuner = trainer.callbacks[0].tuner
            self.status = dict(tuner.status)

    watch = Watches()
    budget = 10**9 if stored == "save" else 1000
    train(
        tmp_path,
        attached=True,
        policy="exact",
        budget=budget,
        also=(watch,),
        accumulate_grad_batches=k,
        max_epochs=k,
    )
    assert all(stored == str(choice) for choice in watch.status["plan"].storage.values())
    ratio = watch.status["predicted_peak_bytes"] / watch.status["measured_peak_bytes"]
    # Too high by the previous step's gradients, whose release the first trace on a CPU does not show.
    assert 0.97 <= ratio <= 1.1


def test_resumed_training_is_bit_identical_and_its_checkpoint_contains_nothing_of_this_package(tmp_path: Path) -> None:
    def run(folder: Path, attached: bool, resume: Path | None = None) -> Run:
        seeded()
        module = gpt()
        callback = AutotuneCallback(Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=folder)
        saving = lightning.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        callbacks = [saving, *([callback] if attached else [])]
        trainer = trainer_for(folder, callbacks, enable_checkpointing=True, max_epochs=2)
        trainer.fit(module, loader(token_batches(20)), loader(token_batches(2)), ckpt_path=resume)
        return Run(trainer, module, torch.get_rng_state(), callback)

    plain = run(tmp_path / "plain", False)
    tuned = run(tmp_path / "tuned", True)
    assert_identical(plain, tuned)
    saved = tmp_path / "tuned" / "epoch=0.ckpt"
    assert b"autotune" not in saved.read_bytes()
    theirs = run(tmp_path / "theirs", False, tmp_path / "plain" / "epoch=0.ckpt")
    resumed = run(tmp_path / "resumed", True, saved)
    assert len(resumed.events("switched")) >= 5
    assert_identical(theirs, resumed)


def test_user_exception_propagates_and_leaves_nothing_behind(tmp_path: Path) -> None:
    class Fails(Job):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 20:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    module = Fails(TinyGPT(width=16, blocks=4), gpt_loss)
    callback = AutotuneCallback(Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    with pytest.raises(KeyError, match="mine"):
        trainer_for(tmp_path, [callback]).fit(module, loader(token_batches(30)))
    assert callback.tuner is not None
    assert callback.tuner.detached_because == "KeyError ended the training"
    assert_untouched(module)


def test_skipped_batch_changes_nothing(tmp_path: Path) -> None:
    class Skips(Job):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 5 == 1 else super().training_step(batch, batch_idx)

    def job() -> Job:
        return Skips(TinyGPT(width=16, blocks=4, dropout=0.2), gpt_loss)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned `None`.*")
        plain, tuned = train(tmp_path, job, attached=False), train(tmp_path, job, attached=True)
    assert len(tuned.events("switched")) >= 10
    assert_identical(plain, tuned)


@pytest.mark.parametrize("mode", ["rounding", "tolerant", "fast"])
def test_other_modes_are_rejected_with_a_reason(mode: str) -> None:
    said = r"mode is 'fast' .allowed: exact" if mode == "fast" else "Lightning fixes k and the precision when training"
    with pytest.raises(AttachError, match=said) as caught:
        AutotuneCallback(mode=mode)
    assert "\n" not in str(caught.value)


class ByHand(Job):
    def __init__(self) -> None:
        super().__init__(TinyGPT(width=16, blocks=2), gpt_loss)
        self.automatic_optimization = False


class TwoByHand(ByHand):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class Compiled(Job):
    def __init__(self) -> None:
        super().__init__(TinyGPT(width=16, blocks=2), gpt_loss)
        # The state after Trainer.fit(torch.compile(module)).
        self._compiler_ctx = {"compiler": "dynamo"}


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (ByHand, "1 optimizers, and optimizes manually"),
        (TwoByHand, "2 optimizers, and optimizes manually"),
        (Compiled, "compiled as a whole"),
    ],
)
def test_unsupported_trainers_are_rejected_with_a_remedy(job: Any, said: str, tmp_path: Path) -> None:
    module = job()
    trainer = trainer_for(tmp_path, [AutotuneCallback(runs_dir=None)], gradient_clip_val=None)
    with pytest.raises(AttachError, match=said) as caught:
        trainer.fit(module, loader(token_batches(3)))
    assert "\n" not in str(caught.value)
    assert_untouched(module)


def test_invalid_options_stop_training_before_its_first_step(tmp_path: Path) -> None:
    for wrong, said in (({"stage": "go"}, "stage is 'go'"), ({"limits": 5}, "limits is 5"), ({"policy": 7}, "decide")):
        trainer = trainer_for(tmp_path, [AutotuneCallback(runs_dir=None, **wrong)])  # type: ignore[arg-type]
        with pytest.raises(autotune.InputError, match=said):
            trainer.fit(gpt(), loader(token_batches(3)))
        assert trainer.global_step == 0


def test_a_training_replaces_the_tuner_that_another_callback_kept_from_leaving(tmp_path: Path) -> None:
    class Fails(lightning.Callback):
        def on_before_backward(self, *_: Any) -> None:
            raise ValueError("the loop's own")

        on_exception = on_before_backward

    job, callbacks = gpt(), [AutotuneCallback(runs_dir=None) for _ in range(2)]
    with pytest.raises(ValueError, match="the loop's own"):
        trainer_for(tmp_path, [Fails(), callbacks[0]]).fit(job, loader(token_batches(4)))
    assert callbacks[0].tuner.attached
    trainer_for(tmp_path, [callbacks[1]]).fit(job, loader(token_batches(4)))
    assert not callbacks[0].tuner.attached
    assert callbacks[1].tuner.detached_because == "the training ended"
