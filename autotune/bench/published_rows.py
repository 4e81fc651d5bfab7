"""Published measurements of training runs, read from CSV files into what the cost model predicts.

Three kinds of file are known by their columns, whatever they are called: FSDP tables of llm-foundry, pipeline trials of
BigScience, and runs of torchtitan. A row that lacks a needed value, or whose device or model is unknown, is skipped
with one line that says why.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.machines import Machine, find_machine
from autotune.cost_model.cluster.transformer import Transformer
from autotune.errors import InputError
from autotune.io.files import read_text

_FOLDER = Path(__file__).parent / "published"
_GB, _GIB = 10**9, 2**30
_LIMIT_BYTES = 16 * 2**20


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
    kind = _kind_of(reader.fieldnames or ())
    if kind is None:
        skipped.append(f"{path.name}: columns of no known kind of table")
        return
    for cells in reader:
        found = {key.strip(): (value or "").strip() for key, value in cells.items() if isinstance(key, str)}
        if not any(found.values()):
            continue
        try:
            row = _KINDS[kind][1](_Cells(found))
            rows.append(replace(row, source=path.stem, kind=kind, line=reader.line_num))
        except InputError as error:
            skipped.append(f"{path.name}, line {reader.line_num}: {error}")


_Reader = Callable[["_Cells"], PublishedRow]


def _kind_of(columns: Iterable[str]) -> str | None:
    """Return the kind of a table with these columns."""
    names = {name.strip() for name in columns if name}
    return next((kind for kind, (needed, _) in _KINDS.items() if needed <= names), None)


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of one row, by column."""

    values: Mapping[str, str]

    def text(self, name: str, default: str | None = None) -> str:
        """Return a cell's text."""
        value = self.values.get(name, "")
        if value:
            return value
        if default is None:
            raise InputError(f"{name} is empty")
        return default

    def number(self, name: str, default: float | None = None) -> float:
        """Return a cell's number, which is above 0."""
        text = self.text(name, None if default is None else str(default))
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            raise InputError(f"{name} is {text!r}", allowed="a number") from None
        if not 0 < value < 1e18:
            raise InputError(f"{name} is {text!r}", allowed="a number above 0")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Return a cell's whole number."""
        value = self.number(name, default)
        if value != int(value):
            raise InputError(f"{name} is {value}", allowed="a whole number")
        return int(value)

    def flag(self, name: str) -> bool:
        """Return whether a cell says yes."""
        return self.values.get(name, "").lower() in {"1", "1.0", "true", "yes", "on"}

    def optional(self, name: str, unit: float) -> float | None:
        """Return a cell's number in base units, or ``None`` if it is empty."""
        return self.number(name) * unit if self.values.get(name) else None


# Layers, width and heads of MPT models. Source: llm-foundry, scripts/train/yamls/pretrain.
_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_MPT_VOCAB = 50_368
# Layers, width, heads, key and value heads, feed-forward width. Source: the models' published config.json.
_LLAMA = {
    "1b": (16, 2048, 32, 8, 8192),
    "3b": (28, 3072, 24, 8, 8192),
    "7b": (32, 4096, 32, 32, 11008),
    "8b": (32, 4096, 32, 8, 14336),
    "13b": (40, 5120, 40, 40, 13824),
    "34b": (48, 8192, 64, 8, 22016),
    "70b": (80, 8192, 64, 8, 28672),
    "405b": (126, 16384, 128, 8, 53248),
}
_LLAMA_VOCAB = {"2": 32_000, "3": 128_256}
_BLOOM_VOCAB = 250_880
# Nodes of the Jean Zay cluster have four links of 100 Gbit/s. Source: bigscience, train/tr11-176B-ml/README.md.
_BLOOM_NODE_LINK = 4 * 100e9 / 8
_GBITS = re.compile(r"([\d,]+)\s*Gb(?:ps|it/s)", re.IGNORECASE)


def _named_model(cells: _Cells, sequence: int) -> tuple[str, Transformer]:
    """Return a row's model and its name: of MPT, of Llama, or of the sizes in its columns."""
    name = cells.text("model").lower()
    if cells.values.get("hidden"):
        given = {key: cells.count(key) for key in ("kv_heads", "ffn") if cells.values.get(key)}
        sizes = {key: cells.count(key) for key in ("layers", "hidden", "heads", "vocab")}
        return name, Transformer.of_sizes(**sizes, gated=cells.flag("gated"), tied=cells.flag("tied"), **given)
    mpt, llama = _MPT.get(name.removeprefix("mpt-")), re.fullmatch(r"llama-?([23])(?:\.\d)?-(\d+b)", name)
    if mpt is not None:
        layers, hidden, heads = mpt
        return f"mpt-{name.removeprefix('mpt-')}", Transformer.of_sizes(
            layers=layers, hidden=hidden, heads=heads, vocab=_MPT_VOCAB, positions=sequence, tied=True,
            learned_positions=True,
        )  # fmt: skip
    if llama is None or llama[2] not in _LLAMA:
        known = [*(f"mpt-{one}" for one in _MPT), *(f"llama3-{one}" for one in _LLAMA)]
        raise InputError(f"model is {name!r}", allowed=known, given=name)
    layers, hidden, heads, kv_heads, ffn = _LLAMA[llama[2]]
    return name, Transformer(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=_LLAMA_VOCAB[llama[1]], gated=True
    )


def _row(cells: _Cells, model: Transformer, layout: Layout, **measured: Any) -> PublishedRow:
    device = cells.text("gpu", "")
    return PublishedRow(
        source="",
        kind="",
        line=0,
        model_name=measured.pop("model_name"),
        device=device,
        model=model,
        layout=layout,
        machine=measured.pop("machine"),
        **measured,
    )


def _machine(cells: _Cells) -> Machine:
    """Return the row's machine; a section's title may say how nodes are linked."""
    found = find_machine(cells.text("gpu"))
    linked = _GBITS.search(cells.text("section", "-"))
    return found if linked is None else replace(found, node_link=float(linked[1].replace(",", "")) * 1e9 / 8)


def _llm_foundry(cells: _Cells) -> PublishedRow:
    sequence, devices = cells.count("seq_len"), cells.count("gpus")
    name, model = _named_model(cells, sequence)
    sharding = cells.text("sharding", "FULL_SHARD").upper()
    shard = min(devices, 8) if sharding.startswith("HYBRID") else devices
    layout = Layout(
        shard=shard,
        replicas=devices // shard,
        micro_batch=cells.count("micro_batch"),
        micro_batches=cells.count("grad_accum", 1),
        sequence=sequence,
        checkpointing="full" if cells.flag("activation_checkpointing") else "none",
        zero_stage={"SHARD_GRAD_OP": 2, "NO_SHARD": 0}.get(sharding, 3),
        float8="fp8" in cells.text("precision", "bf16").lower(),
        offload=cells.flag("activation_cpu_offload"),
        fused_loss=True,
        reduce_bytes=2 if cells.text("mp_mode", "PURE").upper() == "PURE" else 4,
    )
    seconds = layout.tokens_per_step / devices / cells.number("tokens_per_s_per_gpu")
    return _row(
        cells, model, layout, machine=_machine(cells), model_name=name, seconds=seconds, peak_bytes=None,
        peak_is_reserved=True,
    )  # fmt: skip


def _bigscience(cells: _Cells) -> PublishedRow:
    hidden, pp, tp = cells.count("hidden"), cells.count("pp"), cells.count("tp")
    size = cells.text("size", "")
    layers = cells.count("layers", _layers_of(size, hidden, pp) or None)
    heads = cells.count("heads", _heads_of(hidden, tp))
    model = Transformer.of_sizes(layers=layers, hidden=hidden, heads=heads, vocab=_BLOOM_VOCAB, tied=True)
    dp, micro_batch = cells.count("dp"), cells.count("micro_batch")
    layout = Layout(
        shard=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        micro_batches=max(1, round(cells.number("global_batch") / (dp * micro_batch))),
        sequence=cells.count("seq_len"),
        checkpointing="full",
        zero_stage=int(cells.text("zero_stage", "1")),
        fused_attention=False,
        sequence_parallel=False,
        fp32_weights=False,
        reduce_bytes=2,
    )
    machine = replace(_machine(cells), node_link=_BLOOM_NODE_LINK)
    return _row(
        cells, model, layout, machine=machine, model_name=f"gpt-{size or layers}",
        seconds=cells.number("seconds_per_step"), peak_bytes=cells.optional("peak_memory_gb", _GB),
        peak_is_reserved=False,
    )  # fmt: skip


def _layers_of(size: str, hidden: int, pp: int) -> int:
    """Return the number of layers, which stages divide, that comes closest to a size such as ``200B``; 0 if unknown."""
    found = re.fullmatch(r"([\d.]+)\s*B", size, re.IGNORECASE)
    if found is None:
        return 0
    exact = (float(found[1]) * 1e9 - _BLOOM_VOCAB * hidden) / (12 * hidden**2)
    return max(1, round(exact / pp)) * pp


def _heads_of(hidden: int, tp: int) -> int:
    """Return the number of heads, which ranks divide, whose width comes closest to 128."""
    allowed = [heads for heads in range(tp, hidden + 1, tp) if hidden % heads == 0]
    return min(allowed, key=lambda heads: abs(hidden / heads - 128), default=tp)


def _torchtitan(cells: _Cells) -> PublishedRow:
    pp, sequence, devices = cells.count("pp", 1), cells.count("seq_len"), cells.count("gpus")
    name, model = _named_model(cells, sequence)
    tp, cp, shard = cells.count("tp", 1), cells.count("cp", 1), cells.count("dp_shard", 1)
    local = cells.count("local_batch")
    # torchtitan splits a local batch into as many micro-batches as there are stages, unless told otherwise.
    schedule = cells.text("schedule", "").lower()
    virtual = 2 if "interleaved" in schedule else 1
    micro_batches = min(local, pp * virtual) if pp > 1 else 1
    checkpointing = cells.text("activation_checkpointing", "none").lower()
    layout = Layout(
        replicas=max(1, devices // (shard * tp * pp * cp)),
        shard=shard,
        tp=tp,
        pp=pp,
        cp=cp,
        micro_batch=max(1, local // micro_batches),
        micro_batches=micro_batches,
        sequence=sequence,
        checkpointing=_CHECKPOINTING.get(checkpointing, "selective"),
        compiled=cells.flag("compile"),
        float8=cells.flag("float8"),
        async_tp=cells.flag("async_tp"),
        virtual_stages=virtual,
    )
    if layout.devices != devices:
        raise InputError(f"a mesh of {layout.devices} devices on {devices}")
    seconds = layout.tokens_per_step / devices / cells.number("tokens_per_s_per_gpu")
    return _row(
        cells, model, layout, machine=_machine(cells), model_name=name, seconds=seconds,
        peak_bytes=cells.optional("peak_memory_gib", _GIB), peak_is_reserved=True,
    )  # fmt: skip


_CHECKPOINTING: Mapping[str, Any] = {"none": "none", "full": "full", "true": "full", "1": "full", "false": "none"}
_KINDS: Mapping[str, tuple[frozenset[str], _Reader]] = {
    "bigscience": (frozenset({"seconds_per_step", "hidden", "pp", "tp", "dp"}), _bigscience),
    "torchtitan": (frozenset({"local_batch", "tokens_per_s_per_gpu", "model"}), _torchtitan),
    "llm_foundry": (frozenset({"micro_batch", "tokens_per_s_per_gpu", "model"}), _llm_foundry),
}
