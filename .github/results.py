"""docs/results.md: all measured tables, from the files of the benchmarks; a test compares.

python .github/results.py    # write the page anew, after a benchmark ran
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from autotune.budget import format_bytes
from autotune.stats import paired_ratio

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
HEAD = """# Results

Every table here is made from a file in `runs/benchmarks/<device>/` by `python .github/results.py`. Ratios are paired
within one run, with 95 % intervals in brackets. Below 1 is faster, or smaller. Failures and losses stand where wins do.

Most tables of `charlm` were measured when it computed attention in steps, as `charlm:eager` does now, and a step needed
558 MiB (batch of 32, fp32). The demo and the tables with 510 MiB are of `charlm` with fused attention, as it is now.
"""

Document = dict[str, Any]


def interval(value: float | None, ends: Iterable[float] | None, digits: int = 2) -> str:
    """Return a value with its interval."""
    if value is None:
        return ""
    low, high = (value, value) if ends is None else ends
    if low == high == value:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(heads: list[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield ""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def comparison(found: Document) -> Iterator[str]:
    """Yield the arms of a comparison against its baseline."""
    metric = found["metric"]
    aim = "at most" if metric["goal"] == "min" else "at least"
    budget = found["memory_budget_bytes"]
    yield (
        f"Job `{found['job']}`, {len(found['seeds'])} seeds, target: {aim} {metric['target']:g}"
        + (f", within {format_bytes(budget)}" if budget else "")
        + (f", every {found['dips']['every']}th stretch within {found['dips']['share']:.0%}" if found["dips"] else "")
        + (". Fewer than six seeds are an indication." if found["indication_only"] else ".")
    )
    yield from table(
        ["arm", "time to target", "peak memory", "final metric", "verdict"],
        (
            (
                entry["arm"],
                interval(entry["time_ratio"], entry["time_ratio_ci95"]),
                "" if entry["memory_ratio"] is None else f"{entry['memory_ratio']:.2f}",
                "" if entry["metric_difference"] is None else f"{round(entry['metric_difference'], 4) + 0.0:+.2%}",
                f"{entry['verdict']}: {entry['reason']}",
            )
            for entry in found["against_baseline"]
        ),
    )


def reproduced(found: Document) -> Iterator[str]:
    """Yield a table of the paper, beside what was measured here."""
    yield from table(
        ["metric", "configuration", "unit", "paper", "here", "paper: relative", "here: relative", "from"],
        (
            (
                row["metric"],
                row["configuration"],
                row["unit"],
                *("" if row[key] is None else f"{row[key]:.3g}" for key in ("paper", "ours")),
                *("" if row[key] is None else f"{row[key]:.2f}" for key in ("paper_change", "our_change")),
                row["source"],
            )
            for row in found["rows"]
        ),
    )
    for key in ("comparison", "cross_layer"):
        if key in found:
            yield from comparison(found[key])
    for note in found["notes"]:
        yield f"- {note}"
    yield ""


def attached(found: Document) -> Iterator[str]:
    """Yield what being attached costs, and what it wins where plans move."""
    if found["overhead"]:
        yield "A step's time over that of an unattached one, and over 1,000 steps, probe and profile included:"
        yield from table(
            ["job", "stage", "per step", "over 1,000 steps"],
            (
                (one["job"], stage, interval(row["ratio_median"], row["ratio_ci95"], 3), f"{total:.3f}")
                for one in found["overhead"]
                for stage in ("observe", "act")
                for row, total in [(one[stage], one[stage]["ratio_total_1000_steps"])]
            ),
        )
    if found.get("followed"):
        yield "A step's time over that of an unattached copy under the same plans, and what adds most to ordinary ones:"
        yield from table(
            ["run", "stage", "per step", "over 1,000 steps", "by the tuner's own count", "most is added by"],
            (
                (
                    one["course"],
                    one["stage"],
                    interval(one["ratio_median"], one["ratio_ci95"], 3),
                    f"{one['ratio_total_1000_steps']:.3f}",
                    f"{1 + one['overhead_frac']:.3f}",
                    ", ".join(f"{room} ({share:.1%})" for room, share in largest),
                )
                for one in found["followed"]
                for largest in [list(one["breakdown"]["all others"]["cpu"]["rooms"].items())[:5]]
            ),
        )
    if found["situations"]:
        yield "Time over that of the best static plan. The oracle knows every batch and budget, and pays for nothing:"
        yield from table(
            ["situation", "job", "attached", "oracle", "steps over the budget"],
            (
                (
                    one["situation"],
                    one["job"],
                    *(
                        interval(one[key]["mean"], one[key]["ci95"], 3)
                        for key in ("live_over_static", "oracle_over_static")
                    ),
                    one["over_budget_steps"],
                )
                for one in found["situations"]
            ),
        )


def _predicted_on_gpu(found: Document) -> str:
    """Return how far predictions were off, over the plans of all arms; no profile knows the arithmetic of tf32."""
    arms = [arm for job in found["jobs"] for name, arm in job["arms"].items() if name != "tf32"]
    plans = [one for arm in arms for one in arm["plans"] if one["seconds_per_step"]]
    if not plans:
        first = found["answers"]
        return (
            f"No arm was measured in this time. Over {first['time']['plans']} plans at 60 and 40 % of the baseline's "
            f"memory, peaks were within {first['memory']['worst_frac']:.2%} and times within "
            f"{first['time']['worst_frac']:.1%}."
        )
    times: dict[int, list[float]] = {}
    for one in plans:
        ratio = one["predicted_seconds_per_step"] / one["seconds_per_step"]
        times.setdefault(one["plan"]["accumulation_steps"], []).append(ratio)
    told = ", ".join(f"{min(ratios):.2f} to {max(ratios):.2f} (k = {k})" for k, ratios in sorted(times.items()))
    peaks = max(abs(one["predicted_peak_bytes"] / one["peak_bytes"] - 1) for one in plans)
    return f"Predicted over measured times of all arms but tf32: {told}; peaks within {peaks:.2%}."


def gpu(found: Document) -> Iterator[str]:
    """Yield the arms of each job on a GPU by memory budget, and whether predictions and attached runs hold."""
    answers, kept = found["answers"], found["settings"]
    jobs = ",".join(job["reference"] for job in found["jobs"])
    yield (
        f"`autotune bench gpu --jobs {jobs}`, {kept['rounds']} windows of each plan in turn with the fp32 baseline, "
        f"each arm in a process of its own. {found['ended'].capitalize()} after {found['seconds']:.0f} s. "
        f"{_predicted_on_gpu(found)} A recomputed pass differs from a saved one by "
        f"{answers['exact']['recomputed_frac']:.0e}, a repeated one by {answers['exact']['repeated_frac']:.0e}. "
        "Arms with the same plan differ by what processes differ by; one whose peak is a little above the "
        "baseline's of another process does not fit 100 %."
    )
    for job in found["jobs"]:
        profiled = job["profiled"]
        yield (
            f"\n`{job['reference']}` ({', '.join(job['data'])}; {job['parameters'] / 1e6:.0f} M parameters, batch of "
            f"{job['batch_size']}): baseline {format_bytes(job['baseline']['peak_bytes'])}, "
            f"{job['baseline']['seconds_per_step'] * 1e3:.0f} ms a step; profile in {profiled['steps']} steps and "
            f"{profiled['seconds']:.0f} s. Warned: {'; '.join(profiled['warnings']) or 'nothing'}."
        )
        shares = [f"within {share:.0%}" for share in kept["shares"]]
        rows = [
            [name, *(f"{one['speedup']:.2f}" if one["fits"] else "no fit" for one in arm["budgets"])]
            for name, arm in job["arms"].items()
        ]
        yield from table(["arm: times as fast", *shares], rows) if rows else ()
        yield from table(
            ["attached", "step time, attached over not", "with one-off costs over 1,000 steps"],
            (
                [mode, interval(one["ratio_median"], one["ratio_ci95"]), f"{one['ratio_total_1000_steps']:.2f}"]
                for mode, one in ((mode, job["attached"][mode]) for mode in ("observe", "act"))
            ),
        )


def overhead(found: Document) -> Iterator[str]:
    """Yield what measuring costs a step."""
    where = f"{found['ranks']} ranks, {_layout(found)}" if "ranks" in found else "one process"
    yield f"Job `{found['job']}`, {where}: a tuned engine's step under the baseline's plan takes"
    yield f"{interval(found['ratio_median'], found['ratio_ci95'], 3)} of a plain loop's time ({found['pairs']} pairs)."
    yield ""


def _layout(found: Document) -> str:
    """Return the layout of ranks in words."""
    if "zero_stage" in found or found["engine"] == "deepspeed":
        return f"ZeRO stage {found.get('zero_stage', found.get('layout', '').removeprefix('zero-'))}"
    return f"FSDP2 with {found['layout']}"


def pipelines(found: Document) -> Iterator[str]:
    """Yield predicted steps and bubbles of pipelines beside measured ones."""
    rows = sorted(found["rows"], key=lambda row: row["seconds"])
    yield (
        f"Job `{found['job']}` on {found['ranks']} ranks: steps of {len(rows)} layouts and k, without the update. "
        f"Predicted seconds are {found['time_error_median']:.1%} off in the median (90 %: "
        f"{found['time_error_p90']:.1%}), bubbles {found['bubble_error_median']:.1%} (90 %: "
        f"{found['bubble_error_p90']:.1%}) of the measured ones. What is predicted to be fastest takes "
        f"{found['chosen_over_best']:.3f} of the time of the fastest. The ten fastest:"
    )
    yield from table(
        ["layout", "k", "seconds", "predicted", "bubble", "predicted"],
        (
            (
                row["layout"],
                row["accumulation_steps"],
                f"{row['seconds']:.3f}",
                f"{row['predicted_s']:.3f}",
                f"{row['bubble']:.1%}",
                f"{row['predicted_bubble']:.1%}",
            )
            for row in rows[:10]
        ),
    )


def batching(found: Document) -> Iterator[str]:
    """Yield a race of adaptive batching against constants."""
    yield f"Job `{found['job']}`: time to the target over that of the best constant, {found['best_constant']}."
    rows = [*found["constant_over_best"].items(), (f"adaptive, {found['policy']}", found["live_over_best"])]
    yield from table(["batching", "time"], ((name, interval(row["mean"], row["ci95"])) for name, row in rows))


def ramp(found: Document) -> Iterator[str]:
    """Yield arms at equal cost against the best constant."""
    best, tried, arms = found["best"], found["tuning_runs"], found["arms"]
    yield (
        f"Job `{found['job']}`, {len(found['seeds'])} seeds: cost to the same loss over that of the best constant of "
        f"{tried['k=']}, {best['k=']}. The fixed cost of an update is {found['fixed_samples']:g} samples, a run costs "
        f"{found['total_samples']:,.0f}. Tuning is free but for branches, whose cost counts."
    )
    rows = {
        "learning rate by branches, then a plain ramp (`autotune ramp`), not tuned": "rate by branches",
        "learning rate and batch by branches, not tuned": "rate and batch by branches",
        f"plain ramp, the best of {tried['ramp']}: {best['ramp']}": best["ramp"],
        f"noise scale, the best of {tried['noise scale']}: {best['noise scale']}": best["noise scale"],
    }
    finalists = (name for name, arm in arms.items() if len(arm["metric"]) > 1 and name not in rows.values())
    yield from table(
        ["batch and learning rate", "cost", "metric at the end, mean"],
        ((shown, *ramp_cells(arms[name])) for shown, name in {**rows, **{name: name for name in finalists}}.items()),
    )


def ramp_cells(arm: Document) -> tuple[str, str]:
    """Return the cost of an arm over that of the best constant, and its mean metric at the end."""
    ratio, ends = arm["cost_over_best"], arm["metric"]
    mean = "failed" if None in ends else f"{sum(ends) / len(ends):.3f}"
    return ("" if ratio is None else interval(ratio["mean"], ratio["ci95"])), mean


def cluster(found: Document) -> Iterator[str]:
    """Yield how trials on several workers scale."""
    per_minute = found["trials_per_minute"]
    yield (
        f"Job `{found['job']}`: {per_minute['one']:.0f} trials a minute on one worker, {per_minute['all']:.0f} on "
        f"{found['workers']}; efficiency {interval(found['efficiency_median'], found['efficiency_ci95'])}."
    )
    yield ""


def search(found: Document) -> Iterator[str]:
    """Yield the steps that each method needs."""
    yield f"Job `{found['job']}` within {found['memory_budget']}, {found['steps']} real steps for each method."

    def spent(method: Document) -> str:
        limits = zip(method["steps"]["values"], method["steps"]["limits"], strict=True)
        return ", ".join(f"more than {limit}" if value is None else str(value) for value, limit in limits)

    yield from table(
        [
            "method",
            f"steps to a plan within {found['within_frac']:.0%} of the best one known",
            "its answer is slower by",
        ],
        (
            (name, spent(method), ", ".join(f"{value:.1%}" for value in method["regret_frac"]["values"]))
            for name, method in found["methods"].items()
        ),
    )


def peers(found: Document) -> Iterator[str]:
    """Yield the best arm of every peer and of our plans within each budget."""
    base = found["baseline"]
    yield (
        f"Job `{found['job']}` within shares of the plain fp32 model's peak, {format_bytes(base['peak_bytes'])}, in "
        f"{found['rounds']} rounds. Every peer has its best setting and k; the loss is that of the last steps."
    )
    yield from table(
        ["within", "arm", "time over the fastest's", "peak", "compiling", "loss"],
        (
            (
                f"{row['budget_frac']:.0%}",
                row["name"],
                interval(row["over_fastest"]["ratio_median"], row["over_fastest"]["ratio_ci95"]),
                f"{row['peak_bytes'] / base['peak_bytes']:.0%}",
                f"{row['compile_s']:.0f} s",
                f"{row['loss']:.3f}",
            )
            if row["fits"]
            else (f"{row['budget_frac']:.0%}", row["name"], row["failure"] or "out of reach", "", "", "")
            for row in found["arms"]
        ),
    )
    yield from _ladder(found)


def _ladder(found: Document) -> Iterator[str]:
    """Yield how much the plan with all storages wins over the one that saves and recomputes only, where they differ."""
    rounds = {(one["seconds_per_step"], one["peak_bytes"]): one["rounds_s"] for one in found["tried"]}
    fitting = [row for row in found["arms"] if row["fits"]]

    def within(frac: float, family: str) -> list[float] | None:
        rows = [row for row in fitting if (row["budget_frac"], row["family"]) == (frac, family)]
        return next((rounds[row["seconds_per_step"], row["peak_bytes"]] for row in rows), None)

    told = []
    for frac in dict.fromkeys(row["budget_frac"] for row in fitting):
        own, lean = within(frac, "ours:all"), within(frac, "ours:save-recompute")
        if own and lean:
            ratio = paired_ratio(own, lean)
            told.append(f"{interval(ratio['ratio_median'], ratio['ratio_ci95'])} within {frac:.0%}")
    yield f"Time of `ours:all` over that of `ours:save-recompute`: {', '.join(told)}."
    yield ""


def storages(found: Document) -> Iterator[str]:
    """Yield time and peak of each storage, beside saving all in the same precision."""
    first = next(row for row in found["rows"] if row["failure"] is None)
    yield (
        f"Job `{found['job']}`, one storage in all units at k = {found['accumulation_steps']}; rounds of windows in "
        f"turn: {found['rounds']}. In {first['precision']}, `{first['storage']}` takes "
        f"{1000 * first['seconds_per_step']:.0f} ms a step and {format_bytes(first['peak_bytes'])}. The first window "
        "compiles."
    )
    yield from table(
        ["precision", "storage", "step", "time over saving's", "peak over saving's", "first window"],
        (
            (
                row["precision"],
                row["storage"],
                f"{1000 * row['seconds_per_step']:.0f} ms",
                interval(*map((row["over_saving"] or {}).get, ("ratio_median", "ratio_ci95"))),
                "" if row["peak_over_saving"] is None else f"{row['peak_over_saving']:.0%}",
                f"{row['first_window_s']:.1f} s",
            )
            if row["failure"] is None
            else (row["precision"], row["storage"], row["failure"], "", "", "")
            for row in found["rows"]
        ),
    )


def simulator(found: Document) -> Iterator[str]:
    """Yield the simulator's rate, and how it ranks plans."""
    ranking = found["ranking"]
    yield f"{found['decisions_per_s']:,.0f} decisions a second. Time to the target of `{ranking['job']}`, in seconds"
    yield f"(rank correlation {ranking['rank_correlation']:.2f}):"
    times = ranking["predicted_time_to_target_s"], ranking["real_time_to_target_s"]
    yield from table(
        ["plan", "predicted", "real"],
        ((f"{name}: {plan}", *(f"{one[name]:.1f}" for one in times)) for name, plan in ranking["plans"].items()),
    )


def policy(found: Document) -> Iterator[str]:
    """Yield what each method loses where nothing moves, and wins where conditions do."""
    yield "Where nothing moves: slower than the exact optimum by, in percent."
    yield from table(
        ["method", "jobs", "median", "mean", "infeasible", "plans measured"],
        (
            (
                name,
                one["jobs"],
                f"{one['regret_median']:.2f}",
                interval(one["regret_mean"] + 0.0, one["regret_mean_ci95"]).replace("-0.00", "0.00"),
                one["infeasible"],
                one["evaluations"],
            )
            for name, one in found["methods"].items()
        ),
    )
    yield "Where memory dips without notice: time won over the planner that expects no dips, in percent of the run."
    arms = list(next(iter(found["families"].values()))["ci95"])
    yield from table(
        ["dips", *arms],
        (
            (family, *(interval(row[name], row["ci95"][name], 1) for name in arms))
            for family, row in found["families"].items()
        ),
    )
    yield "Where conditions move: time won over the planner alone, in percent of the run."
    names = list(dict.fromkeys(name for row in found["dynamic"].values() for name in row["methods"]))
    yield from table(
        ["what moves", "clairvoyant", *names],
        (
            (
                row,
                f"{one['headroom_percent']:.1f}",
                *(
                    interval(one["methods"][name]["won_percent"], one["methods"][name]["won_ci95"], 1)
                    if name in one["methods"]
                    else ""
                    for name in names
                ),
            )
            for row, one in found["dynamic"].items()
        ),
    )


def solver(found: Document) -> Iterator[str]:
    """Yield how exact and how fast the solvers are."""
    gap, price = found["gap_to_brute_force_max"], (found["price_solver_gap_median"], found["price_solver_gap_p95"])
    yield f"On {found['instances']} small problems the exact solver is at most {gap:.1g} from the best plan, and"
    yield f"the price solver {price[0]:.1%} (median) and {price[1]:.1%} (95th percentile). 1,000 units with"
    yield f"{found['options_per_unit']} choices each take {found['seconds_1000_units']:.1f} s for each k."
    yield ""


def operations(found: Document) -> Iterator[str]:
    """Yield the errors of predictions by kind of operation and by bound."""
    kept = found["asked"] - found["failed"]
    yield f"{kept} runs of random plans; {found['disturbed']} of them were disturbed by other programs. Errors of the"
    yield "profile's seconds per step, by what bounds most of the operators' time:"
    yield from table(
        ["runs that are", "runs", "median", "90th percentile"],
        (
            (name, one["runs"], f"{one['error_median']:.1%}", f"{one['error_p90']:.1%}")
            for name, one in found["step"].items()
            if one["runs"]
        ),
    )
    yield "Predicted over measured seconds of operators, by a roofline at the machine's measured rates:"
    yield from table(
        ["operators", "runs", "share of the time", "predicted over measured (10th to 90th percentile)"],
        (
            (
                name,
                one["runs"],
                f"{one['time_frac']:.1%}",
                interval(one["predicted_frac"], one["predicted_frac_p10_p90"]),
            )
            for part in ("bounds", "kinds")
            for name, one in found[part].items()
        ),
    )


def _errors(found: Document) -> list[str]:
    """Return the cells of errors of throughput and peak, and of wrongly refused runs."""
    cells = []
    for name in ("throughput", "peak"):
        median, p90 = (found[f"{name}_error_{label}"] for label in ("median", "p90"))
        cells.append("" if median is None else f"{median:.1%}, {p90:.1%}")
    refused = found.get("wrongly_refused")
    return [*cells, "" if refused is None else str(refused)]


def published(found: Document) -> Iterator[str]:
    """Yield errors of estimates for many devices against published runs, by source, and those of other rules."""
    order = found["order"]
    yield (
        f"{found['rows_count']} published runs. Errors are medians and 90th percentiles of estimated over measured, "
        "less 1. Kendall's tau within runs of one model and device: "
        f"{order['throughput']['kendall_tau_mean']:.2f} (mean; "
        f"worst {order['throughput']['kendall_tau_min']:.2f}) of tokens/s per device, "
        f"{order['peak']['kendall_tau_mean']:.2f} (worst {order['peak']['kendall_tau_min']:.2f}) of peaks."
    )
    heads = ["throughput", "peak", "wrongly refused"]
    yield from table(
        ["runs", "number", *heads],
        (
            *(
                (f"all, each {name} left out of the fit", found["rows_count"], *_errors(one))
                for name, one in found["left_out"].items()
            ),
            ("all, fitted to them", found["rows_count"], *_errors(found)),
            *(
                (f"{kind}: {name}", one["rows"], *_errors(one))
                for kind in ("source", "device", "scale", "technique")
                for name, one in found["by"][kind].items()
            ),
        ),
    )
    yield "A source or a model predicted by constants that were fitted without it:"
    yield from table(
        ["left out", "runs", "throughput", "peak"],
        (
            (name, one["rows"], *_errors(one)[:2])
            for kind in found["left_out"].values()
            for name, one in kind["groups"].items()
        ),
    )
    yield "Other rules on the same runs:"
    yield from table(["rule", *heads], ((name, *_errors(one)) for name, one in found["peers"].items()))
    yield "The constants, before and after the fit:"
    yield from table(
        ["constant", "meaning", "unit", "before", "after", "source of the value before"],
        (
            (f"`{name}`", one["meaning"], one["unit"], f"{one['prior']:.3g}", f"{one['value']:.3g}", one["source"])
            for name, one in found["constants"].items()
        ),
    )


def calibrate(found: Document) -> Iterator[str]:
    """Yield estimated over measured times and peaks of jobs that the calibration did not run."""
    rows = [row for row in found["checked"] if row["failure"] is None]

    errors = "; ".join(
        f"{name} {own['median']:.1%} (median), {own['largest']:.1%} (largest)" for name, own in found["errors"].items()
    )
    yield (
        f"{found['threads']} thread(s), torch {found['torch']}; operators were measured in small networks of other "
        f"shapes, in {found['seconds']:.0f} s. Errors: {errors}."
    )
    yield from table(
        ["job", "plan", "estimated", "measured", "ratio", "ratio of peaks"],
        (
            (
                row["job"],
                row["plan"],
                f"{row['predicted_s']:.3f} s",
                f"{row['measured_s']:.3f} s",
                f"{row['predicted_s'] / row['measured_s']:.2f}",
                f"{row['predicted_peak_bytes'] / row['measured_peak_bytes']:.3f}",
            )
            for row in rows
        ),
    )


KINDS: dict[str, tuple[str, Callable[[Document], Iterator[str]]]] = {
    "demo": ("The demo", comparison),
    "search": ("Steps until a search has found its plan", search),
    "policy": ("Policies on simulated jobs", policy),
    "dips": ("Policies on real jobs whose budget dips", comparison),
    "attach": ("Attached to live training", attached),
    "batching": ("Adaptive batching", batching),
    "ramp": ("Ramps of the batch, with a fixed cost of each update", ramp),
    "reproduce": ("The paper's tables, on small jobs", reproduced),
    "storages": ("What each storage costs", storages),
    "peers": ("Techniques of other programs", peers),
    "operations": ("Errors of predictions, by operation", operations),
    "published": ("Estimates for many devices, against published runs", published),
    "calibrate": ("Estimates from this machine's measured rates", calibrate),
    "gpu": ("On a GPU", gpu),
    "overhead": ("What measuring costs", overhead),
    "pipelines": ("Pipelines", pipelines),
    "cluster": ("Several workers", cluster),
    "simulator": ("The simulator", simulator),
    "solver": ("The solvers", solver),
}


def page() -> str:
    """Return the whole page."""
    files = sorted((ROOT / "runs" / "benchmarks").glob("*/*.json"), key=lambda path: path.name)
    left = {path.name for path in files}
    lines = [HEAD]
    for kind, (title, render) in KINDS.items():
        own = [path for path in files if path.stem.partition("-")[0] == kind]
        lines += [f"## {title}\n"] if own else []
        for path in own:
            found = json.loads(path.read_text())
            left.discard(path.name)
            lines.append(f"### {path.stem}\n")
            facts = [found["device"], *([f"`{found['command']}`"] if "command" in found else [])]
            facts += [f"`runs/benchmarks/{path.parent.name}/{path.name}`", *filter(None, [found.get("note")])]
            lines.append("; ".join(facts).rstrip(".") + ".\n")
            lines += render(found)
    if left:
        raise ValueError(f"no table is known for {', '.join(sorted(left))}")
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
