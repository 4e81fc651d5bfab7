"""Gradient variance and noise scale, and the accumulation that the paper derives from the variance.

Pure functions of squared norms, which ``mechanics.gradient_stats`` measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Relative standard error of the average |G|^2 down to which its window grows, and the longest window in samples.
RELATIVE_ERROR = 0.2
LONGEST_WINDOW = 400


def gradient_variance(
    micro_squares: Sequence[float], mean_square: float, shares: Sequence[float] | None = None
) -> float:
    """Return the sample variance of micro-batch gradients.

    Args:
        micro_squares: |g_j|^2 of each of the k >= 2 micro-batch gradients (each a mean over its items).
        mean_square: |sum w_j g_j|^2, the squared norm of the whole gradient.
        shares: w_j, each micro-batch's share of the items; ``None`` for equal shares.

    Returns:
        sum w_j |g_j - mean|^2 / (1 - sum w_j^2), never below 0; for equal shares (1/(k-1)) sum |g_j - mean|^2.

    Raises:
        ValueError: for fewer than two micro-batches.

    Source: eq. 7 of the paper for equal shares, expanded so that only norms are needed; for unequal shares, the usual
    correction for the effective number of micro-batches.
    """
    k = len(micro_squares)
    if k < 2:
        raise ValueError("a variance needs at least two micro-batches")
    weights = [1 / k] * k if shares is None else shares
    spread = sum(w * square for w, square in zip(weights, micro_squares, strict=True)) - mean_square
    return max(spread / (1 - sum(w * w for w in weights)), 0.0)


def adaptive_accumulation(variance: float, target_std: float, k_max: int, *, epsilon: float = 1e-12) -> int:
    """Return the variance-aware number of accumulation steps, at least 1.

    Args:
        variance: sigma^2 of eq. 7.
        target_std: sigma_target, the standard deviation to reach by averaging.
        k_max: the largest k allowed.
        epsilon: keeps the quotient finite.

    Source: eq. 6 of the paper.
    """
    ratio = variance / (target_std**2 + epsilon)
    return max(1, min(k_max, math.ceil(ratio) if math.isfinite(ratio) else k_max))


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """Unbiased estimates from two batch sizes in one step.

    Attributes:
        trace: estimate of tr(Sigma), the trace of the per-sample gradient covariance; may be negative.
        square: estimate of |G|^2 of the true gradient; may be negative.
    """

    trace: float
    square: float


def noise_sample(micro_squares: Sequence[float], micro_samples: Sequence[int], whole_square: float) -> NoiseSample:
    """Return unbiased estimates of tr(Sigma) and |G|^2 from micro-batches and the whole batch.

    Args:
        micro_squares: |g_j|^2 of each micro-batch's mean gradient.
        micro_samples: samples in each micro-batch.
        whole_square: |g|^2 of the whole batch's mean gradient.

    Raises:
        ValueError: unless there are at least two micro-batches of at least one sample each.

    Source: McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: E|g_B|^2 = |G|^2 + tr(Sigma)/B.
    """
    if len(micro_squares) < 2 or len(micro_squares) != len(micro_samples) or min(micro_samples) < 1:
        raise ValueError("two batch sizes need at least two micro-batches of at least one sample")
    small = sum(micro_squares) / len(micro_squares)
    inverse_small = sum(1 / n for n in micro_samples) / len(micro_samples)
    inverse_large = 1 / sum(micro_samples)
    trace = (small - whole_square) / (inverse_small - inverse_large)
    return NoiseSample(trace=trace, square=whole_square - trace * inverse_large)


@dataclass(frozen=True, slots=True)
class NoiseScaleAverage:
    """Moving averages of the numerator and the denominator of the noise scale.

    The averaging window is short at first and grows to ``1/(1-decay)`` samples, since |G|^2 falls steeply early in
    training and a long window would lag behind. It grows further, up to ``LONGEST_WINDOW``, while |G|^2 is known worse
    than ``RELATIVE_ERROR``: steps of few samples tell so little of it that the quotient of short averages is often much
    too large, or absent, although numerator and denominator are unbiased.

    Attributes:
        trace: average of tr(Sigma).
        square: average of |G|^2.
        count: samples averaged so far.
        decay: the largest weight of the previous average where |G|^2 is certain.
        spread: variance of the samples of |G|^2.
    """

    trace: float = 0.0
    square: float = 0.0
    count: int = 0
    decay: float = 0.9
    spread: float = 0.0

    def updated(self, sample: NoiseSample) -> NoiseScaleAverage:
        """Return the average with one more sample; a sample that is not finite is ignored."""
        if not (math.isfinite(sample.trace) and math.isfinite(sample.square)):
            return self
        past = min(self._longest_memory(), self.count / (self.count + 1.0))
        deviation = sample.square - self.square if self.count else 0.0
        return NoiseScaleAverage(
            trace=past * self.trace + (1 - past) * sample.trace,
            square=past * self.square + (1 - past) * sample.square,
            count=self.count + 1,
            decay=self.decay,
            spread=past * (self.spread + (1 - past) * deviation * deviation),
        )

    def _longest_memory(self) -> float:
        """Return the weight of the previous average once there are enough samples."""
        wanted = self.spread / max(self.square, 1e-300) / max(self.square, 1e-300) / RELATIVE_ERROR**2
        return max(self.decay, 1 - 1 / min(max(wanted, 1.0), LONGEST_WINDOW))

    @property
    def noise_scale(self) -> float | None:
        """Return tr(Sigma)/|G|^2 in samples; ``None`` while either average is not positive."""
        if self.count == 0 or self.trace <= 0 or self.square <= 0:
            return None
        return self.trace / self.square
