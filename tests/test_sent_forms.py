"""Tests of gradients and weights that ranks send in other forms than their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import odd_rank_jobs
import pytest
import sharded_rank
import torch
from rank_laws import assert_sent_otherwise, run_ranks
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

from autotune import knobs
from autotune.campaign import comparison_campaign
from autotune.cli.main import run
from autotune.commands import tuning
from autotune.engines.deepspeed_config import engine_config
from autotune.engines.fsdp2_engine import Fsdp2Engine
from autotune.engines.torch_engine import TorchEngine
from autotune.errors import InputError, JobError
from autotune.job import Job
from autotune.knobs import Communication
from autotune.launching import launched, split
from autotune.mechanics.powersgd import LowRankAverage
from autotune.mechanics.sent_forms import RoundedGather, SentForms
from autotune.mesh import Mesh
from autotune.profiling.sent_error import sent_error
from autotune.records.requests import Ranks

TESTS = Path(__file__).parent
SHAPES = ((24, 32), (7,), (16, 3, 3, 4), (2, 2))


@pytest.fixture
def alone() -> Iterator[None]:
    """Make a process group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def gradients(steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(steps)]


class Bucket:
    """One parameter's gradient, as torch's hook for DDP takes it."""

    def __init__(self, place: int, gradient: torch.Tensor) -> None:
        self.place, self.flat, self.shape = place, gradient.flatten().clone(), gradient.shape

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return [self.flat.view(self.shape)]

    def index(self) -> int:
        return self.place

    def is_last(self) -> bool:
        return self.place == len(SHAPES) - 1


@pytest.mark.usefixtures("alone")
def test_low_rank_average_is_that_of_the_hook_of_torch() -> None:
    state = hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    state.iter = 2
    ours, compressed = LowRankAverage(2), (0, 2)
    for step, given in enumerate(gradients(6)):
        theirs = []
        for place, gradient in enumerate(given):
            bucket = Bucket(place, gradient)
            hooks.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
            theirs.append(bucket.flat.view(gradient.shape))
        if step:
            own = [gradient.clone() for gradient in given]
            ours(own)
            ours.keep()
            for gradient, expected, true in zip(own, theirs, given, strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
                assert torch.equal(gradient, true) == (gradient.shape in (SHAPES[1], SHAPES[3]))
        # Its factors begin at random.
        if step == 0:
            errors = {one: state.error_dict[one].view(SHAPES[one][0], -1) for one in compressed}
            factors = {one: state.q_memory_dict[one].view(-1, 2) for one in compressed}
            ours.load_state_dict({"errors": errors, "factors": factors})


@pytest.mark.usefixtures("alone")
def test_what_is_left_out_is_sent_later() -> None:
    average, sent = LowRankAverage(1), torch.zeros(SHAPES[0])
    true = gradients(1)[0][0]
    errors = []
    for step in range(1, 60):
        gradient = true.clone()
        average([gradient])
        average.keep()
        sent += gradient
        errors.append(float((sent / step - true).norm() / true.norm()))
    assert errors[0] > 0.5
    assert errors[-1] < errors[0] / 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_nothing_behind(place: int, value: float) -> None:
    average = LowRankAverage(2)
    first, bad, last = gradients(3)
    average(first)
    average.keep()
    before = average.state_dict()
    bad[place].view(-1)[3] = value
    average(bad)
    average.keep()
    assert all(bool(one.isnan().all()) for one in bad)
    after = average.state_dict()
    assert all(torch.equal(before[kind][one], after[kind][one]) for kind in before for one in before[kind])
    average(last)
    assert all(bool(one.isfinite().all()) for one in last)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_each_step_leaves_out_is_its_gradient_without_what_it_sent(dtype: torch.dtype) -> None:
    average = LowRankAverage(2)
    left = {place: torch.zeros(SHAPES[place]) for place in (0, 2)}
    for given in gradients(3):
        true = [one.to(dtype) for one in given]
        sent = [one.clone() for one in true]
        average(sent)
        # As clipping does, later.
        kept = [one.clone() for one in sent]
        for one in sent:
            one.mul_(0.1)
        average.keep()
        for place in left:
            left[place] += true[place].float() - kept[place].float()
            error = average.state_dict()["errors"][place].view(SHAPES[place])
            # A gradient in 16 bits rounds what is sent.
            torch.testing.assert_close(error, left[place], rtol=0, atol=0.1 if dtype is torch.bfloat16 else 1e-4)
            assert float(error.norm()) > 0.1


@pytest.mark.usefixtures("alone")
def test_what_is_kept_stays_where_it_is_in_memory() -> None:
    # On a CPU, the meter of a step does not see that memory from before it is freed.
    average, places = LowRankAverage(2), []
    for given in gradients(3):
        average(given)
        average.keep()
        places.append([one.data_ptr() for one in average.tensors()])
    assert places[0] == places[1] == places[2]


@pytest.mark.usefixtures("alone")
def test_a_gradient_that_is_zero_at_first_is_sent_later() -> None:
    average, sent = LowRankAverage(2), torch.zeros(24, 32)
    true = torch.zeros(24, 32)
    true[4:, 4:] = gradients(1)[0][0][4:, 4:]
    for step in range(41):
        gradient = true.clone() if step else torch.zeros_like(true)
        average([gradient])
        average.keep()
        sent += gradient
    assert float((sent / 40 - true).norm()) < 0.5 * float(true.norm())


@pytest.mark.usefixtures("alone")
def test_a_step_that_is_skipped_leaves_nothing_behind() -> None:
    average = LowRankAverage(2)
    first, second, third = gradients(3)
    average(first)
    average.keep()
    before = average.state_dict()
    # Finite entries, whose norm or whose product with a factor is not.
    for skipped in (second, [one * 1e37 for one in third]):
        average([one.clone() for one in skipped])
        average.drop()
        average.keep()
        after = average.state_dict()
        assert all(torch.equal(before[kind][one], after[kind][one]) for kind in before for one in before[kind])
    average(third)
    assert all(bool(one.isfinite().all()) for one in third)


@pytest.mark.usefixtures("alone")
def test_parameters_without_a_gradient_keep_what_they_have_not_sent() -> None:
    average = LowRankAverage(2)
    first, second, _ = gradients(3)
    average(first)
    average.keep()
    kept = average.state_dict()["errors"]
    average([None, *second[1:]])
    average.keep()
    assert torch.equal(average.state_dict()["errors"][0], kept[0])
    assert not torch.equal(average.state_dict()["errors"][2], kept[2])
    average([None, None, None, None])


@pytest.mark.usefixtures("alone")
def test_gathered_weights_are_rounded_except_where_they_are_judged() -> None:
    gather, group = RoundedGather(), distributed.group.WORLD
    assert group is not None
    shard = torch.randn(50)
    gathered = [gather.allocate([50], dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)]
    gather(gathered[0], shard, group)
    with SentForms(gather=gather).exact_weights():
        gather(gathered[1], shard, group)
    assert torch.equal(gathered[0], shard.bfloat16().float())
    assert torch.equal(gathered[1], shard)
    assert gather.rounds
    packed = torch.randint(256, (50,), dtype=torch.uint8)
    received = torch.empty_like(packed)
    gather(received, packed, group)
    assert torch.equal(received, packed)


# ------------------------------------------------------------------------------------------------------ launch choices


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("", Communication()),
        ("fused+reduce=bf16", Communication(reduces_in_16_bit=True)),
        ("reduce=powersgd4+gather=bf16", Communication(gradient_rank=4, gathers_in_16_bit=True)),
    ],
)
def test_launch_choices_name_the_form(text: str, sent: Communication) -> None:
    assert knobs.communication(text) == sent


@pytest.mark.parametrize("text", ["reduce=powersgd", "reduce=powersgd0", "reduce=fp8", "gather", "gather=fp16"])
def test_other_forms_are_rejected_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InputError, match=r"has no valid value .*allowed: \+(reduce|gather) with =bf16"):
        knobs.parsed(text, where="job")


def job_with(choice: str) -> Job:
    return launched(sharded_rank.make(), split(f"job+{choice}", where="test")[1])


@pytest.mark.parametrize("choice", ["reduce=bf16", "reduce=powersgd4", "gather=bf16"])
def test_one_process_sends_nothing(choice: str) -> None:
    job = launched(odd_rank_jobs.dropped, split(f"job+{choice}", where="test")[1])
    with pytest.raises(JobError, match=rf"\+{choice} is of no use: one process .*allowed: --ranks"):
        TorchEngine(job)


@pytest.mark.parametrize("choice", ["reduce=powersgd4", "gather=bf16"])
def test_deepspeed_cannot_send_so(choice: str) -> None:
    with pytest.raises(InputError, match=rf"\+{choice} is not possible .*allowed: .*--engine fsdp2"):
        engine_config(job_with(choice), 1)


@pytest.mark.parametrize(
    ("choice", "mesh", "dimension"),
    [
        ("reduce=powersgd4", "shard=2", "dp"),
        ("gather=bf16", "dp=2", "shard"),
        ("gather=bf16+reduce=bf16", "dp=2,tp=2", "shard"),
    ],
)
def test_a_mesh_must_have_ranks_that_receive(choice: str, mesh: str, dimension: str) -> None:
    with pytest.raises(InputError, match=rf"mesh {mesh} has none .*allowed: a mesh with {dimension}=2 or more"):
        knobs.require_receivers(choice, Mesh.parse(mesh))
    knobs.require_receivers(choice, Mesh.parse("dp=2,shard=2"))


@pytest.mark.usefixtures("alone")
def test_error_is_none_where_all_is_sent_as_it_is() -> None:
    assert sent_error(sharded_rank.make(), Fsdp2Engine) is None


# ------------------------------------------------------------------------------------------------------- several ranks

FORMS = [
    ("shard=2+reduce=bf16", 2, 0.1),
    ("dp=2+reduce=bf16", 2, 0.1),
    ("dp=2,shard=2+reduce=bf16", 4, 0.1),
    ("shard=2+gather=bf16", 2, 0.1),
    ("dp=2+reduce=powersgd2", 2, 1.0),
    ("dp=2,shard=2+reduce=powersgd2+gather=bf16", 4, 1.0),
    ("dp=2,tp=2+reduce=powersgd2", 4, 1.0),
    ("shard=2,tp=2+reduce=bf16", 4, 0.1),
    # No matrix is so large that it would be compressed.
    ("dp=2,shard=2+reduce=powersgd999", 4, 1e-5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks", "most"), FORMS, ids=[form[0] for form in FORMS])
def test_updates_differ_little_where_ranks_send_less(layout: str, ranks: int, most: float, tmp_path: Path) -> None:
    assert_sent_otherwise(run_ranks(tmp_path, "sent_otherwise", layout, 20, ranks), most)


@pytest.mark.parametrize(
    ("options", "choice", "words"),
    [
        (["--engine", "fsdp2", "--mesh", "dp=2"], "gather=bf16", "+gather is between shards"),
        ([], "reduce=bf16", "+reduce=bf16 is of no use"),
        (["--engine", "deepspeed"], "reduce=powersgd1", "+reduce=powersgd1 is not possible"),
        (["--engine", "pipeline"], "reduce=bf16", "+reduce=bf16 is not possible"),
    ],
)
def test_a_comparison_refuses_what_is_not_possible_before_anything_is_run(
    options: list[str],
    choice: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(comparison_campaign, "_horizon", lambda _: pytest.fail("a training has begun"))
    command = ["compare", str(TESTS / "tiny_job.py"), *options, "--arms", f"baseline,baseline+{choice}"]
    assert run([*command, "--seeds", "2", "--runs-dir", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert not any(tmp_path.glob("*compare*"))


def test_all_meshes_are_those_with_receivers() -> None:
    asked = {str(mesh): Ranks(engine="fsdp2", count=4, zero_stage=0, mesh=str(mesh)) for mesh in Mesh.all_of(4)}

    def found(choice: str) -> list[str]:
        job = launched(odd_rank_jobs.dropped, split(f"job+{choice}", where="test")[1])
        return list(tuning._with_receivers(asked, job))

    assert found("gather=bf16") == [mesh for mesh in asked if "shard" in mesh]
    assert found("reduce=powersgd2") == [mesh for mesh in asked if "dp" in mesh]
    assert found("reduce=bf16") == list(asked)
    alone = {"dp=4": asked["dp=4"]}
    job = launched(odd_rank_jobs.dropped, split("job+gather=bf16", where="test")[1])
    with pytest.raises(InputError, match="of which mesh dp=4 has none"):
        tuning._with_receivers(alone, job)
