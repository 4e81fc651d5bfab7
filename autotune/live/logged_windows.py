"""The windows of a decision log: what was predicted for each decision, and what was measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from autotune.errors import InputError
from autotune.plan import Plan


def windows_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each decision that was followed by a window, the prediction for its plan and the measurement.

    Args:
        events: the events of a decision log.

    Returns:
        ``step``, ``plan`` (as text), ``predicted_s``, ``measured_s``, ``time_error_frac``, ``predicted_bytes`` and
        ``measured_bytes``; unknown values are ``None``.
    """
    decisions = [event for event in events if event["event"] == "decision"]
    rows = []
    for one, following in itertools.pairwise(decisions):
        measured, predicted = following.get("measured") or {}, one["predicted"]
        seconds, told = measured.get("seconds_per_step"), predicted["seconds"]
        rows.append(
            {
                "step": one["step"],
                "plan": in_words(one.get("proposal")),
                "predicted_s": told,
                "measured_s": seconds,
                "time_error_frac": time_error(seconds, told),
                "predicted_bytes": predicted["peak_bytes"],
                "measured_bytes": measured.get("peak_bytes"),
            }
        )
    return rows


def time_error(measured_s: float | None, predicted_s: float | None) -> float | None:
    """Return the error of a predicted time as a share of it; ``None`` if it is unknown.

    Args:
        measured_s: the measured seconds.
        predicted_s: the predicted seconds.
    """
    error = measured_s / predicted_s - 1 if measured_s and predicted_s else None
    return None if error is None or not math.isfinite(error) else error


def in_words(proposal: object) -> str | None:
    """Return a logged proposal as text; ``None`` if it is not a plan, as policies may propose any value."""
    try:
        return str(Plan.from_json(proposal)) if isinstance(proposal, dict) else None
    except InputError:
        return None
