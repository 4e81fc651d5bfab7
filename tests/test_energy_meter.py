"""Tests of the energy meter: kernel counters are read correctly, and every value names its source."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from pathlib import Path

import pytest
import tiny_job
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune import EngineOptions, Measurement, Plan, TorchEngine
from autotune.cost_model.paper_equations import Weights
from autotune.engines.tuning_windows import merge_windows
from autotune.errors import InputError
from autotune.gym.observation import Observation
from autotune.gym.reward import Objective
from autotune.mechanics import energy_meter
from autotune.mechanics.energy_meter import NoMeter, RaplMeter, TdpMeter, find_meter

CPU = torch.device("cpu")
RANGE_UJ = 262_143_328_850  # a real package's


def put(path: Path, text: object) -> None:
    # As with the kernel, a reader sees the old value or the new one.
    path.with_suffix(".new").write_text(f"{text}\n")
    path.with_suffix(".new").rename(path)


def zone(path: Path, name: str, energy_uj: int, range_uj: int = RANGE_UJ) -> Path:
    path.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", range_uj)):
        put(path / file, text)
    return path


def powercap(root: Path, *, range_uj: int = RANGE_UJ) -> tuple[Path, Path]:
    """Create the counters of a server: a package with cores and memory, and the whole platform."""
    package = zone(root / "intel-rapl:0", "package-0", 1000, range_uj)
    zone(package / "intel-rapl:0:0", "core", 10)
    memory = zone(package / "intel-rapl:0:1", "dram", 500, range_uj)
    # The kernel's folder lists subdomains next to their packages as well.
    (root / "intel-rapl:0:0").symlink_to(package / "intel-rapl:0:0")
    (root / "intel-rapl:0:1").symlink_to(memory)
    zone(root / "intel-rapl:1", "psys", 77)
    zone(root / "intel-rapl-mmio:0", "package-0", 1000)
    (root / "intel-rapl").mkdir()
    return package, memory


def test_package_and_memory_counters_are_added_without_double_counting(tmp_path: Path) -> None:
    package, memory = powercap(tmp_path)
    meter = RaplMeter(tmp_path)
    assert meter.read() == 0.0
    for path in tmp_path.rglob("energy_uj"):
        if path.parent not in (package, memory):
            put(path, 10**9)
    put(package / "energy_uj", 1000 + 3_000_000)
    put(memory / "energy_uj", 500 + 250_000)
    assert meter.read() == 3.25
    assert meter.read() == 3.25


@given(steps=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), max_size=40))
def test_counter_overflow_loses_no_energy(
    steps: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("powercap")
    package, memory = powercap(root, range_uj=1000)
    put(package / "energy_uj", 0)
    meter = RaplMeter(root)
    at, total = [0, 500], 0
    for step in steps:
        for index, (path, moved) in enumerate(zip((package, memory), step, strict=True)):
            at[index] = (at[index] + moved) % 1000
            put(path / "energy_uj", at[index])
        total += sum(step)
        assert meter.read() == total / 1e6


def test_zeus_reads_the_same_counters(tmp_path: Path) -> None:
    rapl = pytest.importorskip("zeus.device.cpu.rapl")
    package, _ = powercap(tmp_path)
    theirs = rapl.RAPLCPU(0, str(tmp_path))
    ours = RaplMeter(tmp_path)._counters
    assert [counter.last_uj for counter in ours] == [theirs.rapl_file.last_energy, theirs.dram.last_energy]
    assert [counter.range_uj for counter in ours] == [
        theirs.rapl_file.max_energy_range_uj,
        theirs.dram.max_energy_range_uj,
    ]
    assert theirs.rapl_file.name == (package / "name").read_text().strip()


def test_unreadable_energy_is_absent_and_estimated_only_from_given_watts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy_meter, "POWERCAP", tmp_path)
    assert isinstance(find_meter(CPU), NoMeter)
    assert isinstance(find_meter(CPU, 65.0), TdpMeter)
    package, _ = powercap(tmp_path)
    # A measurement is preferred to an estimate.
    assert find_meter(CPU, 65.0).source == "measured:rapl"
    # A folder in place of a file fails like a file that only root may read.
    (package / "energy_uj").unlink()
    (package / "energy_uj").mkdir()
    assert find_meter(CPU).source == "absent"
    assert find_meter(CPU).read() is None
    assert find_meter(CPU, 65.0).source == "estimated:tdp"


@pytest.mark.parametrize("watts", [0.0, -5.0, float("nan"), float("inf")])
def test_invalid_watts_are_rejected(watts: float) -> None:
    with pytest.raises(InputError, match=r"--watts: is .*allowed: a number above 0"):
        find_meter(CPU, watts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_zeus_without_a_gpu_leaves_energy_absent() -> None:
    pytest.importorskip("zeus")
    assert find_meter(torch.device("cuda", 0)).source == "absent"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_zeus_reads_the_energy_of_a_gpu() -> None:
    pytest.importorskip("zeus")
    meter = find_meter(torch.device("cuda", 0))
    assert meter.source == "measured:nvml"
    factor = torch.ones(4096, 4096, device="cuda")
    for _ in range(2000):
        factor = factor @ factor / 4096
    torch.cuda.synchronize()
    joules = meter.read()
    assert joules is not None
    assert joules > 0


def test_estimated_energy_is_power_times_the_time_of_real_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(energy_meter, "POWERCAP", tmp_path)
    engine = TorchEngine(tiny_job.make(), options=EngineOptions(watts=50.0))
    began = time.perf_counter()
    window = engine.run(8)
    passed = time.perf_counter() - began
    engine.close()
    assert window.energy_source == "estimated:tdp"
    assert window.energy_j is not None
    assert window.total_energy_j is not None
    assert 0 < window.energy_j <= window.total_energy_j
    # The steps run within the window, and the window within the call.
    assert 50.0 * sum(window.step_s) <= window.total_energy_j <= 50.0 * passed
    assert window.sample_j == pytest.approx(window.energy_j / (8 * len(window.step_s)))
    assert Measurement.from_json(window.to_json()) == window


def test_window_without_a_reading_reports_absent_energy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(energy_meter, "POWERCAP", tmp_path)
    engine = TorchEngine(tiny_job.make())
    window = engine.run(4)
    engine.close()
    found = (window.energy_j, window.total_energy_j, window.energy_source, window.sample_j)
    assert found == (None, None, "absent", None)


def test_training_energy_is_measured_from_changing_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, _ = powercap(tmp_path, range_uj=40_000)
    monkeypatch.setattr(energy_meter, "POWERCAP", tmp_path)
    engine = TorchEngine(tiny_job.make())
    stop, moved = threading.Event(), [0]

    def draw() -> None:
        for moved[0] in itertools.count(700, 700):
            put(package / "energy_uj", (1000 + moved[0]) % 40_000)
            if stop.wait(0.001):
                return

    machine = threading.Thread(target=draw)
    machine.start()
    try:
        windows = [engine.run(6)]
        while moved[0] < 90_000:
            windows.append(engine.run(6))
    finally:
        stop.set()
        machine.join()
        engine.close()
    assert {window.energy_source for window in windows} == {"measured:rapl"}
    for window in windows:
        assert window.energy_j is not None
        assert window.total_energy_j is not None
        assert 0 <= window.energy_j <= window.total_energy_j
    assert sum(window.energy_j or 0.0 for window in windows) > 0
    # The counter wrapped more than once, and the windows used no more than the total.
    assert sum(window.total_energy_j or 0.0 for window in windows) <= moved[0] / 1e6
    merged = merge_windows(windows)
    assert merged.energy_j == sum(window.energy_j or 0.0 for window in windows)
    assert (
        merge_windows([*windows, dataclasses.replace(windows[0], energy_j=None, energy_source="absent")]).energy_j
        is None
    )


def observation(own: Measurement, reference: Measurement) -> Observation:
    engine = TorchEngine(tiny_job.make())
    space = engine.space
    engine.close()
    plan: Plan = space.baseline()
    return Observation(space=space, plan=plan, window=own, reference=reference, batch_size=8, adaptive=False)


def window(seconds: float, joules: float | None, steps: int) -> Measurement:
    return Measurement(
        steps=steps,
        samples=8 * steps,
        items=8 * steps,
        total_s=seconds * steps,
        step_s=(seconds,) * steps,
        seconds_per_step=seconds,
        samples_per_step=8.0,
        peak_bytes=100,
        energy_j=None if joules is None else joules * steps,
        energy_source="absent" if joules is None else "measured:rapl",
    )


def test_objective_uses_energy_per_sample_regardless_of_window_length() -> None:
    objective = Objective(weights=Weights(time=1.0, energy=0.5))
    seen = observation(window(0.5, 30.0, 2), window(1.0, 40.0, 5))
    assert objective.cost(seen) == pytest.approx(0.5 + 0.5 * 0.75)
    assert Objective().cost(seen) == pytest.approx(0.5)
    with pytest.raises(InputError, match=r"energy has a weight but cannot be read .*allowed: w3 = 0, or .* --watts"):
        objective.check(window(1.0, None, 2))
    objective.check(window(1.0, 40.0, 2))
