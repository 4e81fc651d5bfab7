"""Predictions of the cluster cost model, and of other rules, against published training runs, row by row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.bench.harness import SILENT, document_of
from autotune.bench.published_fit import fit_constants, predicted_peak, predicted_seconds
from autotune.bench.published_peers import PEAK_PEERS, time_peers
from autotune.bench.published_rows import PublishedRow, read_published
from autotune.cost_model.cluster.constants import Constants, fitted, meanings
from autotune.cost_model.cluster.memory import predict_memory
from autotune.io.progress import Reporter

# Largest number of devices of each scale.
_SCALES = ((8, "1 to 8"), (64, "9 to 64"), (256, "65 to 256"), (10**9, "more than 256"))
_LEAST_IN_GROUP = 3


@dataclass(frozen=True, slots=True)
class _Judged:
    """A row with its predictions."""

    row: PublishedRow
    seconds: float
    peak_bytes: float
    fits: bool

    @property
    def throughput_error(self) -> float:
        """Return predicted over measured throughput, less 1."""
        return self.row.seconds / self.seconds - 1

    @property
    def peak_error(self) -> float | None:
        """Return predicted over measured peak, less 1; ``None`` if no peak was published."""
        return None if self.row.peak_bytes is None else self.peak_bytes / self.row.peak_bytes - 1


def bench_published(data: Path | None = None, *, left_out: bool = True, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return the benchmark's document.

    Args:
        data: a folder of CSV files; the package's own rows if left out.
        left_out: whether to also predict each source, and each model, by constants fitted without it.
        reporter: where progress is shown.

    Raises:
        InputError: if no row can be read.
    """
    found = read_published(data)
    rows, constants = found.rows, fitted()
    judged = [_judge(row, constants) for row in rows]
    refused = sum(not one.fits for one in judged)
    return document_of(
        "published",
        {
            "estimated": True,
            "data": "own" if data is None else data.name,
            **_errors(judged),
            "wrongly_refused": refused,
            "wrongly_refused_frac": refused / len(judged),
            "rows_count": len(judged),
            "skipped": list(found.skipped),
            "order": _orders(judged),
            "left_out": _left_out(rows, reporter) if left_out else {},
            "by": {name: _by(judged, key) for name, key in _KEYS.items()},
            "peers": _peers(judged),
            "constants": _described(constants),
            "rows": [_row(one) for one in judged],
        },
    )


def _judge(row: PublishedRow, constants: Constants) -> _Judged:
    needed = predict_memory(row.model, row.layout, constants).needed
    return _Judged(
        row,
        predicted_seconds(row, constants),
        predicted_peak(row, constants),
        needed <= row.machine.capacity_bytes,
    )


def _errors(judged: Sequence[_Judged]) -> dict[str, float | None]:
    """Return the medians and 90th percentiles of absolute errors."""
    times = [abs(one.throughput_error) for one in judged]
    peaks = [abs(one.peak_error) for one in judged if one.peak_error is not None]
    return {
        f"{name}_error_{label}": float(np.quantile(errors, level)) if errors else None
        for name, errors in (("throughput", times), ("peak", peaks))
        for label, level in (("median", 0.5), ("p90", 0.9))
    }


def _left_out(rows: Sequence[PublishedRow], reporter: Reporter) -> dict[str, Any]:
    """Return errors of rows that are predicted by constants fitted to the package's rows without their own kind."""
    own = read_published().rows
    # Sizes of one width differ by a few layers: they are one model.
    kinds: dict[str, Callable[[PublishedRow], Hashable]] = {
        "source": lambda row: row.kind,
        "model": _family,
    }
    work = [(name, value) for name, key in kinds.items() for value in dict.fromkeys(map(key, rows))]
    reporter.stage("fit without each source and each model", 1)
    judged: dict[str, list[_Judged]] = defaultdict(list)
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for number, (name, value) in enumerate(work, 1):
        key = kinds[name]
        rest = [row for row in own if key(row) != value]
        constants = fit_constants(rest) if len(rest) < len(own) else fitted()
        held = [_judge(row, constants) for row in rows if key(row) == value]
        judged[name] += held
        groups[name][str(value)] = {"rows": len(held), **_errors(held)}
        reporter.advance(number / len(work))
    return {
        name: {
            **_errors(judged[name]),
            "wrongly_refused": sum(not one.fits for one in judged[name]),
            "groups": groups[name],
        }
        for name in kinds
    }


def _family(row: PublishedRow) -> str:
    """Return the model that a row trains; sizes of one width and source are one model."""
    if row.model_name.startswith("gpt-"):
        return f"gpt of width {row.model.hidden}"
    return row.model_name


def _orders(judged: Sequence[_Judged]) -> dict[str, Any]:
    """Return Kendall's tau within rows that differ by configuration alone, of throughput and of peaks."""
    groups: dict[tuple[str, str, str], list[_Judged]] = defaultdict(list)
    for one in judged:
        groups[one.row.source, one.row.device, one.row.model_name].append(one)
    found: dict[str, Any] = {}
    for name, pairs in (("throughput", _throughputs), ("peak", _peaks)):
        taus = {}
        for group, members in groups.items():
            different = list({one.row.layout: one for one in members}.values())
            values = pairs(different)
            if len(values) >= _LEAST_IN_GROUP and (tau := kendall_tau(values)) is not None:
                taus[" ".join(group)] = tau
        found[name] = {
            "kendall_tau_mean": float(np.mean([*taus.values()])) if taus else None,
            "kendall_tau_min": min(taus.values(), default=None),
            "groups": taus,
        }
    return found


def _throughputs(judged: Iterable[_Judged]) -> list[tuple[float, float]]:
    return [(1 / one.row.seconds * _tokens(one.row), 1 / one.seconds * _tokens(one.row)) for one in judged]


def _tokens(row: PublishedRow) -> float:
    """Return the tokens of a step for each device."""
    return row.layout.tokens_per_step / row.layout.devices


def _peaks(judged: Iterable[_Judged]) -> list[tuple[float, float]]:
    return [(one.row.peak_bytes, one.peak_bytes) for one in judged if one.row.peak_bytes is not None]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the rank correlation of pairs of numbers, with ties (tau-b); ``None`` if one side is constant.

    Args:
        pairs: measured and predicted value of each member.
    """
    from scipy.stats import kendalltau

    tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return None if np.isnan(tau) else tau


def _by(judged: Sequence[_Judged], key: Callable[[PublishedRow], Iterable[str]]) -> dict[str, Any]:
    """Return errors by some property of the rows; a row may have several."""
    groups: dict[str, list[_Judged]] = defaultdict(list)
    for one in judged:
        for value in key(one.row):
            groups[value].append(one)
    return {
        value: {"rows": len(members), **_errors(members), "wrongly_refused": sum(not one.fits for one in members)}
        for value, members in groups.items()
    }


def _scale(row: PublishedRow) -> Iterable[str]:
    return [next(name for most, name in _SCALES if row.layout.devices <= most)]


def _techniques(row: PublishedRow) -> Iterable[str]:
    layout = row.layout
    named = {
        f"checkpointing {layout.checkpointing}": True,
        "sharded weights": layout.gathers,
        "tensor parallel": layout.tp > 1,
        "pipeline": layout.pp > 1,
        "context parallel": layout.cp > 1,
        "compiled": layout.compiled,
        "float8": layout.float8,
        "offload": layout.offload,
    }
    return [name for name, used in named.items() if used]


_KEYS: dict[str, Callable[[PublishedRow], Iterable[str]]] = {
    "source": lambda row: [row.source],
    "device": lambda row: [row.device],
    "scale": _scale,
    "technique": _techniques,
}


def _peers(judged: Sequence[_Judged]) -> dict[str, Any]:
    """Return the errors of other rules on the same rows, and ours."""
    rows = [one.row for one in judged]
    found: dict[str, Any] = {"autotune plan": {**_errors(judged), "wrongly_refused": sum(not o.fits for o in judged)}}
    for name, rule in time_peers(rows).items():
        found[name] = _errors([_Judged(row, rule(row), 1.0, True) for row in rows]) | dict.fromkeys(
            ("peak_error_median", "peak_error_p90", "wrongly_refused")
        )
    for name, peak in PEAK_PEERS.items():
        guessed = [_Judged(row, row.seconds, peak(row), peak(row) <= row.machine.capacity_bytes) for row in rows]
        found[name] = {
            **_errors(guessed),
            **dict.fromkeys(("throughput_error_median", "throughput_error_p90")),
            "wrongly_refused": sum(not one.fits for one in guessed),
        }
    return found


def _described(constants: Constants) -> dict[str, Any]:
    return {
        name: {
            "value": getattr(constants, name),
            "prior": one.prior,
            "unit": one.unit,
            "meaning": one.text,
            "source": one.source,
        }
        for name, one in meanings().items()
    }


def _row(one: _Judged) -> dict[str, Any]:
    row = one.row
    return {
        "source": row.source,
        "line": row.line,
        "device": row.device,
        "model": row.model_name,
        "devices": row.layout.devices,
        "predicted": {
            "seconds_per_step": one.seconds,
            "tokens_per_s_per_device": _tokens(row) / one.seconds,
            "peak_bytes": one.peak_bytes,
        },
        "measured": {
            "seconds_per_step": row.seconds,
            "tokens_per_s_per_device": row.tokens_per_s_per_device,
            "peak_bytes": row.peak_bytes,
        },
        "throughput_error": one.throughput_error,
        "peak_error": one.peak_error,
        "fits": one.fits,
    }


def lines(document: dict[str, Any]) -> list[str]:
    """Return the benchmark's result as sentences.

    Args:
        document: the benchmark's document.
    """

    def both(found: dict[str, Any]) -> str:
        texts = []
        for name in ("throughput", "peak"):
            median, p90 = (found[f"{name}_error_{label}"] for label in ("median", "p90"))
            texts.append(f"{name} not published" if median is None else f"{name} {median:.1%} (90 %: {p90:.1%})")
        return ", ".join(texts)

    head = f"{document['rows_count']} published runs, median errors of estimates: {both(document)}"
    refused = f"{document['wrongly_refused']} of them wrongly predicted not to fit"
    skipped = [f"skipped: {one}" for one in document["skipped"]]
    out = [f"each {name} left out of the fit: {both(one)}" for name, one in document["left_out"].items()]
    return [*skipped, head, *out, refused]
