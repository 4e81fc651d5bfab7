"""The figures of the benchmark files in the words of README.md and docs/, which a test compares.

python .github/figures.py    # print every figure, to be put into the pages after a benchmark ran anew
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.budget import format_bytes
from autotune.stats import mean_interval

BENCHMARKS = Path(__file__).parent.parent / "runs" / "benchmarks"
POLICY_ROWS = {
    "noise scale: late and noisy": "noise_scale",
    "costs: wrong and drifting": "costs",
    "sequence lengths, at random": "pressure",
    "sequence lengths that grow": "curriculum",
    "dips of the memory of three families, half of them unannounced": "events",
    "the same, with switches that cost": "switching",
    "all of it": "all",
    "all of it, twice as strongly as in training": "all_double",
}
DIPS_ROWS = {
    "`charlm_ragged:curriculum`: sequences that grow, 6": "dips-charlm-ragged-curriculum",
    "`charlm:adaptive`: a step takes k batches, 6": "dips-charlm-adaptive",
    "`digits`, 10": "dips-digits",
    "`digits:watched`: shorter stretches, 10": "dips-digits-watched",
}


def read(name: str) -> dict[str, Any]:
    """Return a benchmark's document, from whichever machine's folder it is in."""
    (path,) = BENCHMARKS.glob(f"*/{name}.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def ratio(value: float, ends: list[float]) -> str:
    """Return a ratio with its interval."""
    return f"{value:.3f} ({ends[0]:.3f} to {ends[1]:.3f})"


def demo() -> Iterator[str]:
    """Yield what the demo came to."""
    found = read("demo")
    entries = {entry["arm"]: entry for entry in found["against_baseline"]}
    whole = max(run["peak_bytes"] for run in found["arms"][0]["runs"])
    yield f"`make demo` on two CPU cores ({found['minutes']} minutes"
    for arm in found["arms"]:
        runs, mark = arm["runs"], "**" if arm["name"] in ("planner", "ppo") else ""
        peak = max(run["peak_bytes"] for run in runs)
        cells = [f"{mark}{statistics.fmean(run['time_to_target_s'] for run in runs):.1f} s{mark}"]
        if arm["name"] in entries:
            low, high = (1 / end for end in reversed(entries[arm["name"]]["time_ratio_ci95"]))
            cells.append(f"{mark}{1 / entries[arm['name']]['time_ratio']:.2f}x{mark} ({low:.2f} to {high:.2f})")
        else:
            cells.append("")
        cells += [
            f"{format_bytes(peak)} ({peak / whole:.0%})",
            f"{statistics.fmean(r['final_metric'] for r in runs):.3f}",
        ]
        cells.append(f"{arm['tuning_s']:.0f} s, {arm['tuning_steps']} steps" if arm["tuning_steps"] else "")
        yield f"| {' | '.join(cells)} |"


def attached() -> Iterator[str]:
    """Yield what being attached costs and wins."""
    words = {
        "digits_deep": (" of an unattached one's time observing", " acting", "probe and profile included, "),
        "charlm": ("", "", ""),
    }
    for one in read("attach-overhead")["overhead"]:
        observe, act = one["observe"], one["act"]
        watching, acting, included = words[one["job"]]
        yield f"{ratio(observe['ratio_median'], observe['ratio_ci95'])}{watching}"
        yield f"and {ratio(act['ratio_median'], act['ratio_ci95'])}{acting}"
        yield (
            f"over 1,000 steps{', ' * bool(included)}{included or ' '}"
            f"{observe['ratio_total_1000_steps']:.3f} and {act['ratio_total_1000_steps']:.3f}"
        )
    situations = [one for name in ("attach-situations", "attach-situations-k-free") for one in read(name)["situations"]]
    for one in situations:
        pair = " | ".join(
            ratio(one[key]["mean"], one[key]["ci95"]) for key in ("live_over_static", "oracle_over_static")
        )
        low, high = one["share_of_ceiling"]["ci95"]
        yield f"| {one['situation']} | {pair} | {one['share_of_ceiling']['mean']:.0%} ({low:.0%} to {high:.0%}) |"
    nearest = max(one["largest_measured_over_budget"] for one in situations)
    yield f"{sum(one['metered'] for one in situations)} were metered: none was over (at most {nearest:.3f} of it)"


def policy() -> Iterator[str]:
    """Yield what the shipped kind of policy wins where conditions move."""
    moving = read("policy")["dynamic"]
    for row, name in POLICY_ROWS.items():
        methods = moving[name]["methods"]
        cells = []
        for arm in ("planner_assumed", "ppo", "ppo_drawn"):
            low, high = (end + 0.0 for end in methods[arm]["won_ci95"])
            cells.append(f"{methods[arm]['won_percent'] + 0.0:.2f} ({low:.2f} to {high:.2f})")
        yield f"| {row} | {moving[name]['headroom_percent']:.1f} | {' | '.join(cells)} |".replace("-0.00", "0.00")


def families() -> Iterator[str]:
    """Yield what is won where memory dips without notice: by knowing, by a rule, by a belief, and by learning."""
    for family, row in read("policy")["families"].items():
        known = (row[name] for name in ("clairvoyant", "told_rate", "full_budget", "rule"))
        belief, ppo, beyond = (
            f"{row[name]:.2f} ({row['ci95'][name][0]:.2f} to {row['ci95'][name][1]:.2f})"
            for name in ("planner_belief", "ppo", "ppo_over_belief")
        )
        cells = " | ".join(f"{one:.2f}" for one in known)
        yield f"| {family} | {cells} | {belief} | {ppo} | {beyond} |".replace("-0.00", "0.00")


def dips() -> Iterator[str]:
    """Yield by how much the shipped policy is ahead on real jobs whose budget dips."""
    for row, name in DIPS_ROWS.items():
        arms = {arm["name"]: arm["runs"] for arm in read(name)["arms"]}
        cells = []
        # Where sequences grow, the exact plan that always fits is the longest ones'.
        static = "exact" if "exact" in arms else "worst_static"
        for other in (static, "optuna", "planner"):
            pairs = zip(arms[other], arms["ppo"], strict=True)
            logs = [math.log(one["time_to_target_s"] / own["time_to_target_s"]) for one, own in pairs]
            low, high = (math.exp(end) for end in mean_interval(logs))
            mean = f"{math.exp(statistics.fmean(logs)):.2f}x"
            cells.append(f"{f'**{mean}**' if low > 1 else mean} ({low:.2f} to {high:.2f})")
        out = (statistics.fmean(run["out_of_memory"] for run in arms[name]) for name in ("planner", "ppo"))
        yield f"| {row} | {' | '.join(cells)} | {', '.join(f'{count:.3g}' for count in out)} |"


def reproduced() -> Iterator[str]:
    """Yield what repeating the paper's tables came to."""
    for table, job in (("table1", "`digits:adamw`, convolutions"), ("table2", "`charlm`, a transformer")):
        found = read(f"reproduce-{table}")
        (one,) = (entry for entry in found["comparison"]["against_baseline"] if entry["arm"] == "ppo")
        papers = {row["configuration"]: row["paper"] for row in found["rows"] if row["metric"] == "time to target"}
        low, high = one["time_ratio_ci95"]
        yield (
            f"| {job} | {one['time_ratio']:.2f} ({low:.2f} to {high:.2f}) | {papers['ppo'] / papers['baseline']:.2f} | "
            f"{one['memory_ratio']:.0%} | {one['metric_difference']:+.2%} | {one['verdict']}".replace("%", " %")
        )
    for name, words in (("table2", "are {} times as fast"), ("table2-one-thread", "{} times")):
        rates = read(f"reproduce-{name}")["flops"]["peak_per_s"]
        yield words.format(f"{rates['bf16'] / rates['fp32']:.1f}")
    arms = read("reproduce-table2-one-thread")["comparison"]["against_baseline"]
    yield f"took {next(one['time_ratio'] for one in arms if one['arm'] == 'ppo'):.2f} of the time"
    tables = ("table1", "table2", "table3", "table4", "error-analysis")
    seconds = sum(read(f"reproduce-{table}")["seconds"] for table in tables)
    yield f"the five tables take {seconds / 60:.0f} minutes on two cores"
    (one, eight) = (
        next(e for e in read("reproduce-table3")["cross_layer"]["against_baseline"] if name in e["arm"])
        for name in ("+compile", "+adamw8bit")
    )
    low, high = one["time_ratio_ci95"]
    yield f"8 bits take {eight['memory_ratio']:.2f} of the memory"
    yield f"compiled units take {one['time_ratio']:.2f} ({low:.2f} to {high:.2f}) of the time on a CPU"


def many_seeds(name: str) -> Iterator[str]:
    """Yield what the first table comes to on forty seeds, of which the baseline does not reach the target on all."""
    arms = {arm["name"]: arm["runs"] for arm in read(name)["comparison"]["arms"]}
    pairs = list(zip(arms["baseline"], arms["ppo"], strict=True))
    both = [(one, own) for one, own in pairs if one["reached"] and own["reached"]]
    logs = [math.log(own["time_to_target_s"] / one["time_to_target_s"]) for one, own in both]
    low, high = (math.exp(end) for end in mean_interval(logs))
    yield f"{math.exp(statistics.fmean(logs)):.2f} ({low:.2f} to {high:.2f}) of the baseline's time"
    yield f"on the {len(both)} seeds on which both arrive (the policy does on {sum(own['reached'] for _, own in pairs)}"
    worth = [own["final_metric"] / one["final_metric"] - 1 for one, own in pairs]
    low, high = mean_interval(worth)
    yield f"accuracy {statistics.fmean(worth):+.2%} ({low:+.2%} to {high:+.2%})".replace("%", " %")


def batching() -> Iterator[str]:
    """Yield what following the gradient's noise comes to."""
    found = read("batching-charlm_long_adaptive")
    constant = found["constant_over_best"]

    def rounded(name: str) -> str:
        one = found["live_over_best"] if name == "live" else constant[name]
        return f"{one['mean']:.2f} ({one['ci95'][0]:.2f} to {one['ci95'][1]:.2f})"

    yield f"live runs took {rounded('live')} of the time"
    yield f"of the best constant k, which is {found['best_constant'].removeprefix('k=')}."
    yield f"k = 1 took {rounded('k=1')} of it, k = 8 {rounded('k=8')}"


def ramps() -> Iterator[str]:
    """Yield what ramps, branches and the noise rule cost, over the best constant."""
    for job, fixed in itertools.product(("charlm_long:contexts", "digits:perceptron"), (512, 64)):
        found = read(f"ramp-{job.replace(':', '_')}-{fixed}")
        names = ("rate by branches", "rate and batch by branches", found["best"]["ramp"], found["best"]["noise scale"])
        ratios = [found["arms"][name]["cost_over_best"] for name in names]
        cells = (f"{one['mean']:.2f} ({one['ci95'][0]:.2f} to {one['ci95'][1]:.2f})" for one in ratios)
        yield f"| `{job}`, {fixed} | {' | '.join(cells)} |"


def cluster() -> Iterator[str]:
    """Yield how trials spread over workers."""
    found = read("cluster-digits")
    rates, (low, high) = found["trials_per_minute"], found["efficiency_ci95"]
    yield f"Two workers on two cores try {rates['all']:.0f} plans of `digits` a minute, one {rates['one']:.0f}"
    yield f"{found['efficiency_median']:.2f} ({low:.2f} to {high:.2f}) of twice as many"


def sharded() -> Iterator[str]:
    """Yield what control costs over DeepSpeed."""
    for stage in range(4):
        one = read(f"overhead-charlm_zero-zero{stage}")
        yield f"{ratio(one['ratio_median'], one['ratio_ci95'])} at stage {stage}"


def search() -> Iterator[str]:
    """Yield what finding a plan costs."""
    found = read("search-charlm")
    methods = found["methods"]

    def steps(name: str) -> str:
        pairs = zip(methods[name]["steps"]["values"], methods[name]["steps"]["limits"], strict=True)
        return ", ".join(f"more than {limit:.0f}" if value is None else f"{value:.0f}" for value, limit in pairs)

    def behind(name: str) -> str:
        return ", ".join(
            "none" if value is None else f"{value:.1%}" for value in methods[name]["regret_frac"]["values"]
        )

    rows = {
        "planner": "planner",
        "ppo": "ppo",
        "optuna-cold": "Optuna from nothing",
        "optuna-warm": "Optuna from the rules",
    }
    for name, called in rows.items():
        yield f"| {called} | {steps(name)} | {behind(name)} |"


def figures() -> list[str]:
    """Return everything that the README and docs/ must say, word for word but for line breaks."""
    return [
        *demo(),
        *attached(),
        *policy(),
        *families(),
        *dips(),
        *reproduced(),
        *many_seeds("reproduce-table1-40-seeds"),
        *many_seeds("reproduce-table1-40-seeds-one-thread"),
        *batching(),
        *ramps(),
        *cluster(),
        *sharded(),
        *search(),
    ]


if __name__ == "__main__":
    for line in figures():
        print(line)  # noqa: T201
