"""Tests of cutting batches by tokens: exact updates, balanced micro-batches, less memory, and nothing lost silently."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_on_ranks
from small_models import TinyGPT
from torch import nn

import autotune
from autotune import EngineOptions, Job, JobError, TorchEngine, load_job
from autotune.bench.bench_cutting import SAMPLES, TOKENS, bench_cutting, lines
from autotune.cli.main import run
from autotune.errors import AttachError, InputError
from autotune.mechanics.cutting import Cutting, alike, even
from autotune.plan import Precision
from autotune.profiling.job_shape import profile_key
from autotune.report.snippet import to_python

BATCH, LONGEST, IGNORED = 8, 24, -100
UNWATCHED = EngineOptions(meter_memory=False, statistics_every=None)
costs = st.lists(st.integers(0, 50).map(float), min_size=1, max_size=7)

Batch = dict[str, torch.Tensor]


def ragged(seed: int) -> Iterator[Batch]:
    """Yield tokens of samples of very different lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        lengths = torch.cat([torch.randint(1, 5, (BATCH - 2,), generator=generator), torch.tensor([LONGEST, 9])])
        lengths = lengths[torch.randperm(BATCH, generator=generator)]
        tokens = torch.randint(11, (BATCH, LONGEST + 1), generator=generator)
        there = torch.arange(LONGEST) < lengths[:, None]
        yield {"tokens": tokens[:, :-1], "labels": torch.where(there, tokens[:, 1:], IGNORED)}


def count(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


def lengths_of(batch: Batch) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum(1)


def trim(batch: Batch) -> Batch:
    length = int(lengths_of(batch).max())
    return {name: part[:, :length] for name, part in batch.items()}


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    found = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(found, batch["labels"].flatten(), ignore_index=IGNORED)


class Block(nn.Module):
    """Causal attention, which does not look at padding behind a sample."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.norm(x)).chunk(3, -1)
        return x + self.dropout(self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)))


class Causal(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "name": "ragged",
        "model": lambda: Causal().double(),
        "batches": ragged,
        "loss": loss,
        "count": count,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        "evaluate": lambda model: 0.0,
        "batch_size": BATCH,
        "accumulation_choices": (1, 2, 3, 4, 8),
        "split": "tokens",
    }
    return Job(**{**settings, **changes})


# ---------------------------------------------------------------------- which samples go where


def largest(found: list[list[int]], costs: list[float]) -> float:
    return max(sum(costs[row] for row in rows) for rows in found)


@given(costs, st.integers(1, 3))
def test_even_micro_batches_have_all_samples_once_as_many_each_and_cost_little_more_than_the_best(
    costs: list[float], pieces: int
) -> None:
    pieces = min(pieces, len(costs))
    found = even(costs, pieces)
    sizes = [len(rows) for rows in found]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(itertools.chain(*found)) == list(range(len(costs)))
    assert all(rows == sorted(rows) for rows in found)
    best = min(
        largest([[row for row, n in enumerate(where) if n == piece] for piece in range(pieces)], costs)
        for where in itertools.product(range(pieces), repeat=len(costs))
        if max(map(where.count, range(pieces))) - min(map(where.count, range(pieces))) <= 1
    )
    assert largest(found, costs) <= 4 / 3 * best + 1e-9


@given(costs, st.integers(1, 7))
def test_micro_batches_of_like_samples_have_the_smallest_padded_cost(costs: list[float], pieces: int) -> None:
    pieces = min(pieces, len(costs))
    found = alike(costs, pieces)
    assert len(found) == pieces
    assert all(found)
    assert sorted(itertools.chain(*found)) == list(range(len(costs)))
    ordered = sorted(costs, reverse=True)
    best = min(
        max((end - begin) * ordered[begin] for begin, end in itertools.pairwise([0, *cuts, len(costs)]))
        for cuts in itertools.combinations(range(1, len(costs)), pieces - 1)
    )
    assert max(len(rows) * max(costs[row] for row in rows) for rows in found) <= best * (1 + 1e-4)
    # The most costly samples come first.
    assert max(costs) == max(costs[row] for row in found[0])


def test_tokens_are_spread_more_evenly_than_by_samples() -> None:
    by_samples, by_tokens = Cutting(count=count), Cutting(split="tokens", count=count)
    for batch, _ in zip(ragged(0), range(20), strict=False):
        spreads = [
            max(counts) - min(counts)
            for cutting in (by_samples, by_tokens)
            if (counts := [count(piece) for piece in cutting.pieces(batch, 2)])
        ]
        assert spreads[1] <= spreads[0]
        assert spreads[1] <= LONGEST


# ------------------------------------------------------------------------------------------------------- exact updates


def trained(job: Job, ks: list[int]) -> tuple[list[torch.Tensor], list[float]]:
    engine, losses = TorchEngine(job, options=UNWATCHED), []
    for k in ks:
        engine.apply(engine.space.plan(accumulation_steps=k, precision=Precision.FP32))
        losses.append(engine.run(1).loss or 0.0)
    weights = [parameter.detach().clone() for parameter in engine.model.parameters()]
    engine.close()
    return weights, losses


def in_fp64(**changes: Any) -> Job:
    # Units in fp32 would round what is computed in fp64.
    return make(units=[], **changes)


@pytest.mark.parametrize("trims", [None, trim])
@pytest.mark.parametrize("cost", [None, lambda batch: lengths_of(batch) ** 2])
def test_update_is_that_of_the_whole_batch_however_it_is_cut(trims: Any, cost: Any) -> None:
    ks = [2, 4, 1, 8, 3, 2, 4, 8, 3, 2]
    whole, losses = trained(in_fp64(split="samples"), [1] * len(ks))
    found, found_losses = trained(in_fp64(trim=trims, sample_cost=cost), ks)
    assert max(float((one - other).abs().max()) for one, other in zip(whole, found, strict=True)) < 1e-12
    assert found_losses == pytest.approx(losses, abs=1e-6)


def test_whole_batches_are_bit_identical_under_both() -> None:
    job = make(model=lambda: Causal(dropout=0.1))
    samples, tokens = (trained(replace(job, split=split), [1] * 4) for split in ("samples", "tokens"))
    assert all(torch.equal(one, other) for one, other in zip(samples[0], tokens[0], strict=True))
    assert samples[1] == tokens[1]


def test_trimmed_micro_batches_of_like_samples_need_less_memory() -> None:
    peaks = {}
    for name, job in {"samples": make(split="samples"), "tokens": make(trim=trim)}.items():
        job = replace(job, model=lambda: Causal(32), accumulation_choices=(1, 2))
        engine = TorchEngine(job, options=EngineOptions(statistics_every=None))
        engine.apply(engine.space.plan(accumulation_steps=2, precision=Precision.FP32))
        peaks[name] = engine.run(6).peak_bytes
        engine.close()
    assert 0 < peaks["tokens"] < 0.9 * peaks["samples"]


def test_peak_is_metered_again_where_a_batch_of_the_same_size_is_cut_into_larger_micro_batches() -> None:
    def batches(seed: int) -> Iterator[Batch]:
        """Yield batches of one size with one long sample, then one with as many as there are."""
        for number, batch in enumerate(ragged(seed)):
            yield {**batch, "labels": batch["tokens"]} if number >= 5 else batch

    engine = TorchEngine(make(batches=batches, trim=trim), options=EngineOptions(statistics_every=None))
    engine.apply(engine.space.plan(accumulation_steps=2, precision=Precision.FP32))
    short, long = engine.run(5).peak_bytes, engine.run(3).peak_bytes
    assert short is not None
    assert long is not None
    assert long > 1.2 * short
    engine.close()


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"split": "bytes"}, r"split is 'bytes'.*samples, tokens"),
        ({"count": None}, r"split is 'tokens'.*unless count or sample_cost"),
        ({"trim": 3}, "trim is 3"),
        ({"sample_cost": "length"}, "sample_cost is 'length'"),
    ],
)
def test_wrong_options_of_a_job_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        make(**changes)


def test_trim_of_padding_that_the_model_looks_at_is_refused() -> None:
    with pytest.raises(JobError, match=r"trim changes the loss of a micro-batch from \d.*the model does not look at"):
        TorchEngine(make(model=lambda: TinyGPT(dropout=0.0), trim=trim), options=UNWATCHED)
    TorchEngine(make(model=lambda: TinyGPT(dropout=0.0), trim=trim, split="samples"), options=UNWATCHED).close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample_cost": lambda batch: [1.0]}, "for 8 samples"),
        ({"sample_cost": lambda batch: [-1.0] * BATCH}, "one number >= 0 per sample"),
        ({"sample_cost": lambda batch: torch.full((BATCH,), float("nan"))}, "one number >= 0 per sample"),
        ({"sample_cost": lambda batch: 7}, "one number >= 0 per sample"),
        ({"trim": lambda batch: {name: part[:, :2] for name, part in batch.items()}}, r"trim left \d+ of \d+ items"),
        ({"trim": lambda batch: {name: part[:-1] for name, part in batch.items()}}, r"trim left \d+ of \d+ samples"),
    ],
)
def test_cost_or_trim_that_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        TorchEngine(make(**changes), options=UNWATCHED).run(1)


# ---------------------------------------------------------------------- elsewhere in a project


def test_profiles_of_both_ways_are_kept_apart() -> None:
    keys = {profile_key(make(**changes), "cpu") for changes in ({"split": "samples"}, {}, {"trim": trim})}
    assert len(keys) == 3


def test_exported_script_cuts_as_the_job_does() -> None:
    engine = TorchEngine(make(), options=UNWATCHED)
    plan = engine.space.plan(accumulation_steps=2, precision=Precision.FP32)
    script = to_python(plan, make(), "ragged.py:job").files["train_tuned.py"]
    assert "Cutting.of(job).pieces(next(batches)" in script
    assert "from autotune.mechanics.cutting import Cutting\n" in script
    compile(script, "train_tuned.py", "exec")
    assert "Cutting" not in to_python(plan, make(split="samples"), "ragged.py:job").files["train_tuned.py"]
    engine.close()


def attached(model: nn.Module, k: int) -> autotune.LiveTuner:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = autotune.Settings(accumulation_choices=(k,) if k == 1 else (1, k))
    tuner = autotune.attach(model, optimizer, "planner", mode="rounding", runs_dir=None, settings=settings)
    if k > 1:
        # What remains after memory ran out.
        tuner.raise_k(k, "memory ran out")
    return tuner


def test_attached_run_cuts_by_tokens_with_exact_weights() -> None:
    losses: dict[str, list[float]] = {}
    for split in ("samples", "tokens"):
        torch.manual_seed(0)
        model = Causal()
        tuner, sizes = attached(model, 4), []
        losses[split] = []
        for batch, _ in zip(ragged(0), range(8), strict=False):
            total = 0.0
            for micro in tuner.micro_batches(batch, count, split=split, trim=trim):
                if not tuner.probing:
                    sizes.append(micro["tokens"].shape)
                    total += float(loss(model, micro).detach()) * tuner.weight
                tuner.backward(loss(model, micro))
            tuner.step()
            losses[split].append(total)
        assert tuner.attached
        tuner.detach()
        trimmed = {shape[1] for shape in sizes if shape[1] < LONGEST}
        assert bool(trimmed) is (split == "tokens")
        assert any(shape[0] < BATCH for shape in sizes)
    assert losses["tokens"] == pytest.approx(losses["samples"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"split": "bytes"}, "split is 'bytes'"),
        ({"split": "tokens"}, r"split is 'tokens'.*with count= or sample_cost="),
        ({"split": "tokens", "sample_cost": lambda batch: [1.0]}, "for 8 samples"),
    ],
)
def test_wrong_cutting_of_an_attached_run_is_named(arguments: dict[str, Any], said: str) -> None:
    tuner = attached(Causal(), 2)
    with pytest.raises(AttachError, match=said):
        for _ in tuner.micro_batches(next(ragged(0)), **arguments):
            pass
    tuner.detach()


def test_benchmark_pairs_the_same_steps_and_tells_the_peak(tmp_path: Path) -> None:
    job = make(model=Causal, trim=trim, accumulation_choices=(1, 2))
    document = bench_cutting(job, rounds=2)
    rows = {row["cut"]: row for row in document["rows"]}
    assert set(rows) == {SAMPLES, "tokens, padding kept", TOKENS}
    assert rows[TOKENS]["peak_over_samples"] < 1
    assert rows[SAMPLES]["peak_over_samples"] == 1
    assert len(lines(document)) == 2
    json.dumps(document)
    with pytest.raises(InputError, match="split of ragged is 'samples'"):
        bench_cutting(make(split="samples"), rounds=2)


def test_ragged_job_of_the_catalog_can_be_cut_by_tokens() -> None:
    job = load_job("charlm_ragged:tokens")
    assert job.split == "tokens"
    batch = next(iter(job.batches(0)))
    pieces = Cutting.of(job).pieces(batch, 4)
    assert sum(map(job.count, pieces)) == job.count(batch)  # type: ignore[arg-type, misc]
    assert sum(piece["inputs"].numel() for piece in pieces) < batch["inputs"].numel()


def test_bench_refuses_a_job_that_is_never_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "whole.py"
    file.write_text("from test_cutting import make\njob = make(accumulation_choices=(1,))\n")
    assert run(["bench", "batching", f"{file}:job", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "a k above 1" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_cut_by_tokens_make_the_updates_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    run_on_ranks("tokens_rank.py", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["apart"] < 1e-6
        assert found["losses_apart"] < 1e-5
