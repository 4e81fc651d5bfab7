"""Where jobs train if nobody says otherwise."""

from __future__ import annotations

import pytest
import tiny_job
import torch

from autotune.campaign import comparison
from autotune.campaign.windows import make_engine
from autotune.engines import torch_engine
from autotune.engines.torch_engine import TorchEngine
from autotune.mechanics.devices import device_kind, device_name


def test_the_device_of_this_machine_is_named() -> None:
    assert device_kind() in ("cpu", "cuda")
    assert device_name().strip()


def test_an_engine_trains_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "device_kind", lambda: "cuda")
    assert TorchEngine(tiny_job.job(), device="cpu").device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal of a machine without a GPU tells where it went")
def test_campaigns_train_on_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "device_kind", lambda: "cuda")
    for begin in (lambda job: make_engine(job, 0), lambda job: comparison.pilot(job, 100)):
        with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
            begin(tiny_job.job())
