"""Free knobs: launch choices that need no plan, such as a fused optimizer or another number of threads.

They are written like the other launch choices, behind the name of a job (``charlm+fused+threads=2``), and plans record
them in ``launch.knobs`` in the same notation. A knob changes a part of the job, or a setting of the process that is in
force while an engine runs. What a knob gains is measured by :mod:`autotune.campaign.knob_trials`, never assumed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError, JobError

if TYPE_CHECKING:
    # Plans record knobs and are read without torch.
    import torch
    from torch import nn

    from autotune.job import Job
    from autotune.mesh import Mesh

_BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
_ON_ACCELERATORS = ("efficient", "cudnn")
# The knob that :func:`releases` looks for, and where optimizers are defined that update one parameter at a time.
RELEASE = "release"
# The knobs that :func:`communication` looks for, and what precedes the rank of PowerSGD.
REDUCE, GATHER = "reduce", "gather"
_LOW_RANK = "powersgd"
_ONE_BY_ONE = ("torch.optim", "bitsandbytes.optim", "pytorch_optimizer.optimizer.lion")


def _no_candidates() -> tuple[str, ...]:
    return ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A free knob.

    Attributes:
        exact: whether it promises training that is bit-identical to the job as it is; trials also measure that.
        group: knobs of one group exclude each other.
        code: how a script sets it; ``{value}`` is its value.
        values: regular expression of its values; empty for a knob without one.
        allowed: the same in words.
        candidates: returns the values that are worth a trial on this machine.
        of_job: returns a job with the knob; ``None`` for a setting of the process.
        of_process: returns the context in which the process has the setting; ``None`` for a change of the job.
        needs_accelerator: whether a value can be used only where the job trains on an accelerator.
        saves_memory: whether it is worth a trial for its memory alone, at a price; such a knob is never recommended.
        of_ranks: whether it changes what ranks send to each other.
    """

    exact: bool
    group: str
    code: str
    values: str = ""
    allowed: str = "without a value"
    candidates: Callable[[], Iterable[str]] = _no_candidates
    of_job: Callable[[Job, str], Job] | None = None
    of_process: Callable[[str], AbstractContextManager[Any]] | None = None
    needs_accelerator: Callable[[str], bool] = lambda _: False
    saves_memory: bool = False
    of_ranks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """In which form ranks send gradients and weights to each other.

    Attributes:
        reduces_in_16_bit: whether gradients are added up in bf16, which halves what is sent.
        gathers_in_16_bit: whether weights are sent in bf16; each rank's shard of them stays as it is.
        gradient_rank: rank of the two matrices as which replicas send a gradient (PowerSGD); 0 for whole gradients.
    """

    reduces_in_16_bit: bool = False
    gathers_in_16_bit: bool = False
    gradient_rank: int = 0


def parsed(text: str, *, where: str, others: Iterable[str] = ()) -> dict[str, str]:
    """Return the value of each knob in a text such as ``fused+threads=2``, in the order of :data:`KNOBS`.

    Args:
        text: the knobs.
        where: the option or argument with the text, for errors.
        others: names that would be allowed too, for errors.

    Raises:
        InputError: if a knob is unknown, has a wrong value, or excludes another one.
    """
    found: dict[str, str] = {}
    groups: set[str] = set()
    for choice in text.split("+"):
        name, equals, value = choice.partition("=")
        knob = KNOBS.get(name)
        if knob is None:
            raise InputError(f"+{choice:.80} is unknown", where=where, allowed=[*others, *KNOBS], given=name)
        if bool(equals) != bool(knob.values) or not re.fullmatch(knob.values, value):
            raise InputError(f"+{choice:.80} has no valid value", where=where, allowed=f"+{name} {knob.allowed}")
        if knob.group in groups:
            other = [one for one, entry in KNOBS.items() if entry.group == knob.group]
            raise InputError(f"+{choice} is not allowed here", where=where, allowed=f"one of {', '.join(other)}")
        groups.add(knob.group)
        found[name] = value
    return {name: found[name] for name in KNOBS if name in found}


def text_of(found: dict[str, str]) -> str:
    """Return knobs as text; the inverse of :func:`parsed`."""
    return "+".join(f"{name}={value}" if value else name for name, value in found.items())


def is_valid(text: object) -> bool:
    """Return whether a value of a plan file is a canonical text of knobs."""
    try:
        return isinstance(text, str) and text_of(parsed(text, where="plan")) == text
    except InputError:
        return False


def turned(job: Job, text: str) -> Job:
    """Return a job with the knobs that change a part of it; its name and launch choices stay.

    The optimizer and the model are changed when they are built, and an error is raised then.

    Raises:
        InputError: if a knob cannot be used with this job.
    """
    for name, value in parsed(text, where=f"job {job.name!r}").items():
        change = KNOBS[name].of_job
        job = job if change is None else change(job, value)
    return job


def require_device(text: str | None, *, accelerated: bool, where: str) -> None:
    """Refuse knobs that need an accelerator where the job trains on none.

    Raises:
        InputError: naming the first such knob.
    """
    for name, value in parsed(text, where=where).items() if text and not accelerated else ():
        if KNOBS[name].needs_accelerator(value):
            shown = text_of({name: value})
            raise InputError(
                "the job does not train on an accelerator", where=f"{where}, +{shown}", allowed="a job that does"
            )


@contextmanager
def settings_of(text: str | None) -> Iterator[None]:
    """Run the body with the settings of the process that knobs choose, and put the former ones back."""
    with contextlib.ExitStack() as entered:
        for name, value in parsed(text, where="knobs").items() if text else ():
            context = KNOBS[name].of_process
            if context is not None:
                entered.enter_context(context(value))
        yield


def releases(text: str | None) -> bool:
    """Return whether engines update each parameter, and free its gradient, during the backward pass."""
    return bool(text) and RELEASE in parsed(text or "", where="knobs")


def communication(text: str | None) -> Communication:
    """Return in which form knobs let ranks send gradients and weights."""
    found = parsed(text, where="knobs") if text else {}
    reduced = found.get(REDUCE, "")
    return Communication(
        reduces_in_16_bit=reduced == "bf16",
        gathers_in_16_bit=GATHER in found,
        gradient_rank=int(reduced.removeprefix(_LOW_RANK)) if reduced.startswith(_LOW_RANK) else 0,
    )


def of_ranks(text: str | None) -> str | None:
    """Return those of several knobs that change what ranks send to each other; ``None`` if there are none."""
    found = parsed(text, where="knobs") if text else {}
    return text_of({name: value for name, value in found.items() if KNOBS[name].of_ranks}) or None


def require_several(text: str | None, *, where: str) -> None:
    """Refuse knobs that change what ranks send to each other where there is one process.

    Raises:
        JobError: naming the knobs.
    """
    if sent := of_ranks(text):
        problem = f"+{sent} is of no use: one process has no gradients to add up and no weights to gather"
        raise JobError(problem, where=where, allowed="--ranks with at least 2")


def require_receivers(text: str | None, mesh: Mesh) -> None:
    """Refuse knobs that send gradients or weights otherwise where a mesh has no ranks that receive them.

    Raises:
        InputError: naming the launch choice, and what the mesh would need.
    """
    sent = communication(text)
    for asked, dimension, what in (
        (sent.gradient_rank, "dp", f"+{REDUCE} by PowerSGD is between replicas"),
        (sent.gathers_in_16_bit, "shard", f"+{GATHER} is between shards"),
    ):
        if asked and getattr(mesh, dimension) == 1:
            problem = f"{what}, of which mesh {mesh} has none"
            raise InputError(problem, where="--mesh", allowed=f"a mesh with {dimension}=2 or more")


def of_one_rank(text: str | None) -> str | None:
    """Return the others of several knobs than :func:`of_ranks`; ``None`` if there are none."""
    found = parsed(text, where="knobs") if text else {}
    return text_of({name: value for name, value in found.items() if not KNOBS[name].of_ranks}) or None


def of_process(text: str | None) -> str | None:
    """Return those of several knobs that are settings of the process; ``None`` if there are none."""
    found = parsed(text, where="knobs") if text else {}
    return text_of({name: value for name, value in found.items() if KNOBS[name].of_process is not None}) or None


def without(text: str | None, name: str) -> str | None:
    """Return a text of knobs without one of them; ``None`` if none is left."""
    found = parsed(text, where="knobs") if text else {}
    return text_of({one: value for one, value in found.items() if one != name}) or None


def code_of(text: str) -> str:
    """Return how a script sets knobs."""
    found = parsed(text, where="knobs").items()
    return "; ".join(KNOBS[name].code.format(value=value) for name, value in found)


def candidates() -> list[str]:
    """Return every knob with each value that is worth a trial on this machine."""
    return [text_of({name: value}) for name, knob in KNOBS.items() for value in knob.candidates()]


def _with_flag(flag: str) -> Callable[[Job, str], Job]:
    """Return the change that makes the optimizer of a job ``fused`` or ``foreach``."""

    def change(job: Job, _value: str) -> Job:
        def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            built = job.optimizer(parameters)
            if not type(built).__module__.startswith("torch.optim.") or flag not in built.defaults:
                raise InputError(
                    f"{type(built).__name__} has no {flag} step",
                    where=f"job {job.name!r}, +{flag}",
                    allowed=f"an optimizer of torch.optim that takes {flag}=",
                )
            chosen: dict[str, Any] = {one: one == flag for one in ("fused", "foreach") if one in built.defaults}
            for options in (built.defaults, *built.param_groups):
                options.update(chosen)
            if built.state:
                # Puts counters where this kind of step expects them.
                built.load_state_dict(built.state_dict())
            return built

        return replace(job, optimizer=optimizer)

    return change


def _channels_last(job: Job, _value: str) -> Job:
    def model() -> nn.Module:
        import torch

        built = job.model()
        dims = {tensor.dim() for tensor in (*built.parameters(), *built.buffers())}
        flat = torch.nn.Conv2d | torch.nn.ConvTranspose2d
        if 5 in dims or not any(isinstance(module, flat) for module in built.modules()):
            raise InputError(
                "the model has no convolutions over two dimensions, or some over three",
                where=f"job {job.name!r}, +channels_last",
                allowed="a model with convolutions over two dimensions, and none over three",
            )
        laid_out: nn.Module = built.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its stub
        return laid_out

    return replace(job, model=model)


def _loading(job: Job, knob: str, **options: Any) -> Job:
    """Return a job whose DataLoader has other options.

    Raises:
        InputError: if its batches do not come from a DataLoader.
    """
    from autotune.own_loop import loaded_with

    batches = loaded_with(job.batches, **options)
    if batches is None:
        raise InputError(
            "the batches do not come from a DataLoader",
            where=f"job {job.name!r}, +{knob}",
            allowed="a job from Job.from_loader(model, DataLoader(...), ...)",
        )
    return replace(job, batches=batches)


def _released(job: Job, _value: str) -> Job:
    """Return a job whose engine makes the update during the backward pass, at k = 1.

    Raises:
        InputError: if its gradients are clipped.
    """
    where = f"job {job.name!r}, +{RELEASE}"
    if job.clip_norm is not None:
        problem = "gradients are clipped by their common norm, which is known when all of them are there"
        raise InputError(problem, where=where, allowed="a job with clip_norm=None")

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        built = job.optimizer(parameters)
        if not type(built).__module__.startswith(_ONE_BY_ONE):
            raise InputError(
                f"{type(built).__name__} may not update one parameter at a time",
                where=where,
                allowed="an optimizer of torch.optim, or that of +adamw8bit or +lion",
            )
        return built

    return replace(job, optimizer=optimizer, accumulation_choices=(1,))


@contextmanager
def _threads(value: str) -> Iterator[None]:
    import torch

    former = torch.get_num_threads()
    torch.set_num_threads(int(value))
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _attention(value: str) -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend: Any = getattr(SDPBackend, _BACKENDS[value])
    context: AbstractContextManager[Any] = sdpa_kernel(backend)
    return context


@contextmanager
def _fastest_convolutions(_value: str) -> Iterator[None]:
    import torch

    former = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = former


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _other_threads() -> list[str]:
    import torch

    cores = _cores()
    return [str(count) for count in sorted({1, max(cores // 2, 1), cores} - {torch.get_num_threads()})]


KNOBS: dict[str, Knob] = {
    "fused": Knob(exact=False, group="optimizer", code="give the optimizer fused=True", of_job=_with_flag("fused")),
    "foreach": Knob(
        exact=True, group="optimizer", code="give the optimizer foreach=True", of_job=_with_flag("foreach")
    ),
    "channels_last": Knob(
        exact=False, group="layout", code="model.to(memory_format=torch.channels_last)", of_job=_channels_last
    ),
    "attention": Knob(
        exact=False,
        group="attention",
        code="train under torch.nn.attention.sdpa_kernel(...) with its {value} kernel",
        values="|".join(_BACKENDS),
        allowed=f"with one of {', '.join(f'={name}' for name in _BACKENDS)}",
        candidates=lambda: _BACKENDS,
        of_process=_attention,
        needs_accelerator=lambda value: value in _ON_ACCELERATORS,
    ),
    "cudnn_benchmark": Knob(
        exact=False,
        group="convolutions",
        code="torch.backends.cudnn.benchmark = True",
        of_process=_fastest_convolutions,
        needs_accelerator=lambda _: True,
    ),
    "threads": Knob(
        exact=False,
        group="threads",
        code="torch.set_num_threads({value})",
        values="[1-9][0-9]{0,2}",
        allowed="with a number from 1 to 999, as in +threads=2",
        candidates=_other_threads,
        of_process=_threads,
    ),
    "workers": Knob(
        exact=True,
        group="workers",
        code="DataLoader(..., num_workers={value})",
        values="[1-9][0-9]?",
        allowed="with a number from 1 to 99, as in +workers=2",
        candidates=lambda: (str(min(_cores(), 4)),),
        of_job=lambda job, value: _loading(job, f"workers={value}", workers=int(value)),
    ),
    "pinned": Knob(
        exact=True,
        group="pinned",
        code="DataLoader(..., pin_memory=True)",
        of_job=lambda job, _: _loading(job, "pinned", pinned=True),
        needs_accelerator=lambda _: True,
    ),
    RELEASE: Knob(
        exact=True,
        group=RELEASE,
        code="update each parameter, and free its gradient, in its register_post_accumulate_grad_hook",
        of_job=_released,
        saves_memory=True,
    ),
    REDUCE: Knob(
        exact=False,
        group=REDUCE,
        code="send gradients between ranks as {value}: MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) in "
        "fully_shard(), communication_data_type in DeepSpeed, powerSGD_hook in DDP",
        values=f"bf16|{_LOW_RANK}[1-9][0-9]{{0,2}}",
        allowed=f"with =bf16, or ={_LOW_RANK} and a rank from 1 to 999, as in +reduce={_LOW_RANK}4",
        # Trials of knobs run in one process.
        candidates=tuple,
        of_ranks=True,
    ),
    GATHER: Knob(
        exact=False,
        group=GATHER,
        code="send weights between ranks in {value}: FSDPModule.set_custom_all_gather()",
        values="bf16",
        allowed="with =bf16",
        candidates=tuple,
        of_ranks=True,
    ),
}
