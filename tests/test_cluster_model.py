"""Laws of the cost model for many devices: memory and time of transformers from their shapes."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from autotune.cost_model.cluster.constants import Constants, fitted, meanings
from autotune.cost_model.cluster.layout import CHECKPOINTING, Layout
from autotune.cost_model.cluster.links import gather_seconds, reduce_seconds
from autotune.cost_model.cluster.machines import Machine, find_machine
from autotune.cost_model.cluster.memory import MemoryParts, predict_memory, saved_bytes
from autotune.cost_model.cluster.products import product_seconds, sustained_flops
from autotune.cost_model.cluster.step_time import StepSeconds, predict_seconds
from autotune.cost_model.cluster.transformer import Transformer
from autotune.cost_model.device_table import DEVICES
from autotune.errors import InputError

LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
LLAMA = Transformer(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128_256, gated=True, positions=131_072
)
GPT = Transformer.of_sizes(layers=24, hidden=2048, heads=16, vocab=50_304, tied=True)
H100, A100 = find_machine("h100"), find_machine("a100")
COUNTS = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(
    Layout,
    replicas=COUNTS,
    shard=COUNTS,
    tp=COUNTS,
    pp=COUNTS,
    cp=st.sampled_from([1, 2]),
    micro_batch=st.integers(1, 8),
    micro_batches=st.integers(1, 16),
    sequence=st.sampled_from([512, 2048, 8192]),
    checkpointing=st.sampled_from(CHECKPOINTING),
    zero_stage=st.integers(0, 3),
    compiled=st.booleans(),
    float8=st.booleans(),
    fused_attention=st.booleans(),
    fused_loss=st.booleans(),
    sequence_parallel=st.booleans(),
    fp32_weights=st.booleans(),
    offload=st.booleans(),
    trainable=st.sampled_from([0.01, 0.5, 1.0]),
)
MODELS = st.sampled_from([LLAMA, GPT])
MACHINES = st.sampled_from([H100, A100, find_machine("mi300x"), find_machine("l40s")])


def peak(model: Transformer, layout: Layout) -> float:
    return predict_memory(model, layout, fitted()).total


def seconds(model: Transformer, layout: Layout, machine: Machine = H100) -> float:
    return predict_seconds(model, layout, machine, fitted()).total


@given(MODELS, LAYOUTS)
def test_parts_of_the_memory_are_not_negative_and_sum_to_the_peak(model: Transformer, layout: Layout) -> None:
    parts = predict_memory(model, layout, fitted())
    values = [getattr(parts, one.name) for one in fields(MemoryParts)]
    assert min(values) >= 0
    assert parts.total == pytest.approx(sum(values), rel=1e-12)
    assert parts.needed <= parts.total
    assert parts.reserved <= parts.total


@given(MODELS, LAYOUTS, MACHINES)
def test_parts_of_a_step_are_not_negative_and_sum_to_its_time(
    model: Transformer, layout: Layout, machine: Machine
) -> None:
    parts = predict_seconds(model, layout, machine, fitted())
    values = [getattr(parts, one.name) for one in fields(StepSeconds)]
    assert min(values) >= 0
    assert parts.total == pytest.approx(sum(values), rel=1e-12)
    assert getattr(parts, parts.binds) == max(values)


@given(MODELS, LAYOUTS)
@example(LLAMA, Layout(replicas=2, cp=2, sequence=512))
def test_a_larger_micro_batch_takes_more_memory_and_more_time(model: Transformer, layout: Layout) -> None:
    larger = replace(layout, micro_batch=layout.micro_batch + 1)
    assert peak(model, larger) > peak(model, layout)
    assert seconds(model, larger) > seconds(model, layout)


@given(MODELS, LAYOUTS)
def test_more_micro_batches_take_more_time_and_never_less_memory(model: Transformer, layout: Layout) -> None:
    more = replace(layout, micro_batches=layout.micro_batches + 1)
    assert seconds(model, more) > seconds(model, layout)
    assert peak(model, more) >= peak(model, layout)


@given(MODELS, LAYOUTS, st.sampled_from(["shard", "tp"]))
def test_memory_never_rises_when_states_or_products_are_split_further(
    model: Transformer, layout: Layout, axis: str
) -> None:
    if axis == "shard":
        layout = replace(layout, replicas=1, shard=2 * layout.shard)  # buckets exist only between several ranks
    base = replace(layout, tp=2 * layout.tp, sequence_parallel=True) if axis == "tp" else layout
    split = replace(base, **{axis: 2 * getattr(base, axis)})
    assert peak(model, split) <= peak(model, base)


@given(MODELS, LAYOUTS)
def test_higher_zero_stages_own_less_of_the_states(model: Transformer, layout: Layout) -> None:
    owned = []
    for stage in range(4):
        parts = predict_memory(model, replace(layout, zero_stage=stage, pp=1), fitted())
        owned.append(parts.weights + parts.gradients + parts.optimizer)
    assert owned == sorted(owned, reverse=True)


@given(MODELS, LAYOUTS)
def test_checkpointing_trades_activations_for_time(model: Transformer, layout: Layout) -> None:
    each = [replace(layout, checkpointing=one, sequence_parallel=True, offload=False) for one in CHECKPOINTING]
    kept = [predict_memory(model, one, fitted()).activations for one in each]
    again = [predict_seconds(model, one, H100, fitted()).recompute for one in each]
    assert kept == sorted(kept, reverse=True)
    assert again[0] == 0 < again[1] < again[2]


@given(MODELS, LAYOUTS)
def test_frozen_parameters_need_no_gradients_and_no_optimizer(model: Transformer, layout: Layout) -> None:
    full, frozen = (
        predict_memory(model, replace(layout, trainable=share), fitted()) for share in (1.0, 0.01)
    )  # fmt: skip
    assert frozen.weights == pytest.approx(full.weights)
    assert frozen.gradients == pytest.approx(0.01 * full.gradients)
    assert frozen.optimizer == pytest.approx(0.01 * full.optimizer)


@given(MODELS, LAYOUTS)
def test_a_device_with_float8_computes_faster_in_it(model: Transformer, layout: Layout) -> None:
    plain, quick = (predict_seconds(model, replace(layout, float8=one), H100, fitted()) for one in (False, True))
    assert quick.products < plain.products
    assert predict_seconds(model, replace(layout, float8=True), A100, fitted()) == predict_seconds(
        model, replace(layout, float8=False), A100, fitted()
    )


def test_interleaved_stages_idle_less_and_hold_more() -> None:
    base = Layout(pp=8, micro_batches=16, checkpointing="full")
    interleaved = replace(base, virtual_stages=2)
    first, second = (predict_seconds(LLAMA, one, H100, fitted()).bubble for one in (base, interleaved))
    assert second < first
    assert peak(LLAMA, interleaved) > peak(LLAMA, base)


def test_a_pipeline_idles_in_the_share_of_its_stages_and_micro_batches() -> None:
    free = Constants(jitter=1e-12, step_s=1e-12)
    layout = Layout(pp=4, micro_batches=8, zero_stage=0)
    # Without a vocabulary, all stages are equal.
    model = replace(LLAMA, vocab=1)
    parts = predict_seconds(model, layout, H100, free)
    busy = parts.products + parts.attention + parts.memory + parts.sharding
    assert parts.bubble == pytest.approx(3 / 8 * busy, rel=0.01)


def test_parameters_are_those_of_published_models() -> None:
    assert LLAMA.parameters == pytest.approx(8.03e9, rel=1e-3)
    seventy = replace(LLAMA, layers=80, hidden=8192, heads=64, ffn=28672)
    assert seventy.parameters == pytest.approx(70.55e9, rel=1e-3)
    # MPT of 7 B with 2,048 positions, as llm-foundry publishes it.
    mpt = Transformer.of_sizes(
        layers=32, hidden=4096, heads=32, vocab=50_368, positions=2048, tied=True, learned_positions=True
    )
    assert mpt.parameters == pytest.approx(6_658_859_008, rel=1e-3)


def test_saved_activations_are_those_of_the_published_formula() -> None:
    # Korthikanti et al. 2022: sbh(34 + 5as/h) bytes with dropout masks and their copies; 32 without, and no scores if
    # attention is fused.
    layout = Layout(micro_batch=3, sequence=1024)
    assert saved_bytes(GPT, layout) == 32 * 3 * 1024 * GPT.hidden
    materialised = saved_bytes(GPT, replace(layout, fused_attention=False))
    assert materialised - saved_bytes(GPT, layout) == 5 * GPT.heads * 1024 * 3 * 1024


def test_fused_kernels_save_a_gates_product_alone_and_8_bit_products_their_inputs_in_8_bits() -> None:
    tokens, hidden, ffn = 1024, LLAMA.hidden, LLAMA.ffn
    base = Layout(sequence=tokens)
    eager, fused = saved_bytes(LLAMA, base), saved_bytes(LLAMA, replace(base, compiled=True))
    assert eager - fused == 2 * tokens * ffn
    # torchao saves the inputs of its products in 16 bits; Transformer Engine, beside 16-bit weights, in 8.
    assert saved_bytes(LLAMA, replace(base, compiled=True, float8=True)) == fused
    narrow = saved_bytes(LLAMA, replace(base, fp32_weights=False, float8=True))
    assert fused - narrow == tokens * (2 * hidden + ffn - LLAMA.attention_width)


def test_gradients_of_the_update_take_no_memory_beside_activations_that_are_free_by_then() -> None:
    layout = Layout(shard=4, zero_stage=1, fp32_weights=False, sequence=8192)
    parts = predict_memory(LLAMA, layout, fitted())
    gradients = 4 * LLAMA.parameters / 4
    assert parts.activations + parts.working > gradients
    assert parts.gathers == pytest.approx(4 * 5e8)
    # The allocator reserves them beside the pieces that are free.
    needed = parts.weights + parts.gradients + parts.optimizer + parts.activations + parts.working + parts.gathers
    share = fitted().fragmentation
    assert parts.fragmentation == pytest.approx(share * needed + (1 + share) * gradients)
    # Where activations are few, the update is the peak.
    few = predict_memory(LLAMA, replace(layout, sequence=512, checkpointing="full"), fitted())
    assert few.activations + few.working < gradients
    assert few.activations + few.working + few.gathers == pytest.approx(gradients + 4 * 5e8)


def test_chunks_of_a_stage_hide_messages_and_reductions() -> None:
    base = Layout(
        shard=8, tp=4, pp=4, micro_batches=16, sequence=4096, zero_stage=1, fp32_weights=False, reduce_bytes=2
    )
    plain, chunks = (
        predict_seconds(LLAMA, replace(base, virtual_stages=one), H100, fitted()).sharding for one in (1, 4)
    )
    # Four times the messages, most of them hidden.
    assert chunks < plain


def test_kernels_written_for_a_device_attend_faster_and_longer_sequences_waste_less_on_the_diagonal() -> None:
    base = Layout(sequence=8192, zero_stage=1, fp32_weights=False)
    plain, tuned = (
        predict_seconds(LLAMA, replace(base, compiled=one), H100, fitted()).attention for one in (False, True)
    )
    assert plain * H100.attention_factor == pytest.approx(tuned)
    per_score = [predict_seconds(LLAMA, Layout(sequence=one), H100, fitted()).attention / one**2 for one in (512, 8192)]
    assert per_score[0] / per_score[1] == pytest.approx((512 + 128) / 512 / ((8192 + 128) / 8192))


def test_a_configuration_of_hugging_face_gives_the_same_model() -> None:
    assert Transformer.from_config(LLAMA_CONFIG) == LLAMA
    gpt2 = Transformer.from_config(
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    )
    assert gpt2.parameters == pytest.approx(124.4e6, rel=2e-3)


SMALL = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 3,
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
NARROW = {"intermediate_size": 300, "moe_intermediate_size": 96}
MIXTURES = {
    "mixtral": {"intermediate_size": 224, "num_local_experts": 8},
    "qwen2_moe": {**NARROW, "shared_expert_intermediate_size": 160, "num_experts": 12, "decoder_sparse_step": 2},
    "qwen3_moe": {**NARROW, "head_dim": 32, "num_experts": 12, "mlp_only_layers": [1]},
    "olmoe": {"intermediate_size": 96, "num_experts": 12},
    "gpt_oss": {"intermediate_size": 96, "head_dim": 32, "num_local_experts": 12},
    "granitemoe": {"intermediate_size": 96, "num_local_experts": 12},
    "phimoe": {"intermediate_size": 96, "num_local_experts": 12},
    "glm4_moe": {**NARROW, "head_dim": 32, "n_routed_experts": 12, "n_shared_experts": 2, "first_k_dense_replace": 2},
    "llama4_text": {
        "intermediate_size": 96,
        "intermediate_size_mlp": 256,
        "head_dim": 16,
        "num_local_experts": 8,
        "moe_layers": [1, 3, 4],
    },
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_has_the_parameters_of_the_model_itself(kind: str) -> None:
    config = transformers.CONFIG_MAPPING[kind](**SMALL, **MIXTURES[kind])
    with torch.device("meta"):
        model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    found = Transformer.from_config(config.to_dict())
    # Biases, of which gpt-oss has some, are not counted.
    weights = sum(one.numel() for name, one in model.named_parameters() if not name.endswith("bias"))
    assert found.parameters == pytest.approx(weights, rel=2e-3)


def test_dense_blocks_of_mixtures_are_counted_without_a_look_at_each() -> None:
    large = {**SMALL, **MIXTRAL, "num_hidden_layers": 2**39}
    for change, dense in (
        ({}, 0),
        ({"first_k_dense_replace": 2**40}, 2**39),
        ({"decoder_sparse_step": 2, "first_k_dense_replace": 3, "mlp_only_layers": [1, 4, 7, 7]}, 2**38 + 2),
    ):
        assert Transformer.from_config({**large, **change}).dense_layers == dense


def test_known_mixtures_have_the_published_parameters() -> None:
    mixtral = Transformer.from_config(transformers.MixtralConfig().to_dict())
    active = mixtral.layers * mixtral.active_layer_parameters + 2 * mixtral.hidden * mixtral.vocab
    # Jiang et al. 2024 (arXiv:2401.04088): 47 B, of which 13 B compute a token.
    assert (mixtral.parameters / 1e9, active / 1e9) == pytest.approx((46.7, 12.9), abs=0.05)


def test_experts_cost_memory_and_active_ones_time() -> None:
    layout = Layout(sequence=4096, micro_batch=4, shard=8)
    sizes = {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32000, "ffn": 1024, "gated": True}
    dense = Transformer.of_sizes(**{**sizes, "ffn": 4096})
    found = {
        (experts, active): Transformer.of_sizes(**sizes, experts=experts, active=active)
        for experts, active in ((4, 4), (4, 1), (32, 1), (32, 4))
    }
    seconds = {key: predict_seconds(model, layout, H100, fitted()).products for key, model in found.items()}
    needed = {key: predict_memory(model, layout, fitted()).total for key, model in found.items()}
    assert found[4, 4].parameters == dense.parameters + 8 * 2048 * 4
    # As many products in smaller pieces.
    assert seconds[4, 4] == pytest.approx(predict_seconds(dense, layout, H100, fitted()).products, rel=0.15)
    assert seconds[4, 1] < seconds[4, 4]
    assert seconds[32, 1] == pytest.approx(seconds[4, 1], rel=0.15)
    assert needed[32, 1] > needed[4, 1]
    assert needed[32, 4] > needed[32, 1]
    with pytest.raises(InputError, match="5 of 4 experts are active"):
        Transformer.of_sizes(**sizes, experts=4, active=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 30}, "30 heads cannot share 8|do not divide"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "n_routed_experts is 8 .*mixtral"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512"),
        ({**MIXTRAL, "moe_layers": [[1]]}, "moe_layers is .*a list of numbers"),
        ({**MIXTRAL, "mlp_only_layers": 3}, "mlp_only_layers is 3"),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "num_experts_per_tok is missing|intermediate_size is missing",
        ),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "layers is 0"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 100,
    }
    with pytest.raises(InputError, match=message):
        Transformer.from_config(config | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"checkpointing": "some"}, "checkpointing is 'some'"),
        ({"zero_stage": 4}, "zero_stage is 4"),
        ({"trainable": 0.0}, "trainable is 0"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Layout(**change)  # type: ignore[arg-type]


def test_every_device_of_the_table_is_a_machine() -> None:
    for key, spec in DEVICES.items():
        found = find_machine(key)
        # Drivers report a little less than what is sold, and sold gigabytes are sometimes binary.
        assert 0.9 < found.capacity_bytes / spec.memory_bytes < 1.08, key
        assert 0.5 < sustained_flops(found, fitted()) / found.peak_flops <= 1, key


def test_a_device_may_be_named_with_its_memory_and_its_power() -> None:
    limited = find_machine("h100_96gb_500w")
    assert limited.watts == 500
    assert limited.capacity_bytes > H100.capacity_bytes
    assert sustained_flops(limited, fitted()) < sustained_flops(H100, fitted())
    assert find_machine("a100_40gb") == find_machine("a100-40gb") == find_machine("A100-SXM4-40GB")
    with pytest.raises(InputError, match="did you mean 'h100'"):
        find_machine("h10")


def test_large_aligned_products_run_at_the_rate_of_their_constant_and_others_slower() -> None:
    rate = fitted().gemm_share * sustained_flops(A100, fitted())
    large = 2 * 16384**3 / product_seconds(16384, 16384, 16384, A100, fitted())
    assert 0.95 * rate < large < rate
    for shape in ((128, 16384, 16384), (16384, 16384, 64), (16384, 16392, 16384)):
        m, n, k = shape
        assert 2 * m * n * k / product_seconds(m, n, k, A100, fitted()) < 0.9 * large


def test_a_ring_passes_its_share_over_the_slowest_link() -> None:
    constants = Constants(link_share=1.0)
    inside = gather_seconds(8e9, 8, 1, H100, constants)
    assert inside == pytest.approx(7e9 / H100.link, rel=1e-3)
    between = gather_seconds(8e9, 64, 1, H100, constants)
    assert between == pytest.approx(8e9 * 63 / 64 / H100.node_link, rel=1e-2)
    # One member per node has only its own network card.
    alone = gather_seconds(8e9, 8, 8, H100, constants)
    assert alone == pytest.approx(7e9 / H100.node_rate, rel=1e-2)
    assert reduce_seconds(8e9, 8, 1, H100, constants) == 2 * inside
    assert gather_seconds(8e9, 1, 1, H100, constants) == 0


def test_every_constant_has_a_meaning_a_unit_and_a_source() -> None:
    found = meanings()
    assert set(found) == set(asdict(Constants()))
    for name, one in found.items():
        assert one.text, name
        assert one.unit, name
        assert one.source, name
        assert one.prior == getattr(Constants(), name)
        # A fit that leaves a prior by many times its spread says that the model is wrong.
        if one.spread:
            assert abs(getattr(fitted(), name) / one.prior - 1) < 3 * one.spread, name
