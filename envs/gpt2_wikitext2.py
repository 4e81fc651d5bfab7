"""Train a GPT-2 small on WikiText-2, as the paper does: 12 layers of width 768 with 12 heads, batches of 32.

The data is read from the folder that ``AUTOTUNE_DATA`` (or ``--data``) names: ``wiki.train.raw``, or
``wiki.train.tokens``, or the parquet files of the Hugging Face hub. With GPT-2's own ``vocab.json`` and ``merges.txt``
in that folder (or in its folder ``gpt2``) the text is split into GPT-2's tokens, otherwise into bytes; the data's names
in every run say which. The paper gives no sequence length; 256 roughly matches its 12.43 GB for a batch of 32.
"""

import dataclasses
import functools
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from autotune import DataSource, Job, JobError, WarmupCosine
from autotune.data import Layout, Located, data_folder, is_file, locate, read_file, source_of

LAYERS, WIDTH, HEADS, DROPOUT = 12, 768, 12, 0.1
BATCH, LENGTH, CONTEXT = 32, 256, 1024
TOKENS, BYTES = 50_257, 256
VALIDATION_SEQUENCES, EVALUATED_AT_ONCE = 64, 8
# The paper's perplexity of 45 per token, and the equivalent per byte at about 4.4 bytes per token.
TARGET, TARGET_OF_BYTES = 45.0, 45.0 ** (1 / 4.4)

RAW = Layout(name="WikiText-2 raw", folder="wikitext-2-raw", files=("wiki.train.raw", "wiki.valid.raw"))
CUT = Layout(name="WikiText-2 tokens", folder="wikitext-2", files=("wiki.train.tokens", "wiki.valid.tokens"))
_PARQUET = ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet")
HUB_RAW = Layout(name="WikiText-2 raw parquet", folder="wikitext-2-raw-v1", files=_PARQUET)
HUB_CUT = Layout(name="WikiText-2 tokens parquet", folder="wikitext-2-v1", files=_PARQUET)
VOCABULARY = ("vocab.json", "merges.txt")
# The published text has 11 MB, the larger file of the vocabulary 1 MB.
MOST_TEXT_BYTES, _VOCABULARY_BYTES, _ROWS_AT_ONCE = 2**26, 2**24, 64

logger = logging.getLogger(__name__)


class Attention(nn.Module):
    """Let every position look at itself and at earlier ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.project_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        rate = DROPOUT if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=rate)
        return self.project_out(seen.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One transformer block: attention and a two-layer network, each on a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        gelu = nn.GELU(approximate="tanh")
        self.network = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.network(self.norm_2(x)))


class Embedding(nn.Module):
    """Embed tokens and their positions."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))


class Head(nn.Module):
    """Return a logit for each token of the vocabulary."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.norm(x))


class GPT2(nn.Module):
    """Predict the next token."""

    def __init__(self, words: int, layers: int = LAYERS, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.embedding = Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = Head(words, width)
        self.apply(_initialise)
        for block in self.blocks:
            for last in (block.attention.project_out, block.network[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
        # The embedding and the head share one matrix.
        self.head.project.weight = self.embedding.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def located() -> Located:
    """Return the folder of WikiText-2."""
    return locate(data_folder(), (RAW, CUT, HUB_RAW, HUB_CUT))


def vocabulary() -> tuple[Path, Path] | None:
    """Return GPT-2's vocabulary and merges if the folder has them and tokenizers is installed."""
    for place in (data_folder() / "gpt2", data_folder()):
        words, merges = (place / name for name in VOCABULARY)
        if is_file(words) and is_file(merges):
            if find_spec("tokenizers") is None:
                logger.warning("%s is not used, since tokenizers is not installed: training on bytes", words)
                return None
            return words, merges
    return None


def text(path: Path) -> str:
    """Return a file's text."""
    if path.suffix != ".parquet":
        try:
            # Line ends are one character, whatever system unpacked the file.
            return io.StringIO(read_file(path).decode(), newline=None).read()
        except UnicodeDecodeError as error:
            raise JobError("is not UTF-8 text", where=str(path), allowed="WikiText-2 as it is published") from error
    if find_spec("pyarrow") is None:
        raise JobError("is parquet, and pyarrow is missing", where=str(path), allowed="pip install pyarrow")
    content = read_file(path)
    try:
        return "".join(_rows(content))
    except Exception as error:
        raise JobError(f"cannot be read ({error})", where=str(path), allowed="parquet with a column 'text'") from error


def _rows(content: bytes) -> Iterator[str]:
    """Yield the texts of a parquet file, which may decompress to many times its size."""
    import pyarrow
    from pyarrow import parquet

    source, unpacked = parquet.ParquetFile(pyarrow.BufferReader(content)), 0
    groups = [source.metadata.row_group(number) for number in range(source.metadata.num_row_groups)]
    if sum(group.total_byte_size for group in groups) > MOST_TEXT_BYTES:
        raise ValueError(f"it unpacks to more than {MOST_TEXT_BYTES} bytes")
    for rows in source.iter_batches(batch_size=_ROWS_AT_ONCE, columns=["text"]):
        unpacked += rows.nbytes
        if unpacked > MOST_TEXT_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_TEXT_BYTES} bytes")
        yield from rows.column(0).to_pylist()


@functools.cache
def tokens(found: Located, words: tuple[Path, Path] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training and validation text as numbers: GPT-2's tokens, or bytes."""
    train, validation = (_cut(text(path), words) for path in found.paths)
    for part, path in ((train, found.paths[0]), (validation, found.paths[1])):
        if len(part) <= LENGTH:
            raise JobError(f"has {len(part)} tokens", where=str(path), allowed=f"at least {LENGTH + 1}")
    return train, validation


def _cut(content: str, words: tuple[Path, Path] | None) -> torch.Tensor:
    if not content:
        return torch.empty(0, dtype=torch.long)
    if words is None:
        return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8).long()
    from tokenizers import ByteLevelBPETokenizer

    allowed = "GPT-2's own vocabulary"
    for path in words:
        # The library reads these files itself, whatever their size, so their size is checked first.
        read_file(path, limit_bytes=_VOCABULARY_BYTES)
    try:
        found = torch.tensor(ByteLevelBPETokenizer(*map(str, words)).encode(content).ids, dtype=torch.long)
    except Exception as error:
        raise JobError(f"cannot be read ({error})", where=str(words[0]), allowed=allowed) from error
    if len(found) and int(found.max()) >= TOKENS:
        raise JobError(f"has a token {found.max()}", where=str(words[0]), allowed=allowed)
    return found


def model() -> nn.Module:
    """Return the model for the vocabulary that the folder has."""
    return GPT2(BYTES if vocabulary() is None else TOKENS)


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    source, _ = tokens(located(), vocabulary())
    while True:
        starts = torch.randint(len(source) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([source[start : start + LENGTH + 1] for start in starts.tolist()])


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def perplexity(model: nn.Module) -> float:
    """Return exp(loss) of evenly spaced validation sequences."""
    device = next(model.parameters()).device
    _, source = tokens(located(), vocabulary())
    starts = torch.linspace(0, len(source) - LENGTH - 1, VALIDATION_SEQUENCES).long().unique()
    sequences = torch.stack([source[start : start + LENGTH + 1] for start in starts.tolist()])
    parts = sequences.split(EVALUATED_AT_ONCE)
    total = sum(mean_loss(model, part.to(device)).item() * len(part) for part in parts)
    return math.exp(total / len(sequences))


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)


def data_sources() -> list[DataSource]:
    words = vocabulary()
    cut = [DataSource(name="cut into bytes", size_bytes=0, sha256="")] if words is None else []
    return [*located().sources(), *(source_of(path, f"GPT-2 {path.name}") for path in words or ()), *cut]


def job() -> Job:
    """Return the job; its target depends on how the folder's text is split."""
    return Job(
        name="gpt2_wikitext2",
        model=model,
        batches=batches,
        loss=mean_loss,
        optimizer=optimizer,
        evaluate=perplexity,
        target=TARGET_OF_BYTES if _in_bytes() else TARGET,
        batch_size=BATCH,
        batching="fixed",
        accumulation_choices=(1, 2, 4, 8),
        schedule=WarmupCosine(),
        clip_norm=1.0,
        max_steps=6000,
        evaluate_every=100,
        data_sources=data_sources,
    )


def random() -> Job:
    """Return the same model on random tokens, to measure steps without data."""
    return _on_random_tokens("gpt2_random", lambda: GPT2(TOKENS), BATCH, LENGTH)


def billion() -> Job:
    """Return a GPT of 1.3 B parameters on random tokens. Source: GPT-3 XL, arXiv 2005.14165, table 2.1."""
    return _on_random_tokens("gpt_billion_random", lambda: GPT2(TOKENS, layers=24, width=2048, heads=16), 8, CONTEXT)


def _on_random_tokens(name: str, model: Callable[[], nn.Module], batch: int, length: int) -> Job:
    def batches(seed: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(TOKENS, (batch, length + 1), generator=generator)

    return dataclasses.replace(
        job(),
        name=name,
        model=model,
        batches=batches,
        batch_size=batch,
        evaluate=lambda model: math.exp(mean_loss(model, next(batches(0)).to(next(model.parameters()).device)).item()),
        data_sources=lambda: [DataSource(name="random tokens", size_bytes=0, sha256="")],
    )


def _in_bytes() -> bool:
    try:
        return vocabulary() is None
    except JobError:
        # No folder has been named yet.
        return False
