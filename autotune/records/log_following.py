"""Entry point of the process that sends an attached run's decision log to an experiment tracker as it is written.

All records are computed from the log's events alone, so that they can be computed again from the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.io.files import parse_line
from autotune.live.decision_log import LOG_NAME
from autotune.live.log_tail import LogTail
from autotune.records.tracking import Tracker
from autotune.step_parts import StepParts

# Seconds between two reads of the log, and the largest number of (latest) decisions sent after one read.
POLL_S = 2.0
_DECISIONS_A_LOOK = 20
_NICE = 19


@dataclass(slots=True)
class Counts:
    """Counters for metrics.

    Attributes:
        switches: switches so far.
        trips: trips so far.
        refused: proposals that a rule refused.
    """

    switches: int = 0
    trips: int = 0
    refused: int = 0

    def note(self, event: Mapping[str, Any]) -> None:
        """Count an event."""
        self.switches += event["event"] == "switched"
        self.trips += event["event"] == "tripped"
        self.refused += event["event"] == "decision" and refused_by(event) is not None


def refused_by(decision: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the rule that refused a decision's proposal, and its reason; ``None`` if no rule did."""
    rules = decision.get("rules") or {}
    return next(((name, said) for name, said in rules.items() if said not in ("ok", "repaired")), None)


def metrics_of(decision: Mapping[str, Any], counts: Counts) -> dict[str, float | None]:
    """Return the metrics of a decision; unknown ones are ``None``.

    Args:
        decision: the event.
        counts: counters up to this event.
    """
    predicted, measured = decision["predicted"], decision.get("measured") or {}
    budget, ran = decision.get("memory_budget_bytes"), decision.get("ran") or {}
    return {
        "predicted_seconds_per_step": ran.get("predicted", predicted["seconds"]),
        "measured_seconds_per_step": ran.get("seconds", measured.get("seconds_per_step")),
        "predicted_peak_bytes": predicted["peak_bytes"],
        "measured_peak_bytes": measured.get("peak_bytes"),
        "memory_budget_bytes": budget,
        "pressure": predicted["peak_bytes"] / budget if budget and predicted["peak_bytes"] is not None else None,
        "noise_scale": measured.get("noise_scale"),
        "loss": measured.get("loss"),
        "overhead_frac": decision.get("overhead_frac"),
        **_parts_of(measured),
        "switches": counts.switches,
        "placed": decision.get("placed"),
        "refused": counts.refused,
        "trips": counts.trips,
    }


def _parts_of(measured: Mapping[str, Any]) -> dict[str, float | None]:
    """Return where the time of a window's steps went, if its log knows and says it well."""
    with contextlib.suppress(InputError):
        return StepParts.from_json(measured["parts"]).metrics() if measured.get("parts") else {}
    return {}


@dataclass(slots=True)
class Sender:
    """Sender of events as records of a tracker.

    Attributes:
        tracker: the tracker.
        counts: counters of the events so far.
        over: whether the run has detached.
    """

    tracker: Tracker
    counts: Counts = field(default_factory=Counts)
    over: bool = False

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send the events of one read of the log; of its decisions, only the latest."""
        decisions = [number for number, event in enumerate(events) if event["event"] == "decision"]
        kept = set(decisions[-_DECISIONS_A_LOOK:])
        for number, event in enumerate(events):
            self.counts.note(event)
            if number in kept:
                self.tracker.metrics(metrics_of(event, self.counts), step=event["step"])
            elif event["event"] != "decision":
                self._tell(event)

    def _tell(self, event: Mapping[str, Any]) -> None:
        kind, step = event["event"], event["step"]
        if kind == "attached":
            told = {key: event[key] for key in ("model", "mode", "stage", "policy", "total_steps") if key in event}
            self.tracker.params({**told, "units": len(event.get("units", ()))})
            self.tracker.tags({f"lock.{name}": reason for name, reason in event.get("locks", {}).items()})
        elif kind in ("switched", "tripped"):
            self.tracker.metrics({"switches": self.counts.switches, "trips": self.counts.trips}, step=step)
            if kind == "tripped":
                self.tracker.tags({f"trip.{self.counts.trips}": f"step {step}: {event['reason']}"})
        elif kind == "profiled":
            self.tracker.metrics({"profiled_at": step}, step=step)
            if event.get("locks"):
                self.tracker.tags({"locked_units": ", ".join(event["locks"])})
        elif kind == "advice":
            self.tracker.tags({"advice": event.get("advice", "")})
        elif kind == "detached":
            self.over = True
            self.tracker.tags({"detached_because": event["reason"]})


class LogReader:
    """Reader of new events of a log.

    Args:
        path: the log's file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._tail = LogTail(path)

    def read(self) -> list[dict[str, Any]]:
        """Return the new events with complete lines; damaged lines are skipped."""
        events = []
        with contextlib.suppress(InputError):
            for row, _ in self._tail.read():
                with contextlib.suppress(InputError):
                    event = parse_line(row, where=str(self._tail.path))
                    if isinstance(event.get("event"), str) and isinstance(event.get("step"), int):
                        events.append(event)
        return events


def follow(folder: Path, process: int, report_to: str, *, poll_s: float = POLL_S) -> None:
    """Send a run's log until the run has detached, or the process that writes it has ended.

    Args:
        folder: the run directory.
        process: id of the parent process, which writes the log.
        report_to: name of the tracker.
        poll_s: seconds between two reads.
    """
    reader = LogReader(folder / LOG_NAME)
    events: list[dict[str, Any]] = []
    gone = False
    # Importing a tracker's library occupies a core for seconds, so it waits until the run has been profiled.
    while not gone and not any(map(_ends_profiling, events)):
        time.sleep(poll_s)
        gone = os.getppid() != process
        events += reader.read()
    tracker = Tracker(folder.parent, folder, folder.name, report_to)
    sender = Sender(tracker)
    sender.send(events)
    while not gone and not sender.over:
        time.sleep(poll_s)
        gone = os.getppid() != process
        sender.send(reader.read())
    for name in (LOG_NAME, "config.json"):
        if (folder / name).is_file():
            tracker.artifact(folder / name)
    tracker.close(failed=not sender.over)


def _ends_profiling(event: Mapping[str, Any]) -> bool:
    return event["event"] == "detached" or (event["event"] == "decision" and event.get("measured") is not None)


def main() -> None:
    """Follow the run of the command-line arguments: its run directory, process id and tracker."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    follow(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])


if __name__ == "__main__":
    main()
