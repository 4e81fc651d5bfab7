"""The state of an attached run, finished or not, from its decision log.

The log has a line for each decision, so all numbers date from the last decision.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from autotune.agents.policy import DipOutlook
from autotune.errors import InputError, RunDirectoryError
from autotune.io.files import parse_line
from autotune.live.decision_log import LOG_NAME, LOG_VERSION
from autotune.live.limits import Stage
from autotune.live.log_events import check
from autotune.live.log_tail import LogTail
from autotune.plan import Plan
from autotune.records.run_directory import RunDirectory
from autotune.records.run_documents import AttachConfig
from autotune.step_parts import StepParts

# Start of a decision's line. Decisions are skipped without parsing if more than _RECENT_BYTES follow them.
_DECISION = b'{"event": "decision"'
_RECENT_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of an attached run at one moment.

    Attributes:
        name: name of the run.
        stage: the tuner's :class:`Stage`.
        units: names of the units, in the order of the forward pass.
        recomputable: units whose storage can be chosen.
        total_steps: length of the run; ``None`` if it is not known.
        plan: the applied plan, as far as the log shows.
        steps: optimizer steps at the log's last line.
        acting: whether the tuner may switch plans.
        switches: number of decided switches.
        placed: number of changes of storage between switches, made for a batch or a budget.
        over_budget_steps: steps that ran although no plan was known to fit.
        trips: number of trips.
        last_trip: step and reason of the last trip; ``None`` before the first.
        memory_budget_bytes: the budget; ``None`` without one.
        predicted_peak_bytes: predicted peak of the applied plan; ``None`` before there is a profile.
        measured_peak_bytes: the last measured peak; ``None`` before the first.
        predicted_s: predicted seconds per step, at the profiled batch size, for the plans of the last window with
            comparable steps; ``None`` before the first.
        measured_s: measured seconds per step of that window, scaled to the same batch size.
        noise_scale: simple noise scale in samples; ``None`` while unknown.
        overhead_frac: share of the run's time that the tuner took; ``None`` before the first decision.
        dips: what the policy expects of dips of the budget; ``None`` before the first, or if it expects none.
        parts: where the time of the last window's steps went; ``None`` before the first that is known.
        advice: the advice that was given; ``None`` if none was.
        ended: why the run was detached; ``None`` while it is attached, as far as the log shows.
    """

    name: str
    stage: str
    units: tuple[str, ...]
    recomputable: frozenset[str]
    total_steps: int | None
    plan: Plan
    steps: int = 0
    acting: bool = False
    switches: int = 0
    placed: int = 0
    over_budget_steps: int = 0
    trips: int = 0
    last_trip: tuple[int, str] | None = None
    memory_budget_bytes: int | None = None
    predicted_peak_bytes: float | None = None
    measured_peak_bytes: float | None = None
    predicted_s: float | None = None
    measured_s: float | None = None
    noise_scale: float | None = None
    overhead_frac: float | None = None
    dips: DipOutlook | None = None
    parts: StepParts | None = None
    advice: str | None = None
    ended: str | None = None

    @classmethod
    def of(cls, attached: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot after the first event of a log."""
        baseline, recomputable = attached.get("baseline"), attached.get("recomputable")
        plan = Plan() if baseline is None else Plan.from_json(baseline)
        return cls(
            name=attached["model"],
            stage=attached.get("stage") or Stage.ACT,
            units=tuple(attached["units"]),
            recomputable=frozenset(plan.storage if recomputable is None else recomputable),
            total_steps=attached.get("total_steps"),
            plan=plan,
        )

    def after(self, event: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot after the next event of the log."""
        changes: dict[str, Any] = {"steps": event["step"]}
        match event["event"]:
            case "profiled":
                changes["acting"] = self.acting or not self.trips
            case "decision":
                changes |= self._decided(event)
            case "switched":
                changes |= {"plan": Plan.from_json(event["plan"]), "switches": self.switches + 1}
            case "tripped":
                trip = event["step"], event["reason"]
                changes |= {"acting": False, "trips": self.trips + 1, "last_trip": trip}
            case "advice":
                changes["advice"] = event["advice"]
            case "detached":
                changes |= self._detached(event)
        return replace(self, **changes)

    @property
    def state(self) -> str:
        """Return what the tuner is doing, in a few words."""
        if self.ended is not None:
            return "detached"
        if self.stage == Stage.OBSERVE:
            return "observing"
        if self.acting:
            return "acting"
        return "paused by a trip" if self.trips else "profiling"

    @property
    def pressure(self) -> float | None:
        """Return the predicted peak divided by the budget; ``None`` unless both are known."""
        if self.predicted_peak_bytes is None or not self.memory_budget_bytes:
            return None
        return self.predicted_peak_bytes / self.memory_budget_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as a JSON object, with ``state`` and ``pressure``."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        listed = {"units": list(self.units), "recomputable": [name for name in self.units if name in self.recomputable]}
        trip = None if self.last_trip is None else {"step": self.last_trip[0], "reason": self.last_trip[1]}
        told = {"state": self.state, "pressure": self.pressure}
        own["dips"] = None if self.dips is None else asdict(self.dips)
        own["parts"] = None if self.parts is None else self.parts.to_json()
        return {**own, **listed, "plan": self.plan.to_json(), "last_trip": trip, **told}

    def _decided(self, event: Mapping[str, Any]) -> dict[str, Any]:
        predicted, measured, ran = event["predicted"], event.get("measured") or {}, event.get("ran")
        acting, plan = event.get("acting"), event.get("plan")
        peak, noise_scale = measured.get("peak_bytes"), measured.get("noise_scale")
        return {
            # Logs of older versions lack the applied plan: the decided plan is shown instead.
            "acting": event["applied"] or not self.trips if acting is None else acting,
            "plan": self.plan if plan is None else Plan.from_json(plan),
            "predicted_peak_bytes": predicted["peak_bytes"] if plan is None else event.get("predicted_peak_bytes"),
            "measured_peak_bytes": self.measured_peak_bytes if peak is None else peak,
            "predicted_s": self.predicted_s if ran is None else ran["predicted"],
            "measured_s": self.measured_s if ran is None else ran["seconds"],
            "noise_scale": self.noise_scale if noise_scale is None else noise_scale,
            "parts": StepParts.from_json(measured["parts"]) if measured.get("parts") else self.parts,
            "memory_budget_bytes": event.get("memory_budget_bytes"),
            "placed": event.get("placed", 0),
            "over_budget_steps": event.get("over_budget_steps", 0),
            "overhead_frac": event.get("overhead_frac"),
            "dips": DipOutlook(**event["dips"]) if event.get("dips") else None,
        }

    def _detached(self, event: Mapping[str, Any]) -> dict[str, Any]:
        ended = {"ended": event["reason"], "acting": False}
        plan = event.get("plan")
        if plan is None:
            # A tuner that failed records no final numbers.
            return ended
        same = (
            *("switches", "placed", "over_budget_steps", "memory_budget_bytes", "predicted_peak_bytes"),
            *("measured_peak_bytes", "predicted_s", "measured_s", "noise_scale", "overhead_frac"),
        )
        return {**ended, "plan": Plan.from_json(plan), **{name: event[name] for name in same if name in event}}


def require_attached(folder: Path) -> None:
    """Require the run directory of an attached run.

    Raises:
        RunDirectoryError: if the folder is not a run directory, or belongs to another command.
    """
    config = RunDirectory.open(folder).config
    if not isinstance(config, AttachConfig):
        allowed = "the run directory of an attached run"
        raise RunDirectoryError(f"is a run of {config.verb!r}", where=str(folder), allowed=allowed)


class Watched:
    """An attached run, watched through its log.

    Attributes:
        snapshot: state at the last line of the log; ``None`` while the log has no line.

    Args:
        folder: the run directory.

    Raises:
        RunDirectoryError: if the folder is not the run directory of an attached run.
    """

    def __init__(self, folder: Path) -> None:
        require_attached(folder)
        self.folder = folder
        self.snapshot: Snapshot | None = None
        self._tail = LogTail(folder / LOG_NAME)
        self._line = 0

    def look(self) -> list[Snapshot]:
        """Read the new lines of the log.

        Returns:
            The snapshot after each new decision and trip; if there are very many, only after the latest decisions.

        Raises:
            InputError: if the log cannot be read or a line is not valid.
        """
        found = []
        for row, left in self._tail.read():
            self._line += 1
            if left > _RECENT_BYTES and row.startswith(_DECISION):
                continue
            where = f"{self._tail.path} line {self._line}"
            event = parse_line(row, where=where)
            check(event, where=where)
            self.snapshot = self._after(event, where)
            if event["event"] in ("decision", "tripped"):
                found.append(self.snapshot)
        return found

    def _after(self, event: Mapping[str, Any], where: str) -> Snapshot:
        if self.snapshot is not None and event["event"] != "attached":
            return self.snapshot.after(event)
        if self.snapshot is not None or event["event"] != "attached" or event["version"] != LOG_VERSION:
            allowed = f"one event 'attached' of version {LOG_VERSION}, the first"
            raise InputError(f"event is {event['event']!r}", where=where, allowed=allowed)
        return Snapshot.of(event)

    @property
    def is_over(self) -> bool:
        """Return whether the run was detached."""
        return self.snapshot is not None and self.snapshot.ended is not None

    @property
    def silent_s(self) -> float | None:
        """Return the seconds since the last write to the log; ``None`` before the log exists."""
        grown = self._tail.grown
        return None if grown is None else max(time.time() - grown, 0.0)
