"""Tests of measurements: their values, their JSON and invalid input."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import Failure, GradientStatistics, InputError, Measurement, UnitGradient

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**50)
unit_gradients = st.builds(
    UnitGradient,
    rms=positive,
    signal_to_noise=st.none() | positive,
    underflow_frac=st.floats(0, 1),
)
gradients = st.builds(
    GradientStatistics,
    norm=positive,
    noise_scale=st.none() | positive,
    noise_scale_age_steps=st.none() | counts,
    variance=st.none() | positive,
    per_unit=st.dictionaries(st.text(max_size=8), unit_gradients, max_size=3),
)
energies = st.just((None, "absent")) | st.tuples(
    positive, st.sampled_from(["measured:nvml", "measured:rapl", "estimated:tdp"])
)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    energy_j, energy_source = draw(energies)
    return Measurement(
        steps=draw(counts),
        samples=draw(counts),
        items=draw(counts),
        total_s=draw(positive),
        step_s=tuple(draw(st.lists(positive, max_size=4))),
        seconds_per_step=draw(st.none() | positive),
        samples_per_step=draw(st.none() | positive),
        peak_bytes=draw(st.none() | counts),
        memory_budget_bytes=draw(st.none() | counts),
        loss=draw(st.none() | finite),
        gradient=draw(st.none() | gradients),
        learning_rate=draw(finite),
        loss_scale=draw(st.none() | positive),
        skipped_steps=draw(counts),
        energy_j=energy_j,
        total_energy_j=None if energy_j is None else draw(positive),
        energy_source=energy_source,
        failure=draw(st.none() | st.sampled_from(Failure)),
        failure_detail=draw(st.text(max_size=20)),
    )


def small(**changes: object) -> Measurement:
    return Measurement(**{"steps": 1, "samples": 8, "items": 8, "total_s": 0.5, **changes})


@given(measurements())
def test_measurement_round_trips_through_json(measurement: Measurement):
    text = json.dumps(measurement.to_json(), allow_nan=False)
    assert Measurement.from_json(json.loads(text)) == measurement


@given(measurements())
def test_measurement_survives_pickle_and_deepcopy(measurement: Measurement):
    assert pickle.loads(pickle.dumps(measurement)) == measurement
    assert copy.deepcopy(measurement) == measurement


def test_every_failure_is_written_by_name():
    for failure in Failure:
        document = small(failure=failure).to_json()
        assert document["failure"] == failure.value
        assert Measurement.from_json(document).failure is failure


def test_failures_are_the_six_of_the_protocol():
    assert [str(failure) for failure in Failure] == [
        "out_of_memory",
        "over_budget",
        "non_finite",
        "timeout",
        "unsupported",
        "crashed",
    ]


GOOD_GRADIENT = {
    "norm": 1.0,
    "noise_scale": 2.0,
    "noise_scale_age_steps": 0,
    "variance": 1.0,
    "per_unit": {"a": {"rms": 1.0, "signal_to_noise": None, "underflow_frac": 0.0}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, r"unknown key 'speed' \(allowed: batch_bytes, "),
        ({"version": 2}, r"version is 2 \(allowed: 1\)"),
        ({"version": None}, r"version is None \(allowed: 1\)"),
        ({"version": True}, r"version is True \(allowed: 1\)"),
        ({"steps": -1}, r"steps is -1 \(allowed: >= 0\)"),
        ({"samples": -1}, r"samples is -1 \(allowed: >= 0\)"),
        ({"items": -1}, r"items is -1 \(allowed: >= 0\)"),
        ({"skipped_steps": -1}, r"skipped_steps is -1 \(allowed: >= 0\)"),
        ({"total_s": -0.5}, r"total_s is -0.5 \(allowed: >= 0\)"),
        ({"total_s": float("nan")}, r"total_s is nan \(allowed: >= 0\)"),
        ({"loss": float("nan")}, r"loss is nan \(allowed: a finite number\)"),
        ({"seconds_per_step": float("inf")}, r"seconds_per_step is inf \(allowed: a finite number\)"),
        ({"learning_rate": float("inf")}, r"learning_rate is inf \(allowed: a finite number\)"),
        ({"steps": "many"}, "steps is 'many'"),
        ({"loss": "low"}, "loss is 'low'"),
        ({"peak_bytes": "big"}, "peak_bytes is 'big'"),
        ({"peak_bytes": -1}, "peak_bytes is -1"),
        ({"failure": "tired"}, r"failure is 'tired' \(allowed: out_of_memory, over_budget, non_finite, "),
        ({"energy_j": 1.0}, r"energy_source is 'absent' \(allowed: .*measured:nvml"),
        ({"energy_source": "measured:nvml"}, "energy_(j|source) is "),
        (
            {"energy_j": 1.0, "energy_source": "guessed"},
            r"energy_source is 'guessed' \(allowed: .*measured:nvml",
        ),
        ({"step_s": 3}, "step_s is 3"),
        ({"gradient": 3}, "gradient is 3"),
        ({"gradient": {**GOOD_GRADIENT, "size": 1}}, r"unknown key 'gradient.size' \(allowed: .*norm"),
        ({"gradient": {}}, "norm"),
        (
            {
                "gradient": {
                    **GOOD_GRADIENT,
                    "per_unit": {"a": {"rms": -1.0, "signal_to_noise": None, "underflow_frac": 0.0}},
                }
            },
            r"rms is -1.0 \(allowed: >= 0\)",
        ),
        (
            {
                "gradient": {
                    **GOOD_GRADIENT,
                    "per_unit": {"a": {"rms": 1.0, "signal_to_noise": None, "underflow_frac": 2}},
                }
            },
            r"underflow_frac is 2.0 \(allowed: 0 to 1\)",
        ),
        ({"gradient": {**GOOD_GRADIENT, "per_unit": {"a": {"size": 1}}}}, r"gradient.per_unit.a.rms is missing"),
        (
            {
                "gradient": {
                    **GOOD_GRADIENT,
                    "per_unit": {"a": {"rms": 1, "signal_to_noise": 1, "underflow_frac": 0, "x": 1}},
                }
            },
            r"unknown key 'gradient.per_unit.a.x' \(allowed: .*rms",
        ),
    ],
)
def test_invalid_measurement_is_rejected_with_key_value_and_allowed_values(change, message):
    document = {**small(gradient=None).to_json(), **change}
    with pytest.raises(InputError, match=message) as raised:
        Measurement.from_json(document, where="trial.json")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key", ["steps", "samples", "items", "total_s"])
def test_measurement_without_a_required_key_is_rejected_with_that_key(key):
    document = small().to_json()
    del document[key]
    with pytest.raises(InputError, match=key):
        Measurement.from_json(document)


@pytest.mark.parametrize("document", [[], ["steps"], "measurement", 1, None])
def test_document_that_is_not_an_object_is_rejected(document):
    with pytest.raises(InputError, match=r"^trial\.json: "):
        Measurement.from_json(document, where="trial.json")


@pytest.mark.parametrize(
    ("peak", "budget", "failure", "within"),
    [
        (100, 100, None, True),
        (101, 100, None, False),
        (None, 100, None, False),
        (None, None, None, True),
        (100, None, None, True),
        (50, 100, Failure.OUT_OF_MEMORY, False),
        (50, None, Failure.OUT_OF_MEMORY, False),
        (50, 100, Failure.OVER_BUDGET, False),
        (50, 100, Failure.TIMEOUT, True),
    ],
)
def test_window_is_within_budget_only_if_its_peak_is_known_to_fit(peak, budget, failure, within):
    assert small(peak_bytes=peak, memory_budget_bytes=budget, failure=failure).within_budget is within


def test_throughput_is_samples_over_seconds_of_a_timed_step():
    assert small(seconds_per_step=0.25, samples_per_step=8.0).throughput == 32.0


@pytest.mark.parametrize("changes", [{}, {"seconds_per_step": 0.25}, {"samples_per_step": 8.0}])
def test_throughput_is_unknown_if_no_step_was_timed(changes):
    assert small(**changes).throughput is None
