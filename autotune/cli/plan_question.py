"""What the command line of ``autotune plan`` asks about a transformer on many devices, as a question to the search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.cost_model.cluster.machines import Machine
    from autotune.cost_model.cluster.search import Question
    from autotune.cost_model.cluster.transformer import Transformer

# Tokens of a sequence where only a configuration is given, whose positions may be far more than a run trains with.
_SEQUENCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A transformer as the command line describes it.

    Attributes:
        job: reference of a job; ``None`` if the model is described otherwise.
        config: a Hugging Face configuration file.
        numbers: sizes by the name of their option; ``None`` where not given.
        sequence: tokens of one sequence; ``None`` for the model's own.
    """

    job: str | None
    config: Path | None
    numbers: dict[str, Any]
    sequence: int | None

    def model(self) -> tuple[Transformer, int]:
        """Return the transformer, and the tokens of one sequence.

        Raises:
            InputError: if there is no description, there are several, or a sequence exceeds the model's positions.
        """
        given = {name: value for name, value in self.numbers.items() if value is not None}
        sources = [name for name, value in (("--config", self.config), ("JOB", self.job)) if value is not None]
        sources += [f"--{name.replace('_', '-')}" for name in given][:1]
        if len(sources) > 1:
            problem = f"{sources[0]} cannot be combined with {sources[1]}"
            raise InputError(problem, where="plan", allowed="one description of a model")
        model, own = self._described(given)
        sequence = self.sequence or own
        if sequence is None:
            raise InputError("--seq is missing", where="plan", allowed="--seq TOKENS, the length of one sequence")
        if model.positions and sequence > model.positions:
            raise InputError(
                f"sequences of {sequence} tokens exceed the model's {model.positions} positions",
                where="--seq",
                allowed=f"at most {model.positions}",
            )
        return model, sequence

    def _described(self, given: dict[str, Any]) -> tuple[Transformer, int | None]:
        from autotune.cost_model.cluster.transformer import Transformer
        from autotune.io.files import read_json

        if self.job is not None:
            from autotune.catalog import load_job
            from autotune.profiling.transformer_shape import transformer_of

            model, own = transformer_of(load_job(self.job))
            # A batch may hold one token more, which is only a target.
            return model, min(own, model.positions or own)
        if self.config is not None:
            model = Transformer.from_config(read_json(self.config), where=str(self.config))
            return model, min(model.positions, _SEQUENCE) or None
        missing = [f"--{name}" for name in ("layers", "hidden", "heads", "vocab") if name not in given]
        if missing:
            raise InputError(
                f"{', '.join(missing)} missing",
                where="plan",
                allowed="JOB, --config FILE, or --layers, --hidden, --heads, --vocab and --seq",
            )
        return Transformer.of_sizes(**given), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks about many devices; texts are as they were given."""

    sizes: Sizes
    device: str
    devices: str
    per_node: int
    link: str | None
    inner_link: str | None
    global_batch: int | None
    plan: str
    trainable: str | None
    memory_budget: str | None
    top: int
    find: str | None
    export: str | None


def machine_of(asked: Asked) -> Machine:
    """Return the device with the links that were given.

    Args:
        asked: what the command line asks.

    Raises:
        InputError: if the device is unknown or a rate makes no sense.
    """
    from autotune.cost_model.cluster.choices import parse_rate
    from autotune.cost_model.cluster.machines import find_machine
    from autotune.cost_model.machine_file import is_machine_file

    if is_machine_file(asked.device):
        raise InputError(
            f"{asked.device} describes one device", where="--device", allowed="with --devices, a device of the table"
        )
    found = find_machine(asked.device)
    found = replace(found, per_node=asked.per_node, node_link=found.node_rate * asked.per_node)
    if asked.link is not None:
        found = replace(found, node_link=parse_rate(asked.link, where="--link"))
    if asked.inner_link is not None:
        found = replace(found, link=parse_rate(asked.inner_link, where="--inner-link"))
    return found


def question_of(asked: Asked, model: Transformer, sequence: int, machine: Machine, devices: int) -> Question:
    """Return the question about one number of devices.

    Args:
        asked: what the command line asks.
        model: the transformer.
        sequence: tokens of one sequence.
        machine: the device and its links.
        devices: number of devices.

    Raises:
        InputError: if a choice makes no sense, or cannot be exported.
    """
    from autotune.cost_model.cluster.choices import parse_choices, share
    from autotune.cost_model.cluster.layout import Layout
    from autotune.cost_model.cluster.search import Question
    from autotune.report.layout_export import find_target, require_expressed

    fixed, settings = parse_choices(asked.plan)
    settings["trainable"] = 1.0 if asked.trainable is None else share("share", asked.trainable, "--trainable")
    if settings.get("float8") and not machine.float8:
        raise InputError(f"float8=yes: {machine.name} has no products of 8 bits", where="--plan", allowed="float8=no")
    limits: dict[str, Any] = {}
    defaults: dict[str, Any] = {"compiled": True}
    if asked.export is not None:
        target = find_target(asked.export)
        require_expressed(asked.export, fixed | settings)
        defaults |= {name: values[0] for name, values in target.allowed.items()}
        limits = {"allowed": target.allowed, "states": target.states, "suits": target.suits}
    return Question(
        model=model,
        machine=machine,
        devices=devices,
        sequence=sequence,
        global_batch=asked.global_batch or 0,
        budget_bytes=_budget(asked.memory_budget, machine),
        fixed=fixed,
        base=Layout(**defaults | settings),
        **limits,
    )


def _budget(text: str | None, machine: Machine) -> float:
    """Return the bytes that a rank may use: the device's capacity unless a budget is given."""
    from autotune.budget import MemoryBudget

    if text is None:
        return machine.capacity_bytes
    size = MemoryBudget.parse(text).size_bytes
    if size is None:
        raise InputError(f"is {text!r}", where="--memory-budget", allowed="a size, as in 70GiB")
    return size
