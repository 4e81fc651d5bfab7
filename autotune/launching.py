"""Launch choices of a run: another optimizer, compiled units, how fp32 is computed, free knobs.

They cannot change while a run trains, so no policy decides them. They are appended to the name of a job or an arm, and
every plan found with them records them in ``launch``::

    charlm+lion            the job with another optimizer, its learning rate by rule of thumb
    charlm+lion=3e-4       the same with an explicit learning rate
    exact+compile          an arm of a comparison: the exact plan for the job with compiled units
    baseline+tf32          fp32 matrix products and convolutions in TF32; +fp32 for true fp32
    charlm+fused+threads=2 free knobs, see autotune.knobs
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from autotune import knobs, optimizers
from autotune.errors import InputError
from autotune.job import Job
from autotune.plan import FP32_CHOICES, Launch

if TYPE_CHECKING:
    import torch
    from torch import nn

COMPILE = "compile"
_VERSIONS = 256
_CHOICE = re.compile(r"[A-Za-z]\w*(=[^+/\\]*)?")


def plain(name: str) -> str:
    """Return a name without the choices that follow it; the choices are not checked."""
    parts = name.split("+")
    behind = sum(1 for _ in takewhile(_CHOICE.fullmatch, reversed(parts[1:])))
    return "+".join(parts[: len(parts) - behind]) or name


def split(name: str, *, where: str) -> tuple[str, Launch]:
    """Split a name from the launch choices that follow it.

    Args:
        name: a job's reference or an arm's name.
        where: the option or argument with the name, for errors.

    Raises:
        InputError: if a choice is unknown or repeated, or a learning rate is not a number above 0.
    """
    found = plain(name)
    if found == name or _is_there(name):
        return name, Launch()
    launch = Launch()
    for choice in name[len(found) + 1 :].split("+"):
        launch = _chosen(launch, choice, where)
    return found, launch


def suffix(launch: Launch) -> str:
    """Format choices as the suffix of a name; the inverse of :func:`split`."""
    rate = "" if launch.learning_rate is None else f"={launch.learning_rate}"
    optimizer = "" if launch.optimizer is None else f"+{launch.optimizer}{rate}"
    choices = [COMPILE if launch.compile else None, launch.fp32, launch.knobs]
    return optimizer + "".join(f"+{choice}" for choice in choices if choice)


def canonical(name: str, *, where: str) -> str:
    """Return a name with its choices in the form of :func:`suffix`.

    Raises:
        InputError: as :func:`split` does.
    """
    plain, launch = split(name, where=where)
    return plain + suffix(launch)


def relaunched(reference: str, launch: Launch) -> str:
    """Return the reference of a job with launch choices instead of its own."""
    return split(reference, where="job")[0] + suffix(launch)


def launched(job: Job, launch: Launch) -> Job:
    """Return a job with launch choices instead of its own, and with their suffix in its name.

    Raises:
        InputError: if the optimizer is unknown or its library is missing, or a knob cannot be used with the job.
    """
    if not suffix(launch):
        return job
    own, model, name = job.optimizer, job.model, launch.optimizer
    changed = replace(job, name=job.name + suffix(launch), launch=launch)
    if name is not None:
        if job.scheduler is not None:
            raise InputError(
                f"+{name} cannot be combined with a scheduler, which sets the rates of the job's own optimizer",
                where=f"job {job.name!r}",
                allowed="schedule=WarmupCosine(...) in place of the scheduler",
            )
        optimizers.require(name, where=f"job {job.name!r}")

        def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return optimizers.converted(own(parameters), name, launch.learning_rate)

        changed = replace(changed, optimizer=optimizer)
    if launch.compile:
        changed = replace(changed, model=lambda: compiled(model(), job))
    return knobs.turned(changed, launch.knobs) if launch.knobs else changed


def with_knobs(job: Job, text: str, *, where: str) -> Job:
    """Return a job with knobs in addition to its own launch choices, and with their suffix in its name.

    Args:
        job: the job, with or without launch choices.
        text: free knobs and a choice of fp32, as in ``tf32+fused``.
        where: the option or argument with the text, for errors.

    Raises:
        InputError: if a choice is unknown, contradicts those of the job, or cannot be used with it.
    """
    launch = job.launch
    added = [choice for choice in text.split("+") if choice not in FP32_CHOICES]
    for choice in text.split("+"):
        launch = _chosen(launch, choice, where)
    if replace(launch, knobs=None, fp32=None) != replace(job.launch, knobs=None, fp32=None):
        raise InputError(f"{text:.80} is not a free knob", where=where, allowed=[*FP32_CHOICES, *knobs.KNOBS])
    name = job.name.removesuffix(suffix(job.launch)) + suffix(launch)
    changed = replace(job, name=name, launch=launch)
    return knobs.turned(changed, "+".join(added)) if added else changed


def compiled(model: nn.Module, job: Job) -> nn.Module:
    """Compile the forward pass of each unit of a model, in place, and return the model.

    The code around a unit is not compiled, so that the unit's precision and storage can still be switched.
    """
    import torch

    from autotune.compiled import CompiledForward
    from autotune.units import units_of

    # Otherwise torch would reuse another model's compiled code, and this run would not include its own compile time.
    torch._dynamo.reset()
    for unit in units_of(model, job.units):
        module = model.get_submodule(unit.name)
        module.forward = CompiledForward(module)
    # Units of one class share their compiled versions, one for each shape, dtype and k.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VERSIONS)
    return model


def _is_there(name: str) -> bool:
    """Return whether the whole name is the path of an existing file or folder, such as a policy's."""
    try:
        return os.sep in name and Path(name).exists()
    except (OSError, ValueError):
        return False


def _chosen(launch: Launch, choice: str, where: str) -> Launch:
    name, _, rate = choice.partition("=")
    if name == COMPILE and not rate and not launch.compile:
        return replace(launch, compile=True)
    if name in FP32_CHOICES and not rate and launch.fp32 is None:
        return replace(launch, fp32=name)
    if name in knobs.KNOBS:
        both = choice if launch.knobs is None else f"{launch.knobs}+{choice}"
        return replace(launch, knobs=knobs.text_of(knobs.parsed(both, where=where)))
    known = {**optimizers.KINDS, **optimizers.REFUSED}
    if name in (COMPILE, *FP32_CHOICES) or (name in known and launch.optimizer is not None):
        fitting = f"one optimizer, compile once, and one of {', '.join(FP32_CHOICES)}"
        raise InputError(f"+{choice} is not allowed here", where=where, allowed=fitting)
    if name not in known:
        allowed = [COMPILE, *FP32_CHOICES, *optimizers.KINDS, "NAME=LEARNING_RATE", *knobs.KNOBS]
        raise InputError(f"+{choice} is unknown", where=where, allowed=allowed)
    optimizers.require(name, where=where)
    return replace(launch, optimizer=name, learning_rate=_rate(rate, choice, where) if "=" in choice else None)


def _rate(text: str, choice: str, where: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate > 0):
        raise InputError(f"+{choice} has no valid learning rate", where=where, allowed="a number above 0")
    return rate
