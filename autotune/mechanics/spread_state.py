"""Write the training state of a spread model to a folder, and read it on any number of ranks.

Tensors are read into new ones, and copied into the model only when all ranks have read theirs. A folder is data: torch
would unpickle its index and any entry that is no tensor, and so run what a stranger has written there.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.tensor import DTensor

from autotune.errors import EngineError, a_kind, one_line
from autotune.mechanics.collectives import of_all_ranks

# What describes the state: JSON in a tensor of bytes, because torch would pickle a string.
_ABOUT = "about"
# Characters of an exception that are shown.
_QUOTED = 300
# What torch's index of a checkpoint is made of, beside sizes and dtypes.
_IN_AN_INDEX = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "TensorProperties"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A training state.

    Attributes:
        model: the model, spread over ranks.
        optimizer: its optimizer.
        run: what must be the same where the state is loaded, by name, such as the seed.
        progress: counters of the run.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Mapping[str, Any]
    progress: Mapping[str, int]

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """Return the names of the model's parameters."""
        return {parameter: name for name, parameter in self.model.named_parameters()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and buffers by name."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {f"model/{name}": tensor.detach() for name, tensor in named}

    def shapes(self) -> dict[str, list[Any]]:
        """Return the shape and dtype of each parameter and buffer by name."""
        return {name: [list(one.shape), str(one.dtype)] for name, one in self.tensors.items()}

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        names = self.names
        return [[names[one] for one in group["params"]] for group in self.optimizer.param_groups]


def save_state(state: RunState, folder: str | Path) -> None:
    """Write a state; every rank writes its part.

    Args:
        state: the state, which stays as it is.
        folder: an empty or new folder that all ranks see.

    Raises:
        EngineError: if the folder cannot be written, on all ranks.
    """
    stored, values = state.tensors, {}
    for name, entries in _entries(state).items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                stored[f"optimizer/{name}/{key}"] = value
        values[name] = {key: _described(value) for key, value in entries.items()}
    about = {
        "run": dict(state.run),
        "progress": dict(state.progress),
        "shapes": state.shapes(),
        "groups": state.groups(),
        "settings": [_plain(group) for group in state.optimizer.param_groups],
        "optimizer": values,
    }
    written = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    with _told(f"the training state cannot be written to {folder}"):
        state_dict_saver.save({**stored, _ABOUT: written}, checkpoint_id=str(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadState:
    """A training state that was read from a folder.

    Attributes:
        progress: counters of the run.
        tensors: the model's tensors by name.
        optimizer: the optimizer's own state.
    """

    progress: Mapping[str, int]
    tensors: Mapping[str, torch.Tensor]
    optimizer: dict[str, Any]

    def put_into(self, state: RunState) -> None:
        """Copy it into the model and the optimizer for which it was read."""
        with torch.no_grad():
            for name, tensor in state.tensors.items():
                tensor.copy_(self.tensors[name])
        state.optimizer.load_state_dict(self.optimizer)


def read_state(state: RunState, folder: str | Path) -> ReadState:
    """Read a state; nothing changes.

    Args:
        state: a state of the same run, which tells how its tensors are spread here.
        folder: a folder that :func:`save_state` has written, on any number of ranks.

    Raises:
        EngineError: if the folder cannot be read, or belongs to another run, on all ranks.
    """
    about = _agreed_about(state, folder)
    with _told(f"the training state in {folder} cannot be loaded"):
        read = {name: torch.empty_like(one) for name, one in state.tensors.items()}
        parameters = {name: parameter for parameter, name in state.names.items()}
        for name, entries in about["optimizer"].items():
            for key, told in entries.items():
                if "dtype" in told:
                    read[f"optimizer/{name}/{key}"] = _empty(parameters[name], told)
        state_dict_loader.load(read, storage_reader=_Reader(folder))
        progress = {name: int(about["progress"][name]) for name in state.progress}
        return ReadState(progress=progress, tensors=read, optimizer=_optimizer(state, about, read))


def _optimizer(state: RunState, about: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the optimizer's own state as it was stored."""

    def value(name: str, key: str, told: Mapping[str, Any]) -> Any:
        return told["value"] if "value" in told else read[f"optimizer/{name}/{key}"]

    numbers = _numbers(state)
    entries = {
        numbers[name]: {key: value(name, key, told) for key, told in entry.items()}
        for name, entry in about["optimizer"].items()
    }
    groups = [
        {**group, **{key: _of_type(value, group[key]) for key, value in settings.items() if key in group}}
        for group, settings in zip(state.optimizer.state_dict()["param_groups"], about["settings"], strict=True)
    ]
    return {"state": entries, "param_groups": groups}


class _Index(pickle.Unpickler):
    """An unpickler that makes what torch's index of tensors consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class by its name.

        Raises:
            EngineError: if an index needs no such class.
        """
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in _IN_AN_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise EngineError(f"its index names {module}.{name}")


class _Reader(FileSystemReader):
    """Reads tensors of a folder, none of which can run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the folder's index.

        Raises:
            EngineError: if it is damaged, or names files elsewhere or anything but tensors.
        """
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                found = _Index(file).load()
            files = {one.relative_path for one in found.storage_data.values()}
        except (EngineError, OSError):
            raise
        except Exception as error:
            raise EngineError(f"its index is damaged ({type(error).__name__})") from error
        if any(Path(one).name != one for one in files):
            raise EngineError("its index names files in other folders")
        found.storage_meta = StorageMeta(load_id=self.load_id)
        assert isinstance(found, Metadata)
        return found


def _entries(state: RunState) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state by the name of the parameter; those without a gradient so far have none."""
    return {name: dict(state.optimizer.state[one]) for one, name in state.names.items() if one in state.optimizer.state}


def _described(value: Any) -> dict[str, Any]:
    """Return what is needed to read a value again."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "spread": isinstance(value, DTensor)}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise EngineError(f"the optimizer keeps {a_kind(value)}, which cannot be written")


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings that are numbers, texts, or sequences of them."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        parts = number if isinstance(number, list | tuple) else [number]
        if key != "params" and all(isinstance(part, _PLAIN) for part in parts):
            found[key] = number
    return found


def _agreed_about(state: RunState, folder: str | Path) -> dict[str, Any]:
    """Return the description of a stored state; raise on all ranks if it cannot be used on one."""
    about: dict[str, Any] = {}
    try:
        with _told(f"the training state in {folder} cannot be loaded"):
            about = _about(folder)
            different = _difference(state, about)
        problem = f"the training state in {folder} is of another run: {different}" if different else ""
    except EngineError as error:
        problem = str(error)
    problems = [one for one in of_all_ranks(problem) if one]
    if problems:
        raise EngineError(problems[0])
    return about


def _about(folder: str | Path) -> dict[str, Any]:
    """Return the description of a stored state."""
    known: Any = _Reader(folder).read_metadata().state_dict_metadata.get(_ABOUT)
    if known is None:
        raise EngineError("it was not written by this engine's save()")
    read = {_ABOUT: torch.empty(known.size, dtype=torch.uint8)}
    with warnings.catch_warnings():
        # Each rank reads alone, on purpose.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_loader.load(read, storage_reader=_Reader(folder), no_dist=True)
    found: dict[str, Any] = json.loads(bytes(read[_ABOUT].tolist()))
    return found


def _difference(state: RunState, about: Mapping[str, Any]) -> str:
    """Return how a stored state differs from a run; empty if it belongs to it."""
    for name, value in state.run.items():
        if about["run"].get(name) != value:
            return f"{name} is {about['run'].get(name)!r} there, and {value!r} here"
    own, stored = state.shapes(), about["shapes"]
    for name in [*own, *stored]:
        if own.get(name) != stored.get(name):
            here, there = _shown(own.get(name)), _shown(stored.get(name))
            return f"{name.removeprefix('model/')} is {there} there, and {here} here"
    return "" if state.groups() == about["groups"] else "the optimizer's groups have other parameters there"


def _shown(kind: list[Any] | None) -> str:
    """Return a tensor's shape and dtype as words."""
    return "missing" if kind is None else f"{kind[1].removeprefix('torch.')} of shape {tuple(kind[0])}"


def _empty(parameter: nn.Parameter, told: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor to be read, spread like a parameter if it was written so."""
    dtype = getattr(torch, told["dtype"])
    if told["spread"]:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(told["shape"], dtype=dtype)


def _numbers(state: RunState) -> dict[str, int]:
    """Return the numbers by which the optimizer's own state refers to parameters, by their names."""
    groups = state.optimizer.state_dict()["param_groups"]
    return {
        name: number
        for names, group in zip(state.groups(), groups, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }


def _of_type(value: Any, former: Any) -> Any:
    """Return a stored setting as the optimizer keeps it."""
    if isinstance(former, torch.Tensor):
        return torch.full_like(former, value)
    return tuple(value) if isinstance(former, tuple) else value


@contextmanager
def _told(problem: str) -> Iterator[None]:
    """Raise what goes wrong in the body as one short line."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{problem} ({error})") from error
    except CheckpointException as error:
        # It is no Exception, and quotes the traces of all ranks.
        cause = next(iter(error.failures.values()))[0]
        raise EngineError(f"{problem} ({one_line(cause)[:_QUOTED]})") from None
    except (AttributeError, OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise EngineError(f"{problem} ({one_line(error)[:_QUOTED]})") from error
