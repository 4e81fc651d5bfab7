"""Tests of the report of a comparison or tuning: one file that matches the documents and fetches nothing."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from campaigns import ARMS
from test_report_attached import Page

import autotune
from autotune.cli.main import run as run_command
from autotune.cost_model.carbon import Intensity
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.solver import solve
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import RunDirectoryError
from autotune.plan import Plan
from autotune.records.requests import Ranks
from autotune.report.alternatives import other_units
from autotune.report.campaign_page import CampaignPage
from autotune.report.campaign_run import CampaignRun, arm_named, launched, read_campaign
from autotune.report.costs import arm_costs
from autotune.report.pareto import front_of, measured_finals, measured_trial
from autotune.report.sheets import sheets_of
from autotune.report.terminal_tables import tuned_line, verdict_line
from autotune.report.wording import beside_one, changed_milliseconds, facts
from autotune.report.writing import page_for


@pytest.fixture(scope="module")
def comparison(compared: Path) -> CampaignPage:
    return page_for(read_campaign(compared))


@pytest.fixture(scope="module")
def tuning(tuned: Path) -> CampaignPage:
    return page_for(read_campaign(tuned))


@pytest.fixture(params=["comparison", "tuning"])
def page(request: pytest.FixtureRequest) -> CampaignPage:
    found: CampaignPage = request.getfixturevalue(request.param)
    return found


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / folder.name))


def change(path: Path, do: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text())
    do(document)
    path.write_text(json.dumps(document))


def test_page_is_complete_and_fetches_nothing(page: CampaignPage) -> None:
    text = page.text
    parsed = Page(text)
    assert not re.search(r"(https?:)?//\w", text)
    assert not {tag for tag, _ in parsed.found} & {"link", "iframe", "img", "object"}
    # Its policy allows no other (test_report_attached.py).
    assert len(parsed.all("script")) == 1
    for tag, attributes in parsed.found:
        assert not {"src", "style"} & set(attributes), tag
    # The list of contents leads to every section, and nothing leads anywhere else.
    parts = [one["id"] for one in parsed.all("section")]
    assert len(parts) == len(set(parts)) > 3
    assert [attributes["href"] for _, attributes in parsed.found if "href" in attributes] == [
        f"#{one}" for one in parts
    ]
    levels = [int(tag[1]) for tag, _ in parsed.found if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for one in parsed.all("svg"):
        assert one.get("aria-hidden") == "true" or len(one["aria-label"] or "") > 30
    assert all(
        one["tabindex"] == "0" and one["aria-label"] for one in parsed.all("div") if "scroll" in str(one.get("class"))
    )


def test_page_begins_with_the_verdict_followed_by_the_plan(compared: Path, comparison: CampaignPage) -> None:
    text = Page(comparison.text).text
    assert comparison.verdict == verdict_line(json.loads((compared / "comparison.json").read_text()))
    order = [text.index(part) for part in (comparison.verdict, "The plan ", "The arms ", "Pictures ", "Repeat it ")]
    assert order == sorted(order)
    for arm in ("baseline", *ARMS, "restless"):
        assert arm in text
    assert f"autotune compare JOB --arms baseline,{','.join(ARMS)} --seeds 2 --memory-budget 90%" in text


def test_sentence_on_the_fastest_arm_names_a_baseline_that_is_faster(compared: Path) -> None:
    document = json.loads((compared / "comparison.json").read_text())
    for entry in document["against_baseline"]:
        entry["time_ratio"], entry["time_ratio_ci95"] = 1.25, [1.2, 1.3]
    for arm in document["arms"]:
        for run in arm["runs"]:
            run["within_budget"] = True
    assert verdict_line(document).startswith("No arm is faster than the baseline. The fastest of the others ")
    # A baseline that does not fit is no alternative.
    for run in document["arms"][0]["runs"]:
        run["within_budget"] = False
    assert verdict_line(document).startswith("Fastest within the budget: ")


def test_every_unit_shows_its_choice_and_the_effect_of_alternatives(comparison: CampaignPage) -> None:
    run = comparison.run
    assert run.profile is not None
    plan = launched(arm_named(run.document, "exact"))
    told = other_units(run.profile, plan, run.budget_bytes)
    assert set(told) == {unit.name for unit in run.profile.units}
    name = next(unit.name for unit in run.profile.units if unit.recomputable)
    kept = str(plan.storage_of(name)) == "save"
    other = plan.changed(storage={**plan.storage, name: "recompute" if kept else "save"})
    off = seconds_per_step(run.profile, other) - seconds_per_step(run.profile, plan)
    assert f"{'recomputed' if kept else 'kept'}: {changed_milliseconds(off)}," in told[name]
    over = peak_bytes(run.profile, other) > (run.budget_bytes or 0)
    assert (", over the budget" in told[name].split(";")[0]) == over
    text = Page(comparison.text).text
    for unit in run.profile.units:
        assert f"{unit.name}: " in comparison.text
        assert told[unit.name] in text


def test_optimum_is_the_solver_result_and_the_front_has_no_dominated_plan(comparison: CampaignPage) -> None:
    run, front = comparison.run, comparison.front
    assert run.profile is not None
    assert front is not None
    assert front.best is not None
    assert front.best[0] == solve(run.profile, run.budget_bytes).plan
    assert front.best[1].peak_bytes <= (run.budget_bytes or 0)
    costs = [cost for _, cost in front.points]
    assert len(costs) >= 2
    assert [cost.peak_bytes for cost in costs] == sorted(cost.peak_bytes for cost in costs)
    assert [cost.seconds_per_sample for cost in costs] == sorted((c.seconds_per_sample for c in costs), reverse=True)
    assert f"as predicted: {front.best[0]}" in Page(comparison.text).text
    short = front_of(run.profile, run.budget_bytes, limit_s=0.0)
    assert short.best == front.best
    assert {short.points[0][1].peak_bytes, short.points[-1][1].peak_bytes} <= {cost.peak_bytes for cost in costs}


def test_arm_that_changes_its_plan_keeps_the_measurements_of_its_windows(compared: Path) -> None:
    document = json.loads((compared / "comparison.json").read_text())
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert "plan" not in arms["restless"]
    for run in arms["restless"]["runs"]:
        assert len(run["windows"]) >= 3
        steps = [window["step"] for window in run["windows"]]
        assert steps == sorted(set(steps))
        assert steps[-1] == run["steps"]
        assert max(window["peak_bytes"] for window in run["windows"] if window["peak_bytes"]) == run["peak_bytes"]
    assert all("windows" not in run for run in arms["exact"]["runs"])


def test_course_of_a_changing_arm_is_drawn_with_its_decisions(comparison: CampaignPage) -> None:
    figures = {figure.title: figure for figure in comparison.figures}
    for what in ("accumulation", "precision and storage", "memory pressure", "time per step", "units over the run"):
        assert f"restless: {what}" in figures
    arm = arm_named(comparison.run.document, "restless")
    changed = max(len(run["plans"]) - 1 for run in arm["runs"])
    drawn = figures["restless: accumulation"].draw(720)[0]
    assert changed >= 2
    assert drawn.count('class="switch"') == changed


def test_energy_is_absent_until_measured_and_carbon_follows_the_intensity(comparison: CampaignPage) -> None:
    assert "Energy: absent." in Page(comparison.text).text
    document = json.loads(json.dumps(dict(comparison.run.document)))
    for number, run in enumerate(document["arms"][0]["runs"]):
        run.update(energy_j=3.6e6 * (1 + number), energy_source="measured:rapl")
    document["arms"][1]["runs"][0].update(energy_j=1.0, energy_source="measured:rapl")
    costs = arm_costs(document, Intensity.constant(380.0))
    assert costs[0].energy_j == pytest.approx(5.4e6)
    assert costs[0].carbon_g == pytest.approx(570.0)
    assert costs[0].energy_source == "measured:rapl"
    # A mean over half of the values would be misleading.
    assert (costs[1].energy_j, costs[1].energy_source, costs[1].carbon_g) == (None, "absent", None)
    for run in document["arms"][0]["runs"]:
        run["grams"] = 12.0
    assert arm_costs(document)[0].carbon_g == pytest.approx(12.0)
    # A series is used only if it covers the runs.
    begin, end = document["arms"][0]["runs"][0]["ran_s"]
    series = Intensity(starts_s=(begin - 3600.0,), grams_per_kwh=(100.0,), end_s=end + 3600.0)
    assert arm_costs(document, series)[0].carbon_g == pytest.approx(150.0)
    late = Intensity(starts_s=(end + 3600.0,), grams_per_kwh=(100.0,), end_s=end + 7200.0)
    assert arm_costs(document, late)[0].carbon_g is None


def test_page_of_a_tuning_reports_its_result_and_cost(tuned: Path, tuning: CampaignPage) -> None:
    document = json.loads((tuned / "tuned.json").read_text())
    text = Page(tuning.text).text
    assert tuning.verdict == tuned_line(document)
    assert tuning.verdict in text
    assert "Baseline and finalists" in text
    finals = measured_finals(tuning.run)
    chosen = finals[Plan.from_json(document["plan"])]
    base = next(cost for plan, cost in finals.items() if str(plan) == "k=1, 5xfp32, 0 recomputed")
    assert chosen.seconds_per_sample / base.seconds_per_sample == pytest.approx(document["measured"]["cost"])
    assert f"{document['tuning_steps']:,}" in text
    assert "autotune tune JOB --method optuna --memory-budget 90% --steps 48" in text


def test_run_without_a_profile_reports_it_and_accepts_one_from_elsewhere(
    compared: Path, runs: Path, tmp_path: Path
) -> None:
    folder = copy_of(compared, tmp_path)
    (folder / "profile.json").unlink()
    page = page_for(read_campaign(folder))
    assert page.front is None
    text = Page(page.text).text
    assert "the job had no profile: after autotune.tune(job, method='exact')" in text.lower()
    change(folder / "config.json", lambda config: config["asked"].update(job="my jobs/mine.py"))
    assert "after autotune profile 'my jobs/mine.py'" in Page(page_for(read_campaign(folder)).text).text
    assert "exact optimum" not in text
    cached = next((runs / "profiles").glob("*.json"))
    assert page_for(read_campaign(folder, cached)).front is not None
    change(folder / "config.json", lambda config: config.update(job="other"))
    with pytest.raises(autotune.InputError, match="is a profile of 'tiny'"):
        read_campaign(folder, cached)


def test_campaign_writes_its_own_page_and_sends_it_to_the_tracker(compared: Path, comparison: CampaignPage) -> None:
    assert "<!DOCTYPE html>" in (compared / "report.html").read_text()[:20]
    assert comparison.verdict.split(";")[0] in Page((compared / "report.html").read_text()).text
    assert {path.stem for path in (compared / "figures").iterdir()} == {figure.name for figure in comparison.figures}
    kept = {path.name for path in (compared.parent / "artifacts").rglob("*") if path.is_file()}
    assert {"report.html", "time-against-memory.svg", "comparison.png"} <= kept


def test_standalone_figure_is_complete_without_the_page(page: CampaignPage) -> None:
    assert len({figure.name for figure in page.figures}) == len(page.figures)
    for figure in page.figures:
        root = ET.fromstring(figure.file)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root[0].text == figure.title
        assert "var(" not in figure.file
        for one in figure.key:
            assert one.name in "".join(root.itertext())


def test_tables_match_the_documents_in_both_formats(compared: Path, tmp_path: Path) -> None:
    asked = ["--csv", str(tmp_path / "csv"), "--parquet", str(tmp_path / "parquet"), "--out", str(tmp_path / "p.html")]
    assert run_command(["report", str(compared), *asked]) == 0
    sheets = sheets_of(read_campaign(compared))
    assert set(sheets) == {"arms", "runs", "curves", "plans", "windows", "trials", "units"}
    for name, rows in sheets.items():
        assert pyarrow.parquet.read_table(tmp_path / "parquet" / f"{name}.parquet").to_pylist() == rows
        with (tmp_path / "csv" / f"{name}.csv").open(newline="") as file:
            read = list(csv.DictReader(file))
        assert [list(row) for row in read] == [list(row) for row in rows]
    document = json.loads((compared / "comparison.json").read_text())
    times = {(run["seed"]): run["time_to_target_s"] for run in document["arms"][0]["runs"]}
    assert {row["seed"]: row["time_to_target_s"] for row in sheets["runs"] if row["arm"] == "baseline"} == times
    assert len(sheets["curves"]) == sum(len(run["curve"]) for arm in document["arms"] for run in arm["runs"])


def test_command_writes_the_requested_files_and_prints_where(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(compared, tmp_path)
    (folder / "report.html").unlink()
    assert run_command(["report", str(folder), "--figures", str(tmp_path / "figures"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["report"] == str(folder / "report.html")
    assert (folder / "report.html").is_file()
    assert document["predicted_optimum"]["peak_bytes"] <= document["memory_budget_bytes"]
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"time-against-memory.svg", "time-against-memory.png", "comparison.png"} <= names
    assert (tmp_path / "figures" / "time-against-memory.png").read_bytes().startswith(b"\x89PNG")
    assert run_command(["report", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(document["verdict"])


def _rename(document: Any) -> None:
    document["against_baseline"][0]["arm"] = "nobody"


DAMAGE: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "no arms": ("comparison.json", lambda d: d.update(arms=[]), "arms is [] (allowed: at least 1 items)"),
    "peak is text": (
        "comparison.json",
        lambda d: d["arms"][1]["runs"][0].update(peak_bytes="much"),
        r"arms[1].runs[0].peak_bytes",
    ),
    "a curve's point is short": (
        "comparison.json",
        lambda d: d["arms"][0]["runs"][1]["curve"][2].pop(),
        "arms[0].runs[1].curve[2]",
    ),
    "no verdict": ("comparison.json", lambda d: d["against_baseline"][0].pop("verdict"), "against_baseline[0].verdict"),
    "a verdict on nobody": ("comparison.json", _rename, "are inconsistent"),
    "a key that nobody wrote": ("comparison.json", lambda d: d.update(extra=1), "unknown key 'extra'"),
    "a year that dates do not have": (
        "comparison.json",
        lambda d: d["arms"][0]["runs"][0].update(ran_s=[-1e15, 0.0]),
        "arms[0].runs[0].ran_s[0] is -1000000000000000.0",
    ),
    "a job from nowhere": ("config.json", lambda d: d["asked"].update(job=3), "asked.job is 3"),
    "a plan of another world": (
        "comparison.json",
        lambda d: d["arms"][0]["plan"]["precision"].update(head="fp7"),
        "arm baseline",
    ),
    "no plan at all": ("comparison.json", lambda d: d["arms"][0].pop("plan"), "a run has no plan"),
    "a profile of nothing": ("profile.json", lambda d: d.pop("tables"), "profile.json: tables is missing"),
    "a plan without k": ("plan.json", lambda d: d.pop("accumulation_steps"), "accumulation_steps is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_document_is_one_line_that_names_the_place(
    damage: str, compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, do, said = DAMAGE[damage]
    folder = copy_of(compared, tmp_path)
    (folder / "report.html").unlink()
    change(folder / name, do)
    assert run_command(["report", str(folder)]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1
    assert name in lines[0]
    assert said in lines[0]
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("row", [b"{not json}\n", b'{"method": "exact"}\n', b"\xff\xfe\n"])
def test_damaged_trial_is_one_line_that_names_file_and_line(
    row: bytes, compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(compared, tmp_path)
    path = folder / "trials.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + row)
    assert run_command(["report", str(folder)]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1
    number = len(whole.splitlines()) + 1
    assert f"{path} line {number}" in lines[0]


def test_torn_last_trial_is_accepted(compared: Path, tmp_path: Path) -> None:
    folder = copy_of(compared, tmp_path)
    with (folder / "trials.jsonl").open("ab") as file:
        file.write(b'{"method": "exa')
    assert len(read_campaign(folder).trials) == len(read_campaign(compared).trials)


def test_unfinished_campaign_or_other_folder_is_one_line_and_exit_code_2(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(compared, tmp_path)
    (folder / "comparison.json").unlink()
    assert run_command(["report", str(folder)]) == 2
    assert f"autotune resume {folder} first" in capsys.readouterr().err
    for wrong in ("-1", "nan", "inf"):
        assert run_command(["report", str(compared), "--carbon-intensity", wrong]) == 2
        assert "--carbon-intensity" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError, match=r"config\.json"):
        read_campaign(tmp_path)


def test_command_that_repeats_a_run_has_all_its_options(tuned: Path) -> None:
    run = read_campaign(tuned)
    asked = dataclasses.replace(
        run.config.asked, weights="1,0,0.5", watts=60.0, ranks=Ranks(count=4, zero_stage=2, config="0" * 64)
    )
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, asked=asked))
    (command,) = (line for line in page_for(run).text.splitlines() if "autotune tune" in line)
    assert "--weights 1,0,0.5 --watts 60.0" in command
    flags = "--engine deepspeed --ranks 4 --zero-stage 2 --ds-config FILE"
    assert flags in command
    (command,) = (line for line in page_for(run).text.splitlines() if "autotune compare" in line)
    assert flags in command


@pytest.mark.slow
def test_very_wide_comparison_of_a_very_deep_model_has_a_small_page(compared: Path) -> None:
    run = read_campaign(compared)
    units = [f"blocks.{number}" for number in range(500)]
    plan = Plan(precision=dict.fromkeys(units, "bf16"), storage=dict.fromkeys(units, "recompute")).to_json()
    document = json.loads(json.dumps(dict(run.document)))
    live = next(arm for arm in document["arms"] if arm["name"] == "restless")
    for record in live["runs"]:
        record["plans"] = [{"step": step, "plan": plan} for step in range(0, 1600, 4)]
        record["windows"] = [{**record["windows"][0], "step": step + 4} for step in range(0, 1600, 4)]
        record["steps"] = 1600
    deep = CampaignRun(
        folder=run.folder,
        config=run.config,
        environment=run.environment,
        document=document,
        trials=(),
        plan=Plan.from_json(plan),
        profile=None,
    )
    text = page_for(deep).text
    Page(text)
    assert len(text) < 2_500_000


def test_failed_windows_are_not_drawn(compared: Path) -> None:
    trial = json.loads((compared / "trials.jsonl").read_text().splitlines()[0])
    cost = measured_trial(trial)
    assert cost is not None
    assert cost.spread[0] <= cost.seconds_per_sample <= cost.spread[1]
    assert math.isfinite(cost.seconds_per_sample)
    trial["measurement"]["failure"] = "out_of_memory"
    assert measured_trial(trial) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.50064, "+500 ms"),
        (-0.0000123, "-0.012 ms"),
        (0.0123, "+12 ms"),
        (0.0, "±0 ms"),
        (-1e-17, "±0 ms"),
        (math.inf, "+inf ms"),
        (-0.0996, "-100 ms"),
    ],
)
def test_predicted_changes_of_time_have_two_significant_digits(seconds: float, text: str) -> None:
    assert changed_milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.2345, "1.23"), (1.0, "1.00"), (0.9963, "0.996"), (1.0004, "1.0004"), (1.00001, "1.00")]
)
def test_a_bound_shows_on_which_side_of_1_it_is(ratio: float, text: str) -> None:
    assert beside_one(ratio) == text


def test_the_facts_of_a_machine_are_rows_of_text() -> None:
    found = {"fp32": {"matrix products": "tf32"}, "settings": {}, "precisions_excluded": None, "cores": 2}
    assert facts(found) == [("fp32: matrix products", "tf32"), ("cores", "2")]
