"""Tests of controls: a plan is applied to a model and removed without a trace."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_jobs import differences, recomputed
from small_models import Block, Perceptron, TinyConvolution, TinyGPT, has_bf16_lstm
from torch import nn

import autotune
from autotune import Plan, PlanError, Precision, Storage, find_units
from autotune.choices import EXACT_STORAGES
from autotune.mechanics import controls

GPT_UNITS = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
gpt_plans = st.builds(
    Plan,
    precision=st.dictionaries(st.sampled_from(GPT_UNITS), st.sampled_from(Precision)),
    storage=st.dictionaries(st.sampled_from(GPT_UNITS), st.sampled_from(EXACT_STORAGES)),
)
FULL = Plan(precision=dict.fromkeys(GPT_UNITS, "bf16"), storage=recomputed("blocks.0", "blocks.1", "blocks.2"))
TOKENS = torch.arange(8).reshape(2, 4)


def traces(model: nn.Module) -> dict[str, Any]:
    """Return everything that a plan must not change, with values by identity."""
    hooks = {
        name: {key: dict(value) for key, value in vars(module).items() if "hooks" in key and value is not None}
        for name, module in model.named_modules()
    }
    return {
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(value), value._version) for name, value in model.named_parameters()],
        "buffers": [(name, id(value), value._version) for name, value in model.named_buffers()],
        "state": list(model.state_dict()),
        "hooks": hooks,
        "training": [module.training for module in model.modules()],
    }


def instance_attributes(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value if key == "forward" else id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    model(TOKENS).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@given(gpt_plans)
def test_plan_changes_no_module_name_parameter_buffer_key_or_hook(plan: Plan):
    model = TinyGPT()
    before = traces(model)
    controls.apply(model, plan)
    assert traces(model) == before
    controls.remove(model)
    assert traces(model) == before


@given(st.lists(gpt_plans, max_size=4))
def test_every_instance_has_its_original_attributes_after_removal(plans: list[Plan]):
    model = TinyGPT()
    before = instance_attributes(model)
    for plan in plans:
        controls.apply(model, plan)
    controls.remove(model)
    assert instance_attributes(model) == before


@given(gpt_plans)
def test_only_units_with_choices_that_differ_from_the_users_are_controlled(plan: Plan):
    model = TinyGPT()
    controls.apply(model, plan)
    controlled = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert controlled == {
        name
        for name in GPT_UNITS
        if plan.precision_of(name) is not Precision.INHERIT or plan.storage_of(name) is not Storage.SAVE
    }
    assert set(controls.recomputations(model)) == controlled


@given(gpt_plans)
def test_applying_a_plan_twice_equals_applying_it_once(plan: Plan):
    model = TinyGPT()
    controls.apply(model, plan)
    before = instance_attributes(model)
    controls.apply(model, plan)
    assert instance_attributes(model) == before


@given(gpt_plans, gpt_plans)
def test_output_of_a_model_depends_only_on_the_last_plan(first: Plan, second: Plan):
    torch.manual_seed(0)
    model = TinyGPT()
    other = copy.deepcopy(model)
    controls.apply(model, first)
    controls.apply(model, second)
    controls.apply(other, second)
    assert differences(gradients(model), gradients(other)) == []


def test_released_model_gives_its_original_output():
    model = TinyGPT()
    expected = gradients(model)
    controls.apply(model, FULL)
    assert differences(expected, gradients(model)) != []
    controls.apply(model, Plan())
    assert differences(expected, gradients(model)) == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(precision={"blocks.9": "bf16"}), r"unit 'blocks.9' is not a module of the model"),
        (Plan(precision={"head": "bf16"}, storage=recomputed("heads")), r"unit 'heads' is not a module"),
    ],
)
def test_plan_with_an_unknown_unit_changes_nothing(plan, message):
    model = TinyGPT()
    controls.apply(model, FULL)
    before = instance_attributes(model)
    with pytest.raises(PlanError, match=message):
        controls.apply(model, plan)
    assert instance_attributes(model) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_unit_with_16_bit_parameters_only_supports_inherit(dtype, precision):
    model = TinyGPT().to(dtype)
    with pytest.raises(PlanError, match=rf"precision of 'head' is '{precision}' .*16-bit \(allowed: inherit\)"):
        controls.apply(model, Plan(storage=recomputed("blocks.0"), precision={"head": precision}))
    assert controls.recomputations(model) == {}
    controls.apply(model, Plan(storage=recomputed("blocks.0")))
    assert set(controls.recomputations(model)) == {"blocks.0"}


# ------------------------------------------------------------------------------------------ copies and pickles


def test_copy_of_a_controlled_model_is_plain_and_independent():
    model = TinyGPT()
    plain = gradients(model)
    controls.apply(model, FULL)
    controlled = gradients(model)
    copied = copy.deepcopy(model)
    assert controls.recomputations(copied) == {}
    assert differences(plain, gradients(copied)) == []
    # The original stays under control, and the copy has weights of its own.
    assert differences(controlled, gradients(model)) == []
    with torch.no_grad():
        copied.head.bias.add_(1)
    assert differences(controlled, gradients(model)) == []


def test_copied_unit_is_plain():
    model = TinyGPT(dropout=0.0)
    x = torch.randn(1, 3, 8)
    expected = model.blocks[0](x)
    controls.apply(model, Plan(precision={"blocks.0": "bf16"}))
    copied = copy.deepcopy(model.blocks[0])
    assert not torch.equal(model.blocks[0](x), expected)
    assert torch.equal(copied(x), expected)
    assert isinstance(copied.forward, types.MethodType)
    assert copied.forward.__self__ is copied


def test_copy_can_be_controlled_and_released_independently():
    model = TinyGPT()
    expected = gradients(model)
    controls.apply(model, FULL)
    copied = copy.deepcopy(model)
    controls.apply(copied, FULL)
    assert differences(gradients(model), gradients(copied)) == []
    controls.remove(copied)
    assert differences(expected, gradients(copied)) == []
    assert controls.recomputations(copied) == {}


LOAD_ELSEWHERE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "autotune":
            raise ImportError("this project is not installed here")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
model = torch.load(sys.argv[1], weights_only=False)
try:
    import autotune
except ImportError:
    pass
else:
    raise SystemExit("autotune could be imported")
torch.manual_seed(5)
model(torch.arange(8).reshape(2, 4)).square().mean().backward()
torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, sys.argv[3])
"""


def test_saved_controlled_model_loads_as_a_plain_model_without_this_package(tmp_path: Path):
    model = TinyGPT()
    expected = gradients(model)
    controls.apply(model, FULL)
    assert set(controls.recomputations(model)) == set(GPT_UNITS)
    model.zero_grad()
    torch.save(model, tmp_path / "model.pt")
    here = str(Path(__file__).parent)
    subprocess.run(
        [sys.executable, "-c", LOAD_ELSEWHERE, tmp_path / "model.pt", here, tmp_path / "gradients.pt"],
        check=True,
        timeout=120,
    )
    assert differences(expected, torch.load(tmp_path / "gradients.pt", weights_only=True)) == []


def test_pickled_controlled_model_mentions_no_module_of_this_package():
    model = TinyGPT()
    controls.apply(model, FULL)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"autotune" not in buffer.getvalue()
    assert b"small_models" in buffer.getvalue()


def test_state_dict_of_a_controlled_model_loads_into_a_plain_model():
    model, plain = TinyGPT(), TinyGPT()
    controls.apply(model, FULL)
    plain.load_state_dict(model.state_dict(), strict=True)
    controls.remove(model)
    assert differences(gradients(model), gradients(plain)) == []


# -------------------------------------------------------------------------------------- what the user arranged


def doubled(module: Block, x: torch.Tensor) -> torch.Tensor:
    return 2 * Block.forward(module, x)


def with_a_forward_of_its_own() -> TinyGPT:
    torch.manual_seed(0)
    model = TinyGPT()
    model.blocks[1].forward = types.MethodType(doubled, model.blocks[1])
    return model


def test_forward_set_by_the_user_on_an_instance_is_called_and_restored():
    model = with_a_forward_of_its_own()
    own = vars(model.blocks[1])["forward"]
    expected = gradients(model)
    controls.apply(model, Plan(storage=recomputed("blocks.1")))
    assert differences(expected, gradients(model)) == []
    assert controls.recomputations(model) == {"blocks.1": 1}
    controls.remove(model)
    assert vars(model.blocks[1])["forward"] is own
    assert differences(expected, gradients(model)) == []


def test_forward_set_by_the_user_on_an_instance_survives_a_copy():
    model = with_a_forward_of_its_own()
    expected = gradients(copy.deepcopy(model))
    controls.apply(model, Plan(storage=recomputed("blocks.1")))
    copied = copy.deepcopy(model)
    assert differences(expected, gradients(copied)) == []
    assert copied.blocks[1].forward.__self__ is copied.blocks[1]


class TwoWays(nn.Linear):
    """A module with a second forward method, which pickle finds by name."""

    def negative(self, x: torch.Tensor) -> torch.Tensor:
        return -self.forward_of_class(x)

    def forward_of_class(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, x)


def test_forward_set_by_the_user_on_an_instance_survives_a_pickle():
    model = nn.Sequential(TwoWays(2, 2))
    model[0].forward = model[0].negative
    x = torch.ones(1, 2)
    expected = model(x)
    controls.apply(model, Plan(storage=recomputed("0")))
    assert torch.equal(model(x), expected)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert controls.recomputations(loaded) == {}
    assert torch.equal(loaded(x), expected)


def test_inherit_keeps_the_users_outer_autocast():
    model = TinyGPT(dropout=0.0)
    seen: list[torch.dtype] = []
    model.blocks[0].mix.register_forward_hook(lambda module, args, output: seen.append(output.dtype))

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(TOKENS)

    expected = run()
    controls.apply(model, Plan(precision={"blocks.0": "inherit"}, storage=recomputed("blocks.0")))
    result = run()
    result.sum().backward()
    assert torch.equal(expected, result)
    assert expected.dtype is torch.bfloat16
    # It runs in the plain forward pass and in the controlled one; what a hook keeps in a recomputation is undone.
    assert seen == [torch.bfloat16] * 2


def test_fp32_unit_computes_in_fp32_within_an_outer_autocast_for_any_input():
    model = TinyGPT(dropout=0.0)
    seen: list[torch.dtype] = []
    model.blocks[1].mix.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    controls.apply(model, Plan(precision={"blocks.1": "fp32"}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(TOKENS)
    assert seen == [torch.float32]


def test_suspended_controls_restore_the_users_setup_and_can_be_resumed():
    model = TinyGPT()
    expected = gradients(model)
    controls.apply(model, FULL)
    controlled = gradients(model)
    with controls.suspended(model):
        assert differences(expected, gradients(model)) == []
    assert differences(controlled, gradients(model)) == []
    with pytest.raises(KeyError, match="user"), controls.suspended(model):
        raise KeyError("user")
    assert differences(controlled, gradients(model)) == []


def test_units_without_parameters_can_be_controlled():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    controls.apply(model, Plan(precision={"1": "bf16"}, storage=recomputed("1")))
    model(torch.ones(1, 2)).sum().backward()
    assert controls.recomputations(model) == {"1": 1}


# ------------------------------------------------------------------------------------------- canonical borders


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("storage", ["save", "recompute"])
def test_units_in_16_bit_compute_in_16_bit_and_return_fp32(precision, storage):
    model = TinyGPT()
    controls.apply(
        model,
        Plan(precision=dict.fromkeys(GPT_UNITS, precision), storage=dict.fromkeys(GPT_UNITS, storage)),
    )
    at_border: dict[str, list[torch.dtype]] = {}
    inside: list[torch.dtype] = []

    def spy(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            at_border.setdefault(name, []).append(output.dtype)

        return hook

    for name in GPT_UNITS:
        model.get_submodule(name).register_forward_hook(spy(name))
    model.blocks[0].out.register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    model(TOKENS).sum().backward()
    assert at_border == {name: [torch.float32] for name in GPT_UNITS}
    assert set(inside) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())


def test_outputs_in_tuples_dicts_and_recurrent_states_are_returned_in_fp32():
    class Trees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x)
            assert y.dtype is torch.bfloat16
            return {"pair": (y, [y, x.argmax()]), "text": "kept"}

    model = nn.ModuleDict({"trees": Trees(), "lstm": nn.LSTM(2, 2), "rnn": nn.GRU(2, 2)})
    controls.apply(model, Plan(precision=dict.fromkeys(("trees", "lstm", "rnn"), "bf16")), fp32_borders=True)
    result = model["trees"](torch.ones(1, 2))
    assert result["pair"][0].dtype is result["pair"][1][0].dtype is torch.float32
    assert result["pair"][1][1].dtype is torch.int64
    assert result["text"] == "kept"
    if has_bf16_lstm():
        output, (hidden, cell) = model["lstm"](torch.ones(3, 1, 2))
        assert output.dtype is hidden.dtype is cell.dtype is torch.float32


def test_output_of_a_transformers_model_keeps_its_class_and_is_returned_in_fp32():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(config)
            self.head = nn.Linear(8, 2)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.bert(tokens, output_hidden_states=True)

    model = Classifier().eval()
    plain = model(TOKENS)
    controls.apply(model, Plan(precision={"bert": "bf16"}))
    output = model(TOKENS)
    assert type(output) is type(plain)
    assert list(output.keys()) == list(plain.keys())
    for tensor in (output.last_hidden_state, output.pooler_output, *output.hidden_states):
        assert tensor.dtype is torch.float32
    assert not torch.equal(output.last_hidden_state, plain.last_hidden_state)
    torch.testing.assert_close(output.last_hidden_state, plain.last_hidden_state, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_recomputed_layers_of_a_transformers_model_give_bit_identical_gradients(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    if kind == "llama":
        # The cache for generation is on by default, even in training.
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attention_dropout=0.1))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    model.train()

    def run() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}

    expected = run()
    names = [unit.name for unit in find_units(model) if unit.recomputable]
    assert len(names) == 3
    controls.apply(model, Plan(storage=recomputed(*names)))
    assert differences(expected, run()) == []
    assert controls.recomputations(model) == dict.fromkeys(names, 1)


# -------------------------------------------------------------------------------------------- counts and order


def test_recomputations_are_counted_per_unit_from_the_start_of_control():
    model = TinyGPT()
    controls.apply(model, Plan(storage=recomputed("blocks.0", "blocks.2")))
    for _ in range(3):
        gradients(model)
    assert controls.recomputations(model) == {"blocks.0": 3, "blocks.2": 3}
    # A counter inside the unit counts only forward passes, as it would without a plan.
    assert [block.num_calls for block in model.blocks] == [3, 3, 3]
    controls.apply(model, Plan(storage=recomputed("blocks.0", "blocks.1")))
    gradients(model)
    assert controls.recomputations(model) == {"blocks.0": 4, "blocks.1": 1}


def test_forward_order_follows_first_calls_and_puts_uncalled_units_last():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(layer(x))
            return x

    model = Backwards()
    before = traces(model)
    names = ["unused", "layers.0", "layers.1", "layers.2"]
    order = controls.forward_order(model, names, lambda: model(torch.ones(1, 2)))
    assert list(order.items()) == [("layers.2", 2), ("layers.1", 2), ("layers.0", 2), ("unused", 0)]
    assert traces(model) == before


def test_recording_the_forward_order_leaves_no_hook_even_if_the_model_raises():
    model = Perceptron()
    before = traces(model)

    def fail() -> None:
        raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        controls.forward_order(model, ["layers.0"], fail)
    assert traces(model) == before


def test_user_hooks_fire_as_often_as_without_control():
    model = TinyConvolution()
    calls: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.blocks[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    images = torch.randn(2, 1, 4, 4, requires_grad=True)
    model(images).sum().backward()
    expected = list(calls)
    assert expected == ["before", "forward", "backward"]
    controls.apply(model, Plan(precision={"blocks.0": "bf16"}, storage=recomputed("blocks.0")))
    calls.clear()
    model(images).sum().backward()
    assert calls == expected


def test_a_saved_plan_is_applied_by_two_public_calls_and_taken_off_by_a_third(tmp_path: Path):
    plan = Plan(storage=recomputed("blocks.0", "blocks.2"))
    plan.save(tmp_path / "plan.json")
    model = TinyGPT()
    before, expected = traces(model), gradients(model)
    autotune.apply(model, autotune.Plan.load(tmp_path / "plan.json"))
    assert differences(expected, gradients(model)) == []
    assert controls.recomputations(model) == {"blocks.0": 1, "blocks.2": 1}
    autotune.detach(model)
    assert traces(model) == before
    assert controls.recomputations(model) == {}
