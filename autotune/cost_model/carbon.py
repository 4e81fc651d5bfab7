"""Carbon emissions: grams of CO2 from energy, and the start time with the lowest emissions for a run of known length.

An intensity is grams of CO2 equivalents per kWh of the grid that a machine draws from, constant from one row of a
series to the next. Grid operators and services export series as CSV; this module only reads them.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import math
import re
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autotune.errors import InputError
from autotune.io.files import read_text

JOULES_PER_KWH = 3.6e6
_ALLOWED = "g/kWh as a number, or a CSV file of two columns: ISO time with zone, gCO2/kWh"
# No grid is as clean as 2 g/kWh or as dirty as 5000: life-cycle medians range from 11 (wind) to 820 (coal) g/kWh.
# Source: IPCC AR5 WG3, annex III, table A.III.2 (2014).
_LEAST, _MOST = 2.0, 5000.0
_FOREIGN_UNIT = re.compile(r"kg|lb|mwh|\bmj\b|/\s*j\b|\bt(on)?/", re.IGNORECASE)
_LIMIT_BYTES = 64 * 2**20
# Times and lengths that datetime can represent, with a margin.
_FIRST_YEAR, _LAST_YEAR, _LONGEST_DAYS = 1970, 2199, 3660
_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(min|[smhd])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """A carbon intensity over time, constant between changes.

    Attributes:
        starts_s: POSIX seconds at which each value begins, ascending; minus infinity for a constant intensity.
        grams_per_kwh: the value from each start.
        end_s: POSIX seconds at which the last value ends.
    """

    starts_s: tuple[float, ...]
    grams_per_kwh: tuple[float, ...]
    end_s: float

    @classmethod
    def constant(cls, grams_per_kwh: float) -> Intensity:
        """Return a constant intensity."""
        return cls(starts_s=(-math.inf,), grams_per_kwh=(grams_per_kwh,), end_s=math.inf)

    @classmethod
    def parse(cls, text: str, *, where: str = "--carbon-intensity") -> Intensity:
        """Return a constant intensity from a number of g/kWh, or a series from a file.

        Raises:
            InputError: if the number or the file is invalid; in a file, the message names the line.
        """
        try:
            number = float(text)
        except ValueError:
            return cls.read(Path(text))
        _require_grams([number], where=where)
        return cls.constant(number)

    @classmethod
    def read(cls, path: Path) -> Intensity:
        """Read a series from a CSV file; the last row lasts as long as the others.

        Raises:
            InputError: if the file is invalid; the message names the line and what is allowed.
        """
        rows = list(_rows(path))
        if len(rows) < 2:
            raise InputError(f"has {len(rows)} rows", where=str(path), allowed="at least two rows")
        # The most frequent distance, so that a gap after the first row is reported in the right place.
        step = statistics.mode(later - earlier for (_, earlier, _), (_, later, _) in itertools.pairwise(rows))
        for (_, earlier, _), (line, later, _) in itertools.pairwise(rows):
            where, passed = f"{path} line {line}", later - earlier
            if passed <= 0:
                raise InputError("is not later than the line before it", where=where, allowed="ascending times")
            if passed != step:
                kind = "leaves a gap: it" if passed > step else "is out of step: it"
                raise InputError(f"{kind} comes {passed:g} s after the line before", where=where, allowed=f"{step:g} s")
        _require_grams([grams for _, _, grams in rows], where=str(path))
        return cls(
            starts_s=tuple(time for _, time, _ in rows),
            grams_per_kwh=tuple(grams for _, _, grams in rows),
            end_s=rows[-1][1] + step,
        )

    def __str__(self) -> str:
        """Return the intensity as text with its unit."""
        low, high = min(self.grams_per_kwh), max(self.grams_per_kwh)
        span = f"{low:g}" if len(self.grams_per_kwh) == 1 else f"{low:g} to {high:g}"
        return f"{span} g CO2e per kWh"

    @property
    def begin_s(self) -> float:
        """The POSIX seconds at which the series begins."""
        return self.starts_s[0]

    def at(self, time_s: float) -> float:
        """Return grams per kWh at a covered time."""
        return self.grams_per_kwh[bisect.bisect_right(self.starts_s, time_s) - 1]

    def covers(self, begin_s: float, end_s: float) -> bool:
        """Return whether the series covers all of a time span."""
        return self.begin_s <= begin_s and end_s <= self.end_s

    def require_covered(self, begin_s: float, end_s: float | None = None, *, where: str) -> None:
        """Refuse a time span that the series does not cover.

        Raises:
            InputError: if it does not; the message says what is covered.
        """
        end_s = begin_s if end_s is None else end_s
        if not self.covers(begin_s, end_s):
            stretch = iso(begin_s) if end_s == begin_s else f"{iso(begin_s)} to {iso(end_s)}"
            raise InputError(
                f"the series does not cover {stretch}",
                where=where,
                allowed=f"{iso(self.begin_s)} to {iso(self.end_s)}",
            )

    def mean(self, begin_s: float, end_s: float) -> float:
        """Return the mean grams per kWh over a covered time span; if it is empty, the value at its start."""
        if end_s <= begin_s:
            return self.at(begin_s)
        first = bisect.bisect_right(self.starts_s, begin_s) - 1
        parts = []
        for index in range(first, len(self.starts_s)):
            if self.starts_s[index] >= end_s:
                break
            until = self.starts_s[index + 1] if index + 1 < len(self.starts_s) else math.inf
            parts.append(self.grams_per_kwh[index] * (min(until, end_s) - max(self.starts_s[index], begin_s)))
        return math.fsum(parts) / (end_s - begin_s)

    def grams(self, energy_j: float, begin_s: float, end_s: float) -> float | None:
        """Return the grams of CO2 for energy used evenly over a time span; ``None`` if it is not covered."""
        return energy_j / JOULES_PER_KWH * self.mean(begin_s, end_s) if self.covers(begin_s, end_s) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A possible start of a run.

    Attributes:
        begin_s: POSIX seconds.
        end_s: POSIX seconds at which the run would end.
        grams_per_kwh: mean intensity while it runs.
    """

    begin_s: float
    end_s: float
    grams_per_kwh: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The possible start times of a run.

    Attributes:
        best: the start with the lowest emissions.
        earliest: the earliest start.
        worst: the start with the highest emissions.
    """

    best: Start
    earliest: Start
    worst: Start


def schedule(intensity: Intensity, length_s: float, earliest_s: float, deadline_s: float | None = None) -> Schedule:
    """Return the earliest start, and those with the lowest and highest emissions at constant power; ties go earlier.

    Emissions are linear in the start time until one end of the run crosses a change of the intensity. So only the
    starts at such crossings, the earliest start and the latest start can be best or worst.

    Args:
        intensity: the series.
        length_s: seconds that the run takes.
        earliest_s: POSIX seconds before which the run cannot start.
        deadline_s: POSIX seconds by which the run must end; ``None`` for the end of the series.

    Raises:
        InputError: if no start meets the deadline, or the series does not cover the whole range.
    """
    until = intensity.end_s if deadline_s is None else deadline_s
    latest_s = until - length_s
    if latest_s < earliest_s:
        raise InputError(
            f"a run of {length_s:g} s that starts at {iso(earliest_s)} ends after {iso(until)}",
            where="--deadline" if deadline_s is not None else "--carbon-intensity",
            allowed=f"an end at {iso(earliest_s + length_s)} or later",
        )
    intensity.require_covered(earliest_s, until, where="--earliest, --deadline")
    changes = intensity.starts_s
    candidates = {earliest_s, latest_s, *changes, *(change - length_s for change in changes)}
    starts = [
        Start(begin_s=begin, end_s=begin + length_s, grams_per_kwh=intensity.mean(begin, begin + length_s))
        for begin in sorted(candidates)
        if earliest_s <= begin <= latest_s
    ]
    return Schedule(
        best=min(starts, key=_rounded),
        earliest=starts[0],
        worst=max(starts, key=_rounded),
    )


def _rounded(start: Start) -> float:
    """Return the rounded emissions of a start, so that rounding errors do not decide between two starts."""
    return round(start.grams_per_kwh, 9)


def parse_length(text: str, *, where: str = "--length") -> float:
    """Return the seconds of a length such as ``6h``, ``90min`` or ``1d12h``.

    Args:
        text: the length.
        where: the option, for errors.

    Raises:
        InputError: if the text is not a length, or the length is 0 or longer than ten years.
    """
    units = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
    seconds = sum(float(number) * units[unit] for number, unit in _LENGTH.findall(text))
    if _LENGTH.sub("", text).strip() or not 0 < seconds <= _LONGEST_DAYS * units["d"]:
        allowed = f"a length such as 6h, 90min or 1d12h, up to {_LONGEST_DAYS}d"
        raise InputError(f"length is {text!r}", where=where, allowed=allowed)
    return seconds


def parse_time(text: str, *, where: str) -> float:
    """Return the POSIX seconds of an ISO time with a time zone.

    Raises:
        InputError: if the text is not an ISO time, has no zone, or is before 1970 or after 2199.
    """
    allowed = "an ISO time with its zone, such as 2025-03-01T18:00:00Z or 2025-03-01T18:00:00+01:00"
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise InputError(f"time is {text!r}", where=where, allowed=allowed) from error
    if time.tzinfo is None:
        raise InputError(f"time {text!r} has no zone", where=where, allowed=allowed)
    if not _FIRST_YEAR <= time.year <= _LAST_YEAR:
        years = f"years from {_FIRST_YEAR} to {_LAST_YEAR}"
        raise InputError(f"time {text!r} is out of range", where=where, allowed=years)
    return time.timestamp()


def iso(time_s: float) -> str:
    """Return a time as ISO text in UTC, to the second; ``without limit`` if it is not finite."""
    if not math.isfinite(time_s):
        return "without limit"
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def _rows(path: Path) -> list[tuple[int, float, float]]:
    """Return the line number, POSIX seconds and g/kWh of each row; only the first line may be a heading."""
    # Spreadsheets write a byte-order mark at the beginning.
    text = read_text(path, limit_bytes=_LIMIT_BYTES).removeprefix("\ufeff")
    reader = csv.reader(text.splitlines())
    try:
        return [row for cells in reader if (row := _row(cells, reader.line_num, path)) is not None]
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})", where=f"{path} line {reader.line_num}", allowed=_ALLOWED) from error


def _row(cells: list[str], number: int, path: Path) -> tuple[int, float, float] | None:
    """Return the values of a line; ``None`` for an empty line and for the heading."""
    place = f"{path} line {number}"
    if not cells:
        return None
    if len(cells) != 2:
        raise InputError(f"has {len(cells)} columns", where=place, allowed=_ALLOWED)
    if number == 1 and _is_heading(cells, place):
        return None
    return number, parse_time(cells[0], where=place), _grams(cells[1], place)


def _is_heading(cells: list[str], where: str) -> bool:
    """Return whether a line is a heading.

    Raises:
        InputError: if it names a unit other than g/kWh.
    """
    if any(character.isdigit() for character in cells[0]):
        return False
    if _FOREIGN_UNIT.search(cells[1]):
        raise InputError(f"the unit is {cells[1].strip()!r}", where=where, allowed="gCO2/kWh")
    return True


def _grams(text: str, where: str) -> float:
    try:
        grams = float(text)
    except ValueError as error:
        raise InputError(f"intensity is {text!r}", where=where, allowed="a number of gCO2/kWh") from error
    if not math.isfinite(grams) or grams < 0:
        raise InputError(f"intensity is {text.strip()}", where=where, allowed="a number of gCO2/kWh, not negative")
    return grams


def _require_grams(values: list[float], *, where: str) -> None:
    """Refuse values that are not intensities or must be in another unit.

    Raises:
        InputError: if a value is negative or not finite, or the largest is implausible in g/kWh.
    """
    largest = max(values)
    if not math.isfinite(largest) or min(values) < 0:
        raise InputError("is not an intensity", where=where, allowed=_ALLOWED)
    if largest < _LEAST:
        raise InputError(f"no value reaches {_LEAST:g}; looks like kg/kWh", where=where, allowed="gCO2/kWh")
    if largest > _MOST:
        raise InputError(f"{largest:g} is too high for a grid; looks like g/MWh", where=where, allowed="gCO2/kWh")
