"""What just fits: the smallest number of devices, the longest sequence, and the largest micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from autotune.cost_model.cluster.constants import Constants
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.memory import predict_memory
from autotune.cost_model.cluster.search import Question, layouts, no_mesh
from autotune.errors import BudgetError, InputError

# Most devices that are tried, and the steps in which sequences are tried: every rank of context parallelism gets two
# equal parts of one.
_MOST_DEVICES = 2**17
_STEP = 1024
_LONGEST = 2**27
_MOST_SEQUENCES = 2**16
_OTHERS = "other devices or choices"


def least_memory(question: Question, constants: Constants) -> tuple[float, Layout] | None:
    """Return the smallest peak of any layout, in bytes, and that layout; ``None`` if no mesh suits the model.

    Args:
        question: what is asked; its memory budget is ignored.
        constants: the model's constants.
    """
    peaks = ((predict_memory(question.model, one, constants).total, one) for one in layouts(_lean(question)))
    return min(peaks, key=lambda pair: pair[0], default=None)


def _lean(question: Question) -> Question:
    """Return the question with the choices that need least memory, where they are not given."""
    least = {"micro_batch": 1, "checkpointing": "full", "checkpointed": 1.0, "virtual_stages": 1}
    if question.fixed.get("checkpointing") == "none":
        least.pop("checkpointed")
    return replace(question, fixed={**least, **question.fixed})


def fewest_devices(question: Question, constants: Constants) -> tuple[int, Layout]:
    """Return the smallest number of devices on which some layout fits, and that layout.

    Args:
        question: what is asked; its number of devices is ignored.
        constants: the model's constants.

    Raises:
        BudgetError: if no number of devices up to 131,072 is enough.
    """
    for count in _counts(question.machine.per_node):
        found = least_memory(replace(question, devices=count), constants)
        if found is not None and found[0] <= question.budget_bytes:
            return count, found[1]
    raise BudgetError(
        f"no layout of up to {_MOST_DEVICES:,} devices fits",
        where="plan",
        allowed=f"a model that fits in {question.budget_bytes / 1e9:.0f} GB a rank",
    )


def _counts(per_node: int) -> Iterator[int]:
    """Yield numbers of devices to try: within a node each that divides it, then whole nodes, then powers of two."""
    yield from (one for one in range(1, per_node) if per_node % one == 0)
    nodes = itertools.chain(range(1, 65), (2**power for power in range(7, 18)))
    yield from (count for count in (per_node * one for one in nodes) if count <= _MOST_DEVICES)


def longest_sequence(question: Question, constants: Constants) -> tuple[int, Layout]:
    """Return the longest sequence, in steps of 1,024 tokens, with which some layout fits, and that layout.

    A model of fewer positions is tried with all of them.

    Args:
        question: what is asked; its sequence is ignored.
        constants: the model's constants.

    Raises:
        BudgetError: if not even one step fits.
        InputError: if no mesh of the devices suits the model.
    """
    positions = question.model.positions or _LONGEST
    step = min(_STEP, positions)

    def fitting(steps: int) -> Layout | None:
        found = least_memory(replace(question, sequence=steps * step), constants)
        if steps == 1 and found is None:
            raise InputError(no_mesh(replace(question, sequence=step)), where="plan", allowed=_OTHERS)
        return found[1] if found is not None and found[0] <= question.budget_bytes else None

    steps, layout = _largest(fitting, positions // step, f"{step} tokens")
    return steps * step, layout


def largest_micro_batch(question: Question, constants: Constants) -> tuple[int, Layout]:
    """Return the largest micro-batch, in sequences, with which some layout fits, and that layout.

    Args:
        question: what is asked; the global batch is as large as the micro-batch needs.
        constants: the model's constants.

    Raises:
        BudgetError: if not even one sequence fits.
        InputError: if no mesh of the devices suits the model.
    """
    lean = _lean(replace(question, fixed={**question.fixed, "micro_batch": 1}))
    # One layout of each mesh is enough: the largest micro-batch does not depend on how many of them a step has.
    templates = list({replace(one, micro_batches=one.pp): None for one in layouts(lean)})
    if not templates:
        raise InputError(no_mesh(lean), where="plan", allowed=_OTHERS)

    def fitting(size: int) -> Layout | None:
        tried = (replace(one, micro_batch=size) for one in templates)
        found = min(tried, key=lambda one: predict_memory(question.model, one, constants).total)
        return found if predict_memory(question.model, found, constants).total <= question.budget_bytes else None

    return _largest(fitting, _MOST_SEQUENCES, "one sequence")


def _largest(fitting: Callable[[int], Layout | None], most: int, least: str) -> tuple[int, Layout]:
    """Return the largest number up to ``most`` that fits, with its layout; what fits, fits at smaller numbers, too."""
    low, layout = 1, fitting(1)
    if layout is None:
        raise BudgetError(f"not even {least} fits", where="plan", allowed="more devices or memory, or a smaller model")
    high = 2
    while high <= most and (found := fitting(high)) is not None:
        low, layout, high = high, found, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        found = fitting(middle)
        if found is None:
            high = middle
        else:
            low, layout = middle, found
    return low, layout
