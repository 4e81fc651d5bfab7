"""The fastest layouts of a transformer on a number of devices, by exhaustive search with bounds.

A layout's ranks compute at least what their blocks take, without any collective, and that bound needs no more than the
micro-batch, the splits of a block and the number of stages. Candidates are tried in the order of their bounds; the
search ends, with a proof, as soon as the next bound is slower than the layouts that were found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.cost_model.cluster.choices import option_of
from autotune.cost_model.cluster.constants import Constants
from autotune.cost_model.cluster.estimate import Estimate, estimate_layout
from autotune.cost_model.cluster.layout import CHECKPOINTING, Checkpointing, Layout
from autotune.cost_model.cluster.machines import Machine
from autotune.cost_model.cluster.memory import predict_memory
from autotune.cost_model.cluster.step_time import Passes
from autotune.cost_model.cluster.transformer import Transformer
from autotune.errors import BudgetError, InputError

# Largest factor by which a step may exceed the asked global batch, where that need not be exact.
_ROOM = 1.25
# Tokens of a step where no global batch is asked: in all, and at least for each device. Source: Llama 3 405B began with
# steps of 4 M tokens, and took 16 M on 16,384 devices (arXiv:2407.21783, sections 3.3.2 and 3.4.1).
_TOKENS = 2**22
_TOKENS_EACH = 2**10
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CHECKPOINTING: tuple[tuple[Checkpointing, float], ...] = (
    ("none", 1.0),
    ("selective", 1.0),
    ("full", 0.25),
    ("full", 0.5),
    ("full", 0.75),
    ("full", 1.0),
)
_VIRTUAL = (1, 2, 4, 8)
# DeepSpeed and Megatron-LM keep 16-bit weights; FSDP keeps fp32 weights.
_ZERO: Mapping[int, dict[str, Any]] = {
    1: {"zero_stage": 1, "fp32_weights": False, "reduce_bytes": 2},
    2: {"zero_stage": 2, "fp32_weights": False, "reduce_bytes": 2},
    3: {"zero_stage": 3, "fp32_weights": True, "reduce_bytes": 4},
}
_LARGEST_CP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a search.

    Attributes:
        model: the transformer.
        machine: the device and its links.
        devices: number of devices.
        sequence: tokens of one sequence.
        global_batch: sequences of one step; 0 for about 4 M tokens (more on more than 4,096 devices), where a
            quarter more is allowed.
        budget_bytes: memory that a rank may use.
        fixed: choices that are given, by the name of the layout's field; ``dp`` stands for ``replicas`` x ``shard``.
        allowed: values to which choices are restricted, by the name of the layout's field.
        states: how weights are kept and gradients reduced, by the name of the layout's field; by default 16-bit
            weights and reductions up to ZeRO stage 2, and fp32 weights and reductions at stage 3.
        suits: whether a layout may be chosen, sharding left out.
        base: the layout whose other choices all candidates share.
    """

    model: Transformer
    machine: Machine
    devices: int
    sequence: int
    global_batch: int = 0
    budget_bytes: float
    fixed: Mapping[str, Any] = field(default_factory=dict)
    allowed: Mapping[str, Collection[Any]] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    suits: Callable[[Transformer, Layout], bool] = lambda model, layout: True
    base: Layout = field(default_factory=Layout)

    @property
    def batch(self) -> int:
        """Return the sequences of one step to aim at."""
        return self.global_batch or max(1, round(max(_TOKENS, _TOKENS_EACH * self.devices) / self.sequence))

    @property
    def largest_batch(self) -> float:
        """Return the most sequences of one step."""
        return self.batch if self.global_batch else max(self.batch * _ROOM, self.batch + 1)

    def allows(self, name: str, value: Any) -> bool:
        """Return whether a choice agrees with those that are given or allowed."""
        given = name not in self.fixed or self.fixed[name] == value
        return given and (name not in self.allowed or value in self.allowed[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a search.

    Attributes:
        best: the fastest layouts, each of a mesh of its own, fastest first.
        candidates: groups of layouts with a bound of their own.
        evaluated: layouts whose time was predicted.
        too_large: layouts that did not fit.
        gap: by how much an untried layout could be faster than the best one, as a fraction; 0 is a proof.
        seconds: time that the search took.
        rounded_batch: whether steps may exceed the asked number of sequences.
    """

    best: tuple[Estimate, ...]
    candidates: int
    evaluated: int
    too_large: int
    gap: float
    seconds: float
    rounded_batch: bool

    def to_json(self) -> dict[str, Any]:
        """Return how the search went as a JSON object."""
        return {
            "candidates": self.candidates,
            "evaluated": self.evaluated,
            "too_large": self.too_large,
            "gap": self.gap,
            "proven": self.gap == 0.0,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Layouts that share what one rank computes, and their bound in seconds per token of all devices."""

    bound: float
    layout: Layout
    passes: Passes


def search(question: Question, constants: Constants, *, count: int = 5, limit_s: float = math.inf) -> Answer:
    """Return the fastest layouts that fit.

    Args:
        question: what is asked.
        constants: the model's constants.
        count: number of meshes to return.
        limit_s: seconds after which the search ends without a proof.

    Raises:
        InputError: if no mesh of the devices suits the model.
        BudgetError: if meshes suit it but none fits in memory.
    """
    began = time.perf_counter()
    candidates = sorted(_candidates(question, constants), key=lambda one: one.bound)
    if not candidates:
        raise InputError(no_mesh(question), where="plan", allowed="other devices, batch, sequence or fixed choices")
    found = _Found(count)
    gap = 0.0
    for candidate in candidates:
        if candidate.bound >= found.worst:
            break
        if time.perf_counter() - began > limit_s and found.best:
            gap = max(0.0, 1 - candidate.bound / found.best[0][0])
            break
        found.consider_all(candidate, question, constants)
    if not found.best and not found.too_large:
        raise InputError(no_mesh(question), where="plan", allowed="other devices, batch, sequence or fixed choices")
    if not found.best:
        raise BudgetError(
            f"no layout of {question.devices} devices fits: the smallest needs {found.least / 1e9:.1f} GB on a rank",
            where="plan",
            allowed=f"at most {question.budget_bytes / 1e9:.1f} GB",
        )
    return Answer(
        best=tuple(one for _, one in found.best),
        candidates=len(candidates),
        evaluated=found.evaluated,
        too_large=found.too_large,
        gap=gap,
        seconds=time.perf_counter() - began,
        rounded_batch=not question.global_batch,
    )


class _Found:
    """The fastest layouts so far, one for each mesh."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.best: list[tuple[float, Estimate]] = []
        self.evaluated = self.too_large = 0
        self.least = math.inf

    @property
    def worst(self) -> float:
        """Return the seconds per token that a layout of a new mesh has to beat."""
        return self.best[-1][0] if len(self.best) == self._count else math.inf

    def consider_all(self, candidate: _Candidate, question: Question, constants: Constants) -> None:
        """Predict a candidate's layouts, and keep those that fit and are fast."""
        too_large: set[int] = set()
        for layout in _sharded(candidate.layout, question):
            # States over fewer ranks need more memory on each.
            if layout.zero_stage in too_large:
                self.too_large += 1
                continue
            memory = predict_memory(question.model, layout, constants).total
            if memory > question.budget_bytes:
                too_large.add(layout.zero_stage)
                self.too_large += 1
                self.least = min(self.least, memory)
            else:
                self._consider(layout, candidate.passes, question, constants)

    def _consider(self, layout: Layout, passes: Passes, question: Question, constants: Constants) -> None:
        """Predict the time of a layout that fits, and keep it if it is fast."""
        self.evaluated += 1
        one = estimate_layout(
            question.model, layout, question.machine, constants, budget_bytes=question.budget_bytes, passes=passes
        )
        each = 1 / one.tokens_per_s
        if each >= self.worst:
            return
        mesh = _mesh(layout)
        rivals = [(cost, other) for cost, other in self.best if _mesh(other.layout) == mesh]
        if rivals and rivals[0][0] <= each:
            return
        kept = [pair for pair in self.best if pair not in rivals]
        self.best = sorted([*kept, (each, one)], key=lambda pair: pair[0])[: self._count]


def _mesh(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.pp, layout.cp


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def layouts(question: Question) -> Iterator[Layout]:
    """Yield every layout that the search may choose, whether it fits or not.

    Args:
        question: what is asked.
    """
    for part in _parts(question):
        for staged in _staged(part, question):
            yield from _sharded(staged, question)


def _candidates(question: Question, constants: Constants) -> Iterator[_Candidate]:
    """Yield groups of layouts with their bounds."""
    layers = question.model.layers
    for part in _parts(question):
        staged = list(_staged(part, question))
        if not staged:
            continue
        passes = Passes.of(question.model, part, question.machine, constants)
        for layout in staged:
            stage = layers / layout.pp * passes.block
            rounds = layout.micro_batches + (layout.pp - 1) / layout.virtual_stages
            head = layout.micro_batches * passes.head
            yield _Candidate((rounds * stage + head) / layout.tokens_per_step, layout, passes)


def _parts(question: Question) -> Iterator[Layout]:
    """Yield what one rank may compute: splits of a block, the micro-batch and what is kept of it."""
    model, allows = question.model, question.allows
    for tp in divisors(question.devices):
        if tp > question.machine.per_node or model.heads % tp or model.kv_heads % tp or not allows("tp", tp):
            continue
        for cp in divisors(question.devices // tp):
            if cp > _LARGEST_CP or question.sequence % (2 * cp if cp > 1 else 1) or not allows("cp", cp):
                continue
            for micro_batch in _micro_batches(question):
                for kind, share in _kept(question):
                    yield replace(
                        question.base,
                        tp=tp,
                        cp=cp,
                        micro_batch=micro_batch,
                        sequence=question.sequence,
                        checkpointing=kind,
                        checkpointed=share,
                    )


def _micro_batches(question: Question) -> Iterable[int]:
    if "micro_batch" in question.fixed:
        return (question.fixed["micro_batch"],)
    return (one for one in _MICRO_BATCHES if one <= question.largest_batch)


def _kept(question: Question) -> Iterable[tuple[Checkpointing, float]]:
    """Yield what blocks may keep, as far as that is not given."""
    share = question.fixed.get("checkpointed")
    kept = _CHECKPOINTING if share is None else [(kind, share) for kind in CHECKPOINTING]
    return [
        (kind, part)
        for kind, part in kept
        if question.allows("checkpointing", kind) and (kind == "none" or question.allows("checkpointed", part))
    ]


def _staged(part: Layout, question: Question) -> Iterator[Layout]:
    """Yield the pipelines and the number of micro-batches with which a part may be repeated."""
    rest = question.devices // part.tp // part.cp
    for pp in divisors(rest):
        dp = rest // pp
        if (
            not _stages_suit(pp, question.model.layers)
            or not question.allows("pp", pp)
            or not question.allows("dp", dp)
        ):
            continue
        k = _rounds(question, dp * part.micro_batch)
        if k is None or k < pp or not question.allows("micro_batches", k):
            continue
        for virtual in _virtual(question, pp, k):
            layout = replace(part, shard=dp, pp=pp, micro_batches=k, virtual_stages=virtual)
            if question.suits(question.model, layout):
                yield layout


def _virtual(question: Question, pp: int, k: int) -> Iterable[int]:
    """Return the chunks that a stage may have: micro-batches come in groups of ``pp``, and blocks in equal parts.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.
    """
    given = question.fixed.get("virtual_stages")
    choices = _VIRTUAL if given is None else (given,)
    layers = question.model.layers
    return [
        one
        for one in choices
        if one == 1 or (pp > 1 and k % pp == 0 and one * pp <= layers and _stages_suit(pp * one, layers))
    ]


def _stages_suit(stages: int, layers: int) -> bool:
    """Return whether stages can hold equal numbers of blocks, the embedding and the head counting as one block each."""
    return stages == 1 or layers % stages == 0 or (layers + 2) % stages == 0


def _rounds(question: Question, each: int) -> int | None:
    """Return the micro-batches of a step; ``None`` if no number of them gives the asked batch."""
    k = -(-question.batch // each)
    if k * each > question.largest_batch or (question.global_batch and question.batch % each):
        return None
    return k


def _sharded(staged: Layout, question: Question) -> Iterator[Layout]:
    """Yield the ways to shard a layout's states over its data-parallel ranks, the most ranks first."""
    dp = staged.shard
    for stage, settings in _ZERO.items():
        if not question.allows("zero_stage", stage) or (stage == 2 and staged.pp > 1):
            continue
        for shard in reversed(divisors(dp)) if stage == 3 else [dp]:
            if question.allows("shard", shard) and question.allows("replicas", dp // shard):
                yield replace(staged, shard=shard, replicas=dp // shard, **{**settings, **question.states})


def no_mesh(question: Question) -> str:
    """Return why no mesh suits a question: which given choice is impossible, or all that has to fit together.

    Args:
        question: what is asked.
    """
    reason = _impossible_split(question) or _impossible_repetition(question)
    if reason is not None:
        return reason
    model, fixed = question.model, question.fixed
    return (
        f"no mesh of {question.devices} devices suits {model.heads} heads ({model.kv_heads} of keys and values), "
        f"{model.layers} layers, sequences of {question.sequence} and steps of {question.batch} sequences"
        + (f" with {', '.join(option_of(name, value) for name, value in fixed.items())}" if fixed else "")
    )


def _impossible_split(question: Question) -> str | None:
    """Return why the given degrees cannot split the devices, the model or a sequence; ``None`` if they can."""
    model, fixed, machine = question.model, question.fixed, question.machine
    tp, cp, pp = (fixed.get(name, 1) for name in ("tp", "cp", "pp"))
    copies = fixed.get("replicas", 1) * fixed.get("shard", 1)
    product = tp * cp * pp * fixed.get("dp", copies)
    if "dp" in fixed and fixed["dp"] % copies:
        return f"dp={fixed['dp']} is not replicas x shard, of which {copies} is given"
    if question.devices % product:
        return f"a mesh of {product} does not divide {question.devices} devices"
    if model.heads % tp or model.kv_heads % tp:
        return f"tp={tp} does not divide {model.heads} heads and {model.kv_heads} heads of keys and values"
    if tp > machine.per_node:
        return f"tp={tp} exceeds the {machine.per_node} devices of a node"
    if cp > _LARGEST_CP:
        return f"cp={cp} exceeds the {_LARGEST_CP} ranks that a sequence is split over"
    if cp > 1 and question.sequence % (2 * cp):
        return f"cp={cp} does not split sequences of {question.sequence} tokens into two equal parts per rank"
    if not _stages_suit(pp, model.layers):
        return f"pp={pp} stages cannot hold {model.layers} layers in equal numbers"
    return None


def _impossible_repetition(question: Question) -> str | None:
    """Return why given stages, micro-batches and states do not go together; ``None`` if they do."""
    fixed, layers = question.fixed, question.model.layers
    pp, virtual, micro_batch = fixed.get("pp", 1), fixed.get("virtual_stages", 1), fixed.get("micro_batch", 1)
    if virtual > 1 and fixed.get("pp") == 1:
        return f"virtual_stages={virtual} needs more than one pipeline stage"
    if virtual > 1 and (virtual * pp > layers or not _stages_suit(virtual * pp, layers)):
        return f"virtual_stages={virtual} of pp={pp} stages cannot hold {layers} layers in equal numbers"
    if fixed.get("zero_stage") == 2 and pp > 1:
        return f"zero=2 shards gradients, which pp={pp} stages add up over all micro-batches"
    if micro_batch > question.largest_batch:
        return f"micro_batch={micro_batch} exceeds steps of {question.batch} sequences"
    if question.global_batch and question.global_batch % micro_batch:
        return f"micro_batch={micro_batch} does not divide steps of {question.global_batch} sequences"
    return None
