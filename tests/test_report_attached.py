"""Tests of the report of an attached run: one accessible file that matches the log and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from test_live import RESTLESS, Hostile, Wanders, deep_gpt, gpt_loss, seeded, token_batches

import autotune
from autotune.cli.main import run as run_command
from autotune.errors import InputError, RunDirectoryError
from autotune.live.decision_log import LOG_NAME
from autotune.report.attached_page import page_of
from autotune.report.attached_run import AttachedRun, read_attached, verdict
from autotune.report.plot import Layer, Shape, ticks
from autotune.report.rendering import Table, element, environment

VOID = {"meta", "br", "hr", "img", "link", "input"}
STEPS = 60


def attach_and_train(runs: Path, policy: object, steps: int = STEPS, **attaching: Any) -> Path:
    """Train a tiny model attached, and return its run directory."""
    seeded()
    model = deep_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    arguments = {"memory_budget_bytes": 10**6, "limits": RESTLESS, "total_steps": steps, **attaching}
    settings = autotune.Settings(name="<tiny> & GPT")
    tuner = autotune.attach(model, optimizer, policy, runs_dir=runs, settings=settings, **arguments)
    folder = tuner.folder
    for batch in token_batches(steps):
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(model, micro))
        tuner.step()
    tuner.detach()
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attach_and_train(tmp_path_factory.mktemp("runs"), Wanders())


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (folder / LOG_NAME).read_text().splitlines()]


def rewrite(folder: Path, events: list[dict[str, Any]]) -> Path:
    (folder / LOG_NAME).write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


class Page(HTMLParser):
    """A strict HTML parser: every element must be closed in the right order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.parents: dict[int, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(page_of(read_attached(folder)))


def test_page_fetches_nothing_and_runs_one_script_alone(folder: Path, page: Page) -> None:
    text = page_of(read_attached(folder))
    assert not re.search(r"(https?:)?//\w", text)
    assert "@import" not in text
    assert "url(" not in text
    assert {tag for tag, _ in page.found} & {"link", "iframe", "img", "object"} == set()
    for tag, attributes in page.found:
        assert not {"src", "xlink:href", "style"} & set(attributes), tag
        assert attributes.get("href", "#").startswith("#"), tag
        assert not any(name.startswith("on") for name in attributes)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_every_figure_has_a_text_alternative(page: Page) -> None:
    drawings = [one for one in page.all("svg") if one.get("aria-hidden") != "true"]
    assert len(drawings) == 6
    for one in drawings:
        assert one["role"] == "img"
        assert len(one["aria-label"] or "") > 30
    # Each drawing and each mark in it has a title.
    assert len(page.all("title")) > len(drawings)
    assert page.all("html")[0]["lang"] == "en"
    assert [tag for tag, _ in page.found if tag == "h1"] == ["h1"]
    levels = [int(tag[1]) for tag, _ in page.found if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_scrollable_areas_are_named_and_reachable_by_keyboard(page: Page) -> None:
    scrolls = [one for one in page.all("div") if one.get("class") == "scroll"]
    assert len(scrolls) >= 4
    for one in scrolls:
        assert one["tabindex"] == "0"
        assert one["aria-label"]
    assert all(one.get("scope") in ("col", "row") for one in page.all("th"))


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_have_enough_contrast_in_both_color_schemes(folder: Path, scheme: int) -> None:
    text = page_of(read_attached(folder))
    blocks = re.findall(r":root \{([^}]*)\}", text)
    assert len(blocks) == 2
    colours = dict(re.findall(r"--(\w+): (#\w{6})", blocks[scheme]))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(colours[one]), luminance(colours[other])))
        return (high + 0.05) / (low + 0.05)

    for ground in ("page", "card"):
        assert contrast("ink", ground) >= 7
        assert contrast("faint", ground) >= 4.5
    for line in ("one", "two", "warn", "bad", "good", "kept"):
        assert contrast(line, "page") >= 3, line


def test_verdict_counts_match_the_log(folder: Path) -> None:
    run, events = read_attached(folder), events_of(folder)
    counted = Counter(event["event"] for event in events)
    said = verdict(run)
    assert counted["switched"] > 20
    assert said.startswith(f"Attached for 60 of 60 steps: {counted['switched']} switches, ")
    assert "no trip." in said
    peaks = [e["predicted"]["peak_bytes"] / e["memory_budget_bytes"] for e in events if e["event"] == "decision"]
    assert f"{max(peaks):.0%} of the budget at most" in said
    assert f"The tuner's own work was {events[-1]['overhead_frac']:.1%} of the time." in said
    assert len(run.decisions) == counted["decision"]
    assert sum(decision.switched for decision in run.decisions) == counted["switched"]
    assert run.plan == autotune.Plan.from_json([e for e in events if e["event"] == "switched"][-1]["plan"])


@pytest.mark.parametrize(("share", "told"), [(5.09, "509%"), (1.001, "101%"), (0.4, "40%")])
def test_the_baseline_is_set_against_the_smallest_budget_in_percent(folder: Path, share: float, told: str) -> None:
    run = read_attached(folder)
    smallest = min(decision.budget_bytes for decision in run.decisions if decision.budget_bytes)
    said = verdict(replace(run, profiles=({"baseline": {"peak_bytes": share * smallest}},)))
    assert f"{told} of the smallest budget" in said
    assert ("it would not fit" in said) == (share > 1)


def test_page_contains_the_verdict_every_unit_and_how_to_repeat_the_run(folder: Path, page: Page) -> None:
    run = read_attached(folder)
    assert verdict(run) in page.text
    for unit in run.units:
        assert unit in page.text
    assert f"autotune replay {folder}" in page.text
    assert "mode exact leaves it as it is" in page.text
    assert "<tiny> & GPT" in page.text
    assert run.environment["torch"] in page.text


def test_trips_and_refusals_are_shown_with_their_rules(tmp_path: Path) -> None:
    limits = replace(RESTLESS, pause_steps=1)
    run = read_attached(attach_and_train(tmp_path, Hostile(), limits=limits))
    assert run.trips
    assert run.refusals["plan"] >= 1
    text = Page(page_of(run)).text
    assert f"{len(run.trips)} trips" in verdict(run)
    for _, reason in run.trips:
        assert reason in text
    assert "the proposal was not a plan" in text
    assert "no plan: 7" in text


def test_observed_run_reports_that_it_changed_nothing(tmp_path: Path) -> None:
    run = read_attached(attach_and_train(tmp_path, "exact", 30, stage="observe"))
    assert verdict(run).startswith("Observed for 30 of 30 steps: nothing was changed")
    assert "your own plan, which no decision replaced" in Page(page_of(run)).text


def test_run_without_a_budget_or_a_decision_has_a_page(tmp_path: Path) -> None:
    run = read_attached(attach_and_train(tmp_path, "exact", 2, memory_budget_bytes=None))
    assert not run.decisions
    text = Page(page_of(run)).text
    assert "before its first decision" in text
    assert "There is no profile" in text
    assert "no budget" in text


def test_log_of_a_killed_run_ends_where_it_was_cut_off(copied: Path) -> None:
    rows = (copied / LOG_NAME).read_text().splitlines(keepends=True)
    (copied / LOG_NAME).write_text("".join(rows[:-3]) + rows[-3][:40])
    run = read_attached(copied)
    assert run.ended is None
    assert "The log breaks off there." in verdict(run)
    Page(page_of(run))


def test_log_of_an_early_version_is_read_as_far_as_possible(copied: Path) -> None:
    new = ("recomputable", "total_steps", "environment", "memory_budget_bytes", "placed", "overhead_frac", "locks")
    old = [
        {k: v for k, v in event.items() if k not in new or (event["event"] == "attached" and k == "locks")}
        for event in events_of(copied)
    ]
    for event in old:
        event.pop("baseline", None) if event["event"] == "profiled" else None
    run = read_attached(rewrite(copied, old))
    assert run.overhead_frac is None
    assert run.recomputable == read_attached(copied).recomputable
    assert len(run.recomputable) == 4
    Page(page_of(run))


DAMAGE: dict[str, Any] = {
    "no predicted": lambda e: e.pop("predicted"),
    "predicted is text": lambda e: e.update(predicted="fast"),
    "seconds is text": lambda e: e["predicted"].update(seconds="fast"),
    "no peak": lambda e: e["predicted"].pop("peak_bytes"),
    "rules is a list": lambda e: e.update(rules=[]),
    "step is text": lambda e: e.update(step="one"),
    "step is negative": lambda e: e.update(step=-1),
    "no event": lambda e: e.pop("event"),
    "measured is text": lambda e: e.update(measured="slow"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_event_is_named_in_one_line(damage: str, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = events_of(copied)
    place = next(number for number, event in enumerate(events) if event["event"] == "decision")
    DAMAGE[damage](events[place])
    rewrite(copied, events)
    with pytest.raises(InputError, match=f"line {place + 1}"):
        read_attached(copied)
    assert run_command(["report", str(copied)]) == 2
    said = capsys.readouterr().err.strip().split("\n")
    assert len(said) == 1
    assert f"{LOG_NAME} line {place + 1}" in said[0]
    assert not (copied / "report.html").exists()


def test_folder_that_is_not_an_attached_run_is_one_line_and_exit_code_2(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "train"
    other.mkdir()
    (other / "config.json").write_text('{"version": 1, "verb": "train", "job": "simulated", "recipe": {}}')
    empty = tmp_path / "empty"
    empty.mkdir()
    torn = Path(shutil.copytree(copied, tmp_path / "torn"))
    (torn / LOG_NAME).write_text('{"event": "attached"')
    gone = Path(shutil.copytree(copied, tmp_path / "gone"))
    (gone / LOG_NAME).unlink()
    expected = {
        other: "a run of 'train' has no report (allowed: attach, tune, compare, demo)",
        empty: "a folder with config.json",
        tmp_path / "nowhere": "a folder with config.json",
        torn: "is not a decision log",
        gone: "cannot be read",
    }
    for path, text in expected.items():
        assert run_command(["report", str(path)]) == 2
        said = capsys.readouterr().err.strip().split("\n")
        assert len(said) == 1, said
        assert text in said[0]
    with pytest.raises(RunDirectoryError, match="attached run"):
        read_attached(other)


def test_command_writes_the_page_to_the_given_path_and_prints_the_verdict(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["report", str(copied)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Attached for 60 of 60 steps")
    assert str(copied / "report.html") in said
    out = tmp_path / "page.html"
    assert run_command(["report", str(copied), "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["report"] == str(out)
    assert document["switches"] == sum(event["event"] == "switched" for event in events_of(copied))
    assert out.read_text() == (copied / "report.html").read_text()
    assert run_command(["report", str(copied), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "writable folder" in capsys.readouterr().err


def test_page_of_a_very_long_run_of_a_very_deep_model_stays_small(folder: Path) -> None:
    run = read_attached(folder)
    units = tuple(f"blocks.{number}" for number in range(500))
    decisions = tuple(replace(run.decisions[number % len(run.decisions)], step=50 * number) for number in range(20_000))
    schedule = tuple(
        (50 * number, autotune.Plan(storage={units[number % 500]: "recompute"})) for number in range(5_000)
    )
    long: AttachedRun = replace(
        run, decisions=decisions, schedule=schedule, steps=10**6, units=units, recomputable=units
    )
    text = page_of(long)
    assert len(text) < 1_500_000
    Page(text)


def test_text_is_escaped_and_markup_is_not() -> None:
    nasty = '<script>alert("x")</script>'
    template = environment().from_string(
        '{% extends "page.html.j2" %}{% import "parts.html.j2" as parts %}'
        "{% block content %}{{ drawn }}{{ parts.table(found) }}{% endblock %}"
    )
    found = Table(label=nasty, columns=["a"], rows=[[nasty]])
    page = Page(template.render(title=nasty, drawn=element("p", nasty, title=nasty), found=found))
    assert len(page.all("script")) == 1
    assert page.all("p")[0]["title"] == nasty
    assert page.text.count(nasty) == 3


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 14.84), (0.0, 3e-4), (0.0, 7.0), (0.0, 123456.0)])
def test_axis_ticks_are_round_few_and_within_range(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert 3 <= len(found) <= 8
    assert low <= found[0]
    assert found[-1] <= high * (1 + 1e-9)
    assert all(float(f"{value:.3g}") == pytest.approx(value) for value in found)


def test_thinning_keeps_the_highest_and_the_lowest_value() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[5000], points[7000] = (5000.0, 9.0), (7000.0, -9.0)
    kept = list(Layer(look="one", shape=Shape.STEPS, points=points).thinned())
    assert len(kept) <= 700
    assert {(5000.0, 9.0), (7000.0, -9.0)} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_repeated_peak_is_shown_once(copied: Path) -> None:
    events = events_of(copied)
    decided = [event for event in events if event["event"] == "decision"]
    for number, event in enumerate(decided):
        event["measured"] = {"seconds_per_step": 0.1, "peak_bytes": 7_000_000 + number // 4}
    seen = [one.measured_bytes for one in read_attached(rewrite(copied, events)).decisions]
    assert seen == [None if number % 4 else 7_000_000 + number // 4 for number in range(len(decided))]
    events[0]["environment"]["device"] = "cuda"
    run = read_attached(rewrite(copied, events))
    assert None not in [one.measured_bytes for one in run.decisions]
    assert [row["measured_bytes"] for row in run.windows] == [one.measured_bytes for one in run.decisions[1:]]
