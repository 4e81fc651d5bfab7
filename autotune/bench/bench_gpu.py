"""Benchmark of one device: plans under budgets, predictions, and the overhead of an attached tuner.

Each part runs in its own process, which is ended at its time limit; results up to then are kept. This process never
uses the device, so it ends in time whatever happens there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autotune.bench.harness import SILENT
from autotune.budget import format_bytes
from autotune.engines.worker_processes import Workers, WorkersError
from autotune.errors import InputError, first_line
from autotune.io.progress import Reporter
from autotune.measurement import Failure

# Runs the requested part for at most the given seconds, and yields its results.
RunPart = Callable[[Mapping[str, Any], float], Iterator[dict[str, Any]]]

COMPLETE, OUT_OF_TIME, INTERRUPTED, NOT_YET = "complete", "out of time", "interrupted", "not yet"
# Seconds reserved to end a part and write its results, and the shortest time for which a part is started.
_ENDING_S, _LEAST_S = 6.0, 3.0
# Seconds after which the machine part counts as hanging, and the least time limit of the first answers.
_MACHINE_S, _ANSWERS_S = 120.0, 180.0
# Factor by which a part may exceed its equal share of the time left, since other parts may need less than theirs.
_SHARES = 2.0
_ATTACHED, _ATTACH = "attached", "attach"
# The largest overhead of an attached tuner on any job at which the answer is yes.
_OVERHEAD_FRAC = 0.03
_QUESTIONS = {
    "memory": "peaks predicted within 5 %",
    "time": "times predicted within 10 %",
    "exact": "exact mode as repeatable as the run",
    _ATTACH: "attached for at most 3 % of the time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBenchSettings:
    """Settings of the benchmark.

    Attributes:
        device: the device; ``None`` for this machine's accelerator.
        jobs: references of jobs; ``None`` for jobs that suit the device.
        arms: names of the arms, in the order in which they are measured; ``None`` for all.
        data: a folder with WikiText-2 and CIFAR-10; ``None`` for random data of their shapes.
        shares: budgets, as shares of the baseline's peak.
        rounds: windows of each plan; the first one chooses among a planner's plans, the others are reported.
        attached_steps: steps of each arm in the measurement of an attached tuner's overhead.
        seconds: time limit of the whole benchmark.
        seed: random seed for weights and batches.
    """

    device: str | None = None
    jobs: tuple[str, ...] | None = None
    arms: tuple[str, ...] | None = None
    data: str | None = None
    shares: tuple[float, ...] = (1.0, 0.6, 0.4, 0.3)
    rounds: int = 4
    attached_steps: int = 60
    seconds: float = 540.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise InputError(f"rounds is {self.rounds}", where="--rounds", allowed="at least 2")


def run_in_process(asked: Mapping[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
    """Run a part in its own process, and yield its results as they arrive.

    Args:
        asked: the part's name and arguments.
        limit_s: seconds after which the process is ended.

    Raises:
        InputError: if the part refuses its input.
        WorkersError: if it fails, exits early or exceeds the limit; it and its child processes have then ended.
    """
    until = time.monotonic() + limit_s
    with Workers("autotune.bench.gpu_parts", asked) as worker:
        while "done" not in (said := worker.first(max(until - time.monotonic(), 0.0))):
            yield said["found"]


class _GpuBench:
    """A benchmark in progress; the arguments are those of :func:`bench_gpu`."""

    def __init__(
        self,
        settings: GpuBenchSettings,
        keep: Callable[[dict[str, Any]], None],
        reporter: Reporter,
        run_part: RunPart,
        began: float,
    ) -> None:
        self._settings = settings
        self._keep = keep
        self._reporter = reporter
        self._run_part = run_part
        self._began = began
        self._asked = {"data": settings.data, "seed": settings.seed}
        self.document: dict[str, Any] = {
            "version": 2,
            "benchmark": "gpu",
            "device": None,
            "ended": NOT_YET,
            "seconds": 0.0,
            "settings": asdict(settings),
            "machine": None,
            "answers": {},
            "jobs": [],
            "left_out": [],
        }

    def run(self) -> None:
        """Run all parts.

        Raises:
            InputError: if there is no such device, job, arm or data folder; nothing is written then.
        """
        try:
            self._parts()
        except KeyboardInterrupt:
            self.document["ended"] = INTERRUPTED
            self._write()
            raise
        ended = OUT_OF_TIME if any(one["out_of_time"] for one in self.document["left_out"]) else COMPLETE
        self.document["ended"] = ended
        self._write()

    def _parts(self) -> None:
        found: dict[str, Any] = {}
        asked = {"device": self._settings.device, "jobs": self._settings.jobs, "arms": self._settings.arms}
        limit_s = min(_MACHINE_S, self._left_s)
        if self._part("machine", {"part": "machine", **asked}, found.update, limit_s, refuses=True):
            self.document |= {key: found[key] for key in ("machine", "environment", "folder")}
            self.document["device"] = found["machine"]["device"]
            self._jobs(found)

    @property
    def _left_s(self) -> float:
        return self._settings.seconds - _ENDING_S - (time.monotonic() - self._began)

    def _jobs(self, found: Mapping[str, Any]) -> None:
        self._asked["device"] = found["kind"]
        # All arms plan with the profile, which is not part of the document.
        profiles: dict[str, Any] = {}
        arms: Sequence[str] = found["arms"]
        entries = [{"job": job["job"], "reference": job["reference"], "arms": {}} for job in found["jobs"]]
        self.document["jobs"] = entries
        for number, entry in enumerate(entries):
            waiting = (len(entries) - number) * (1 + len(arms))
            if number == 0:
                limit_s = min(max(_ANSWERS_S, self._share_s(waiting)), self._left_s)
                self._job_part("answers", entry, profiles, limit_s, attaches=_ATTACHED in arms)
            if "baseline" not in entry:
                # All arms of the job need the baseline.
                self._job_part("known", entry, profiles, self._share_s(waiting // 3))
            for place, arm in enumerate(arms):
                # The answers part has already measured the overhead on the first job.
                if "baseline" in entry and not (arm == _ATTACHED and arm in entry):
                    self._arm(arm, entry, profiles, self._share_s(waiting - 1 - place))

    def _share_s(self, waiting: int) -> float:
        return min(self._left_s, max(_SHARES * self._left_s / max(waiting, 1), _LEAST_S))

    def _arm(self, arm: str, entry: dict[str, Any], profiles: Mapping[str, Any], limit_s: float) -> None:
        settings = self._settings
        asked = {
            "part": _ATTACHED if arm == _ATTACHED else "arm",
            "arm": arm,
            "job": entry["reference"],
            "profile": profiles[entry["job"]],
            "peak_bytes": entry["baseline"]["peak_bytes"],
            "shares": settings.shares,
            "rounds": settings.rounds,
            "attached_steps": settings.attached_steps,
        }
        kept = entry if arm == _ATTACHED else entry["arms"]
        self._part(f"{entry['job']}: {arm}", asked, kept.update, limit_s)

    def _job_part(
        self, part: str, entry: dict[str, Any], profiles: dict[str, Any], limit_s: float, *, attaches: bool = False
    ) -> None:
        def take(found: dict[str, Any]) -> None:
            self.document["answers"] |= found.pop("answers", {})
            if "profile" in found:
                profiles[entry["job"]] = found.pop("profile")
            entry.update(found)

        asked = {
            "part": part,
            "job": entry["reference"],
            "attaches": attaches,
            "attached_steps": self._settings.attached_steps,
        }
        self._part(f"{entry['job']}: {part}", asked, take, limit_s)

    def _part(
        self,
        name: str,
        asked: Mapping[str, Any],
        take: Callable[[dict[str, Any]], None],
        limit_s: float,
        *,
        refuses: bool = False,
    ) -> bool:
        """Run one part and keep its results; return whether it completed, and record the reason if not."""
        if limit_s < _LEAST_S:
            self._leave_out(name, "no time was left", out_of_time=True)
            return False
        self._reporter.stage(f"{name} (at most {limit_s:.0f} s)", 1)
        try:
            for found in self._run_part({**self._asked, **asked}, limit_s):
                take(found)
                if not refuses:
                    self._write()
        except WorkersError as error:
            self._leave_out(name, f"{error.failure}: {error}", out_of_time=error.failure is Failure.TIMEOUT)
            return False
        except InputError as error:
            if refuses:
                raise
            self._leave_out(name, first_line(error), out_of_time=False)
            return False
        return True

    def _leave_out(self, name: str, why: str, *, out_of_time: bool) -> None:
        self.document["left_out"].append({"part": name, "why": why, "out_of_time": out_of_time})
        self._write()

    def _write(self) -> None:
        acts = [job[_ATTACHED]["act"] for job in self.document["jobs"] if _ATTACHED in job]
        if acts:
            most, same = max(act["ratio_median"] for act in acts) - 1, all(act["identical"] for act in acts)
            self.document["answers"][_ATTACH] = {"yes": most <= _OVERHEAD_FRAC, "frac": most, "identical": same}
        self.document["seconds"] = time.monotonic() - self._began
        self._keep(self.document)


def bench_gpu(
    settings: GpuBenchSettings,
    *,
    keep: Callable[[dict[str, Any]], None],
    reporter: Reporter = SILENT,
    run_part: RunPart = run_in_process,
    began: float | None = None,
) -> dict[str, Any]:
    """Return the speed and memory of plans on a device, job by job, after all parts or at the time limit.

    Args:
        settings: what to measure.
        keep: writes the document; called after every result.
        reporter: shows progress.
        run_part: runs a part.
        began: start of the time limit, by ``time.monotonic``; ``None`` for now.

    Raises:
        InputError: if there is no such device, job, arm or data folder; nothing is kept then.
    """
    bench = _GpuBench(settings, keep, reporter, run_part, time.monotonic() if began is None else began)
    bench.run()
    return bench.document


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return, in words, the results, what was left out, and how the benchmark ended."""
    answered = [
        f"{question}: {_answer(document['answers'][name])}"
        for name, question in _QUESTIONS.items()
        if name in document["answers"]
    ]
    jobs = [_job_line(job) for job in document["jobs"] if "baseline" in job]
    left_out = [f"{one['part']} left out ({one['why']})" for one in document["left_out"]]
    ended = f"{document['ended']} after {document['seconds']:.0f} s"
    return [". ".join([*(["; ".join(answered)] if answered else []), *jobs, *left_out, ended])]


def _answer(answer: Mapping[str, Any]) -> str:
    said = {True: "yes", False: "no", None: "unknown"}[answer["yes"]]
    worst = answer.get("worst_frac", answer.get("frac"))
    return said if worst is None else f"{said} ({worst:.1%})"


def _job_line(job: Mapping[str, Any]) -> str:
    arms = [f"{name} {_shown(arm)}" for name, arm in job["arms"].items()]
    peak = format_bytes(job["baseline"]["peak_bytes"])
    return f"{job['job']} (baseline {peak}): {'; '.join(arms) or 'no arm was measured'}"


def _shown(arm: Mapping[str, Any]) -> str:
    """Return an arm's speed-up at each share of the baseline's memory, or ``none`` where it does not fit."""
    return ", ".join(
        f"{one['share']:.0%} {_times(one['speedup']) if one['fits'] else 'none'}" for one in arm["budgets"]
    )


def _times(speedup: float | None) -> str:
    return "unknown" if speedup is None else f"{speedup:.2f}x"
