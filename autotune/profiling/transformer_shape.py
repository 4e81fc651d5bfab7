"""The sizes of a job's transformer, read from its modules; the model is built without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.cost_model.cluster.transformer import Transformer
from autotune.engines.job_checks import ask, build_model
from autotune.errors import JobError
from autotune.job import Job
from autotune.mechanics.randomness import isolated, seed_all
from autotune.mechanics.trees import tensors
from autotune.units import units_of

_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")
# Width of a head where no module names the number of heads.
_HEAD_DIM = 64
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


def transformer_of(job: Job) -> tuple[Transformer, int]:
    """Return the sizes of a job's transformer, and the tokens of one of its sequences.

    A model with a Hugging Face configuration is described by it, any other by its blocks, linear layers and embedding.
    Heads that no module counts are taken to be 64 wide.

    Args:
        job: the job; its model is built from fake tensors, and one batch is drawn.

    Raises:
        JobError: if the model is not a decoder-only transformer as far as its modules show.
    """
    with isolated():
        seed_all(0)
        batch = next(iter(ask(job, "batches", lambda: job.batches(0))))
    with isolated(), FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(job)
    where = f"job {job.name!r}"
    sequence = _sequence(batch, where)
    config = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(config):
        found: Mapping[str, Any] = config()
        return Transformer.from_config(found, where=where), sequence
    return _of_modules(job, model, where), sequence


def _sequence(batch: Any, where: str) -> int:
    """Return the second dimension of the batch's first tensor of whole numbers, which holds tokens."""
    for tensor in tensors(batch):
        if not tensor.is_floating_point() and tensor.dim() >= 2:
            return int(tensor.shape[1])
    raise _unlike(where, "its batches hold no tokens (a tensor of whole numbers with two dimensions)")


def _of_modules(job: Job, model: nn.Module, where: str) -> Transformer:
    """Return the transformer that a model's modules describe."""
    modules = dict(model.named_modules())
    blocks = [modules[unit.name] for unit in units_of(model, job.units) if unit.recomputable and unit.name in modules]
    embeddings = [one for one in modules.values() if isinstance(one, nn.Embedding)]
    if not blocks or not embeddings:
        raise _unlike(where, "it has no blocks of one class, or no embedding")
    block = Counter(map(_shapes, blocks)).most_common(1)[0][0]
    vocab = max(embeddings, key=lambda one: one.num_embeddings)
    hidden, widths = vocab.embedding_dim, [max(pair) for pair in block if pair[0] != pair[1]]
    heads = _attribute(blocks[0], _HEADS) or max(1, hidden // _HEAD_DIM)
    if not widths:
        raise _unlike(where, "its blocks have no linear layers of two widths")
    ffn = [pair for pair in block if pair in ((hidden, max(widths)), (max(widths), hidden))]
    tied = any(one is not vocab and getattr(one, "weight", None) is vocab.weight for one in modules.values())
    return Transformer.of_sizes(
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        vocab=vocab.num_embeddings,
        kv_heads=_attribute(blocks[0], _KV_HEADS),
        ffn=max(widths) if len(ffn) >= 2 else None,
        gated=len(ffn) >= 3,
        tied=tied,
        learned_positions=len(embeddings) > 1,
        positions=min(one.num_embeddings for one in embeddings) if len(embeddings) > 1 else 0,
    )


def _shapes(block: nn.Module) -> tuple[tuple[int, int], ...]:
    return tuple((one.out_features, one.in_features) for one in block.modules() if isinstance(one, nn.Linear))


def _attribute(block: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first whole number that a module of a block has under one of some names."""
    for module in block.modules():
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _unlike(where: str, why: str) -> JobError:
    return JobError(
        f"is not recognised as a transformer: {why}",
        where=where,
        allowed="--config FILE, or --layers, --hidden, --heads and --vocab",
    )
