"""The state of an interrupted training, stored as bytes that cannot contain code and restored exactly.

Tensors of the network and the optimizer are stored as safetensors, and the states of random generators as JSON in its
header. The bytes are not trusted: every name, shape and number is checked before it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from autotune.agents.recipe import LeverRecipe
from autotune.agents.shipped_network import LeverNetwork
from autotune.errors import InputError
from autotune.io.files import parse_json

_ALLOWED = "a file saved by training"
_NUMBERS = "numbers"
# Largest size of the integers in the state of NumPy's PCG64, in bits, including the sign.
_NUMBER_BITS = 129
_KEYS = frozenset({"identity", "decisions", "courses", "position", "has_gauss", "gauss"})
# Adam's state of each parameter.
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_TORCH, _NUMPY = "torch", "numpy"
# Number of words in the state of numpy's Mersenne Twister.
_WORDS = 624

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedTraining:
    """The state of a training between two rollouts, which determines how it continues.

    Attributes:
        decisions: number of decisions so far.
        weights: weights of the network, by parameter name.
        moments: Adam's state, by ``MOMENTS`` and parameter name; empty before its first step.
        courses: state of the generator before it draws the next courses.
        torch_state: state of torch's global generator, shape (bytes,).
        numpy_state: state of numpy's global generator, as ``numpy.random.get_state`` returns it.
    """

    decisions: int
    weights: Tensors
    moments: Mapping[str, Tensors]
    courses: Mapping[str, Any]
    torch_state: torch.Tensor
    numpy_state: tuple[str, np.ndarray[Any, Any], int, int, float]

    def to_bytes(self, identity: str) -> bytes:
        """Return the state as bytes; equal states give equal bytes.

        Args:
            identity: identity of the training; only the same training can continue from the state.
        """
        kind, keys, position, has_gauss, gauss = self.numpy_state
        assert kind == "MT19937"
        tensors = {f"weights {name}": tensor for name, tensor in self.weights.items()}
        for moment, values in self.moments.items():
            tensors |= {f"{moment} {name}": tensor for name, tensor in values.items()}
        tensors[_TORCH] = self.torch_state
        tensors[_NUMPY] = torch.from_numpy(np.asarray(keys).astype(np.int64))
        numbers = {
            "identity": identity,
            "decisions": self.decisions,
            "courses": self.courses,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        }
        plain = {name: tensor.detach().clone().contiguous() for name, tensor in sorted(tensors.items())}
        return save_tensors(plain, metadata={_NUMBERS: json.dumps(numbers, sort_keys=True, allow_nan=False)})

    @classmethod
    def from_bytes(cls, content: bytes, *, identity: str, recipe: LeverRecipe, rollout: int) -> SavedTraining:
        """Read the state of a training.

        Args:
            content: bytes that :meth:`to_bytes` returned.
            identity: identity of the training that continues.
            recipe: settings of that training.
            rollout: decisions per rollout.

        Raises:
            InputError: if the state belongs to another training, or a part of it is invalid.
        """
        try:
            tensors = load_tensors(content)
            header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")].decode(), where="")
            numbers = parse_json(header["__metadata__"][_NUMBERS], where="", bits=_NUMBER_BITS)
        except (SafetensorError, LookupError, TypeError, ValueError) as error:
            raise InputError("is not safetensors with numbers", allowed=_ALLOWED) from error
        _require(numbers.keys() == _KEYS, "has missing or unknown numbers")
        _require(numbers["identity"] == identity, "belongs to another training")
        decisions = numbers["decisions"]
        whole = type(decisions) is int and decisions % rollout == 0
        _require(whole and 0 <= decisions < recipe.decisions, "has a decision count that is not the end of a rollout")
        _check_tensors(tensors, recipe.width, begun=decisions > 0)
        return cls(
            decisions=decisions,
            weights=_part(tensors, "weights"),
            moments={moment: _part(tensors, moment) for moment in MOMENTS} if decisions else {},
            courses=_checked_courses(numbers["courses"]),
            torch_state=_checked_torch_state(tensors[_TORCH]),
            numpy_state=_checked_numpy_state(tensors[_NUMPY], numbers),
        )


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InputError(problem, allowed=_ALLOWED)


def _part(tensors: Tensors, kind: str) -> Tensors:
    return {name.removeprefix(f"{kind} "): tensor for name, tensor in tensors.items() if name.startswith(f"{kind} ")}


def _check_tensors(tensors: Tensors, width: int, *, begun: bool) -> None:
    """Reject tensors with wrong names, shapes or dtypes, or with invalid numbers."""
    with torch.device("meta"):
        like = dict(LeverNetwork(width).named_parameters())
    kinds = ("weights", *(MOMENTS if begun else ()))
    wanted = {f"{kind} {name}": () if kind == "step" else like[name].shape for kind in kinds for name in like}
    _require(tensors.keys() == wanted.keys() | {_TORCH, _NUMPY}, "has missing or unknown tensors")
    for name, shape in wanted.items():
        tensor = tensors[name]
        _require(tensor.dtype == torch.float32 and tensor.shape == shape, f"tensor {name!r} has another shape or type")
        _require(bool(torch.isfinite(tensor).all()), f"tensor {name!r} is not finite")
        counts = name.startswith(("step ", "exp_avg_sq "))
        _require(not counts or bool((tensor >= 0).all()), f"tensor {name!r} is below 0")


def _checked_torch_state(state: torch.Tensor) -> torch.Tensor:
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise InputError("the state of torch's generator is invalid", allowed=_ALLOWED) from error
    return state


def _checked_numpy_state(
    keys: torch.Tensor, numbers: Mapping[str, Any]
) -> tuple[str, np.ndarray[Any, Any], int, int, float]:
    """Return a checked state of NumPy's global generator; NumPy itself accepts positions outside of its words."""
    position, has_gauss, gauss = (numbers[name] for name in ("position", "has_gauss", "gauss"))
    words = keys.dtype == torch.int64 and keys.shape == (_WORDS,) and bool(((keys >= 0) & (keys < 2**32)).all())
    placed = type(position) is int and 0 <= position <= _WORDS and type(has_gauss) is int and has_gauss in (0, 1)
    valid = words and placed and type(gauss) is float and math.isfinite(gauss)
    _require(valid, "the state of NumPy's generator is invalid")
    return "MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss


def _checked_courses(state: object) -> dict[str, Any]:
    generator = np.random.PCG64()
    problem = "the state of the course generator is invalid"
    try:
        generator.state = state  # type: ignore[assignment]
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise InputError(problem, allowed=_ALLOWED) from error
    # The generator must return the state that it was given.
    taken = dict(generator.state)
    _require(json.dumps(taken, sort_keys=True) == json.dumps(state, sort_keys=True), problem)
    return taken
