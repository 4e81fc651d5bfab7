"""The part of ``autotune plan`` that searches layouts of a transformer on many devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli import console as shared
from autotune.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from autotune.cli.plan_costs import Costs
    from autotune.cost_model.cluster.estimate import Estimate
    from autotune.cost_model.cluster.machines import Machine
    from autotune.cost_model.cluster.search import Answer, Question
    from autotune.cost_model.cluster.transformer import Transformer

# Seconds after which a search ends without a proof.
_LIMIT_S = 50.0
# Tokens of a sequence where only a configuration is given, whose positions may be far more than a run trains with.
_SEQUENCE = 8192
_FINDS = ("devices", "sequence", "micro-batch")


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
        if sum([self.job is not None, self.config is not None]) > 1:
            raise InputError("--config cannot be combined with JOB", where="plan", allowed="one description of a model")
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
            return replace(model, **_replaced(given)), min(own, model.positions or own)
        if self.config is not None:
            model = Transformer.from_config(read_json(self.config), where=str(self.config))
            return replace(model, **_replaced(given)), min(model.positions, _SEQUENCE) or None
        missing = [f"--{name}" for name in ("layers", "hidden", "heads", "vocab") if name not in given]
        if missing:
            raise InputError(
                f"{', '.join(missing)} missing",
                where="plan",
                allowed="JOB, --config FILE, or --layers, --hidden, --heads, --vocab and --seq",
            )
        return Transformer.of_sizes(**given), None


def _replaced(given: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that replace a model's own; another width of heads follows from their number."""
    return {**given, "head_dim": 0} if {"heads", "hidden"} & set(given) else given


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


def run(asked: Asked, costs: Costs, *, output: Path | None, as_json: bool) -> None:
    """Search the layouts that are asked for, and print them.

    Args:
        asked: what is asked about layouts.
        costs: what is asked about the costs of a whole run.
        output: file to write the best plan, or what is exported, to.
        as_json: whether to print one JSON document.
    """
    from autotune.cost_model.cluster.choices import parse_choices, parse_counts
    from autotune.cost_model.cluster.constants import fitted
    from autotune.cost_model.cluster.search import search
    from autotune.io.files import write_atomic, write_json
    from autotune.report.layout_export import export_layout

    counts = parse_counts(asked.devices, where="--devices")
    parse_choices(asked.plan)
    priced = costs.parsed()
    _require_known(asked)
    model, sequence = asked.sizes.model()
    machine = _machine(asked)
    if asked.find is not None:
        _find(asked, _question(asked, model, sequence, machine, counts[-1]), as_json=as_json)
        return
    answers: dict[int, tuple[Question, Answer]] = {}
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage(f"search layouts on {machine.name}", len(counts))
        for number, count in enumerate(counts, 1):
            question = _question(asked, model, sequence, machine, count)
            answers[count] = question, search(question, fitted(), count=asked.top, limit_s=_LIMIT_S / len(counts))
            bars.advance(number)
    best = [one for _, answer in answers.values() for one in answer.best]
    chosen, account = priced.account(best)
    document = _document(asked, model, machine, answers) | account
    exported = None if asked.export is None else export_layout(chosen, asked.export)
    if exported is not None:
        document["exported"] = exported
    if output is not None and exported is not None:
        write_atomic(output, exported)
    elif output is not None:
        write_json(output, chosen.to_json())
    if as_json:
        shared.print_json(document)
        return
    console = shared.console(as_json=False)
    for count, (question, answer) in answers.items():
        console.print(_table(answer, f"{count} x {machine.name}: estimated, not measured"))
        console.print(_memory_line(answer.best[0], question), soft_wrap=True)
        console.print(_search_line(answer), soft_wrap=True)
    priced.show(account, described(chosen), console)
    if exported is not None and output is None:
        console.print(exported, markup=False, highlight=False, soft_wrap=True)


def _require_known(asked: Asked) -> None:
    """Refuse unknown names before a search, which may take a minute."""
    from autotune.report.layout_export import EXPORTS

    if asked.export is not None and asked.export not in EXPORTS:
        raise InputError(f"is {asked.export!r}", where="--export", allowed=EXPORTS, given=asked.export)
    if asked.find is not None and asked.find not in _FINDS:
        raise InputError(f"is {asked.find!r}", where="--find", allowed=_FINDS, given=asked.find)


def _find(asked: Asked, question: Question, *, as_json: bool) -> None:
    """Print what just fits: the fewest devices, the longest sequence or the largest micro-batch."""
    from autotune.budget import format_bytes
    from autotune.cost_model.cluster import limits
    from autotune.cost_model.cluster.constants import fitted
    from autotune.cost_model.cluster.estimate import estimate_layout

    finds = {
        "devices": (limits.fewest_devices, "devices are enough"),
        "sequence": (limits.longest_sequence, "tokens fit in one sequence"),
        "micro-batch": (limits.largest_micro_batch, "sequences fit in one micro-batch"),
    }
    find, text = finds[str(asked.find)]
    value, layout = find(question, fitted())
    estimate = estimate_layout(
        question.model, layout, question.machine, fitted(), budget_bytes=question.budget_bytes
    )  # fmt: skip
    if as_json:
        shared.print_json({"estimated": True, "find": asked.find, "value": value, "plan": estimate.to_json()})
        return
    shared.console(as_json=False).print(
        f"{value:,} {text} (estimated, not measured): {described(estimate)} needs "
        f"{format_bytes(int(estimate.memory.total))} of {format_bytes(int(question.budget_bytes))} on "
        f"{layout.devices} x {question.machine.name}",
        soft_wrap=True,
    )


def _machine(asked: Asked) -> Machine:
    """Return the device with the links that were given."""
    from autotune.cost_model.cluster.choices import parse_rate
    from autotune.cost_model.cluster.machines import find_machine

    found = find_machine(asked.device)
    found = replace(found, per_node=asked.per_node, node_link=found.node_rate * asked.per_node)
    if asked.link is not None:
        found = replace(found, node_link=parse_rate(asked.link, where="--link"))
    if asked.inner_link is not None:
        found = replace(found, link=parse_rate(asked.inner_link, where="--inner-link"))
    return found


def _question(asked: Asked, model: Transformer, sequence: int, machine: Machine, devices: int) -> Question:
    """Return the question about one number of devices."""
    from autotune.budget import MemoryBudget
    from autotune.cost_model.cluster.choices import parse_choices
    from autotune.cost_model.cluster.layout import Layout
    from autotune.cost_model.cluster.search import Question
    from autotune.report.layout_export import NEEDS

    budget: float = machine.capacity_bytes
    if asked.memory_budget is not None:
        size = MemoryBudget.parse(asked.memory_budget).size_bytes
        if size is None:
            raise InputError(f"is {asked.memory_budget!r}", where="--memory-budget", allowed="a size, as in 70GiB")
        budget = size
    fixed, settings = parse_choices(asked.plan)
    if asked.export is not None:
        fixed = {**NEEDS[asked.export], **fixed}
    return Question(
        model=model,
        machine=machine,
        devices=devices,
        sequence=sequence,
        global_batch=asked.global_batch or 0,
        budget_bytes=budget,
        fixed=fixed,
        base=Layout(**{"compiled": True, **settings, "trainable": _trainable(asked.trainable)}),
    )


def _trainable(text: str | None) -> float:
    """Return the share of parameters that are trained, from text such as ``0.5%`` or ``0.005``."""
    if text is None:
        return 1.0
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise InputError(f"is {text!r}", where="--trainable", allowed="a share above 0, at most 1, as in 0.5%")
    return value


def _document(
    asked: Asked, model: Transformer, machine: Machine, answers: dict[int, tuple[Question, Answer]]
) -> dict[str, Any]:
    """Return the JSON document: the best plans of each number of devices, the smallest number first."""
    question = next(question for question, _ in answers.values())
    return {
        "estimated": True,
        "model": {**asdict(model), "parameters": model.parameters},
        "device": machine.name,
        "machine": asdict(machine),
        "sequence": question.sequence,
        "fixed": dict(question.fixed),
        "memory_budget_bytes": question.budget_bytes,
        "answers": [
            {"devices": count, "plans": [one.to_json() for one in answer.best], "search": answer.to_json()}
            for count, (_, answer) in answers.items()
        ],
        "plans": [one.to_json() for one in max(answers.items(), key=lambda pair: pair[0])[1][1].best],
    }


def described(estimate: Estimate) -> str:
    """Return a layout in the words of ``--plan``, so that it can be given back."""
    layout = estimate.layout
    parts = [f"replicas={layout.replicas}"] if layout.replicas > 1 else []
    parts += [f"{name}={getattr(layout, name)}" for name in ("shard", "tp", "pp", "cp") if getattr(layout, name) > 1]
    parts += [f"micro_batch={layout.micro_batch}", f"k={layout.micro_batches}", f"zero={layout.zero_stage}"]
    parts.append(f"checkpointing={layout.checkpointing}")
    if layout.checkpointed < 1:
        parts.append(f"checkpointed={layout.checkpointed:g}")
    if layout.virtual_stages > 1:
        parts.append(f"virtual_stages={layout.virtual_stages}")
    return ",".join(parts)


def _table(answer: Answer, title: str) -> Table:
    """Return a table of the best layouts."""
    from autotune.budget import format_bytes

    table = shared.table(title=title, title_justify="left")
    for name in ("plan", "step", "tokens/s", "MFU", "peak", "binds"):
        table.add_column(name, justify="left" if name in ("plan", "binds") else "right", overflow="fold")
    for one in answer.best:
        table.add_row(
            described(one).replace(",", " "),
            f"{one.seconds.total:.3g} s",
            f"{one.tokens_per_s:,.0f}",
            f"{one.mfu:.1%}",
            format_bytes(int(one.memory.total)),
            one.binds.replace("_", " "),
        )
    return table


def _memory_line(best: Estimate, question: Question) -> str:
    """Return the memory of the best layout's fullest rank by part, as a sentence."""
    from autotune.budget import format_bytes

    parts = ", ".join(f"{name} {format_bytes(int(value))}" for name, value in asdict(best.memory).items() if value)
    return (
        f"Memory of the first plan's fullest rank: {parts}; {format_bytes(int(question.budget_bytes))} may be used. "
        f"A step has {best.layout.global_batch} sequences of {best.layout.sequence} tokens."
    )


def _search_line(answer: Answer) -> str:
    proof = "no other layout is faster" if answer.gap == 0 else f"another may be faster by {answer.gap:.0%}"
    return (
        f"{answer.evaluated} layouts estimated in {answer.seconds:.1f} s, {answer.too_large} too large; by the model, "
        f"{proof}. Errors of the model: autotune bench published."
    )
