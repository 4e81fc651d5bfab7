"""The choices for a unit, with the properties that the rest of the package uses.

To add a precision or storage, add a member here and implement its effect on a model in ``mechanics``.
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
        dtype: torch's name of the dtype; empty for ``inherit``.
        element_bytes: bytes per number in matrix products; ``inherit`` counts as fp32.
        letter: one character for narrow displays.
        needs_loss_scaling: whether gradients underflow unless the loss is scaled.
    """

    dtype: str
    element_bytes: int
    letter: str
    needs_loss_scaling: bool

    INHERIT = "inherit"
    FP32 = "fp32", "float32", FP32_BYTES, "f"
    BF16 = "bf16", "bfloat16", 2, "b"
    FP16 = "fp16", "float16", 2, "h", True

    def __new__(
        cls,
        value: str,
        dtype: str = "",
        element_bytes: int = FP32_BYTES,
        letter: str = ".",
        needs_loss_scaling: bool = False,
    ) -> Precision:
        """Make a member with its properties."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.dtype, member.element_bytes, member.letter = dtype, element_bytes, letter
        member.needs_loss_scaling = needs_loss_scaling
        return member

    @property
    def is_reduced(self) -> bool:
        """Tell whether matrix products run in a narrower format than fp32."""
        return self.element_bytes < FP32_BYTES


class Storage(StrEnum):
    """What happens to a unit's activations between forward and backward, from the fastest storage to the leanest.

    Attributes:
        label: adjective in reports for a unit with this storage.
        extra_forwards: forward passes that the backward pass repeats.
    """

    label: str
    extra_forwards: int

    SAVE = "save", "kept", 0
    RECOMPUTE = "recompute", "recomputed", 1

    def __new__(cls, value: str, label: str = "", extra_forwards: int = 0) -> Storage:
        """Make a member with its properties."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.label, member.extra_forwards = label, extra_forwards
        return member

    @property
    def recomputes(self) -> bool:
        """Tell whether the backward pass runs the unit's forward pass again."""
        return self.extra_forwards > 0


# The default storages of a space.
STORAGES = tuple(Storage)
REDUCED_PRECISIONS = tuple(precision for precision in Precision if precision.is_reduced)
