"""Pipelines: which units of a model each stage has, the order of its passes, and how long a step takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autotune.errors import InputError

SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "interleaved")
PIPELINE_FORM = (
    "pipe=4, or pipe=2,schedule=gpipe,units=3/5: ranks, one of the schedules "
    f"{', '.join(SCHEDULES)}, and the units of each stage"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The layout of ranks each of which computes some stages of a model.

    Attributes:
        ranks: number of ranks.
        schedule: order of the passes: ``1f1b`` (a backward pass as soon as there can be one), ``gpipe`` (all forward
            passes first), ``zero-bubble`` (1F1B where the gradients of weights wait until the gradient that the rank
            before needs was sent), or ``interleaved`` (1F1B where each rank has several stages that are not
            neighbours).
        units: number of units of each stage, in the order of the model; empty to balance them by their operations.
            Stage s belongs to rank s modulo ``ranks``.
    """

    ranks: int
    schedule: str = SCHEDULES[0]
    units: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str, *, where: str = "--mesh") -> Pipeline:
        """Read a layout such as ``pipe=2,schedule=gpipe``.

        Args:
            text: the ranks, and what is not the default.
            where: where the text was given, for the error.

        Raises:
            InputError: if the text is not a layout.
        """
        parts = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
        units = parts.get("units", "").split("/") if "units" in parts else []
        numbers = [parts.get("pipe", ""), *units]
        known = parts.keys() <= {"pipe", "schedule", "units"} and len(parts) == text.count(",") + 1
        if not known or not all(one.isascii() and one.isdigit() and int(one) >= 1 for one in numbers):
            raise InputError(f"pipeline is {text!r:.80}", where=where, allowed=PIPELINE_FORM)
        found = cls(
            ranks=int(parts["pipe"]), schedule=parts.get("schedule", SCHEDULES[0]), units=tuple(map(int, units))
        )
        stages, ranks = len(found.units) or found.ranks, found.ranks
        if found.schedule == SCHEDULES[-1] and ranks == 1:
            raise InputError(f"pipeline {text} has 1 rank", where=where, allowed="at least 2 for interleaved stages")
        if found.schedule not in SCHEDULES:
            raise InputError(f"schedule is {found.schedule!r:.40}", where=where, allowed=SCHEDULES)
        if stages % ranks or (stages > ranks) != (found.schedule == "interleaved" and bool(units)):
            several = "several numbers of units for each rank" if found.schedule == "interleaved" else "one for each"
            raise InputError(f"pipeline {text} has {stages} stages on {ranks} ranks", where=where, allowed=several)
        return found

    def __str__(self) -> str:
        """Return the layout as :meth:`parse` reads it."""
        schedule = f",schedule={self.schedule}" if self.schedule != SCHEDULES[0] else ""
        units = f",units={'/'.join(map(str, self.units))}" if self.units else ""
        return f"pipe={self.ranks}{schedule}{units}"

    @property
    def stages(self) -> int:
        """Return the number of stages: two for each rank if they are interleaved and not named."""
        return len(self.units) or self.ranks * (1 + (self.schedule == "interleaved"))

    def splits(self, stage: int) -> bool:
        """Return whether the backward passes of a stage come in two parts; no rank waits for the first stage's."""
        return self.schedule == "zero-bubble" and stage > 0


def is_pipeline(value: object) -> bool:
    """Return whether a value is the text of a layout."""
    try:
        return isinstance(value, str) and bool(Pipeline.parse(value))
    except InputError:
        return False


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of one micro-batch through one stage.

    Attributes:
        stage: number of the stage.
        micro: number of the micro-batch.
        backward: whether it is the backward pass.
        late: whether it is the second part of a backward pass in two parts, in which weights get their gradients.
    """

    stage: int
    micro: int
    backward: bool
    late: bool = False


def passes_of(pipeline: Pipeline, rank: int, micros: int) -> list[Pass]:
    """Return the passes of a rank in a step, in their order.

    1F1B: Narayanan et al., "PipeDream", SOSP 2019, and its interleaved form in "Efficient Large-Scale Language Model
    Training on GPU Clusters", SC 2021; GPipe: Huang et al., NeurIPS 2019; zero-bubble: ZB-H1 of Qi et al., "Zero Bubble
    Pipeline Parallelism", ICLR 2024, in which no rank has more micro-batches under way than the first.

    Args:
        pipeline: the layout.
        rank: number of the rank.
        micros: number of micro-batches; if stages are interleaved, a multiple of the ranks.

    Raises:
        ValueError: if micro-batches cannot be interleaved.
    """
    ranks, chunks = pipeline.ranks, pipeline.stages // pipeline.ranks
    if chunks > 1 and micros % ranks:
        raise ValueError(f"{micros} micro-batches cannot be interleaved on {ranks} ranks")

    def one(number: int, *, backward: bool) -> Pass:
        # Micro-batches go through the rank's stages in groups of as many as there are ranks.
        group, place = divmod(number, ranks * chunks)
        chunk, within = divmod(place, ranks) if chunks > 1 else (0, place)
        if chunks == 1:
            return Pass(rank, number, backward)
        chunk = chunks - 1 - chunk if backward else chunk
        return Pass(chunk * ranks + rank, group * ranks + within, backward)

    total = micros * chunks
    if pipeline.schedule == "gpipe":
        ahead = total
    elif chunks == 1:
        ahead = ranks - rank - 1
    else:
        ahead = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead, total)
    found = [one(number, backward=False) for number in range(ahead)]
    for number in range(total - ahead):
        found += [one(ahead + number, backward=False), one(number, backward=True)]
    found += [one(number, backward=True) for number in range(total - ahead, total)]
    return _in_two_parts(found, rank) if pipeline.splits(rank) else found


def _in_two_parts(passes: Sequence[Pass], waiting: int) -> list[Pass]:
    """Return the passes with the second parts of backward passes.

    Args:
        passes: the passes of one stage.
        waiting: how many micro-batches may wait for the second part.
    """
    found, late = list[Pass](), list[Pass]()
    for one in passes:
        found.append(one)
        if one.backward:
            late.append(replace(one, late=True))
            if len(late) > waiting:
                found.append(late.pop(0))
    return found + late


def unread(pipeline: Pipeline, rank: int, micros: int) -> list[tuple[Pass, ...]]:
    """Return for each pass of a rank the gradients that it has sent and that may not have been received by then.

    A gradient that the rank before has received by what it sends for the pass need not be waited for.

    Args:
        pipeline: the layout.
        rank: number of the rank.
        micros: number of micro-batches.

    Returns:
        For each of :func:`passes_of`, the backward passes whose gradients these are.

    Raises:
        ValueError: if micro-batches cannot be interleaved.
    """
    places = {one: place for place, one in enumerate(passes_of(pipeline, (rank - 1) % pipeline.ranks, micros))}
    sent, found = list[Pass](), list[tuple[Pass, ...]]()
    for one in passes_of(pipeline, rank, micros):
        if one.stage and not one.backward:
            reached = places[Pass(one.stage - 1, one.micro, backward=False)]
            sent = [own for own in sent if places[Pass(own.stage - 1, own.micro, backward=True)] > reached]
        found.append(tuple(sent))
        if one.stage and one.backward and not one.late:
            sent.append(one)
    return found


def last_parts(pipeline: Pipeline, passes: Sequence[Pass]) -> list[bool]:
    """Return for each pass whether its micro-batch has no other one in its stage, so that what it saved is released."""
    return [one.late or (one.backward and not pipeline.splits(one.stage)) for one in passes]


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """The predicted course of a step.

    Attributes:
        seconds: time from the first pass to the last.
        bubble: share of the ranks' time in which they wait.
        alive: for each rank, the most micro-batches that are between the forward and the backward pass of one of its
            stages at once.
    """

    seconds: float
    bubble: float
    alive: tuple[int, ...]


def predict(
    pipeline: Pipeline,
    micros: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float = 0.0,
    *,
    weights_s: Sequence[float] = (),
) -> PipelineStep:
    """Return how a step goes if each pass takes a constant time.

    Args:
        pipeline: the layout.
        micros: number of micro-batches.
        forward_s: seconds of the forward pass of a micro-batch in each stage.
        backward_s: seconds of its backward pass.
        send_s: seconds from the end of a pass to where its result is on the next rank.
        weights_s: seconds of the backward passes that may wait, because they are those of weights' gradients; none if
            not given.

    Raises:
        ValueError: if micro-batches cannot be interleaved.
    """
    orders = [passes_of(pipeline, rank, micros) for rank in range(pipeline.ranks)]

    def seconds_of(one: Pass) -> float:
        waits = weights_s[one.stage] if weights_s and pipeline.splits(one.stage) else 0.0
        if one.late:
            return waits
        return backward_s[one.stage] - waits if one.backward else forward_s[one.stage]

    ends: dict[Pass, float] = {}
    free, places = [0.0] * len(orders), [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                one = order[places[rank]]
                before = _needed_by(one, pipeline.stages - 1)
                if before is not None and before not in ends:
                    break
                ready = 0.0 if before is None else ends[before] + send_s * (before.stage != one.stage)
                free[rank] = ends[one] = max(free[rank], ready) + seconds_of(one)
                places[rank] += 1
                left -= 1
    seconds = max(free)
    busy = micros * (sum(forward_s) + sum(backward_s))
    bubble = max(1 - busy / (seconds * len(orders)), 0.0) if seconds else 0.0
    return PipelineStep(seconds, bubble, tuple(_most_alive(pipeline, order) for order in orders))


def _needed_by(one: Pass, last: int) -> Pass | None:
    """Return the pass whose result a pass needs; ``None`` for the first stage's forward pass."""
    if one.late:
        return replace(one, late=False)
    if not one.backward:
        return Pass(one.stage - 1, one.micro, backward=False) if one.stage else None
    return Pass(min(one.stage + 1, last), one.micro, backward=one.stage < last)


def _most_alive(pipeline: Pipeline, order: Sequence[Pass]) -> int:
    ends = zip(order, last_parts(pipeline, order), strict=True)
    return max(itertools.accumulate(-1 if last else int(not one.backward) for one, last in ends))


def divisions(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every division of units into stages that have at least one each.

    Args:
        units: number of units.
        stages: number of stages; at most that of units.
    """
    for inner in itertools.combinations(range(1, units), stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *inner, units)))


def balanced(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return the number of units of each stage for which the most expensive stage costs least.

    Args:
        costs: cost of each unit, such as its seconds, in the order of the model.
        stages: number of stages; at most that of units.
        first: cost of what the model computes before its units, in the first stage.
        last: cost of what it computes after them, in the last one.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    count = len(costs)

    def cost(begin: int, end: int, stage: int) -> float:
        return sums[end] - sums[begin] + first * (stage == 0) + last * (stage == stages - 1)

    # The least cost of the most expensive of the first stages, and where the last of them begins, by where it ends.
    best: list[dict[int, tuple[float, int]]] = [{end: (cost(0, end, 0), 0) for end in range(1, count - stages + 2)}]
    for stage in range(1, stages):
        ends = range(stage + 1, count - stages + stage + 2)
        best.append(
            {
                end: min((max(best[-1][begin][0], cost(begin, end, stage)), begin) for begin in best[-1] if begin < end)
                for end in ends
            }
        )
    borders = [count]
    for stage in reversed(range(stages)):
        borders.append(best[stage][borders[-1]][1])
    return tuple(end - begin for end, begin in itertools.pairwise(borders))[::-1]
