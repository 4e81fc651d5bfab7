"""The calls that an engine answers for another process, with JSON objects as results."""

from __future__ import annotations

from typing import Any

from autotune.engines.engine import Engine
from autotune.plan import Plan


def described(engine: Engine) -> dict[str, Any]:
    """Return ``space``, the plans that an engine's job allows, and ``locks``, the reasons against others."""
    return {"space": engine.space.to_json(), "locks": {**getattr(engine, "locks", {})}}


def measured(engine: Engine, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
    """Run a window on an engine, and return its measurement."""
    engine.apply(Plan.from_json(plan))
    engine.memory_budget_bytes = memory_budget_bytes
    return engine.run(steps).to_json()
