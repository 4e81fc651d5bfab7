"""Turn throughput into progress: how much a sample is worth at a batch size.

Source of every formula: Pollux (Qiao et al., OSDI 2021), section 3.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

# A number, or one per lane.
Number = TypeVar("Number", float, NDArray[np.float64])


def efficiency(batch: Number, noise_scale: Number, reference_batch: Number) -> Number:
    """Return the statistical efficiency of a batch against a reference batch.

    Args:
        batch: effective batch in samples.
        noise_scale: tr(Sigma)/|G|^2 in samples, >= 0.
        reference_batch: the batch whose efficiency is 1, in samples.

    Returns:
        (phi + m0)/(phi + m): 1 at the reference, less for larger batches, more for smaller ones.
    """
    return (noise_scale + reference_batch) / (noise_scale + batch)


def goodput(throughput: float, batch: float, noise_scale: float, reference_batch: float) -> float:
    """Return samples per second, weighted by what a sample is worth at that batch."""
    return throughput * efficiency(batch, noise_scale, reference_batch)


def optimal_batch(constant_s: float, per_sample_s: float, noise_scale: float) -> float:
    """Return the batch with the highest goodput where a step takes constant_s + per_sample_s x batch.

    Args:
        constant_s: seconds of a step that no sample adds to, >= 0.
        per_sample_s: seconds per sample, > 0.
        noise_scale: in samples, >= 0.

    Returns:
        sqrt(noise_scale constant_s / per_sample_s), in samples: where the derivative of
        B/(a + b B) x (phi + m)/(phi + B) vanishes, whatever the reference m.
    """
    return math.sqrt(noise_scale * constant_s / per_sample_s)
