"""Compute statistics of the gradients of a sampled step.

One hook per parameter records the norm of each micro-batch's gradient while the step runs; all values stay on the
device until one transfer at the end. The hooks are removed after the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from autotune.cost_model.noise_scale import NoiseScaleAverage, gradient_variance, noise_sample
from autotune.measurement import GradientStatistics, UnitGradient
from autotune.units import Unit

# The smallest subnormal of IEEE half precision.
_FP16_SMALLEST = 2.0**-24
# Entries of each parameter from which the underflow fraction is estimated: enough for two digits.
_UNDERFLOW_SAMPLE = 1024


class GradientProbe:
    """Probe of one optimizer step, from before its first backward pass until after unscaling.

    Use it as a context manager around the step's backward passes, and call :meth:`next_micro_batch` before each.

    Args:
        parameters: the trained parameters.
        whole: whether the step has only one micro-batch, whose norms need no hooks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, whole: bool = False) -> None:
        self._whole = whole
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._norms: list[list[torch.Tensor | None]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> GradientProbe:
        for index, parameter in enumerate(() if self._whole else self._parameters):
            self._handles.append(parameter.register_hook(self._note(index)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def next_micro_batch(self) -> None:
        """Begin recording the norms of the next micro-batch."""
        if self._whole:
            return
        self._norms.append([None] * len(self._parameters))

    def _note(self, index: int) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            # Computed at once: a kept reference would make autograd copy the gradient.
            self._norms[-1][index] = torch.linalg.vector_norm(_values_of(gradient.detach())).float()

        return hook

    def read(self) -> ProbedStep:
        """Return the squared norms of the step, after unscaling and before clipping; one device transfer."""
        present = [index for index, p in enumerate(self._parameters) if p.grad is not None]
        gradients = [_values_of(g) for index in present if (g := self._parameters[index].grad) is not None]
        if not gradients:
            return ProbedStep(parameters=(), sizes=(), micro=(), whole=(), tiny=(), present=())
        zero = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
        norms = [norm.float() for norm in torch._foreach_norm(gradients)]
        tiny, some = tiny_counts(gradients)
        rows = [torch.stack(row) for row in (*self._rows(present, zero), norms)]
        table = torch.stack([*rows, tiny, some]).tolist()
        *micro, whole, few, many = table
        return ProbedStep(
            parameters=tuple(self._parameters[index] for index in present),
            sizes=tuple(self._parameters[index].numel() for index in present),
            micro=tuple(tuple(value**2 for value in row) for row in micro),
            whole=tuple(value**2 for value in whole),
            tiny=tuple(few),
            present=tuple(many),
        )

    def _rows(self, present: Sequence[int], zero: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[zero if (norm := row[index]) is None else norm for index in present] for row in self._norms]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedStep:
    """Results of a probe by parameter.

    Attributes:
        parameters: the parameters with gradients.
        sizes: their numbers of entries.
        micro: squared norm of the accumulated gradient by micro-batch and parameter, including the weight n_j/N and
            the loss scale. Empty if the step has only one micro-batch.
        whole: per parameter, the squared norm of the whole step's true gradient.
        tiny: per parameter, non-zero entries below fp16's smallest number (estimated from a sample).
        present: per parameter, non-zero entries (estimated from the same sample).
    """

    parameters: tuple[nn.Parameter, ...]
    sizes: tuple[int, ...]
    micro: tuple[tuple[float, ...], ...]
    whole: tuple[float, ...]
    tiny: tuple[float, ...]
    present: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """State that remains after a sampled step.

    Attributes:
        average: moving averages from which the noise scale is computed.
        latest: the statistics of the last sampled step.
        sampled_at: number of the last sampled step; -1 before the first.
        learnt_at: number of the last step that updated the noise scale; ``None`` before the first.
    """

    average: NoiseScaleAverage = field(default_factory=NoiseScaleAverage)
    latest: GradientStatistics | None = None
    sampled_at: int = -1
    learnt_at: int | None = None


class GradientMonitor:
    """Converter of probed steps to statistics, with their moving averages.

    Attributes:
        state: the averages and latest statistics; assigning an earlier state undoes later steps.

    Args:
        model: the model whose parameters the units name.
        units: the units by which statistics are grouped.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        parameters = dict(model.named_parameters())
        self._unit_of = {
            id(parameters[name]): unit.name for unit in units for name in unit.parameter_names if name in parameters
        }
        self.state = MonitorState()

    def observe(
        self,
        probed: ProbedStep,
        *,
        step: int,
        norm: float,
        micro_samples: Sequence[int],
        scales: Sequence[float],
    ) -> None:
        """Add one sampled step.

        Args:
            probed: results of the probe.
            step: number of the optimizer step.
            norm: 2-norm of the whole unscaled gradient.
            micro_samples: number of samples of each micro-batch.
            scales: factor on each micro-batch's mean gradient: n_j/N times the loss scale.
        """
        self.state = replace(self.state, sampled_at=step)
        if not math.isfinite(norm) or not probed.parameters:
            return
        pairs = zip(probed.micro, scales, strict=bool(probed.micro))
        micro = [[square / scale**2 for square in row] for row, scale in pairs]
        average, learnt_at = self.state.average, self.state.learnt_at
        variance = None if self.state.latest is None else self.state.latest.variance
        totals = [sum(row) for row in micro]
        if len(micro) >= 2 and all(math.isfinite(total) for total in totals):
            whole, shares = sum(probed.whole), [scale / sum(scales) for scale in scales]
            average = average.updated(noise_sample(totals, micro_samples, whole))
            variance = gradient_variance(totals, whole, shares)
            learnt_at = step
        latest = GradientStatistics(
            norm=norm,
            noise_scale=average.noise_scale,
            noise_scale_age_steps=None if learnt_at is None else step - learnt_at,
            variance=variance,
            per_unit=self._per_unit(probed, micro, micro_samples),
        )
        self.state = MonitorState(average=average, latest=latest, sampled_at=step, learnt_at=learnt_at)

    def aged(self, step: int) -> GradientStatistics | None:
        """Return the latest statistics, with the noise scale's age as of ``step``."""
        latest, learnt_at = self.state.latest, self.state.learnt_at
        if latest is None or learnt_at is None:
            return latest
        return replace(latest, noise_scale_age_steps=step - learnt_at)

    def _per_unit(
        self, probed: ProbedStep, micro: Sequence[Sequence[float]], micro_samples: Sequence[int]
    ) -> Mapping[str, UnitGradient]:
        columns: dict[str, list[int]] = {}
        for index, parameter in enumerate(probed.parameters):
            name = self._unit_of.get(id(parameter))
            if name is not None:
                columns.setdefault(name, []).append(index)
        return {name: _unit_gradient(probed, micro, micro_samples, indices) for name, indices in columns.items()}


def _unit_gradient(
    probed: ProbedStep, micro: Sequence[Sequence[float]], micro_samples: Sequence[int], indices: Sequence[int]
) -> UnitGradient:
    sizes = [probed.sizes[index] for index in indices]
    whole = sum(probed.whole[index] for index in indices)
    return UnitGradient(
        rms=math.sqrt(whole / sum(sizes)),
        signal_to_noise=_signal_to_noise([sum(row[i] for i in indices) for row in micro], micro_samples, whole),
        underflow_frac=min(
            sum(probed.tiny[index] for index in indices) / max(sum(probed.present[index] for index in indices), 1e-9),
            1.0,
        ),
    )


def _signal_to_noise(squares: Sequence[float], micro_samples: Sequence[int], whole: float) -> float | None:
    if len(squares) < 2 or not all(math.isfinite(square) for square in squares):
        return None
    sample = noise_sample(squares, micro_samples, whole)
    noise = sample.trace / sum(micro_samples)
    return max(sample.square, 0.0) / noise if noise > 0 else None


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the entries of a sparse gradient, which are all but zeros; another gradient itself."""
    if gradient.layout is torch.strided:
        return gradient
    values = gradient.coalesce().values()
    return values if values.numel() else values.new_zeros(1)


def tiny_counts(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate each gradient's non-zero entries below fp16's range, and all non-zero ones, from a strided sample."""
    views = [g.detach().reshape(-1)[:: max(g.numel() // _UNDERFLOW_SAMPLE, 1)].abs() for g in gradients]
    flat = torch.cat([view.float() for view in views])
    # A cumulative sum computes the counts of all parameters in a few kernels.
    ends = torch.tensor([view.numel() for view in views], device=flat.device).cumsum(0) - 1
    ratios = [g.numel() / view.numel() for g, view in zip(gradients, views, strict=True)]
    strides = torch.tensor(ratios, dtype=torch.float32, device=flat.device)
    tiny = torch.cumsum((flat > 0) & (flat < _FP16_SMALLEST), 0)
    some = torch.cumsum(flat > 0, 0)
    return _differences(tiny[ends]) * strides, _differences(some[ends]) * strides


def _differences(totals: torch.Tensor) -> torch.Tensor:
    return torch.diff(totals, prepend=totals.new_zeros(1)).float()
