"""Tests of FSDP2 on several ranks: updates equal those of one process, on any mesh and after a change of mesh."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import odd_rank_jobs
import pytest
import torch
import torch.nn.functional as F
from rank_laws import (
    assert_adapts_as_torch,
    assert_equals_torch,
    assert_mixes_precisions,
    assert_storage_is_exact,
    assert_troubles_are_shared,
    peaks_of,
    run_ranks,
)
from ranks import fork_ranks, run_on_ranks
from small_models import TinyGPT
from torch import nn

from autotune.cli.main import run
from autotune.cost_model.memory_model import peak_bytes
from autotune.engines.registry import RankOptions
from autotune.errors import InputError, JobError
from autotune.mechanics.weight_use import weight_use
from autotune.mesh import Mesh
from autotune.profiling.profiler import ProfilerOptions
from autotune.profiling.rank_profiler import profile_on_ranks

TESTS = Path(__file__).parent


# ------------------------------------------------------------------------------------------------------------- meshes


def test_mesh_is_written_as_it_is_read() -> None:
    for ranks in (1, 2, 4, 6):
        meshes = Mesh.all_of(ranks)
        assert [Mesh.parse(str(mesh)) for mesh in meshes] == meshes
        assert {mesh.ranks for mesh in meshes} == {ranks}
    assert [str(mesh) for mesh in Mesh.all_of(4)] == ["dp=4", "dp=2,shard=2", "shard=4"]
    divided = Mesh.all_of(4, tp=True)
    assert [str(mesh) for mesh in divided[3:]] == ["dp=2,tp=2", "shard=2,tp=2", "tp=4"]
    assert [Mesh.parse(str(mesh)) for mesh in divided] == divided
    assert {mesh.ranks for mesh in divided} == {4}


@pytest.mark.parametrize(
    "text", ["", "dp", "dp=0", "dp=-1", "dp=2,dp=2", "pp=2", "dp=2;shard=2", "shard=½", "shard=2.0"]
)
def test_text_that_is_no_mesh_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"mesh is .* dp=2,shard=4"):
        Mesh.parse(text)


def test_mesh_that_does_not_divide_the_ranks_is_rejected() -> None:
    with pytest.raises(InputError, match="mesh dp=2,shard=2 is for 4 ranks, and there are 3"):
        RankOptions(engine="fsdp2", count=3, mesh="dp=2,shard=2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "fsdp2", "--zero-stage", "1"], "--engine fsdp2 cannot be combined with --zero-stage"),
        (["--mesh", "shard=2"], "--engine torch cannot be combined with --mesh"),
        (["--engine", "deepspeed", "--mesh", "shard=2"], "--engine deepspeed cannot be combined with --mesh"),
        (["--engine", "fsdp2", "--mesh", "shard=3"], "mesh shard=3 is for 3 ranks, and there are 2"),
    ],
)
def test_options_of_other_engines_are_rejected_in_one_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", str(TESTS / "tiny_job.py"), "--runs-dir", str(tmp_path), *options]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert words in told[0]
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------------------- units that can gather their own weights


class Odd(nn.Module):
    """A model with a tied head, a weight that is used outside its module, and an output that is written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.blocks[0](x)
        assert self.blocks[1].weight.dtype is torch.float32
        x = self.blocks[1](x)
        x += 1
        x = F.linear(x, self.blocks[2].weight) + self.blocks[2](x)
        return self.head(x)


def test_only_units_whose_weights_nothing_else_uses_gather_their_own() -> None:
    model = Odd()
    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "head", "unused"]
    with torch.no_grad():
        found = weight_use(model, names, lambda: model(torch.tensor([[1, 2]])))
    assert found.contained == ("blocks.0",)
    assert found.calls == ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
    plain = TinyGPT(width=8, blocks=2)
    names = ["embedding", "blocks.0", "blocks.1", "head"]
    with torch.no_grad():
        assert weight_use(plain, names, lambda: plain(torch.tensor([[1, 2]]))).contained == tuple(names)
    with torch.no_grad(), pytest.raises(JobError, match="loss calls parts of the model, but not the model"):
        weight_use(plain, names, lambda: plain.head(plain.embedding(torch.tensor([[1, 2]]))))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())


def test_reading_a_weight_before_the_model_is_called_is_refused() -> None:
    plain, tokens = TinyGPT(width=8, blocks=2), torch.tensor([[1, 2]])
    names = ["embedding", "blocks.0", "blocks.1", "head"]
    for early in (
        lambda: plain.head.weight.data.sum(),
        lambda: plain.blocks[0].mix.weight.square().sum(),
        lambda: plain.embedding(tokens),
    ):
        with torch.no_grad(), pytest.raises(JobError, match="loss uses parts of the model before it calls the model"):
            weight_use(plain, names, lambda early=early: (early(), plain(tokens)))  # type: ignore[misc]
    with torch.no_grad():
        found = weight_use(plain, names, lambda: (plain.head.weight.dtype, plain(tokens), plain.head.weight.sum()))
    assert found.contained == ("embedding", "blocks.0", "blocks.1")


def test_units_whose_results_torch_cannot_look_into_gather_none_of_their_own() -> None:
    model, names = odd_rank_jobs.PassesObjects(), ["embedding", *(f"blocks.{number}" for number in range(4)), "head"]
    with torch.no_grad():
        assert weight_use(model, names, lambda: model(torch.tensor([[1, 2]]))).contained == ("embedding", "head")


# ----------------------------------------------------------------------- what ranks refuse, and what they train exactly

REFUSALS = {
    "routed": "ranks call different parts of the model in one step: rank 0 calls blocks",
    "own_norm": "blocks.0.over_samples is an OwnNorm, whose statistics depend on how ranks share a batch",
    "remembering": "the model writes other values to buffer blocks.0.seen on each rank",
    "early": "loss uses parts of the model before it calls the model",
    "scalar": "parameter scale has no dimension",
    "mixed": "unit blocks.0 has the dtypes float32 and float64",
    "complex_": "parameter blocks.0.turn is complex",
    "transposed": "parameter blocks.0.out.weight is not contiguous",
    "adafactor": "optimizer Adafactor cannot update parts of parameters",
    "clamping": "loss writes to parameter blocks.0.out.weight",
    "sparse": "embedding has sparse gradients",
    "penalised": "the backward pass needs weights that are released already",
    "contrastive": "in two parts, the weighted losses of a batch sum to",
    "late": "ranks call different parts of the model in one step (allowed",
}
TORN_STATES = {
    "torn": "cannot be loaded (RuntimeError",
    "missing": "cannot be loaded (FileNotFoundError",
    "model": "embedding.weight is float32 of shape (11, 8) there, and float32 of shape (11, 16) here",
    "job": "is of another run: job is 'unused' there, and 'plain' here",
    "seed": "is of another run: seed is 0 there, and 1 here",
    "unwritable": "cannot be written to ",
}


def assert_refused(found: dict[str, str], expected: dict[str, str], kind: str) -> None:
    for name, words in expected.items():
        assert found[name].startswith(f"{kind}: "), (name, found[name])
        assert words in found[name]
        assert len(found[name]) < 600
        assert "\n" not in found[name]


def test_ranks_refuse_what_they_cannot_train_exactly_and_keep_all_states(tmp_path: Path) -> None:
    fork_ranks("odd_rank.py", tmp_path, "shard=2", "refusals,norms,exactness,states")
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert_refused(found["refusals"], REFUSALS, "JobError")
        assert found["refusals"]["kept"] == "True"
        assert max(found["exactness"].values()) <= 3e-7
        assert max(found["norms"].values()) <= 1e-12
        states = found["states"]
        assert_refused(states["refused"], TORN_STATES, "EngineError")
        assert states["kept"]
        assert max(value for name, value in states.items() if name.endswith("apart")) <= 3e-7


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2", 2), ("dp=2,shard=2", 4)])
def test_replicas_refuse_and_train_the_same(mesh: str, ranks: int, tmp_path: Path) -> None:
    fork_ranks("odd_rank.py", tmp_path, mesh, "refusals,exactness,states", ranks=ranks)
    found = json.loads((tmp_path / "rank1.json").read_text())
    assert_refused(
        found["refusals"], {name: words for name, words in REFUSALS.items() if name != "adafactor"}, "JobError"
    )
    assert max(found["exactness"].values()) <= 3e-7


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("dropped", "rank [01] calls "),
        pytest.param("late", "rank 0 calls blocks.[12], and rank 1 calls blocks.[12]", marks=pytest.mark.slow),
        pytest.param("experts", "their gradients are of different parameters|exchanges", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_begin_to_differ_end_with_one_line(
    job: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "tune",
        f"{TESTS / 'odd_rank_jobs.py'}:{job}",
        "--engine",
        "fsdp2",
        "--method",
        "random",
        "--trials",
        "2",
    ]
    assert run([*command, "--runs-dir", str(tmp_path), "--report-to", "none"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "ranks call different parts of the model in one step: " in told
    assert re.search(words, told)


# -------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mesh", "ranks"), [("shard=2", 2), ("dp=2", 2), ("dp=2,shard=2", 4)])
def test_meshes_make_the_updates_of_one_process_under_random_plans(mesh: str, ranks: int, tmp_path: Path) -> None:
    assert_equals_torch(run_ranks(tmp_path, "equals_torch", mesh, 200, ranks), 200, apart=3e-7)
    found = run_ranks(tmp_path, "storage_is_exact,troubles,mixed_precision,adaptive_equals_torch", mesh, 30, ranks)
    assert_storage_is_exact(found)
    assert_troubles_are_shared(found)
    assert_mixes_precisions(found)
    assert_adapts_as_torch(found, apart=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_updates_are_those_of_one_process_while_plan_and_mesh_are_drawn_anew(ranks: int, tmp_path: Path) -> None:
    what = "equals_torch_on_all_meshes"
    found = run_ranks(tmp_path, what, f"shard={ranks}", 200, ranks)
    assert_equals_torch([{"equals_torch": one[what]} for one in found], 200, apart=3e-7)
    assert {one[what]["meshes"] for one in found} == {len(Mesh.all_of(ranks))}


@pytest.mark.slow
def test_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    for part, (mesh, ranks) in enumerate([("shard=2", 2), ("dp=2,shard=2", 4), ("shard=3", 3), ("dp=2", 2)]):
        run_on_ranks("elastic_rank.py", tmp_path, part, mesh, 5, ranks=ranks)
        found = json.loads((tmp_path / f"part{part}.json").read_text())
        assert found["steps"] == 5 * (part + 1)
        assert found["apart"] <= 3e-7
        assert found["loss_apart"] <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["shard=2", "dp=2", "tp=2"])
def test_profile_of_a_mesh_predicts_the_memory_of_its_plans(mesh: str) -> None:
    name = "shared" if "tp" in mesh else "transformer"
    job, ranks = f"{TESTS / 'rank_jobs.py'}:{name}", RankOptions(count=2, engine="fsdp2", mesh=mesh)
    found = profile_on_ranks(job, ranks, device_name="these", fingerprint="", options=ProfilerOptions.lean())
    space, draw = found.space, np.random.default_rng(7)
    assert {"gathered", "gathered-recompute"} <= set(space.storages) or mesh != "shard=2"
    plans = [space.baseline(), space.leanest(), *(space.sample(draw) for _ in range(8))]
    peaks = peaks_of(job, ranks, plans)
    missed = [peak_bytes(found, plan) / peaks[plan] - 1 for plan in plans]
    assert float(np.median(np.abs(missed))) < 0.01
    # A k between profiled ones is interpolated.
    assert max(map(abs, missed)) < 0.03


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_planner_plans_for_a_mesh_and_writes_it_into_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = f"{TESTS / 'rank_jobs.py'}:transformer"
    command = ["tune", job, "--method", "exact", "--memory-budget", "60%", "--engine", "fsdp2", "--mesh", "all"]
    assert run([*command, "--runs-dir", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["meshes"]) == {"dp=2", "shard=2"}
    assert document["plan"]["launch"]["mesh"] in document["meshes"]
    measured = document["measured"]
    assert measured["peak_bytes"] <= measured["memory_budget_bytes"]
    assert document["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)


@pytest.mark.slow
def test_overhead_is_measured_against_a_loop_of_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "overhead", "--job", str(TESTS / "tiny_job.py"), "--engine", "fsdp2", "--pairs", "4", "--json"]
    assert run([*command, "--runs-dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["engine"], document["layout"], document["pairs"]) == ("fsdp2", "shard=2", 4)
    low, high = document["ratio_ci95"]
    assert low <= document["ratio_median"] <= high


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_arms_are_compared_on_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(TESTS / "tiny_job.py")
    arms = "baseline,recompute-all,baseline+reduce=bf16"
    command = ["compare", job, "--engine", "fsdp2", "--arms", arms, "--seeds", "2", "--json"]
    assert run([*command, "--runs-dir", str(tmp_path), "--report-to", "none"]) == 0
    document = json.loads(capsys.readouterr().out)
    baseline, lean, rounded = document["arms"]
    assert rounded["name"] == "baseline+reduce=bf16"
    assert [one["reached"] for one in rounded["runs"]] == [True] * 2
    # Ranks of their own have added up in bf16.
    assert rounded["runs"][0]["final_metric"] != baseline["runs"][0]["final_metric"]
    assert [one["reached"] for one in (*baseline["runs"], *lean["runs"])] == [True] * 4
    assert min(one["peak_bytes"] for one in baseline["runs"]) > max(one["peak_bytes"] for one in lean["runs"])
    unsent = [*command[:5], "baseline,baseline+reduce=powersgd2", "--seeds", "2"]
    assert run([*unsent, "--runs-dir", str(tmp_path)]) == 2
    assert "between replicas, of which mesh shard=2 has none" in capsys.readouterr().err
