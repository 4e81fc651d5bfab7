"""Results of campaigns and searches as tables and sentences for terminals."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from autotune.budget import format_bytes
from autotune.cost_model.paper_equations import Weights
from autotune.mechanics.devices import arithmetic_shown
from autotune.mechanics.processor_wait import is_disturbed
from autotune.plan import Plan
from autotune.report.costs import ArmCost, arm_costs, has_target, peak_of, reached_times
from autotune.report.wording import beside_one


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """Return a table with a row per arm of a ``comparison.json`` document, narrow enough for 80 columns."""
    table = Table(title=f"{comparison['job']}: {len(comparison['seeds'])} paired seeds", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for name in (
        "time to\ntarget" if has_target(comparison) else "time per\nsample",
        "speed-up\n(95 % interval)",
        "peak memory\n(of baseline)",
        "final\nmetric",
    ):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    judged = judged_arms(comparison)
    baseline_peak = peak_of(comparison["arms"][0])
    for arm in comparison["arms"]:
        entry = judged.get(arm["name"])
        fits = all_fit(comparison, arm["name"])
        table.add_row(
            _shown(comparison, arm),
            _time(comparison, arm),
            _speedup(entry),
            _memory(peak_of(arm), baseline_peak),
            _metric(arm),
            ("reference" if entry is None else entry["verdict"]) + ("" if fits else ", over budget") + _ran_out(arm),
            style=None if fits else "dim",
        )
    return table


def baseline_shown(comparison: Mapping[str, Any]) -> str:
    """Return the name of the baseline, with its fp32 arithmetic if the comparison recorded it."""
    name: str = comparison["baseline"]
    return f"{name} ({arithmetic_shown(comparison['fp32'])})" if comparison.get("fp32") else name


def _shown(comparison: Mapping[str, Any], arm: Mapping[str, Any]) -> str:
    name: str = arm["name"]
    return baseline_shown(comparison) if name == comparison["baseline"] else name


def judged_arms(comparison: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the judgement of each arm except the baseline; the gate, a second run of the baseline, is included."""
    gate = comparison.get("gate")
    return {entry["arm"]: entry for entry in (*comparison["against_baseline"], *([gate] if gate else []))}


def jobs_table(document: Mapping[str, Any]) -> Table:
    """Return a table with a row per arm of comparisons of several jobs: speed-up on each job and over all."""
    jobs = [entry["job"] for entry in document["jobs"]]
    table = Table(title=f"speed-up on {', '.join(jobs)}", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for name in (*jobs, "together\n(95 % interval)"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for entry in document["together"]:
        own = [next(one for one in job["against_baseline"] if one["arm"] == entry["arm"]) for job in document["jobs"]]
        table.add_row(entry["arm"], *map(_speedup, own), _speedup(entry), entry["verdict"])
    return table


def plan_lines(comparison: Mapping[str, Any]) -> list[str]:
    """Return one line per arm: its plan and the cost of finding it."""
    width = max(len(_shown(comparison, arm)) for arm in comparison["arms"])
    lines = []
    for arm in comparison["arms"]:
        plan = str(Plan.from_json(arm["plan"])) if "plan" in arm else "changes during the run"
        cost = f"  (found in {arm['tuning_s']:.0f} s, {arm['tuning_steps']} real steps)" if arm["tuning_s"] else ""
        lines.append(f"{_shown(comparison, arm):{width}}  {plan}{cost}")
    return lines


def verdict_line(comparison: Mapping[str, Any]) -> str:
    """Return one sentence on the fastest arm within the budget: its speed-up, interval and verdict.

    If the baseline fits too and is faster, the sentence begins with that.
    """
    best = best_entry(comparison)
    if best is None:
        reasons = {entry["reason"] for entry in comparison["against_baseline"] if entry["verdict"] == "not comparable"}
        if len(reasons) == 1:
            return f"Nothing can be compared: {reasons.pop()}."
        ended = "reached the target" if has_target(comparison) else "trained to its end"
        return f"No arm within the budget {ended} on every seed."
    low, high = (1 / bound for bound in reversed(best["time_ratio_ci95"]))
    seeds = len(comparison["seeds"])
    caution = " - an indication, not a claim" if comparison["indication_only"] else ""
    budget = "" if comparison["memory_budget_bytes"] is None else " within the budget"
    best_of = f"Fastest{budget}: {best['arm']}"
    if best["time_ratio"] > 1 and all_fit(comparison, comparison["baseline"]):
        best_of = f"No arm is faster than the baseline. The fastest of the others{budget}, {best['arm']},"
    memory = "" if best["memory_ratio"] is None else f" with {best['memory_ratio']:.0%} of its memory"
    does = "reaches the target" if has_target(comparison) else "trains each sample"
    return (
        f"{best_of} {does} {1 / best['time_ratio']:.2f}x as fast as the baseline "
        f"(95 % interval {beside_one(low)}x to {beside_one(high)}x){memory}; "
        f"final metric {best['metric_difference']:+z.2%}; verdict: {best['verdict']}; {seeds} paired seeds{caution}."
    )


def best_entry(comparison: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the judgement of the fastest arm that stayed within the budget on every seed; ``None`` without one."""
    fitting = [
        entry
        for entry in comparison["against_baseline"]
        if entry["time_ratio"] is not None
        and entry["verdict"] != "not comparable"
        and all_fit(comparison, entry["arm"])
    ]
    return min(fitting, key=lambda entry: entry["time_ratio"], default=None)


def tuned_line(document: Mapping[str, Any], weights: str | None = None) -> str:
    """Return one sentence on a tuning: its plan's cost relative to the baseline's, and the cost of finding it.

    On a busy machine, another one before it says so.

    Args:
        document: content of ``tuned.json``.
        weights: the weights of time, memory and energy as given; ``None`` for time alone.
    """
    measured, budget = document["measured"], document["measured"]["memory_budget_bytes"]
    peak, baseline = measured["peak_bytes"], measured["baseline_peak_bytes"]
    memory = "" if peak is None else f", with {peak / baseline:.0%} of its memory"
    within = ""
    if budget is not None and peak is not None:
        within = f", {'within' if peak <= budget else 'OVER'} the budget of {format_bytes(budget)}"
    return (
        f"{busy_words(measured)}{cost_words(measured['cost'], weights)}{memory}{within}; found in "
        f"{document['tuning_s']:.0f} s and {document['tuning_steps']} real steps, and not compared on fresh seeds yet."
    )


def cost_words(cost: float, weights: str | None) -> str:
    """Return in words what a tuned plan costs relative to the baseline.

    Args:
        cost: its cost over the baseline's.
        weights: the weights of time, memory and energy as given; ``None`` for time alone.
    """
    if weights is None:
        return f"The tuned plan trains each sample {1 / cost:.2f}x as fast as the baseline"
    given = Weights.parse(weights)
    share = cost / (given.time + given.memory + given.energy)
    return f"The tuned plan costs {share:.2f} of the baseline's cost by the weights {weights}"


def busy_words(measured: Mapping[str, Any]) -> str:
    """Return a sentence, with a space behind it, on a tuned plan that was measured on a busy machine; else nothing."""
    waited = measured.get("waited_frac")
    if not is_disturbed(waited):
        return ""
    return f"The machine was busy: steps waited for a processor for {waited:.0%} of their time, so times are doubtful. "


def all_fit(comparison: Mapping[str, Any], name: str) -> bool:
    """Return whether every run of an arm stayed within the budget."""
    arm = next(arm for arm in comparison["arms"] if arm["name"] == name)
    return all(run["within_budget"] for run in arm["runs"])


def _ran_out(arm: Mapping[str, Any]) -> str:
    times = statistics.fmean(run.get("out_of_memory", 0) for run in arm["runs"])
    return f", ran out of memory {times:.1f} times a run" if times else ""


def alone_lines(comparison: Mapping[str, Any]) -> list[str]:
    """Return a line for each arm whose planner decided some windows without its network."""
    lines = []
    for arm in comparison["arms"]:
        alone: Counter[str] = Counter()
        for run in arm["runs"]:
            alone.update(run.get("alone", {}))
        if alone:
            reason, _ = alone.most_common(1)[0]
            runs = len(arm["runs"])
            lines.append(
                f"{arm['name']}: the planner decided alone in {alone.total()} of the windows of {runs} runs, most "
                f"often for {reason}: outside what the network was trained on, or an error in it"
            )
    return lines


def energy_lines(comparison: Mapping[str, Any]) -> list[str]:
    """Return a line for each arm whose energy is known for every seed: joules and grams per run, and the source."""
    lines = []
    for cost in arm_costs(comparison):
        if cost.energy_j is not None:
            grams = "" if cost.carbon_g is None else f", {cost.carbon_g:.3g} gCO2"
            lines.append(f"{cost.arm}: {cost.energy_j:.4g} J a run{grams} ({cost.energy_source})")
    return lines


def _time(comparison: Mapping[str, Any], arm: Mapping[str, Any]) -> str:
    if not has_target(comparison):
        return sample_time(next(cost for cost in arm_costs(comparison) if cost.arm == arm["name"]))
    times = reached_times(arm)
    if len(times) < len(arm["runs"]):
        return f"not reached\n({len(arm['runs']) - len(times)} of {len(arm['runs'])})"
    return f"{statistics.fmean(times):.1f} s"


def sample_time(cost: ArmCost) -> str:
    """Return the mean training time per sample of an arm's runs."""
    return "failed" if cost.sample_s is None else f"{1e3 * cost.sample_s:.3g} ms"


def _speedup(entry: Mapping[str, Any] | None) -> str:
    if entry is None or entry["time_ratio"] is None:
        return ""
    low, high = entry["time_ratio_ci95"]
    return f"{1 / entry['time_ratio']:.2f}x\n({beside_one(1 / high)} to {beside_one(1 / low)})"


def _memory(peak: int | None, baseline: int | None) -> str:
    if peak is None:
        return "?"
    return format_bytes(peak) + (f"\n({peak / baseline:.1%})" if baseline else "")


def _metric(arm: Mapping[str, Any]) -> str:
    values = [run["final_metric"] for run in arm["runs"] if run["final_metric"] is not None]
    return f"{statistics.fmean(values):.4g}" if values else "?"


def search_table(document: Mapping[str, Any]) -> Table:
    """Return a table with a row per trial of ``train --search``, best first, narrow enough for 80 columns."""
    title = f"{len(document['trials'])} trials of {document['decisions']:,} decisions"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("trial", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    for name in document["trials"][0]["values"]:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for row in document["trials"]:
        gain = "failed" if row["gain_percent"] is None else f"{row['gain_percent']:+.2f} %"
        values = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row["values"].values()]
        table.add_row(f"{row['number']}{' own' if row['own'] else ''}", gain, *values)
    return table


def search_verdict(document: Mapping[str, Any]) -> str:
    """Summarise the result of a search in a few sentences.

    Args:
        document: the output of ``train --search --json``.
    """
    count, path, ahead = len(document["trials"]), document["recipe"], document["ahead_of_own"]
    gain = f"{document['gain_percent']:+.2f} % of time against the planner alone"
    if document["own_remains_best"]:
        return f"No other of {count} trials gained more: the recipe's own values remain the best ({gain}); {path}"
    train = f"Train it in full before you rely on it: autotune train --recipe {path}"
    if ahead is None:
        failed = any(row["own"] and row["gain_percent"] is None for row in document["trials"])
        own = "with the recipe's own, training failed" if failed else "how far ahead of the recipe's own is not known"
        return f"Trial {document['best']} is the best of {count} ({gain}); {own}. {train}"
    low, high = ahead["percent_ci95"]
    shown = "" if low > 0 else " No difference from the recipe's own values is shown."
    return (
        f"Trial {document['best']} is the best of {count} ({gain}): {ahead['percent']:+.2f} % ahead of the recipe's "
        f"own values (95 % interval over jobs {low:+.2f} to {high:+.2f}), on one seed; the best of many looks better "
        f"than it is.{shown} {train}"
    )
