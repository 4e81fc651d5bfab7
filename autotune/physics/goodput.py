"""Turn throughput into progress: how much a sample is worth at a batch size.

Source of every formula: Pollux (Qiao et al., OSDI 2021), section 3.
"""

from __future__ import annotations


def efficiency(batch: float, noise_scale: float, reference_batch: float) -> float:
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
