"""Jobs for the paper's two tasks: the paper's own, or small ones that a CPU can train in minutes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autotune.catalog import load_job
from autotune.errors import InputError
from autotune.job import Job

CONVOLUTION, TRANSFORMER = "convolution network", "transformer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One of the paper's two tasks at one scale.

    Attributes:
        architecture: ``convolution network`` or ``transformer``.
        reference: the job's name.
        items: number of items that the paper counts per sample: 1 image, or the number of tokens.
        item_unit: unit of the throughput.
        quality_unit: unit in which the final quality is shown.
        quality: converts the job's metric to that unit.
        at_most: goal for an arm: largest ratio of its time to target to the baseline's.
    """

    architecture: str
    reference: str
    items: int
    item_unit: str
    quality_unit: str
    quality: Callable[[float], float]
    at_most: float

    @property
    def job(self) -> Job:
        """Return the job, with the learning-rate schedule of the paper's method."""
        return load_job(self.reference)

    @property
    def constant(self) -> Job:
        """Return the job at a constant learning rate: the paper's baseline has no warm-up and no schedule."""
        return replace(self.job, schedule=None)


SCALES: Mapping[str, Mapping[str, Experiment]] = MappingProxyType(
    {
        "cpu": {
            CONVOLUTION: Experiment(
                architecture=CONVOLUTION,
                reference="digits:adamw",
                items=1,
                item_unit="img/s",
                quality_unit="% accuracy",
                quality=lambda accuracy: 100 * accuracy,
                at_most=1 / 1.25,
            ),
            TRANSFORMER: Experiment(
                architecture=TRANSFORMER,
                reference="charlm",
                items=128,
                item_unit="bytes/s",
                quality_unit="perplexity of bytes",
                quality=math.exp,
                at_most=1 / 2,
            ),
        },
        "paper": {
            CONVOLUTION: Experiment(
                architecture=CONVOLUTION,
                reference="resnet50_cifar10",
                items=1,
                item_unit="img/s",
                quality_unit="% accuracy",
                quality=lambda accuracy: 100 * accuracy,
                at_most=1 / 1.36,
            ),
            TRANSFORMER: Experiment(
                architecture=TRANSFORMER,
                reference="gpt2_wikitext2",
                items=256,
                item_unit="tok/s",
                quality_unit="perplexity",
                quality=lambda perplexity: perplexity,
                at_most=1 / 1.31,
            ),
        },
    }
)


def experiments_of(scale: str) -> Mapping[str, Experiment]:
    """Return both tasks at one scale, by architecture.

    Raises:
        InputError: if there is no such scale.
    """
    if scale not in SCALES:
        raise InputError(f"scale is {scale!r}", where="--scale", allowed=tuple(SCALES))
    return SCALES[scale]
