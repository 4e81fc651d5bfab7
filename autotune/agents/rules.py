"""The registry of hand-made rules, which every comparison can include.

To add a rule, add an entry here, or an entry point ``autotune.rules`` in another package: a function that makes a plan
for a space, or a :class:`Rule`, which can also give reasons and an adaptive policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.agents.entry_points import RULE_GROUP, Registry
from autotune.agents.policies import with_named_errors
from autotune.agents.policy import Policy, StaticPolicy
from autotune.cost_model.noise_scale import adaptive_accumulation
from autotune.cost_model.paper_equations import kept_layers
from autotune.gym.observation import Observation
from autotune.job import Job
from autotune.plan import Plan, PlanSpace, Precision

# The paper sets k to 4 or 8; the smaller value is used under fixed batching, where eq. 6 does not apply.
PAPER_ACCUMULATION = 4
# Steps over which the paper's policy averages the variance that sets its target.
_PAPER_LEARNING_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule.

    Attributes:
        plan: returns the rule's plan for a space.
        precision_reason: why units compute in their precision.
        unreduced_reason: the same for a unit that computes in fp32 although the rule means 16 bits; empty for a rule
            that does not.
        storage_reason: why units are recomputed or not.
        accumulation_reason: why k has its value.
        adaptive: returns the policy that changes the plan under adaptive batching; ``None`` if the plan never changes.
    """

    plan: Callable[[PlanSpace], Plan]
    precision_reason: str = "chosen by the rule"
    unreduced_reason: str = ""
    storage_reason: str = "chosen by the rule"
    accumulation_reason: str = "chosen by the rule"
    adaptive: Callable[[PlanSpace, Plan], Policy] | None = None


def _as_rule(given: Any) -> Rule:
    if isinstance(given, Rule):
        return given
    if not callable(given):
        raise TypeError(f"expected a function that makes a plan for a space, or a Rule, got {type(given).__name__}")
    return Rule(plan=given)


RULES: Registry[Rule] = Registry("rule", RULE_GROUP, _as_rule)


def rule_plan(name: str, space: PlanSpace) -> Plan:
    """Return the plan that a rule makes for a space.

    Raises:
        InputError: if the rule is unknown, its package cannot be loaded, or its plan is not in the space.
    """
    rule = RULES[name]
    with RULES.errors_named(name):
        return space.check(rule.plan(space), where=f"rule {name}")


def rule_policy(name: str, space: PlanSpace, job: Job) -> Policy:
    """Return the policy of a rule for a job; the plan can change only under adaptive batching.

    Raises:
        InputError: as for :func:`rule_plan`.
    """
    plan, adaptive = rule_plan(name, space), RULES[name].adaptive
    if adaptive is not None and job.batching == "adaptive" and len(space.accumulation_choices) > 1:
        with RULES.errors_named(name):
            return with_named_errors(RULES, name, adaptive(space, plan))
    return StaticPolicy(name, plan)


def paper_precision(space: PlanSpace) -> Precision:
    """Return the paper's precision: fp16, or another 16-bit precision where the device has no fast fp16."""
    return Precision.FP16 if Precision.FP16 in space.precisions else space.lowest_precision


def sqrt_recomputed(space: PlanSpace) -> tuple[str, ...]:
    """Return the units that sqrt(L) placement recomputes: all but ceil(sqrt(L)) evenly spaced ones."""
    kept = kept_layers(len(space.recomputable))
    return tuple(name for index, name in enumerate(space.recomputable) if index not in kept)


def nearest_accumulation(space: PlanSpace, wanted: int) -> int:
    """Return the largest allowed k up to the wanted one, or the smallest allowed k if all are larger."""
    return max(k for k in space.accumulation_choices if k <= max(wanted, space.accumulation_choices[0]))


class PaperPolicy:
    """The paper's variance-aware accumulation (eqs. 6 and 7) under adaptive batching.

    sigma_target is set once, so that the mean variance of the first ten steps gives k = 4. Then k follows eq. 6,
    rounded down to an allowed choice, but at least 2.

    Args:
        space: the plans that can be applied.
        plan: the initial plan, whose precision and storage do not change.
    """

    name = "paper"

    def __init__(self, space: PlanSpace, plan: Plan) -> None:
        self.plan = plan
        self._space = space
        self._target_std: float | None = None
        self._seen: list[float] = []
        self._steps = 0

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan with the k that eq. 6 gives for the last observed variance."""
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
        # Eq. 7 needs two micro-batches, so k = 1 would end its estimates.
        wanted = max(adaptive_accumulation(variance, self._target_std, largest), 2)
        return self.plan.changed(accumulation_steps=nearest_accumulation(self._space, wanted))

    def reset(self) -> None:
        """Forget the variances of an earlier run."""
        self._target_std = None
        self._seen = []
        self._steps = 0


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


_SQRT_REASON = "all but ceil(sqrt(L)) units, at even distances, are recomputed (eq. 19)"
_KEEP = "nothing is recomputed"
_ONE = "one micro-batch per step"
_NO_16_BIT = "fp32, since no 16-bit precision can be chosen here"

for _name, _rule in {
    "baseline": Rule(
        plan=PlanSpace.baseline,
        precision_reason="the reference computes in fp32",
        storage_reason=_KEEP,
        accumulation_reason=_ONE,
    ),
    "uniform-bf16": Rule(
        plan=_uniform_16_bit,
        precision_reason="every unit computes in 16 bits",
        unreduced_reason=_NO_16_BIT,
        storage_reason=_KEEP,
        accumulation_reason=_ONE,
    ),
    "recompute-all": Rule(
        plan=_recompute_all,
        precision_reason="every unit computes in 16 bits",
        unreduced_reason=_NO_16_BIT,
        storage_reason="every recomputable unit is recomputed",
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
        unreduced_reason=_NO_16_BIT,
        storage_reason=_SQRT_REASON,
        accumulation_reason="k = 4 under fixed batching; eq. 6 under adaptive batching",
        adaptive=PaperPolicy,
    ),
}.items():
    RULES.register(_name)(_rule)
