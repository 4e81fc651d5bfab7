"""Searches, rules, policies and export formats of other packages work by name; a broken one harms only its users."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_env import SPACE

from autotune import AttachError, InputError, Plan, PlanSpace, RunDirectoryError
from autotune.agents.entry_points import Registry
from autotune.agents.rules import RULES, Rule, rule_plan
from autotune.agents.search_methods import METHODS, find_method
from autotune.campaign.trusted_inputs import TrustedInputs
from autotune.cli.main import run
from autotune.live.deciding import find_policy
from autotune.report.explanation import explain_arm

TINY = f"{Path(__file__).parent / 'tiny_job.py'}:job"

ENTRY_POINTS = """
[autotune.searches]
lean-first = toy_tuning:LeanFirst
broken-import = toy_missing:Search
broken-kind = toy_tuning:NUMBER
broken-ask = toy_tuning:BrokenAsk
broken-make = toy_tuning:NoSearch
foreign-plan = toy_tuning:ForeignPlan

[autotune.rules]
lean = toy_tuning:lean
broken-rule = toy_tuning:broken_rule

[autotune.policies]
restless = toy_tuning:Restless
planned = toy_tuning:Planned
broken-policy = toy_tuning:NoPolicy
broken-decide = toy_tuning:BrokenDecide
no-plan = toy_tuning:NoPlan
broken-reset = toy_tuning:BrokenReset

[autotune.exports]
shell = toy_tuning:to_shell
single = toy_tuning:SINGLE
broken-export = toy_tuning:broken_export
no-export = toy_tuning:no_export
broken-format = toy_tuning:NUMBER
"""

CODE = """
from autotune.report.export_targets import Export
from autotune.report.plan_export import ExportFormat

NUMBER = 3


def to_shell(request):
    launched = request.launched()
    files = {"plan.json": request.plan.to_json(), "train.sh": f"train {request.reference} {launched.micro_samples}"}
    return Export(files=files, command="sh train.sh", notes=[f"{request.ranks} ranks"])


def broken_export(request):
    raise RuntimeError("no export today")


def no_export(request):
    return {"train.sh": ""}


SINGLE = ExportFormat(make=to_shell, takes_ranks=False)


def lean(space):
    return space.leanest()


def broken_rule(space):
    raise RuntimeError("no rule today")


class LeanFirst:
    def __init__(self, context):
        self.plans = [context.space.leanest(), context.space.baseline()]
        self.asked = 0

    def ask(self):
        self.asked += 1
        return self.plans[self.asked % 2]

    def tell(self, plan, observation, cost):
        assert observation.window is not None

    def close(self):
        pass


class BrokenAsk(LeanFirst):
    def ask(self):
        raise ZeroDivisionError("no plan today")


class ForeignPlan(LeanFirst):
    def ask(self):
        return self.plans[0].changed(accumulation_steps=64)


class NoSearch:
    def __init__(self, context):
        pass


class Restless:
    name = "restless"

    def decide(self, observation, plan):
        space = observation.space
        return space.leanest() if plan == space.baseline() else space.baseline()

    def reset(self):
        pass


class Planned(Restless):
    name = "planned"

    def begin(self, profile, budget_bytes):
        self.plan = profile.space.leanest()
        return self.plan

    def decide(self, observation, plan):
        return self.plan


class NoPolicy:
    pass


class BrokenDecide(Restless):
    def decide(self, observation, plan):
        raise ZeroDivisionError("no decision today")


class NoPlan(Restless):
    def decide(self, observation, plan):
        return None


class BrokenReset(Restless):
    def reset(self):
        raise RuntimeError("no reset today")
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "packages"
    metadata = folder / "toy_tuning-1.5.dist-info"
    metadata.mkdir(parents=True)
    (folder / "toy_tuning.py").write_text(CODE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-tuning\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("toy_tuning", None)


def tune(method: str, folder: Path, *more: str) -> int:
    return run(["tune", TINY, "--method", method, "--steps", "45", "--runs-dir", str(folder / "runs"), *more])


def compare(arms: str, folder: Path, *more: str) -> int:
    return run(["compare", TINY, "--arms", arms, "--steps", "45", "--runs-dir", str(folder / "runs"), *more])


def test_a_foreign_search_tunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("lean-first", tmp_path, "--json") == 0
    folder = Path(json.loads(capsys.readouterr().out)["run"])
    rows = [json.loads(row) for row in (folder / "trials.jsonl").read_text().splitlines()]
    assert {row["method"] for row in rows} == {"lean-first"}


def test_a_foreign_policy_that_plans_from_a_profile_tunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("planned", tmp_path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["predicted"]
    assert document["plan"]


@pytest.mark.slow
def test_foreign_searches_rules_and_policies_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = ["lean", "lean-first", "restless", "planned"]
    assert compare(",".join(arms), tmp_path, "--seeds", "2", "--json") == 0
    found = {arm["name"]: arm for arm in json.loads(capsys.readouterr().out)["arms"]}
    assert list(found) == ["baseline", *arms]
    assert "recompute" in found["lean"]["plan"]["storage"].values()
    assert found["planned"]["tuning_steps"] > 0
    assert found["restless"]["tuning_steps"] == 0


PACKAGE = "of package toy-tuning 1.5 failed"


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("broken-import", f"method 'broken-import' {PACKAGE} .*ModuleNotFoundError"),
        ("broken-kind", f"method 'broken-kind' {PACKAGE} .*got int"),
        ("broken-make", f"method 'broken-make' {PACKAGE} .*got NoSearch"),
        ("broken-ask", f"method 'broken-ask' {PACKAGE} .*no plan today"),
        ("foreign-plan", "method foreign-plan: accumulation_steps is 64"),
        ("restless", "policy 'restless' has no begin"),
        ("magic", "lean-first.*restless"),
    ],
)
def test_a_broken_method_is_one_sentence(
    method: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(method, tmp_path) == 2
    assert re.search(says, capsys.readouterr().err.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ("broken-import", f"method 'broken-import' {PACKAGE} .*ModuleNotFoundError"),
        ("broken-policy", f"policy 'broken-policy' {PACKAGE} .*got NoPolicy"),
        ("broken-rule", f"rule 'broken-rule' {PACKAGE} .*no rule today"),
        ("magic", "lean, .*lean-first.*restless"),
    ],
)
def test_a_broken_arm_is_one_sentence(arm: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(f"baseline,sqrt,{arm}", tmp_path) == 2
    assert re.search(says, capsys.readouterr().err.strip().splitlines()[-1])
    assert not list((tmp_path / "runs").glob("*-compare-*"))


@pytest.mark.parametrize(
    ("arm", "says"),
    [("broken-decide", "no decision today"), ("no-plan", "got NoneType"), ("broken-reset", "no reset today")],
)
def test_a_policy_that_fails_while_it_decides_is_one_sentence(
    arm: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(f"baseline,{arm}", tmp_path, "--seeds", "2") == 2
    assert re.search(f"policy {arm!r} {PACKAGE} .*{says}", capsys.readouterr().err.strip().splitlines()[-1])


def export(target: str, folder: Path, *more: str) -> int:
    (folder / "mine.json").write_text(json.dumps(Plan(accumulation_steps=2).to_json()))
    return run(["export", str(folder / "mine.json"), "--job", TINY, "--to", target, "--out", str(folder), *more])


def test_a_foreign_format_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export("shell", tmp_path, "--ranks", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (tmp_path / "train.sh").read_text() == document["files"]["train.sh"] == f"train {TINY} 2"
    assert set(json.loads((tmp_path / "plan.json").read_text())["precision"]) >= {"embedding", "head"}
    assert document["notes"] == ["2 ranks"]
    assert export("single", tmp_path) == 0


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("broken-export", f"export format 'broken-export' {PACKAGE} .*no export today"),
        ("no-export", f"export format 'no-export' {PACKAGE} .*expected an Export, got dict"),
        ("broken-format", f"export format 'broken-format' {PACKAGE} .*got int"),
        ("single", "single cannot express 2 ranks .*deepspeed"),
        ("magic", "--to: target is 'magic' .*deepspeed, .*shell"),
    ],
)
def test_a_broken_format_is_one_sentence(
    target: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(target, tmp_path, "--ranks", "2") == 2
    assert re.search(says, capsys.readouterr().err.strip().splitlines()[-1])
    assert not (tmp_path / "train.sh").exists()


def test_the_choices_of_foreign_rules_and_policies_are_explained_without_loading_them() -> None:
    plan = SPACE.leanest()
    for name, reason in (("lean", "chosen by the rule"), ("restless", "chosen by the policy")):
        assert {row.reason for row in explain_arm(name, plan, SPACE, ())} == {reason}
    assert {row.reason for row in explain_arm("mine", plan, SPACE, ())} == {"as given in the plan file"}
    assert "toy_tuning" not in sys.modules


@pytest.mark.parametrize(
    ("verb", "names"),
    [("tune", ["lean-first", "restless"]), ("compare", ["lean-first", "lean"]), ("export", ["shell"])],
)
def test_help_names_foreign_entries_and_loads_none(
    verb: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in names)
    assert "toy_tuning" not in sys.modules


def test_a_foreign_entry_is_loaded_only_when_it_is_named() -> None:
    assert "lean" in RULES
    assert "lean-first" in METHODS.names
    assert find_method("random")
    assert "toy_tuning" not in sys.modules
    assert RULES["lean"]
    assert "toy_tuning" in sys.modules


def test_a_live_run_finds_a_foreign_policy_by_name() -> None:
    assert find_policy("restless").name == "restless"
    with pytest.raises(AttachError, match="restless"):
        find_policy("magic")


def test_a_run_folder_cannot_load_a_foreign_entry_by_its_own_files(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="'lean-first' is code of another package"):
        TrustedInputs(run=tmp_path).require_arms(["lean-first"])
    TrustedInputs(run=tmp_path, arms=["lean-first"]).require_arms(["lean-first", "optuna"])
    assert "toy_tuning" not in sys.modules


def test_two_packages_that_use_one_name_are_named(tmp_path: Path) -> None:
    metadata = tmp_path / "packages" / "other_toy-2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-toy\nVersion: 2.0\n")
    (metadata / "entry_points.txt").write_text("[autotune.rules]\nlean = toy_tuning:lean\n")
    with pytest.raises(InputError, match=r"other-toy 2.0 and toy-tuning 1.5 both register a rule 'lean'"):
        RULES["lean"]


def test_a_script_registers_a_rule_with_a_decorator() -> None:
    registry = Registry("rule", "autotune.no-such-group", lambda given: Rule(plan=given))

    @registry.register("leanest")
    def leanest(space: PlanSpace) -> Plan:
        return space.leanest()

    assert registry["leanest"].plan is leanest
    assert registry.names == ("leanest",)
    for name in ("leanest", "a,b", "a/b", ""):
        with pytest.raises(InputError, match="cannot be registered"):
            registry.register(name)


def test_a_name_of_this_package_cannot_be_taken_over(tmp_path: Path) -> None:
    (tmp_path / "packages" / "toy_tuning-1.5.dist-info" / "entry_points.txt").write_text(
        "[autotune.rules]\nbaseline = toy_tuning:lean\n"
    )
    assert rule_plan("baseline", SPACE) == SPACE.baseline()
