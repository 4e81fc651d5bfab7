"""Tests of families of dips, and of forecasts of them: what they expect, and whether their probabilities are true."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.simulator.dip_families import FAMILIES, draw_events
from autotune.simulator.dip_forecasts import FARTHEST, DipBelief, DipForecast, LastInterval

LANES, WINDOWS = 64, 240
NONE = np.zeros(1)


def events(family: str, *, every: int = 8, lasts: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    shape = (LANES, 1)
    generator = np.random.default_rng(seed)
    return draw_events(generator, (family,), np.full(shape, every), np.full(shape, lasts), WINDOWS)


def told(forecast: DipForecast, dips: np.ndarray) -> np.ndarray:
    """Return the chance of a dip in each window, said before it, for dips of shape (lanes, windows)."""
    chances = []
    for window in range(dips.shape[1]):
        chances.append(forecast.chances(1)[:, 0])
        forecast.learn(np.where(dips[:, window], 0.3, 0.0), np.where(dips[:, window], 9.7, 10.0))
    return np.stack(chances, axis=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_events_of_every_family_come_about_as_often_as_asked(family: str) -> None:
    event, begins = events(family)
    rate = {"missing": 0.75 / 8}.get(family, 1 / 8)
    # A dip right after another one extends it, which bursts and chance do.
    assert 0.7 * rate < begins.mean() < 1.25 * rate
    assert (begins <= event).all()
    assert not (begins[:, 1:] & event[:, :-1]).any()


def test_families_differ_in_their_intervals() -> None:
    spreads = {}
    for family in FAMILIES:
        _, begins = events(family, every=10)
        gaps = [np.diff(np.flatnonzero(row)) for row in begins]
        spreads[family] = np.mean([gap.std() / gap.mean() for gap in gaps if len(gap) > 2])
    assert spreads["periodic"] == 0
    assert 0 < spreads["jittered"] < 0.2 < spreads["missing"] < spreads["memoryless"] < spreads["bursts"]


@pytest.mark.parametrize("family", ["periodic", "bursts"])
def test_events_last_as_long_as_asked_and_none_of_them_come_if_none_are_asked_for(family: str) -> None:
    event, begins = events(family, every=12, lasts=3)
    inner = [place for place in np.flatnonzero(begins[0]) if place < WINDOWS - 12]
    assert inner
    assert all(event[0, place : place + 3].all() for place in inner)
    if family == "periodic":
        assert not any(event[0, place + 3] for place in inner)
    assert not events(family, every=0)[0].any()


def test_lanes_draw_their_families() -> None:
    shape = (400, 1)
    _, begins = draw_events(
        np.random.default_rng(0), ("periodic", "memoryless"), np.full(shape, 8), np.ones(shape, int), WINDOWS
    )
    regular = [len(set(np.diff(np.flatnonzero(row)))) == 1 for row in begins]
    assert 0.4 < np.mean(regular) < 0.6


def test_no_forecast_expects_a_dip_before_the_first_one_whose_depth_nobody_knows() -> None:
    for forecast in (DipForecast(1), LastInterval(1), DipBelief(1)):
        for _ in range(20):
            assert forecast.chances(4).max() == 0.0
            assert np.isinf(forecast.level).all()
            forecast.learn(NONE, NONE)


def test_last_interval_expects_the_next_dip_in_its_window_alone() -> None:
    forecast = LastInterval(1)
    dips = np.zeros((1, 12), dtype=bool)
    dips[0, [3, 8]] = True
    assert told(forecast, dips)[0].tolist() == [0.0] * 12
    assert forecast.chances(4)[0].tolist() == [0.0, 1.0, 0.0, 0.0]


def test_belief_is_sure_of_regular_dips_and_knows_that_one_can_be_missing() -> None:
    dips = np.zeros((1, 60), dtype=bool)
    dips[0, ::6] = True
    forecast = DipBelief(1)
    chances = told(forecast, dips)[0]
    assert (chances[30::6] > 0.9).all()
    assert np.delete(chances[30:], np.s_[::6]).max() < 0.05
    # The dip of window 60 does not come; the one of window 66 is still expected.
    later = told(forecast, np.zeros((1, 8), dtype=bool))[0]
    assert later[0] > 0.9
    assert later[6] > 0.5
    assert max(later[2:6].max(), later[7]) < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_silence_makes_dips_ever_less_likely(family: str) -> None:
    _, begins = events(family)
    forecast = DipBelief(LANES)
    told(forecast, begins)
    later = told(forecast, np.zeros((LANES, 2000), dtype=bool))
    means = later.reshape(LANES, -1, 200).mean(axis=(0, 2))
    assert (np.diff(means[1:]) < 0).all()
    assert later[:, 400:].max() < 0.05
    assert later[:, 1900:].max() < 0.01


@pytest.mark.parametrize("every", [1, 5, 81, 100, 159])
def test_regular_dips_of_any_interval_are_recognised(every: int) -> None:
    dips = np.zeros((1, every * max(12, 120 // every)), dtype=bool)
    dips[0, ::every] = True
    chances = told(DipBelief(1), dips)[0][dips.shape[1] // 2 // every * every :]
    assert chances[::every].min() > 0.85
    assert every == 1 or np.delete(chances, np.s_[::every]).max() < 0.05


def test_dips_that_become_rarer_are_recognised_soon() -> None:
    dips = np.zeros((1, 680), dtype=bool)
    dips[0, :600:5] = True
    dips[0, 600::8] = True
    chances = told(DipBelief(1), dips)[0][632:]
    assert chances[::8].min() > 0.8
    assert np.delete(chances, np.s_[::8]).max() < 0.1


def test_dips_rarer_than_all_hypotheses_are_feared_little() -> None:
    dips = np.zeros((1, 2000), dtype=bool)
    dips[0, ::200] = True
    assert told(DipBelief(1), dips)[0][400:].mean() < 0.01
    rare = np.random.default_rng(0).random((20, 3000)) < 0.002
    assert told(DipBelief(20), rare)[:, 1500:].mean() < 0.01


@pytest.mark.parametrize("silence", [0, 30, 150, 400])
def test_chances_of_far_windows_are_probabilities(silence: int) -> None:
    dips = np.zeros((1, 61 + silence), dtype=bool)
    dips[0, :61:6] = True
    forecast = DipBelief(1)
    told(forecast, dips)
    far = forecast.chances(FARTHEST)
    assert far.shape == (1, FARTHEST)
    assert (far >= 0).all()
    assert far.sum() <= 1 + 1e-9
    fresh = DipBelief(1)
    told(fresh, dips)
    np.testing.assert_allclose(fresh.chances(1), far[:, :1])


def test_belief_about_memoryless_dips_is_nearly_the_same_in_every_window() -> None:
    _, begins = events("memoryless", every=10)
    chances = told(DipBelief(LANES), begins)[:, 120:]
    assert abs(chances.mean() - 0.1) < 0.02
    # A dip that is due would have a chance near 1.
    assert np.quantile(chances, 0.99) < 0.35


def said_of(family: str, every: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return chances, events, and the rate of each lane's events, for windows after the second event."""
    _, begins = events(family, every=every, seed=every)
    known = np.cumsum(begins, axis=1) - begins >= 2
    rate = np.broadcast_to(begins.mean(axis=1, keepdims=True), begins.shape)
    return told(DipBelief(LANES), begins)[known], begins[known], rate[known]


def test_chances_are_true_frequencies() -> None:
    parts = [said_of(family, every) for family in FAMILIES for every in (5, 8, 14)]
    said, happened = (np.concatenate(one) for one in list(zip(*parts, strict=True))[:2])
    tried = 0
    # Of all windows with similar chances, that share has a dip.
    for low in np.arange(0.0, 1.0, 0.1):
        some = (said >= low) & (said < low + 0.1)
        if some.sum() > 1000:
            assert abs(said[some].mean() - happened[some].mean()) < 0.13, low
            tried += 1
    assert tried >= 8


@pytest.mark.parametrize("every", [5, 11])
@pytest.mark.parametrize("family", FAMILIES)
def test_belief_says_more_than_the_rate_of_dips_where_there_is_more_to_know(family: str, every: int) -> None:
    said, happened, rate = said_of(family, every)

    def surprise(chance: np.ndarray) -> float:
        chance = np.clip(chance, 1e-4, 1 - 1e-4)
        return float(-np.where(happened, np.log(chance), np.log(1 - chance)).mean())

    # The rate is that of the whole run, which no forecast knows beforehand.
    limit = {"periodic": 0.1, "jittered": 0.75, "missing": 0.45, "bursts": 0.85}.get(family, 1.12)
    assert surprise(said) < limit * surprise(rate)


def test_level_follows_what_dips_leave_and_its_deviation_says_how_much_they_differ() -> None:
    def level(depths: np.ndarray) -> tuple[float, float]:
        forecast = DipForecast(1)
        for depth in depths:
            forecast.learn(np.array([depth]), np.array([10 - depth]))
            forecast.learn(NONE, np.array([10.0]))
        return float(forecast.level[0]), float(forecast.deviation[0])

    same, differing = level(np.full(20, 0.4)), level(0.4 + 0.1 * np.random.default_rng(0).standard_normal(20))
    assert same[0] == pytest.approx(9.6)
    assert same[1] == pytest.approx(0.01)
    assert abs(differing[0] - 9.6) < 0.1
    assert 0.03 < differing[1] < 0.2
    # After a single dip, its depth is not taken as certain.
    assert level(np.array([0.4]))[1] == pytest.approx(0.04)
