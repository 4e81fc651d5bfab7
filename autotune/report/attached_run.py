"""An attached run as its decision log alone describes it: numbers, and a summary in words."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.budget import format_bytes
from autotune.live.decision_log import LOG_NAME, read_log, schedule_of
from autotune.live.logged_windows import in_words, time_error, windows_of
from autotune.plan import Plan
from autotune.records.log_following import refused_by
from autotune.report.standing import require_attached
from autotune.report.wording import count
from autotune.step_parts import StepParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision.

    Attributes:
        step: optimizer steps before the decision.
        switched: whether the run switched to another plan.
        refused: the rule that refused the proposal, and its reason; ``None`` if no rule did.
        repaired: rules that changed the proposal.
        predicted_s: predicted seconds per step of the decided plan; ``None`` without a prediction.
        predicted_bytes: predicted peak of the decided plan.
        gain: share of the running plan's step time that the decided plan was predicted to save.
        measured_s: seconds per step of the window before the decision; ``None`` without a window.
        measured_bytes: measured peak of that window; ``None`` if the log only repeats an earlier peak.
        budget_bytes: the budget at that time; ``None`` without one.
        plan: the proposal in a few words.
    """

    step: int
    switched: bool
    refused: tuple[str, str] | None
    repaired: tuple[str, ...]
    predicted_s: float | None
    predicted_bytes: float | None
    gain: float | None
    measured_s: float | None
    measured_bytes: float | None
    budget_bytes: float | None
    plan: str

    @property
    def pressure(self) -> float | None:
        """Return the predicted peak divided by the budget; ``None`` unless both are known."""
        return self.predicted_bytes / self.budget_bytes if self.predicted_bytes and self.budget_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedRun:
    """An attached run, as its decision log describes it.

    Attributes:
        folder: the run directory.
        name: name of the run.
        options: mode, stage and policy.
        units: names of the units.
        recomputable: units whose storage can be chosen.
        locks: reason for each lock, by the name of what is locked.
        environment: device and versions; empty if the log does not contain them.
        steps: optimizer steps that the log covers.
        total_steps: length of the run; ``None`` if it was not known.
        ended: why the run was detached; ``None`` if the log breaks off.
        decisions: decisions in order.
        schedule: decided plans, each with the step from which it applies.
        trips: step and reason of each trip.
        others: step, kind and reason of other events, such as late answers.
        profiles: the ``profiled`` events.
        windows: predicted against measured, per window.
        summary: the ``detached`` event with the tuner's final numbers; empty if the log breaks off.
        overhead_frac: share of the run's time that the tuner took; ``None`` if it is not known.
        parts: where the time of the last window's steps went; ``None`` if it is not known.
        advice: the advice that was given; ``None`` if none was.
    """

    folder: Path
    name: str
    options: Mapping[str, str]
    units: tuple[str, ...]
    recomputable: tuple[str, ...]
    locks: Mapping[str, str]
    environment: Mapping[str, Any]
    steps: int
    total_steps: int | None
    ended: str | None
    decisions: tuple[Decision, ...]
    schedule: tuple[tuple[int, Plan], ...]
    trips: tuple[tuple[int, str], ...]
    others: tuple[tuple[int, str, str], ...]
    profiles: tuple[Mapping[str, Any], ...]
    windows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    overhead_frac: float | None
    parts: StepParts | None
    advice: str | None

    @property
    def plan(self) -> Plan | None:
        """Return the last decided plan; ``None`` if there was none, and the user's own plan ran."""
        return self.schedule[-1][1] if self.schedule else None

    @property
    def observed_only(self) -> bool:
        """Return whether the tuner was not allowed to change anything."""
        return self.options.get("stage") == "observe"

    @property
    def pressures(self) -> list[float]:
        """Return the predicted peak divided by the budget at each decision where both are known."""
        return [decision.pressure for decision in self.decisions if decision.pressure is not None]

    @property
    def time_ratios(self) -> list[float]:
        """Return measured divided by predicted seconds per step for each window that can be compared."""
        return [1 + row["time_error_frac"] for row in self.windows if row["time_error_frac"] is not None]

    @property
    def refusals(self) -> Counter[str]:
        """Return how often each rule refused a proposal."""
        return Counter(decision.refused[0] for decision in self.decisions if decision.refused is not None)


def read_attached(folder: Path) -> AttachedRun:
    """Read an attached run's directory.

    Raises:
        RunDirectoryError: if it is not a run directory, or belongs to another command.
        InputError: if its log is missing or damaged.
    """
    require_attached(folder)
    return _run_of(folder, read_log(folder))


def _run_of(folder: Path, events: list[dict[str, Any]]) -> AttachedRun:
    first, last = events[0], events[-1]
    summary = last if last["event"] == "detached" else {}
    profiles = [event for event in events if event["event"] == "profiled"]
    # On a CPU, peaks are measured only on the few traced steps; the log repeats each peak until the next one.
    environment, baseline = first.get("environment") or {}, first.get("baseline") or {}
    repeats = environment.get("device") == "cpu"
    decisions = _decisions(events)
    windows = [_ran(row, following) for row, following in zip(windows_of(events), _following(events), strict=True)]
    if repeats:
        peaks = _first_of_each([decision.measured_bytes for decision in decisions])
        decisions = [replace(one, measured_bytes=peak) for one, peak in zip(decisions, peaks, strict=True)]
        # A window is measured at the decision that follows it.
        windows = [{**row, "measured_bytes": peak} for row, peak in zip(windows, peaks[1:], strict=True)]
    later = (*profiles[-1:], summary)
    locks = {**first["locks"], **{name: said for event in later for name, said in (event.get("locks") or {}).items()}}
    shares = [event["overhead_frac"] for event in events if event.get("overhead_frac") is not None]
    known = ("decision", "profiled", "switched", "tripped", "advice", "attached", "detached")
    recomputable = first.get("recomputable")
    return AttachedRun(
        folder=folder,
        name=first["model"],
        options={key: first[key] for key in ("mode", "stage", "policy") if first.get(key) is not None},
        units=tuple(first["units"]),
        recomputable=tuple(baseline.get("storage", ()) if recomputable is None else recomputable),
        locks=locks,
        environment=environment,
        steps=max(event["step"] for event in events),
        total_steps=first.get("total_steps"),
        ended=summary.get("reason"),
        decisions=tuple(decisions),
        schedule=tuple(schedule_of(events, str(folder / LOG_NAME))),
        trips=tuple((event["step"], event["reason"]) for event in events if event["event"] == "tripped"),
        others=tuple(
            (event["step"], event["event"], str(event.get("reason", event.get("value", ""))))
            for event in events
            if event["event"] not in known
        ),
        profiles=tuple(profiles),
        windows=tuple(windows),
        summary=summary,
        overhead_frac=shares[-1] if shares else None,
        parts=_last_parts(events),
        advice=next((event["advice"] for event in events if event["event"] == "advice"), None),
    )


def _last_parts(events: Sequence[Mapping[str, Any]]) -> StepParts | None:
    known = [found for event in events if (found := (event.get("measured") or {}).get("parts")) is not None]
    return StepParts.from_json(known[-1]) if known else None


def _following(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == "decision"][1:]


def _ran(row: dict[str, Any], following: Mapping[str, Any]) -> dict[str, Any]:
    """Return a window with the times over all its ordinary steps, if the log contains them."""
    ran = following.get("ran")
    if ran is None:
        return row
    told, seconds = ran["predicted"], ran["seconds"]
    return {
        **row,
        "predicted_s": told,
        "measured_s": seconds,
        "time_error_frac": time_error(seconds, told),
    }


def _first_of_each(values: Sequence[float | None]) -> list[float | None]:
    """Return the values, with ``None`` in place of repetitions of the last known value."""
    found, before = [], None
    for value in values:
        found.append(None if value == before else value)
        before = value if value is not None else before
    return found


def _decisions(events: Sequence[Mapping[str, Any]]) -> list[Decision]:
    found = []
    for number, event in enumerate(events):
        if event["event"] != "decision":
            continue
        follows = events[number + 1] if number + 1 < len(events) else {"event": ""}
        found.append(_decision(event, switched=follows["event"] == "switched" and follows["step"] == event["step"]))
    return found


def _decision(event: Mapping[str, Any], *, switched: bool) -> Decision:
    predicted, measured = event["predicted"], event.get("measured") or {}
    rules, proposal = event["rules"], event.get("proposal")
    return Decision(
        step=event["step"],
        switched=switched,
        refused=refused_by(event),
        repaired=tuple(name for name, said in rules.items() if said == "repaired"),
        predicted_s=predicted.get("seconds"),
        predicted_bytes=predicted.get("peak_bytes"),
        gain=predicted.get("gain"),
        measured_s=(event.get("ran") or {}).get("seconds", measured.get("seconds_per_step")),
        measured_bytes=measured.get("peak_bytes"),
        budget_bytes=event.get("memory_budget_bytes", measured.get("memory_budget_bytes")),
        plan=in_words(proposal) or f"no plan: {str(proposal)[:60]}",
    )


def verdict(run: AttachedRun) -> str:
    """Summarise the run in a few sentences, using only what its log shows."""
    told = [] if run.advice is None else [f"{run.advice[:1].upper()}{run.advice[1:]}."]
    return " ".join([_length(run), *_pressure(run), *_baseline(run), *_time(run), *_overhead(run), *told])


def _length(run: AttachedRun) -> str:
    length = (
        count(run.steps, "step") if run.total_steps is None else f"{run.steps:,} of {count(run.total_steps, 'step')}"
    )
    trips = count(len(run.trips), "trip") if run.trips else "no trip"
    if run.observed_only:
        return f"Observed for {length}: nothing was changed; {trips}."
    placed = run.summary.get("placed")
    between = f", {placed:,} placements for single batches or budgets" if placed else ""
    broken = "" if run.ended is not None else " The log breaks off there."
    return f"Attached for {length}: {count(len(run.schedule), 'switch')}{between}, {trips}.{broken}"


def _pressure(run: AttachedRun) -> list[str]:
    if not run.pressures:
        return []
    late = run.summary.get("over_budget_steps")
    said = f"Predicted peaks at decisions were {max(run.pressures):.0%} of the budget at most."
    return [said, f"{count(late, 'step')} ran with no plan that was predicted to fit."] if late else [said]


def _baseline(run: AttachedRun) -> list[str]:
    """Compare the user's own baseline with the smallest budget, because the tuner's purpose is to meet it."""
    peak = (run.profiles[-1].get("baseline") or {}).get("peak_bytes") if run.profiles else None
    budgets = [decision.budget_bytes for decision in run.decisions if decision.budget_bytes]
    if not peak or not budgets:
        return []
    share, budget = peak / min(budgets), format_bytes(min(budgets))
    if share > 1:
        needed = math.ceil(100 * share)
        return [f"Your own baseline is predicted to need {needed}% of the smallest budget, {budget}: it would not fit."]
    return [f"Your own baseline is predicted to fit: {share:.0%} of the smallest budget, {budget}."]


def _time(run: AttachedRun) -> list[str]:
    ratios = run.time_ratios
    if not ratios:
        return ["No window had steps whose times can be set against predictions."]
    middle = f"Steps took {statistics.median(ratios):.2f} of what was predicted"
    if len(ratios) < 3:
        return [f"{middle} ({count(len(ratios), 'window')})."]
    return [f"{middle} (median of {len(ratios):,} windows; {min(ratios):.2f} to {max(ratios):.2f})."]


def _overhead(run: AttachedRun) -> list[str]:
    return [] if run.overhead_frac is None else [f"The tuner's own work was {run.overhead_frac:.1%} of the time."]


def to_json(run: AttachedRun) -> dict[str, Any]:
    """Return the run's summary and numbers as a JSON object."""
    ratios, pressures = run.time_ratios, run.pressures
    return {
        "version": 1,
        "run": str(run.folder),
        "name": run.name,
        **run.options,
        "verdict": verdict(run),
        "steps": run.steps,
        "total_steps": run.total_steps,
        "ended": run.ended,
        "switches": len(run.schedule),
        "decisions": len(run.decisions),
        "refused": dict(run.refusals),
        "trips": [{"step": step, "reason": reason} for step, reason in run.trips],
        "pressure_max": max(pressures, default=None),
        "time_ratio_median": statistics.median(ratios) if ratios else None,
        "overhead_frac": run.overhead_frac,
        "parts": None if run.parts is None else run.parts.to_json(),
        "advice": run.advice,
        "plan": None if run.plan is None else run.plan.to_json(),
        "locks": dict(run.locks),
    }
