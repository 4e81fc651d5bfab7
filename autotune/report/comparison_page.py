"""The page of a comparison: the verdict, the plan to launch with, and the evidence for and against it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.cost_model.carbon import Intensity
from autotune.plan import Plan
from autotune.report.campaign_page import NO_ENERGY, CampaignPage, budget_of, prediction_of, shared_values
from autotune.report.campaign_plots import cost_plot, progress_plot, speed_plot
from autotune.report.campaign_run import CampaignRun, arm_named, launched
from autotune.report.costs import ArmCost, arm_costs, has_target
from autotune.report.course_section import course_figures, course_view, is_live, time_ratios
from autotune.report.pareto import Front, measured_arm, measured_trial
from autotune.report.plan_section import plan_figure, plan_view
from autotune.report.plot import Plot
from autotune.report.rendering import Table, render
from autotune.report.svg import figure_of
from autotune.report.terminal_tables import (
    all_fit,
    alone_lines,
    baseline_shown,
    best_entry,
    judged_arms,
    sample_time,
    verdict_line,
)
from autotune.report.time_section import arm_parts, time_table
from autotune.report.wording import beside_one, count, size

Arm = Mapping[str, Any]


def comparison_page(run: CampaignRun, front: Front | None, intensity: Intensity | None) -> CampaignPage:
    """Return the page of a comparison.

    Args:
        run: the comparison.
        front: the best plans that the profile predicts; ``None`` without a profile.
        intensity: the grid's carbon intensity; ``None`` for the grams recorded in the comparison, if any.
    """
    document, verdict, arms = run.document, verdict_line(run.document), run.document["arms"]
    best, live, costs = best_entry(document), [arm for arm in arms if is_live(arm)], arm_costs(document, intensity)
    plot = _cost_plot(run, front)
    plots = (plot, progress_plot(document), speed_plot(document))
    pictures = [figure_of(one) for one in plots if one is not None]
    remarks, view = _launch(run)
    profiled = [arm for arm in arms if _is_profiled(run, launched(arm))]
    plans = [(arm["name"], launched(arm), measured_arm(arm)) for arm in profiled if not is_live(arm)]
    seeds = count(len(document["seeds"]), "paired seed")
    text = render(
        "comparison.html.j2",
        **shared_values(run),
        verdict=verdict,
        heading=f"{run.job}: {count(len(arms), 'arm')} compared",
        meta=f"{document['device']}, {seeds}, {budget_of(run)}. {run.folder.name}",
        good=best is not None and best["verdict"] == "faster",
        cards=_cards(document, best),
        remarks=remarks,
        plan=view,
        arms=_arms_table(document),
        arm_notes=[*_bootstrap(document), *alone_lines(document)],
        times=time_table(arm_parts(document)),
        pictures=pictures,
        courses=[course_view(run, arm) for arm in live],
        prediction=prediction_of(run, plans),
        course_errors=_course_errors(run, [arm for arm in profiled if is_live(arm)]),
        energy=_energy_told(costs, intensity),
        costs=_costs_table(document, costs),
        others=_other_plans(run),
    )
    strips = [plan_figure(arm["name"], launched(arm)) for arm in arms]
    figures = [*pictures, *strips, *(figure for arm in live for figure in course_figures(run, arm))]
    return CampaignPage(run=run, front=front, verdict=verdict, costs=plot, figures=figures, text=text)


def _cost_plot(run: CampaignRun, front: Front | None) -> Plot | None:
    trials = [cost for trial in run.trials if (cost := measured_trial(trial)) is not None]
    named = [(arm["name"], cost) for arm in run.document["arms"] if (cost := measured_arm(arm)) is not None]
    return cost_plot(run, named, trials, front) if named else None


def _cards(document: Mapping[str, Any], best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if best is None:
        fitting = sum(all_fit(document, arm["name"]) for arm in document["arms"])
        return [("arms within the budget", f"{fitting} of {len(document['arms'])}")]
    even = best["break_even_steps"]
    return [
        (f"speed of {best['arm']}", f"{1 / best['time_ratio']:.2f}x"),
        ("95 % interval", _span(best, "time_ratio_ci95")),
        ("its memory", "unknown" if best["memory_ratio"] is None else f"{best['memory_ratio']:.0%}"),
        ("final metric", f"{best['metric_difference']:+z.2%}"),
        ("p (sign flip)", f"{best['p_value']:.3g}"),
        ("tuning pays after", "never" if even is None else count(even, "step")),
    ]


def _launch(run: CampaignRun) -> tuple[list[str], dict[str, Any] | None]:
    """Return remarks, and the plan to launch with, a live arm's first plan, or the fastest plan that fits."""
    plan, best = run.plan, best_entry(run.document)
    fixed = [arm for arm in run.document["arms"] if plan is not None and not is_live(arm)]
    owner = next((arm["name"] for arm in fixed if launched(arm) == plan), None)
    remarks = []
    if best is not None and best["arm"] != owner and is_live(arm_named(run.document, best["arm"])):
        begins = launched(arm_named(run.document, best["arm"]))
        if owner is None:
            return [], _view(run, best["arm"], begins)
        remarks.append(
            f"{best['arm']} changes its plan while it trains, and begins with {begins}. Of the plans that do not "
            "change, this is the fastest that fits:"
        )
    if plan is not None and owner is not None:
        return remarks, _view(run, owner, plan)
    ended = "reached the target" if has_target(run.document) else "trained to the end"
    remarks.append(f"No plan kept to the budget and {ended} on every seed.")
    fitting = [
        (cost.seconds_per_sample, arm)
        for arm in run.document["arms"]
        if all_fit(run.document, arm["name"]) and (cost := measured_arm(arm)) is not None
    ]
    if not fitting:
        return remarks, None
    _, nearest = min(fitting, key=lambda found: found[0])
    remarks.append(f"Of those that kept to the budget, {nearest['name']} took least time per sample:")
    return remarks, _view(run, nearest["name"], launched(nearest))


def _view(run: CampaignRun, arm: str, plan: Plan) -> dict[str, Any]:
    return plan_view(run if _is_profiled(run, plan) else replace(run, profile=None), arm, plan)


def _is_profiled(run: CampaignRun, plan: Plan) -> bool:
    """Return whether the profile applies to the plan: it was taken with the first arm's launch choices."""
    return plan.launch == launched(run.document["arms"][0]).launch


def _arms_table(document: Mapping[str, Any]) -> Table:
    judged, costs = judged_arms(document), arm_costs(document)
    rows = [
        _arm_row(document, arm, judged.get(arm["name"]), cost)
        for arm, cost in zip(document["arms"], costs, strict=True)
    ]
    target = document["metric"]["target"]
    time = "time per sample" if target is None else "time to target"
    columns = (
        *("arm", "speed-up", "95 % interval", "p", time, "peak", "within budget", "final metric"),
        *("tuning", "pays after", "verdict"),
    )
    note = (
        f"The first arm, {baseline_shown(document)}, is the reference. "
        f"Times are {'per sample' if target is None else f'to the target, {target:g}'}; the final metric is taken "
        f"after {document['horizon_samples']:,} samples and counts as kept within {document['metric']['margin']:.1%}."
    )
    return Table(label="The arms", columns=columns, rows=rows, numbers=(1, 2, 3, 4, 5, 7, 8, 9), note=note)


def _arm_row(document: Mapping[str, Any], arm: Arm, entry: Mapping[str, Any] | None, cost: ArmCost) -> list[str]:
    runs, ratio = arm["runs"], None if entry is None else entry["time_ratio"]
    reached = sum(run["reached"] for run in runs)
    metrics = [run["final_metric"] for run in runs if run["final_metric"] is not None]
    even = None if entry is None else entry["break_even_steps"]
    return [
        arm["name"],
        f"{1 / ratio:.2f}x" if ratio else "",
        _span(entry, "time_ratio_ci95"),
        f"{entry['p_value']:.3g}" if ratio and entry else "",
        _arm_time(document, cost, arrived=reached == len(runs)) or f"{reached} of {len(runs)}",
        size(cost.peak_bytes),
        "yes" if all_fit(document, arm["name"]) else "no",
        f"{statistics.fmean(metrics):.4g}" if metrics else "",
        f"{arm['tuning_s']:.0f} s, {count(arm['tuning_steps'], 'step')}" if arm["tuning_steps"] else "",
        "" if even is None else count(even, "step"),
        "the reference" if entry is None else f"{entry['verdict']}: {entry['reason']}",
    ]


def _arm_time(document: Mapping[str, Any], cost: ArmCost, *, arrived: bool) -> str:
    """Return an arm's time to the target, or per sample without one; empty if a run missed the target."""
    if not has_target(document):
        return sample_time(cost)
    return f"{cost.to_target_s:.2f} s" if cost.to_target_s and arrived else ""


def _bootstrap(document: Mapping[str, Any]) -> list[str]:
    entries = judged_arms(document).items()
    spans = [f"{name} {span}" for name, entry in entries if (span := _span(entry, "time_ratio_bca95"))]
    return [f"Intervals by bootstrap (BCa), which assume no distribution: {'; '.join(spans)}."] if spans else []


def _span(entry: Mapping[str, Any] | None, key: str) -> str:
    """Return an interval of the time ratio as an interval of the speed-up; empty without one."""
    bounds = None if entry is None else entry.get(key)
    return "" if bounds is None else f"{beside_one(1 / bounds[1])} to {beside_one(1 / bounds[0])}"


def _course_errors(run: CampaignRun, live: Sequence[Arm]) -> list[str]:
    lines = []
    for arm in live:
        ratios = sorted(ratio for record in arm["runs"] for ratio in time_ratios(run, record))
        if ratios:
            told = f"{ratios[len(ratios) // 2]:.2f} of the predicted time, median of {count(len(ratios), 'window')}"
            lines.append(f"{arm['name']}: steps took {told}.")
    return lines


def _costs_table(document: Mapping[str, Any], costs: Sequence[ArmCost]) -> Table:
    aimed = has_target(document)
    rows = [
        [
            cost.arm,
            (_arm_time(document, cost, arrived=True) or "not reached"),
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
        *(
            "arm",
            "to the target" if aimed else "per sample",
            "a whole run",
            "tuning",
            "peak",
            "energy of a run",
            "carbon of a run",
        ),
        "energy read from",
    )
    note = "Training time without evaluation, which is the same for all arms; mean of the seeds."
    return Table(label="What it cost", columns=columns, rows=rows, numbers=range(1, 7), note=note)


def _energy_told(costs: Sequence[ArmCost], intensity: Intensity | None) -> str:
    if all(cost.energy_j is None for cost in costs):
        return NO_ENERGY
    if any(cost.carbon_g is not None for cost in costs):
        return "Carbon as recorded by the comparison." if intensity is None else f"Carbon at {intensity}."
    if intensity is not None:
        return f"Carbon: the series ({intensity}) does not cover the time of these runs."
    return "Carbon needs the grid's intensity, a number or a series: autotune report RUN --carbon-intensity 380."


def _other_plans(run: CampaignRun) -> list[tuple[str, dict[str, Any]]]:
    """Return summaries and views of the arms' plans other than the plan to launch with."""
    arms = [(arm, launched(arm)) for arm in run.document["arms"]]
    return [
        (f"{arm['name']}{' at first' if is_live(arm) else ''}: {plan}", _view(run, arm["name"], plan))
        for arm, plan in arms
        if plan != run.plan
    ]
