"""Decide by rules that people use by hand: the arms that every comparison can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autotune.agents.policy import Policy, StaticPolicy
from autotune.cost_model.noise_scale import adaptive_accumulation
from autotune.cost_model.paper_equations import kept_layers
from autotune.gym.observation import Observation
from autotune.job import Job
from autotune.plan import Plan, PlanSpace, Precision

# The paper sets k to 4 or 8; under fixed batching, where eq. 6 has nothing to act on, its smaller value.
PAPER_ACCUMULATION = 4
# Steps from which the paper arm learns the variance that its target is set by.
_PAPER_LEARNING_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule.

    Attributes:
        plan: the plan that the rule makes for a space.
        precision_reason: why units compute as they do.
        storage_reason: why units are recomputed or not.
        accumulation_reason: why k is what it is.
    """

    plan: Callable[[PlanSpace], Plan]
    precision_reason: str
    storage_reason: str
    accumulation_reason: str


def _baseline(space: PlanSpace) -> Plan:
    return space.baseline()


def _uniform_16_bit(space: PlanSpace) -> Plan:
    return space.plan(accumulation_steps=space.accumulation_choices[0], precision=space.lowest_precision)


def _recompute_all(space: PlanSpace) -> Plan:
    return space.plan(
        accumulation_steps=space.accumulation_choices[0],
        precision=space.lowest_precision,
        recomputed=space.recomputable,
    )


def _sqrt(space: PlanSpace) -> Plan:
    return space.plan(
        accumulation_steps=space.accumulation_choices[0],
        precision=space.precisions[0],
        recomputed=sqrt_recomputed(space),
    )


def _paper(space: PlanSpace) -> Plan:
    return space.plan(
        accumulation_steps=nearest_accumulation(space, PAPER_ACCUMULATION),
        precision=paper_precision(space),
        recomputed=sqrt_recomputed(space),
    )


def paper_precision(space: PlanSpace) -> Precision:
    """Return the paper's precision: fp16, or what there is of 16 bits where the device has no fast fp16."""
    return Precision.FP16 if Precision.FP16 in space.precisions else space.lowest_precision


def sqrt_recomputed(space: PlanSpace) -> tuple[str, ...]:
    """Return the units that sqrt(L) placement recomputes: all but ceil(sqrt(L)) at even distances."""
    kept = kept_layers(len(space.recomputable))
    return tuple(name for index, name in enumerate(space.recomputable) if index not in kept)


def nearest_accumulation(space: PlanSpace, wanted: int) -> int:
    """Return the largest allowed k that is at most the wanted one."""
    return max(k for k in space.accumulation_choices if k <= max(wanted, space.accumulation_choices[0]))


_SQRT_REASON = "all but ceil(sqrt(L)) units, at even distances, are recomputed (eq. 19)"
_KEEP = "nothing is recomputed"
_ONE = "one micro-batch per step"

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "baseline": Rule(
            plan=_baseline,
            precision_reason="the reference computes in fp32",
            storage_reason=_KEEP,
            accumulation_reason=_ONE,
        ),
        "uniform-bf16": Rule(
            plan=_uniform_16_bit,
            precision_reason="every unit computes in 16 bits",
            storage_reason=_KEEP,
            accumulation_reason=_ONE,
        ),
        "recompute-all": Rule(
            plan=_recompute_all,
            precision_reason="every unit computes in 16 bits",
            storage_reason="every unit that can be is recomputed",
            accumulation_reason=_ONE,
        ),
        "sqrt": Rule(
            plan=_sqrt,
            precision_reason="placement alone: fp32",
            storage_reason=_SQRT_REASON,
            accumulation_reason=_ONE,
        ),
        "paper": Rule(
            plan=_paper,
            precision_reason="16 bits everywhere (bf16 where the device has no fast fp16)",
            storage_reason=_SQRT_REASON,
            accumulation_reason="k = 4 under fixed batching; eq. 6 under adaptive batching",
        ),
    }
)


def rule_policy(name: str, space: PlanSpace, job: Job) -> Policy:
    """Return the policy of a rule for a job: static, but for the paper's under adaptive batching."""
    plan = RULES[name].plan(space)
    if name == "paper" and job.batching == "adaptive" and len(space.accumulation_choices) > 1:
        return PaperPolicy(space, plan)
    return StaticPolicy(name, plan)


class PaperPolicy:
    """Follow the paper's variance-aware accumulation (eqs. 6 and 7) under adaptive batching.

    sigma_target is set once, so that the mean variance of the first ten steps gives k = 4; from then on k follows
    eq. 6, rounded down to an allowed choice.

    Args:
        space: the plans that can be applied.
        plan: the plan to begin with, whose precision and storage stay.
    """

    name = "paper"

    def __init__(self, space: PlanSpace, plan: Plan) -> None:
        self.plan = plan
        self._space = space
        self._target_std: float | None = None
        self._seen: list[float] = []
        self._steps = 0

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan with the k that eq. 6 gives for the variance last seen."""
        variance = observation.gradient.variance
        if variance is None:
            return self.plan
        if self._target_std is None:
            self._seen.append(variance)
            self._steps += observation.window.steps
            if self._steps < _PAPER_LEARNING_STEPS:
                return self.plan
            mean = sum(self._seen) / len(self._seen)
            self._target_std = (mean / PAPER_ACCUMULATION) ** 0.5
        largest = self._space.accumulation_choices[-1]
        # k = 1 would end the estimate of eq. 7, which needs two micro-batches.
        wanted = max(adaptive_accumulation(variance, self._target_std, largest), 2)
        return self.plan.changed(accumulation_steps=nearest_accumulation(self._space, wanted))

    def reset(self) -> None:
        """Forget the variances of a former run."""
        self._target_std = None
        self._seen = []
        self._steps = 0
