"""``autotune elastic``: train a job on as many ranks as there are; ``torchrun`` starts it."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import output_folder
from autotune.cli.console import JobArgument, JsonOption, SeedOption
from autotune.errors import InputError


def command(
    job: JobArgument,
    folder: Annotated[
        Path,
        typer.Option(
            "--folder", callback=output_folder, help="Folder of the run, which all ranks see; a run in it is continued."
        ),
    ] = Path("elastic"),
    memory_budget: Annotated[
        str, typer.Option("--memory-budget", help="Memory budget of each rank, as in 20GiB; none by default.")
    ] = "",
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh", help="shard: the model is divided between all ranks; dp: each has a whole one; all: the faster."
        ),
    ] = "shard",
    save_every: Annotated[
        int, typer.Option("--save-every", min=1, max=1_000_000, help="Optimizer steps between snapshots.")
    ] = 100,
    patience: Annotated[
        float, typer.Option("--patience", min=1, max=86_400, help="Seconds that a rank waits for the others.")
    ] = 600.0,
    tolerant: Annotated[
        bool, typer.Option("--tolerant", help="Let plans compute in 16 bits; otherwise the job's own precision stays.")
    ] = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a job on ranks whose number may change, through FSDP2, with a plan chosen for each number of ranks.

    Start it by torchrun. If a rank is lost or joins, torchrun starts all ranks again, and they continue from the last
    snapshot: same global batches, another k, storage and layout, by a profile of that number of ranks.
    """
    # A rank that waits for a lost one runs no handler in Python.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from autotune.campaign.elastic_run import ElasticOptions, train_elastically
    from autotune.catalog import load_job

    options = ElasticOptions(
        budget_bytes=_bytes_of(memory_budget),
        mesh=mesh,
        save_every=save_every,
        tolerant=tolerant,
        seed=seed,
        patience_s=patience,
    )
    is_first = os.environ.get("RANK", "0") == "0"
    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars, _stopping_launcher():
        found = train_elastically(load_job(job), folder, options, bars if is_first else None)
    if not is_first:
        return
    if as_json:
        shared.print_json(found)
        return
    output.print(
        f"{found['steps']} steps, {found['samples']} samples, metric {found['metric']:.4g}; {found['ranks']} ranks at "
        f"the end ({found['mesh']}). Starts and snapshots: {folder / 'elastic.jsonl'}",
        soft_wrap=True,
    )


@contextmanager
def _stopping_launcher() -> Iterator[None]:
    """Stop the ``torchrun`` that has started this rank if the body fails for a reason that no new start removes."""
    try:
        yield
    except InputError:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # After the error was shown: torchrun ends its ranks when it is terminated.
            atexit.register(os.kill, os.getppid(), signal.SIGTERM)
        raise


def _bytes_of(text: str) -> int | None:
    """Return a budget in bytes; ``None`` for none.

    Raises:
        BudgetError: if it is not a size: a share of the baseline's peak would change with the ranks.
    """
    from autotune.budget import MemoryBudget
    from autotune.errors import BudgetError

    if not text:
        return None
    budget = MemoryBudget.parse(text)
    if budget.size_bytes is None or budget.reserved:
        raise BudgetError(f"memory budget is {text!r}", where="--memory-budget", allowed="a size, such as 20GiB")
    return budget.size_bytes
