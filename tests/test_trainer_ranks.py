"""Tests of the frameworks' callbacks on several ranks: training stays bit-identical, and the tuner stays attached."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import fork_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")


def test_callbacks_tune_models_in_ddp_and_training_stays_bit_identical(tmp_path: Path) -> None:
    fork_ranks("trainer_ranks.py", tmp_path, "transformers", "lightning")


@pytest.mark.slow
def test_batches_accumulated_in_ddp_stay_bit_identical(tmp_path: Path) -> None:
    fork_ranks("trainer_ranks.py", tmp_path, "accumulating", "lightning-accumulating")


@pytest.mark.slow
def test_recomputation_of_a_trainer_is_taken_over_in_ddp(tmp_path: Path) -> None:
    fork_ranks("trainer_ranks.py", tmp_path, "recomputing")


@pytest.mark.slow
def test_adapters_in_ddp_are_trained_bit_identically(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    fork_ranks("trainer_ranks.py", tmp_path, "adapters")
