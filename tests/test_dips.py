"""Tests of budgets that dip, announced or not, with static plans and planners."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_job

from autotune.agents.policy import StaticPolicy
from autotune.campaign.comparison import _run_arm, compare
from autotune.engines.torch_engine import TorchEngine
from autotune.errors import InputError
from autotune.records.protocol import Arm, Dips, Protocol, RunRecord
from autotune.simulator.dip_families import FAMILIES


def test_dips_recur_at_a_fixed_interval_and_last_one_window() -> None:
    dips = Dips.parse("3:60%")
    assert (dips.every, dips.share, dips.told) == (3, 0.6, False)
    assert [dips.budget(window, 1000) for window in range(7)] == [1000, 1000, 600, 1000, 1000, 600, 1000]
    assert Dips.parse("4:50%:told") == Dips(every=4, share=0.5, told=True)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "periodic"])
def test_dips_of_a_family_are_drawn_for_each_seed_and_alike_for_all_arms(family: str) -> None:
    dips = Dips.parse(f"{family}:6:70%")
    assert (dips.family, dips.every, dips.share, dips.told) == (family, 6, 0.7, False)

    def budgets(seed: int) -> list[int]:
        return [dips.budget(window, 1000, seed) for window in range(1000)]

    assert budgets(3) == budgets(3) != budgets(4)
    assert set(budgets(3)) == {700, 1000}
    assert 0.6 / 6 < budgets(3).count(700) / 1000 < 1.4 / 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "3:",
        "x:50%",
        "1:50%",
        "3:100%",
        "3:20GiB",
        "3:50%:untold",
        "3:50%:told:x",
        "odd:5:70%",
        "jittered:",
        "jittered:1:70%",
    ],
)
def test_invalid_dip_is_rejected_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="--dips") as caught:
        Dips.parse(text)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int]:
    """Return the peak of the baseline and of the leanest plan."""
    engine = TorchEngine(tiny_job.job(), seed=0)
    engine.run(2)
    found = []
    for plan in (engine.space.baseline(), engine.space.leanest()):
        engine.apply(plan)
        found.append(engine.run(3).peak_bytes)
    engine.close()
    return found[0], found[1]


def run(peaks: tuple[int, int], dips: Dips | None, policy, **changes: object) -> RunRecord:
    job = tiny_job.make(evaluate_every=2, max_steps=16, target=0.0, **changes)
    protocol = Protocol(
        job=job.name,
        arms=("one",),
        seeds=(1,),
        horizon_samples=job.total_samples,
        memory_budget_bytes=int(peaks[0] * 1.05),
        dips=dips,
    )
    return _run_arm(job, Arm(name="one", policy=policy), 1, protocol, None)


def test_plan_too_large_for_a_dip_fails_there_and_continues(peaks) -> None:
    share = (peaks[1] * 1.02) / (peaks[0] * 1.05)
    dips = Dips(every=4, share=share)
    fat = run(peaks, dips, lambda space: StaticPolicy("fat", space.baseline()))
    assert fat.failure is None
    assert fat.out_of_memory == 2
    assert fat.samples == 16 * tiny_job.BATCH
    lean = run(peaks, dips, lambda space: StaticPolicy("lean", space.leanest()))
    assert (lean.out_of_memory, lean.within_budget) == (0, True)
    calm = run(peaks, None, lambda space: StaticPolicy("fat", space.baseline()))
    assert (calm.out_of_memory, calm.failure) == (0, None)


def test_run_ends_with_a_reason_if_no_plan_fits_a_dip(peaks) -> None:
    hopeless = Dips(every=2, share=0.01)
    record = run(peaks, hopeless, lambda space: StaticPolicy("fat", space.baseline()))
    assert record.failure == "crashed"


class Watcher:
    """A policy that keeps the plan and records announced dips."""

    name = "watcher"

    def __init__(self, plan) -> None:
        self.plan = plan
        self.seen: list[tuple[int, ...]] = []
        self.failures: list[str | None] = []

    def decide(self, observation, plan):
        self.seen.append(observation.budget_ahead)
        self.failures.append(observation.window.failure)
        assert observation.memory_budget_bytes == observation.budget_ahead[0]
        return plan

    def reset(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("told", [True, False])
def test_policies_see_announced_dips_and_failures(peaks, told: bool) -> None:
    share = (peaks[1] * 1.02) / (peaks[0] * 1.05)
    kept: list[Watcher] = []

    def make(space):
        kept.append(Watcher(space.baseline()))
        return kept[-1]

    run(peaks, Dips(every=4, share=share, told=told), make)
    announced, (full, low) = kept[0].seen, (int(peaks[0] * 1.05), int(int(peaks[0] * 1.05) * share))
    # After the first window come the second, the third and the dip.
    assert announced[0][:3] == ((full, full, low) if told else announced[0][:3])
    assert {size for ahead in announced for size in ahead} == ({full, low} if told else {full})
    assert [str(failure) for failure in kept[0].failures if failure is not None] == ["over_budget", "over_budget"]


def test_comparison_describes_its_dips(peaks) -> None:
    job = tiny_job.make(evaluate_every=2, max_steps=8, target=0.0)
    arms = [Arm(name=name, policy=lambda space: StaticPolicy("b", space.baseline())) for name in ("baseline", "again")]
    protocol = Protocol(
        job=job.name,
        arms=("baseline", "again"),
        seeds=(1, 2),
        horizon_samples=job.total_samples,
        memory_budget_bytes=10**12,
        dips=Dips(every=2, share=0.5),
    )
    document = compare(job, arms, protocol, device="here")
    assert document["dips"] == {"every": 2, "share": 0.5, "told": False, "family": "periodic"}
    assert document["arms"][0]["runs"][0]["out_of_memory"] == 0
    assert protocol.digest != dataclasses.replace(protocol, dips=None).digest
