"""Tests that no text of a hostile plan becomes source code in an export."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_job
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_export import EVERYWHERE, a_plan
from torch import nn

from autotune import Job, Launch, Plan, PlanError, Precision, Storage
from autotune.cli.main import run
from autotune.optimizers import KINDS
from autotune.report.plan_export import TARGETS, export
from autotune.report.snippet import FILE

# Texts that close a docstring, a literal, a call or a format, and texts that no encoding or terminal accepts unchanged.
HOSTILE = [
    '"""\nimport os; os.abort()\n"""',
    "'''",
    '"',
    "'",
    "\\",
    "\\\n",
    "{plan}{0}{{",
    "}",
    "%s",
    "\n",
    "\r",
    "\0",
    "\x1b[31m",
    "\u2028",
    "\ud800",
    "ü 中 😀",
    "#",
    "job'); import os; os.abort() #",
    "a" * 300 + " " + "b" * 300,
]
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(codec=None), max_size=40)).filter(bool)
# A module may have any name without a dot that is not an attribute of its parent.
NAMES = st.lists(
    TEXTS.map(lambda text: "u" + text.replace(".", "")), min_size=2, max_size=2, unique_by=lambda text: text
)


def named_job(names: list[str], **changes: Any) -> Job:
    """Return a job whose units have these names."""

    def model() -> nn.Module:
        made = nn.Module()
        made.blocks = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
        return made

    return tiny_job.make(model=model, **changes)


def plan_of(names: list[str], launch: Launch | None = None) -> Plan:
    first, second = (f"blocks.{name}" for name in names)
    return Plan(
        accumulation_steps=2,
        precision={first: Precision.BF16, second: Precision.FP32},
        storage={first: Storage.RECOMPUTE, second: Storage.RECOMPUTE},
        launch=launch or Launch(),
    )


def is_unicode(text: str) -> bool:
    """Tell whether a text can be encoded; a lone surrogate cannot, and no document contains one."""
    return text.encode(errors="ignore").decode() == text


class _Blank(ast.NodeTransformer):
    """Replace the constants of a syntax tree, and the plan, which is a dictionary of constants."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(value=type(node.value).__name__)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        return ast.Constant(value="dict")


def tree_of(script: str) -> str:
    return ast.dump(_Blank().visit(ast.parse(script)))


def assigned_plan(script: str) -> Any:
    for node in ast.parse(script).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PLAN":
            assert isinstance(node.value, ast.Call)
            return ast.literal_eval(node.value.args[0])
    raise AssertionError("no plan in the script")


def script_of(names: list[str], reference: str) -> str:
    script = export(plan_of(names), named_job(names), "python", reference=reference).files[FILE]
    assert isinstance(script, str)
    return script


PLAIN = tree_of(script_of(["first", "second"], "tiny_job:job"))


@given(names=NAMES, reference=TEXTS)
def test_script_source_is_independent_of_plan_and_reference_texts(names: list[str], reference: str) -> None:
    script = script_of(names, reference)
    assert tree_of(script) == PLAIN
    compile(script, FILE, "exec")
    assert script.encode().decode() == script
    assert assigned_plan(script) == json.loads(json.dumps(plan_of(names).to_json()))
    loads = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    (loaded,) = (node for node in loads if isinstance(node.func, ast.Name) and node.func.id == "load_job")
    assert ast.literal_eval(loaded.args[0]) == reference


@given(names=NAMES, target=st.sampled_from(TARGETS))
def test_every_export_has_plain_names_one_plain_command_and_one_line_notes(names: list[str], target: str) -> None:
    plain = export(plan_of(["a", "b"]), named_job(["a", "b"]), target, reference="x")
    made = export(plan_of(names), named_job(names), target, reference="x")
    assert (list(made.files), made.command) == (list(plain.files), plain.command)
    for note in made.notes:
        assert note.isprintable()
        note.encode()
    json.dumps(made.to_json(), allow_nan=False).encode()
    for name, document in made.files.items():
        assert Path(name).name == name
        if name == "plan.json" and not isinstance(document, str) and all(map(is_unicode, names)):
            assert Plan.from_json(document).precision.keys() == plan_of(names).precision.keys()


@given(text=TEXTS)
def test_only_known_optimizers_can_be_launched(text: str) -> None:
    document = {**Plan().to_json(), "launch": {"optimizer": text}}
    known = r"launch\.optimizer is .* \(allowed: adamw, adamw8bit, lamb, lion, sgd\)"
    with pytest.raises(PlanError, match=known if is_unicode(text) else "optimizer|JSON"):
        Plan.from_json(document)


def test_each_known_optimizer_can_be_launched() -> None:
    for name in KINDS:
        assert Plan.from_json({**Plan().to_json(), "launch": {"optimizer": name}}).launch.optimizer == name


@pytest.mark.parametrize(
    "rate", [10**400, "1", True, 0, -1.0, float("inf"), float("nan"), [1]], ids=lambda rate: str(rate)[:8]
)
def test_learning_rate_must_be_a_finite_float(rate: Any) -> None:
    with pytest.raises(PlanError, match=r"launch\.learning_rate is .{1,80} \(allowed: a number"):
        Plan.from_json({**Plan().to_json(), "launch": {"optimizer": "lion", "learning_rate": rate}})


@pytest.mark.parametrize("target", ["python", "deepspeed", "json"])
def test_plan_with_source_code_as_optimizer_is_rejected_and_writes_nothing(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = a_plan().to_json()
    document["launch"] = {"optimizer": '"""\nimport os; os.abort()\n"""'}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    (tmp_path / "out").mkdir()
    command = ["export", str(tmp_path / "plan.json"), "--job", tiny_job.__file__, "--out", str(tmp_path / "out")]
    assert run([*command, "--to", target]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not list((tmp_path / "out").iterdir())


def test_numpy_numbers_become_plain_numbers_in_a_script() -> None:
    launch = Launch(optimizer="lion", learning_rate=np.float64(3e-4))
    for norm, clips in ((np.float64(0.5), True), (float("inf"), False)):
        made = export(
            plan_of(["a", "b"], launch), named_job(["a", "b"], clip_norm=norm, launch=launch), "python", reference="x"
        )
        script = str(made.files[FILE])
        assert "np." not in script
        assert "inf" not in script
        assert ("clip_grad_norm_(parameters, 0.5)" in script) == clips
    config = export(plan_of(["a", "b"]), named_job(["a", "b"], clip_norm=float("inf")), "deepspeed")
    assert config.files["ds_config.json"]["gradient_clipping"] == 0.0  # type: ignore[index]


@pytest.mark.slow
def test_script_runs_even_if_units_are_named_like_source_code(tmp_path: Path) -> None:
    job = tmp_path / "odd_job.py"
    job.write_text(
        "import tiny_job\nfrom collections import OrderedDict\n"
        "NAMES = ['\"\"\"', \"{0}\\\\\\n'\", 'ü']\n"
        "class Network(tiny_job.Network):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        blocks = zip(NAMES, self.blocks)\n"
        "        self.blocks = tiny_job.nn.Sequential(OrderedDict(blocks))\n"
        "def job():\n"
        "    return tiny_job.make(model=Network, max_steps=2)\n"
    )
    names = [f"blocks.{name}" for name in ('"""', "{0}\\\n'", "ü")]
    plan = Plan(accumulation_steps=2, storage=dict.fromkeys(names, Storage.RECOMPUTE))
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    command = ["export", str(tmp_path / "plan.json"), "--job", str(job), "--to", "python", "--out", str(tmp_path)]
    assert run(command) == 0
    done = subprocess.run(
        [sys.executable, str(tmp_path / FILE)], env=EVERYWHERE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 16
    assert torch.isfinite(torch.tensor(json.loads(done.stdout)["metric"]))
