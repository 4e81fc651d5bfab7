"""Connect the ranks on one machine over the loopback interface only.

By default the store of a process group listens on all addresses. The ranks of this package get a store whose socket is
bound to the loopback interface before they start, and their backends use that interface too.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOOPBACK = "127.0.0.1"
# Environment variable with the descriptor of the socket of rank 0's store; set if this package started the ranks.
_STORE = "AUTOTUNE_STORE"
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
    """Return the store of the ranks that this package started; ``None`` if another launcher started this process.

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
    if _STORE not in os.environ:
        return None
    port, world, first = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    listening = int(os.environ[_STORE]) if first else None
    shared: Store = TCPStore(_LOOPBACK, port, world, first, timeout=timeout, master_listen_fd=listening)
    return shared


def _interfaces() -> dict[str, str]:
    return dict.fromkeys(_INTERFACES, "lo0" if sys.platform == "darwin" else "lo")


def _chosen(*names: str) -> dict[str, str]:
    """Return the variables that the user has set."""
    return {name: os.environ[name] for name in names if name in os.environ}
