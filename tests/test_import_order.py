"""Tests of the import order of folders; heavy packages are imported in one file each."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "autotune"
# Folders in import order: each may import those before it. The second is the root itself.
FLOORS = [
    "io",
    "",
    "cost_model",
    "simulator",
    "mechanics",
    "engines",
    "profiling",
    "gym",
    "agents",
    "live",
    "records",
    "report",
    "campaign",
    "paper",
    "commands",
    "bench",
    "cli",
]
# Root files that form the public API, not vocabulary; and errors, which everything raises.
FACES = {"__init__": "cli", "__main__": "cli", "errors": "io"}
HEAVY = {
    "stable_baselines3": {"agents/ppo.py"},
    "sb3_contrib": {"agents/ppo.py"},
    "optuna": {"agents/optuna_search.py"},
    "mlflow": {"records/to_mlflow.py"},
    "tensorboard": {"records/to_tensorboard.py"},
    "wandb": {"records/to_wandb.py"},
    "deepspeed": {"engines/deepspeed_library.py"},
    "ray": {"engines/ray_cluster.py"},
    "matplotlib": {"report/png_figures.py"},
    "jinja2": {"report/rendering.py"},
    "pyarrow": {"report/sheets.py"},
    "transformers": {"live/integrations/transformers.py"},
    "lightning": {"live/integrations/lightning.py"},
    "accelerate": set(),
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_envs" not in path.parts and "_policies" not in path.parts)


def floor_of(module: str) -> str:
    parts = module.split(".")[1:]
    if not parts:
        return FACES["__init__"]
    if len(parts) == 1 and not (PACKAGE / parts[0]).is_dir():
        return FACES.get(parts[0], "")
    return parts[0]


@functools.cache
def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (
                [f"{node.module}.{name.name}" for name in node.names] if node.module == "autotune" else [node.module]
            )
    return found


def module_name(path: Path) -> str:
    parts = ["autotune", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_import_only_from_their_own_and_lower_layers(path: Path) -> None:
    # ``from autotune import __version__`` reads a string and is not an import of a layer.
    own = FLOORS.index(floor_of(module_name(path)))
    below = [
        name
        for name in imports_of(path)
        if name.startswith("autotune.") and not name.endswith("__version__") and FLOORS.index(floor_of(name)) > own
    ]
    assert not below


@pytest.mark.parametrize("package", HEAVY)
def test_heavy_packages_are_imported_in_one_file_each(package: str) -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name.split(".")[0] == package for name in imports_of(path))
    }
    assert users == HEAVY[package]


def test_formulas_do_not_import_torch() -> None:
    vocabulary = [PACKAGE / f"{name}.py" for name in ("plan", "measurement", "budget", "errors")]
    topics = [path for name in ("io", "cost_model", "simulator") for path in (PACKAGE / name).glob("*.py")]
    for path in [*vocabulary, *topics]:
        assert not any(name.split(".")[0] == "torch" for name in imports_of(path)), path


HEAVY_AT_START = ("torch", "mlflow", "optuna", "stable_baselines3", "matplotlib", "numpy", "gymnasium", "pydantic")


@pytest.mark.parametrize(("module", "more"), [("autotune", ()), ("autotune.cli.main", ("rich.table", "rich.console"))])
def test_help_loads_no_heavy_package(module: str, more: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY_AT_START + more!r} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("order", ["autotune, gymnasium", "gymnasium, autotune"])
def test_gymnasium_knows_our_environments_in_either_import_order(order: str) -> None:
    code = f"import {order}; print(len([name for name in gymnasium.registry if name.startswith('autotune/')]) >= 3)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (answer.stdout.strip(), answer.stderr) == ("True", "")


@pytest.mark.slow
def test_gymnasium_makes_our_environments_without_an_import_of_our_own() -> None:
    code = "import gymnasium; print(gymnasium.make('autotune:autotune/digits-v0').spec.id)"
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "autotune/digits-v0"
