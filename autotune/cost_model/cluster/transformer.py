"""A decoder-only transformer described by its sizes, and the sizes of its parts; knows no device and no layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import InputError

# Largest accepted value of each size.
_LARGEST = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a decoder-only transformer.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: attention heads.
        kv_heads: key and value heads; fewer than ``heads`` for grouped queries.
        ffn: width of the feed-forward layer.
        vocab: number of tokens.
        positions: longest sequence that the model accepts; 0 if there is no limit.
        gated: whether the feed-forward layer has a gate (SwiGLU), which makes it three products instead of two.
        tied: whether the output projection shares the embedding's weights.
        learned_positions: whether each position has a learned vector.
        head_dim: width of one head.
        experts: expert feed-forward layers of width ``ffn`` among which each sparse block chooses; 1 if none is sparse.
        active: experts that compute a token.
        shared_ffn: width of the feed-forward layer of sparse blocks that computes every token; 0 if there is none.
        dense_layers: blocks that are not sparse.
        dense_ffn: width of the feed-forward layer of these.

    Raises:
        InputError: if a size is not positive, or heads do not divide.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int = 0
    gated: bool = False
    tied: bool = False
    learned_positions: bool = False
    head_dim: int = 0
    experts: int = 1
    active: int = 1
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
            value = getattr(self, name)
            if not 1 <= value <= _LARGEST:
                raise InputError(f"{name} is {value}", where="model", allowed=f"1 to {_LARGEST}")
        if not 1 <= self.active <= self.experts:
            raise InputError(f"{self.active} of {self.experts} experts are active", where="model", allowed="1 to all")
        if not 0 <= self.dense_layers <= self.layers:
            problem = f"{self.dense_layers} of {self.layers} blocks are dense"
            raise InputError(problem, where="model", allowed="0 to all")
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} heads cannot share {self.kv_heads} key and value heads",
                where="model",
                allowed="a number of key and value heads that divides the number of heads",
            )
        if not self.head_dim:
            if self.hidden % self.heads:
                raise InputError(
                    f"{self.heads} heads do not divide a hidden size of {self.hidden}",
                    where="model",
                    allowed="a number of heads that divides the hidden size",
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @classmethod
    def of_sizes(cls, *, layers: int, hidden: int, heads: int, vocab: int, **others: Any) -> Transformer:
        """Return a transformer from a few numbers; key and value heads and the feed-forward width have defaults.

        Args:
            layers: number of blocks.
            hidden: width of the residual stream.
            heads: attention heads.
            vocab: number of tokens.
            **others: any other attribute; ``None`` is its default: ``kv_heads`` equal to ``heads``, ``ffn`` four times
                the hidden size.

        Raises:
            InputError: if the sizes do not fit together.
        """
        given = {name: value for name, value in others.items() if value is not None}
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=vocab,
            **{"kv_heads": heads, "ffn": 4 * hidden, **given},
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str = "config") -> Transformer:
        """Return the transformer that a Hugging Face configuration describes.

        Args:
            config: the content of ``config.json``.
            where: name of the file in errors.

        Raises:
            InputError: if a size is missing or not a whole number, or if the model is not a decoder, or a mixture of
                experts of a kind that is not known.
        """
        text = config.get("text_config")
        found = _Config(text if isinstance(text, Mapping) else config, where)
        kind = str(found.values.get("model_type", config.get("model_type", "")))
        found.refuse_others(kind)
        hidden, heads = found.size(*_HIDDEN), found.size("num_attention_heads", "n_head", "n_heads")
        gated = kind not in _UNGATED
        shared = found.flag("multi_query", default=False) and not found.flag("new_decoder_architecture", default=False)
        return cls(
            layers=found.size("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=found.size("num_key_value_heads", "num_kv_heads", default=1 if shared else heads),
            ffn=found.size(*found.expert_width(kind), *_FFN, default=4 * hidden),
            vocab=found.size("vocab_size"),
            positions=found.size("max_position_embeddings", "n_positions", "max_seq_len", default=0),
            gated=gated,
            tied=found.flag("tie_word_embeddings", default=_Config(config, where).tied(kind)),
            learned_positions=kind in _LEARNED,
            head_dim=found.size("head_dim", default=0),
            **found.experts(kind),
        )

    @property
    def attention_width(self) -> int:
        """Return the width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the width of all key heads together, which is also that of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def sparse_share(self) -> float:
        """Return the share of the blocks that choose among experts."""
        return (self.layers - self.dense_layers) / self.layers if self.experts > 1 else 0.0

    @property
    def active_ffn(self) -> float:
        """Return the width of the feed-forward layers that compute a token, the mean of all blocks."""
        return self._mean_ffn(self.active)

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one block, the mean of all: its matrices and two normalisations."""
        return round(self._parameters_with(self.experts))

    @property
    def active_layer_parameters(self) -> int:
        """Return those of a block's parameters that compute a token, the mean of all blocks."""
        return round(self._parameters_with(self.active))

    def _mean_ffn(self, experts: int) -> float:
        if self.experts == 1:
            return self.ffn
        sparse, share = experts * self.ffn + self.shared_ffn, self.sparse_share
        return share * sparse + (1 - share) * self.dense_ffn

    def _parameters_with(self, experts: int) -> float:
        attention = self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        router = self.sparse_share * self.hidden * self.experts
        return attention + self.hidden * self._mean_ffn(experts) * (3 if self.gated else 2) + router + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of the token and position embeddings."""
        return self.hidden * (self.vocab + (self.positions if self.learned_positions else 0))

    @property
    def head_parameters(self) -> int:
        """Return the parameters of an output projection of its own; 0 if it is tied."""
        return 0 if self.tied else self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """Return all parameters."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    def flops_per_token(self, sequence: int, trainable: float = 1.0) -> float:
        """Return the model's operations per token of a training step, recomputation left out.

        Args:
            sequence: tokens of one sequence.
            trainable: share of the parameters that is trained; frozen ones need no gradient of their own.

        Returns:
            6 operations for each trained parameter of a matrix product that computes the token, 4 for each frozen one,
            and attention's 12 per layer, width and position.

        Source: PaLM (Chowdhery et al. 2022, arXiv:2204.02311), appendix B; causal masks are not subtracted there.
        """
        products = self.layers * self.active_layer_parameters + self.hidden * self.vocab
        return (4.0 + 2.0 * trainable) * products + 12.0 * self.layers * self.attention_width * sequence


_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
# Model types of Hugging Face whose feed-forward layers have two products, those that learn their positions, and those
# that tie the output projection unless their configuration says otherwise. Source: transformers' configuration classes.
_UNGATED = frozenset({"gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "phi"}) | {
    "starcoder2",
    "nemotron",
}
_LEARNED = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "mpt"})
_TIED = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "starcoder2", "cohere"}) | {
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
}
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
# Kinds of mixtures of experts whose configurations are understood. Source: transformers' configuration classes.
_MIXTURES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe", "glm4_moe"}) | {
    "llama4_text",
}
_ACTIVE = ("num_experts_per_tok", "experts_per_token")
# Numbers of experts, parts of state-space layers, and model types that encode.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STATE_SPACES = ("mamba_d_state", "mamba_ngroups", "ssm_state_size", "state_size", "hybrid_override_pattern")
_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta-v2", "modernbert"})


@dataclass(frozen=True, slots=True)
class _Config:
    """A configuration whose sizes have different names in different model families."""

    values: Mapping[str, Any]
    where: str

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first size that is present."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
                raise InputError(f"{name} is {value!r}", where=self.where, allowed="a whole number of at least 0")
            return value
        if default is None:
            raise InputError(f"{names[0]} is missing", where=self.where, allowed=" or ".join(names))
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """Return whether something is so."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{name} is {value!r}", where=self.where, allowed="true or false")
        return value

    def tied(self, kind: str) -> bool:
        """Return whether the output projection is tied by the outer part of a configuration, or by its kind's rule."""
        return self.flag("tie_word_embeddings", default=kind in _TIED)

    def expert_width(self, kind: str) -> tuple[str, ...]:
        """Return the names under which the width of an expert comes before that of a dense feed-forward layer."""
        return ("moe_intermediate_size",) if kind in _MIXTURES else ()

    def experts(self, kind: str) -> dict[str, int]:
        """Return what a configuration says of experts, as arguments of :class:`Transformer`."""
        number = self.size(*_EXPERTS, default=1)
        if kind not in _MIXTURES or number == 1:
            return {}
        width, dense = self.size("moe_intermediate_size", *_FFN), self.size("intermediate_size_mlp", *_FFN)
        shared = self.size("shared_expert_intermediate_size", default=0)
        shared = shared or width * self.size("n_shared_experts", default=int(kind == "llama4_text"))
        return {
            "experts": number,
            "active": self.size(*_ACTIVE),
            "shared_ffn": shared,
            "dense_layers": self._dense_layers(),
            "dense_ffn": dense,
        }

    def _dense_layers(self) -> int:
        """Return the number of blocks that do not choose among experts."""
        layers, named = self.size("num_hidden_layers"), self._numbers("moe_layers")
        if named is not None:
            return layers - sum(number < layers for number in named)
        every = max(self.size("decoder_sparse_step", "interleave_moe_layer_step", default=1), 1)
        first = min(self.size("first_k_dense_replace", default=0), layers)
        listed = self._numbers("mlp_only_layers") or frozenset()
        sparse = layers // every - first // every
        return layers - sparse + sum(first <= number < layers and (number + 1) % every == 0 for number in listed)

    def _numbers(self, name: str) -> frozenset[int] | None:
        """Return a list of blocks by their numbers; ``None`` if it is missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(one) is int and one >= 0 for one in value):
            raise InputError(f"{name} is {value!r:.100}", where=self.where, allowed="a list of numbers of blocks")
        return frozenset(value)

    def refuse_others(self, kind: str) -> None:
        """Refuse models that are no decoder, and what is not understood of others: experts, latents, state spaces."""
        nested = [one for one in self.values.values() if isinstance(one, Mapping)]
        nested += [] if kind in _MIXTURES else [self.values]
        experts = [f"{name} is {one[name]}" for one in nested for name in _EXPERTS if _exceeds(one.get(name), 1)]
        other = (*_STATE_SPACES, "kv_lora_rank")
        spaces = [f"{name} is {self.values[name]!r}" for name in other if self.values.get(name) is not None]
        encodes = self.flag("is_encoder_decoder", default=False) or kind in _ENCODERS
        found = [*experts, *spaces, *([f"model_type is {kind!r}, which encodes"] if encodes else [])]
        if found:
            mixtures = ", ".join(sorted(_MIXTURES))
            raise InputError(found[0], where=self.where, allowed=f"a dense decoder-only transformer, or {mixtures}")


def _exceeds(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > limit
