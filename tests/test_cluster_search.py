"""Tests of the search over layouts: its optimum is that of brute force, and its proof holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cost_model.cluster.choices import parse_choices, parse_counts, parse_rate
from autotune.cost_model.cluster.constants import fitted
from autotune.cost_model.cluster.estimate import Estimate, estimate_layout
from autotune.cost_model.cluster.layout import CHECKPOINTING, Layout
from autotune.cost_model.cluster.machines import find_machine
from autotune.cost_model.cluster.search import Question, divisors, layouts, search
from autotune.cost_model.cluster.transformer import Transformer
from autotune.errors import BudgetError, InputError

SMALL = Transformer.of_sizes(layers=12, hidden=1024, heads=16, vocab=50_304, kv_heads=4)
SEVEN = Transformer(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128_256, gated=True)
HUGE = Transformer(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128_256, gated=True)
H100 = find_machine("h100")


def asked(model: Transformer = SMALL, devices: int = 16, **changes: object) -> Question:
    base = Question(model=model, machine=H100, devices=devices, sequence=2048, budget_bytes=H100.capacity_bytes)
    return replace(base, **changes)  # type: ignore[arg-type]


def all_estimates(question: Question) -> list[Estimate]:
    return [
        estimate_layout(question.model, one, question.machine, fitted(), budget_bytes=question.budget_bytes)
        for one in layouts(question)
    ]


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from([16, 24, 32]),
    st.floats(0.02, 1.0),
    st.sampled_from([{}, {"tp": 2}, {"checkpointing": "full"}, {"zero_stage": 3}]),
)
def test_the_searchs_optimum_is_that_of_brute_force(
    devices: int, batch: int, share: float, fixed: dict[str, object]
) -> None:
    question = asked(devices=devices, global_batch=batch, budget_bytes=share * H100.capacity_bytes, fixed=fixed)
    every = all_estimates(question)
    fitting = [one for one in every if one.fits]
    if not fitting:
        with pytest.raises((BudgetError, InputError)):
            search(question, fitted())
        return
    answer = search(question, fitted(), count=3)
    assert answer.gap == 0
    assert answer.best[0].tokens_per_s == pytest.approx(max(one.tokens_per_s for one in fitting), rel=1e-12)
    meshes: dict[tuple[int, ...], float] = {}
    for one in fitting:
        mesh = (one.layout.tp, one.layout.pp, one.layout.cp)
        meshes[mesh] = max(meshes.get(mesh, 0.0), one.tokens_per_s)
    best = sorted(meshes.values(), reverse=True)[:3]
    assert [one.tokens_per_s for one in answer.best] == pytest.approx(best, rel=1e-12)


def test_every_layout_uses_all_devices_and_the_asked_batch() -> None:
    question = asked(devices=24, global_batch=48)
    found = list(layouts(question))
    assert len(found) == len(set(found)) > 500
    for one in found:
        assert one.devices == 24
        assert one.global_batch == 48
        assert SMALL.heads % one.tp == SMALL.kv_heads % one.tp == 0
        assert one.micro_batches >= one.pp


def test_a_batch_that_nobody_asked_for_is_about_four_million_tokens() -> None:
    # Of the last, data parallelism over all devices would take twice as many sequences.
    for devices, sequence in ((8, 2048), (24, 2048), (64, 131_072)):
        fixed = {"checkpointing": "full", "checkpointed": 1.0}
        answer = search(asked(devices=devices, sequence=sequence, fixed=fixed), fitted())
        for one in answer.best:
            assert 2**22 <= one.layout.tokens_per_step <= 1.26 * 2**22


def test_what_does_not_fit_is_never_proposed_and_less_memory_is_never_faster() -> None:
    rates = []
    for share in (0.2, 0.3, 0.5, 1.0):
        question = asked(SEVEN, 16, sequence=8192, budget_bytes=share * H100.capacity_bytes, fixed={"cp": 1})
        answer = search(question, fitted())
        assert all(one.memory.total <= question.budget_bytes for one in answer.best)
        rates.append(answer.best[0].tokens_per_s)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_a_model_that_fits_on_no_layout_is_refused_with_what_it_needs() -> None:
    with pytest.raises(BudgetError, match=r"the smallest needs \d+\.\d GB"):
        search(asked(HUGE, 8, sequence=8192), fitted())


def test_a_slower_network_is_never_faster() -> None:
    slow_machine = replace(H100, node_link=H100.node_link / 100)
    quick, slow = (
        search(asked(SEVEN, 16, sequence=8192, machine=one, fixed={"cp": 1}), fitted()).best[0].tokens_per_s
        for one in (H100, slow_machine)
    )
    assert slow < quick


def test_a_search_that_ends_early_tells_by_how_much_it_may_be_wrong() -> None:
    question = asked(HUGE, 512, sequence=8192, fixed={"tp": 8, "zero_stage": 1})
    early, whole = search(question, fitted(), limit_s=0.0), search(question, fitted())
    assert whole.gap == 0
    assert 0 < early.gap < 1
    # The optimum lies within the gap.
    assert whole.best[0].tokens_per_s * (1 - early.gap) <= early.best[0].tokens_per_s * (1 + 1e-9)
    assert early.to_json()["proven"] is False


@pytest.mark.parametrize(
    ("devices", "batch", "most"),
    [(512, 0, 60_000), (100_000, 0, 60_000), pytest.param(98_304, 0, 150_000, marks=pytest.mark.slow)],
)
def test_large_searches_are_proven_after_a_bounded_number_of_layouts(devices: int, batch: int, most: int) -> None:
    answer = search(asked(HUGE, devices, sequence=8192, global_batch=batch), fitted())
    assert answer.gap == 0
    assert answer.evaluated + answer.too_large < most


def test_a_given_share_of_recomputing_blocks_is_kept() -> None:
    for fixed in ({"checkpointed": 0.3}, {"checkpointed": 0.3, "checkpointing": "full"}):
        kinds = {(one.checkpointing, one.checkpointed) for one in layouts(asked(devices=4, fixed=fixed))}
        assert kinds == {(kind, 0.3) for kind in (CHECKPOINTING if len(fixed) == 1 else ("full",))}


def test_divisors_are_all_of_them() -> None:
    for number in (1, 2, 12, 36, 97, 100_000):
        assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tp": 3}, "a mesh of 3 does not divide 16 devices"),
        ({"tp": 8}, "tp=8 does not divide 16 heads and 4 heads of keys and values"),
        ({"pp": 8}, "pp=8 stages cannot hold 12 layers"),
        ({"tp": 2, "pp": 16}, "a mesh of 32 does not divide 16"),
        ({"dp": 5}, "a mesh of 5 does not divide"),
        ({"dp": 8, "shard": 3}, "dp=8 is not replicas x shard, of which 3 is given"),
        ({"zero_stage": 1, "shard": 2, "dp": 4}, "no mesh of 16 devices suits .* zero=1"),
        ({"zero_stage": 2, "pp": 2}, "zero=2 shards gradients"),
        ({"pp": 1, "virtual_stages": 2}, "virtual_stages=2 needs more than one pipeline stage"),
        ({"pp": 4, "virtual_stages": 2}, "virtual_stages=2 of pp=4 stages cannot hold 12 layers"),
        ({"cp": 16, "tp": 1}, "cp=16 does not split sequences of 2072"),
        ({"micro_batch": 4096}, "micro_batch=4096 exceeds steps of 2048 sequences"),
    ],
)
def test_impossible_meshes_are_refused_with_the_reason(fixed: dict[str, int], message: str) -> None:
    sequence = 2072 if "cp" in fixed else 2048
    with pytest.raises(InputError, match=message):
        search(asked(fixed=fixed, sequence=sequence), fitted())


def test_virtual_stages_hold_equal_parts_and_may_be_given() -> None:
    every = list(layouts(asked(HUGE, 512, sequence=8192, fixed={"tp": 8, "cp": 1, "zero_stage": 1})))
    assert {one.virtual_stages for one in every} == {1, 2, 4, 8}
    for one in every:
        stages = one.pp * one.virtual_stages
        assert stages == 1 or HUGE.layers % stages == 0 or (HUGE.layers + 2) % stages == 0
    fixed = {"pp": 2, "virtual_stages": 3, "zero_stage": 1}
    given = list(layouts(asked(fixed=fixed)))
    assert given
    assert {(one.pp, one.virtual_stages) for one in given} == {(2, 3)}


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    with pytest.raises(InputError, match="no mesh of 16 devices suits"):
        search(asked(devices=16, global_batch=1, fixed={"tp": 1, "cp": 1, "pp": 1}), fitted())


def test_choices_are_parsed_into_fields_of_the_layout() -> None:
    fixed, settings_ = parse_choices("tp=8, k=4,zero=3,checkpointing=full,checkpointed=50%,compile=no,float8=yes")
    assert fixed == {
        "tp": 8,
        "micro_batches": 4,
        "zero_stage": 3,
        "checkpointing": "full",
        "checkpointed": 0.5,
    }
    assert settings_ == {"compiled": False, "float8": True}
    assert parse_choices("") == ({}, {})
    Layout(**fixed, **settings_)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "tp has no value"),
        ("check=full", "'check=full' is not a choice"),
        ("tp=0", "tp is '0'"),
        ("tp=two", "tp is 'two'"),
        ("zero=4", "zero is '4'"),
        ("compile=perhaps", "compile is 'perhaps'"),
        ("checkpointing=ful", "did you mean 'full'"),
        ("checkpointed=0", "checkpointed is '0'"),
        ("tp=1,tp=2", "tp is given twice"),
    ],
)
def test_wrong_choices_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_choices(text)


def test_rates_have_units_of_bytes_or_bits() -> None:
    assert parse_rate("400GB/s", where="--link") == 400e9
    assert parse_rate("3200 Gbit/s", where="--link") == 400e9
    assert parse_rate("800Gbps", where="--link") == 100e9
    for text in ("400", "fast", "0GB/s", "-1GB/s", "1e3GB/s"):
        with pytest.raises(InputError, match="a rate with its unit"):
            parse_rate(text, where="--link")


def test_numbers_of_devices_are_sorted_and_whole() -> None:
    assert parse_counts("128, 64,64", where="--devices") == (64, 128)
    for text in ("", "0", "8,x", "1.5", "-8", str(10**9)):
        with pytest.raises(InputError, match="--devices"):
            parse_counts(text, where="--devices")


def test_more_devices_train_faster_until_the_batch_runs_out() -> None:
    rates = [
        search(asked(SEVEN, count, sequence=8192, fixed={"cp": 1, "pp": 1}), fitted()).best[0].tokens_per_s
        for count in (8, 32, 128)
    ]
    assert rates == sorted(rates)
    assert rates[-1] > 8 * rates[0]
