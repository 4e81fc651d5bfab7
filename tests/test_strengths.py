"""Tests of fitting the strengths of changing conditions: known strengths are recovered."""

import json
from pathlib import Path

import numpy as np
import pytest
from fitted_strengths import (
    Costs,
    FittedStrengths,
    fit,
    fit_costs,
    fit_lengths,
    fit_noise_error,
    fit_switch,
    fit_times,
)
from recorded_traces import record, schedule, write_rows
from replay_engine import read_trace
from small_jobs import perceptron_job

from autotune.engines.torch_engine import TorchEngine
from autotune.measurement import Measurement
from autotune.plan import Plan, Precision
from autotune.simulator.moving_conditions import Strengths

TRACES = Path(__file__).parent / "traces"
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3)))
BATCH = 32


def near(found, planted, factor=1.5):
    return planted / factor < found.value < planted * factor


def wander(generator, windows, memory):
    """Return an autoregressive series of unit variance, as the simulator draws it."""
    values, keep = generator.standard_normal(windows), np.exp(-1 / memory)
    for place in range(1, windows):
        values[place] = keep * values[place - 1] + np.sqrt(1 - keep**2) * values[place]
    return values


def row(
    window, *, precision="fp32", k=4, seconds=None, total=None, variance=None, norm=1.0, loss=3.0, sizes=(1e3, 1e3)
):
    steps = 5
    plan = Plan(accumulation_steps=k, precision={"a": Precision(precision)}, storage={})
    gradient = None
    if variance is not None:
        gradient = {"norm": norm, "noise_scale": None, "noise_scale_age_steps": steps, "variance": variance}
    measurement = Measurement(
        steps=steps,
        samples=steps * BATCH,
        items=steps * BATCH,
        total_s=total or steps * (seconds or 1.0),
        step_s=() if seconds is None else (seconds,),
        seconds_per_step=seconds,
        loss=loss,
    ).to_json()
    return {
        "window": window,
        "plan": plan.to_json(),
        "measurement": {**measurement, "gradient": gradient},
        "batch_bytes": list(sizes),
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("planted", [0.1, 0.3])
def test_error_of_the_noise_scale_is_recovered(seed, planted):
    generator, windows, k, rows = np.random.default_rng(seed), 80, 4, []
    for window in range(windows):
        loss = 4.0 - 2.0 * window / windows
        noise, square = 20.0 * (4.0 / loss) ** 2, (loss / 4.0) ** 3
        first, second = planted * generator.standard_normal(2)
        trace = noise * square * np.exp(first - planted**2 / 2)
        seen = square * (1 + second * min(0.2 + noise / BATCH, 2.0))
        norm = np.sqrt(max(seen + trace / BATCH, 0.0))
        rows.append(row(window, variance=trace / (BATCH / k), norm=norm, loss=loss, k=k))
    found = fit_noise_error(rows, batch_size=BATCH, adaptive=False)
    assert found is not None
    assert found.count == windows
    assert near(found, planted)


@pytest.mark.parametrize("seed", SEEDS)
def test_fast_and_slow_speed_changes_are_distinguished(seed):
    generator, windows, noise, drift = np.random.default_rng(seed), 200, 0.05, 0.1
    slow = {name: drift * wander(generator, windows, 12.0) for name in ("fp32", "bf16")}
    rows = []
    for window in range(windows):
        name = ("fp32", "bf16")[window // 2 % 2]
        level = {"fp32": 1.0, "bf16": 0.7}[name]
        rows.append(
            row(window, precision=name, seconds=level * np.exp(slow[name][window] + noise * generator.normal()))
        )
    found = fit_times(rows)
    assert near(found["time_noise"], noise)
    assert near(found["drift"], drift)
    # The correlation time of the speed is the least certain value.
    assert near(found["drift_windows"], 12.0, factor=3.0)


def test_speed_that_depends_on_the_batch_is_not_counted_as_noise():
    generator = np.random.default_rng(0)
    sizes = 1000 * np.exp(0.3 * generator.standard_normal(100))
    rows = [
        row(n, seconds=size / 1000 * np.exp(0.02 * generator.normal()), sizes=(size, size))
        for n, size in enumerate(sizes.tolist())
    ]
    assert near(fit_times(rows)["time_noise"], 0.02)


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_are_recovered(seed):
    # With 200 windows the sampling error of the correlation time is a quarter; a factor of 1.5 needs more.
    generator, windows = np.random.default_rng(seed), 600
    means = 1000 * np.exp(0.2 * wander(generator, windows, 4.0))
    longest = means * np.exp(0.1 * np.abs(generator.standard_normal(windows)))
    found = fit_lengths(
        [row(n, sizes=pair) for n, pair in enumerate(zip(means.tolist(), longest.tolist(), strict=True))]
    )
    assert near(found["length"], 0.2)
    assert near(found["length_windows"], 4.0)
    assert near(found["jitter"], 0.1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("error", "common"), [(0.1, 0.6), (0.3, 0.5)])
def test_cost_errors_of_units_are_recovered(seed, error, common):
    generator, costs = np.random.default_rng(seed), []
    for _ in range(16):
        together, alone = generator.standard_normal((1, 2)), generator.standard_normal((8, 2))
        factor = np.exp(error * (np.sqrt(common) * together + np.sqrt(1 - common) * alone))
        chosen = np.eye(2)[generator.integers(2, size=(24, 8))] * generator.uniform(0.08, 0.14, (24, 8, 1))
        rest = 1 - chosen.sum(axis=(1, 2))
        residuals = np.log((chosen * factor).sum(axis=(1, 2)) + rest) + 0.01 * generator.standard_normal(24)
        costs.append(Costs(residuals, chosen))
    found = fit_costs(costs)
    assert near(found["cost_error"], error)
    assert near(found["common_share"], common, factor=1.7)


@pytest.mark.parametrize("seed", SEEDS)
def test_cost_of_a_switch_is_recovered(seed):
    generator, planted, rows = np.random.default_rng(seed), 0.2, []
    for window in range(60):
        name, switched = ("fp32", "bf16")[window // 2 % 2], window and window % 2 == 0
        seconds = {"fp32": 1.0, "bf16": 0.5}[name]
        # Sampling a gradient takes time in every window.
        total = 5 * seconds + 0.3 + switched * planted * 5.0 + 0.05 * generator.standard_normal()
        rows.append(row(window, precision=name, seconds=seconds, total=total))
    found = fit_switch(rows)
    assert found is not None
    assert near(found, planted)
    assert found.count == 29


def test_mechanisms_absent_from_the_rows_are_left_out():
    rows = [row(n, seconds=1.0 + 0.01 * (n % 3)) for n in range(20)]
    found = fit(rows, batch_size=BATCH, adaptive=False)
    assert {"noise_error", "length", "jitter", "switch_windows", "cost_error"}.isdisjoint(found.found())
    assert fit([], batch_size=BATCH, adaptive=True) == FittedStrengths()
    assert FittedStrengths().strengths() == Strengths()


@pytest.mark.parametrize("name", ["charlm", "charlm_ragged", "digits"])
def test_recorded_runs_give_finite_numbers(name):
    path = TRACES / f"{name}-run.jsonl"
    assert path.stat().st_size < 150_000
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(len(windows) for windows in read_trace(path).values()) == len(rows)
    batch, adaptive = {"charlm": (32, False), "charlm_ragged": (16, False), "digits": (64, True)}[name]
    found = fit(rows, batch_size=batch, adaptive=adaptive).found()
    assert {"noise_error", "time_noise", "switch_windows"} <= set(found)
    assert all(np.isfinite(fitted.value) and fitted.count > 0 for fitted in found.values())
    # The cost of a switch may be too small to detect.
    assert all(fitted.value > 0 for field, fitted in found.items() if field != "switch_windows")
    assert found["switch_windows"].value >= 0


def test_recording_contains_every_window(tmp_path):
    job = perceptron_job()
    plans = schedule(TorchEngine(job).space, 4, stay=1)
    rows = record(job, plans, steps=7, window_steps=2, seed=0)
    assert [entry["window"] for entry in rows] == [0, 1, 2, 3]
    assert [Plan.from_json(entry["plan"]) for entry in rows] == plans
    assert sum(entry["measurement"]["steps"] for entry in rows) == 7
    assert all(0 < mean <= largest for mean, largest in (entry["batch_bytes"] for entry in rows))
    write_rows(tmp_path / "run.jsonl", rows)
    assert set(read_trace(tmp_path / "run.jsonl")) == set(plans)


def test_empty_recording_is_rejected():
    with pytest.raises(ValueError, match="0 plans"):
        record(perceptron_job(), [], steps=5, window_steps=5, seed=0)
