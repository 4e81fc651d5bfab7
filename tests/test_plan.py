"""Tests of plans and plan spaces: valid values, JSON, and the order of choices."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import Launch, Plan, PlanError, PlanSpace, Precision, Storage, Unit
from autotune.errors import InputError
from autotune.optimizers import KINDS

names = st.text(min_size=1, max_size=12)
launches = st.builds(
    Launch,
    zero_stage=st.none() | st.integers(0, 3),
    optimizer=st.none() | st.sampled_from(sorted(KINDS)),
    compile=st.none() | st.booleans(),
)
plans = st.builds(
    Plan,
    accumulation_steps=st.integers(1, 2**40),
    precision=st.dictionaries(names, st.sampled_from(Precision), max_size=6),
    storage=st.dictionaries(names, st.sampled_from(Storage), max_size=6),
    launch=launches,
)


def unit(name: str, *, recomputable: bool = True) -> Unit:
    return Unit(
        name=name, kind="Block", recomputable=recomputable, parameter_names=(f"{name}.weight",), num_parameters=4
    )


SPACE = PlanSpace(
    units=(
        unit("embedding", recomputable=False),
        unit("blocks.0"),
        unit("blocks.1"),
        unit("head", recomputable=False),
    ),
    accumulation_choices=(1, 2, 4),
    precisions=(Precision.FP32, Precision.BF16),
)


@st.composite
def spaces(draw: st.DrawFn) -> PlanSpace:
    flags = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    units = tuple(unit(f"unit{index}", recomputable=flag) for index, flag in enumerate(flags))
    choices = sorted(draw(st.sets(st.integers(2, 64), max_size=4)) | {1})
    precisions = draw(st.lists(st.sampled_from(Precision), min_size=1, max_size=4, unique=True))
    storages = draw(st.sampled_from([(Storage.SAVE,), tuple(Storage)]))
    return PlanSpace(units=units, accumulation_choices=tuple(choices), precisions=tuple(precisions), storages=storages)


# ---------------------------------------------------------------------------------------------- round trips


@given(plans)
def test_plan_round_trips_through_json(plan: Plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(plans)
def test_plan_survives_pickle_deepcopy_and_copy_with_its_hash_and_digest(plan: Plan):
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), copy.copy(plan)):
        assert copied == plan
        assert hash(copied) == hash(plan)
        assert copied.digest == plan.digest
        assert copied.to_json() == plan.to_json()


@given(plans, st.randoms(use_true_random=False))
def test_equal_plans_have_equal_hashes_and_digests_in_any_unit_order(plan: Plan, random):
    def shuffled(choices):
        items = list(choices.items())
        random.shuffle(items)
        return dict(items)

    other = plan.changed(precision=shuffled(plan.precision), storage=shuffled(plan.storage))
    assert other == plan
    assert hash(other) == hash(plan)
    assert other.digest == plan.digest
    assert len({plan, other}) == 1


@given(plans, plans)
def test_plans_are_equal_exactly_if_their_documents_are_equal(first: Plan, second: Plan):
    assert (first == second) == (first.to_json() == second.to_json())
    assert (first.digest == second.digest) == (first == second)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation_steps": 2},
        {"precision": {"a": "bf16", "b": "bf16"}},
        {"storage": {"a": "save"}},
        {"storage": {}},
        {"launch": Launch(zero_stage=1)},
        {"launch": Launch(compile=False)},
    ],
)
def test_plan_with_one_different_choice_is_a_different_plan(changes):
    plan = Plan(accumulation_steps=1, precision={"a": "bf16", "b": "fp32"}, storage={"a": "recompute"})
    assert plan.changed(**changes) != plan
    assert plan.changed(**changes).digest != plan.digest


def test_plan_equals_no_object_of_another_type():
    assert Plan() != Plan().to_json()


def test_digest_is_the_sha_256_of_sorted_json():
    plan = Plan(accumulation_steps=2, precision={"b": "bf16", "a": "fp32"})
    # A literal, because ranks and machines compare digests, so they must never change silently.
    text = '{"accumulation_steps":2,"precision":{"a":"fp32","b":"bf16"},"storage":{},"version":1}'
    assert plan.digest == hashlib.sha256(text.encode()).hexdigest()


def test_json_of_a_plan_is_the_documented_one():
    document = {
        "version": 1,
        "accumulation_steps": 4,
        "precision": {"embed": "fp32", "blocks.0": "bf16", "blocks.1": "bf16", "head": "bf16"},
        "storage": {"blocks.0": "recompute", "blocks.1": "save"},
        "launch": {"zero_stage": 2, "optimizer": "adamw", "compile": False},
    }
    assert Plan.from_json(document).to_json() == document


def test_plan_is_immutable():
    given_precision = {"a": "bf16"}
    plan = Plan(precision=given_precision)
    given_precision["a"] = "fp32"
    assert plan.precision_of("a") is Precision.BF16
    with pytest.raises(TypeError, match="does not support item assignment"):
        plan.precision["a"] = Precision.FP32
    with pytest.raises(AttributeError, match="cannot assign to field"):
        plan.accumulation_steps = 3


def test_unnamed_units_inherit_their_precision_and_save_activations():
    assert Plan().precision_of("anything") is Precision.INHERIT
    assert Plan().storage_of("anything") is Storage.SAVE


@pytest.mark.parametrize(
    ("precision", "scaled"), [("fp16", True), ("bf16", False), ("fp32", False), ("inherit", False)]
)
def test_plan_scales_the_loss_exactly_if_a_unit_is_fp16(precision, scaled):
    assert Plan(precision={"a": "fp32", "b": precision}).needs_loss_scaling is scaled


def test_only_bf16_and_fp16_are_16_bit():
    assert {precision for precision in Precision if precision.is_16_bit} == {Precision.BF16, Precision.FP16}


def test_a_plan_in_fp8_is_not_uniform_and_the_lowest_precision_is_a_16_bit_one():
    plan = Plan(precision={"a": "fp8", "b": "fp8"})
    assert plan.uniform_reduced is None
    assert not plan.needs_loss_scaling
    space = dataclasses.replace(SPACE, precisions=(Precision.FP32, Precision.FP8, Precision.BF16))
    assert space.lowest_precision is Precision.BF16
    assert dataclasses.replace(space, precisions=(Precision.FP32, Precision.FP8)).lowest_precision is Precision.FP32


def test_plan_describes_itself_in_one_line():
    plan = Plan(accumulation_steps=4, precision={"a": "bf16", "b": "bf16"}, storage={"a": "recompute"})
    assert str(plan) == "k=4, 2xbf16, 1 recomputed"


# ------------------------------------------------------------------------------------------------- refusals

GOOD = {
    "version": 1,
    "accumulation_steps": 2,
    "precision": {"a": "bf16"},
    "storage": {"a": "recompute"},
    "launch": {"zero_stage": 1},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 2}, r"unknown key 'k' \(allowed: accumulation_steps, launch, precision, storage\)"),
        ({"version": 2}, r"version is 2 \(allowed: 1\)"),
        ({"version": "1"}, r"version is '1' \(allowed: 1\)"),
        ({"version": True}, r"version is True \(allowed: 1\)"),
        ({"version": None}, r"version is None \(allowed: 1\)"),
        ({"accumulation_steps": 0}, r"accumulation_steps is 0 \(allowed: a whole number >= 1\)"),
        ({"accumulation_steps": -1}, r"accumulation_steps is -1 \(allowed: a whole number >= 1\)"),
        ({"accumulation_steps": 2.0}, r"accumulation_steps is 2.0 \(allowed: a whole number\)"),
        ({"accumulation_steps": True}, r"accumulation_steps is True \(allowed: a whole number\)"),
        ({"accumulation_steps": "2"}, r"accumulation_steps is '2' \(allowed: a whole number\)"),
        ({"accumulation_steps": None}, r"accumulation_steps is None \(allowed: a whole number\)"),
        ({"precision": {"a": "int8"}}, r"precision.a is 'int8' \(allowed: inherit, fp32, bf16, fp16, fp8\)"),
        ({"precision": {"a": None}}, r"precision.a is None \(allowed: inherit, fp32, bf16, fp16, fp8\)"),
        ({"precision": {"a": ["bf16"]}}, r"precision.a is \['bf16'\] \(allowed: inherit, "),
        ({"precision": ["a"]}, r"precision is \['a'\] \(allowed: an object\)"),
        ({"precision": None}, r"precision is None \(allowed: an object\)"),
        (
            {"storage": {"a": "elsewhere"}},
            r"storage.a is 'elsewhere' \(allowed: save, gathered, .*recompute\)",
        ),
        ({"storage": "save"}, r"storage is 'save' \(allowed: an object\)"),
        ({"launch": []}, r"launch is \[\] \(allowed: an object\)"),
        (
            {"launch": {"stage": 1}},
            r"unknown key 'launch.stage' \(allowed: compile, fp32, knobs, learning_rate, mesh, optimizer, pipeline, z",
        ),
        ({"launch": {"zero_stage": 4}}, r"launch.zero_stage is 4 \(allowed: 0, 1, 2, 3\)"),
        ({"launch": {"zero_stage": True}}, r"launch.zero_stage is True \(allowed: a whole number\)"),
        ({"launch": {"zero_stage": 1.0}}, r"launch.zero_stage is 1.0 \(allowed: a whole number\)"),
        ({"launch": {"optimizer": ""}}, r"launch.optimizer is '' \(allowed: adamw, adamw8bit, lamb, lion, sgd\)"),
        ({"launch": {"compile": 1}}, r"launch.compile is 1 \(allowed: true, false\)"),
    ],
)
def test_invalid_plan_is_rejected_with_key_value_and_allowed_values(change, message):
    with pytest.raises(PlanError, match=message) as raised:
        Plan.from_json({**GOOD, **change}, where="plan.json")
    assert str(raised.value).startswith("plan.json: ")
    assert "\n" not in str(raised.value)


def test_plan_without_accumulation_steps_or_version_is_rejected():
    with pytest.raises(PlanError, match="accumulation_steps is missing"):
        Plan.from_json({"version": 1})
    with pytest.raises(PlanError, match=r"version is None \(allowed: 1\)"):
        Plan.from_json({"accumulation_steps": 1})


@pytest.mark.parametrize("document", [[], ["version"], "plan", 1, None])
def test_document_that_is_not_an_object_is_rejected(document):
    with pytest.raises(PlanError, match=r"^plan\.json: "):
        Plan.from_json(document, where="plan.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(GOOD)) | st.text(max_size=6), json_values, max_size=4))
def test_any_json_gives_a_plan_or_one_plan_error(changes):
    message = ""
    try:
        plan = Plan.from_json({**GOOD, **changes}, where="plan.json")
    except PlanError as error:
        message = str(error)
    if message:
        assert message.startswith("plan.json: ")
        assert "\n" not in message
    else:
        assert Plan.from_json(plan.to_json()) == plan


def test_unit_names_must_be_text():
    with pytest.raises(PlanError, match="precision has the unit name 3"):
        Plan(precision={3: "bf16"})


# -------------------------------------------------------------------------------------------------- spaces


@given(spaces(), st.data())
def test_decoding_inverts_encoding_and_encoding_inverts_decoding(space: PlanSpace, data):
    indices = [data.draw(st.integers(0, size - 1)) for size in space.sizes]
    plan = space.decode(indices)
    assert space.encode(plan) == indices
    assert space.decode(space.encode(plan)) == plan
    assert space.check(plan) == plan


def test_space_has_as_many_plans_as_the_product_of_its_sizes():
    plans = {SPACE.decode(indices) for indices in np.ndindex(*SPACE.sizes)}
    assert SPACE.sizes == (3, 2, 2, 2, 2, 2, 2)
    assert len(plans) == 3 * 2**6


@given(st.integers(0, 2**32 - 1))
def test_sampled_plan_lies_in_the_space_and_repeats_under_its_seed(seed: int):
    plan = SPACE.sample(np.random.default_rng(seed))
    assert SPACE.check(plan) == plan
    assert SPACE.sample(np.random.default_rng(seed)) == plan


def test_sampling_reaches_every_choice():
    generator = np.random.default_rng(0)
    drawn = np.array([SPACE.encode(SPACE.sample(generator)) for _ in range(200)])
    for column, size in enumerate(SPACE.sizes):
        assert set(drawn[:, column]) == set(range(size))


@pytest.mark.parametrize(
    "indices", [[], [0] * 6, [0] * 8, [3, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 2], [0, -1, 0, 0, 0, 0, 0]]
)
def test_invalid_indices_are_rejected(indices):
    with pytest.raises(PlanError, match=r"do not fit \(allowed: one index below each of"):
        SPACE.decode(indices)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(accumulation_steps=3), r"accumulation_steps is 3 \(allowed: 1, 2, 4\)"),
        (
            Plan(precision={"blocks.7": "bf16"}),
            r"precision names unknown unit 'blocks.7' \(allowed: embedding, blocks.0, blocks.1, head\)",
        ),
        (
            Plan(storage={"embedding": "recompute"}),
            r"storage names unknown unit 'embedding' \(allowed: blocks.0, blocks.1\)",
        ),
        (
            Plan(precision={"head": "fp16"}),
            r"precision of 'head' is 'fp16' \(allowed: .*bf16.*fp32.*inherit\)",
        ),
    ],
)
def test_plan_outside_the_space_is_rejected_with_the_allowed_choices(plan, message):
    with pytest.raises(PlanError, match=message):
        SPACE.check(plan)


def test_checked_plan_names_every_unit():
    plan = SPACE.check(Plan(accumulation_steps=2, precision={"head": "bf16"}))
    assert dict(plan.precision) == {
        "embedding": Precision.INHERIT,
        "blocks.0": Precision.INHERIT,
        "blocks.1": Precision.INHERIT,
        "head": Precision.BF16,
    }
    assert dict(plan.storage) == {"blocks.0": Storage.SAVE, "blocks.1": Storage.SAVE}


def test_checked_plan_keeps_its_launch_options():
    assert SPACE.check(Plan(launch=Launch(zero_stage=2))).launch == Launch(zero_stage=2)


@pytest.mark.parametrize("plan", [Plan(), Plan(accumulation_steps=3, precision=SPACE.baseline().precision)])
def test_choice_without_an_index_cannot_be_encoded(plan):
    with pytest.raises(PlanError, match="a choice lies outside the space"):
        SPACE.encode(plan)


@given(spaces())
def test_baseline_is_the_first_choice_of_every_dimension(space: PlanSpace):
    assert space.encode(space.baseline()) == [0] * len(space.sizes)


@given(spaces())
def test_leanest_plan_recomputes_with_the_largest_k_and_a_reduced_precision(space: PlanSpace):
    plan = space.leanest()
    assert plan.accumulation_steps == max(space.accumulation_choices)
    assert all(plan.storage_of(name) is space.storages[-1] for name in space.recomputable)
    if any(precision.is_16_bit for precision in space.precisions):
        assert all(precision.is_16_bit for precision in plan.precision.values())
    assert space.check(plan) == plan


def test_bf16_is_preferred_to_fp16():
    units = (unit("a"),)
    both = PlanSpace(
        units=units, accumulation_choices=(1,), precisions=(Precision.FP32, Precision.FP16, Precision.BF16)
    )
    half = PlanSpace(units=units, accumulation_choices=(1,), precisions=(Precision.FP32, Precision.FP16))
    none = PlanSpace(units=units, accumulation_choices=(1,), precisions=(Precision.INHERIT,))
    assert [space.lowest_precision for space in (both, half, none)] == [
        Precision.BF16,
        Precision.FP16,
        Precision.INHERIT,
    ]


def test_storage_has_a_coordinate_only_if_it_can_be_chosen():
    assert SPACE.recomputable == ("blocks.0", "blocks.1")
    plan = SPACE.plan(accumulation_steps=1, precision=Precision.BF16, recomputed=["blocks.1"])
    assert dict(plan.storage) == {"blocks.0": Storage.SAVE, "blocks.1": Storage.RECOMPUTE}
    assert set(plan.precision.values()) == {Precision.BF16}


def test_leanest_plan_has_the_smallest_k_if_k_enlarges_steps():
    space = PlanSpace(units=(), accumulation_choices=(1, 2, 4), precisions=(Precision.FP32,), k_splits=False)
    assert space.leanest().accumulation_steps == 1
    assert dataclasses.replace(space, k_splits=True).leanest().accumulation_steps == 4


def test_space_without_recomputation_rejects_it():
    space = dataclasses.replace(SPACE, storages=(Storage.SAVE,))
    assert space.sizes == (3, 2, 2, 2, 2, 1, 1)
    with pytest.raises(PlanError, match=r"storage of 'blocks.0' is 'recompute' \(allowed: save\)"):
        space.check(Plan(storage={"blocks.0": "recompute"}))


def test_precisions_and_storages_have_the_expected_properties():
    assert [p.is_reduced for p in Precision] == [False, False, True, True, True]
    assert [p.needs_loss_scaling for p in Precision] == [False, False, False, True, False]
    assert [p.element_bytes for p in Precision] == [4, 4, 2, 2, 1]
    assert [p for p in Precision if p.asked_only] == ["fp8"]
    assert [s for s in Storage if s.needs_accelerator] == ["offload"]
    assert [s for s in Storage if s.recomputes] == ["gathered-recompute", "recompute"]
    assert [s for s in Storage if s.keeps_gathered] == ["gathered", "gathered-recompute"]
    assert [s.released for s in Storage if s.keeps_gathered] == ["save", "recompute"]
    compiled = ["compiled", "compiled50", "compiled20", "compiled10"]
    assert [s for s in Storage if not s.exact] == [*compiled[:2], "compress8", "compress4", *compiled[2:]]
    assert {s: s.compile_budget for s in Storage if s.compile_budget} == dict(
        zip(compiled, (1.0, 0.5, 0.2, 0.1), strict=True)
    )
    assert len({s.label for s in Storage} | {s.act for s in Storage}) == 2 * len(Storage)
    assert all(pickle.loads(pickle.dumps(choice)) is choice for choice in (*Precision, *Storage))


# ------------------------------------------------------------------------------------------------- files


@given(plans)
def test_a_plan_that_was_saved_is_loaded_as_it_was(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == Plan.load(path.parent) == plan


def test_saving_replaces_a_file_and_says_why_it_cannot(tmp_path: Path) -> None:
    Plan(accumulation_steps=2).save(tmp_path / "plan.json")
    Plan(accumulation_steps=4).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path).accumulation_steps == 4
    with pytest.raises(PlanError, match=r"none/plan.json: cannot be written: .* \(allowed: a writable file\)"):
        Plan().save(tmp_path / "none" / "plan.json")
    with pytest.raises(InputError, match="is a folder"):
        Plan().save(tmp_path)


def test_a_plan_file_that_is_missing_or_wrong_is_named_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan\.json"):
        Plan.load(tmp_path)
    (tmp_path / "other.json").write_text('{"version": 1, "accumulation_steps": 1, "storag": {}}')
    with pytest.raises(PlanError, match=r"other\.json.*storag"):
        Plan.load(tmp_path / "other.json")
