"""The page of a tuning: the plan that was found, the reasons for it, and the cost of finding it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autotune.budget import format_bytes
from autotune.cost_model.carbon import Intensity, parse_time
from autotune.measurement import Measurement
from autotune.plan import Plan
from autotune.records.run_documents import TuneConfig
from autotune.report.campaign_page import NO_ENERGY, CampaignPage, budget_of, prediction_of, shared_values
from autotune.report.campaign_plots import cost_plot, search_plot
from autotune.report.campaign_run import CampaignRun
from autotune.report.costs import energy_of
from autotune.report.knobs_section import knob_table
from autotune.report.pareto import Cost, Front, measured_finals, measured_trial
from autotune.report.plan_section import plan_figure, plan_view
from autotune.report.plot import Plot
from autotune.report.rendering import Table, render
from autotune.report.svg import figure_of
from autotune.report.terminal_tables import tuned_line
from autotune.report.time_section import time_table, tuned_parts
from autotune.report.wording import count, milliseconds, size

_ROWS = 200
Named = Sequence[tuple[str, Plan, Cost]]


def tuning_page(run: CampaignRun, front: Front | None, intensity: Intensity | None) -> CampaignPage:
    """Return the page of a tuning.

    Args:
        run: the tuning.
        front: the best plans that the profile predicts; ``None`` without a profile.
        intensity: the grid's carbon intensity; ``None`` if it was not given.
    """
    assert isinstance(run.config, TuneConfig)
    method, plan = run.config.method, Plan.from_json(run.document["plan"])
    measured = run.document["measured"]
    budget, peak, verdict, named = (
        run.budget_bytes,
        measured["peak_bytes"],
        tuned_line(run.document, run.config.asked.weights),
        _named(run, plan),
    )
    fits = budget is None or (peak is not None and peak <= budget)
    plot = _cost_plot(run, named, front)
    pictures = [figure_of(one) for one in (plot, search_plot(run.trials)) if one is not None]
    more = f", the first {_ROWS} of them here" if len(run.trials) > _ROWS else ""
    text = render(
        "tuning.html.j2",
        **shared_values(run),
        verdict=verdict,
        heading=f"{run.job}: tuned with {method}",
        meta=f"{run.environment.device}, {budget_of(run)}. {run.folder.name}",
        good=fits and measured["cost"] < 1,
        cards=_cards(run),
        plan=plan_view(run, method, plan),
        knobs=knob_table(run.document["launch_choices"]) if run.document.get("launch_choices") else None,
        finalists=_finalists(named, budget),
        times=time_table(tuned_parts(run.document)),
        pictures=pictures,
        prediction=_predictions(run, named),
        costs=_stages(run),
        energy=_energy_told(run, intensity),
        measured=f"{count(len(run.trials), 'window')}{more}",
        trials=_trials(run),
    )
    figures = [*pictures, plan_figure(method, plan)]
    return CampaignPage(run=run, front=front, verdict=verdict, costs=plot, figures=figures, text=text)


def _cost_plot(run: CampaignRun, named: Named, front: Front | None) -> Plot | None:
    trials = [measured_trial(trial) for trial in run.trials if not trial["final"]]
    shown = [(name, cost) for name, _, cost in named]
    return cost_plot(run, shown, [cost for cost in trials if cost is not None], front) if named else None


def _cards(run: CampaignRun) -> list[tuple[str, str]]:
    document, measured, budget = run.document, run.document["measured"], run.budget_bytes
    peak = measured["peak_bytes"]
    return [
        ("time, of the baseline's", f"{measured['cost']:.2f}"),
        ("its peak", "unknown" if peak is None else format_bytes(peak)),
        ("peak, of the baseline's", "unknown" if peak is None else f"{peak / measured['baseline_peak_bytes']:.0%}"),
        ("peak, of the budget", "no budget" if budget is None or peak is None else f"{peak / budget:.0%}"),
        ("tuning", f"{document['tuning_s']:.0f} s"),
        ("real steps", f"{document['tuning_steps']:,}"),
    ]


def _named(run: CampaignRun, chosen: Plan) -> Named:
    """Return the baseline, the chosen plan and the other finalists, as measured in the finals."""
    finals, chosen = measured_finals(run), chosen.bare
    baseline = next((plan for plan in finals if _is_baseline(plan)), None)
    named = [("baseline", baseline), ("tuned", None if chosen == baseline else chosen)]
    others = [plan for plan in finals if plan not in (baseline, chosen)]
    named += [(f"finalist {number}", plan) for number, plan in enumerate(others, 2)]
    return [(name, plan, finals[plan]) for name, plan in named if plan in finals]


def _is_baseline(plan: Plan) -> bool:
    return (
        plan.accumulation_steps == 1
        and not any(choice.is_reduced for choice in plan.precision.values())
        and not plan.by_storage
    )


def _finalists(named: Named, budget: int | None) -> Table:
    base = next((cost for name, _, cost in named if name == "baseline"), None)
    rows = [
        [
            name,
            f"{cost.seconds_per_sample * 1e3:.3g} ms",
            f"{cost.spread[0] * 1e3:.3g} to {cost.spread[1] * 1e3:.3g} ms",
            "" if base is None else f"{cost.seconds_per_sample / base.seconds_per_sample:.2f}",
            format_bytes(cost.peak_bytes),
            "" if budget is None else "yes" if cost.peak_bytes <= budget else "no",
            str(plan),
        ]
        for name, plan, cost in named
    ]
    columns = ("", "per sample", "lowest to highest step", "of baseline", "peak", "within budget", "plan")
    note = (
        "Measured again after the search, interleaved with the baseline: the window that won a search is never its "
        "score. One seed on one machine: only a comparison on fresh seeds can show a difference."
    )
    note = note if named else "No final window was recorded."
    return Table(label="Baseline and finalists", columns=columns, rows=rows, numbers=(1, 2, 3, 4), note=note)


def _predictions(run: CampaignRun, named: Named) -> Table:
    plans: dict[Plan, tuple[str, Plan, Cost | None]] = {plan: (name, plan, cost) for name, plan, cost in named}
    for trial in run.trials:
        plan = Plan.from_json(trial["plan"])
        plans.setdefault(plan, (f"trial {trial['number']}", plan, measured_trial(trial)))
    return prediction_of(run, list(plans.values())[:_ROWS])


def _stages(run: CampaignRun) -> Table:
    """Return the time and the real steps of each stage of the tuning."""
    trials, document = run.trials, run.document
    search = [trial for trial in trials if not trial["final"]]
    begun = (trials[0]["tuning_s"], trials[0]["tuning_steps"]) if trials else (0.0, 0)
    # The first stage includes the first window; without a search, that window is one of the finals.
    until = (search[-1]["tuning_s"], search[-1]["tuning_steps"]) if search else begun
    whole = (document["tuning_s"], document["tuning_steps"])
    names = ("references, profile, first window", "search", "finals")
    rows = [
        [name, f"{after[0] - before[0]:.1f} s", f"{after[1] - before[1]:,}"]
        for name, (before, after) in zip(names, pairwise([(0.0, 0), begun, until, whole]), strict=True)
    ]
    rows.append(["all", f"{whole[0]:.1f} s", f"{whole[1]:,}"])
    return Table(label="What it cost", columns=("stage", "time", "real steps"), rows=rows, numbers=(1, 2))


def _energy_told(run: CampaignRun, intensity: Intensity | None) -> str:
    energy_j, source = energy_of([trial["measurement"] for trial in run.trials])
    if energy_j is None:
        return NO_ENERGY
    told = f"Energy of a window's timed steps: {energy_j:,.1f} J, mean ({source})."
    if intensity is None:
        return told
    begun = parse_time(run.environment.time, where=f"{run.folder / 'environment.json'}, time")
    grams = intensity.grams(energy_j, begun, begun)
    carbon = "the series does not cover the time of this run" if grams is None else f"{grams:.3g} g"
    return f"{told} Carbon at {intensity}: {carbon}."


def _trials(run: CampaignRun) -> Table:
    rows = []
    for trial in run.trials[:_ROWS]:
        window = Measurement.from_json(trial["measurement"])
        rows.append(
            [
                f"{trial['number']}",
                "final" if trial["final"] else "search",
                milliseconds(window.seconds_per_step),
                size(window.peak_bytes),
                f"{trial['cost']:.3f}",
                window.failure or "",
                str(Plan.from_json(trial["plan"])),
            ]
        )
    columns = ("window", "stage", "step", "peak", "cost", "failure", "plan")
    return Table(label="Everything that was measured", columns=columns, rows=rows, numbers=(2, 3, 4))
