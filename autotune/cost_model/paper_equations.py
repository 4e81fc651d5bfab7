"""The paper's equations, each as a function: cost (3), accumulation (4, 5, 9), memory (8, 17-20) and speed-up (21-23).

They assume equal layers and ideal accumulation. The project plans with measured costs; the paper's recipe and its
tables use these functions. The other equations are elsewhere: adaptive accumulation and its variance (6, 7) in
``cost_model.noise_scale``, warm-up and cosine (10) in ``job.WarmupCosine``, learning-rate scaling (11) in
``cost_model.learning_rate``, fp32 masters and loss scaling (13-16) in ``mechanics``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of time, memory and energy in the objective.

    Attributes:
        time: w1.
        memory: w2.
        energy: w3; a positive weight needs an energy reading.
    """

    time: float = 1.0
    memory: float = 0.0
    energy: float = 0.0

    def __post_init__(self) -> None:
        values = (self.time, self.memory, self.energy)
        if any(not math.isfinite(value) or value < 0 for value in values) or sum(values) == 0:
            raise ValueError("weights must be finite, not negative, and not all zero")

    @classmethod
    def parse(cls, text: str) -> Weights:
        """Read ``TIME,MEMORY,ENERGY``, as in ``1,0,0.5``.

        Raises:
            InputError: if the text is not three numbers, none negative and not all 0.
        """
        try:
            time, memory, energy = (float(part) for part in text.split(","))
            return cls(time=time, memory=memory, energy=energy)
        except ValueError as error:
            raise InputError(
                f"is {text!r}",
                where="--weights",
                allowed="three numbers w1,w2,w3 for time, memory and energy, none negative and not all 0",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The three constraints of eq. 3; ``None`` disables one.

    On the command line, they are the job's ``target``, ``--memory-budget`` and ``--gradient-norm``.

    Attributes:
        target_loss: upper bound of L(theta*).
        memory_budget: upper bound of M.
        gradient_norm: upper bound of the gradient's norm.
    """

    target_loss: float | None = None
    memory_budget: float | None = None
    gradient_norm: float | None = None

    def met(self, *, loss: float, memory: float, gradient_norm: float) -> bool:
        """Return whether all constraints are met; NaN meets none."""
        pairs = (
            (loss, self.target_loss),
            (memory, self.memory_budget),
            (gradient_norm, self.gradient_norm),
        )
        return all(limit is None or value <= limit for value, limit in pairs)


def cost(time: float, memory: float, energy: float | None, weights: Weights) -> float:
    """Return C = w1 T + w2 M + w3 E.

    Args:
        time: T relative to the baseline's.
        memory: M relative to the baseline's.
        energy: E relative to the baseline's; ``None`` if it was not measured.
        weights: w1, w2, w3.

    Raises:
        ValueError: if energy has a weight but was not measured.

    Source: eq. 3 of the paper.
    """
    if weights.energy > 0 and energy is None:
        raise ValueError("energy has a weight but was not measured")
    return weights.time * time + weights.memory * memory + weights.energy * (energy or 0.0)


def accumulated_gradient(gradients: Sequence[float]) -> float:
    """Return one coordinate of the mean of k micro-batch gradients.

    Source: eq. 4 of the paper. It is correct only for micro-batches of equal size; ``mechanics.stepping`` weights each
    by its number of items that contribute to the loss.
    """
    return sum(gradients) / len(gradients)


def gradient_step(weight: float, gradient: float, learning_rate: float) -> float:
    """Return one coordinate after plain gradient descent. Source: eq. 5 of the paper."""
    return weight - learning_rate * gradient


def total_memory(model: float, optimizer: float, activation: float, k: int) -> float:
    """Return M_model + M_optimizer + M_activation/k, in the unit of its arguments.

    Source: eq. 8 of the paper. An idealisation: it assumes a fixed batch split into k, and ignores gradients, workspace
    and whatever does not shrink with the micro-batch.
    """
    return model + optimizer + activation / k


def optimal_accumulation(throughput: Mapping[int, float], memory: Mapping[int, float]) -> int:
    """Return the k with the largest throughput per byte; the smallest such k on a tie.

    Source: eq. 9 of the paper.
    """
    return max(sorted(throughput), key=lambda k: throughput[k] / memory[k])


def clipped(gradient_norm: float, limit: float) -> float:
    """Return the factor that clipping applies to a gradient: min(1, limit/norm).

    Source: eq. 12 of the paper.
    """
    return 1.0 if gradient_norm <= limit else limit / gradient_norm


def precision_savings(weights: float, gradients: float) -> float:
    """Return the memory that 16-bit weights and gradients would save, in the unit of its arguments.

    Source: eq. 17 of the paper. With fp32 master weights and gradients, as here, none of this is saved; only
    activations shrink.
    """
    return 0.5 * (weights + gradients)


def stored_activations(layers: Sequence[float]) -> float:
    """Return the bytes of all activations. Source: eq. 18 of the paper."""
    return sum(layers)


def checkpointed_activations(layer: float, num_layers: int) -> float:
    """Return the bytes of activations with sqrt(L) kept layers of equal size. Source: eq. 19 of the paper."""
    return math.ceil(math.sqrt(num_layers)) * layer if num_layers else 0.0


def recomputation(forward: float, num_layers: int) -> float:
    """Return the forward work repeated when all but the sqrt(L) kept layers are recomputed.

    Args:
        forward: forward cost of one layer.
        num_layers: L, layers of equal cost.

    Source: Chen et al. 2016 (arXiv:1604.06174), section 4.1. Eq. 20 of the paper states O(sqrt(L)) layers instead,
    which the memory of eq. 19 does not allow: layers that are neither kept nor recomputed have no activations.
    """
    return (num_layers - math.ceil(math.sqrt(num_layers))) * forward if num_layers else 0.0


def kept_layers(num_layers: int) -> tuple[int, ...]:
    """Return which of L layers keep their activations: ceil(sqrt(L)) of them, evenly spaced.

    The last layer is always kept: its backward pass runs first, so recomputing it would save nothing.

    Source: eq. 19 of the paper; Chen et al. 2016 (arXiv:1604.06174), algorithm 1 at the granularity of layers.
    """
    if num_layers < 1:
        return ()
    kept = math.ceil(math.sqrt(num_layers))
    return tuple(sorted({num_layers - 1 - (index * num_layers) // kept for index in range(kept)}))


def net_speedup(throughput_gain: float, recomputation_overhead: float) -> float:
    """Return throughput gain over 1 + recomputation overhead. Source: eq. 21 of the paper."""
    return throughput_gain / (1 + recomputation_overhead)


def efficiency_after(cycles: float, gain: float) -> float:
    """Return the efficiency after some optimization cycles, as a multiple of today's.

    Args:
        cycles: t/T_cycle, the number of cycles.
        gain: factor per cycle.

    Source: eq. 22 of the paper, which leaves the length of a cycle, T_cycle, undefined.
    """
    return math.pow(gain, cycles)


def cycles_to_double(gain: float) -> float | None:
    """Return the cycles after which the efficiency has doubled; ``None`` if a cycle gains nothing.

    Args:
        gain: factor per cycle.

    Source: eq. 22 of the paper, solved for a factor of 2. Eq. 23 does the same for a cycle of 5 months, a length that
    the paper takes from the target it argues for; 5 log(2)/log(1.26) is 15.0 months, not 14.8.
    """
    return math.log(2) / math.log(gain) if gain > 1 else None
