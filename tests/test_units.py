"""Tests of units: which parts of a model can be tuned, and where shared parameters are counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import TinyConvolution, TinyGPT
from torch import nn

from autotune import JobError, Unit, find_units, name_units


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.convolution(x))


class ResNetByAttributes(nn.Module):
    """A ResNet with its four stages as attributes, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 1)
        self.bn1 = nn.BatchNorm2d(2)
        for index, blocks in enumerate((3, 4, 6, 3)):
            setattr(self, f"layer{index + 1}", nn.Sequential(*(Residual() for _ in range(blocks))))
        self.fc = nn.Linear(2, 10)


class ResNetByNesting(nn.Module):
    """A ResNet with its four stages in a container."""

    def __init__(self, container: Callable[[list[nn.Module]], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 1)
        self.stages = container([nn.Sequential(*(Residual() for _ in range(n))) for n in (3, 4, 6, 3)])
        self.head = nn.Linear(2, 10)


def names(units: tuple[Unit, ...], *, recomputable: bool) -> list[str]:
    return [unit.name for unit in units if unit.recomputable is recomputable]


def blocks_of(prefix: str) -> list[str]:
    return [f"{prefix}{stage}.{block}" for stage, n in enumerate((3, 4, 6, 3)) for block in range(n)]


def test_all_16_blocks_of_a_resnet_with_stages_as_attributes_are_units():
    units = find_units(ResNetByAttributes())
    assert names(units, recomputable=True) == [
        f"layer{stage + 1}.{block}" for stage, n in enumerate((3, 4, 6, 3)) for block in range(n)
    ]
    assert names(units, recomputable=False) == ["conv1", "bn1", "fc"]


@pytest.mark.parametrize(
    "container",
    [lambda stages: nn.Sequential(*stages), nn.ModuleList],
    ids=["Sequential of Sequentials", "ModuleList of Sequentials"],
)
def test_all_16_blocks_of_a_resnet_with_nested_stages_are_units(container):
    units = find_units(ResNetByNesting(container))
    assert names(units, recomputable=True) == blocks_of("stages.")
    assert names(units, recomputable=False) == ["stem", "head"]


def test_all_16_blocks_of_a_module_list_of_module_lists_are_units():
    model = nn.Module()
    model.stages = nn.ModuleList(nn.ModuleList(Residual() for _ in range(n)) for n in (3, 4, 6, 3))
    assert names(find_units(model), recomputable=True) == blocks_of("stages.")


def test_stages_behind_a_projection_are_searched():
    class Projected(Residual):
        pass

    model = nn.Module()
    model.stages = nn.Sequential(
        *(nn.Sequential(Projected(), *(Residual() for _ in range(n - 1))) for n in (3, 4, 6, 3))
    )
    units = find_units(model)
    assert names(units, recomputable=True) == [
        f"stages.{stage}.{block}" for stage, n in enumerate((3, 4, 6, 3)) for block in range(1, n)
    ]
    assert names(units, recomputable=False) == [f"stages.{stage}.0" for stage in range(4)]


def test_blocks_that_are_sequentials_are_whole_units():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)))
    assert [(unit.name, unit.kind, unit.recomputable) for unit in find_units(model)] == [
        ("0", "Sequential", True),
        ("1", "Sequential", True),
        ("2", "Sequential", True),
    ]


def test_outer_run_of_blocks_hides_inner_runs():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    model = nn.Module()
    model.blocks = nn.ModuleList(Wide() for _ in range(2))
    assert [unit.name for unit in find_units(model)] == ["blocks.0", "blocks.1"]


def test_single_block_is_not_a_run():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2)])
    assert [(unit.name, unit.recomputable) for unit in find_units(model)] == [("blocks.0", False)]


def test_neighbour_of_another_class_ends_a_run():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    units = find_units(model)
    assert [(unit.name, unit.recomputable) for unit in units] == [("0", True), ("1", True), ("3", False)]


def test_blocks_in_turns_are_units():
    class Mixer(Residual):
        pass

    blocks = [nn.ModuleList([nn.LayerNorm(2), Residual(), Mixer()]) for _ in range(3)]
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(blocks))
    assert names(find_units(model), recomputable=True) == [
        f"1.{block}.{place}" for block in range(3) for place in (1, 2)
    ]


class DenseBlock(nn.ModuleDict):
    """A dictionary of layers that runs them itself, as in torchvision's DenseNet."""

    def __init__(self, layers: int) -> None:
        super().__init__({f"layer{index}": Residual() for index in range(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def test_layers_of_a_dense_net_are_units():
    stages = {"conv": nn.Conv2d(1, 2, 1), "dense0": DenseBlock(3), "pool": nn.AvgPool2d(2), "dense1": DenseBlock(2)}
    model = nn.Module()
    model.features = nn.Sequential()
    for name, stage in stages.items():
        model.features.add_module(name, stage)
    expected = [f"features.dense{stage}.layer{layer}" for stage, n in enumerate((3, 2)) for layer in range(n)]
    assert names(find_units(model), recomputable=True) == expected
    assert names(find_units(model), recomputable=False) == ["features.conv"]


def test_blocks_in_dictionaries_within_a_list_are_units():
    class Mixer(Residual):
        pass

    model = nn.Module()
    model.blocks = nn.ModuleList(
        nn.ModuleDict({"norm": nn.LayerNorm(2), "mixer": Mixer(), "feed": Residual()}) for _ in range(2)
    )
    expected = [f"blocks.{block}.{part}" for block in range(2) for part in ("mixer", "feed")]
    assert names(find_units(model), recomputable=True) == expected


def test_single_layers_in_a_dictionary_are_not_worth_recomputing():
    parts = {"tokens": nn.Embedding(5, 2), "places": nn.Embedding(5, 2), "blocks": nn.ModuleList([A(), A()])}
    model = nn.Module()
    model.transformer = nn.ModuleDict(parts)
    assert names(find_units(model), recomputable=True) == ["transformer.blocks.0", "transformer.blocks.1"]


class Net(nn.Module):
    """A module that holds others as attributes."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


class Down(Net):
    pass


def doubled(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, width, 1), nn.ReLU(), nn.Conv2d(width, 2, 1), nn.ReLU())


def test_blocks_that_are_attributes_are_units_of_a_model_without_lists():
    model = Net(stem=doubled(2), down1=Down(a=doubled(2)), down2=Down(a=doubled(4)), up=Net(b=doubled(2)))
    assert names(find_units(model), recomputable=True) == ["down1", "down2"]
    assert names(find_units(model), recomputable=False) == ["stem", "up"]
    listed = nn.Sequential(model, nn.Sequential(A(), A()))
    assert names(find_units(listed), recomputable=True) == ["1.0", "1.1"]


def test_sequentials_that_are_attributes_are_units_if_they_are_alike():
    head = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(2, 2))
    assert names(find_units(Net(one=doubled(2), two=doubled(3), head=head)), recomputable=True) == ["one", "two"]
    assert not names(find_units(Net(features=doubled(2), head=head)), recomputable=True)


def test_towers_in_a_dictionary_are_searched_for_their_blocks():
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Residual() for _ in range(2))

    model = nn.ModuleDict({"image": Tower(), "text": Tower()})
    expected = [f"{tower}.blocks.{block}" for tower in ("image", "text") for block in range(2)]
    assert names(find_units(model), recomputable=True) == expected


def test_stages_in_turns_are_searched_for_their_blocks():
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Residual() for _ in range(2))

    class Down(Stage):
        pass

    model = nn.Sequential(nn.ModuleList([Down(), Stage(), Down(), Stage()]))
    expected = [f"0.{stage}.blocks.{block}" for stage in range(4) for block in range(2)]
    assert names(find_units(model), recomputable=True) == expected


def test_unit_that_another_block_holds_is_no_part_of_a_second_unit():
    class Holder(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block, self.norm = block, nn.BatchNorm2d(2)

    class Mixer(Residual):
        pass

    shared = Residual()
    for blocks in ([shared, Holder(shared), Residual(), Holder(shared)], [Holder(shared), Mixer(), shared, Mixer()]):
        model = nn.Sequential(nn.ModuleList(blocks))
        units = [model.get_submodule(name) for name in names(find_units(model), recomputable=True)]
        parts = [part for unit in units for part in unit.modules()]
        assert len(parts) == len(set(parts)) > 0


def test_norms_in_wrappers_are_not_worth_recomputing():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(2)

    model = nn.Sequential(nn.ModuleList([Norm(), Residual(), Norm(), Residual()]))
    assert names(find_units(model), recomputable=True) == ["0.1", "0.3"]


def test_layers_in_turns_are_not_worth_recomputing():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2)]))
    assert not names(find_units(model), recomputable=True)


def test_run_without_parameters_contains_nothing_to_tune():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Dropout(), nn.Dropout())
    assert [unit.name for unit in find_units(model)] == ["0"]


def test_gpt_has_embedding_blocks_and_head_in_forward_order():
    units = find_units(TinyGPT(blocks=3))
    assert [(unit.name, unit.kind, unit.recomputable) for unit in units] == [
        ("embedding", "Embedding", False),
        ("blocks.0", "Block", True),
        ("blocks.1", "Block", True),
        ("blocks.2", "Block", True),
        ("head", "Linear", False),
    ]


def test_lstm_is_one_unit_and_a_stack_of_lstms_is_a_run():
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 2)
            self.lstm = nn.LSTM(2, 2, num_layers=2)
            self.stack = nn.ModuleList(nn.LSTM(2, 2) for _ in range(2))

    assert [(unit.name, unit.kind, unit.recomputable) for unit in find_units(Tagger())] == [
        ("embedding", "Embedding", False),
        ("lstm", "LSTM", False),
        ("stack.0", "LSTM", True),
        ("stack.1", "LSTM", True),
    ]


def test_module_dict_is_searched():
    model = nn.Module()
    model.parts = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    assert names(find_units(model), recomputable=False) == ["parts.a", "parts.b"]


def test_single_layer_model_has_no_unit():
    assert find_units(nn.Linear(2, 2)) == ()


def test_tied_parameter_is_counted_once_at_its_first_unit():
    model = TinyGPT(tokens=11, width=8)
    free = {unit.name: unit.num_parameters for unit in find_units(model)}
    model.head.weight = model.embedding.weight
    tied = {unit.name: unit for unit in find_units(model)}
    assert tied["embedding"].num_parameters == free["embedding"] == 88
    assert tied["embedding"].parameter_names == ("embedding.weight",)
    assert tied["head"].num_parameters == free["head"] - 88 == 11
    assert tied["head"].parameter_names == ("head.bias",)


def test_block_used_under_two_names_is_counted_once():
    block = nn.Linear(2, 2)
    model = nn.Module()
    model.first, model.second = nn.Sequential(block, nn.ReLU()), nn.Sequential(block, nn.ReLU())
    assert sum(unit.num_parameters for unit in find_units(model)) == 6


@pytest.mark.parametrize("build", [TinyGPT, TinyConvolution, ResNetByAttributes])
def test_units_are_disjoint_and_contain_every_parameter_once(build):
    model = build()
    counted = [name for unit in find_units(model) for name in unit.parameter_names]
    assert sorted(counted) == sorted(name for name, _ in model.named_parameters())
    assert sum(unit.num_parameters for unit in find_units(model)) == sum(
        parameter.numel() for parameter in model.parameters()
    )


class A(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)


class B(A):
    pass


modules = st.recursive(
    st.sampled_from([A, B, nn.ReLU, lambda: nn.Linear(1, 1)]),
    lambda children: st.tuples(
        st.sampled_from([nn.Sequential, nn.ModuleList, nn.ModuleDict]), st.lists(children, max_size=4)
    ),
    max_leaves=12,
)


def built(tree: object) -> nn.Module:
    if not isinstance(tree, tuple):
        return tree()
    kind, children = tree
    members = [built(child) for child in children]
    if kind is nn.ModuleDict:
        return nn.ModuleDict({str(place): member for place, member in enumerate(members)})
    return nn.Sequential(*members) if kind is nn.Sequential else nn.ModuleList(members)


def list_around(model: nn.Module, name: str) -> nn.Module:
    """Return the outermost of the lists in one another that hold a module; the module itself if none does."""
    while isinstance(model.get_submodule(parent := name.rpartition(".")[0]), nn.ModuleList | nn.ModuleDict):
        name = parent
    return model.get_submodule(name)


@given(st.lists(modules, min_size=1, max_size=4))
def test_units_of_any_module_tree_are_disjoint_and_contain_every_parameter_once(trees):
    model = nn.Module()
    for index, tree in enumerate(trees):
        model.add_module(f"part{index}", built(tree))
    units = find_units(model)
    counted = [name for unit in units for name in unit.parameter_names]
    assert sorted(counted) == sorted(name for name, _ in model.named_parameters())
    for unit in units:
        assert not any(other.name.startswith(f"{unit.name}.") for other in units)
        if unit.recomputable:
            parent, _, key = unit.name.rpartition(".")
            siblings = list(model.get_submodule(parent).named_children())
            position = [name for name, _ in siblings].index(key)
            neighbours = [child for _, child in siblings[max(position - 1, 0) : position + 2]]
            kind = type(model.get_submodule(unit.name))
            around = [*list_around(model, unit.name).modules(), *(child for _, child in siblings)]
            in_turns = sum(type(child) is kind for child in set(around))
            assert sum(type(child) is kind for child in neighbours) >= 2 or in_turns >= 2


# ------------------------------------------------------------------------------------------------ transformers


def test_layers_of_a_llama_are_units():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2
        )
    )
    units = find_units(model)
    assert names(units, recomputable=True) == [f"model.layers.{index}" for index in range(3)]
    assert names(units, recomputable=False) == ["model.embed_tokens", "model.norm", "lm_head"]


def test_layers_of_a_bert_are_units_and_its_tied_decoder_is_counted_at_the_embedding():
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2
        )
    )
    units = {unit.name: unit for unit in find_units(model)}
    assert list(units) == ["bert.embeddings", *(f"bert.encoder.layer.{index}" for index in range(3)), "cls"]
    assert [unit.recomputable for unit in units.values()] == [False, True, True, True, False]
    assert "bert.embeddings.word_embeddings.weight" in units["bert.embeddings"].parameter_names
    # The rest of the head: its dense layer, its normalisation and the decoder's bias.
    assert units["cls"].num_parameters == (8 * 8 + 8) + 2 * 8 + 16
    assert sum(unit.num_parameters for unit in units.values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )


# --------------------------------------------------------------------------------------------- named by a user


def test_named_units_can_be_recomputed_in_the_order_given():
    units = name_units(TinyGPT(), ["head", "blocks.1"])
    assert [(unit.name, unit.kind, unit.recomputable) for unit in units] == [
        ("head", "Linear", True),
        ("blocks.1", "Block", True),
    ]


def test_named_units_count_a_shared_parameter_at_the_first_unit():
    model = TinyGPT(tokens=11, width=8)
    model.head.weight = model.embedding.weight
    assert [unit.num_parameters for unit in name_units(model, ["head", "embedding"])] == [99, 0]


@pytest.mark.parametrize("name", ["", "block.0", "blocks.3", "blocks.0.weight"])
def test_unknown_module_name_is_rejected_with_the_known_ones(name):
    with pytest.raises(JobError, match=r"is not a module of the model \(allowed: embedding, blocks, blocks.0, "):
        name_units(TinyGPT(), [name])


@pytest.mark.parametrize(
    "chosen", [["blocks.0", "blocks.0"], ["blocks.0", "blocks.0.mix"], ["blocks.0.mix", "blocks.0"]]
)
def test_overlapping_units_are_rejected(chosen):
    with pytest.raises(JobError, match=rf"units '{chosen[0]}' and '{chosen[1]}' overlap"):
        name_units(TinyGPT(), chosen)


def test_names_with_a_common_prefix_do_not_overlap():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))
    assert [unit.name for unit in name_units(model, ["1", "10", "11"])] == ["1", "10", "11"]


def test_finding_units_does_not_change_the_model():
    model = TinyGPT()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    find_units(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Shared(nn.Module):
    """An encoder and a decoder that share layers, with one embedding under two names."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        self.embedding = nn.Embedding(5, 4)
        self.encoder = nn.ModuleList(layers)
        self.decoder = nn.ModuleList(layers)
        self.output = nn.ModuleDict({"embedding": self.embedding, "head": nn.Linear(4, 5)})


def test_module_with_several_names_is_one_unit() -> None:
    names = [unit.name for unit in find_units(Shared())]
    assert names == ["embedding", "encoder.0", "encoder.1", "encoder.2", "output.head"]


def test_two_names_of_one_module_cannot_both_be_units() -> None:
    with pytest.raises(JobError, match=r"units 'encoder\.0' and 'decoder\.0' overlap"):
        name_units(Shared(), ["encoder.0", "decoder.0"])
