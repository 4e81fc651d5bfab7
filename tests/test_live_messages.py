"""What units print, log and warn of is told once, and what they may do elsewhere is never done a second time."""

from __future__ import annotations

import functools
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_live_state import Part, train, with_blocks
from torch import nn

from autotune.mechanics import muting

LOG = logging.getLogger("a_users_own")
LATE = 9
FOLDER = Path()
OPENED = io.TextIOWrapper(io.BytesIO())
TOLD: list[str] = []


@pytest.fixture(autouse=True)
def told() -> Iterator[list[str]]:
    """Collect what a user's handler of log records gets."""
    TOLD.clear()
    handler = logging.Handler()
    handler.emit = lambda record: TOLD.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    yield TOLD
    LOG.removeHandler(handler)


class Talks(Part):
    """Tells something at each call, or only at later ones."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not self.late or self.calls > LATE:
            self.tell()
        return super().forward(x)

    def tell(self) -> None:
        raise NotImplementedError


class Prints(Talks):
    def tell(self) -> None:
        print("a block runs")  # noqa: T201
        sys.stderr.write("a block runs\n")


class Logs(Talks):
    def tell(self) -> None:
        LOG.info("call %d", self.calls)


class Warns(Talks):
    def tell(self) -> None:
        warnings.warn(f"call {self.calls}", stacklevel=2)


@functools.lru_cache
def log_once(message: str) -> None:
    LOG.warning(message)


class LogsOnce(Talks):
    def tell(self) -> None:
        log_once("once")


def messages(kind: type[Talks], *, late: bool, attach: bool, capsys: Any) -> list[Any]:
    TOLD.clear()
    log_once.cache_clear()
    log_once("before")
    handle, warn, streams = logging.Logger.handle, warnings.warn, (sys.stdout, sys.stderr)

    def made() -> nn.Module:
        model = with_blocks(kind)
        for block in model.blocks:
            block.late = late
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained, locks, recomputed = train(made, 1 if attach else None, "exact" if attach else None)
    assert not locks
    assert bool(recomputed) == attach
    assert (logging.Logger.handle, warnings.warn, (sys.stdout, sys.stderr)) == (handle, warn, streams)
    printed = capsys.readouterr()
    warned = [(str(one.message), one.lineno) for one in caught if "call" in str(one.message)]
    return [trained, TOLD.copy(), printed.out, printed.err.count("a block runs"), warned]


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", [Prints, Logs, Warns, LogsOnce])
def test_what_units_tell_is_told_once(kind: type[Talks], capsys: Any, *, late: bool) -> None:
    alone = messages(kind, late=late, attach=False, capsys=capsys)
    assert any(alone[1:])
    assert messages(kind, late=late, attach=True, capsys=capsys) == alone


class Opens(Talks):
    def tell(self) -> None:
        with open(FOLDER / "calls", "a") as file:  # noqa: PTH123
            file.write("x")


class WritesOn(Talks):
    def tell(self) -> None:
        OPENED.write("x")


class NamesGlobals(Talks):
    def tell(self) -> None:
        globals()["CALLS"] = globals().get("CALLS", 0) + 1


class LooksUpModules(Talks):
    def tell(self) -> None:
        sys.modules[__name__].CALLS += 1  # type: ignore[attr-defined]


@functools.singledispatch
def handled(value: object) -> int:
    return 0


class Registers(Talks):
    def tell(self) -> None:
        handled.register(type("Kind", (), {}), lambda _: 1)


wandb = ModuleType("wandb")
wandb.log = lambda _: TOLD.append("reported")  # type: ignore[attr-defined]


class Reports(Talks):
    def tell(self) -> None:
        wandb.log({"calls": self.calls})


def done() -> list[Any]:
    here: Any = sys.modules[__name__]
    path = FOLDER / "calls"
    size = path.stat().st_size if path.exists() else 0
    return [getattr(here, "CALLS", None), len(handled.registry), OPENED.tell(), len(TOLD), size]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Opens, "open a file"),
        (WritesOn, "write to an open file"),
        (NamesGlobals, "change globals by name"),
        (LooksUpModules, "sys.modules"),
        (Registers, "register a function with handled()"),
        (Reports, "report to wandb"),
    ],
)
def test_what_units_may_do_elsewhere_is_locked_before_they_are_run(
    kind: type[Talks], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "FOLDER", tmp_path)
    monkeypatch.setattr(here, "CALLS", 0, raising=False)

    def late() -> nn.Module:
        model = with_blocks(kind)
        for block in model.blocks:
            block.late = True
        return model

    def changes(make: Callable[[], nn.Module], budget: int | None, policy: Any) -> tuple[Any, Any]:
        before = done()
        found, locks, _ = train(make, budget, policy)
        return (found, [_less(now, then) for now, then in zip(done(), before, strict=True)]), locks

    alone, _ = changes(late, None, None)
    tuned, locks = changes(late, 1, "exact")
    assert tuned == alone
    assert set(locks) == {"blocks.0", "blocks.1", "blocks.2"}
    assert all(reason in why for why in locks.values()), locks


def _less(now: int, then: int) -> int:
    return now - then


def test_other_threads_are_heard_while_one_is_muted(capsys: pytest.CaptureFixture[str]) -> None:
    def tell(who: str) -> None:
        print(who)  # noqa: T201
        LOG.info(who)

    with muting.muted(), muting.muted():
        tell("muted")
        other = threading.Thread(target=tell, args=("other",))
        other.start()
        other.join()
    tell("later")
    assert capsys.readouterr().out.split() == TOLD == ["other", "later"]
