"""Tests of stored training states as data: a folder is read whole or refused, and runs no code."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict_saver

from autotune.errors import EngineError
from autotune.mechanics.spread_state import RunState, read_state, save_state


class Bait:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def state(seed: int) -> RunState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return RunState(model=model, optimizer=optimizer, run={"seed": 0}, progress={"steps": 1})


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path):
    """Make a group of one rank, as each test's process is."""
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_state(state(1), tmp_path / "stored")
    return tmp_path / "stored"


def values(one: RunState) -> list[torch.Tensor]:
    entries = one.optimizer.state.values()
    kept = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
    return [tensor.clone() for tensor in [*one.tensors.values(), *kept]]


def test_a_state_comes_back_whole(folder: Path) -> None:
    stored, other = state(1), state(2)
    assert not all(torch.equal(a, b) for a, b in zip(values(stored), values(other), strict=True))
    found = read_state(other, folder)
    assert found.progress == {"steps": 1}
    found.put_into(other)
    assert all(torch.equal(a, b) for a, b in zip(values(stored), values(other), strict=True))
    assert other.optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def refused(folder: Path) -> str:
    own = state(2)
    before = values(own)
    with pytest.raises(EngineError) as caught:
        read_state(own, folder)
    assert all(torch.equal(a, b) for a, b in zip(before, values(own), strict=True))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_an_index_that_runs_code_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Bait(tmp_path / "bitten")))
    assert "posix.mkdir" in refused(folder)
    assert not (tmp_path / "bitten").exists()


def test_an_entry_that_torch_would_unpickle_is_refused(tmp_path: Path) -> None:
    own, folder = state(1), tmp_path / "harmful"
    harmful = {**own.tensors, "model/0.weight": Bait(tmp_path / "bitten"), "about": torch.ones(3, dtype=torch.uint8)}
    state_dict_saver.save(harmful, checkpoint_id=str(folder))
    assert "BytesStorageMetadata" in refused(folder)
    assert not (tmp_path / "bitten").exists()


def test_an_index_that_names_files_elsewhere_is_refused(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    for one in index.storage_data.values():
        one.relative_path = "../elsewhere.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert "other folders" in refused(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_damaged_file_is_refused_or_changes_nothing_but_values(folder: Path, name: str) -> None:
    whole, generator = (folder / name).read_bytes(), random.Random(0)
    tried = 0
    for _ in range(60):
        place = generator.randrange(len(whole))
        damaged = whole[:place] if generator.random() < 0.3 else whole[:place] + b"\x80" + whole[place + 1 :]
        (folder / name).write_bytes(damaged)
        own = state(2)
        try:
            read_state(own, folder).put_into(own)
        except EngineError:
            tried += 1
    assert tried > 10
