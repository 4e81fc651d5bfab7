"""Tests of the settings of attached runs: checked on construction, and rejected in the wrong place."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar

import pytest
import torch
from test_live import RESTLESS, Wanders, deep_gpt, gpt_loss, token_batches, train

import autotune
from autotune import AttachError, Settings
from autotune.live.integrations.attaching_callback import Attaches

NAMES = [item.name for item in dataclasses.fields(Settings)]


class OfAFramework(Attaches):
    """An attachment as the callbacks make it, without a framework."""

    framework = "no framework"

    def begin(self) -> Any:
        model = deep_gpt()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return self._attach(model, optimizer, total_steps=3, accumulation_steps=1, is_first=True)


class ThatTunesK(OfAFramework):
    """A framework that leaves k to the tuner."""

    modes: ClassVar = ("rounding",)
    tunes_k = True


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"units": "blocks"}, r"units is 'blocks' \(allowed: names of modules, or None\)"),
        ({"units": [1]}, r"units is \[1\]"),
        ({"batching": "big"}, r"batching is 'big' \(allowed: fixed, adaptive\)"),
        ({"batching": []}, r"batching is \[\]"),
        ({"lr_rule": "cubic"}, r"lr_rule is 'cubic' \(allowed: linear, sqrt, none\)"),
        ({"lr_rule": "linear"}, r"lr_rule is 'linear' \(allowed: none, but for adaptive batching\)"),
        ({"name": 5}, "name is 5"),
        ({"report_to": []}, r"report_to is \[\] \(allowed: mlflow, tensorboard, wandb, none\)"),
        *(
            ({"accumulation_choices": choices}, r"accumulation_choices is .*allowed: whole numbers >= 1, ascending")
            for choices in ((), (2, 1), (0, 1), (1, 1), (1.5,), "2", 2)
        ),
    ],
)
def test_invalid_setting_is_rejected_in_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(AttachError, match=f"settings: {said}") as caught:
        Settings(**wrong)
    assert "\n" not in str(caught.value)


def test_settings_are_frozen_and_each_is_documented() -> None:
    units = ["blocks.0"]
    settings = Settings(units=units)
    units.append("blocks.1")
    assert settings.units == ("blocks.0",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.report_to = "mlflow"  # type: ignore[misc]
    for name in NAMES:
        assert f"        {name}: " in (Settings.__doc__ or "")


@pytest.mark.parametrize("name", NAMES)
def test_setting_passed_as_a_keyword_argument_is_rejected_with_its_place(name: str) -> None:
    model = deep_gpt()
    said = rf"attach: {name} is a setting \(allowed: settings=Settings\({name}=...\)\)"
    with pytest.raises(AttachError, match=said):
        autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), **{name: None})
    with pytest.raises(AttachError, match=said):
        OfAFramework(**{name: None})


def test_other_unexpected_arguments_raise_the_usual_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'unit'"):
        autotune.attach(unit=["a"])  # type: ignore[call-arg]
    shown = inspect.signature(autotune.attach).parameters
    assert "settings" in shown
    assert not {*NAMES, "kwargs"} & set(shown)


def test_only_the_named_units_are_tuned_and_the_model_gets_the_given_name() -> None:
    settings = Settings(units=["blocks.1", "blocks.2"], name="mine")
    limits = {"memory_budget_bytes": 10**9, "limits": RESTLESS}
    tuned = train(deep_gpt, token_batches, gpt_loss, 20, policy=Wanders(), settings=settings, **limits)
    (first,) = (event for event in tuned.events if event["event"] == "attached")  # type: ignore[attr-defined]
    assert (first["model"], first["units"]) == ("mine", ["blocks.1", "blocks.2"])


def test_framework_accepts_settings_and_rejects_those_that_it_fixes() -> None:
    tuner = OfAFramework("exact", runs_dir=None, settings=Settings(units=["blocks.1"])).begin()
    assert list(tuner._facts.space.recomputable) == ["blocks.1"]
    tuner.detach()
    for choices in ((1,), (1, 2, 4)):
        free = ThatTunesK(mode="rounding", runs_dir=None, settings=Settings(accumulation_choices=choices)).begin()
        assert free._facts.space.accumulation_choices == choices
        free.detach()
    with pytest.raises(AttachError, match=r"accumulation_choices is \(2, 4\), but no framework fixes k"):
        OfAFramework(settings=Settings(accumulation_choices=(2, 4)))
    with pytest.raises(AttachError, match="batching is adaptive, but no framework fixes what a step consumes"):
        ThatTunesK(mode="rounding", settings=Settings(batching="adaptive"))
    with pytest.raises(AttachError, match="settings is 5"):
        OfAFramework(settings=5)  # type: ignore[arg-type]
