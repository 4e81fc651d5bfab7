"""Memory budgets: a size or a share of the baseline's peak, of allocated or of reserved memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autotune.errors import BudgetError

# Bytes by unit; 8gb, 8GB and 8Gb are the same size, since nobody budgets bits.
_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
# An accelerator's allocator reserves whole segments (torch on NVIDIA GPUs: 2 MiB for small blocks, 20 MiB for those of
# 1 to 10 MiB, multiples of 2 MiB beyond), and parts of them stay unused. How much depends on the order of a step's
# blocks, so it is measured while a job is profiled. The factor covers plans that leave larger gaps than those profiled.
_FRAGMENTS_RESERVE = 1.5
# Largest share of unused memory: beyond it, the allocator frees its cache and starts again.
_FRAGMENTS_SHARE = 0.3

# Larger than any device's memory; sums of such sizes are exact in JSON.
_LARGEST_TIB, _LARGEST_PERCENT = 1024, 10_000
_ALLOWED = (
    "a size such as 20GiB or 900MiB, or a share of the baseline's peak such as 75%, up to "
    f"{_LARGEST_TIB}TiB or {_LARGEST_PERCENT}%; 20GiB:reserved for what nvidia-smi shows"
)
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+|%)(:reserved)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A memory budget: either a size in bytes or a share of the baseline's peak.

    Attributes:
        size_bytes: the size, at most 1024 TiB; ``None`` if the budget is a share.
        share: the share, above 0 and at most 100; ``None`` if the budget is a size.
        reserved: whether the size limits the memory that an accelerator's allocator reserves, instead of the memory of
            tensors.
    """

    size_bytes: int | None = None
    share: float | None = None
    reserved: bool = False

    def __post_init__(self) -> None:
        value = self.size_bytes if self.share is None else self.share
        largest = _LARGEST_TIB * _UNITS["tib"] if self.share is None else _LARGEST_PERCENT / 100
        if (self.size_bytes is None) == (self.share is None) or value is None or not 0 < value <= largest:
            shown = value if self.share is None else f"{100 * self.share:g}%"
            raise BudgetError(f"memory budget is {shown}", where="--memory-budget", allowed=_ALLOWED)

    @classmethod
    def text_of(cls, given: str | int | None) -> str | None:
        """Return a budget that was given as text or in bytes as text; ``None`` for none.

        Raises:
            BudgetError: if it is anything else.
        """
        if given is None or isinstance(given, str):
            return given
        is_size = isinstance(given, int) and not isinstance(given, bool)
        if not is_size or not 0 < given <= _LARGEST_TIB * _UNITS["tib"]:
            raise BudgetError(f"memory budget is {given!r}", where="memory_budget", allowed=f"bytes, {_ALLOWED}")
        return f"{given}B"

    @classmethod
    def parse(cls, text: str) -> MemoryBudget:
        """Parse a budget as users write it.

        Raises:
            BudgetError: if the text is neither a size nor a share.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is not None and match[2] == "%" and not match[3]:
            return cls(share=float(match[1]) / 100)
        size = math.inf if match is None else float(match[1]) * _UNITS.get(match[2].lower(), math.inf)
        if match is None or not math.isfinite(size):
            problem = f"memory budget is {text!r}{_suggestion(text)}"
            raise BudgetError(problem, where="--memory-budget", allowed=_ALLOWED)
        return cls(size_bytes=int(size), reserved=bool(match[3]))

    def resolve(self, baseline_peak_bytes: int, fragments_bytes: int = 0) -> int:
        """Return the budget in bytes of allocated memory.

        Args:
            baseline_peak_bytes: the baseline's peak, to which a share refers.
            fragments_bytes: measured memory that the job reserves beyond what it allocates.
        """
        if self.size_bytes is not None:
            return allocated_within(self.size_bytes, fragments_bytes) if self.reserved else self.size_bytes
        return int((self.share or 0.0) * baseline_peak_bytes)


def _suggestion(text: str) -> str:
    """Return what a number without a unit, or with half a unit, probably means, as a question."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt]i?)?", text.strip(), re.IGNORECASE)
    if match is None:
        return ""
    if match[2]:
        return f"; did you mean '{match[1]}{match[2][0].upper()}iB'?"
    share = float(match[1])
    return f"; did you mean '{100 * share:g}%'?" if 0 < share <= 1 else ""


def allocated_within(reserved_bytes: int, fragments_bytes: int) -> int:
    """Return how many bytes of tensors fit into the memory that an accelerator's allocator may reserve.

    Args:
        reserved_bytes: memory that the allocator may reserve.
        fragments_bytes: the largest measured difference between the reserved and the allocated peak of a step.
    """
    return reserved_bytes - int(min(_FRAGMENTS_RESERVE * fragments_bytes, _FRAGMENTS_SHARE * reserved_bytes))


def format_bytes(size: float) -> str:
    """Format a size in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
