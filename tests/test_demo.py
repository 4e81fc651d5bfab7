"""Tests of the jobs that the demo chooses from."""

import pytest

from autotune.campaign.comparison import find_horizon
from autotune.catalog import load_job
from autotune.cli import demo


@pytest.mark.parametrize(("name", "length"), sorted({choice[:2] for choice in demo._CHOICES}))
def test_lengths_of_the_demos_jobs_are_their_own(name: str, length: int) -> None:
    assert load_job(name).max_steps == length


@pytest.mark.parametrize(
    ("seconds", "chosen"), [(0.1, ("charlm:short", 3)), (1.2, ("charlm:brief", 3)), (9.0, ("charlm:brief", 2))]
)
def test_slower_machines_get_less(seconds: float, chosen: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_seconds_of_a_step", lambda job: seconds)
    assert demo._that_fits(64) == chosen


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _, _ in demo._CHOICES}))
def test_baseline_of_the_demos_jobs_reaches_its_target(name: str) -> None:
    job = load_job(name)
    assert find_horizon(job, needs_target=True) <= 1.5 * job.total_samples
