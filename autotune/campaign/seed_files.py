"""Files of one seed's training: its checkpoints, its progress per rollout, and its result.

A damaged file is reported once and removed: the seed then continues from the previous checkpoint, or starts again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval, Len

from autotune.agents.policy_folder import fill
from autotune.agents.recipe import Recipe
from autotune.agents.saved_training import SavedTraining
from autotune.agents.shipped_network import LeverNetwork
from autotune.cost_model.cost_arrays import Floats, Indices
from autotune.errors import InputError, RunDirectoryError
from autotune.gym.levers import RUN_FEATURES
from autotune.io.documents import Count, Seed, document, validated
from autotune.io.files import parse_json, read_bytes, read_json, sealed, write_atomic, write_json
from autotune.records.generations import Generations, remove

logger = logging.getLogger(__name__)

# Number of lanes in which networks are evaluated.
VALIDATION_LANES = 512
# Size limits; a line of progress has about 80 bytes.
_RESULT_BYTES, _WEIGHTS_BYTES, _PROGRESS_BYTES, _LARGEST_BYTES = 2**20, 2**24, 2**24, 2**26
_VERSION = 1
# Counts and percentages are far below this limit.
_LARGEST = 2**53
_Number = Annotated[float, Interval(gt=-_LARGEST, lt=_LARGEST)]
_Lanes = Len(VALIDATION_LANES, VALIDATION_LANES)
_Features = Annotated[list[_Number], Len(len(RUN_FEATURES), len(RUN_FEATURES))]


@document
class _ResultDocument:
    """Document of a seed's result."""

    recipe_sha256: str
    seed: Seed
    won_percent: Annotated[list[_Number], _Lanes]
    job: Annotated[list[Count], _Lanes]
    lowest: _Features
    highest: _Features
    weights_sha256: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedFiles:
    """Paths of the files of one seed's training.

    Attributes:
        folder: the run directory.
        seed: the seed.
    """

    folder: Path
    seed: int

    @property
    def checkpoint(self) -> Path:
        """Return the path of the newest checkpoint."""
        return self.folder / f"seed-{self.seed}.checkpoint"

    @property
    def checkpoint_before(self) -> Path:
        """Return the path of the previous checkpoint."""
        return self.folder / f"seed-{self.seed}.checkpoint.1"

    @property
    def progress(self) -> Path:
        """Return the path of the progress, which has one line per rollout."""
        return self.folder / f"seed-{self.seed}.jsonl"

    @property
    def result(self) -> Path:
        """Return the path of the result, which exists once the seed is finished."""
        return self.folder / f"seed-{self.seed}.json"

    @property
    def weights(self) -> Path:
        """Return the path of the trained network."""
        return self.folder / f"seed-{self.seed}.safetensors"

    @property
    def all(self) -> tuple[Path, ...]:
        """Return all paths in the order of copying: no file depends on a later one."""
        return self.weights, self.progress, self.checkpoint_before, self.checkpoint, self.result

    def contents(self) -> dict[str, bytes]:
        """Return the contents of the files by name, without missing files, links and special files."""
        found = {}
        for path in self.all:
            with contextlib.suppress(InputError):
                found[path.name] = read_bytes(path, limit_bytes=_LARGEST_BYTES, follow=False)
        return found

    def generations(self) -> Generations:
        """Return the reader and writer of the checkpoints."""
        return Generations(self.checkpoint, self.checkpoint_before)

    def rows(self) -> list[dict[str, Any]]:
        """Return the progress of each rollout; incomplete and damaged lines are skipped."""
        try:
            content = read_bytes(self.progress, limit_bytes=_PROGRESS_BYTES, follow=False)
        except InputError:
            return []
        return [row for line in content.split(b"\n") if (row := _row(line)) is not None]

    def keep_rows(self) -> None:
        """Remove damaged lines from the progress.

        Lines after the last checkpoint are kept: their rollouts are repeated with the same outcome.

        Raises:
            RunDirectoryError: if the progress cannot be read and cannot be removed.
        """
        if not self.progress.exists() and not self.progress.is_symlink():
            return
        try:
            content = read_bytes(self.progress, limit_bytes=_PROGRESS_BYTES, follow=False)
        except InputError as error:
            logger.warning("%s: %s; the progress of earlier rollouts is lost", self.progress, error.problem)
            remove(self.progress)
            return
        # The last part is empty, or an incomplete line of a killed process.
        *lines, incomplete = content.split(b"\n")
        rows = [(line, _row(line)) for line in lines]
        kept = [line for line, row in rows if row is not None]
        damaged = sum(row is None for _, row in rows)
        if damaged:
            logger.warning("%s: %d damaged lines are skipped", self.progress, damaged)
        if incomplete or len(kept) < len(lines):
            write_atomic(self.progress, b"".join(line + b"\n" for line in kept))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeedResult:
    """Result of a seed's training.

    Attributes:
        won: shape (lanes,), time that the network saved against the planner on validation jobs, in percent.
        job: shape (lanes,), index of each lane's job.
        lowest: shape (features of a run,), smallest value of each feature.
        highest: shape (features of a run,), largest value of each feature.
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
    """Write the result of a seed's training; the document comes last and marks the seed as finished."""
    write_atomic(files.weights, result.weights)
    result_document = {
        "version": _VERSION,
        "recipe_sha256": recipe.sha256,
        "seed": files.seed,
        "won_percent": result.won.tolist(),
        "job": result.job.tolist(),
        "lowest": result.lowest.tolist(),
        "highest": result.highest.tolist(),
        "weights_sha256": hashlib.sha256(result.weights).hexdigest(),
    }
    write_json(files.result, sealed(result_document, "sha256"))


def read_result(files: SeedFiles, recipe: Recipe) -> SeedResult:
    """Read the result of a seed's training.

    Raises:
        InputError: if a file is missing, damaged, or of another recipe or seed.
    """
    where = str(files.result)
    found = read_json(files.result, limit_bytes=_RESULT_BYTES, follow=False)
    read = validated(_ResultDocument, found, where=where, version=_VERSION)
    _require(found == sealed(found, "sha256"), "its SHA-256 is wrong", where)
    of_this = (read.recipe_sha256, read.seed) == (recipe.sha256, files.seed)
    _require(of_this, "belongs to another training", where)
    _require(max(read.job) < recipe.jobs.validation, "names jobs that do not exist", where)
    weights = read_bytes(files.weights, limit_bytes=_WEIGHTS_BYTES, follow=False)
    digest = hashlib.sha256(weights).hexdigest()
    _require(read.weights_sha256 == digest, "is not the file that the result names", str(files.weights))
    fill(LeverNetwork(recipe.ppo.width), weights, str(files.weights))
    return SeedResult(
        won=np.array(read.won_percent),
        job=np.array(read.job, dtype=np.int64),
        lowest=np.array(read.lowest),
        highest=np.array(read.highest),
        weights=weights,
    )


def finished(files: SeedFiles, recipe: Recipe) -> SeedResult | None:
    """Return the result of a seed's training; ``None`` if it has not finished. A damaged result is removed.

    Raises:
        RunDirectoryError: if a damaged result cannot be removed.
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
    """Return the state from which a seed continues training; ``None`` if it starts anew. Remove damaged checkpoints.

    Args:
        files: the seed's files.
        recipe: the training recipe.
        generations: the seed's checkpoints, if training continues to write them; ``None`` only reads them.

    Raises:
        RunDirectoryError: if a damaged file cannot be removed.
    """
    rollout = recipe.ppo.lanes * recipe.jobs.windows
    read = functools.partial(
        SavedTraining.from_bytes, identity=identity(files, recipe), recipe=recipe.ppo, rollout=rollout
    )
    saves = generations or files.generations()
    saved = saves.read(read, begins_anew=f"seed {files.seed} starts again")
    files.keep_rows()
    return saved


def own_folder(path: Path) -> Path:
    """Return a folder inside a run directory; make it if it is missing.

    Raises:
        RunDirectoryError: if it cannot be made, or is a link, which could lead out of the run directory.
    """
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot be made ({error.strerror})", where=str(path), allowed="a folder") from error
    if path.is_symlink():
        raise RunDirectoryError("is a link", where=str(path), allowed="a folder inside the run directory")
    return path


def identity(files: SeedFiles, recipe: Recipe) -> str:
    """Return the text in a checkpoint that identifies its training."""
    return f"recipe {recipe.sha256} seed {files.seed}"


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line.decode(), where="")
    except ValueError:
        return None
    decisions = row.get("decisions")
    counted = type(decisions) is int and 0 <= decisions < _LARGEST
    return row if counted and _is_number(row.get("won_percent")) else None


def _is_number(value: object) -> bool:
    """Return whether a JSON value is a number within the limits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _require(holds: bool, problem: str, where: str) -> None:
    if not holds:
        raise InputError(problem, where=where, allowed="the files of this training")
