"""Generate command lines with hostile values for all verbs and options, and run each in a sandboxed process.

``python tests/fuzz/command_lines.py SCRATCH --count 1500 --seed 0`` prints one JSON object per command line and exits
with 1 if one of them did something forbidden.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import os
import pkgutil
import random
import shutil
import sys
import tempfile
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import apart
import guard
import hostile

TESTS = Path(__file__).resolve().parent.parent
JOB = str(TESTS / "tiny_job.py")
Verb = tuple[str, ...]
# Options that take a path as text, and those that take a URL.
PATHS = ("plan", "subject", "arms", "job", "jobs", "policy", "carbon_intensity")
TAKES_URL = ("storage", "cluster", "address")
# Options without which a verb does nothing in this sandbox.
WANTED = {("explain", "job"), ("bench", "gpu", "device"), ("bench", "gpu", "jobs"), ("reproduce", "scale")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One parameter of a verb.

    Attributes:
        name: name of the parameter in the verb's function.
        flags: flags of the option; empty for an argument.
        kind: ``flag``, ``number``, ``path`` or ``text``.
        required: whether the verb requires it.
    """

    name: str
    flags: tuple[str, ...]
    kind: str
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Values that command lines are drawn from.

    Attributes:
        root: the sandbox folder.
        paths: hostile paths.
        unreadable: those of the paths that must not be read.
        valid: valid values, by option, or by verb and option.
    """

    root: Path
    paths: list[str]
    unreadable: list[Path]
    valid: dict[Verb, list[str]]


def verbs() -> dict[Verb, list[Option]]:
    """Return the options of every verb, read from the command line's own definition."""
    import typer

    from autotune.cli.main import app

    found: dict[Verb, list[Option]] = {}

    def walk(command: Any, path: Verb) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*path, name))
        if not hasattr(command, "commands"):
            found[path] = [*_options(command)]

    walk(typer.main.get_command(app), ())
    return found


def _options(command: Any) -> Iterator[Option]:
    signature = inspect.signature(inspect.unwrap(command.callback, stop=_is_signed), eval_str=True)
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    for parameter in command.params:
        flags = () if parameter.param_type_name == "argument" else (*parameter.opts, *parameter.secondary_opts)
        yield Option(
            name=parameter.name,
            flags=flags,
            kind=_kind(hints.get(parameter.name, bool)),
            required=parameter.required,
        )


def _is_signed(function: Any) -> bool:
    return hasattr(function, "__signature__")


def _kind(hint: Any) -> str:
    parts = (hint, *typing.get_args(hint))
    kinds = {bool: "flag", int: "number", float: "number", Path: "path"}
    return next((kind for given, kind in kinds.items() if given in parts), "text")


def command_lines(seed: int, places: Places) -> Iterator[list[str]]:
    """Yield command lines endlessly: the same ones for the same seed."""
    options, index = verbs(), 0
    names = list(options)
    while True:
        # Each line has its own generator, so that it can be reproduced alone; verbs take turns.
        yield _line(random.Random(f"{seed}/{index}"), names[index % len(names)], options, places)
        index += 1


def _line(chance: random.Random, verb: Verb, options: dict[Verb, list[Option]], places: Places) -> list[str]:
    known = options[verb]
    wanted = [option for option in known if option.required or (*verb, option.name) in WANTED]
    taken = [option for option in known if chance.random() < (0.97 if option in wanted else 0.3)]
    if all(option.kind == "flag" for option in taken):
        taken += chance.sample([option for option in known if option.kind != "flag"], 1)
    # Numbers can be invalid in few ways.
    valued = [option for option in taken if option.kind != "flag"]
    valued.sort(key=lambda option: chance.random() ** (3 if option.kind == "number" else 1), reverse=True)
    chosen = valued[: chance.choice([1, 1, 1, 2, 3])]
    words: list[str] = []
    for option in chance.sample(taken, len(taken)):
        value = _hostile(chance, option, places) if option in chosen else _valid(chance, option, verb, places)
        words += _written(chance, option, value)
    if chance.random() < 0.05:
        words.insert(
            chance.randrange(len(words) + 1), chance.choice([*hostile.TEXTS, "--no-such", "--help", "--version"])
        )
    return [*(["--verbose"] if chance.random() < 0.1 else []), *verb, *words]


def _written(chance: random.Random, option: Option, value: str) -> list[str]:
    if option.kind == "flag":
        return [chance.choice(option.flags)]
    if not option.flags:
        return [value]
    return [f"{option.flags[0]}={value}"] if chance.random() < 0.4 else [option.flags[0], value]


def _hostile(chance: random.Random, option: Option, places: Places) -> str:
    if option.name in TAKES_URL and chance.random() < 0.8:
        return chance.choice(hostile.URLS)
    # In other options, the password of a URL is not a secret.
    texts = hostile.TEXTS + [url.replace(hostile.SECRET, "x") for url in hostile.URLS]
    numbers = [hostile.NUMBERS, hostile.NUMBERS, hostile.NOT_NUMBERS]
    if chance.random() < 0.15:
        return chance.choice(chance.choice([*numbers[1:], texts, places.paths]))
    if option.kind == "number":
        return chance.choice(chance.choice(numbers))
    if option.kind == "path" or option.name in PATHS:
        return chance.choice(chance.choice([places.paths, places.paths, texts]))
    return chance.choice(texts)


def _valid(chance: random.Random, option: Option, verb: Verb, places: Places) -> str:
    for key in ((*verb, option.name), (option.name,)):
        if key in places.valid:
            return chance.choice(places.valid[key])
    # An option that this file does not know.
    return {"number": "2", "path": "fresh"}.get(option.kind, "text")


def prepare(root: Path, *, runs: bool) -> Places:
    """Fill an empty folder with everything that command lines refer to.

    Args:
        root: the folder.
        runs: whether real runs are made as well, which takes a while.
    """
    for name in ("work", "home", "temporary"):
        (root / name).mkdir()
    # Libraries look for files in the user's home and write some there.
    os.environ.update(HOME=str(root / "home"), TMPDIR=str(root / "temporary"), MPLCONFIGDIR=str(root / "home"))
    # A package may have asked for it already.
    tempfile.tempdir = None
    os.environ.update(COLUMNS="100", MLFLOW_DISABLE_TELEMETRY="true")
    for name in ("MLFLOW_TRACKING_URI", "PGPASSWORD", "AUTOTUNE_DATA"):
        os.environ.pop(name, None)
    paths, unreadable = hostile.make(root / "hostile")
    valid = _good(root / "good")
    if runs:
        made = _real_runs(root / "good" / "runs")
        valid |= {("run",): made, ("resume",): made, ("log",): made, ("subject",): [*made, "paper"]}
    if os.getuid() == 0:
        for folder, folders, files in os.walk(root):
            for name in (".", *folders, *files):
                os.lchown(f"{folder}/{name}", guard.NOBODY, guard.NOBODY)
    return Places(root=root, paths=paths, unreadable=unreadable, valid=valid)


def _good(folder: Path) -> dict[Verb, list[str]]:
    """Make valid files, and return valid values of the options."""
    from autotune.catalog import content_folder

    begun = folder / "begun"
    begun.mkdir(parents=True)
    (begun / "config.json").write_text(json.dumps({"version": 1, "verb": "tune", "job": "tiny"}))
    plan = {"version": 1, "accumulation_steps": 1, "precision": {}, "storage": {}}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "series.csv").write_text("2025-03-01T00:00Z,100\n2025-03-01T01:00Z,90\n2025-03-01T02:00Z,80\n")
    shutil.copy(content_folder("policies") / "ppo.toml", folder / "recipe.toml")
    shutil.copytree(content_folder("policies") / "ppo", folder / "policy")
    named = {
        **dict.fromkeys(("run", "resume", "log"), f"{begun}"),
        **dict.fromkeys(("start", "policy"), f"{folder}/policy"),
        **dict.fromkeys(("situation_steps", "steps"), "48 64"),
        **dict.fromkeys(("cluster", "address"), "local:1"),
        **dict.fromkeys(("trials", "pairs", "seeds", "plans"), "2 3"),
        "job": JOB,
        "jobs": f"{JOB} none",
        "table": "table1 error-analysis",
        "scale": "cpu",
        "subject": f"{folder}/plan.json paper {begun}",
        "plan": f"{folder}/plan.json",
        "to": "json python deepspeed",
        "device": "cpu",
        "length": "1h 30min",
        "carbon_intensity": f"{folder}/series.csv",
        "earliest": "2025-03-01T00:30Z",
        "deadline": "2025-03-01T02:30Z",
        "watts": "50",
        "engine": "torch torch deepspeed",
        "zero_stage": "0 0 0 0 2",
        "method": "random planner exact optuna",
        "arms": "baseline,paper paper,random",
        "methods": "random exact",
        "situations": "none curriculum",
        "windows": "16 24",
        "seconds": "5 6.5",
        "memory_budget": "40% 90% 1GiB 600KiB",
        "dips": "5:70%",
        "storage": "postgresql://127.0.0.1:1/studies",
        "weights": "1,0,0 1,0.5,0",
        "recipe": f"{folder}/recipe.toml",
        "runs_dir": f"runs {folder}/runs",
        "out": ".",
        "data": f"{folder}",
        "report out": "page.html",
        "report carbon_intensity": "400",
        "compare carbon_intensity": "400",
        "plan device": "h200",
        "bench policy jobs": "2",
    }
    return {tuple(name.split()): values.split() for name, values in named.items()}


def _real_runs(runs: Path) -> list[str]:
    """Tune, compare and attach to a tiny job, and return the run directories."""
    import autotune

    sys.path.insert(0, str(TESTS))
    import tiny_job

    autotune.tune(tiny_job.job(), "random", steps=48, runs_dir=runs)
    autotune.compare(tiny_job.job(), ["baseline", "paper"], seeds=2, runs_dir=runs)
    model, batches = tiny_job.Network(), tiny_job.batches(0)
    tuner = autotune.attach(model, tiny_job.optimizer(model.parameters()), "planner", runs_dir=runs)
    for _ in range(8):
        for part in tuner.micro_batches(next(batches)):
            tuner.backward(tiny_job.mean_loss(model, part))
        tuner.step()
    tuner.detach()
    return sorted(str(path.parent) for path in runs.glob("*/config.json"))


def preload() -> None:
    """Import the modules of the verbs, once for all forked processes."""
    import torch

    import autotune

    left_out = ("autotune.live.integrations", "autotune.engines.deepspeed_engine", "autotune._")
    for module in pkgutil.walk_packages(autotune.__path__, "autotune."):
        if not module.name.startswith(left_out):
            importlib.import_module(module.name)
    for name in ("mlflow", "sb3_contrib", "optuna", "pyarrow.parquet", "psycopg", "pydantic", "sklearn.datasets"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)


def run_many(root: Path, count: int, seed: int, *, runs: bool, part: int, parts: int) -> Iterator[apart.Result]:
    """Run command lines in an empty folder, every ``parts``-th of them."""
    preload()
    places = prepare(root, runs=runs)
    guard.leave_network()
    gc.collect()
    gc.freeze()
    for index, line in zip(range(count), command_lines(seed, places), strict=False):
        if index % parts == part:
            _empty(root / "work", root / "temporary")
            yield apart.run_apart(line, root, places.unreadable)


def _empty(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder)
        folder.mkdir()
        if os.getuid() == 0:
            os.chown(folder, guard.NOBODY, guard.NOBODY)


def main() -> int:
    """Run command lines as this process's arguments say, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scratch", type=Path, help="an empty folder, or one to be made")
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1, help="how many processes share the work")
    parser.add_argument("--part", type=int, default=0, help="which of them this one is")
    parser.add_argument("--runs", action="store_true", help="make real runs first, to be resumed and reported")
    given = parser.parse_args()
    given.scratch.mkdir(parents=True, exist_ok=True)
    # Output during the preparatory runs is not a result.
    results, wrong = os.fdopen(os.dup(1), "w"), 0
    os.dup2(2, 1)
    root = given.scratch.resolve()
    for result in run_many(root, given.count, given.seed, runs=given.runs, part=given.part, parts=given.parts):
        wrong += bool(result.wrong)
        print(json.dumps(asdict(result)), file=results, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
