"""Cost of attaching, and its gain where no static plan is always best; all arms take turns at each batch of one run.

In exact mode all arms compute the same bits, so that only their times differ.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from autotune.bench.attached_arms import Arm, LiveArm, endless, take_turns
from autotune.bench.attached_situations import SITUATIONS, bench_situation
from autotune.bench.bench_followed import bench_followed, courses_of, line_of
from autotune.bench.harness import document_of, interval_text
from autotune.catalog import load_job
from autotune.errors import InputError
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.live.limits import Limits
from autotune.stats import paired_ratio


def bench_overhead_attached(
    job: Job, *, steps: int, seed: int, reporter: Reporter | None = None, limits: Limits | None = None
) -> dict[str, Any]:
    """Return the ratio of an attached step's time to an unattached one's, observing and acting; arms take turns.

    The acting arm's budget never binds, so that its plan stays the baseline and only the tuner is measured.

    Args:
        job: the job.
        steps: number of steps of each arm.
        seed: random seed for all arms.
        reporter: shows progress.
        limits: limits of the tuners.
    """
    shows = reporter or Silent()
    shows.stage(f"{job.name}: unattached, observing and acting in turn", steps)
    arms: dict[str, Arm] = {
        "unattached": Arm(job, seed),
        "observe": LiveArm(job, seed, {"stage": "observe", "memory_budget_bytes": 2**45, "limits": limits}),
        "act": LiveArm(job, seed, {"stage": "act", "memory_budget_bytes": 2**45, "limits": limits}),
    }
    for number, batch in enumerate(itertools.islice(endless(job, seed), steps)):
        take_turns(arms, batch, number)
        shows.advance(number + 1)
    plain = arms["unattached"].seconds
    found = {}
    for name in ("observe", "act"):
        arm = arms[name]
        more = sum(arm.seconds) - sum(plain)
        found[name] = {
            **paired_ratio(arm.seconds, plain),
            # Probing and profiling cost time once per run, regardless of its length.
            "ratio_total_1000_steps": 1 + more / (statistics.median(plain) * max(steps, 1000)),
            "identical": arm.losses == arms["unattached"].losses,
            "overhead_frac": arm.tuner.status.get("overhead_frac") if isinstance(arm, LiveArm) else None,
            "attached": isinstance(arm, LiveArm) and arm.tuner.attached,
        }
    return {"job": job.name, "steps": steps, "step_s_median": statistics.median(plain), **found}


def bench_attach(
    jobs: list[str],
    situations: list[str],
    *,
    steps: int,
    situation_steps: int,
    seeds: int,
    policy: str,
    seed: int,
    followed: list[str] | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Return the cost of attaching on some jobs, and its gain in some situations.

    Args:
        jobs: the jobs whose overhead is measured; the first one gives the headline.
        situations: names of situations.
        steps: number of steps of each overhead arm; limit on the batches of followed runs.
        situation_steps: number of steps of each run in a situation.
        seeds: number of paired runs of a situation.
        policy: the policy that is attached in situations and followed runs.
        seed: random seed for the overhead's arms.
        followed: jobs and situations whose live runs an unattached copy repeats under the same plans.
        reporter: shows progress.

    Raises:
        InputError: if a job or a situation is unknown.
    """
    named = {situation.name: situation for situation in SITUATIONS}
    unknown = [name for name in situations if name not in named]
    if unknown:
        raise InputError(f"situation {unknown[0]!r} is unknown", where="--situations", allowed=named)
    shows = reporter or Silent()
    loaded = [load_job(name) for name in jobs]
    courses = [
        course for name in followed or [] for course in courses_of(name, steps=steps, policy=policy, reporter=shows)
    ]
    overhead = [bench_overhead_attached(job, steps=steps, seed=seed, reporter=reporter) for job in loaded]
    won = [
        bench_situation(named[name], steps=situation_steps, seeds=seeds, policy=policy, reporter=shows)
        for name in situations
    ]
    behind = [bench_followed(course, steps=steps, seed=seed, reporter=reporter) for course in courses]
    headline = overhead[0]["act"] if overhead else {}
    figures = {
        "ratio_median": headline.get("ratio_median"),
        "ratio_ci95": headline.get("ratio_ci95"),
        "overhead": overhead,
        "situations": won,
        "followed": behind,
    }
    return document_of("attach", figures)


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    found = []
    for entry in document["overhead"]:
        for stage in ("observe", "act"):
            low, high = entry[stage]["ratio_ci95"]
            found.append(
                f"{entry['job']}, {stage}: a step takes {entry[stage]['ratio_median']:.4f} [{low:.4f}, {high:.4f}] of "
                f"an unattached one's time; over 1,000 steps, all included, "
                f"{entry[stage]['ratio_total_1000_steps']:.4f}"
            )
    for entry in document["situations"]:
        found.append(
            f"{entry['situation']}: live {interval_text(entry['live_over_static'])} and oracle "
            f"{interval_text(entry['oracle_over_static'])} of the best static plan's time: "
            f"{entry['share_of_ceiling']['mean']:.0%} of the ceiling; {entry['over_budget_steps']} steps over budget"
        )
    return [*found, *map(line_of, document["followed"])]
