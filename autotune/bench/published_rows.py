"""Published measurements of training runs, read from CSV files into what the cost model predicts.

Three kinds of file are known by their columns, whatever they are called: FSDP tables of llm-foundry, pipeline trials of
BigScience, and runs of torchtitan. A row that lacks a needed value or makes no sense is skipped with one line that says
why; a file that is no table is refused.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.bench.published_cells import Cells, shown
from autotune.bench.published_models import gpt_of, named_model
from autotune.cost_model.cluster.layout import Checkpointing, Layout
from autotune.cost_model.cluster.machines import Machine, find_machine
from autotune.cost_model.cluster.search import divisors
from autotune.cost_model.cluster.transformer import Transformer
from autotune.errors import InputError
from autotune.io.files import read_text

_FOLDER = Path(__file__).parent / "published"
_GB, _GIB = 10**9, 2**30
_LIMIT_BYTES = 16 * 2**20
# Seconds that a step may take.
_SECONDS = (1e-6, 1e7)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published run: what was run, and what was measured.

    Attributes:
        source: name of the file without its suffix.
        kind: the kind of table: ``llm_foundry``, ``bigscience`` or ``torchtitan``.
        line: line of the file.
        model_name: name of the model, as published.
        device: name of the device, as published.
        model: the transformer.
        layout: how it was trained.
        machine: the device and its links.
        seconds: seconds of an optimizer step.
        peak_bytes: measured peak of the fullest rank; ``None`` if it was not published.
        peak_is_reserved: whether the peak is the allocator's, without the driver's context.
    """

    source: str
    kind: str
    line: int
    model_name: str
    device: str
    model: Transformer
    layout: Layout
    machine: Machine
    seconds: float
    peak_bytes: float | None
    peak_is_reserved: bool

    @property
    def tokens_per_s_per_device(self) -> float:
        """Return the measured throughput."""
        return self.layout.tokens_per_step / self.seconds / self.layout.devices


@dataclass(frozen=True, slots=True)
class Published:
    """The rows that could be read, and one line for each that could not."""

    rows: tuple[PublishedRow, ...]
    skipped: tuple[str, ...]


def read_published(folder: Path | None = None) -> Published:
    """Return the published runs of a folder's CSV files.

    Args:
        folder: the folder; the package's own runs if left out.

    Raises:
        InputError: if the folder has no CSV file, or none of its rows can be used.
    """
    where = folder or _FOLDER
    files = sorted(where.glob("*.csv")) if where.is_dir() else []
    if not files:
        raise InputError("no CSV files", where=str(where), allowed="a folder with CSV files of published runs")
    rows: list[PublishedRow] = []
    skipped: list[str] = []
    for path in files:
        _read_file(path, rows, skipped)
    if not rows:
        raise InputError(f"no usable row; {skipped[0] if skipped else 'all files are empty'}", where=str(where))
    return Published(tuple(rows), tuple(skipped))


def _read_file(path: Path, rows: list[PublishedRow], skipped: list[str]) -> None:
    """Add a file's rows, and lines about those that cannot be used."""
    reader = csv.DictReader(io.StringIO(read_text(path, limit_bytes=_LIMIT_BYTES).removeprefix("\ufeff")))
    try:
        kind = _kind_of(reader.fieldnames or ())
        if kind is None:
            skipped.append(f"{path.name}: columns of no known kind of table (allowed: those of {', '.join(_KINDS)})")
            return
        for cells in reader:
            try:
                found = _row_of(cells, kind)
            except InputError as error:
                skipped.append(f"{path.name}, line {reader.line_num}: {error}")
                continue
            if found is not None:
                rows.append(replace(found, source=path.stem, line=reader.line_num))
    except csv.Error as error:
        where = f"{path.name}, after line {reader.line_num}"
        raise InputError(f"is damaged ({error})", where=where, allowed="a table of comma-separated values") from error


def _row_of(cells: Mapping[Any, Any], kind: str) -> PublishedRow | None:
    """Return what a line of a table says; ``None`` if it is empty."""
    if None in cells:
        raise InputError("has more cells than columns", allowed="one cell for each column")
    found = {key.strip(): (value or "").strip() for key, value in cells.items()}
    return replace(_KINDS[kind][1](Cells(found)), kind=kind) if any(found.values()) else None


_Reader = Callable[[Cells], PublishedRow]


def _kind_of(columns: Iterable[str]) -> str | None:
    """Return the kind of a table with these columns."""
    names = {name.strip() for name in columns if name}
    return next((kind for kind, (needed, _) in _KINDS.items() if needed <= names), None)


# Nodes of the Jean Zay cluster have four links of 100 Gbit/s. Source: bigscience, train/tr11-176B-ml/README.md.
_BLOOM_NODE_LINK = 4 * 100e9 / 8
_GBITS = re.compile(r"([\d,]+)\s*Gb(?:ps|it/s)", re.IGNORECASE)


def _row(cells: Cells, model: Transformer, layout: Layout, **measured: Any) -> PublishedRow:
    _require_sense(cells, model, layout)
    seconds, machine = measured["seconds"], measured["machine"]
    if layout.float8 and not machine.float8:
        raise InputError(f"products are of 8 bits, which {machine.name} does not have", allowed="16 bits")
    if not _SECONDS[0] <= seconds <= _SECONDS[1]:
        raise InputError(f"a step took {seconds:.3g} s", allowed=f"{_SECONDS[0]:g} to {_SECONDS[1]:g} s")
    return PublishedRow(source="", kind="", line=0, device=cells.text("gpu"), model=model, layout=layout, **measured)


def _require_sense(cells: Cells, model: Transformer, layout: Layout) -> None:
    """Refuse a row whose model does not divide as the row says, or whose numbers contradict each other."""
    devices, batch = cells.count("gpus"), cells.count("global_batch", layout.global_batch)
    shared = layout.tp if model.kv_heads >= layout.tp else model.kv_heads
    if layout.devices != devices:
        raise InputError(f"gpus is {devices}", allowed=f"{layout.devices}, as its mesh has")
    if batch != layout.global_batch:
        raise InputError(f"global_batch is {batch}", allowed=f"{layout.global_batch}, as its other numbers give")
    if model.heads % layout.tp or model.kv_heads % shared or layout.tp % shared:
        heads = f"{model.heads} heads and {model.kv_heads} of keys and values"
        raise InputError(f"tp is {layout.tp}", allowed=f"a divisor of {heads}")
    if model.layers < layout.pp * layout.virtual_stages:
        raise InputError(f"pp is {layout.pp}", allowed=f"at most {model.layers} layers in virtual stages")
    if layout.sequence % layout.cp:
        raise InputError(f"cp is {layout.cp}", allowed=f"a divisor of sequences of {layout.sequence} tokens")


def _machine(cells: Cells) -> Machine:
    """Return the row's machine; a section's title may say how nodes are linked."""
    name = cells.text("gpu")
    try:
        found = find_machine(name)
    except InputError as error:
        raise InputError(f"gpu is {shown(name)}", allowed=error.allowed) from error
    linked = _GBITS.search(cells.text("section", "-"))
    rate = 0.0 if linked is None else float(linked[1].replace(",", "") or "0") * 1e9 / 8
    return replace(found, node_link=rate) if rate > 0 else found


# Sharding of FSDP: the ZeRO stage, and whether states are sharded inside nodes alone.
_SHARDING: Mapping[str, tuple[int, bool]] = {
    "full_shard": (3, False),
    "shard_grad_op": (2, False),
    "no_shard": (0, False),
    "hybrid_shard": (3, True),
    "_hybrid_shard_zero2": (2, True),
}
# Bytes of a gradient in reductions, and whether products are of 8 bits.
_REDUCED: Mapping[str, int] = {"pure": 2, "default": 4}
_PRECISIONS: Mapping[str, bool] = {"bf16": False, "amp_bf16": False, "fp16": False, "amp_fp16": False, "amp_fp8": True}


def _llm_foundry(cells: Cells) -> PublishedRow:
    sequence, devices = cells.count("seq_len"), cells.count("gpus")
    name, model = named_model(cells, sequence)
    stage, hybrid = cells.word("sharding", _SHARDING, default="full_shard")
    shard = min(devices, 8) if hybrid else devices
    layout = Layout(
        shard=shard,
        replicas=devices // shard,
        micro_batch=cells.count("micro_batch"),
        micro_batches=cells.count("grad_accum", 1),
        sequence=sequence,
        checkpointing="full" if cells.flag("activation_checkpointing") else "none",
        zero_stage=stage,
        float8=cells.word("precision", _PRECISIONS, default="bf16"),
        offload=cells.flag("activation_cpu_offload"),
        fused_loss=True,
        reduce_bytes=cells.word("mp_mode", _REDUCED, default="pure"),
    )
    seconds = layout.tokens_per_step / devices / cells.number("tokens_per_s_per_gpu")
    return _row(
        cells, model, layout, machine=_machine(cells), model_name=name, seconds=seconds, peak_bytes=None,
        peak_is_reserved=True,
    )  # fmt: skip


_STAGES: Mapping[str, int] = {str(stage): stage for stage in range(4)}


def _bigscience(cells: Cells) -> PublishedRow:
    name, model = gpt_of(cells)
    dp, micro_batch = cells.count("dp"), cells.count("micro_batch")
    layout = Layout(
        shard=dp,
        tp=cells.count("tp"),
        pp=cells.count("pp"),
        micro_batch=micro_batch,
        micro_batches=max(1, cells.count("global_batch") // (dp * micro_batch)),
        sequence=cells.count("seq_len"),
        checkpointing="full",
        zero_stage=cells.word("zero_stage", _STAGES, default="1"),
        fused_attention=False,
        sequence_parallel=False,
        fp32_weights=False,
        reduce_bytes=2,
    )
    machine = replace(_machine(cells), node_link=_BLOOM_NODE_LINK)
    return _row(
        cells, model, layout, machine=machine, model_name=name, seconds=cells.number("seconds_per_step"),
        peak_bytes=cells.optional("peak_memory_gb", _GB), peak_is_reserved=False,
    )  # fmt: skip


_CHECKPOINTING: Mapping[str, Checkpointing] = {
    **dict.fromkeys(("none", "false", "0", "no"), "none"),
    **dict.fromkeys(("selective", "op"), "selective"),
    **dict.fromkeys(("full", "true", "1", "yes"), "full"),
}
# Chunks of a stage: interleaved schedules have two unless told otherwise.
_SCHEDULES: Mapping[str, int] = {"": 1, "1f1b": 1, "gpipe": 1, "interleaved1f1b": 2, "interleaved 1f1b": 2}


def _torchtitan(cells: Cells) -> PublishedRow:
    sequence = cells.count("seq_len")
    name, model = named_model(cells, sequence)
    tp, pp, cp = (cells.count(key, 1) for key in ("tp", "pp", "cp"))
    shard, local = cells.count("dp_shard", 1), cells.count("local_batch")
    virtual = cells.count("virtual_stages", cells.word("schedule", _SCHEDULES, default=""))
    # torchtitan splits a local batch into as many micro-batches as there are stages, unless told otherwise.
    parts = max(one for one in divisors(local) if one <= pp * virtual) if pp > 1 else 1
    replicas = max(1, cells.count("gpus") // (shard * tp * pp * cp))
    rounds = max(1, cells.count("global_batch", 1) // (local * shard * replicas))
    layout = Layout(
        replicas=replicas,
        shard=shard,
        tp=tp,
        pp=pp,
        cp=cp,
        micro_batch=local // parts,
        micro_batches=parts * rounds,
        sequence=sequence,
        checkpointing=cells.word("activation_checkpointing", _CHECKPOINTING, default="none"),
        compiled=cells.flag("compile"),
        float8=cells.flag("float8"),
        async_tp=cells.flag("async_tp"),
        virtual_stages=virtual,
    )
    seconds = layout.tokens_per_step / layout.devices / cells.number("tokens_per_s_per_gpu")
    return _row(
        cells, model, layout, machine=_machine(cells), model_name=name, seconds=seconds,
        peak_bytes=cells.optional("peak_memory_gib", _GIB), peak_is_reserved=True,
    )  # fmt: skip


_KINDS: Mapping[str, tuple[frozenset[str], _Reader]] = {
    "bigscience": (frozenset({"seconds_per_step", "hidden", "pp", "tp", "dp"}), _bigscience),
    "torchtitan": (frozenset({"local_batch", "tokens_per_s_per_gpu", "model"}), _torchtitan),
    "llm_foundry": (frozenset({"micro_batch", "tokens_per_s_per_gpu", "model"}), _llm_foundry),
}
