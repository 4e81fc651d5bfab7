"""Tests of the callback for transformers: training stays bit-identical, and nothing of the callback remains."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import operator
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_live import RESTLESS, Wanders, seeded, shape_of
from test_live_modes import Roams
from torch import nn

from autotune import AttachError, TorchEngine
from autotune.cost_model.memory_model import peak_bytes
from autotune.live.kill_switches import KILL_VARIABLE
from autotune.mechanics.precision import useful_precisions
from autotune.plan import Precision
from autotune.profiling.job_shape import fixed_shape
from autotune.profiling.profiler import ProfilerOptions, profile

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import autotune  # noqa: E402
from autotune.live.integrations.transformers import AutotuneCallback, TunedTrainer  # noqa: E402

BF16_IS_FAST = Precision.BF16 in useful_precisions("cpu")

STEPS = 40


def llama(**changes: Any) -> nn.Module:
    settings: dict[str, Any] = {
        "vocab_size": 17,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "attention_dropout": 0.1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=32,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def texts(count: int = 48) -> list[dict[str, torch.Tensor]]:
    """Return the same texts of 4 to 16 tokens each time."""
    return [
        {"input_ids": torch.randint(1, 17, (4 + i * 7 % 13,), generator=torch.Generator().manual_seed(i))}
        for i in range(count)
    ]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def labelled(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = padded(rows)
    return {**batch, "labels": batch["input_ids"].sum(1) % 3}


@dataclasses.dataclass
class Run:
    """The result of a training."""

    trainer: Any
    generator: torch.Tensor
    callback: AutotuneCallback | None

    def events(self, kind: str) -> list[dict[str, Any]]:
        assert self.callback is not None
        return logged(self.callback, kind)

    def history(self) -> list[dict[str, Any]]:
        timing = ("runtime", "per_second")
        return [
            {key: value for key, value in row.items() if not key.endswith(timing)}
            for row in self.trainer.state.log_history
        ]


def logged(callback: AutotuneCallback, kind: str) -> list[dict[str, Any]]:
    assert callback.tuner is not None
    assert callback.tuner.folder is not None
    rows = (callback.tuner.folder / "decisions.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, rows) if event["event"] == kind]


def trainer_for(
    folder: Path,
    model: nn.Module,
    collate: Any,
    callbacks: list[Any],
    trainer_class: Any = Trainer,
    **arguments: Any,
) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        **arguments,
    }
    return trainer_class(
        model,
        TrainingArguments(**settings),
        train_dataset=texts(),
        eval_dataset=texts(4),
        data_collator=collate,
        callbacks=callbacks,
    )


def train(
    folder: Path,
    model: Callable[[], nn.Module] = llama,
    collate: Any = padded,
    *,
    attached: bool,
    policy: object = None,
    resume: str | None = None,
    attaching: dict[str, Any] | None = None,
    **arguments: Any,
) -> Run:
    seeded()
    folder = folder / ("attached" if attached else "plain")
    callback = None
    if attached:
        options = {"memory_budget_bytes": 10**9, "limits": RESTLESS, "runs_dir": folder, **(attaching or {})}
        callback = AutotuneCallback(policy or Wanders(), **options)
    trainer = trainer_for(folder, model(), collate, [callback] if callback else [], **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return Run(trainer, torch.get_rng_state(), callback)


def assert_identical(one: Run, two: Run) -> None:
    assert one.history() == two.history()
    assert torch.equal(one.generator, two.generator)
    for a, b in zip(one.trainer.model.parameters(), two.trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [run.trainer.optimizer.state_dict()["state"] for run in (one, two)]
    assert states[0].keys() == states[1].keys()
    for key, entry in states[0].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][key][name]))
    schedules = [run.trainer.lr_scheduler.state_dict() for run in (one, two)]
    assert schedules[0] == schedules[1]


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    ("model", "collate"), [pytest.param(llama, padded, id="llama"), pytest.param(bert, labelled, id="bert")]
)
def test_training_with_the_callback_is_bit_identical(
    model: Any, collate: Any, k: int, bf16: bool, tmp_path: Path
) -> None:
    options = {"gradient_accumulation_steps": k, "bf16": bf16, "max_steps": STEPS // k + 15}
    plain = train(tmp_path, model, collate, attached=False, **options)
    tuned = train(tmp_path, model, collate, attached=True, **options)
    assert len(tuned.events("switched")) >= 15
    assert tuned.callback is not None
    assert tuned.callback.tuner is not None
    assert tuned.callback.tuner.detached_because == "the training ended"
    assert tuned.trainer.state.global_step == len(tuned.history()) - 1 == STEPS // k + 15
    assert_identical(plain, tuned)
    assert shape_of(tuned.trainer.model) == shape_of(plain.trainer.model)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="every", marks=pytest.mark.slow),
        pytest.param({"every_n_layers": 2}, id="every second", marks=pytest.mark.slow),
        pytest.param({"use_reentrant": True}, id="reentrant", marks=pytest.mark.slow),
    ],
)
def test_recomputation_of_a_trainer_is_taken_over_and_given_back(
    how: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The argument's name before version 6 of transformers; it is activation_checkpointing from then on.
    options: dict[str, Any] = {"gradient_checkpointing": True, "max_steps": 20}
    if how:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False, **how}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = train(tmp_path, attached=False, **options)
        with caplog.at_level("INFO", logger="autotune"):
            tuned = train(tmp_path, attached=True, **options)
    assert "gradient_checkpointing recomputes none of its" in caplog.text
    assert len(tuned.events("switched")) >= 8
    assert tuned.callback is not None
    assert tuned.callback.tuner is not None
    assert not [name for name in tuned.callback.tuner.locks if "layers" in name]
    assert_identical(plain, tuned)
    layers = [run.trainer.model.model.layers for run in (plain, tuned)]
    recomputed = [[part.gradient_checkpointing for part in found] for found in layers]
    assert recomputed[0] == recomputed[1]
    functions = [[part._gradient_checkpointing_func.func for part in found] for found in layers]
    assert functions[0] == functions[1]


SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHead": {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32},
    "GPTNeoXForCausalLM": {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    },
    "OPTForCausalLM": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 24}
    | {"word_embed_proj_dim": 16, "max_position_embeddings": 32},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    | {"decoder_start_token_id": 0, "pad_token_id": 0},
    "BartForConditionalGeneration": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
    | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_decoders_that_cache_by_default_are_switched_and_stay_bit_identical(
    name: str, recomputed: bool, tmp_path: Path
) -> None:
    kind = getattr(transformers, name.replace("Head", "HeadModel"))
    config = kind.config_class(vocab_size=17, **SIZES[name])
    assert config.use_cache
    options: dict[str, Any] = {"max_steps": 16}
    if recomputed:
        options["gradient_checkpointing"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The first T5 in a process differs from later ones by rounding, attached or not.
        train(tmp_path, lambda: kind(config), attached=False, **{**options, "max_steps": 2})
        plain = train(tmp_path, lambda: kind(config), attached=False, **options)
        tuned = train(tmp_path, lambda: kind(config), attached=True, **options)
    stored = [event["plan"]["storage"] for event in tuned.events("switched")]
    assert len(stored) >= 4
    # No recomputable unit is locked because of its cache.
    assert all({plan[unit] for plan in stored} == {"save", "recompute"} for unit in stored[0])
    assert len(stored[0]) >= 3
    assert_identical(plain, tuned)


def test_tuner_that_detaches_itself_returns_recomputation_to_the_trainer(tmp_path: Path) -> None:
    flags: dict[int, bool] = {}
    tuned = AutotuneCallback(Wanders(), limits=RESTLESS, runs_dir=None)

    class Leaves(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 4:
                assert tuned.tuner is not None
                tuned.tuner.detach("a trip, say")

    model: Any = llama()

    def note(*_: object) -> None:
        flags[trainer.state.global_step] = model.model.layers[0]._gradient_checkpointing_func is not operator.call

    model.model.embed_tokens.register_forward_hook(note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_for(tmp_path, model, padded, [tuned, Leaves()], max_steps=6, gradient_checkpointing=True)
        trainer.train()
    assert flags == {0: False, 1: False, 2: False, 3: False, 4: True, 5: True}


class CallsParts(Trainer):
    """A Trainer whose loss calls parts of the model, as hand-written losses by chunks do; it notes who recomputes."""

    recomputes: ClassVar[list[bool]] = []

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
        self.recomputes.append(model.model.layers[0]._gradient_checkpointing_func is not operator.call)
        return nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), inputs["labels"].flatten().clamp(0))


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["parts", "compiled", "one layer"])
def test_a_trainer_recomputes_by_itself_where_the_tuner_does_not(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = llama(num_hidden_layers=1) if kind == "one layer" else llama()
    callback = AutotuneCallback("exact", memory_budget_bytes=1, limits=RESTLESS, runs_dir=None)
    seen: list[bool] = []
    model.model.embed_tokens.register_forward_hook(
        lambda *_: seen.append(model.model.layers[0]._gradient_checkpointing_func is not operator.call)
    )
    trained: Any = torch.compile(model, backend="eager") if kind == "compiled" else model
    options = {"max_steps": 4, "gradient_checkpointing": True, "remove_unused_columns": False}
    loss = CallsParts if kind == "parts" else Trainer
    with warnings.catch_warnings(), caplog.at_level("WARNING", logger="autotune"):
        warnings.simplefilter("ignore")
        trainer_for(tmp_path, trained, padded, [callback], trainer_class=loss, **options).train()
    assert seen
    assert all(seen)
    assert callback.tuner is not None
    if kind == "parts":
        assert callback.tuner.detached_because == "a step did not call the model itself: its loss may call parts of it"
        assert "no memory budget is kept" in caplog.text


def test_wrong_tuning_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match=r"tuning is of type int .allowed: a dict"):
        trainer_for(tmp_path, llama(), padded, [], trainer_class=functools.partial(TunedTrainer, tuning=3))


def test_a_tuned_trainer_is_profiled_between_frequent_evaluations(tmp_path: Path) -> None:
    """A step after an evaluation once began in evaluation mode: no two steps in a row seemed to be of a kind."""
    tuning = {"memory_budget_bytes": 10**12, "limits": RESTLESS, "runs_dir": tmp_path}
    made = functools.partial(TunedTrainer, tuning=tuning)
    options: dict[str, Any] = {"max_steps": 14, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_for(tmp_path, llama(), padded, [], trainer_class=made, **options)
    trainer.train()
    assert trainer.tuner.folder is not None
    log = (trainer.tuner.folder / "decisions.jsonl").read_text()
    assert '"event":"profiled"' in log.replace(" ", "")


def test_a_training_of_no_steps_is_not_attached_to(tmp_path: Path) -> None:
    callback = AutotuneCallback("exact", runs_dir=None)
    trainer = trainer_for(tmp_path, llama(), padded, [callback], num_train_epochs=0, max_steps=-1)
    assert trainer.train().global_step == 0
    assert callback.tuner is None


@pytest.mark.slow
def test_last_step_of_an_epoch_with_fewer_micro_batches_is_bit_identical(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 6}
    plain = train(tmp_path, attached=False, **options)
    tuned = train(tmp_path, attached=True, **options)
    assert len(tuned.events("switched")) >= 5
    assert_identical(plain, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ppo", "exact"])
def test_every_named_policy_follows_a_budget_and_stays_bit_identical(policy: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_steps": 20}
    plain = train(tmp_path, attached=False, **options)
    tuned = train(tmp_path, attached=True, policy=policy, attaching={"memory_budget_bytes": 1000}, **options)
    decisions = tuned.events("decision")
    assert decisions
    (end,) = tuned.events("detached")
    assert "recompute" in json.dumps(end["plan"])
    assert not tuned.events("tripped")
    assert_identical(plain, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stored", ["save", "recompute"])
def test_peak_is_predicted_with_accumulated_gradients(stored: str, k: int, tmp_path: Path) -> None:
    rows = texts()
    same = [{"input_ids": rows[0]["input_ids"].repeat(3)} for _ in rows]

    class Watches(TrainerCallback):
        def __init__(self) -> None:
            self.status: dict[str, Any] = {}

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.status = dict(callback.tuner.status)

    budget = 10**9 if stored == "save" else 1000
    callback = AutotuneCallback("exact", memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None)
    watch = Watches()
    trainer = trainer_for(tmp_path, llama(), padded, [callback, watch], gradient_accumulation_steps=k)
    trainer.train_dataset = same
    trainer.train()
    assert all(stored == str(choice) for choice in watch.status["plan"].storage.values())
    ratio = watch.status["predicted_peak_bytes"] / watch.status["measured_peak_bytes"]
    assert 0.97 <= ratio <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
# The argument's name before version 6 of transformers.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_evaluating_and_saving_during_training_stay_bit_identical(recomputed: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_checkpointing": True} if recomputed else {}
    options |= {"eval_strategy": "steps", "eval_steps": 7, "save_strategy": "steps", "save_steps": 14}
    plain = train(tmp_path, attached=False, **options)
    tuned = train(tmp_path, attached=True, **options)
    assert len(tuned.events("switched")) >= 15
    assert_identical(plain, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_resumed_training_is_bit_identical_and_its_checkpoint_loads_without_this_package(
    recomputed: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"gradient_checkpointing": True} if recomputed else {}
    options |= {"save_strategy": "steps", "save_steps": 16}
    plain = train(tmp_path, attached=False, **options)
    train(tmp_path, attached=True, **options)
    checkpoint = tmp_path / "attached" / "out" / "checkpoint-16"
    resumed = train(tmp_path / "again", attached=True, resume=str(checkpoint), **options)
    assert len(resumed.events("switched")) >= 8
    for a, b in zip(plain.trainer.model.parameters(), resumed.trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert plain.history()[:-1] == resumed.history()[:-1]
    code = (
        "import sys; sys.modules['autotune'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"print(type(AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})).__name__)"
    )
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "LlamaForCausalLM"


@pytest.mark.slow
def test_model_copied_or_pickled_during_training_is_plain(tmp_path: Path) -> None:
    made: list[nn.Module] = []

    class Copies(TrainerCallback):
        def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            made.append(copy.deepcopy(model))
            assert b"autotune" not in pickle.dumps(model)
            made.append(pickle.loads(pickle.dumps(model)))

    callback = AutotuneCallback(Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    trainer_for(tmp_path, llama(), padded, [callback, Copies()], max_steps=16).train()
    assert len(made) == 32
    for model in made:
        # A copied unit may have its own plain forward on the instance.
        assert not any("autotune" in type(part.__dict__.get("forward")).__module__ for part in model.modules())
        assert model(**padded(texts(2))).loss.isfinite()


@pytest.mark.slow
def test_user_exception_propagates_and_a_second_training_starts_fresh(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def __init__(self) -> None:
            self.left = 1

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 20 and self.left:
                self.left -= 1
                raise KeyError("mine")

    model = llama()
    # The function that gradient_checkpointing_enable() calls, without the hook that it adds.
    model._set_gradient_checkpointing()  # type: ignore[operator]
    recompute = model.model.layers[0]._gradient_checkpointing_func  # type: ignore[union-attr, index]
    callback = AutotuneCallback(Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=tmp_path)
    trainer = trainer_for(tmp_path, model, padded, [callback, Fails()], gradient_accumulation_steps=2)
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    first = callback.tuner
    assert first is not None
    assert first.detached_because == "the training ended with KeyError"
    trainer.train()
    assert all(part._gradient_checkpointing_func is recompute for part in model.model.layers)  # type: ignore[union-attr]
    assert len(logged(callback, "switched")) >= 15
    assert_untouched(model)


def assert_untouched(model: nn.Module) -> None:
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Raises(TrainerCallback):
    """A callback that raises an error at one event of one step, once."""

    def __init__(self, event: str, step: int, error: BaseException) -> None:
        self.step, self.left = step, [error]
        setattr(self, event, self._raise)

    def _raise(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self.step and self.left:
            raise self.left.pop()


class BadRows(list[Any]):
    """Rows of which one cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 11:
            raise KeyError("mine")
        return super().__getitem__(index)


def tuned_by(**options: Any) -> AutotuneCallback:
    return AutotuneCallback("exact", memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None, **options)


@pytest.mark.parametrize("place", ["rows", "on_step_end", "on_log"])
def test_an_exception_outside_of_a_step_leaves_nothing_attached(place: str, tmp_path: Path) -> None:
    model, callback = llama(), tuned_by()
    raises = [] if place == "rows" else [Raises(place, 3, KeyboardInterrupt("mine"))]
    trainer = trainer_for(tmp_path, model, padded, [callback, *raises], max_steps=24)
    if place == "rows":
        trainer.train_dataset = BadRows(texts())
    own = set(vars(trainer))
    with pytest.raises((KeyError, KeyboardInterrupt), match="mine"):
        trainer.train()
    assert callback.tuner is not None
    assert str(callback.tuner.detached_because).startswith("the training ended with Key")
    assert not {"_run_epoch", "training_step"} & set(vars(trainer)) - own
    assert_untouched(model)


@pytest.mark.parametrize("trained_by", ["callback", "TunedTrainer"])
def test_a_training_replaces_the_tuner_of_one_that_an_exception_ended_outside_of_epochs(
    trained_by: str, tmp_path: Path
) -> None:
    model, left = llama(), tuned_by()
    raises = Raises("on_epoch_begin", 0, KeyError("mine"))
    trainer = trainer_for(tmp_path, model, padded, [left, raises], max_steps=3)
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    assert left.tuner is not None
    assert left.tuner.attached
    if trained_by == "callback":
        trainer_for(tmp_path, model, padded, [tuned_by()], max_steps=3).train()
    else:
        made = functools.partial(TunedTrainer, tuning={"runs_dir": None})
        trainer_for(tmp_path, model, padded, [], trainer_class=made, max_steps=3).train()
    assert left.tuner.detached_because == "an exception ended the training"
    assert_untouched(model)


def test_a_training_within_another_one_leaves_the_other_attached(tmp_path: Path) -> None:
    outer = tuned_by()
    found: list[bool] = []

    class Trains(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert outer.tuner is not None
            if not found:
                trainer_for(tmp_path, llama(), padded, [tuned_by()], max_steps=2).train()
                found.append(outer.tuner.attached)

    trainer_for(tmp_path, llama(), padded, [outer, Trains()], max_steps=3).train()
    assert found == [True]
    assert outer.tuner is not None
    assert outer.tuner.detached_because == "the training ended"


@pytest.mark.slow
def test_exception_in_forward_propagates(tmp_path: Path) -> None:
    class Broken(LlamaForCausalLM):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            Broken.calls += 1
            if Broken.calls == 12:
                raise RuntimeError("mine")
            return super().forward(*args, **kwargs)

    model = Broken(llama().config)
    callback = AutotuneCallback(Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    trainer = trainer_for(tmp_path, model, padded, [callback], remove_unused_columns=False)
    with pytest.raises(RuntimeError, match=r"^mine$"):
        trainer.train()
    assert callback.tuner is not None
    assert callback.tuner.detached_because == "the training ended with RuntimeError"
    assert_untouched(model)


def test_an_exception_in_a_traced_step_leaves_no_trace_open(tmp_path: Path) -> None:
    model = llama()
    callback = AutotuneCallback("exact", memory_budget_bytes=1, limits=RESTLESS, runs_dir=None)
    trainer = trainer_for(tmp_path, model, padded, [callback])
    own = trainer.compute_loss

    def fails(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        if torch._C._autograd._profiler_enabled():
            raise KeyError("mine")
        return found

    trainer.compute_loss = fails
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    assert callback.tuner is not None
    assert not callback.tuner.attached
    assert not torch._C._autograd._profiler_enabled()
    assert "training_step" not in vars(trainer)
    assert_untouched(model)


class Twice(Trainer):
    """A Trainer whose loss calls the model twice for each batch, as R-Drop does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        one, two = model(**inputs), model(**inputs)
        loss = one.loss + two.loss + (one.logits - two.logits).square().mean()
        return (loss, one) if return_outputs else loss


class TwiceInPieces(Twice, TunedTrainer):
    """The same, cutting its batches."""


class BackwardBetween(Trainer):
    """A Trainer that goes backward between two calls of the model for one batch."""

    def training_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        model.train()
        losses = []
        for _ in range(2):
            loss = model(**inputs).loss / 2
            self.accelerator.backward(loss)
            losses.append(loss.detach())
        return sum(losses)


def trained_by(kind: type[Trainer], folder: Path, callbacks: list[Any], **options: Any) -> Any:
    seeded()
    plain = trainer_for(folder, llama(), padded, callbacks, max_steps=24)
    trainer = kind(
        plain.model, plain.args, train_dataset=texts(), data_collator=padded, callbacks=callbacks or None, **options
    )
    trainer.train()
    return trainer


@pytest.mark.slow
def test_loss_that_calls_the_model_twice_is_switched_and_stays_bit_identical(tmp_path: Path) -> None:
    callback = AutotuneCallback(Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    runs = [trained_by(Twice, tmp_path, callbacks) for callbacks in ([], [callback])]
    for one, two in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(one, two)
    assert callback.tuner is not None
    assert callback.tuner.detached_because == "the training ended"
    assert callback.tuner.status["switches"] > 2
    assert not any("layers" in name or name == "profile" for name in callback.tuner.locks)


@pytest.mark.slow
def test_a_tuned_trainer_profiles_a_loss_that_calls_the_model_twice(tmp_path: Path) -> None:
    tuning = {"memory_budget_bytes": 10**9, "limits": RESTLESS, "runs_dir": None, "mode": "rounding"}
    trainer = trained_by(TwiceInPieces, tmp_path, [], tuning=tuning)
    assert trainer.tuner.detached_because == "the training ended"
    assert "profile" not in trainer.tuner.locks
    assert trainer.tuner.status["decided"] is not None
    assert trainer._tuning.passes._handles == []


@pytest.mark.slow
def test_backward_passes_between_calls_for_one_batch_detach_and_stay_bit_identical(tmp_path: Path) -> None:
    callback = AutotuneCallback(Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
    runs = [trained_by(BackwardBetween, tmp_path, callbacks) for callbacks in ([], [callback])]
    for one, two in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(one, two)
    assert callback.tuner is not None
    assert "called again after a backward pass" in str(callback.tuner.detached_because)


@pytest.mark.slow
def test_kill_switch_variable_leaves_training_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(tmp_path, attached=False)
    monkeypatch.setenv(KILL_VARIABLE, "1")
    tuned = train(tmp_path, attached=True)
    assert tuned.callback is not None
    assert tuned.callback.tuner is not None
    assert tuned.callback.tuner.folder is None
    assert_identical(plain, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    ("model", "collate"), [pytest.param(llama, padded, id="llama"), pytest.param(bert, labelled, id="bert")]
)
def test_callback_in_tolerant_mode_lowers_the_precision(model: Any, collate: Any, k: int, tmp_path: Path) -> None:
    if not BF16_IS_FAST:
        pytest.skip("no 16-bit precision is fast here")
    options = {"gradient_accumulation_steps": k}
    plain = train(tmp_path, model, collate, attached=False, **options)
    tuned = train(tmp_path, model, collate, attached=True, policy=Roams(), attaching={"mode": "tolerant"}, **options)
    plans = [event["plan"] for event in tuned.events("switched")]
    precisions = {precision for plan in plans for precision in plan["precision"].values()}
    assert "bf16" in precisions
    assert len({tuple(plan["storage"].values()) for plan in plans}) > 1
    assert {plan["accumulation_steps"] for plan in plans} == {k}
    assert not tuned.events("tripped")
    # Dropout draws the same masks, and losses differ only by rounding.
    assert torch.equal(plain.generator, tuned.generator)
    losses = [[row["loss"] for row in run.history() if "loss" in row] for run in (plain, tuned)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.slow
def test_precision_stays_if_the_model_computes_no_loss(tmp_path: Path) -> None:
    class Outside(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    if not BF16_IS_FAST:
        pytest.skip("no 16-bit precision is fast here")
    options = {"memory_budget_bytes": 10**9, "limits": RESTLESS, "runs_dir": tmp_path}
    callback = AutotuneCallback(Roams(), mode="tolerant", **options)
    plain = trainer_for(tmp_path, llama(), padded, [callback])
    Outside(plain.model, plain.args, train_dataset=texts(), data_collator=padded, callbacks=[callback]).train()
    assert callback.tuner is not None
    assert "no loss of its own" in callback.tuner.locks["bf16"]
    assert logged(callback, "switched")


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("rounding", "mode is 'rounding', but the Trainer fixes k when training begins"),
        ("fast", r"mode is 'fast' .allowed: exact, tolerant"),
        (None, r"mode is None .allowed: exact, tolerant"),
    ],
)
def test_other_modes_are_rejected_with_a_reason(mode: Any, said: str) -> None:
    with pytest.raises(AttachError, match=said) as caught:
        AutotuneCallback(mode=mode)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch_compile": True}, "torch_compile is set"),
        ({"deepspeed": "zero.json"}, "sharded by DeepSpeed"),
        ({"fsdp": "full_shard"}, "sharded by DeepSpeed, FSDP"),
        ({"_n_gpu": 2}, "2 devices by DataParallel"),
    ],
)
def test_unsupported_trainers_are_rejected_with_a_remedy(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert arguments.n_gpu <= 1
    # The callback is called directly, because the Trainer would really shard or compile.
    for name, value in changed.items():
        object.__setattr__(arguments, name, value)
    model = llama()
    before = shape_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = transformers.TrainerState(max_steps=5)
    with pytest.raises(AttachError, match=said) as caught:
        AutotuneCallback(runs_dir=None).on_train_begin(
            arguments, state, transformers.TrainerControl(), model=model, optimizer=optimizer
        )
    assert "\n" not in str(caught.value)
    assert shape_of(model) == before


@pytest.mark.slow
def test_invalid_options_stop_training_before_its_first_step(tmp_path: Path) -> None:
    for wrong, said in (({"stage": "go"}, "stage is 'go'"), ({"limits": 5}, "limits is 5"), ({"policy": 7}, "decide")):
        trainer = trainer_for(tmp_path, llama(), padded, [AutotuneCallback(runs_dir=None, **wrong)])  # type: ignore[arg-type]
        with pytest.raises(autotune.InputError, match=said):
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.mark.parametrize("prefix", [pytest.param(False, marks=pytest.mark.slow), True])
# Version 6 names the argument `cache`; earlier versions only know this name.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_empty_or_prefilled_cache_does_not_prevent_recomputation(prefix: bool) -> None:
    def run(attached: bool) -> tuple[list[float], dict[str, str]]:
        seeded()
        model = llama(use_cache=True).train()
        if prefix:
            forward = model.forward

            def prefixed(**batch: Any) -> Any:
                size = len(batch["input_ids"])
                first = torch.ones(size, 2, dtype=torch.long)
                with torch.no_grad():
                    cache = model.model(input_ids=first, use_cache=True).past_key_values
                mask = torch.cat([torch.ones_like(first), batch["attention_mask"]], dim=1)
                return forward(**{**batch, "attention_mask": mask}, past_key_values=cache)

            model.forward = prefixed  # type: ignore[method-assign]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        tuner = (
            autotune.attach(model, optimizer, Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=None)
            if attached
            else None
        )
        losses = []
        for start in range(0, 80, 2):
            batch = padded(texts()[start % 40 : start % 40 + 2])
            if tuner is None:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                for micro in tuner.micro_batches(batch):
                    loss = model(**micro).loss
                    tuner.backward(loss)
                tuner.step()
            losses.append(float(loss.detach()))
        if tuner is None:
            return losses, {}
        assert tuner.status["switches"] > 0
        return losses, tuner.locks

    plain, (tuned, locks) = run(False)[0], run(True)
    assert plain == tuned
    names = [f"model.layers.{i}" for i in range(3)]
    # On recomputation, each layer gets a copy of the cache as it was.
    assert not set(names) & set(locks)


class Logbook:
    """An object that a layer writes to."""

    def __init__(self) -> None:
        self.lines: list[float] = []
        self.source = (line for line in self.lines)


class Writes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, book: Logbook) -> torch.Tensor:
        book.lines.append(0.0)
        return x + self.inner(x)


class Writers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Writes() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        book = Logbook()
        for block in self.blocks:
            x = block(x, book)
        return x


def test_unit_that_recomputation_might_change_twice_is_reported_and_not_recomputed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = autotune.Job(
        name="writers",
        model=Writers,
        batches=lambda seed: iter([torch.ones(4, 8)] * 100),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        evaluate=lambda model: 1.0,
        target=0.1,
        batch_size=4,
    )
    engine = TorchEngine(job)
    assert engine.space.recomputable == ()
    assert engine.locks["storage"] == (
        "blocks.0 receives a generator, and so do 1 others, which cannot be copied: recomputation might change it twice"
    )
    assert "receives a generator" in caplog.text


def test_memory_is_predicted_to_the_byte_although_a_cache_is_passed_on() -> None:
    def batches(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        while True:
            tokens = torch.randint(0, 17, (8, 16), generator=generator)
            yield {"input_ids": tokens, "labels": tokens}

    job = autotune.Job(
        name="cached",
        model=lambda: llama(use_cache=True),
        batches=batches,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        evaluate=lambda model: 1.0,
        target=0.1,
        batch_size=8,
    )
    found = profile(job, device_name="here", options=ProfilerOptions.lean())
    engine = TorchEngine(fixed_shape(job))
    engine.run(1)
    names = found.space.recomputable
    assert len(names) == 3
    losses = set()
    for precision in found.space.precisions[:2]:
        for chosen in ([], names[:1], names[1:], names):
            plan = found.space.plan(accumulation_steps=1, precision=precision, recomputed=chosen)
            engine.apply(plan)
            snapshot = engine.snapshot()
            window = engine.run(1)
            engine.restore(snapshot)
            losses.add((precision, window.loss))
            assert window.peak_bytes is not None
            assert window.peak_bytes <= peak_bytes(found, plan) <= 1.04 * window.peak_bytes
    assert len(losses) == 2


def tuned_trainer(folder: Path, model: nn.Module, collate: Any, tuning: dict[str, Any] | None, **changes: Any) -> Any:
    """Return a Trainer, or a TunedTrainer; without dropout, because splitting changes its masks."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    settings = {"per_device_train_batch_size": 8, "max_steps": 18, "learning_rate": 1e-3, **changes}
    trainer = trainer_for(folder, model, collate, [], **settings)
    if tuning is None:
        return trainer
    return TunedTrainer(
        model,
        trainer.args,
        train_dataset=trainer.train_dataset,
        data_collator=collate,
        tuning={"memory_budget_bytes": 10**9, "limits": RESTLESS, "runs_dir": folder, **tuning},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "collate"), [pytest.param(llama, padded, id="llama"), pytest.param(bert, labelled, id="bert")]
)
def test_trainer_that_splits_its_batches_learns_the_same_up_to_rounding(
    model: Any, collate: Any, tmp_path: Path
) -> None:
    trainers = []
    for tuning in (None, {"policy": Roams(), "mode": "rounding"}):
        seeded()
        trainers.append(tuned_trainer(tmp_path, model(), collate, tuning))
        trainers[-1].train()
    plain, tuned = trainers
    (folder,) = tmp_path.glob("*-attach-*")
    events = [json.loads(row) for row in (folder / "decisions.jsonl").read_text().splitlines()]
    assert {e["plan"]["accumulation_steps"] for e in events if e["event"] == "switched"} == {1, 2, 4, 8}
    assert plain.state.global_step == tuned.state.global_step == 18
    for one, two in zip(plain.state.log_history[:-1], tuned.state.log_history[:-1], strict=True):
        assert one["learning_rate"] == two["learning_rate"]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)
    for a, b in zip(plain.model.parameters(), tuned.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
    assert tuned.tuner.detached_because == "the training ended"


def test_trainer_with_its_own_accumulation_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    trainer = tuned_trainer(tmp_path, llama(), padded, {"mode": "rounding"}, gradient_accumulation_steps=2)
    with pytest.raises(AttachError, match="gradient_accumulation_steps is 2"):
        trainer.train()
