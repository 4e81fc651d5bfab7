"""The part of ``autotune plan`` that searches layouts of a transformer on many devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli import console as shared
from autotune.cli.plan_question import Asked, machine_of, question_of
from autotune.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from autotune.cli.plan_costs import Costs
    from autotune.cost_model.cluster.estimate import Estimate
    from autotune.cost_model.cluster.search import Answer, Question

# Seconds after which a search ends without a proof.
_LIMIT_S = 50.0
_FINDS = ("devices", "sequence", "micro-batch")


def run(asked: Asked, costs: Costs, *, output: Path | None, as_json: bool) -> None:
    """Search the layouts that are asked for, and print them.

    Args:
        asked: what is asked about layouts.
        costs: what is asked about the costs of a whole run.
        output: file to write the best plan, or what is exported, to.
        as_json: whether to print one JSON document.
    """
    from autotune.cost_model.cluster.choices import parse_counts
    from autotune.report.layout_export import export_layout

    counts = parse_counts(asked.devices, where="--devices")
    _require_sense(asked, costs, counts, output)
    priced = costs.parsed()
    model, sequence = asked.sizes.model()
    machine = machine_of(asked)
    questions = [question_of(asked, model, sequence, machine, count) for count in counts]
    if asked.find is not None:
        _find(asked, questions[0], as_json=as_json)
        return
    answers = _answers(questions, asked.top, as_json=as_json)
    best = [one for _, answer in answers for one in answer.best]
    chosen, account = priced.account(best)
    exported = None if asked.export is None else export_layout(chosen, asked.export)
    document = _document(answers) | account | ({} if exported is None else {"exported": exported})
    # Nothing is written before all is known.
    if priced.figure is not None:
        priced.draw(account, priced.figure)
    if output is not None:
        _write(output, chosen, exported)
    if as_json:
        shared.print_json(document)
        return
    _print(answers)
    console = shared.console(as_json=False)
    priced.show(account, described(chosen), console)
    if exported is not None and output is None:
        console.print(exported, markup=False, highlight=False, soft_wrap=True)


def _answers(questions: Sequence[Question], count: int, *, as_json: bool) -> list[tuple[Question, Answer]]:
    """Return the answer to each question, the smallest number of devices first."""
    from autotune.cost_model.cluster.constants import fitted
    from autotune.cost_model.cluster.search import search

    answers = []
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage(f"search layouts on {questions[0].machine.name}", len(questions))
        for number, question in enumerate(questions, 1):
            found = search(question, fitted(), count=count, limit_s=_LIMIT_S / len(questions))
            answers.append((question, found))
            bars.advance(number)
    return answers


def _write(output: Path, chosen: Estimate, exported: str | None) -> None:
    """Write the chosen plan, or what is exported of it."""
    from autotune.io.files import write_atomic, write_json

    if exported is None:
        write_json(output, chosen.to_json())
    else:
        write_atomic(output, exported)


def _print(answers: Sequence[tuple[Question, Answer]]) -> None:
    """Print the best layouts of each number of devices."""
    console = shared.console(as_json=False)
    for question, answer in answers:
        console.print(_table(answer, f"{question.devices} x {question.machine.name}: estimated, not measured"))
        console.print(_memory_line(answer.best[0], question), soft_wrap=True)
        console.print(_search_line(answer), soft_wrap=True)


def _require_sense(asked: Asked, costs: Costs, counts: Sequence[int], output: Path | None) -> None:
    """Refuse options that nothing would come of, before a search that may take a minute."""
    if output is not None and costs.figure is not None and output.resolve() == costs.figure.resolve():
        raise InputError("is also the file of --figure", where="--output", allowed="two different files")
    if asked.find is None:
        return
    if asked.find not in _FINDS:
        raise InputError(f"is {asked.find!r}", where="--find", allowed=_FINDS, given=asked.find)
    unused = [name for name, value in (("--export", asked.export), ("--output", output)) if value is not None]
    unused += costs.given()
    if unused:
        raise InputError(f"cannot be combined with {unused[0]}", where="--find", allowed=f"--find without {unused[0]}")
    if len(counts) > 1:
        raise InputError("cannot be combined with several --devices", where="--find", allowed="one number of devices")


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


def _document(answers: Sequence[tuple[Question, Answer]]) -> dict[str, Any]:
    """Return the JSON document: the best plans of each number of devices, the smallest number first."""
    question, largest = answers[-1]
    model = question.model
    return {
        "estimated": True,
        "model": {**asdict(model), "parameters": model.parameters},
        "device": question.machine.name,
        "machine": asdict(question.machine),
        "sequence": question.sequence,
        "fixed": dict(question.fixed),
        "memory_budget_bytes": question.budget_bytes,
        "answers": [
            {"devices": one.devices, "plans": [plan.to_json() for plan in answer.best], "search": answer.to_json()}
            for one, answer in answers
        ],
        "plans": [plan.to_json() for plan in largest.best],
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
