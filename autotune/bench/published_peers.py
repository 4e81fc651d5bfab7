"""Rules of others for time and memory of training runs, on the same rows: what people use today."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from autotune.bench.published_rows import PublishedRow

# Model FLOPs utilisation that is assumed where none was measured. Source: PaLM (arXiv:2204.02311), table 3: 21 to 46 %.
_COMMON_MFU = 0.4


def six_nd_seconds(row: PublishedRow, mfu: float) -> float:
    """Return seconds per step by the rule of 6 operations per parameter and token.

    Args:
        row: the published run.
        mfu: the assumed utilisation of the device's peak.

    Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1.
    """
    operations = 6.0 * row.model.parameters * row.layout.tokens_per_step
    return operations / (mfu * row.machine.peak_flops * row.layout.devices)


def best_mfu(rows: Sequence[PublishedRow]) -> float:
    """Return the single utilisation by which the 6ND rule has the least median error, which it cannot know itself."""
    shares = [six_nd_seconds(row, 1.0) / row.seconds for row in rows]
    return min(shares, key=lambda best: statistics.median(abs(best / share - 1) for share in shares))


def time_peers(rows: Sequence[PublishedRow]) -> dict[str, Callable[[PublishedRow], float]]:
    """Return the rules for seconds per step, by name."""
    best = best_mfu(rows)
    return {
        f"6ND at {_COMMON_MFU:.0%} of the peak": lambda row: six_nd_seconds(row, _COMMON_MFU),
        "6ND at the best single share of these rows": lambda row: six_nd_seconds(row, best),
    }


def deepspeed_estimate(row: PublishedRow) -> float:
    """Return the bytes that DeepSpeed's estimators of model states return for the row's ZeRO stage.

    Tensor and pipeline parallelism, which they do not know, divide the parameters.

    Source: deepspeed.runtime.zero.stage_1_and_2 and stage3, ``estimate_zero*_model_states_mem_needs``, without offload.
    """
    layout = row.layout
    parameters = row.model.parameters / layout.tp / layout.pp
    ranks = layout.sharding * layout.replicas
    if layout.zero_stage == 3:
        largest = max(row.model.layer_parameters, row.model.embedding_parameters) / layout.tp
        return 4 * largest + 18 * parameters / ranks
    return 4 * parameters + 16 * parameters / ranks


def accelerate_estimate(row: PublishedRow) -> float:
    """Return the bytes that ``accelerate estimate-memory`` gives for training with Adam: four times the fp32 weights.

    It knows no devices; its figure is divided by their number here.
    """
    return 4 * 4 * row.model.parameters / row.layout.devices


def formula_estimate(row: PublishedRow) -> float:
    """Return bytes by the formulas of "Transformer Math 101": states by ZeRO stage and activations.

    Source: Anthony, Biderman and Schoelkopf 2023 (blog.eleuther.ai/transformer-math); activations by Korthikanti et al.
    2022 (arXiv:2205.05198).
    """
    layout, model = row.layout, row.model
    parameters, ranks = model.parameters / layout.tp / layout.pp, layout.sharding
    divided = [ranks if layout.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    states = parameters * (2 / divided[0] + 2 / divided[1] + 12 / divided[2])
    each = {"none": 10 + 24 / layout.tp, "selective": 10 + 24 / layout.tp, "full": 2.0}[layout.checkpointing]
    return states + layout.tokens * model.hidden * model.layers * each


PEAK_PEERS: Mapping[str, Callable[[PublishedRow], float]] = {
    "DeepSpeed's ZeRO estimators": deepspeed_estimate,
    "accelerate estimate-memory, per device": accelerate_estimate,
    "Transformer Math 101": formula_estimate,
}
