"""Tests of carbon intensities: strict parsing, grams as an integral, and the best start time."""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cli.main import run
from autotune.cost_model.carbon import JOULES_PER_KWH, Intensity, iso, parse_length, parse_time, schedule
from autotune.errors import InputError

HOUR = 3600.0
BEGIN = datetime(2025, 3, 1, tzinfo=UTC).timestamp()


def series(values: list[float], step_s: float = HOUR) -> Intensity:
    starts = tuple(BEGIN + index * step_s for index in range(len(values)))
    return Intensity(starts_s=starts, grams_per_kwh=tuple(values), end_s=starts[-1] + step_s)


def written(folder: Path, *rows: str) -> Path:
    path = folder / "series.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


values = st.lists(st.floats(2.0, 1000.0), min_size=2, max_size=12)


@given(values=values, data=st.data())
def test_mean_equals_the_integral_on_a_fine_grid(values: list[float], data: st.DataObject) -> None:
    intensity = series(values)
    minutes = len(values) * 60
    first = data.draw(st.integers(0, minutes - 1))
    last = data.draw(st.integers(first + 1, minutes))
    each = [values[minute // 60] for minute in range(first, last)]
    mean = intensity.mean(BEGIN + first * 60, BEGIN + last * 60)
    assert mean == pytest.approx(math.fsum(each) / len(each), rel=1e-9)


@settings(max_examples=200)
@given(values=values, length_min=st.integers(1, 300), wait_min=st.integers(0, 200), spare_min=st.integers(0, 400))
def test_every_start_on_a_fine_grid_lies_between_best_and_worst(
    values: list[float], length_min: int, wait_min: int, spare_min: int
) -> None:
    intensity, minutes = series(values), len(values) * 60
    latest = min(wait_min + spare_min, minutes - length_min)
    if latest < wait_min:
        return
    earliest_s, deadline_s = BEGIN + wait_min * 60, BEGIN + (latest + length_min) * 60
    found = schedule(intensity, length_min * 60, earliest_s, deadline_s)
    # Brute force ignores where the series changes: it tries every minute as a start and sums every minute's value.
    per_minute = np.repeat(np.asarray(values), 60)
    summed = np.concatenate([[0.0], np.cumsum(per_minute)])
    begins = np.arange(wait_min, latest + 1)
    means = (summed[begins + length_min] - summed[begins]) / length_min
    # The grid contains every change of the series, so equality holds, not only a bound.
    assert found.best.grams_per_kwh == pytest.approx(means.min(), rel=1e-9)
    assert found.worst.grams_per_kwh == pytest.approx(means.max(), rel=1e-9)
    assert found.earliest.grams_per_kwh == pytest.approx(means[0], rel=1e-9)
    assert found.earliest.begin_s == earliest_s
    for start in (found.best, found.worst):
        assert earliest_s <= start.begin_s
        assert start.end_s <= deadline_s + 1e-6


@given(values=values, length_s=st.floats(1.0, 2 * HOUR), share=st.floats(0.0, 1.0))
def test_no_start_between_grid_points_beats_the_best(values: list[float], length_s: float, share: float) -> None:
    intensity = series(values)
    if length_s > len(values) * HOUR:
        return
    found = schedule(intensity, length_s, BEGIN)
    begin = min(BEGIN + share * (intensity.end_s - length_s - BEGIN), intensity.end_s - length_s)
    assert found.best.grams_per_kwh <= intensity.mean(begin, begin + length_s) * (1 + 1e-9)


def test_earliest_of_equal_starts_is_chosen() -> None:
    found = schedule(series([300.0, 100.0, 100.0, 100.0]), HOUR, BEGIN)
    assert found.best.begin_s == BEGIN + HOUR
    assert schedule(series([7.1] * 9), 2.5 * HOUR, BEGIN + 100).best.begin_s == BEGIN + 100


def test_best_start_can_align_the_end_with_a_change() -> None:
    # A three-hour run can use both clean hours only if it ends with them.
    found = schedule(series([300.0, 200.0, 50.0, 50.0, 400.0]), 3 * HOUR, BEGIN)
    assert (found.best.begin_s, found.best.end_s) == (BEGIN + HOUR, BEGIN + 4 * HOUR)
    assert found.best.grams_per_kwh == pytest.approx(100.0)


def test_grams_per_kilowatt_hour_equal_the_intensity() -> None:
    intensity = series([100.0, 300.0])
    assert intensity.grams(JOULES_PER_KWH, BEGIN, BEGIN + 2 * HOUR) == pytest.approx(200.0)
    assert intensity.grams(JOULES_PER_KWH, BEGIN + HOUR, BEGIN + HOUR) == 300.0
    assert intensity.grams(1.0, BEGIN, BEGIN + 3 * HOUR) is None
    assert Intensity.parse("250").grams(2 * JOULES_PER_KWH, 0.0, 1.0) == 500.0


def test_series_is_read_with_or_without_a_header_and_in_any_time_zone(tmp_path: Path) -> None:
    rows = ("2025-03-01T01:00:00+01:00,120.5", "2025-03-01T01:00:00Z,80", "2025-03-01T02:00:00+00:00,0")
    expected = Intensity(
        starts_s=(BEGIN, BEGIN + HOUR, BEGIN + 2 * HOUR), grams_per_kwh=(120.5, 80.0, 0.0), end_s=BEGIN + 3 * HOUR
    )
    assert Intensity.read(written(tmp_path, *rows)) == expected
    assert Intensity.read(written(tmp_path, "time,Carbon intensity gCO2eq/kWh (direct)", *rows, "")) == expected
    assert iso(expected.end_s) == "2025-03-01T03:00:00+00:00"


GOOD = ("2025-03-01T00:00Z,100", "2025-03-01T01:00Z,90")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((*GOOD, "2025-03-01T03:00Z,80"), r"line 3: leaves a gap: it comes 7200 s after .*allowed: 3600 s"),
        (
            ("2025-03-01T00:00Z,1", "2025-03-01T02:00Z,90", "2025-03-01T03:00Z,9", "2025-03-01T04:00Z,9"),
            r"line 2: leaves a gap",
        ),
        ((*GOOD, "2025-03-01T01:30Z,80", "2025-03-01T02:30Z,80"), r"line 3: is out of step: it comes 1800 s"),
        ((*GOOD, "2025-03-01T01:00Z,80"), r"line 3: is not later than the line before it .allowed: ascending times"),
        ((GOOD[1], GOOD[0]), r"line 2: is not later"),
        ((GOOD[0], "2025-03-01T01:00,90"), r"line 2: time '2025-03-01T01:00' has no zone .allowed: an ISO time with"),
        ((GOOD[0], "yesterday,90"), r"line 2: time is 'yesterday'"),
        ((GOOD[0], "2025-03-01T01:00Z,-4"), r"line 2: intensity is -4 .allowed: .*not negative"),
        ((GOOD[0], "2025-03-01T01:00Z,nan"), r"line 2: intensity is nan"),
        ((GOOD[0], "2025-03-01T01:00Z,much"), r"line 2: intensity is 'much'"),
        ((GOOD[0], "2025-03-01T01:00Z,4,5"), r"line 2: has 3 columns"),
        (("2025-03-01T00:00Z,0.1", "2025-03-01T01:00Z,0.4"), r"no value reaches 2; looks like kg/kWh"),
        (("2025-03-01T00:00Z,100000", "2025-03-01T01:00Z,90000"), r"100000 is too high for a grid; looks like g/MWh"),
        (("time,kgCO2/kWh", *GOOD), r"line 1: the unit is 'kgCO2/kWh' .allowed: gCO2/kWh"),
        (("time,lb CO2/MWh", *GOOD), r"line 1: the unit is 'lb CO2/MWh'"),
        (("time,gCO2/kWh",), r"has 0 rows .allowed: at least two rows"),
        ((GOOD[0],), r"has 1 rows"),
    ],
)
def test_invalid_series_is_rejected_with_file_and_line(
    tmp_path: Path, rows: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, *rows)
    with pytest.raises(InputError, match=f"{path}.*{message}"):
        Intensity.read(path)
    assert run(["schedule", "--length", "1h", "--carbon-intensity", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(path) in said.err
    assert said.err.count("\n") == 1


def test_unusable_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.csv: cannot be read .No such file"):
        Intensity.parse(str(tmp_path / "nowhere.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not UTF-8"):
        Intensity.parse(str(tmp_path / "bytes.csv"))
    for text, message in (
        ("0.3", "looks like kg"),
        ("-5", "is not an intensity"),
        ("nan", "is not an intensity"),
        ("9e9", "MWh"),
    ):
        with pytest.raises(InputError, match=f"--carbon-intensity: .*{message}"):
            Intensity.parse(text)


@pytest.mark.parametrize("year", ["0000", "0001", "1969", "2200", "9999", "10000", "-001", "-1"])
def test_years_out_of_range_are_rejected(year: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"{year}-01-01T00:00:00+00:00,100", f"{year}-01-01T01:00:00+00:00,90")
    with pytest.raises(InputError, match=r"line 1: time .*allowed: (an ISO time|years from 1970 to 2199)"):
        Intensity.read(path)


@given(st.datetimes(datetime(1970, 1, 2), datetime(2199, 12, 30)), st.integers(-23, 23))
def test_parsed_time_can_be_displayed(time: datetime, hours: int) -> None:
    zone = f"{hours:+03d}:00"
    read = parse_time(f"{time.isoformat()}{zone}", where="here")
    assert parse_time(iso(read), where="here") == math.floor(read)


def test_field_longer_than_csv_allows_is_rejected_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "2025-03-01T00:00Z,100", f"2025-03-01T01:00Z,{'9' * 200_000}")
    with pytest.raises(InputError, match=r"line 2: is not CSV .field larger than field limit"):
        Intensity.read(path)


def test_series_is_not_read_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: is a pipe"):
        Intensity.parse(str(tmp_path / "pipe"))


def test_size_limit_is_enforced_while_reading(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(InputError, match=r"huge: the file is larger than 67108864 bytes"):
        Intensity.read(tmp_path / "huge")


def test_invalid_durations_and_times_are_rejected() -> None:
    assert [parse_length(text) for text in ("6h", "90min", "90m", "1d12h", "1.5h", "30 s")] == [
        *(21600, 5400, 5400, 129600, 5400, 30)
    ]
    for text in ("", "6", "h", "-1h", "0h", "6 hours", "1h-"):
        with pytest.raises(InputError, match=r"--length: length is .*allowed: a length such as 6h"):
            parse_length(text)
    assert parse_time("2025-03-01T01:00:00+01:00", where="") == BEGIN
    with pytest.raises(InputError, match="--deadline: time is 'soon'"):
        parse_time("soon", where="--deadline")


def test_times_outside_the_series_are_rejected() -> None:
    intensity = series([100.0] * 4)
    with pytest.raises(InputError, match=r"--earliest, --deadline: the series does not cover 2025-02-28T23:00:00"):
        schedule(intensity, HOUR, BEGIN - HOUR)
    with pytest.raises(InputError, match=r"does not cover .* to 2025-03-01T05:00:00.*allowed: .* to 2025-03-01T04:00"):
        schedule(intensity, HOUR, BEGIN, BEGIN + 5 * HOUR)
    with pytest.raises(InputError, match=r"--deadline: a run of 7200 s that starts at .* ends after 2025-03-01T01:00"):
        schedule(intensity, 2 * HOUR, BEGIN, BEGIN + HOUR)


def test_command_prints_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grams = (300, 200, 50, 50, 400, 400)
    path = written(tmp_path, "time,gCO2/kWh", *(f"2025-03-01T0{hour}:00Z,{value}" for hour, value in enumerate(grams)))
    command = ["schedule", "--length", "3h", "--carbon-intensity", str(path), "--earliest", "2025-03-01T00:00Z"]
    assert run([*command, "--watts", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["length_s"], found["energy_j"]) == (10800.0, 1.08e7)
    assert found["best"] == {
        "start": "2025-03-01T01:00:00+00:00",
        "end": "2025-03-01T04:00:00+00:00",
        "grams_per_kwh": pytest.approx(100.0),
        "grams": pytest.approx(300.0),
    }
    assert (found["earliest"]["grams"], found["worst"]["grams"]) == (pytest.approx(550.0), pytest.approx(850.0))
    assert found["saved_frac"] == pytest.approx(1 - 300 / 550)
    assert run([*command, "--json", "--deadline", "2025-03-01T03:00Z"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["best"] == alone["earliest"] == alone["worst"]
    assert alone["best"]["grams"] is None
    assert run([*command]) == 0
    assert "emits 45% less than starting as early as possible, and 65% less" in capsys.readouterr().out
    for wrong in (["--watts", "0"], ["--watts", "nan"], ["--deadline", "2025-03-01T03:00"]):
        assert run([*command, *wrong]) == 2


def test_a_series_that_begins_tomorrow_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = (int(datetime.now(UTC).timestamp()) // HOUR + 24) * HOUR
    rows = (f"{iso(begin + hour * HOUR)},{value}" for hour, value in enumerate((300, 50, 50, 300)))
    path = written(tmp_path, "time,gCO2/kWh", *rows)
    assert run(["schedule", "--length", "2h", "--carbon-intensity", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["earliest"]["start"], found["best"]["start"]) == (iso(begin), iso(begin + HOUR))
    assert run(["schedule", "--length", "2h", "--carbon-intensity", str(path)]) == 0
    assert "as early as possible" in " ".join(capsys.readouterr().out.split())
