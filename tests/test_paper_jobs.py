"""Tests of the paper's jobs: loaders of the published formats, models of full size, and hostile folders."""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import public_folders
import pytest
import torch

from autotune import JobError, load_job
from autotune.data import Layout, data_folder, locate, pointed_at
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.io.plain_pickle import load_plain_pickle
from autotune.units import find_units

CIFAR, WIKITEXT = "resnet50_cifar10", "gpt2_wikitext2"


def module_of(name: str):
    """Return the module that a catalog job was loaded from."""
    return sys.modules[load_job(name).batches.__module__]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOTUNE_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("write", [public_folders.cifar_python, public_folders.cifar_binary])
def test_cifar_is_read_in_either_published_version(folder: Path, write):
    write(folder)
    batches = list(load_job(CIFAR).batches(seed=3))
    assert [images.shape for images, _ in batches] == [(128, 3, 32, 32)] * 2
    (training, training_labels), (test, test_labels) = module_of(CIFAR).examples(module_of(CIFAR).located())
    pixels, labels = public_folders.drawn_images(60, 1)
    assert torch.equal(training[60:120].reshape(60, -1), torch.from_numpy(pixels))
    assert training_labels[60:120].tolist() == labels.tolist()
    assert (len(training), len(test), len(test_labels)) == (300, 60, 60)


def test_both_versions_of_cifar_give_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    for name, write in (("py", public_folders.cifar_python), ("bin", public_folders.cifar_binary)):
        monkeypatch.setenv("AUTOTUNE_DATA", str(write(tmp_path / name)))
        seen.append(next(load_job(CIFAR).batches(seed=0)))
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_archive_folder_itself_can_be_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    public_folders.cifar_binary(folder)
    monkeypatch.setenv("AUTOTUNE_DATA", str(folder / "cifar-10-batches-bin"))
    assert len(load_job(CIFAR).data_sources()) == 6


def test_pickle_written_by_current_numpy_is_read(tmp_path: Path):
    pixels, labels = public_folders.drawn_images(5, 0)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2))
    found = load_plain_pickle(path, limit_bytes=2**20)
    assert np.array_equal(found["data"], pixels)
    assert found["labels"] == labels.tolist()


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_pickle_with_code_is_rejected_and_nothing_runs(folder: Path):
    public_folders.cifar_python(folder)
    marker = folder / "it-ran"
    batch = folder / "cifar-10-batches-py" / "data_batch_2"
    batch.write_bytes(pickle.dumps({b"data": Hostile(marker), b"labels": [0]}, protocol=2))
    with pytest.raises(JobError, match=r"data_batch_2: cannot be read \(it names posix.system\) \(allowed: a pick"):
        next(load_job(CIFAR).batches(seed=0))
    assert not marker.exists()


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
KIND = b"cnumpy\ndtype\n(U\x02%sK\x00K\x01tR"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02cbuiltins\neval\n(U\x011tR.", "it names builtins.eval"),
        (b"\x80\x02cnumpy\nload\n(U\x011tR.", "it names numpy.load"),
        (b"\x80\x02cnumpy\ndtype.__class__\n.", "it names numpy.dtype.__class__"),
        (b"\x80\x02U\x01aQ.", "it refers to something outside"),
        (b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00zipt R.", "cannot be read"),
        (b"\x80\x02](K\x01K\x02e.", "contains a list"),
        (b"", "cannot be read"),
        (b"\x80\x02}(U\x04data" + ARRAY + b"u.", "is damaged"),
        (b"\x80\x02}(U\x04data" + ARRAY + b"(K\x01(K\x02t" + KIND % b"O8" + b"\x89U\x02abtbu.", "not one of unsigned"),
        (b"\x80\x02}(U\x04data" + ARRAY + b"(K\x01(K\x09t" + KIND % b"u1" + b"\x89U\x02abtbu.", "has 2 bytes"),
    ],
)
def test_hostile_or_damaged_pickle_is_rejected_in_one_line(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(JobError, match=message) as raised:
        load_plain_pickle(path, limit_bytes=2**20)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_missing_wrong_and_empty_folders_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)
    with pytest.raises(JobError, match=r"AUTOTUNE_DATA: no folder of data sets is named \(allowed: a folder, by --dat"):
        data_folder()
    monkeypatch.setenv("AUTOTUNE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(JobError, match="nowhere' is not a folder"):
        load_job(CIFAR).data_sources()
    monkeypatch.setenv("AUTOTUNE_DATA", str(tmp_path))
    named = r"contains nothing .*cifar-10-batches-py/.data_batch_1,.*or cifar-10-batches-bin/"
    with pytest.raises(JobError, match=named):
        load_job(CIFAR).data_sources()
    with pytest.raises(JobError, match=r"wiki.train.raw,wiki.valid.raw. or wikitext-2/"):
        load_job(WIKITEXT).data_sources()


def test_first_missing_file_of_an_incomplete_data_set_is_named(folder: Path):
    public_folders.cifar_python(folder)
    (folder / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(JobError, match="cifar-10-batches-py lacks data_batch_3, and has data_batch_1, data_batch_2"):
        load_job(CIFAR).data_sources()


def test_only_some_of_many_unrelated_files_are_named(tmp_path: Path):
    for number in range(12):
        (tmp_path / f"file{number:02}").touch()
    with pytest.raises(JobError, match=r"contains file00, .*file07 and 4 more"):
        locate(tmp_path, [Layout(name="x", folder="x", files=("y",))])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda batch: batch.write_bytes(batch.read_bytes()[:-1]), "a multiple of 3073"),
        (lambda batch: batch.write_bytes(bytes([200] * 3073)), "has labels that are none"),
        (lambda batch: batch.write_bytes(b""), "has 0 bytes"),
    ],
)
def test_damaged_binary_batch_is_rejected(folder: Path, damage, message):
    public_folders.cifar_binary(folder)
    damage(folder / "cifar-10-batches-bin" / "data_batch_4.bin")
    with pytest.raises(JobError, match=f"data_batch_4.bin: .*{message}"):
        next(load_job(CIFAR).batches(seed=0))


def test_resnet_has_sixteen_blocks_as_units_and_parameters_for_ten_classes():
    model = load_job(CIFAR).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 23_520_842
    names = [unit.name for unit in find_units(model) if unit.recomputable]
    assert names == [f"blocks.{number}" for number in range(16)]


def test_gpt2_small_has_124_million_parameters_with_the_public_vocabulary():
    model = module_of(WIKITEXT).GPT2(50_257)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert len([unit for unit in find_units(model) if unit.recomputable]) == 12


@pytest.mark.parametrize("ending", ["raw", "tokens"])
def test_wikitext_is_read_as_bytes_and_the_job_says_so(folder: Path, ending: str):
    public_folders.wikitext(folder, ending)
    job = load_job(WIKITEXT)
    batch = next(job.batches(seed=0))
    assert batch.shape == (32, 257)
    assert bytes(batch[0].tolist()) in (public_folders.TEXT * 3).encode()
    assert [source.name for source in job.data_sources()][1:] == [
        f"WikiText-2 {ending}: wiki.valid.{ending}",
        "cut into bytes",
    ]
    assert job.target == pytest.approx(45 ** (1 / 4.4))


def test_wikitext_is_read_from_parquet_files(folder: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    inner = folder / "wikitext-2-raw-v1"
    inner.mkdir()
    lines = public_folders.TEXT.splitlines(keepends=True)
    for part in ("train", "validation"):
        parquet.write_table(pyarrow.table({"text": lines}), inner / f"{part}-00000-of-00001.parquet")
    train, _ = module_of(WIKITEXT).tokens(module_of(WIKITEXT).located(), None)
    assert bytes(train.tolist()) == public_folders.TEXT.encode()
    (inner / "train-00000-of-00001.parquet").write_bytes(b"PAR1 nothing")
    module_of(WIKITEXT).tokens.cache_clear()
    with pytest.raises(JobError, match=r"train-00000-of-00001.parquet: cannot be read .*allowed: parquet with a colu"):
        next(load_job(WIKITEXT).batches(seed=0))


def test_gpt2_vocabulary_is_used_if_the_folder_contains_it(folder: Path):
    pytest.importorskip("tokenizers")
    public_folders.wikitext(folder)
    public_folders.gpt2_vocabulary(folder / "gpt2")
    job = load_job(WIKITEXT)
    text = public_folders.TEXT * 3
    train, _ = module_of(WIKITEXT).tokens(module_of(WIKITEXT).located(), module_of(WIKITEXT).vocabulary())
    # Each "Rob" is one token instead of three.
    assert len(train) == len(text) - 2 * text.count("Rob")
    assert job.target == 45.0
    assert job.model().head.project.weight.shape == (50_257, 768)
    assert "GPT-2 merges.txt" in [source.name for source in job.data_sources()]


def test_too_short_or_binary_text_is_rejected(folder: Path):
    public_folders.wikitext(folder)
    valid = folder / "wikitext-2-raw" / "wiki.valid.raw"
    valid.write_text("short")
    with pytest.raises(JobError, match=r"wiki.valid.raw: has 5 tokens"):
        next(load_job(WIKITEXT).batches(seed=0))
    valid.write_bytes(b"\xff\xfe" * 400)
    with pytest.raises(JobError, match="is not UTF-8 text"):
        next(load_job(WIKITEXT).batches(seed=0))


BINARY_BATCH, TEXT = "cifar-10-batches-bin/data_batch_4.bin", "wikitext-2-raw/wiki.valid.raw"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "file"), [(CIFAR, BINARY_BATCH), (WIKITEXT, TEXT)])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "lacks"),
        (os.mkdir, "lacks"),
        (lambda path: path.symlink_to("/dev/zero"), "lacks"),
        (lambda path: path.symlink_to(path), "lacks"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "is larger than 67108864 bytes"),
    ],
    ids=["pipe", "folder", "device", "loop", "huge"],
)
def test_irregular_or_oversized_data_file_is_rejected_at_once_in_one_line(
    folder: Path, name: str, file: str, make, message: str
):
    public_folders.cifar_binary(folder)
    public_folders.wikitext(folder)
    (folder / file).unlink()
    make(folder / file)
    for use in (lambda job: next(job.batches(seed=0)), lambda job: job.data_sources()):
        with pytest.raises(JobError, match=message) as raised:
            use(load_job(name))
        assert "\n" not in str(raised.value)


def test_data_behind_a_link_is_read(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    public_folders.wikitext(folder)
    path = folder / TEXT
    path.rename(tmp_path_factory.mktemp("store") / "blob")
    path.symlink_to(next(tmp_path_factory.getbasetemp().glob("store*/blob")))
    assert next(load_job(WIKITEXT).batches(seed=0)).shape == (32, 257)


@pytest.mark.parametrize("named", ["x" * 5000, "/dev/zero", "x\x1b[31m", "/proc/self/fd/999/x"])
def test_impossible_folder_is_rejected_in_one_line(named: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AUTOTUNE_DATA", named)
    for name in (CIFAR, WIKITEXT):
        with pytest.raises(JobError, match="is not a folder") as raised:
            load_job(name).data_sources()
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 500
    with pytest.raises(JobError, match="is not a folder"), pointed_at(named):
        pass


def test_names_in_a_folder_are_listed_without_control_characters(tmp_path: Path):
    (tmp_path / "\x1b[31mred").touch()
    (tmp_path / os.fsdecode(b"\xff")).touch()
    with pytest.raises(JobError) as raised:
        locate(tmp_path, [Layout(name="x", folder="x", files=("y",))])
    assert str(raised.value).isprintable()


def test_pickle_with_unexpected_keys_is_rejected_naming_the_first(folder: Path):
    public_folders.cifar_python(folder)
    batch = folder / "cifar-10-batches-py" / "data_batch_2"
    batch.write_bytes(pickle.dumps({"\n" * 9000: 1, **{f"\x1b{number}": 2 for number in range(99)}}, protocol=2))
    with pytest.raises(JobError, match="has the keys") as raised:
        next(load_job(CIFAR).batches(seed=0))
    assert str(raised.value).isprintable()
    assert len(raised.value.problem) < 300


def test_parquet_that_decompresses_to_many_times_its_size_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    load_job(WIKITEXT)
    monkeypatch.setattr(module_of(WIKITEXT), "MOST_TEXT_BYTES", 2**20)
    inner = folder / "wikitext-2-raw-v1"
    inner.mkdir()
    # The second file's pages contain one long text and a repetition count.
    for rows in ([f"{number} " * 99 for number in range(9999)], ["x" * 9999] * 9999):
        for part in ("train", "validation"):
            parquet.write_table(pyarrow.table({"text": rows}), inner / f"{part}-00000-of-00001.parquet")
        module_of(WIKITEXT).tokens.cache_clear()
        with pytest.raises(JobError, match="it unpacks to more than 1048576 bytes"):
            next(load_job(WIKITEXT).batches(seed=0))


def test_parquet_without_text_is_rejected(folder: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    inner = folder / "wikitext-2-raw-v1"
    inner.mkdir()
    for rows in ([1, 2], [None, "x"], [["x"]], []):
        for part in ("train", "validation"):
            parquet.write_table(pyarrow.table({"text": rows}), inner / f"{part}-00000-of-00001.parquet")
        module_of(WIKITEXT).tokens.cache_clear()
        with pytest.raises(JobError, match=r"cannot be read|has 0 tokens") as raised:
            next(load_job(WIKITEXT).batches(seed=0))
        assert "\n" not in str(raised.value)


def test_vocabulary_with_tokens_unknown_to_the_model_is_rejected(folder: Path):
    pytest.importorskip("tokenizers")
    public_folders.wikitext(folder)
    public_folders.gpt2_vocabulary(folder / "gpt2")
    path = folder / "gpt2" / "vocab.json"
    path.write_text(json.dumps({word: number + 60_000 for word, number in json.loads(path.read_text()).items()}))
    with pytest.raises(JobError, match=r"vocab.json: has a token 60\d+ .allowed: GPT-2's own vocabulary"):
        next(load_job(WIKITEXT).batches(seed=0))
    os.truncate(path, 2**40)
    with pytest.raises(JobError, match="is larger than 16777216 bytes"):
        next(load_job(WIKITEXT).batches(seed=0))


def trained(name: str, samples: int, steps: int) -> list[float]:
    """Return the losses of real steps of the full model on small batches; the first step uses the baseline."""
    whole = load_job(name)

    def batches(seed: int):
        while True:
            for batch in whole.batches(seed):
                yield batch[:samples] if isinstance(batch, torch.Tensor) else tuple(part[:samples] for part in batch)

    job = replace(whole, batch_size=samples, batches=batches, accumulation_choices=(1, 2))
    engine = TorchEngine(job, options=EngineOptions(statistics_every=None, meter_memory=False))
    losses = [engine.run(1).loss]
    # In fp32: 16 bits take minutes where the processor emulates them.
    baseline, leanest = engine.space.baseline(), engine.space.leanest()
    engine.apply(baseline.changed(accumulation_steps=leanest.accumulation_steps, storage=leanest.storage))
    losses += [engine.run(1).loss for _ in range(steps)]
    engine.close()
    return losses


@pytest.mark.slow
def test_full_resnet_trains_real_steps_under_two_plans(folder: Path):
    public_folders.cifar_binary(folder)
    losses = trained(CIFAR, 4, 2)
    assert np.isfinite(losses).all()
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_full_gpt2_learns_in_real_steps_under_two_plans(folder: Path):
    public_folders.wikitext(folder)
    losses = trained(WIKITEXT, 2, 2)
    assert losses[-1] < losses[0]
