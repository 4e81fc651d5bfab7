"""Connect ranks: those on one machine over the loopback interface only, and those of ``torchrun`` anew in each attempt.

By default the store of a process group listens on all addresses. The ranks that this package starts get a store whose
socket is bound to the loopback interface before they start, and their backends use that interface too.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from autotune.errors import EngineError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOOPBACK = "127.0.0.1"
# Environment variable with the descriptor of the socket of rank 0's store; set if this package started the ranks.
_STORE = "AUTOTUNE_STORE"
# Key of the numbers that ranks draw in each attempt of torchrun; and seconds from one look at it to the next.
_NUMBERS, _LOOK_EVERY_S = "autotune/numbers", 0.05
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def listening_socket() -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface."""
    found = socket.socket()
    found.bind((_LOOPBACK, 0))
    found.listen(128)
    return found


def rank_environment(count: int, store: socket.socket) -> Mapping[str, str]:
    """Return the environment variables that all ranks share.

    Args:
        count: number of ranks.
        store: socket on which the store of rank 0 listens.
    """
    number = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), _STORE: str(store.fileno())}
    where = {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(store.getsockname()[1])}
    # The usual default of launchers: ranks on one machine share its cores.
    threads = {} if count == 1 else {"OMP_NUM_THREADS": "1"}
    return {**threads, **_interfaces(), **number, **where, **_chosen("OMP_NUM_THREADS", *_INTERFACES)}


def join_ranks(device: str, timeout: timedelta | None = None) -> None:
    """Join the process group of the ranks, or make one of this process alone, unless there is a group.

    Args:
        device: ``cpu``, or an accelerator's type.
        timeout: time to wait for the other ranks; ``None`` for torch's default.
    """
    from torch import distributed
    from torch.distributed.constants import default_pg_timeout

    from autotune.mechanics import devices

    if distributed.is_initialized():
        return
    timeout = timeout or default_pg_timeout
    store, world = store_of_ranks(timeout), int(os.environ["WORLD_SIZE"])
    place = devices.rank_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group(
        devices.collective_backend(device),
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=timeout,
        # A single rank needs no device for communication.
        device_id=place if devices.is_accelerator(place) and world > 1 else None,
    )


def store_of_ranks(timeout: timedelta) -> Store | None:
    """Return the store of the ranks that this package or ``torchrun`` started; ``None`` for other launchers.

    A process without a rank becomes a group of its own.

    Args:
        timeout: time to wait for the other ranks.
    """
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if "RANK" not in os.environ:
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": _LOOPBACK})
        for name, interface in _interfaces().items():
            os.environ.setdefault(name, interface)
        alone: Store = HashStore()
        return alone
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _store_of_attempt(timeout)
    if _STORE not in os.environ:
        return None
    port, world, first = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    listening = int(os.environ[_STORE]) if first else None
    shared: Store = TCPStore(_LOOPBACK, port, world, first, timeout=timeout, master_listen_fd=listening)
    return shared


def _store_of_attempt(timeout: timedelta) -> Store:
    """Return the store of ``torchrun``, without what ranks of former attempts have left in it.

    ``torchrun`` keeps one store for all attempts (torch 2.11 to 2.13), so a rank could wait for ever for one that was
    lost, at the address that is still in the store.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout=timeout)
    return PrefixStore(agreed_name(shared, rank, world, timeout.total_seconds()), shared)


def agreed_name(store: Store, rank: int, world: int, timeout_s: float) -> str:
    """Return a name that all ranks of an attempt have in common, and no former attempt had.

    Every rank writes a number that it has drawn. The first one lists them until each rank has found its own number in
    the list; the name is made of the list.

    Args:
        store: a store that may contain what former attempts have written.
        rank: number of this rank.
        world: number of ranks.
        timeout_s: seconds to wait for the others.

    Raises:
        EngineError: if the others do not come.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + timeout_s

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    while time.monotonic() < deadline:
        # Again, since a rank of the former attempt may be about to end.
        store.set(f"{_NUMBERS}/{rank}", own)
        numbers = [read(f"{_NUMBERS}/{other}") for other in range(world)] if rank == 0 else read(_NUMBERS).split(",")
        if rank < len(numbers) and numbers[rank] == own and all(numbers):
            name = hashlib.sha256(",".join(numbers).encode()).hexdigest()
            if rank == 0:
                store.set(_NUMBERS, ",".join(numbers))
                if all(read(f"{name}/{other}") for other in range(1, world)):
                    store.set(name, "all are here")
                    return name
            else:
                store.set(f"{name}/{rank}", "here")
                if read(name):
                    return name
        time.sleep(_LOOK_EVERY_S)
    raise EngineError(f"rank {rank} has waited for the other {world - 1} ranks for {timeout_s:.0f} s")


def _interfaces() -> dict[str, str]:
    return dict.fromkeys(_INTERFACES, "lo0" if sys.platform == "darwin" else "lo")


def _chosen(*names: str) -> dict[str, str]:
    """Return the variables that the user has set."""
    return {name: os.environ[name] for name in names if name in os.environ}
