"""Tests of the profile: its document, and the memory and time models computed from it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cost_model.memory_model import choices, is_kept, peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import calibrated, seconds_per_step
from autotune.errors import ProfileError
from autotune.plan import Plan, Precision, Storage
from autotune.simulator.random_jobs import Shape, draw_profile

ALL = (Precision.FP32, Precision.BF16, Precision.FP16)
seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, units: int = 4, **shape: object) -> Profile:
    return draw_profile(np.random.default_rng(seed), Shape(units=units, precisions=ALL, **shape))


@given(seeds)
def test_profile_round_trips_through_json(seed: int):
    profile = drawn(seed)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json(), allow_nan=False))) == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, r"version is 0, made for job 'synthetic' on 'synthetic' \(allowed: 3\)"),
        ({"tables": 3}, r"tables is 3, made for job 'synthetic'.*\(allowed: a list\)"),
        ({"static_bytes": "12"}, r"static_bytes is '12', .*\(allowed: a whole number\)"),
        ({"static_bytes": -1}, r"static_bytes is -1"),
        ({"static_bytes": 2**62}, r"static_bytes is 4611686018427387904"),
        ({"noise_frac": 1e200}, r"noise_frac is 1e\+200"),
        ({"tables": []}, r"is damaged: tables are not one per k"),
        ({"accumulation_choices": []}, r"is damaged: accumulation_choices"),
        ({"batching": "none"}, r"is damaged: batching is 'none'"),
        ({"units": []}, r"is damaged: a segment refers to unknown unit"),
        ({"speed": 1}, r"unknown key 'speed'"),
        ({"precisions": ["fp4"]}, r"precisions\[0\] is 'fp4', .*\(allowed: inherit, fp32, bf16, fp16, fp8\)"),
        ({"units": [{}]}, r"units\[0\].name is missing"),
    ],
)
def test_invalid_profile_error_names_the_profile(change, message):
    with pytest.raises(ProfileError, match=message) as raised:
        Profile.from_json({**drawn(0).to_json(), **change}, where="profile.json")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("profile.json: ")


def test_unprofiled_k_is_rejected():
    with pytest.raises(ProfileError, match=r"k = 3 is not in the profile \(allowed: 1, 2, 4\)"):
        peak_bytes(drawn(0), Plan(accumulation_steps=3))


@given(seeds, st.data())
def test_recomputing_one_more_unit_costs_time_and_at_most_its_newly_kept_memory(seed: int, data: st.DataObject):
    profile = drawn(seed)
    plan = profile.space.sample(np.random.default_rng(seed))
    saving = [name for name in profile.space.recomputable if plan.storage_of(name) is Storage.SAVE]
    if not saving:
        return
    name = data.draw(st.sampled_from(saving))
    more = plan.changed(storage={**plan.storage, name: Storage.RECOMPUTE})
    assert seconds_per_step(profile, more) >= seconds_per_step(profile, plan)
    # What a recomputed unit keeps (its input and a generator's state, 5,056 bytes) comes on top of what it recomputes:
    # where it is the peak itself, and kept no input before, the peak rises by that.
    table = profile.table(plan.accumulation_steps)
    before, after = choices(table.segments, plan), choices(table.segments, more)
    newly = sum(b.size_bytes for b in table.boundaries if is_kept(b, after) and not is_kept(b, before))
    assert peak_bytes(profile, more) <= peak_bytes(profile, plan) + newly + 2 * 5056


@given(seeds)
def test_larger_k_never_needs_more_activation_memory_under_fixed_batching(seed: int):
    profile = drawn(seed)
    plan = profile.space.sample(np.random.default_rng(seed))
    gradients = sum(segment.gradient_bytes for segment in profile.table(1).segments)
    one, four = (peak_bytes(profile, plan.changed(accumulation_steps=k)) for k in (1, 4))
    # From the second micro-batch on all gradients are alive, which can outweigh the savings of a smaller one.
    assert four <= one + 2 * gradients


def test_calibration_detects_a_machine_slower_than_the_sum_of_parts():
    profile = drawn(3)
    generator = np.random.default_rng(0)
    plans = [profile.space.sample(generator) for _ in range(40)]
    fitted = calibrated(profile, [(plan, 1.2 * seconds_per_step(profile, plan)) for plan in plans])
    other = profile.space.sample(generator)
    assert seconds_per_step(fitted, other) == pytest.approx(1.2 * seconds_per_step(profile, other), rel=0.03)
    assert fitted.calibration.plans == 40
    assert fitted.calibration.error_frac < 0.03


@given(seeds)
def test_a_profile_calibrated_by_disturbed_steps_can_be_read(seed: int):
    profile, generator = drawn(seed), np.random.default_rng(seed)
    plans = [profile.space.sample(generator) for _ in range(4)]
    disturbed = generator.lognormal(0.0, 3.0, len(plans))
    measured = [(plan, seconds_per_step(profile, plan) * factor) for plan, factor in zip(plans, disturbed, strict=True)]
    fitted = calibrated(profile, measured)
    assert Profile.from_json(json.loads(json.dumps(fitted.to_json()))) == fitted


def test_calibration_without_measurements_changes_nothing():
    profile = drawn(3)
    assert calibrated(profile, []) == profile


def test_held_boundary_is_always_counted():
    profile = drawn(5)
    table = profile.table(1)
    held = tuple(dataclasses.replace(boundary, held=True) for boundary in table.boundaries)
    everything = dataclasses.replace(profile, tables=(dataclasses.replace(table, boundaries=held),))
    plan = profile.space.baseline()
    assert peak_bytes(everything, plan) >= peak_bytes(profile, plan)
