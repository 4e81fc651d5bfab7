"""The common parts of the pages of comparisons and tunings."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autotune.budget import format_bytes
from autotune.plan import Plan
from autotune.records.requests import CompareRequest
from autotune.report.campaign_run import CampaignRun
from autotune.report.pareto import Cost, Front, predicted
from autotune.report.plot import Plot
from autotune.report.rendering import Table
from autotune.report.svg import Figure
from autotune.report.wording import facts

NO_ENERGY = "Energy: absent. No meter could be read on this machine, and nothing is estimated in its place."


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPage:
    """The page of a campaign and its parts.

    Attributes:
        run: the campaign.
        front: the best plans that the profile predicts; ``None`` without a profile.
        verdict: the verdict in one sentence.
        costs: plot of time against memory; ``None`` without a measurement of both.
        figures: all figures of the campaign.
        text: the page as HTML.
    """

    run: CampaignRun
    front: Front | None
    verdict: str
    costs: Plot | None
    figures: list[Figure]
    text: str


def shared_values(run: CampaignRun) -> dict[str, Any]:
    """Return the values that the templates of all campaigns need."""
    found = asdict(run.environment)
    packages, sources = found.pop("packages"), found.pop("data")
    rows = facts(found)
    rows += [(name, str(version)) for name, version in packages.items() if version is not None]
    data = [(source["name"], format_bytes(source["size_bytes"]), source["sha256"]) for source in sources]
    return {
        "run": run,
        "title": f"autotune: {run.job}",
        "machine": Table(label="Environment", columns=("what", "value"), rows=rows),
        "data": Table(label="Data", columns=("data", "size", "SHA-256"), rows=data, numbers=(1,)),
        "commands": "\n".join(_commands(run)),
    }


def budget_of(run: CampaignRun) -> str:
    """Return the budget of a run in words."""
    return "no budget" if run.budget_bytes is None else f"budget {format_bytes(run.budget_bytes)}"


def prediction_of(run: CampaignRun, plans: Sequence[tuple[str, Plan, Cost | None]]) -> Table:
    """Return a table of predicted and measured costs of plans.

    Args:
        run: the run.
        plans: name, plan and measured cost of each.
    """
    pairs: list[tuple[str, Plan, Cost, Cost]] = []
    for name, plan, cost in plans if run.profile is not None else ():
        told = None if run.profile is None else predicted(run.profile, plan)
        if cost is not None and told is not None:
            pairs.append((name, plan, told, cost))
    rows = [
        [
            name,
            f"{told.seconds_per_sample * 1e3:.3g} ms",
            f"{cost.seconds_per_sample * 1e3:.3g} ms",
            f"{cost.seconds_per_sample / told.seconds_per_sample - 1:+z.1%}",
            format_bytes(told.peak_bytes),
            format_bytes(cost.peak_bytes),
            f"{cost.peak_bytes / told.peak_bytes - 1:+z.1%}",
            str(plan),
        ]
        for name, plan, told, cost in pairs
    ]
    columns = ("", "time predicted", "measured", "off by", "peak predicted", "measured", "off by", "plan")
    if pairs:
        note = _errors([(told, cost) for _, _, told, cost in pairs])
    elif run.profile is None:
        note = "The job had no profile, so nothing was predicted."
    else:
        note = "The profile predicts none of the plans that were measured."
    return Table(label="Predicted against measured", columns=columns, rows=rows, numbers=range(1, 7), note=note)


def _errors(pairs: Sequence[tuple[Cost, Cost]]) -> str:
    """Describe the errors, also relative to the first pair, because a slower machine slows down every pair."""
    times = [cost.seconds_per_sample / told.seconds_per_sample for told, cost in pairs]
    memory = statistics.median(abs(cost.peak_bytes / told.peak_bytes - 1) for told, cost in pairs)
    off = statistics.median(abs(ratio - 1) for ratio in times)
    said = f"Per sample. Off by {off:.1%} in time and {memory:.1%} in memory, median of {len(pairs)}"
    if len(pairs) < 2:
        return f"{said}."
    relative = statistics.median(abs(ratio / times[0] - 1) for ratio in times[1:])
    return f"{said}; against the first row as measured, by {relative:.1%} in time."


def _commands(run: CampaignRun) -> list[str]:
    """Return the commands that repeat a run and continue from it."""
    folder, job = shlex.quote(str(run.folder)), shlex.quote(run.config.asked.job or "JOB")
    commands = [_command_of(run)]
    if run.plan is not None:
        target = "deepspeed" if run.plan.launch.mesh is None else "accelerate"
        commands += [f"autotune explain {folder}", f"autotune export {folder}/plan.json --job {job} --to {target}"]
    if not run.compared:
        ranks = run.config.asked.ranks
        parts = ["autotune", "compare", run.config.asked.job or "JOB", "--arms", f"baseline,{run.folder}/plan.json"]
        commands.append(shlex.join(parts + ([] if ranks is None else ranks.flags)))
    return commands


_VALUED = (
    "memory_budget",
    "gradient_norm",
    "dips",
    "steps",
    "trials",
    "storage",
    "seed",
    "weights",
    "watts",
    "carbon_intensity",
)


def _command_of(run: CampaignRun) -> str:
    """Return the command that repeats a run; ``FILE`` stands for a DeepSpeed configuration, which is not recorded."""
    asked = run.config.asked
    job = asked.job or "JOB"
    if isinstance(asked, CompareRequest):
        parts = ["autotune", "compare", job, "--arms", ",".join(asked.arms), "--seeds", str(len(asked.seeds))]
    else:
        parts = ["autotune", "tune", job, "--method", asked.method]
    for key in _VALUED:
        if getattr(asked, key, None) is not None:
            parts += [f"--{key.replace('_', '-')}", str(getattr(asked, key))]
    switches = {"--full": not asked.lean, **{f"--{key}": getattr(asked, key, False) for key in ("knobs", "tolerant")}}
    parts += [switch for switch, given in switches.items() if given]
    if asked.ranks is not None:
        parts += asked.ranks.flags
    elif asked.cluster is not None:
        parts += ["--cluster", asked.cluster.address, "--worker-cores", str(asked.cluster.cores)]
    elif asked.isolate:
        parts.append("--isolate")
    return shlex.join(parts)
