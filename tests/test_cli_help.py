"""What the command line does for its users: summaries, examples, completion, suggestions, and how to finish a run."""

import json
import shlex
from pathlib import Path

import pytest
import tiny_job
import typer
from rich.console import Console

from autotune import extras
from autotune.agents.policies import POLICIES
from autotune.agents.search_methods import METHODS
from autotune.budget import MemoryBudget
from autotune.cli import completion
from autotune.cli.command_help import HELP
from autotune.cli.main import app, run
from autotune.cli.tune import show
from autotune.errors import BudgetError, InputError
from autotune.records.requests import TuneRequest

TESTS = Path(__file__).parent
JOB = TESTS / "tiny_job.py"


def test_the_list_of_commands_cuts_no_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:")[1]
    assert "..." not in listed
    assert [summary for summary, *_ in HELP.values() if summary not in listed] == []


@pytest.mark.parametrize("example", [example for _, *examples in HELP.values() for example in examples])
def test_examples_in_help_texts_are_commands_with_existing_options(
    example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, name, *arguments = shlex.split(example)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]  # the click group
    command.make_context(name, arguments)
    assert run([name, "--help"]) == 0
    assert f"  {example}\n" in capsys.readouterr().out


def test_a_usage_error_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for line, told in (("tune digits", "tune"), ("bench gpu", "bench gpu"), ("", "")):
        assert run([*line.split(), "--foo"]) == 2
        assert f"(see {f'autotune {told}'.strip()} --help)" in capsys.readouterr().err


def test_the_help_of_tune_lists_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--help"]) == 0
    told = "".join(capsys.readouterr().out.split())
    assert [name for name in (*METHODS.registered, *POLICIES.registered) if name not in told] == []


def test_a_shell_completes_jobs_methods_devices_and_the_last_of_several_arms() -> None:
    assert completion.jobs("charlm_l") == ["charlm_long"]
    assert completion.methods("opt") == ["optuna", "optuna-prices"]
    assert completion.arms("baseline,pap") == ["baseline,paper"]
    assert completion.arms("baseline,k") == ["baseline,k-optimal"]
    assert completion.devices("h2") == ["h200"]


@pytest.mark.parametrize(
    ("command", "suggested"),
    [
        (["tune", "chralm"], "'charlm'"),
        (["tune", "charlm", "--method", "gredy"], "'greedy'"),
        (["tune", "charlm", "--memory-budget", "0.4"], "'40%'"),
        (["tune", "charlm", "--memory-budget", "40g"], "'40GiB'"),
        (["compare", "charlm", "--arms", "baseline,papper"], "'paper'"),
        (["plan", "charlm", "--device", "H20"], "'h200'"),
        (["explain", "papper", "--job", "charlm"], "'paper'"),
        (["tune", f"{JOB}:jobs"], "'job'"),
    ],
)
def test_mistyped_names_are_answered_with_the_most_similar_one(
    command: list[str], suggested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [] if command[0] in ("plan", "explain") else ["--runs-dir", str(tmp_path / "runs")]
    assert run([*command, *runs]) == 2
    assert f"did you mean {suggested}?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_arm_that_does_not_exist_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in ("nonsense", str(tmp_path / "missing.json")):
        assert run(["compare", str(JOB), "--arms", f"baseline,{arm}", "--runs-dir", str(tmp_path / "runs")]) == 2
        assert "..." not in capsys.readouterr().out


@pytest.mark.parametrize(("text", "size"), [("8gb", 8 * 10**9), ("8 GiB", 2**33), ("900mib", 900 * 2**20), ("5B", 5)])
def test_units_of_a_budget_may_be_written_in_any_case(text: str, size: int) -> None:
    assert MemoryBudget.parse(text).size_bytes == size


@pytest.mark.parametrize("text", ["banana", "40", "4e9", "", "1.2.3g"])
def test_a_budget_that_could_mean_anything_gets_no_suggestion(text: str) -> None:
    with pytest.raises(BudgetError, match="20GiB") as raised:
        MemoryBudget.parse(text)
    assert "did you mean" not in str(raised.value)


def test_an_error_with_a_suggestion_is_the_same_in_another_process() -> None:
    error = InputError("arm 'papr' is unknown", where="--arms", allowed=["paper", "sqrt"], given="papr")
    assert "did you mean 'paper'?" in str(error)
    assert str(InputError.from_json(error.to_json())) == str(error)


def test_a_search_in_a_jobs_file_is_refused_while_the_file_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "searching.py"
    path.write_text(f"{JOB.read_text()}\nimport autotune\nautotune.tune(job, 'random', runs_dir={str(tmp_path)!r})\n")
    assert run(["explain", "sqrt", "--job", str(path)]) == 2
    assert "__name__ == '__main__'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_doctor_says_how_to_install_what_is_missing_and_fails_if_runs_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autotune.cli.doctor.is_installed", lambda name: name != "ray")
    assert run(["doctor", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert "pip install 'ray[client]" in capsys.readouterr().out
    (tmp_path / "file").touch()
    assert run(["doctor", "--runs-dir", str(tmp_path / "file"), "--json"]) == 2
    assert "writable" in json.loads(capsys.readouterr().out)["runs_writable"]


# MLflow comes with every installation, but may be missing where packages were copied by hand.
@pytest.mark.parametrize("module", [*extras.EXTRAS, "mlflow"])
def test_every_optional_library_has_a_command_that_names_it(module: str) -> None:
    assert module.replace("_", "-") in extras.install_command(module).replace("_", "-")


@pytest.mark.parametrize(
    ("options", "module"), [(["--cluster", "local:1"], "ray"), (["--engine", "deepspeed"], "deepspeed")]
)
def test_a_missing_library_is_found_before_anything_is_measured(
    options: list[str],
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: name != module)
    assert run(["tune", str(JOB), "--method", "random", *options, "--runs-dir", str(tmp_path)]) == 2
    answer = capsys.readouterr()
    assert f"{module} is not installed" in answer.err
    assert "pip install" in answer.err
    assert answer.out == ""


_INTERRUPTING = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import tiny_job


def _loss(model, batch):
    if list(Path({folder!r}).glob("runs/*/trials.jsonl")) and not Path({folder!r}, "calm").exists():
        raise KeyboardInterrupt
    return tiny_job.mean_loss(model, batch)


job = tiny_job.make(loss=_loss)
"""


def test_an_interrupted_search_says_how_to_finish_it_and_that_command_finishes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "mine.py"
    job.write_text(_INTERRUPTING.format(tests=str(TESTS), folder=str(tmp_path)))
    command = ["tune", str(job), "--method", "random", "--steps", "80", "--runs-dir", str(tmp_path / "runs")]
    assert run(command) == 130
    said = capsys.readouterr().err
    (tmp_path / "calm").touch()
    _, _, finishing = said.partition("finish with: autotune ")
    assert shlex.split(finishing)[0] == "resume"
    assert run([*shlex.split(finishing), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tuning_steps"] <= 80


def test_a_finished_run_is_not_resumed_for_another_job(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.py").write_text("import tiny_job\n\njob = tiny_job.make(name='other')\n")
    assert run(["resume", str(tuned), "--job", str(tmp_path / "other.py")]) == 2
    assert "is a run of the job 'tiny', and 'other' was given" in capsys.readouterr().err
    assert run(["resume", str(tuned), "--job", tiny_job.__file__]) == 0


def test_a_suggested_command_can_be_pasted_into_a_shell(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = TuneRequest(job="my own é.py", method="exact")
    show(json.loads((tuned / "tuned.json").read_text()), request, Console(width=60), as_json=False)
    _, _, command = capsys.readouterr().out.partition(" it:\n")
    assert shlex.split(command.splitlines()[0]) == [
        "autotune",
        "compare",
        "my own é.py",
        "--arms",
        f"baseline,{tuned}/plan.json",
    ]


def test_a_run_explains_each_units_other_choices_without_its_job(
    tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", str(tuned), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert any(row["others"] for row in rows)
    assert run(["explain", str(tuned)]) == 0
    shown = capsys.readouterr().out
    assert "another choice" in shown
    reasons = {row["reason"] for row in rows}
    assert len(reasons) > 1 or shown.count("Why each choice was made") == 1
