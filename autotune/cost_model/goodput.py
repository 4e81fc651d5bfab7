"""Statistical efficiency: the progress of a step or a sample at a batch size and a gradient noise scale.

Both efficiencies express one law in different units: per step, relative to a step without noise; per sample, relative
to a reference batch.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

# A number, or one per lane.
Number = TypeVar("Number", float, NDArray[np.float64])


def step_efficiency(batch: Number, noise_scale: Number, squared_error: Number | float = 0.0) -> Number:
    """Return the progress of a step as a fraction of a noise-free step's; above 0 and at most 1.

    Args:
        batch: effective batch in samples, > 0.
        noise_scale: tr(Sigma)/|G|^2 in samples, >= 0.
        squared_error: squared relative error that low precision adds to the gradient, >= 0.

    Source: McCandlish et al. 2018 (arXiv:1812.06162), eq. 2.7: 1/(1 + phi/B). Rounding adds a variance of e^2 times the
    expected square of the gradient, |G|^2 (1 + phi/B), so the fraction becomes 1/((1 + phi/B)(1 + e^2)).
    """
    return 1.0 / ((1.0 + noise_scale / batch) * (1.0 + squared_error))


def efficiency(batch: Number, noise_scale: Number, reference_batch: Number) -> Number:
    """Return the progress per sample in a batch, relative to that in a reference batch.

    Args:
        batch: effective batch in samples.
        noise_scale: tr(Sigma)/|G|^2 in samples, >= 0.
        reference_batch: the batch whose efficiency is 1, in samples.

    Returns:
        (phi + m0)/(phi + m): 1 at the reference, less for larger batches, more for smaller ones.

    Source: Pollux (Qiao et al., OSDI 2021), section 3.
    """
    return (noise_scale + reference_batch) / (noise_scale + batch)


def goodput(throughput: float, batch: float, noise_scale: float, reference_batch: float) -> float:
    """Return samples per second, each weighted by its efficiency at that batch. Source: Pollux, section 3."""
    return throughput * efficiency(batch, noise_scale, reference_batch)
