"""The models of published runs: of MPT, of Llama, and GPT models whose size and width alone were published."""

from __future__ import annotations

import re

from autotune.bench.published_cells import Cells, shown
from autotune.cost_model.cluster.search import divisors
from autotune.cost_model.cluster.transformer import Transformer
from autotune.errors import InputError

# Layers, width and heads of MPT models. Source: llm-foundry, scripts/train/yamls/pretrain.
_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_MPT_VOCAB = 50_368
# Layers, width, heads, key and value heads, feed-forward width. Source: the models' published config.json.
_LLAMA = {
    "1b": (16, 2048, 32, 8, 8192),
    "3b": (28, 3072, 24, 8, 8192),
    "7b": (32, 4096, 32, 32, 11008),
    "8b": (32, 4096, 32, 8, 14336),
    "13b": (40, 5120, 40, 40, 13824),
    "34b": (48, 8192, 64, 8, 22016),
    "70b": (80, 8192, 64, 8, 28672),
    "405b": (126, 16384, 128, 8, 53248),
}
_LLAMA_VOCAB = {"2": 32_000, "3": 128_256}
_BLOOM_VOCAB = 250_880


def named_model(cells: Cells, sequence: int) -> tuple[str, Transformer]:
    """Return a row's model and its name: of MPT, of Llama, or of the sizes in its columns.

    Args:
        cells: the row.
        sequence: tokens of one sequence, for which MPT models learn as many positions.

    Raises:
        InputError: if the model is unknown or its sizes do not fit together.
    """
    name = cells.text("model").lower()
    if cells.has("hidden"):
        given = {key: cells.count(key) for key in ("kv_heads", "ffn") if cells.has(key)}
        sizes = {key: cells.count(key) for key in ("layers", "hidden", "heads", "vocab")}
        return name, Transformer.of_sizes(**sizes, gated=cells.flag("gated"), tied=cells.flag("tied"), **given)
    mpt, llama = _MPT.get(name.removeprefix("mpt-")), re.fullmatch(r"llama-?([23])(?:\.\d)?-(\d+b)", name)
    if mpt is not None:
        layers, hidden, heads = mpt
        return f"mpt-{name.removeprefix('mpt-')}", Transformer.of_sizes(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=cells.count("vocab", _MPT_VOCAB),
            positions=sequence,
            tied=True,
            learned_positions=True,
        )
    if llama is None or llama[2] not in _LLAMA:
        known = [*(f"mpt-{one}" for one in _MPT), *(f"llama3-{one}" for one in _LLAMA)]
        raise InputError(f"model is {shown(name)}", allowed=known, given=name[:40])
    layers, hidden, heads, kv_heads, ffn = _LLAMA[llama[2]]
    return name, Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=cells.count("vocab", _LLAMA_VOCAB[llama[1]]),
        gated=True,
    )


def gpt_of(cells: Cells) -> tuple[str, Transformer]:
    """Return a GPT model and its name from its width, and from its layers and heads or else from its size.

    Args:
        cells: the row.

    Raises:
        InputError: if neither layers nor a size is given, or the sizes do not fit together.
    """
    hidden, vocab, size = cells.count("hidden"), cells.count("vocab", _BLOOM_VOCAB), cells.text("size", "")
    known = None if cells.has("layers") or not size else _layers_of(size, hidden, vocab, cells.count("pp"))
    layers = cells.count("layers", known)
    heads = cells.count("heads", _heads_of(hidden, cells.count("tp")))
    model = Transformer.of_sizes(layers=layers, hidden=hidden, heads=heads, vocab=vocab, tied=True)
    return f"gpt-{size or layers}", model


def _layers_of(size: str, hidden: int, vocab: int, pp: int) -> int:
    """Return the number of layers, which stages divide, that comes closest to a size such as ``200B``."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*B", size, re.IGNORECASE)
    if found is None:
        raise InputError(f"size is {shown(size)}", allowed="billions of parameters, as in 200B")
    exact = (float(found[1]) * 1e9 - vocab * hidden) / (12 * hidden**2)
    return max(1, round(exact / pp)) * pp


def _heads_of(hidden: int, tp: int) -> int:
    """Return the number of heads, which ranks divide, whose width comes closest to 128."""
    allowed = [heads for heads in divisors(hidden) if heads % tp == 0]
    return min(allowed, key=lambda heads: abs(hidden / heads - 128), default=tp)
