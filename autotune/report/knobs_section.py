"""What free knobs win, as sentences and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune import knobs
from autotune.report.rendering import Table
from autotune.report.wording import beside_one

COLUMNS = ("knob", "step time", "95 % interval", "peak", "difference", "training")


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a row per measured knob of a ``launch_choices.json`` document, and one of all that were faster alone."""
    together = found["together"]
    again = [] if together is None else [{**together, "choice": f"{together['choice']} (measured again)"}]
    return [_row(trial) for trial in (*found["trials"], *again) if trial["time_ratio"] is not None]


def absent_lines(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason why knobs of a ``launch_choices.json`` document cannot be used."""
    reasons: dict[str, list[str]] = {}
    for trial in found["trials"]:
        if trial["reason"] is not None:
            reasons.setdefault(trial["reason"], []).append(trial["choice"])
    return [f"Not here: {', '.join(names)} ({reason})." for reason, names in reasons.items()]


def _row(trial: Mapping[str, Any]) -> list[str]:
    low, high = trial["time_ratio_ci95"]
    return [
        trial["choice"],
        f"{trial['time_ratio']:.3f}x",
        f"{low:.3f} to {high:.3f}",
        "" if trial["peak_ratio"] is None else f"{trial['peak_ratio']:.3f}x",
        f"{trial['difference']:.1e}" if trial["difference"] else "none",
        "exact" if trial["exact"] else "tolerant",
    ]


def knob_table(found: Mapping[str, Any]) -> Table:
    """Return the table of a page from a ``launch_choices.json`` document."""
    how = (
        f"Ratios are to the job as it is, from up to {found['pairs']} pairs of steps side by side; losses and weights "
        f"were compared after {found['steps']} steps. Exact means bit-identical."
    )
    note = " ".join([*knob_lines(found), how, *absent_lines(found)])
    return Table(label="Free knobs", columns=COLUMNS, rows=rows(found), numbers=(1, 2, 3, 4), note=note)


def knob_lines(found: Mapping[str, Any] | None) -> list[str]:
    """Return a sentence on what the recommended knobs win by themselves, and one on how each is set.

    Args:
        found: a ``launch_choices.json`` document; ``None`` returns no sentences.
    """
    if found is None:
        return []
    lines = []
    if found["repeat_difference"]:
        lines.append(
            f"The job does not repeat itself to the last bit ({found['repeat_difference']:.1e} apart), "
            "so no knob is known to be bit-identical."
        )
    if found["recommended"] is None:
        return [*lines, "No free knob is faster beyond doubt; none is applied."]
    together = found["together"]
    low, high = (1 / bound for bound in reversed(together["time_ratio_ci95"]))
    exact = "bit-identical training" if together["exact"] else f"weights within {together['difference']:.1e}"
    lines.append(
        f"Free knobs alone: {beside_one(1 / together['time_ratio'])}x as fast as the job as it is "
        f"(95 % interval {low:.2f} to {high:.2f}), {exact}."
    )
    return [*lines, *(f"Knob {choice}: {set_by(choice)}." for choice in found["recommended"].split("+"))]


def set_by(choice: str) -> str:
    """Return how a script sets a knob or a choice of fp32."""
    return knobs.code_of(choice) if choice.partition("=")[0] in knobs.KNOBS else f"fp32 computed in {choice}"
