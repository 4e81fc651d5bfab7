"""The page of a comparison: the verdict, the plan to launch with, and the evidence for and against it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.cost_model.carbon import Intensity
from autotune.plan import Plan
from autotune.report.campaign_page import NO_ENERGY, CampaignPage, prediction_of
from autotune.report.campaign_plots import cost_plot, progress_plot, speed_plot
from autotune.report.campaign_run import arm_named, launched
from autotune.report.costs import ArmCost, arm_costs
from autotune.report.course_section import course_figures, course_view, is_live, time_ratios
from autotune.report.pareto import Cost, measured_arm, measured_trial
from autotune.report.plan_section import PlanView, plan_figure, plan_view
from autotune.report.plot import Plot
from autotune.report.rendering import Table, render
from autotune.report.svg import Figure, figure_of
from autotune.report.terminal_tables import all_fit, alone_lines, baseline_shown, best_entry, judged_arms, verdict_line
from autotune.report.wording import count, size

Arm = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The plan to launch with.

    Attributes:
        lines: what is said before it.
        view: the plan; ``None`` where there is none.
    """

    lines: Sequence[str]
    view: PlanView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPlan:
    """A plan that is shown folded, under its summary."""

    summary: str
    view: PlanView


@dataclass(frozen=True, kw_only=True)
class ComparisonPage(CampaignPage):
    """The page of a comparison."""

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        return verdict_line(self.run.document)

    @property
    def text(self) -> str:
        """Return the page."""
        document, best = self.run.document, best_entry(self.run.document)
        costs = arm_costs(document, self.intensity)
        arms = self._measured_arms()
        return render(
            "comparison.html.j2",
            **self._shared(),
            heading=f"{self.run.job}: {count(len(document['arms']), 'arm')} compared",
            meta=f"{document['device']}, {count(len(document['seeds']), 'paired seed')}, {self._budget()}. "
            f"{self.run.folder.name}",
            good=best is not None and best["verdict"] == "faster",
            cards=self._cards(best),
            launch=self._launch(),
            arms_told=_arms_told(document),
            arms=self._arms_table(),
            arm_notes=[*_bootstrap(document), *alone_lines(document)],
            pictures=self._pictures(),
            courses=[course_view(self.run, arm) for arm in self._live()],
            prediction=prediction_of(self.run, [(arm["name"], launched(arm), measured_arm(arm)) for arm in arms]),
            course_errors=self._course_errors(),
            energy=_energy_told(costs, self.intensity),
            costs=_costs_table(costs),
            others=self._others(),
        )

    @property
    def costs(self) -> Plot | None:
        """Return time against memory; ``None`` where neither was measured."""
        trials = [cost for trial in self.run.trials if (cost := measured_trial(trial)) is not None]
        arms = self.run.document["arms"]
        named = [(arm["name"], cost) for arm in arms if (cost := measured_arm(arm)) is not None]
        return cost_plot(self.run, named, trials, self.front) if named else None

    @property
    def figures(self) -> list[Figure]:
        """Return every figure of the page."""
        plans = [plan_figure(arm["name"], launched(arm)) for arm in self.run.document["arms"]]
        return [*self._pictures(), *plans, *(one for arm in self._live() for one in course_figures(self.run, arm))]

    def _live(self) -> list[Arm]:
        return [arm for arm in self.run.document["arms"] if is_live(arm)]

    def _pictures(self) -> list[Figure]:
        plots = (self.costs, progress_plot(self.run.document), speed_plot(self.run.document))
        return [figure_of(plot) for plot in plots if plot is not None]

    def _cards(self, best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
        arms = self.run.document["arms"]
        if best is None:
            fitting = sum(all_fit(self.run.document, arm["name"]) for arm in arms)
            return [("arms within the budget", f"{fitting} of {len(arms)}")]
        even = best["break_even_steps"]
        return [
            (f"speed of {best['arm']}", f"{1 / best['time_ratio']:.2f}x"),
            ("95 % interval", _span(best, "time_ratio_ci95")),
            ("its memory", "unknown" if best["memory_ratio"] is None else f"{best['memory_ratio']:.0%}"),
            ("final metric", f"{best['metric_difference']:+.2%}"),
            ("p (sign flip)", f"{best['p_value']:.3g}"),
            ("tuning pays after", "never" if even is None else count(even, "step")),
        ]

    def _launch(self) -> Launch:
        """Return the plan to launch with; where only a live arm fits, the plan that it begins with."""
        run, plan, best = self.run, self.run.plan, best_entry(self.run.document)
        fixed = [arm for arm in run.document["arms"] if plan is not None and not is_live(arm)]
        owner = next((arm["name"] for arm in fixed if launched(arm) == plan), None)
        lines = []
        if best is not None and best["arm"] != owner and is_live(arm_named(run.document, best["arm"])):
            begins = launched(arm_named(run.document, best["arm"]))
            if owner is None:
                return Launch(lines=(), view=self._view(best["arm"], begins))
            lines.append(
                f"{best['arm']} changes its plan while it trains, and begins with {begins}. Of the plans that do not "
                "change, this is the fastest that fits:"
            )
        if plan is not None and owner is not None:
            return Launch(lines=lines, view=self._view(owner, plan))
        lines.append("No plan kept to the budget and reached the target on every seed.")
        nearest = self._nearest()
        if nearest is None:
            return Launch(lines=lines, view=None)
        lines.append(f"Of those that kept to the budget, {nearest['name']} took least time per sample:")
        return Launch(lines=lines, view=self._view(nearest["name"], launched(nearest)))

    def _nearest(self) -> Arm | None:
        """Return the arm within the budget that took least time per sample; ``None`` if none kept to it."""
        fitting: list[tuple[Cost, Arm]] = [
            (cost, arm)
            for arm in self.run.document["arms"]
            if all_fit(self.run.document, arm["name"]) and (cost := measured_arm(arm)) is not None
        ]
        return min(fitting, key=lambda found: found[0].seconds_per_sample)[1] if fitting else None

    def _arms_table(self) -> Table:
        document = self.run.document
        judged = judged_arms(document)
        costs = arm_costs(document)
        rows = [
            self._row(arm, judged.get(arm["name"]), cost) for arm, cost in zip(document["arms"], costs, strict=True)
        ]
        columns = (
            *("arm", "speed-up", "95 % interval", "p", "time to target", "peak", "within budget", "final metric"),
            *("tuning", "pays after", "verdict"),
        )
        return Table(label="The arms", columns=columns, rows=rows, numbers=(1, 2, 3, 4, 5, 7, 8, 9))

    def _row(self, arm: Arm, entry: Mapping[str, Any] | None, cost: ArmCost) -> list[str]:
        runs, ratio = arm["runs"], None if entry is None else entry["time_ratio"]
        reached = sum(run["reached"] for run in runs)
        metrics = [run["final_metric"] for run in runs if run["final_metric"] is not None]
        even = None if entry is None else entry["break_even_steps"]
        return [
            arm["name"],
            f"{1 / ratio:.2f}x" if ratio else "",
            _span(entry, "time_ratio_ci95"),
            f"{entry['p_value']:.3g}" if ratio and entry else "",
            f"{cost.to_target_s:.2f} s" if cost.to_target_s and reached == len(runs) else f"{reached} of {len(runs)}",
            size(cost.peak_bytes),
            "yes" if all_fit(self.run.document, arm["name"]) else "no",
            f"{statistics.fmean(metrics):.4g}" if metrics else "",
            f"{arm['tuning_s']:.0f} s, {count(arm['tuning_steps'], 'step')}" if arm["tuning_steps"] else "",
            "" if even is None else count(even, "step"),
            "the reference" if entry is None else f"{entry['verdict']}: {entry['reason']}",
        ]

    def _measured_arms(self) -> list[Arm]:
        """Return the arms whose one plan the profile can be held against."""
        return [arm for arm in self.run.document["arms"] if not is_live(arm) and self._is_profiled(launched(arm))]

    def _course_errors(self) -> list[str]:
        lines = []
        for arm in self._live():
            records = arm["runs"] if self._is_profiled(launched(arm)) else ()
            if ratios := sorted(ratio for record in records for ratio in time_ratios(self.run, record)):
                windows = count(len(ratios), "window")
                lines.append(
                    f"{arm['name']}: steps took {ratios[len(ratios) // 2]:.2f} of the predicted time, median of "
                    f"{windows}."
                )
        return lines

    def _is_profiled(self, plan: Plan) -> bool:
        """Tell whether the profile is of such runs: it is of the first arm's optimizer and compiled units."""
        return plan.launch == launched(self.run.document["arms"][0]).launch

    def _view(self, arm: str, plan: Plan) -> PlanView:
        return plan_view(self.run if self._is_profiled(plan) else replace(self.run, profile=None), arm, plan)

    def _others(self) -> list[OtherPlan]:
        found = []
        for arm in self.run.document["arms"]:
            plan = launched(arm)
            if plan != self.run.plan:
                summary = f"{arm['name']}{' at first' if is_live(arm) else ''}: {plan}"
                found.append(OtherPlan(summary=summary, view=self._view(arm["name"], plan)))
        return found


def _arms_told(document: Mapping[str, Any]) -> str:
    return (
        f"The first arm, {baseline_shown(document)}, is the reference. Times are to the target, "
        f"{document['metric']['target']:g}; the final metric is taken after {document['horizon_samples']:,} samples "
        f"and counts as kept within {document['metric']['margin']:.1%}."
    )


def _bootstrap(document: Mapping[str, Any]) -> list[str]:
    entries = judged_arms(document).items()
    spans = [f"{name} {span}" for name, entry in entries if (span := _span(entry, "time_ratio_bca95"))]
    return [f"Intervals by bootstrap (BCa), which assume no distribution: {'; '.join(spans)}."] if spans else []


def _span(entry: Mapping[str, Any] | None, key: str) -> str:
    """Return an interval of the time ratio as one of the speed-up; nothing where there is none."""
    bounds = None if entry is None else entry.get(key)
    return "" if bounds is None else f"{1 / bounds[1]:.2f} to {1 / bounds[0]:.2f}"


def _costs_table(costs: Sequence[ArmCost]) -> Table:
    rows = [
        [
            cost.arm,
            "not reached" if cost.to_target_s is None else f"{cost.to_target_s:.2f} s",
            f"{cost.train_s:.2f} s",
            f"{cost.tuning_s:.1f} s" if cost.tuning_s else "none",
            size(cost.peak_bytes),
            "absent" if cost.energy_j is None else f"{cost.energy_j:,.0f} J",
            "" if cost.carbon_g is None else f"{cost.carbon_g:.3g} g",
            "" if cost.energy_j is None else cost.energy_source,
        ]
        for cost in costs
    ]
    columns = (
        *("arm", "to the target", "a whole run", "tuning", "peak", "energy of a run", "carbon of a run"),
        "energy read from",
    )
    return Table(label="What it cost", columns=columns, rows=rows, numbers=range(1, 7))


def _energy_told(costs: Sequence[ArmCost], intensity: Intensity | None) -> str:
    if all(cost.energy_j is None for cost in costs):
        return NO_ENERGY
    if any(cost.carbon_g is not None for cost in costs):
        return "Carbon as recorded by the comparison." if intensity is None else f"Carbon at {intensity}."
    if intensity is not None:
        return f"Carbon: the series ({intensity}) does not cover the time of these runs."
    return "Carbon needs the grid's intensity, a number or a series: autotune report RUN --carbon-intensity 380."
