"""Random profiles and jobs, for training policies, for benchmarks and for property-based tests.

Random profiles are structured like measured ones: similar blocks between an embedding and a head. Sizes, speed ratios
and kept tensors are drawn from wide ranges, so that some 16-bit formats are slower than fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.choices import DEFAULT_STORAGES
from autotune.cost_model.profile import FIXED, Boundary, Calibration, Cost, Profile, Segment, StepTable, choice_name
from autotune.job import WarmupCosine
from autotune.plan import Precision, Storage
from autotune.simulator.convergence import Convergence, Curve, NoiseLaw
from autotune.simulator.simulated_job import SimulatedJob
from autotune.units import Unit

# A CPU generator's state, which a recomputed unit keeps.
_STATE_BYTES = 5056


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The kind of profile to draw.

    Attributes:
        units: number of recomputable units, not counting the embedding and the head, which are never recomputed.
        accumulation_choices: allowed k.
        precisions: allowed precisions.
        identical: whether all recomputable units cost the same.
        batching: ``fixed`` or ``adaptive``.
        batch_size: samples in one batch.
        storages: allowed storages of recomputable units.
    """

    units: int = 6
    accumulation_choices: tuple[int, ...] = (1, 2, 4)
    precisions: tuple[Precision, ...] = (Precision.FP32, Precision.BF16)
    identical: bool = False
    batching: str = "fixed"
    batch_size: int = 32
    storages: tuple[Storage, ...] = DEFAULT_STORAGES

    def storages_of(self, unit: Unit) -> tuple[Storage, ...]:
        """Return the storages of a unit; one that is never recomputed saves."""
        return self.storages if unit.recomputable else (Storage.SAVE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """The costs of one unit for the whole batch in fp32, from which all other costs are derived."""

    seconds: float
    saved: float
    boundary: float
    workspace: float
    weights: float
    gains: dict[Precision, float]
    shrinks: dict[Precision, float]
    keeps_input: dict[Precision, bool]
    keeps_output: dict[Precision, bool]


def draw_profile(generator: np.random.Generator, shape: Shape) -> Profile:
    """Return a profile drawn at random.

    Args:
        generator: source of random numbers.
        shape: the kind of profile.
    """
    blocks = [_block(generator, shape.precisions)]
    for _ in range(shape.units):
        repeated = shape.identical and len(blocks) > 1
        blocks.append(blocks[1] if repeated else _block(generator, shape.precisions, blocks[-1].boundary))
    blocks.append(_block(generator, shape.precisions, blocks[-1].boundary))
    # The cost per step that does not depend on k: the update and, on several devices, the exchange of gradients.
    overhead = _log_uniform(generator, 0.01, 1.0) * sum(block.seconds for block in blocks)
    weights = sum(block.weights for block in blocks)
    names = ["embedding", *(f"blocks.{index}" for index in range(shape.units)), "head"]
    units = tuple(
        Unit(
            name=name,
            kind="Synthetic",
            recomputable=0 < index < len(names) - 1,
            parameter_names=(),
            num_parameters=int(block.weights / 4),
        )
        for index, (name, block) in enumerate(zip(names, blocks, strict=True))
    )
    return Profile(
        job="synthetic",
        device="synthetic",
        fingerprint="",
        batching=shape.batching,
        batch_size=shape.batch_size,
        units=units,
        accumulation_choices=shape.accumulation_choices,
        precisions=shape.precisions,
        static_bytes=int(3 * weights),
        tables=tuple(
            _table(units, blocks, k, shape, overhead, float(generator.uniform(0, 0.003)))
            for k in shape.accumulation_choices
        ),
        uniform_tables={},
        calibration=Calibration(),
        noise_frac=0.0,
        switch_s=0.0,
        seconds=0.0,
        steps=0,
    )


def draw_job(
    generator: np.random.Generator,
    *,
    depth: tuple[int, int] = (2, 48),
    precisions: tuple[Precision, ...] = (Precision.FP32, Precision.BF16),
    storages: tuple[Storage, ...] = DEFAULT_STORAGES,
) -> SimulatedJob:
    """Return a job drawn at random.

    Args:
        generator: source of random numbers.
        depth: smallest and largest number of recomputable units; the number is drawn log-uniformly between them.
        precisions: allowed precisions.
        storages: allowed storages of recomputable units.
    """
    units = round(_log_uniform(generator, depth[0], depth[1] + 1) - 0.5)
    profile = draw_profile(
        generator,
        Shape(
            units=min(max(units, depth[0]), depth[1]),
            accumulation_choices=((1, 2, 4), (1, 2, 4, 8), (1,))[generator.choice(3, p=(0.4, 0.4, 0.2))],
            precisions=precisions,
            storages=storages,
            identical=bool(generator.random() < 0.5),
            batching="adaptive" if generator.random() < 0.5 else "fixed",
            batch_size=int(2 ** generator.integers(3, 9)),
        ),
    )
    convergence = draw_convergence(generator, profile)
    loss = float(convergence.loss.at(_log_uniform(generator, 50, 500)))
    steps = convergence.steps_to(loss, profile.batch_size)
    return SimulatedJob(
        name=profile.job,
        profile=profile,
        convergence=convergence,
        target=loss,
        total_samples=1.5 * steps * profile.batch_size,
        schedule=WarmupCosine(),
    )


def draw_convergence(generator: np.random.Generator, profile: Profile) -> Convergence:
    """Return a random convergence model in which the noise scale grows from a fraction of a batch to several batches.

    Args:
        generator: source of random numbers.
        profile: the profile of the job.
    """
    drop = float(generator.uniform(1.0, 5.0))
    asymptote = float(generator.uniform(0.5, 2.0))
    loss = Curve(
        asymptote=asymptote,
        drop=drop,
        scale=_log_uniform(generator, 3, 60),
        exponent=float(generator.uniform(0.3, 0.9)),
    )
    start = profile.batch_size * _log_uniform(generator, 0.02, 2.0)
    return Convergence(
        loss=loss,
        metric=loss,
        noise=NoiseLaw(reference=start, reference_loss=asymptote + drop, exponent=float(generator.uniform(1.0, 6.0))),
        squared_errors={
            unit.name: {
                str(p): _log_uniform(generator, 1e-6, 1e-3) for p in profile.precisions if p is not Precision.FP32
            }
            for unit in profile.units
        },
    )


def _log_uniform(generator: np.random.Generator, low: float, high: float) -> float:
    """Return a number drawn log-uniformly between two bounds."""
    return math.exp(generator.uniform(math.log(low), math.log(high)))


def _block(generator: np.random.Generator, precisions: tuple[Precision, ...], received: float = 0.0) -> _Block:
    def spread(middle: float, factor: float) -> float:
        return float(middle * math.exp(generator.uniform(-1, 1) * math.log(factor)))

    boundary = spread(8e6, 4)
    return _Block(
        seconds=spread(0.02, 3),
        # A unit keeps its input tensor or a copy of it, so it saves more bytes than its input has.
        saved=max(boundary, received) * spread(6, 3),
        boundary=boundary,
        workspace=boundary * spread(1.5, 3),
        weights=spread(4e6, 5),
        gains={p: 1.0 if p is Precision.FP32 else spread(1.6, 2.2) for p in precisions},
        shrinks={p: 1.0 if p is Precision.FP32 else float(generator.uniform(0.5, 0.9)) for p in precisions},
        keeps_input={p: bool(generator.random() < 0.6) for p in precisions},
        keeps_output={p: bool(generator.random() < 0.3) for p in precisions},
    )


def _table(
    units: tuple[Unit, ...], blocks: list[_Block], k: int, shape: Shape, overhead: float, per_micro_batch: float
) -> StepTable:
    # Under fixed batching k splits the batch; under adaptive batching it multiplies the batch.
    share = 1.0 / k if shape.batching == "fixed" else 1.0
    repeats = 1 if shape.batching == "fixed" else k
    segments = [_between()]
    boundaries = []
    for index, (unit, block) in enumerate(zip(units, blocks, strict=True)):
        costs = {}
        for precision in shape.precisions:
            for storage in shape.storages_of(unit):
                costs[choice_name(precision, storage)] = _cost(block, precision, storage, share, repeats)
        segments += [Segment(unit=unit.name, gradient_bytes=int(block.weights), costs=costs), _between()]
        if index < len(units) - 1:
            boundaries.append(_boundary(index, units, blocks, shape, share))
    gradients = sum(int(block.weights) for block in blocks)
    return StepTable(
        accumulation_steps=k,
        micro_batch=-(-shape.batch_size // k) if shape.batching == "fixed" else shape.batch_size,
        segments=tuple(segments),
        boundaries=tuple(boundaries),
        update_peak_bytes=2 * gradients,
        update_s=overhead + per_micro_batch * k,
        batch_bytes=0,
    )


def _boundary(index: int, units: tuple[Unit, ...], blocks: list[_Block], shape: Shape, share: float) -> Boundary:
    """Return the boundary after a unit: its output, which this unit or the next one may keep."""
    own, following = blocks[index], blocks[index + 1]
    producer, consumer = 2 * index + 1, 2 * index + 3
    kept_after = [
        choice_name(p, storage)
        for storage in shape.storages_of(units[index + 1])
        for p in shape.precisions
        if storage.recomputes or following.keeps_input[p]
    ]
    kept_before = [
        choice_name(p, storage)
        for storage in shape.storages_of(units[index])
        for p in shape.precisions
        if own.keeps_output[p] and not storage.recomputes
    ]
    return Boundary(
        born=producer,
        last_use=consumer,
        size_bytes=int(own.boundary * share),
        held=False,
        keepers={producer: tuple(kept_before), consumer: tuple(kept_after)},
    )


def _between() -> Segment:
    nothing = Cost(forward_s=0.0, backward_s=0.0, saved_bytes=0, forward_peak_bytes=(0, 0), backward_peak_bytes=(0, 0))
    return Segment(unit=None, gradient_bytes=0, costs={FIXED: nothing})


def _cost(block: _Block, precision: Precision, storage: Storage, share: float, repeats: int) -> Cost:
    forward = block.seconds / 3 / block.gains[precision] * repeats
    saved = block.saved * block.shrinks[precision] * share
    around = (block.boundary + block.workspace) * share
    inside = saved * storage.kept_frac
    kept = inside + _STATE_BYTES * storage.recomputes
    # What is not saved as it is comes back in addition to what is kept.
    back = saved + around + block.boundary * share + kept * (storage is not Storage.SAVE)
    return Cost(
        forward_s=forward,
        backward_s=(2 + storage.extra_forwards) * forward,
        saved_bytes=int(kept),
        forward_peak_bytes=(int(inside + around),) * 2,
        backward_peak_bytes=(int(back), int(back + block.weights)),
    )
