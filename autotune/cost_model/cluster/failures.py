"""Progress of a run on many devices that fail: the best interval between snapshots, and spare nodes.

Failures are taken to be independent and to come at a constant rate. Every failure stops the run, which restarts from
its last snapshot. (``autotune.cost_model.goodput`` is about statistical efficiency, which is another goodput.)
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

_DAY_S = 86_400.0
_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How often devices fail, and what a failure costs.

    Attributes:
        failures_per_device_day: failures of one device in a day, its share of the node and the network included.
        snapshot_s: seconds for which a snapshot stops the run.
        restart_s: seconds from a failure until training goes on.
        repair_s: seconds after which a failed node is back.
    """

    failures_per_device_day: float
    snapshot_s: float
    restart_s: float
    repair_s: float = _DAY_S

    def mean_time_s(self, devices: int) -> float:
        """Return the mean seconds between failures of any of the devices."""
        return _DAY_S / (self.failures_per_device_day * devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """How a run fares with failures; estimated.

    Attributes:
        goodput: share of the time in which the run makes progress that is kept.
        interval_s: seconds of training between snapshots.
        mean_time_between_failures_s: of all devices together.
        spare_nodes: nodes in reserve with which, at 99 of 100 moments, no node is missing.
    """

    goodput: float
    interval_s: float
    mean_time_between_failures_s: float
    spare_nodes: int

    def to_json(self) -> dict[str, Any]:
        """Return the availability as a JSON object."""
        return {"estimated": True, **asdict(self)}


def goodput(interval_s: float, mean_time_s: float, reliability: Reliability) -> float:
    """Return the share of the time in which a run makes progress.

    Args:
        interval_s: seconds of training between snapshots.
        mean_time_s: mean seconds between failures.
        reliability: what a snapshot and a restart take.

    Source: the expected time of a stretch with exponential failures, M e^(R/M) (e^((t + d)/M) - 1), for mean time M,
    restart R, snapshot d and stretch t (Daly 2006, doi:10.1016/j.future.2004.11.016, eq. 20).
    """
    exponent = (interval_s + reliability.snapshot_s) / mean_time_s
    restart = reliability.restart_s / mean_time_s
    if exponent + restart > 700:
        return 0.0
    return interval_s / (mean_time_s * math.exp(restart) * math.expm1(exponent))


def best_interval(mean_time_s: float, snapshot_s: float) -> float:
    """Return the seconds between snapshots with the most progress.

    Args:
        mean_time_s: mean seconds between failures.
        snapshot_s: seconds that a snapshot takes, above 0.

    Source: the zero of the goodput's derivative, e^((t + d)/M) (1 - t/M) = 1; near sqrt(2 d M) for rare failures
    (Young 1974, doi:10.1145/361147.361115).
    """
    if snapshot_s > 500 * mean_time_s:
        return mean_time_s  # nothing is gained in any case, and the exponential would overflow
    low, high = 0.0, mean_time_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if math.exp((middle + snapshot_s) / mean_time_s) * (1 - middle / mean_time_s) > 1:
            low = middle
        else:
            high = middle
    return low


def availability(devices: int, per_node: int, reliability: Reliability) -> Availability:
    """Return how a run on some devices fares at its best interval between snapshots.

    Args:
        devices: number of devices.
        per_node: devices of one node, which fails as a whole.
        reliability: how often devices fail, and what that costs.
    """
    mean = reliability.mean_time_s(devices)
    interval = best_interval(mean, reliability.snapshot_s)
    return Availability(
        goodput=goodput(interval, mean, reliability),
        interval_s=interval,
        mean_time_between_failures_s=mean,
        spare_nodes=_spares(reliability.repair_s / mean, -(-devices // per_node)),
    )


def _spares(broken: float, nodes: int) -> int:
    """Return the spare nodes that suffice at 99 of 100 moments, for a Poisson number of broken nodes.

    Args:
        broken: mean number of nodes under repair.
        nodes: number of nodes, which is enough in any case.
    """
    from scipy.stats import poisson

    return min(nodes, int(poisson.ppf(0.99, broken)))
