"""The choices for a unit, with the facts that the rest of the package uses.

To add a precision or storage, add a member here and implement its effect on a model in ``mechanics``. All other files
read the facts. The only storage that they name is ``save``, which is what a unit does without a plan; and ``recompute``
where a plan or a rule is about recomputation.
"""

from __future__ import annotations

from enum import StrEnum

# Bytes of an fp32 number.
FP32_BYTES = 4


class Precision(StrEnum):
    """The compute dtype of a unit under autocast; its parameters keep their dtype.

    ``inherit`` leaves the unit to the user's own code, without a context or a cast. Under the others, a unit's 16-bit
    outputs are cast back to fp32, so that its precision does not affect other units; only uniform 16-bit plans may
    pass them on. Reduced precisions are in order of preference.

    Attributes:
        dtype: torch's name of the dtype of autocast; empty for ``inherit``. Under ``fp8``, linear layers have another.
        element_bytes: bytes per number in matrix products; ``inherit`` counts as fp32.
        letter: one character for narrow displays.
        needs_loss_scaling: whether gradients underflow unless the loss is scaled.
        asked_only: whether plans may choose it only if ``AUTOTUNE_PRECISIONS`` names it; no policy was trained on it.
    """

    dtype: str
    element_bytes: int
    letter: str
    needs_loss_scaling: bool
    asked_only: bool

    INHERIT = "inherit"
    FP32 = "fp32", "float32", FP32_BYTES, "f"
    BF16 = "bf16", "bfloat16", 2, "b"
    FP16 = "fp16", "float16", 2, "h", True
    FP8 = "fp8", "bfloat16", 1, "8", False, True

    def __new__(
        cls,
        value: str,
        dtype: str = "",
        element_bytes: int = FP32_BYTES,
        letter: str = ".",
        needs_loss_scaling: bool = False,
        asked_only: bool = False,
    ) -> Precision:
        """Make a member with its properties."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.dtype, member.element_bytes, member.letter = dtype, element_bytes, letter
        member.needs_loss_scaling, member.asked_only = needs_loss_scaling, asked_only
        return member

    @property
    def is_reduced(self) -> bool:
        """Return whether matrix products run in a narrower format than fp32."""
        return self.element_bytes < FP32_BYTES

    @property
    def is_16_bit(self) -> bool:
        """Return whether autocast alone computes in it, so that units can pass its tensors to each other."""
        return self.element_bytes == FP32_BYTES // 2


class Storage(StrEnum):
    """What happens to a unit's activations between forward and backward, from the fastest storage to the leanest.

    Attributes:
        label: adjective in reports for a unit with this storage.
        act: what the storage does, in reports.
        kept_frac: share of the unit's activations that stays allocated, for simulated jobs; profiles measure it.
        extra_forwards: extra time in forward passes of the unit, for simulated jobs; profiles measure it.
        recomputes: whether the backward pass repeats the unit's whole forward pass, for which it keeps the inputs.
        exact: whether gradients are bit-identical to those of ``save``.
        needs_accelerator: whether it moves activations out of a device's own memory.
        compile_budget: what a compiled unit may keep beside its inputs, as a share of what makes it fastest; 0 for a
            unit that is not compiled.
        keeps_gathered: whether weights that are sharded over ranks stay gathered, too; only for engines that shard.

    Units that are compiled or keep their weights gathered may be faster than saving ones.
    """

    label: str
    act: str
    kept_frac: float
    extra_forwards: float
    recomputes: bool
    exact: bool
    needs_accelerator: bool
    compile_budget: float
    keeps_gathered: bool

    SAVE = "save", "kept", "saving"
    GATHERED = "gathered", "kept with weights", "keeping weights", 1.2, -0.1, False, True, False, 0.0, True
    COMPILED = "compiled", "compiled", "compiling", 0.9, -0.4, False, False, False, 1.0
    SELECTIVE = "selective", "partly recomputed", "recomputing in part", 0.6, 0.15
    COMPILED50 = "compiled50", "compiled at half", "compiling at half", 0.4, 0.1, False, False, False, 0.5
    COMPRESS8 = "compress8", "compressed to 8 bits", "compressing to 8 bits", 0.3, 0.5, False, False
    COMPRESS4 = "compress4", "compressed to 4 bits", "compressing to 4 bits", 0.2, 0.5, False, False
    COMPILED20 = "compiled20", "compiled at a fifth", "compiling at a fifth", 0.17, 0.2, False, False, False, 0.2
    REBUILD = "rebuild", "mostly recomputed", "recomputing for the most part", 0.15, 0.7
    COMPILED10 = "compiled10", "compiled at a tenth", "compiling at a tenth", 0.1, 0.3, False, False, False, 0.1
    OFFLOAD = "offload", "offloaded", "offloading", 0.1, 0.8, False, True, True
    GATHERED_RECOMPUTE = (
        "gathered-recompute",
        "recomputed with weights",
        "recomputing with weights",
        0.2,
        0.9,
        True,
        True,
        False,
        0.0,
        True,
    )
    RECOMPUTE = "recompute", "recomputed", "recomputing", 0.0, 1.0, True

    def __new__(
        cls,
        value: str,
        label: str = "",
        act: str = "",
        kept_frac: float = 1.0,
        extra_forwards: float = 0.0,
        recomputes: bool = False,
        exact: bool = True,
        needs_accelerator: bool = False,
        compile_budget: float = 0.0,
        keeps_gathered: bool = False,
    ) -> Storage:
        """Make a member with its properties."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.label, member.act = label, act
        member.kept_frac, member.extra_forwards, member.recomputes = kept_frac, extra_forwards, recomputes
        member.exact, member.needs_accelerator, member.compile_budget = exact, needs_accelerator, compile_budget
        member.keeps_gathered = keeps_gathered
        return member

    @property
    def approximates(self) -> bool:
        """Return whether gradients differ from those of ``save`` by more than the order of operations explains."""
        return not self.exact and not self.compile_budget

    @property
    def released(self) -> Storage:
        """Return what becomes of the activations alone, with weights that are released after the forward pass."""
        return {Storage.GATHERED: Storage.SAVE, Storage.GATHERED_RECOMPUTE: Storage.RECOMPUTE}.get(self, self)


STORAGES = tuple(Storage)
EXACT_STORAGES = tuple(storage for storage in Storage if storage.exact)
COMPILED_STORAGES = tuple(storage for storage in Storage if storage.compile_budget)
# The storages that save or recompute and may yet be faster than the one that does only that.
HASTENING_STORAGES = tuple(storage for storage in Storage if storage.compile_budget or storage.keeps_gathered)
# Environment variable that names the storages that plans may choose; worker processes find it, too.
STORAGES_VARIABLE = "AUTOTUNE_STORAGES"
# The storages of a space for which no others were asked.
DEFAULT_STORAGES = (Storage.SAVE, Storage.RECOMPUTE)
# The precisions that are offered without being asked for, and that policies know.
USUAL_PRECISIONS = tuple(precision for precision in Precision if not precision.asked_only)
REDUCED_PRECISIONS = tuple(precision for precision in Precision if precision.is_reduced)
