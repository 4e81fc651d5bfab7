"""Make the page of a comparison: the verdict, the plan to launch with, and all that speaks for it and against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.budget import format_bytes
from autotune.cost_model.carbon import Intensity
from autotune.plan import Plan
from autotune.report.attached_run import count
from autotune.report.campaign_run import CampaignRun, arm_named, launched
from autotune.report.campaign_sections import (
    environment_section,
    prediction_table,
    repeat_section,
    trade_figure,
    trade_of,
)
from autotune.report.costs import ArmCost, arm_costs
from autotune.report.course_section import course_figures, course_section, is_live, time_ratios
from autotune.report.curves import Line, curves, edge_of, mean_curve
from autotune.report.forest import Interval, forest
from autotune.report.html import Html, cards, element, join, page, section, table
from autotune.report.pareto import Cost, Front, measured_arm, measured_trial
from autotune.report.plan_section import plan_figure, plan_section
from autotune.report.scatter import Trade
from autotune.report.svg import Figure
from autotune.report.terminal_tables import all_fit, alone_lines, baseline_shown, best_entry, judged_arms, verdict_line


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPage:
    """A comparison and what its page needs beside it.

    Attributes:
        run: the comparison.
        front: what the profile predicts to be best; ``None`` without a profile.
        intensity: the grid's carbon intensity; ``None`` for the grams that the comparison wrote down, if it did.
    """

    run: CampaignRun
    front: Front | None
    intensity: Intensity | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        return verdict_line(self.run.document)

    @property
    def text(self) -> str:
        """Return the page."""
        run = self.run
        live = [arm for arm in run.document["arms"] if is_live(arm)]
        return page(
            f"autotune: {run.job}",
            self._head(),
            section("The plan", self._plan()),
            section("The arms", self._arms()),
            section("Pictures", element("div", *(figure.html for figure in self._pictures()), class_="figures")),
            *(section(f"{arm['name']}, while it trained", course_section(run, arm)) for arm in live),
            section("Predicted against measured", self._predictions()),
            section("What it cost", self._costs()),
            section("The other plans", self._other_plans()),
            section("Environment and data", environment_section(run)),
            section("Repeat it", repeat_section(run)),
        )

    @property
    def trade(self) -> Trade | None:
        """Return time against memory; ``None`` where neither was measured."""
        trials = [cost for trial in self.run.trials if (cost := measured_trial(trial)) is not None]
        named = self._measured()
        return trade_of(self.run, named, trials, self.front) if named else None

    @property
    def figures(self) -> list[Figure]:
        """Return every figure of the page."""
        arms = self.run.document["arms"]
        plans = [plan_figure(arm["name"], launched(arm)) for arm in arms]
        live = [figure for arm in arms if is_live(arm) for figure in course_figures(self.run, arm)]
        return [*self._pictures(), *plans, *live]

    def _head(self) -> Html:
        run, document = self.run, self.run.document
        best = best_entry(document)
        seeds = count(len(document["seeds"]), "paired seed")
        budget = "no budget" if run.budget_bytes is None else f"budget {format_bytes(run.budget_bytes)}"
        won = best is not None and best["verdict"] == "faster"
        return join(
            [
                element("h1", f"{run.job}: {count(len(document['arms']), 'arm')} compared"),
                element("p", f"{document['device']}, {seeds}, {budget}. {run.folder.name}", class_="meta"),
                element("p", self.verdict, class_="verdict" if won else "verdict warn"),
                cards(self._cards(best)),
            ]
        )

    def _cards(self, best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
        if best is None:
            return [("arms within the budget", f"{self._fitting()} of {len(self.run.document['arms'])}")]
        low, high = (1 / bound for bound in reversed(best["time_ratio_ci95"]))
        memory = "unknown" if best["memory_ratio"] is None else f"{best['memory_ratio']:.0%}"
        even = best["break_even_steps"]
        return [
            (f"speed of {best['arm']}", f"{1 / best['time_ratio']:.2f}x"),
            ("95 % interval", f"{low:.2f} to {high:.2f}"),
            ("its memory", memory),
            ("final metric", f"{best['metric_difference']:+.2%}"),
            ("p (sign flip)", f"{best['p_value']:.3g}"),
            ("tuning pays after", "never" if even is None else count(even, "step")),
        ]

    def _fitting(self) -> int:
        return sum(all_fit(self.run.document, arm["name"]) for arm in self.run.document["arms"])

    def _plan(self) -> Html:
        """Return the plan to launch with; where only a changing arm fits, what that one begins with."""
        run, plan = self.run, self.run.plan
        best = best_entry(run.document)
        owners = [arm["name"] for arm in run.document["arms"] if plan is not None and not is_live(arm)]
        owner = next((name for name in owners if launched(arm_named(run.document, name)) == plan), None)
        said = []
        if best is not None and best["arm"] != owner and is_live(arm_named(run.document, best["arm"])):
            begins = launched(arm_named(run.document, best["arm"]))
            if owner is None:
                return self._described(best["arm"], begins)
            told = (
                f"{best['arm']} changes its plan while it trains, and begins with {begins}. Of the plans that stay, "
                "the fastest that fits is this:"
            )
            said.append(element("p", told))
        if plan is not None and owner is not None:
            return join([*said, self._described(owner, plan)])
        said.append(element("p", "No plan kept to the budget and reached the target on every seed."))
        nearest = self._nearest()
        if nearest is None:
            return join(said)
        said.append(element("p", f"Of those that kept to the budget, {nearest['name']} took least time per sample:"))
        return join([*said, self._described(nearest["name"], launched(nearest))])

    def _nearest(self) -> Mapping[str, Any] | None:
        """Return the arm within the budget that took least time per sample; ``None`` if none kept to it."""
        fitting = [
            (cost.seconds_per_sample, arm)
            for arm in self.run.document["arms"]
            if all_fit(self.run.document, arm["name"]) and (cost := measured_arm(arm)) is not None
        ]
        return min(fitting, key=lambda found: found[0], default=(0.0, None))[1]

    def _arms(self) -> Html:
        document = self.run.document
        judged = judged_arms(document)
        costs = {cost.arm: cost for cost in arm_costs(document)}
        rows = [self._row(arm, judged.get(arm["name"]), costs[arm["name"]]) for arm in document["arms"]]
        columns = (
            *("arm", "speed-up", "95 % interval", "p", "time to target", "peak"),
            *("within budget", "final metric", "tuning", "pays after", "verdict"),
        )
        said = (
            f"The first arm, {baseline_shown(document)}, is the reference. Times are to the target, "
            f"{document['metric']['target']:g}; the final metric is taken after {document['horizon_samples']:,} "
            f"samples and counts as kept within {document['metric']['margin']:.1%}."
        )
        listed = table("The arms", columns, rows, numbers=(1, 2, 3, 4, 5, 7, 8, 9))
        spans = [f"{name} {span}" for name, entry in judged.items() if (span := _span(entry, "time_ratio_bca95"))]
        told = [f"Intervals by bootstrap (BCa), which assume no distribution: {'; '.join(spans)}."] if spans else []
        lines = [element("p", line, class_="note") for line in [*told, *alone_lines(document)]]
        return join([element("p", said), listed, *lines])

    def _row(self, arm: Mapping[str, Any], entry: Mapping[str, Any] | None, cost: ArmCost) -> list[object]:
        runs, compared = arm["runs"], entry is not None and entry["time_ratio"] is not None
        reached = sum(run["reached"] for run in runs)
        metrics = [run["final_metric"] for run in runs if run["final_metric"] is not None]
        even = None if entry is None else entry["break_even_steps"]
        return [
            arm["name"],
            f"{1 / entry['time_ratio']:.2f}x" if compared and entry else "",
            _span(entry, "time_ratio_ci95"),
            f"{entry['p_value']:.3g}" if compared and entry else "",
            f"{cost.to_target_s:.2f} s" if cost.to_target_s and reached == len(runs) else f"{reached} of {len(runs)}",
            "" if cost.peak_bytes is None else format_bytes(cost.peak_bytes),
            "yes" if all_fit(self.run.document, arm["name"]) else "no",
            f"{sum(metrics) / len(metrics):.4g}" if metrics else "",
            f"{arm['tuning_s']:.0f} s, {count(arm['tuning_steps'], 'step')}" if arm["tuning_steps"] else "",
            "" if even is None else count(even, "step"),
            "the reference" if entry is None else f"{entry['verdict']}: {entry['reason']}",
        ]

    def _pictures(self) -> list[Figure]:
        trade = self.trade
        found = [] if trade is None else [trade_figure(self.run, self._measured(), trade, self.front)]
        return [*found, *self._progress(), self._forest()]

    def _measured(self) -> list[tuple[str, Cost]]:
        arms = self.run.document["arms"]
        return [(arm["name"], cost) for arm in arms if (cost := measured_arm(arm)) is not None]

    def _progress(self) -> list[Figure]:
        document = self.run.document
        lines = [
            Line(number=number, name=arm["name"], points=points)
            for number, arm in enumerate(document["arms"])
            if (points := mean_curve(arm["runs"]))
        ]
        if not lines:
            return []
        target = document["metric"]["target"]
        figure = curves(
            "Progress against time",
            f"Validation metric over training time, mean of {count(len(document['seeds']), 'seed')}; the first sixth "
            "of the baseline's run is left out.",
            lines,
            target=target,
            edge=edge_of(lines[0].points, target),
            x_name="training time, s",
            y_name="validation metric",
        )
        return [figure]

    def _forest(self) -> Figure:
        rows = [
            Interval(
                number=number,
                name=entry["arm"],
                middle=1 / entry["time_ratio"],
                low=1 / entry["time_ratio_ci95"][1],
                high=1 / entry["time_ratio_ci95"][0],
            )
            if entry["time_ratio"] is not None
            else Interval(number=number, name=entry["arm"], reason=entry["reason"])
            for number, entry in enumerate(judged_arms(self.run.document).values(), 1)
        ]
        said = "; ".join(row.told for row in rows)
        return forest("Speed against the baseline", f"{said}. Bars are 95 % intervals over paired seeds.", rows)

    def _predictions(self) -> Html:
        run = self.run
        # The profile is of the job as the first arm trains it, not of another optimizer or of compiled units.
        arms = [arm for arm in run.document["arms"] if not is_live(arm) and self._is_profiled(launched(arm))]
        found = prediction_table(run, [(arm["name"], launched(arm), measured_arm(arm)) for arm in arms])
        lines = []
        for arm in (arm for arm in run.document["arms"] if is_live(arm) and self._is_profiled(launched(arm))):
            ratios = [ratio for record in arm["runs"] for ratio in time_ratios(run, record)]
            if ratios:
                middle, number = sorted(ratios)[len(ratios) // 2], count(len(ratios), "window")
                lines.append(
                    element("p", f"{arm['name']}: steps took {middle:.2f} of what was predicted, median of {number}.")
                )
        return join([found, *lines])

    def _is_profiled(self, plan: Plan) -> bool:
        return plan.launch == launched(self.run.document["arms"][0]).launch

    def _described(self, arm: str, plan: Plan) -> Html:
        """Return a plan unit by unit, with what other choices would change where the profile is of such runs."""
        return plan_section(self.run if self._is_profiled(plan) else replace(self.run, profile=None), arm, plan)

    def _costs(self) -> Html:
        costs = arm_costs(self.run.document, self.intensity)
        rows = [
            [
                cost.arm,
                "not reached" if cost.to_target_s is None else f"{cost.to_target_s:.2f} s",
                f"{cost.train_s:.2f} s",
                f"{cost.tuning_s:.1f} s" if cost.tuning_s else "none",
                "" if cost.peak_bytes is None else format_bytes(cost.peak_bytes),
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
        said = [element("p", "Training time without evaluation, which is the same for all arms; mean of the seeds.")]
        said.append(element("p", _energy_told(costs, self.intensity), class_="note"))
        return join([*said, table("What it cost", columns, rows, numbers=(1, 2, 3, 4, 5, 6))])

    def _other_plans(self) -> Html:
        """Return every other arm's plan, folded."""
        parts = []
        for arm in self.run.document["arms"]:
            plan = launched(arm)
            if self.run.plan is not None and plan == self.run.plan:
                continue
            begins = " at first" if is_live(arm) else ""
            parts.append(
                element(
                    "details",
                    element("summary", f"{arm['name']}{begins}: {plan}"),
                    self._described(arm["name"], plan),
                )
            )
        return join(parts)


def _span(entry: Mapping[str, Any] | None, key: str) -> str:
    """Return an interval of the time ratio as one of the speed-up; nothing where there is none."""
    bounds = None if entry is None else entry.get(key)
    return "" if bounds is None else f"{1 / bounds[1]:.2f} to {1 / bounds[0]:.2f}"


def _energy_told(costs: list[ArmCost], intensity: Intensity | None) -> str:
    if all(cost.energy_j is None for cost in costs):
        return "Energy: absent. No meter could be read on this machine, and nothing is estimated in its place."
    if any(cost.carbon_g is not None for cost in costs):
        return "Carbon as the comparison was told." if intensity is None else f"Carbon at {intensity}."
    if intensity is not None:
        return f"Carbon: the series ({intensity}) says nothing of the time of these runs."
    return "Carbon needs the grid's intensity, a number or a series: autotune report RUN --carbon-intensity 380."
