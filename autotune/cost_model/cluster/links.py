"""Seconds of collectives over the links of a hierarchy: devices in nodes, nodes in a network."""

from __future__ import annotations

from autotune.cost_model.cluster.constants import Constants
from autotune.cost_model.cluster.machines import Machine


def rate(machine: Machine, ranks: int, stride: int, constants: Constants) -> float:
    """Return the bytes per second at which one rank of a group passes data on.

    Args:
        machine: the device and its links.
        ranks: ranks of the group.
        stride: distance between neighbours of the group in the order of all ranks.
        constants: the model's constants.

    Returns:
        The link's rate inside a node. Between nodes, the members of a group that share a node use its network together,
        and the groups that share a node share the network.
    """
    if ranks * stride <= machine.per_node:
        return machine.link * constants.link_share
    inside = max(1, machine.per_node // stride)
    return min(machine.link, machine.node_rate * inside) * constants.link_share


def gather_seconds(size: float, ranks: int, stride: int, machine: Machine, constants: Constants) -> float:
    """Return the seconds of an all-gather or a reduce-scatter by a ring.

    Args:
        size: bytes of the whole tensor.
        ranks: ranks of the group.
        stride: distance between neighbours of the group in the order of all ranks.
        machine: the device and its links.
        constants: the model's constants.

    Source: a ring passes (n - 1)/n of the tensor through every rank (Thakur, Rabenseifner and Gropp 2005,
    doi:10.1177/1094342005051521).
    """
    if ranks == 1:
        return 0.0
    nodes = max(1, ranks * stride // machine.per_node) if stride < machine.per_node else ranks
    moved = size * (ranks - 1) / ranks
    return moved / rate(machine, ranks, stride, constants) + constants.latency_s * nodes


def reduce_seconds(size: float, ranks: int, stride: int, machine: Machine, constants: Constants) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter and an all-gather; arguments as there."""
    return 2 * gather_seconds(size, ranks, stride, machine, constants)
