"""Options, progress bars and output streams that the commands share.

With ``--json``, only one document is written to stdout. Bars are drawn only on a terminal.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from autotune.cli import completion
from autotune.cli.arguments import input_path
from autotune.errors import InputError, printable
from autotune.io.documents import LARGEST_SEED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from autotune.engines.ray_cluster import ClusterOptions
    from autotune.engines.registry import EngineEntry, RankOptions

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, all other output on stderr.")
]
RunsOption = Annotated[Path, typer.Option("--runs-dir", help="Folder in which run directories are made.")]
LeanOption = Annotated[
    bool, typer.Option("--lean/--full", help="Profile in a tenth of the steps, or measure each plan several times.")
]
# Larger values are mistakes that would otherwise be noticed only after hours or when memory runs out.
MOST_STEPS = 1_000_000
LONGEST_S = 86_400
MOST_WATTS = 1_000_000

FixedCostOption = Annotated[
    float | None,
    typer.Option("--fixed-cost", min=0.0, max=1e9, help="Fixed cost of an update, in samples that cost as much."),
]
TotalCostOption = Annotated[
    float | None,
    typer.Option(
        "--cost",
        min=1.0,
        max=1e15,
        help="Cost of a whole run in samples, updates' fixed costs included; that of the job's max_steps if left out.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Random seed for the search and the tuning engine.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--memory-budget", help="Memory limit: a size (20GiB, 900MiB) or a share of the FP32 baseline's peak (75%)."
    ),
]
StepsOption = Annotated[
    int, typer.Option("--steps", max=MOST_STEPS, help="Real optimizer steps that each search may spend.")
]
StorageOption = Annotated[
    str | None,
    typer.Option("--storage", help="A database for Optuna's studies: postgresql://user@host:port/database."),
]
TolerantOption = Annotated[
    bool, typer.Option("--tolerant", help="Also recommend knobs that round differently, not only bit-identical ones.")
]
ReportToOption = Annotated[
    str | None,
    typer.Option(
        "--report-to",
        help="Experiment tracker: mlflow (default), tensorboard, wandb or none; also by AUTOTUNE_REPORT_TO.",
        autocompletion=completion.trackers,
    ),
]
TrialsOption = Annotated[
    int | None, typer.Option("--trials", max=100_000, help="Number of plans that each search may measure.")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="Spread the work over Ray workers: local:N, auto, or ray://HOST:PORT.")
]
WorkerCoresOption = Annotated[
    int,
    typer.Option("--worker-cores", min=1, max=1024, help="With --cluster: cores that each worker is pinned to."),
]
WattsOption = Annotated[
    float | None,
    typer.Option(
        "--watts", max=MOST_WATTS, help="Power of the device in watts, to estimate energy where it cannot be measured."
    ),
]
GradientNormOption = Annotated[
    float | None,
    typer.Option(
        "--gradient-norm",
        help="Largest norm of the gradient, before clipping, that a plan or the end of a run may have.",
    ),
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", help="Number of paired fresh seeds; fewer than 6 give only an indication.")
]
JobArgument = Annotated[
    str,
    typer.Argument(
        help="Job: a catalog name, package.module:attribute, or file.py:attribute.", autocompletion=completion.jobs
    ),
]
RUNS = Path("runs")

EngineOption = Annotated[
    str, typer.Option("--engine", help="Training engine: torch; for several ranks, deepspeed, fsdp2 or pipeline.")
]
DEFAULT_RANKS = 2
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        min=1,
        max=256,
        help="With deepspeed, fsdp2 or pipeline: number of ranks on this machine (default 2).",
    ),
]
ZeroStageOption = Annotated[str, typer.Option("--zero-stage", help="With deepspeed: ZeRO stage 0, 1, 2 or 3.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--ds-config", callback=input_path, help="With deepspeed: your own configuration (JSON file)."),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="With fsdp2: replicas, shards and ranks that share layers, such as dp=2,shard=2 or tp=2 (default: "
        "shards). With pipeline: its stages, such as pipe=2,schedule=gpipe,units=3/5 (default: pipe and the ranks).",
    ),
]


def console(*, as_json: bool) -> Console:
    """Return the console for readable output: stdout, or stderr if stdout is reserved for JSON."""
    from autotune.cli.plain_console import PlainConsole

    return PlainConsole(sys.stderr if as_json else sys.stdout)


def table(**settings: Any) -> Table:
    """Return an empty Rich table, importing Rich only when needed because it is slow to import."""
    from rich.table import Table

    return Table(**settings)


def cluster(address: str | None, cores: int) -> ClusterOptions | None:
    """Return the options of the cluster; ``None`` if no address is given."""
    if address is None:
        return None
    from autotune.engines.ray_cluster import ClusterOptions

    return ClusterOptions(address=address, cores=cores)


_document_stream: TextIO | None = None


def keep_stdout_for_json() -> None:
    """Redirect all further output except the JSON document to stderr, including the output of C libraries."""
    global _document_stream
    sys.stdout.flush()
    _document_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)


def open_closed_streams() -> None:
    """Open closed standard streams on the null device; otherwise the next opened file would take their descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def let_go_of_stdout() -> None:
    """Discard all further and buffered output to stdout, because its reader has exited."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in _document_streams():
        os.dup2(null, stream.fileno())
    os.close(null)


def stdout_has_no_reader() -> bool:
    """Return whether the process reading stdout has exited, as in ``autotune ... | head``."""
    poller = select.poll()
    for stream in _document_streams():
        poller.register(stream.fileno(), 0)
    return bool(poller.poll(0))


def _document_streams() -> list[TextIO]:
    return [stream for stream in (sys.stdout, _document_stream) if stream is not None]


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=2, allow_nan=False), file=_document_stream or sys.stdout, flush=True)


class Bars:
    """Progress bars, one per stage, with the remaining time; without a terminal, one line per stage."""

    def __init__(self, output: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._output = output
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=output,
            refresh_per_second=2,
            disable=not output.is_terminal,
        )
        self._task: TaskID | None = None
        self._total = 0.0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()
        self._progress.stop()

    def stage(self, title: str, total: float) -> None:
        """Begin a stage."""
        self._finish()
        if not self._output.is_terminal:
            self._output.print(f"{title} ...")
        self._task = self._progress.add_task(printable(title), total=total, detail="")
        self._total = total

    def advance(self, done: float, detail: str = "") -> None:
        """Show how much of the stage is done."""
        if self._task is not None:
            self._progress.update(self._task, completed=min(done, self._total), detail=printable(detail))

    def _finish(self) -> None:
        """Fill the bar, because a stage may end early."""
        if self._task is not None:
            self._progress.update(self._task, completed=self._total, detail="")
            self._task = None


def ranks(
    engine: str, count: int | None, zero_stage: str, config: Path | None, mesh: str | None = None
) -> RankOptions | None:
    """Return the options of an engine that runs in processes of its own; ``None`` for the default engine.

    Args:
        engine: value of ``--engine``.
        count: value of ``--ranks``; ``None`` for the default.
        zero_stage: value of ``--zero-stage``; ``all`` becomes stage 0.
        config: value of ``--ds-config``.
        mesh: value of ``--mesh``; ``all`` becomes the mesh of replicas alone.

    Raises:
        InputError: if an option is invalid, or cannot be combined with the engine.
    """
    from autotune.engines.registry import DEFAULT_ENGINE, ENGINES, RankOptions
    from autotune.io.files import read_json
    from autotune.mesh import Mesh

    if engine not in ENGINES:
        raise InputError(f"engine is {engine!r}", where="--engine", allowed=list(ENGINES))
    own = {"--zero-stage": "zero_stage", "--ds-config": "config", "--mesh": "mesh"}
    values = (None if zero_stage == "0" else zero_stage, config, mesh)
    given = [name for name, value in zip(own, values, strict=True) if value is not None]

    def foreign(entry: EngineEntry) -> list[str]:
        several = ["--ranks"] if count is not None and not entry.has_ranks else []
        return several + [name for name in given if own[name] not in entry.options]

    if barred := foreign(ENGINES[engine]):
        others = [f"--engine {name}" for name, entry in ENGINES.items() if not foreign(entry)]
        raise InputError(f"--engine {engine} cannot be combined with {', '.join(barred)}", allowed=others)
    if engine == DEFAULT_ENGINE:
        return None
    if zero_stage not in ("0", "1", "2", "3", "all"):
        raise InputError(f"ZeRO stage is {zero_stage!r}", where="--zero-stage", allowed="0, 1, 2, 3, all")
    usual = DEFAULT_RANKS if ENGINES[engine].has_ranks else 1
    size = usual if count is None else count
    return RankOptions(
        count=size,
        zero_stage=0 if zero_stage == "all" else int(zero_stage),
        config=None if config is None else read_json(config),
        mesh=(None if engine == "pipeline" else str(Mesh.all_of(size)[0])) if mesh == "all" else mesh,
        engine=engine,
    )
