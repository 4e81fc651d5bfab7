"""Tests of the peers benchmark: techniques of other programs, the arms that represent them, and who is the fastest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import tiny_job
from test_figures import loaded

from autotune.agents.planner import offering
from autotune.bench.bench_peers import lines
from autotune.bench.peer_arms import OURS, Arm, own_candidates, peer_candidates
from autotune.bench.peer_engine import PEERS, PeerEngine, Technique, block_names, comparable
from autotune.budget import format_bytes
from autotune.choices import DEFAULT_STORAGES, EXACT_STORAGES, STORAGES
from autotune.cli.main import run
from autotune.engines.torch_engine import EngineOptions
from autotune.measurement import Measurement
from autotune.mechanics import known_precisions
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.records.run_directory import benchmark_folder

JOB = Path(tiny_job.__file__)
EAGER = [name for name in PEERS if not name.startswith("compile")]


def allow(precisions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(known_precisions.PRECISIONS_VARIABLE, precisions)
    known_precisions.forget()


@pytest.fixture(autouse=True)
def _both_precisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow("fp32,bf16", monkeypatch)
    yield
    known_precisions.forget()


def trained(technique: Technique | None, *, k: int = 1, job: object = None) -> Measurement:
    """Return two steps of a job under a technique, of which the second is metered."""
    options = EngineOptions(statistics_every=None)
    fields = None if technique is None else asdict(technique)
    engine = PeerEngine(job or tiny_job.make(), technique=fields, seed=3, options=options)
    engine.apply(engine.space.baseline().changed(accumulation_steps=k))
    found = engine.run(3)
    assert found.failure is None, found.failure_detail
    return found


@pytest.mark.parametrize("k", [1, 2])
def test_checkpointing_peers_train_as_the_plain_model_does_in_less_memory(k: int) -> None:
    plain = trained(None, k=k)
    peaks = {}
    for name in EAGER:
        if PEERS[name].fp32:
            found = trained(Technique(peer=name, option=PEERS[name].options[0]), k=k)
            assert found.loss == plain.loss, name
            peaks[name] = found.peak_bytes
    assert peaks["accumulation"] == plain.peak_bytes
    assert peaks["recompute-all"] < peaks["every-n"] < peaks["accumulation"]
    assert peaks["recompute-all"] < peaks["sqrt"] < peaks["accumulation"]
    assert peaks["recompute-all"] < peaks["selective-op"] < peaks["accumulation"]


def test_bf16_peers_compute_in_16_bits() -> None:
    plain, reduced = trained(None), trained(Technique(peer="uniform-bf16", bf16=True))
    assert reduced.loss != plain.loss
    assert reduced.loss == pytest.approx(plain.loss, rel=0.02)


def test_blocks_of_a_model_without_repeated_blocks_are_its_units() -> None:
    job = tiny_job.make(units=["head", "embedding"])
    space = PeerEngine(job).space
    assert set(block_names(space)) == {"head", "embedding"}
    assert block_names(PeerEngine(tiny_job.make()).space) == ("blocks.0", "blocks.1", "blocks.2")
    trained(Technique(peer="recompute-all"), job=job)


def test_steps_of_adaptive_jobs_consume_one_batch() -> None:
    job = comparable(tiny_job.make(batching="adaptive", accumulation_choices=(1, 2, 64)))
    assert (job.batching, job.accumulation_choices) == ("fixed", (1, 2))
    assert set(job.storages) == {one for one in STORAGES if not one.keeps_gathered}


def test_every_setting_of_a_peer_is_tried_at_every_k_and_the_plain_model_always() -> None:
    space = PeerEngine(tiny_job.few_k()).space
    names = [one.name for one in peer_candidates(space, ["every-n"])]
    assert names == [
        *("peer:accumulation-k1", "peer:accumulation-k2"),
        *(f"peer:every-n-{n}{bf16}-k{k}" for n in (2, 3) for bf16 in ("", "-bf16") for k in (1, 2)),
    ]
    families = {family for one in peer_candidates(space, ["every-n"]) for family in one.families}
    assert families == {"peer:accumulation", "peer:every-n"}
    single = [one.name for one in peer_candidates(space, ["compile-0.5"])][2:]
    assert single == [*(f"peer:compile-0.5{b}-k{k}" for b in ("", "-bf16") for k in (1, 2))]
    tried = peer_candidates(space, PEERS)
    assert len({one.name for one in tried}) == len(tried)
    assert {family for one in tried for family in one.families} == {f"peer:{name}" for name in PEERS}


def test_plans_belong_to_all_families_that_offer_their_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    allow("fp32", monkeypatch)
    monkeypatch.setenv("AUTOTUNE_STORAGES", "selective,compress8")
    job = comparable(tiny_job.make(accumulation_choices=(1,)))
    found = profile(job, device_name="here", fingerprint="", options=ProfilerOptions.lean())
    engine = PeerEngine(tiny_job.make(accumulation_choices=(1,)))
    base, lean = (trained(None).peak_bytes, trained(Technique(peer="recompute-all")).peak_bytes)
    candidates = own_candidates(found, [(base + lean) // 2, 1])
    assert candidates[0].plan == engine.space.baseline()
    assert candidates[0].families == set(OURS)
    for one in candidates:
        used = set(one.plan.storage.values())
        assert ("ours:save-recompute" in one.families) == (used <= set(DEFAULT_STORAGES))
        assert ("ours:exact" in one.families) == (used <= set(EXACT_STORAGES))
        assert "ours:all" in one.families
    assert len(candidates) > 1
    assert "selective" in found.space.storages
    for storages in OURS.values():
        offered = tuple(one for one in found.space.storages if one in storages)
        assert offering(found, storages).space.storages == offered


def bench(*options: str, runs: Path) -> dict:
    arguments = ["--job", f"{JOB}:one_k", "--rounds", "2", "--threads", "1", "--runs-dir", str(runs), *options]
    assert run(["bench", "peers", *arguments]) == 0
    return json.loads((benchmark_folder(runs) / "peers.json").read_text())


def test_benchmark_tells_who_is_fastest_and_what_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allow("fp32", monkeypatch)
    monkeypatch.setenv("AUTOTUNE_STORAGES", "recompute")
    document = bench("--peers", "accumulation", "--memory-budgets", "100%,1KiB", runs=tmp_path)
    assert (document["benchmark"], document["job"], document["threads"]) == ("peers", "tiny", 1)
    base = document["baseline"]
    assert base["name"] == "peer:accumulation-k1"
    rows = {(row["family"], row["budget_frac"] == 1): row for row in document["arms"]}
    assert len(rows) == len(document["arms"]) == 2 * (1 + len(OURS))
    for family in ("peer:accumulation", *OURS):
        row, beyond = rows[family, True], rows[family, False]
        assert (row["fits"], beyond["fits"], beyond["seconds_per_step"], beyond["failure"]) == (True, False, None, None)
        assert row["seconds_per_step"] > 0
        assert row["compile_s"] >= 0
        assert 0.5 * base["peak_bytes"] < row["peak_bytes"] <= base["peak_bytes"]
        # In fp32 at k = 1, saved and recomputed activations give the same bits.
        assert row["loss"] == base["loss"]
    assert rows["peer:accumulation", True]["name"] == "peer:accumulation-k1"
    assert rows["ours:exact", True]["plan"]["accumulation_steps"] == 1
    first, nothing = document["budgets"]
    fastest = min((row for row in document["arms"] if row["fits"]), key=lambda row: row["seconds_per_step"])
    assert first["fastest"] == fastest["name"]
    assert fastest["over_fastest"]["ratio_median"] == 1
    assert (nothing["fastest"], nothing["ours_over_peer"]) == (None, None)
    page = "\n".join(loaded("results").peers(document))
    assert f"| 100% | {first['fastest']} | 1.00 |" in page
    assert "| 0% | peer:accumulation | out of reach |" in page
    shown = capsys.readouterr().out
    assert f"within 100% ({format_bytes(base['peak_bytes'])}): {first['fastest']} is the fastest" in shown
    assert "within 0% (1.0 KiB): nothing fits; out of reach: peer:accumulation, ours:save-recompute, ours:e" in shown


def test_lines_say_so_where_ours_loses_or_does_not_fit() -> None:
    one = {"budget_frac": 0.4, "budget_bytes": 2**20, "fastest": "peer:a", "ours": "ours:exact", "peer": "peer:a"}
    slower = {"ours_over_peer": {"ratio_median": 1.25, "ratio_ci95": [1.2, 1.3]}}
    faster = {"fastest": "ours:exact", "ours_over_peer": {"ratio_median": 0.8, "ratio_ci95": [0.7, 0.9]}}
    alone = {"ours": None, "ours_over_peer": None}
    beyond = [
        {"name": "peer:b", "budget_frac": 0.3, "fits": False, "failure": None},
        {"name": "peer:c", "budget_frac": 0.3, "fits": False, "failure": "crashed: no compiler"},
    ]
    budgets = [{**one, **slower}, {**one, **faster}, {**one, **alone, "budget_frac": 0.3}]
    assert lines({"budgets": budgets, "arms": beyond}) == [
        "within 40% (1.0 MiB): peer:a is the fastest; ours:exact takes 1.250 [1.200, 1.300] of its time",
        "within 40% (1.0 MiB): ours:exact is the fastest; it takes 0.800 [0.700, 0.900] of the time of peer:a",
        "within 30% (1.0 MiB): peer:a is the fastest, and no plan of ours fits; out of reach: peer:b; "
        "peer:c failed (crashed: no compiler)",
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--peers", "unheard-of"], "peer 'unheard-of' is unknown"),
        (["--rounds", "1"], "rounds is 1"),
        (["--memory-budgets", "100%,much"], "memory budget is 'much'"),
    ],
)
def test_wrong_options_are_refused(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "peers", "--job", str(JOB), *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_peers_compile_once_and_keep_what_their_budget_allows(tmp_path: Path) -> None:
    def surveyed(technique: Technique) -> Arm:
        (candidate,) = [one for one in peer_candidates(space, PEERS) if one.technique == technique]
        arm = Arm(candidate, f"{JOB}:one_k", seed=0, threads=1, cache=str(tmp_path))
        arm.survey()
        arm.close()
        assert arm.failure is None
        return arm

    space = PeerEngine(tiny_job.one_k()).space
    plain = surveyed(Technique(peer="accumulation"))
    whole, lean = (surveyed(Technique(peer="compile-blocks", option=option)) for option in (1.0, 0.0))
    model = surveyed(Technique(peer="compile", option=0.0))
    assert lean.peak_bytes < 0.9 * whole.peak_bytes
    assert model.peak_bytes < 0.9 * plain.peak_bytes
    for arm in (whole, lean, model):
        assert arm.compile_s > 10 * arm.survey_s
        # Compiled dropout draws other numbers.
        assert arm.loss == pytest.approx(plain.loss, rel=0.1)
