"""Values that a shell completes: jobs, methods, arms, devices and experiment trackers."""

from __future__ import annotations

from collections.abc import Iterable


def jobs(incomplete: str) -> list[str]:
    """Return the jobs of the catalog that begin with what was typed."""
    from autotune.catalog import catalog

    return _beginning(catalog(), incomplete)


def methods(incomplete: str) -> list[str]:
    """Return the methods that begin with what was typed."""
    from autotune.agents.policies import POLICIES
    from autotune.agents.search_methods import METHODS

    return _beginning((*METHODS.names, *POLICIES.names), incomplete)


def arms(incomplete: str) -> list[str]:
    """Return the lists of arms that what was typed can be continued to; arms are separated by commas."""
    from autotune.agents.rules import RULES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in [*_beginning(RULES.names, last), *methods(last)]]


def devices(incomplete: str) -> list[str]:
    """Return the devices of the table that begin with what was typed."""
    from autotune.cost_model.device_table import DEVICES

    return _beginning(DEVICES, incomplete)


def trackers(incomplete: str) -> list[str]:
    """Return the experiment trackers that begin with what was typed."""
    from autotune.report_to import LIBRARIES

    return _beginning(LIBRARIES, incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
