"""Keep the files of one seed's training: how far it has come, what each rollout won, and its result.

A file that is damaged is named once and taken away: the seed then goes on from the save before it, or begins anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.agents.policy_folder import fill
from autotune.agents.policy_network import LeverNetwork
from autotune.agents.recipe import Recipe
from autotune.agents.saved_training import SavedTraining
from autotune.cost_model.cost_arrays import Floats, Indices
from autotune.errors import InputError, RunDirectoryError
from autotune.gym.levers import RUN_FEATURES
from autotune.io.files import parse_json, read_bytes, refuse_unknown_keys, write_atomic, write_json
from autotune.records.generations import Generations, remove

logger = logging.getLogger(__name__)

# Lanes that networks are judged in.
VALIDATION_LANES = 512
# A line of progress has some 80 bytes.
_RESULT_BYTES, _WEIGHTS_BYTES, _PROGRESS_BYTES, _LARGEST_BYTES = 2**20, 2**24, 2**24, 2**26
_ALLOWED = "what a training wrote"
_VERSION = 1
_RESULT_KEYS = frozenset(
    ("version", "recipe_sha256", "seed", "won_percent", "job", "lowest", "highest", "weights_sha256", "sha256")
)
# No count and no percentage comes near it.
_LARGEST = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedFiles:
    """Name the files of one seed's training.

    Attributes:
        folder: the run directory.
        seed: the seed.
    """

    folder: Path
    seed: int

    @property
    def checkpoint(self) -> Path:
        """Return where training is saved."""
        return self.folder / f"seed-{self.seed}.checkpoint"

    @property
    def checkpoint_before(self) -> Path:
        """Return where the save before it is kept."""
        return self.folder / f"seed-{self.seed}.checkpoint.1"

    @property
    def progress(self) -> Path:
        """Return where each rollout leaves a line."""
        return self.folder / f"seed-{self.seed}.jsonl"

    @property
    def result(self) -> Path:
        """Return what says that the seed is done."""
        return self.folder / f"seed-{self.seed}.json"

    @property
    def weights(self) -> Path:
        """Return the trained network."""
        return self.folder / f"seed-{self.seed}.safetensors"

    @property
    def all(self) -> tuple[Path, ...]:
        """Return every file, in the order in which copies are made: each rests on none that comes after it."""
        return self.weights, self.progress, self.checkpoint_before, self.checkpoint, self.result

    def contents(self) -> dict[str, bytes]:
        """Return what the files hold, by name; what is missing, a link or no file is left out."""
        found = {}
        for path in self.all:
            with contextlib.suppress(InputError):
                found[path.name] = read_bytes(path, limit_bytes=_LARGEST_BYTES, follow=False)
        return found

    def generations(self) -> Generations:
        """Return what writes and reads the saves."""
        return Generations(self.checkpoint, self.checkpoint_before)

    def rows(self) -> list[dict[str, Any]]:
        """Return what each rollout left; lines that are torn or damaged are left out."""
        try:
            content = read_bytes(self.progress, limit_bytes=_PROGRESS_BYTES, follow=False)
        except InputError:
            return []
        return [row for line in content.split(b"\n") if (row := _row(line)) is not None]

    def keep_rows(self) -> None:
        """Take out of the progress what is damaged.

        Rollouts that were told and not saved are made once more, and come to the same: what they left stays.

        Raises:
            RunDirectoryError: if what stands in the file's place cannot be taken away.
        """
        if not self.progress.exists() and not self.progress.is_symlink():
            return
        try:
            content = read_bytes(self.progress, limit_bytes=_PROGRESS_BYTES, follow=False)
        except InputError as error:
            logger.warning("%s: %s; what it told of rollouts is lost", self.progress, error.problem)
            remove(self.progress)
            return
        # Behind the last line's end stands nothing, or what a kill tore.
        *lines, torn = content.split(b"\n")
        rows = [(line, _row(line)) for line in lines]
        kept = [line for line, row in rows if row is not None]
        damaged = sum(row is None for _, row in rows)
        if damaged:
            logger.warning("%s: %d damaged lines are left out", self.progress, damaged)
        if torn or len(kept) < len(lines):
            write_atomic(self.progress, b"".join(line + b"\n" for line in kept))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeedResult:
    """Result of a seed's training.

    Attributes:
        won: shape (lanes,), what the network won over the planner on jobs to judge by, in percent.
        job: shape (lanes,), each lane's job.
        lowest: shape (features of a run,), the least that was seen of each.
        highest: the most, likewise.
        weights: the network as safetensors.
    """

    won: Floats
    job: Indices
    lowest: Floats
    highest: Floats
    weights: bytes

    def network(self, width: int) -> LeverNetwork:
        """Return the trained network."""
        made = LeverNetwork(width)
        fill(made, self.weights, "weights")
        return made


def write_result(files: SeedFiles, recipe: Recipe, result: SeedResult) -> None:
    """Write what a seed's training came to; the result comes last, and says that the seed is done."""
    write_atomic(files.weights, result.weights)
    document = {
        "version": _VERSION,
        "recipe_sha256": recipe.sha256,
        "seed": files.seed,
        "won_percent": result.won.tolist(),
        "job": result.job.tolist(),
        "lowest": result.lowest.tolist(),
        "highest": result.highest.tolist(),
        "weights_sha256": hashlib.sha256(result.weights).hexdigest(),
    }
    write_json(files.result, document | {"sha256": _digest(document)})


def read_result(files: SeedFiles, recipe: Recipe) -> SeedResult:
    """Read what a seed's training by a recipe came to.

    Raises:
        InputError: if a file is missing, damaged, or of another recipe or seed.
    """
    where = str(files.result)
    content = read_bytes(files.result, limit_bytes=_RESULT_BYTES, follow=False)
    document = parse_json(content.decode(errors="replace"), where=where)
    refuse_unknown_keys(document, _RESULT_KEYS, where=where)
    result = SeedResult(
        won=_numbers(document, "won_percent", VALIDATION_LANES, where),
        job=_numbers(document, "job", VALIDATION_LANES, where).astype(np.int64),
        lowest=_numbers(document, "lowest", len(RUN_FEATURES), where),
        highest=_numbers(document, "highest", len(RUN_FEATURES), where),
        weights=read_bytes(files.weights, limit_bytes=_WEIGHTS_BYTES, follow=False),
    )
    named = {key: document.get(key) for key in ("version", "recipe_sha256", "seed", "weights_sha256", "sha256")}
    _require(all(type(value) in (str, int) for value in named.values()), "says not what it is of", where)
    _require(named["sha256"] == _digest(document), "its SHA-256 is not the one it names", where)
    ours = {"version": _VERSION, "recipe_sha256": recipe.sha256, "seed": files.seed}
    _require(named.items() >= ours.items(), "is of another training", where)
    _require(bool(((result.job >= 0) & (result.job < recipe.jobs.validation)).all()), "names jobs that are none", where)
    digest = hashlib.sha256(result.weights).hexdigest()
    _require(named["weights_sha256"] == digest, "is not what the result names", str(files.weights))
    fill(LeverNetwork(recipe.ppo.width), result.weights, str(files.weights))
    return result


def finished(files: SeedFiles, recipe: Recipe) -> SeedResult | None:
    """Return what a seed's training came to, or ``None`` where it has not ended; a damaged result is taken away.

    Raises:
        RunDirectoryError: if it cannot be.
    """
    if not files.result.exists() and not files.result.is_symlink():
        return None
    try:
        return read_result(files, recipe)
    except InputError as error:
        logger.warning("%s: %s; seed %d is trained again", error.where, error.problem, files.seed)
        remove(files.result)
        return None


def taken_up(files: SeedFiles, recipe: Recipe, generations: Generations | None = None) -> SavedTraining | None:
    """Return how far a seed's training has come, or ``None`` where it begins; damaged saves are taken away.

    Args:
        files: the seed's.
        recipe: what it is trained by.
        generations: the seed's saves, where the training is saved on.

    Raises:
        RunDirectoryError: if a damaged file cannot be taken away.
    """
    rollout = recipe.ppo.lanes * recipe.jobs.windows
    read = functools.partial(
        SavedTraining.from_bytes, identity=identity(files, recipe), recipe=recipe.ppo, rollout=rollout
    )
    saves = generations or files.generations()
    saved = saves.read(read, begins_anew=f"seed {files.seed} begins anew")
    files.keep_rows()
    return saved


def own_folder(path: Path) -> Path:
    """Return a folder in a run's, made if it is missing; a link would lead out of the run.

    Raises:
        RunDirectoryError: if something else stands in its place.
    """
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot be made ({error.strerror})", where=str(path), allowed="a folder") from error
    if path.is_symlink():
        raise RunDirectoryError("is a link", where=str(path), allowed="a folder of the run")
    return path


def identity(files: SeedFiles, recipe: Recipe) -> str:
    """Return which training a save is of."""
    return f"recipe {recipe.sha256} seed {files.seed}"


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line.decode(), where="")
    except ValueError:
        return None
    decisions = row.get("decisions")
    counted = type(decisions) is int and 0 <= decisions < _LARGEST
    return row if counted and _is_number(row.get("won_percent")) else None


def _numbers(document: Mapping[str, Any], key: str, count: int, where: str) -> Floats:
    values = document.get(key)
    whole = isinstance(values, list) and len(values) == count and all(_is_number(value) for value in values)
    _require(whole, f"{key} is not {count} numbers", where)
    return np.array(values, dtype=np.float64)


def _is_number(value: object) -> bool:
    """Tell whether a value of JSON, where all are finite, is one that can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _require(holds: bool, problem: str, where: str) -> None:
    if not holds:
        raise InputError(problem, where=where, allowed=_ALLOWED)


def _digest(document: Mapping[str, Any]) -> str:
    """Return a SHA-256 of all that a result says but for its own."""
    said = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
