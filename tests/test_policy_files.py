"""Tests of policy folders: nothing in them can run, and every modification is rejected."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import struct
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_job
import torch
from safetensors.torch import save
from simulated_engine import SimulatedEngine
from simulation import MOVING

from autotune import PolicyFileError
from autotune.agents import policy_folder
from autotune.agents.planner_policy import PlannerPolicy, Ranges
from autotune.agents.policy_folder import (
    MANIFEST,
    WEIGHTS,
    LeverTraining,
    load_policy,
    save_levers,
    shipped_policy,
)
from autotune.agents.shipped_network import LeverNetwork
from autotune.catalog import load_job
from autotune.cli.main import run
from autotune.gym.levers import RUN_FEATURES, UNIT_FEATURES
from autotune.gym.observation import Observation
from autotune.io.files import sealed
from autotune.plan import Plan
from autotune.profiling.profile_cache import cached_profile
from autotune.profiling.profiler import ProfilerOptions
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.random_jobs import draw_job

SETTINGS = PlannerSettings(rise=0.1, horizon=2.0, cost_error=0.2)
TRAINING = LeverTraining(
    recipe_sha256="0" * 64,
    strengths_sha256="1" * 64,
    seed=3,
    seeds=5,
    decisions=1000,
    won_percent=1.5,
    won_ci95=[0.5, 2.5],
)
WITNESS = "AUTOTUNE_POLICY_FILE_RAN"


def trained_network() -> LeverNetwork:
    """Return a network with non-neutral levers, unlike an untrained one."""
    torch.manual_seed(0)
    network = LeverNetwork(8)
    torch.nn.init.normal_(network.levers.weight, std=2.0)
    torch.nn.init.normal_(network.levers.bias, std=2.0)
    return network


def wide_ranges() -> Ranges:
    return Ranges(np.full(len(RUN_FEATURES), -5.0), np.full(len(RUN_FEATURES), 5.0))


def save_to(folder: Path) -> Path:
    save_levers(folder, trained_network(), SETTINGS, wide_ranges(), TRAINING, "# A card\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_to(tmp_path / "policy")


def weights_of(policy: object) -> dict[str, torch.Tensor]:
    assert isinstance(policy, PlannerPolicy)
    assert isinstance(policy.network, LeverNetwork)
    return policy.network.state_dict()


# ----------------------------------------------------------------------------------------------------------- watching


class Watcher:
    """A recorder of audit events that loading data does not need.

    An audit hook cannot be removed, so there is one for the whole session, inactive while nothing is watched.
    """

    FORBIDDEN = ("os.", "subprocess.", "socket.", "pty.", "ctypes.", "winreg.", "shutil.", "tempfile.", "pickle.")
    FORBIDDEN_EVENTS = frozenset({"import", "exec", "compile", "code.__new__", "marshal.loads", "function.__new__"})

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._allowed: tuple[str, ...] | None = None
        self._thread = 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        # Threads of other tests may still send log records.
        if self._allowed is None or threading.get_ident() != self._thread:
            return
        if event == "open":
            path, mode, flags = (*arguments, None, None)[:3]
            writes = bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            writes = writes or bool(isinstance(mode, str) and set(mode) & set("wax+"))
            # A number is the descriptor of a file that was opened, and recorded, before.
            if writes or (not isinstance(path, int) and os.fspath(path) not in self._allowed):
                self.events.append((event, f"{path} {mode}"))
        elif event in self.FORBIDDEN_EVENTS or event.startswith(self.FORBIDDEN):
            self.events.append((event, repr(arguments)[:200]))

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """Watch this thread: only the policy's own files may be opened, for reading."""
        self._allowed = (str(folder / MANIFEST), str(folder / WEIGHTS))
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._allowed = None


@pytest.fixture(scope="module")
def watcher() -> Watcher:
    return Watcher()


def test_audit_hook_reports_every_kind_of_event_it_monitors(watcher: Watcher, folder: Path) -> None:
    def heard(act: Callable[[], object]) -> list[str]:
        watcher.events.clear()
        with watcher.watching(folder):
            act()
        found = [event for event, _ in watcher.events]
        watcher.events.clear()
        return found

    sys.modules.pop("this_is_not_imported_yet", None)

    def imports() -> None:
        with pytest.raises(ImportError):
            __import__("this_is_not_imported_yet")

    assert "import" in heard(imports)
    assert "os.system" in heard(lambda: os.system("true"))
    assert "open" in heard(lambda: (folder / "new").write_text("x"))
    assert "open" in heard(lambda: (folder / MANIFEST).open("r+").close())
    assert "open" in heard(lambda: (folder / "README.md").read_text())
    assert "pickle.find_class" in heard(lambda: pickle.loads(pickle.dumps(Path("x"))))
    assert "exec" in heard(lambda: eval("1 + 1"))
    assert "os.remove" in heard((folder / "new").unlink)
    assert heard(lambda: (folder / MANIFEST).read_bytes()) == []


def load_watched(folder: Path, watcher: Watcher) -> PlannerPolicy:
    # Imports during the first load in a process are not files of a policy.
    shipped_policy()
    watcher.events.clear()
    try:
        with watcher.watching(folder):
            policy = load_policy(folder)
    finally:
        assert watcher.events == []
        assert WITNESS not in os.environ
    assert isinstance(policy, PlannerPolicy)
    return policy


# --------------------------------------------------------------------------------------------------------- round trip


def test_saved_and_loaded_policy_decides_identically(folder: Path, watcher: Watcher) -> None:
    loaded = load_watched(folder, watcher)
    assert loaded.settings == SETTINGS
    assert loaded.ranges is not None
    np.testing.assert_array_equal(loaded.ranges.highest, 5.0)
    original = trained_network()
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, weights_of(loaded)[name])
    generator = np.random.default_rng(0)
    run_features = generator.uniform(-5, 5, (50, len(RUN_FEATURES))).astype(np.float32)
    units = generator.uniform(-5, 5, (50, 6, len(UNIT_FEATURES))).astype(np.float32)
    actions = original.most_likely((run_features, units))
    np.testing.assert_array_equal(weights_network(loaded).most_likely((run_features, units)), actions)
    assert len(np.unique(actions, axis=0)) > 10
    policies = (PlannerPolicy("own", SETTINGS, original, wide_ranges()), loaded, PlannerPolicy("alone", SETTINGS))
    moved = 0
    for seed in range(3, 9):
        job = draw_job(np.random.default_rng(seed), depth=(3, 5))
        own, again, alone = (led(policy, job) for policy in policies)
        assert own == again
        moved += own != alone
    assert moved


def weights_network(policy: PlannerPolicy) -> LeverNetwork:
    assert isinstance(policy.network, LeverNetwork)
    return policy.network


def led(policy: PlannerPolicy, job) -> list[Plan]:
    engine, space = SimulatedEngine(job, world=MOVING, seed=1), job.profile.space
    engine.apply(space.baseline())
    budget = int(0.7 * engine.run(1).peak_bytes)
    engine.apply(policy.begin(job.profile, budget))
    engine.memory_budget_bytes, plans = budget, []
    for number in range(12):
        plan, window = engine.plan, engine.run(4)
        plans.append(plan)
        seen = Observation(
            space=space,
            plan=plan,
            window=window,
            reference=window,
            memory_budget_bytes=budget,
            budget_ahead=(budget,),
            progress=number / 12,
        )
        engine.apply(policy.decide(seen, plan))
    return plans


def test_folder_contains_three_files_and_no_code(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", MANIFEST, WEIGHTS]
    document = json.loads((folder / MANIFEST).read_text())
    assert document["kind"] == "levers"
    assert document["weights_sha256"] == hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads((folder / WEIGHTS).read_bytes())


def test_saving_checks_the_same_rules_as_loading(tmp_path: Path) -> None:
    wide = wide_ranges()
    endless = replace(wide, highest=np.full_like(wide.highest, math.inf))
    with pytest.raises(ValueError, match="highest"):
        save_levers(tmp_path / "p", trained_network(), SETTINGS, endless, TRAINING, "card")
    assert not (tmp_path / "p").exists()


# ----------------------------------------------------------------------------------------------------------- payloads


class Payload:
    """An object that leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple:
        return exec, (f"import os; os.environ[{WITNESS!r}] = '1'",)


def edit(folder: Path, **changes: object) -> None:
    """Change keys of the manifest; ``...`` removes a key."""
    document = json.loads((folder / MANIFEST).read_text()) | changes
    document = {key: value for key, value in document.items() if value is not ...}
    if "manifest_sha256" not in changes:
        # A hash protects against damage, not against forgery.
        document = sealed(document, "manifest_sha256")
    (folder / MANIFEST).write_text(json.dumps(document))


def edit_part(folder: Path, part: str, **changes: object) -> None:
    document = json.loads((folder / MANIFEST).read_text())[part] | changes
    edit(folder, **{part: {key: value for key, value in document.items() if value is not ...}})


def put_weights(folder: Path, weights: bytes) -> None:
    """Replace the weights, and update the manifest."""
    (folder / WEIGHTS).write_bytes(weights)
    edit(folder, weights_sha256=hashlib.sha256(weights).hexdigest(), weights_bytes=max(len(weights), 1))


def replaced(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    (folder / name).rename(folder / "former")
    make(folder / name)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    found = {name: tensor.clone() for name, tensor in trained_network().state_dict().items()}
    change(found)
    return save(found)


def header(change: Callable[[dict], object], data: Callable[[bytes], bytes] = lambda data: data) -> bytes:
    """Return weights with a modified header."""
    return framed(lambda text: json.dumps(changed(json.loads(text), change)).encode(), data)


def changed(document: dict, change: Callable[[dict], object]) -> dict:
    change(document)
    return document


def framed(change: Callable[[bytes], bytes], data: Callable[[bytes], bytes] = lambda data: data) -> bytes:
    weights = save(trained_network().state_dict())
    (size,) = struct.unpack("<Q", weights[:8])
    text = change(weights[8 : 8 + size])
    return struct.pack("<Q", len(text)) + text + data(weights[8 + size :])


def zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload()))
        archive.writestr("archive/data/0", b"\0" * 2**26)
    return buffer.getvalue()


def torch_file(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def bias(value: float) -> bytes:
    return tensors(lambda t: t["value.bias"].fill_(value))


def stands_twice(text: bytes) -> bytes:
    """Return a header with a duplicate tensor, of which a reader may take either."""
    entry = json.dumps(json.loads(text)["value.bias"])
    return text.rstrip()[:-1] + f',"value.bias":{entry}}}'.encode()


PAYLOADS: dict[str, Callable[[Path], object]] = {
    # In place of the manifest.
    "no manifest": lambda f: (f / MANIFEST).unlink(),
    "empty manifest": lambda f: (f / MANIFEST).write_bytes(b""),
    "pickle as manifest": lambda f: (f / MANIFEST).write_bytes(pickle.dumps(Payload())),
    "YAML that makes objects as manifest": lambda f: (f / MANIFEST).write_text("!!python/object/apply:os.abort []"),
    "link to a manifest": lambda f: replaced(f, MANIFEST, lambda path: path.symlink_to(f / "former")),
    "pipe as manifest": lambda f: replaced(f, MANIFEST, os.mkfifo),
    "folder as manifest": lambda f: replaced(f, MANIFEST, Path.mkdir),
    "device as manifest": lambda f: replaced(f, MANIFEST, lambda path: path.symlink_to("/dev/zero")),
    "text that is not UTF-8": lambda f: (f / MANIFEST).write_bytes(b'{"version": "\xff\xfe"}'),
    "JSON nested without end": lambda f: (f / MANIFEST).write_text('{"a":' * 9000 + "1" + "}" * 9000),
    "lists nested without end": lambda f: (f / MANIFEST).write_text("[" * 60_000),
    "manifest without end": lambda f: (f / MANIFEST).write_text('{"a": "' + "x" * 2**17 + '"}'),
    "number of a million digits": lambda f: (f / MANIFEST).write_text('{"version": ' + "9" * 60_000 + "}"),
    "manifest that is a list": lambda f: (f / MANIFEST).write_text("[]"),
    "a key twice": lambda f: (f / MANIFEST).write_text(
        (f / MANIFEST).read_text().replace('"version"', '"version": 1, "version"', 1)
    ),
    "an unknown key": lambda f: edit(f, run="rm -rf /"),
    "an unknown key in a part": lambda f: edit_part(f, "planner", run="rm -rf /"),
    "a key that writes on the terminal": lambda f: edit(f, **{"\x1b[2J\x1b]0;owned\x07\nline": 1}),
    "a missing key": lambda f: edit(f, ranges=..., lowest=...),
    "a missing part": lambda f: edit(f, planner=...),
    "a missing setting": lambda f: edit_part(f, "planner", rise=...),
    "number as text": lambda f: edit(f, width="8"),
    "true as number": lambda f: edit(f, weights_bytes=True),
    "a kind that is no text": lambda f: edit(f, kind=["levers"]),
    "a kind that is a table": lambda f: edit(f, kind={"levers": 1}),
    "no kind": lambda f: edit(f, kind=None),
    "another kind": lambda f: edit(f, kind="pickle"),
    "the other kind of policy": lambda f: edit(f, kind="ppo"),
    "a newer version": lambda f: edit(f, version=2),
    "newer features": lambda f: edit(f, feature_version=99),
    "older features": lambda f: edit(f, feature_version=1),
    "other features": lambda f: edit(f, global_features=len(RUN_FEATURES) + 1),
    "a width without bound": lambda f: edit(f, width=10**9),
    "the width of another network": lambda f: edit(f, width=16),
    "another manifest's hash": lambda f: edit(f, manifest_sha256="0" * 64),
    "no hash of the manifest": lambda f: edit(f, manifest_sha256=...),
    "a hash of something else": lambda f: edit(f, weights_sha256="0" * 64),
    "a hash that is none": lambda f: edit(f, weights_sha256="0" * 63 + "\n"),
    "another size": lambda f: edit(f, weights_bytes=9),
    "a size without bound": lambda f: edit(f, weights_bytes=2**60),
    "another answer to the probe": lambda f: edit(f, probe_action=[0] * 48),
    "a longer answer to the probe": lambda f: edit(f, probe_action=[0] * 10_000),
    "ranges that are too short": lambda f: edit(f, lowest=[0.0] * (len(RUN_FEATURES) - 1)),
    "ranges that are too long": lambda f: edit(f, highest=[0.0] * (len(RUN_FEATURES) + 1)),
    "ranges that are not numbers": lambda f: edit(f, lowest=[float("nan")] * len(RUN_FEATURES)),
    "ranges beyond all numbers": lambda f: (f / MANIFEST).write_text(
        (f / MANIFEST).read_text().replace("-5.0", "-1e999", 1)
    ),
    "ranges of text": lambda f: edit(f, lowest=["0.0"] * len(RUN_FEATURES)),
    "a negative setting": lambda f: edit_part(f, "planner", rise=-0.1),
    "a setting without bound": lambda f: edit_part(f, "planner", retry=1e300),
    "a horizon beyond the longest forecast": lambda f: edit_part(f, "planner", horizon=1000.0),
    "a share above 1": lambda f: edit_part(f, "planner", common_share=1.5),
    "training in words": lambda f: edit_part(f, "training", seeds="many"),
    "an interval of three": lambda f: edit_part(f, "training", won_ci95=[0.0, 1.0, 2.0]),
    # In place of the weights, with the manifest's hash and size updated.
    "no weights": lambda f: (f / WEIGHTS).unlink(),
    "empty weights": lambda f: put_weights(f, b""),
    "weights of one byte": lambda f: put_weights(f, b"x"),
    "pickle": lambda f: put_weights(f, pickle.dumps(Payload())),
    "torch file": lambda f: put_weights(f, torch_file(trained_network().state_dict())),
    "torch file that runs code": lambda f: put_weights(f, torch_file({"value.bias": Payload()})),
    "zip that unpacks without end": lambda f: put_weights(f, zip_bomb()),
    "link to weights": lambda f: replaced(f, WEIGHTS, lambda path: path.symlink_to(f / "former")),
    "link to somebody's file": lambda f: replaced(f, WEIGHTS, lambda path: path.symlink_to("/etc/passwd")),
    "pipe as weights": lambda f: replaced(f, WEIGHTS, os.mkfifo),
    "folder as weights": lambda f: replaced(f, WEIGHTS, Path.mkdir),
    "truncated weights": lambda f: put_weights(f, save(trained_network().state_dict())[:-4]),
    "truncated header": lambda f: put_weights(f, save(trained_network().state_dict())[:100]),
    "bytes after the weights": lambda f: put_weights(f, save(trained_network().state_dict()) + b"\0" * 16),
    "header length without end": lambda f: put_weights(f, struct.pack("<Q", 2**63) + b"{}" * 100),
    "header length beyond the file": lambda f: put_weights(f, struct.pack("<Q", 10**6) + b"{}" * 100),
    "header length of nothing": lambda f: put_weights(f, struct.pack("<Q", 0) + b"{}" * 100),
    "header that is not UTF-8": lambda f: put_weights(f, framed(lambda text: text.replace(b"value", b"val\xff\xfe"))),
    "header nested without end": lambda f: put_weights(f, framed(lambda text: b'{"a":' + b"[" * 9000)),
    "header with a tensor twice": lambda f: put_weights(f, framed(stands_twice)),
    "header with a field twice": lambda f: put_weights(
        f, framed(lambda text: text.replace(b'"dtype":"F32"', b'"dtype":"I32","dtype":"F32"', 1))
    ),
    "header with something beside tensors": lambda f: put_weights(
        f, header(lambda h: h.update(__metadata__={"run": "rm -rf /"}))
    ),
    "unknown dtype": lambda f: put_weights(f, header(lambda h: h["value.bias"].update(dtype="Q7"))),
    "dtype that torch lacks": lambda f: put_weights(f, header(lambda h: h["value.bias"].update(dtype="F4", shape=[8]))),
    "whole numbers in place of floats": lambda f: put_weights(f, header(lambda h: h["value.bias"].update(dtype="I32"))),
    "overlapping tensors": lambda f: put_weights(
        f, header(lambda h: h["value.bias"].update(data_offsets=h["levers.bias"]["data_offsets"][:1] * 2))
    ),
    "tensors beyond the end": lambda f: put_weights(
        f, header(lambda h: h["value.bias"].update(data_offsets=[10**9, 10**9 + 4]))
    ),
    "negative shape": lambda f: put_weights(f, header(lambda h: h["value.bias"].update(shape=[-1]))),
    "shape without bound": lambda f: put_weights(f, header(lambda h: h["value.bias"].update(shape=[2**62, 2**62]))),
    "NaN": lambda f: put_weights(f, bias(float("nan"))),
    "infinity": lambda f: put_weights(f, bias(float("inf"))),
    "another shape": lambda f: put_weights(f, tensors(lambda t: t.update({"value.bias": torch.zeros(2)}))),
    "another dtype": lambda f: put_weights(f, tensors(lambda t: t.update({"value.bias": torch.zeros(1).double()}))),
    "half floats": lambda f: put_weights(f, tensors(lambda t: t.update({n: v.half() for n, v in t.items()}))),
    "a tensor too many": lambda f: put_weights(f, tensors(lambda t: t.update(extra=torch.zeros(1)))),
    "a tensor too few": lambda f: put_weights(f, tensors(lambda t: t.pop("value.bias"))),
    "a tensor by another name": lambda f: put_weights(
        f, tensors(lambda t: t.update({"value.bias\x1b[2J\n": t.pop("value.bias")}))
    ),
    "other weights": lambda f: put_weights(f, tensors(lambda t: t["levers.bias"].neg_())),
    "a plan policy's weights": lambda f: put_weights(f, save(policy_folder.PolicyNetwork(8).state_dict())),
}


def state_of(folder: Path) -> dict[str, object]:
    """Return the contents of a folder, to detect changes by an injection."""
    found: dict[str, object] = {}
    for name in (MANIFEST, WEIGHTS):
        path = folder / name
        regular = path.is_file() and not path.is_symlink()
        found[name] = path.read_bytes() if regular else (path.lstat().st_mode if os.path.lexists(path) else None)
    return found


@pytest.mark.parametrize("what", PAYLOADS)
def test_hostile_or_damaged_folder_is_rejected_in_one_line_and_nothing_runs(
    what: str, folder: Path, watcher: Watcher
) -> None:
    before = state_of(folder)
    PAYLOADS[what](folder)
    assert state_of(folder) != before
    names = sorted(path.name for path in folder.iterdir())
    with pytest.raises(PolicyFileError, match=r"manifest\.json|policy\.safetensors|probe") as raised:
        load_watched(folder, watcher)
    message = str(raised.value)
    assert "\n" not in message
    assert message.isprintable()
    assert str(folder) in message
    assert len(message) < 2000
    assert sorted(path.name for path in folder.iterdir()) == names


def test_payloads_execute_when_unpickled_and_their_carrier_files_are_otherwise_valid(
    tmp_path: Path, watcher: Watcher
) -> None:
    assert len(PAYLOADS) >= 25
    for number, weights in enumerate((tensors(len), header(len), framed(bytes))):
        folder = save_to(tmp_path / str(number))
        put_weights(folder, weights)
        load_watched(folder, watcher)
    folder = save_to(tmp_path / "edited")
    edit(folder)
    edit_part(folder, "planner")
    load_watched(folder, watcher)
    for load in (pickle.loads, lambda data: torch.load(io.BytesIO(torch_file(Payload())), weights_only=False)):
        load(pickle.dumps(Payload()))
        assert os.environ.pop(WITNESS) == "1"


def test_unreadable_folder_is_rejected(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(PolicyFileError, match=r"policy\.safetensors: cannot be read \(No such file or directory\)"):
        load_policy(folder)
    with pytest.raises(PolicyFileError, match=r"manifest\.json: cannot be read"):
        load_policy(folder / "nowhere")


# ---------------------------------------------------------------------------------------------------------- mutations


def mutated(data: bytes, generator: np.random.Generator) -> bytes:
    """Return the bytes with one changed, or some truncated, removed or duplicated; never unchanged."""
    kind, place = generator.integers(6), int(generator.integers(len(data)))
    length = int(generator.integers(1, 64))
    if kind <= 1:
        return data[:place] + bytes([data[place] ^ (1 << int(generator.integers(8)))]) + data[place + 1 :]
    if kind == 2:
        other = int(generator.integers(255))
        return data[:place] + bytes([other + (other >= data[place])]) + data[place + 1 :]
    if kind == 3:
        return data[:place]
    if kind == 4:
        return data[:place] + data[place : place + length] + data[place:]
    return data[:place] + data[place + length :]


@pytest.mark.slow
@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS])
def test_three_thousand_mutations_are_rejected_or_change_nothing(name: str, folder: Path, watcher: Watcher) -> None:
    generator = np.random.default_rng(0)
    good = (folder / name).read_bytes()
    policy = load_policy(folder)
    original = weights_of(policy)
    messages: list[str] = []
    for _ in range(1500):
        bad = mutated(good, generator)
        assert bad != good
        (folder / name).write_bytes(bad)
        try:
            loaded = load_watched(folder, watcher)
        except PolicyFileError as error:
            messages.append(str(error))
            continue
        # In a manifest, some spaces may change without effect.
        assert all(torch.equal(tensor, weights_of(loaded)[key]) for key, tensor in original.items())
        assert loaded.settings == policy.settings
        np.testing.assert_array_equal(loaded.ranges.lowest, policy.ranges.lowest)
        np.testing.assert_array_equal(loaded.ranges.highest, policy.ranges.highest)
    assert len(messages) == 1500 if name == WEIGHTS else len(messages) > 1300
    assert all(message.isprintable() for message in messages)
    (folder / name).write_bytes(good)
    load_watched(folder, watcher)


@pytest.mark.slow
def test_mutation_with_a_corrected_hash_is_rejected_or_loads_other_numbers(folder: Path, watcher: Watcher) -> None:
    generator = np.random.default_rng(1)
    good, manifest = (folder / WEIGHTS).read_bytes(), (folder / MANIFEST).read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    refused = 0
    for number in range(600):
        # Half of the damage is in the header, where it can mislead a reader.
        head = mutated(good[: 8 + size], generator)
        bad = head + good[8 + size :] if number % 2 else mutated(good, generator)
        assert bad != good
        (folder / MANIFEST).write_bytes(manifest)
        put_weights(folder, bad)
        try:
            loaded = load_watched(folder, watcher)
        except PolicyFileError:
            refused += 1
        else:
            assert all(torch.isfinite(tensor).all() for tensor in weights_of(loaded).values())
    assert 300 < refused < 600


# ------------------------------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a runs folder with the tiny job's profile in its cache."""
    runs = tmp_path_factory.mktemp("runs")
    options = ProfilerOptions(seconds=0.5, max_rounds=2, calibration_plans=2)
    cached_profile(load_job(tiny_job.__file__), runs, options=options)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pickle as manifest", "an unknown key", "NaN"])
def test_compare_with_a_damaged_folder_is_one_line_exit_code_2_and_no_run(
    what: str, folder: Path, profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PAYLOADS[what](folder)
    before = sorted(profiled.rglob("*"))
    arguments = ["compare", tiny_job.__file__, "--arms", f"baseline,{folder}", "--seeds", "2"]
    assert run([*arguments, "--runs-dir", str(profiled)]) == 2
    errors = capsys.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith("autotune: ")]
    assert len(lines) == 1
    assert str(folder) in lines[0]
    assert "Traceback" not in errors
    assert sorted(profiled.rglob("*")) == before


def test_loading_draws_no_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(*_: object, **__: object) -> None:
        raise AssertionError("it would import libraries for seconds")

    monkeypatch.setattr(torch.nn.init, "normal_", draws)
    shipped_policy()
