"""Run loops on two ranks, attached and unattached, with a fault on one of them, and record how each rank ended.

The ranks of each run are forked from a process that has imported all that they need, and end as a script does.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_live import RESTLESS, Wanders
from torch import nn
from torch.distributed.fsdp import fully_shard
from zoo import images, next_token_loss, small_gpt, texts
from zoo.batch_norm_convnet import Bottleneck
from zoo.layer_drop import LayerDrop

import autotune
from autotune.live.kill_switches import KILL_VARIABLE

STEPS, ACCUMULATED, SLOW_S, WORLD = 14, 3, 3.0, 2
# Far longer than any run takes: a rank that waits for another in an agreement hangs.
RANK_TIMEOUT_S, HANGS_S = 10_000.0, 60.0


def convnet() -> nn.Module:
    stem, head = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(stem, *[Bottleneck() for _ in range(4)], head)


def layer_drop() -> nn.Module:
    return LayerDrop(small_gpt().blocks)


def sharded() -> nn.Module:
    model = small_gpt()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def parallel(make: Callable[[], nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.parallel.DistributedDataParallel(make(), **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "gpt": (parallel(small_gpt), texts, next_token_loss),
    "convnet": (parallel(convnet), images, image_loss),
    "layer_drop": (parallel(layer_drop, find_unused_parameters=True), texts, next_token_loss),
    "by_hand": (parallel(small_gpt), texts, next_token_loss),
    "sharded": (sharded, texts, next_token_loss),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run and its fault.

    Attributes:
        model: one of ``MODELS``.
        attached: whether a tuner is attached.
        fault: ``killed``, ``slow``, ``detach``, ``stop``, ``variable`` or ``none``.
        rank: rank of the fault.
        step: step of the fault.
        moment: place in the step: the end of ``forward``, ``backward`` or ``update``.
    """

    model: str
    attached: bool = True
    fault: str = "none"
    rank: int = 0
    step: int = 0
    moment: str = "forward"


class Rank:
    """One rank of a case.

    Args:
        case: the case.
        folder: folder for the record.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.rank = case, folder, dist.get_rank()
        self.step = 0
        self.injected = False
        make, batches, self.loss_of = MODELS[case.model]
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, foreach=False)
        torch.manual_seed(100 + self.rank)
        self.batches = list(batches(WORLD * STEPS * ACCUMULATED))[self.rank :: WORLD]
        self.losses: list[float] = []
        self.tuner: Any = None
        if case.attached:
            self.tuner = autotune.attach(
                self.model,
                self.optimizer,
                Wanders(),
                memory_budget_bytes=10**9,
                accumulation_steps=ACCUMULATED if case.model == "by_hand" else 1,
                limits=dataclasses.replace(RESTLESS, rank_timeout_s=RANK_TIMEOUT_S),
                runs_dir=folder / "runs",
            )

    def at(self, moment: str) -> None:
        """Cause the fault if it is due."""
        case = self.case
        if (case.rank, case.step, case.moment) != (self.rank, self.step, moment):
            return
        self.injected = case.fault != "none"
        if case.fault == "killed":
            (self.folder / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        elif case.fault == "slow":
            time.sleep(SLOW_S)
        elif case.fault == "detach":
            self.tuner.detach("its loop wants to")
        elif case.fault == "stop":
            (self.tuner.folder / "STOP").touch()
        elif case.fault == "variable":
            os.environ[KILL_VARIABLE] = "1"

    def train(self) -> None:
        """Train as the case says."""
        one_step = self.accumulate if self.case.model == "by_hand" else self.one_step
        for self.step in range(STEPS):
            one_step()
            self.at("update")

    def one_step(self) -> None:
        """Make one update, from one batch."""
        batch = self.batches[self.step]
        if self.tuner is None:
            loss = self.loss_of(self.model, batch)
            self.at("forward")
            loss.backward()
            self.at("backward")
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            for micro in self.tuner.micro_batches(batch):
                loss = self.loss_of(self.model, micro)
                self.at("forward")
                self.tuner.backward(loss)
            self.at("backward")
            self.tuner.step()
        self.losses.append(float(loss.detach()))

    def tell(self, name: str, *about: Any) -> None:
        """Notify the tuner, if there is one."""
        if self.tuner is not None:
            getattr(self.tuner, name)(*about)

    def accumulate(self) -> None:
        """Make one update by hand, from several batches whose gradients are reduced once."""
        first = self.step * ACCUMULATED
        for number, batch in enumerate(self.batches[first : first + ACCUMULATED]):
            self.tell("next_micro_batch" if number else "begin_step", batch)
            last = number == ACCUMULATED - 1
            with nullcontext() if last else self.model.no_sync():  # type: ignore[operator]
                self.tell("tell_phase", "forward")
                loss = self.loss_of(self.model, batch) / ACCUMULATED
                if number == 1:
                    self.at("forward")
                self.tell("tell_phase", "backward")
                loss.backward()
            self.losses.append(float(loss.detach()))
        self.tell("tell_phase", "update")
        self.at("backward")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tell("end_step")

    def document(self) -> dict[str, Any]:
        """Return the results."""
        found = hashlib.sha256(repr([self.losses, torch.get_rng_state().tolist()]).encode())
        for tensor in self.model.state_dict().values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.update(local.detach().numpy().tobytes())
        status = {} if self.tuner is None else self.tuner.status
        return {
            "bits": found.hexdigest(),
            "injected": self.injected,
            "placed": status.get("placed"),
            "why": status.get("detached_because"),
        }


def be(rank: int, case: Case, folder: Path) -> None:
    """Run one rank in its own process; an exception ends it."""
    os.environ[KILL_VARIABLE] = ""
    random.seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    out = folder / f"{rank}.json"
    try:
        one = Rank(case, folder)
        one.train()
        out.write_text(json.dumps(one.document()))
        if one.tuner is not None:
            one.tuner.detach()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        out.write_text(json.dumps({"error": type(error).__name__, "said": str(error)}))
        raise


def ended(children: dict[int, int], folder: Path) -> Iterator[dict[str, Any]]:
    """Wait for each rank, and yield how it ended."""
    until = time.monotonic() + HANGS_S
    for rank, child in children.items():
        found, status = os.waitpid(child, os.WNOHANG)
        while not found and time.monotonic() < until:
            time.sleep(0.01)
            found, status = os.waitpid(child, os.WNOHANG)
        if not found:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        out, killed = folder / f"{rank}.json", folder / "killed"
        told = json.loads(out.read_text()) if out.exists() else {}
        code = os.waitstatus_to_exitcode(status) if found else "hangs"
        after = time.monotonic() - float(killed.read_text()) if killed.exists() else None
        yield {"code": code, "after_s": after, **told}


def main() -> None:
    """Run cases, one after another, and write how they ended."""
    folder = Path(sys.argv[1])
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text())]
    found = []
    # Imported objects are frozen for the garbage collector, so that their memory stays shared between ranks.
    gc.freeze()
    for number, case in enumerate(cases):
        here = folder / str(number)
        here.mkdir()
        children = {}
        for rank in range(WORLD):
            child = os.fork()
            if not child:
                be(rank, case, here)
                sys.exit(0)
            children[rank] = child
        found.append(list(ended(children, here)))
        (folder / "ended.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
