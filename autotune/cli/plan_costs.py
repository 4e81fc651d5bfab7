"""The part of ``autotune plan`` about a whole run on many devices: time, money, energy, carbon and failures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.cost_model.cluster.estimate import Estimate
    from autotune.cost_model.cluster.failures import Availability, Reliability
    from autotune.cost_model.cluster.run_cost import Money, RunCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the command line says about a whole run, as it was given."""

    tokens: str | None
    price: str | None
    watts: float | None
    carbon_intensity: str | None
    within: str | None
    within_cost: str | None
    failures: float | None
    snapshot_s: float
    restart_s: float
    figure: Path | None

    def given(self) -> dict[str, Any]:
        """Return what is given, by option."""
        values = {
            "--tokens": self.tokens,
            "--price": self.price,
            "--watts": self.watts,
            "--carbon-intensity": self.carbon_intensity,
            "--within": self.within,
            "--within-cost": self.within_cost,
            "--failures": self.failures,
            "--figure": self.figure,
        }
        return {name: value for name, value in values.items() if value is not None}

    def parsed(self) -> Priced:
        """Return the values.

        Raises:
            InputError: if one makes no sense, or needs another one that is missing.
        """
        from autotune.cost_model.carbon import Intensity, parse_length
        from autotune.cost_model.cluster.failures import Reliability
        from autotune.cost_model.cluster.run_cost import Money, parse_tokens

        for name in self.given():
            if self.tokens is None and name != "--failures":
                raise InputError("needs the tokens of the run", where=name, allowed="--tokens as well, as in 300B")
        price = None if self.price is None else Money.parse(self.price, where="--price")
        most = None if self.within_cost is None else Money.parse(self.within_cost, where="--within-cost")
        if most is not None and (price is None or price.currency != most.currency):
            raise InputError(
                f"is in {most.currency}, the price in {price.currency if price else 'no currency'}",
                where="--within-cost",
                allowed="--price in the same currency",
            )
        intensity = None if self.carbon_intensity is None else Intensity.parse(self.carbon_intensity)
        return Priced(
            tokens=None if self.tokens is None else parse_tokens(self.tokens),
            price=price,
            watts=self.watts,
            # Nobody knows yet when the run will be.
            grams_per_kwh=None if intensity is None else statistics.fmean(intensity.grams_per_kwh),
            within_s=None if self.within is None else parse_length(self.within, where="--within"),
            most=most,
            reliability=None
            if self.failures is None
            else Reliability(
                failures_per_device_day=self.failures, snapshot_s=self.snapshot_s, restart_s=self.restart_s
            ),
            figure=self.figure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What is asked about a whole run."""

    tokens: float | None
    price: Money | None
    watts: float | None
    grams_per_kwh: float | None
    within_s: float | None
    most: Money | None
    reliability: Reliability | None
    figure: Path | None

    def account(self, plans: Sequence[Estimate]) -> tuple[Estimate, dict[str, Any]]:
        """Return the plan to choose, and what the document says about whole runs.

        Args:
            plans: the best plans of all numbers of devices.

        Raises:
            InputError: if no plan is within the given time or cost.
        """
        from autotune.cost_model.cluster.run_cost import front

        fastest = max(plans, key=lambda one: one.tokens_per_s)
        if self.tokens is None:
            return fastest, {} if self.reliability is None else {"failures": [self._fares(one) for one in plans]}
        rows = [(one, self._cost(one)) for one in plans]
        chosen = self._choose(rows)
        best = front(rows, lambda row: row[1].seconds, lambda row: _price(row[1]))
        account: dict[str, Any] = {
            "tokens": self.tokens,
            "chosen": _row(*chosen),
            "front": [_row(*row) for row in best],
            "runs": [_row(*row) for row in rows],
        }
        if self.reliability is not None:
            account["failures"] = [self._fares(one) for one, _ in rows]
        return chosen[0], account

    @staticmethod
    def draw(account: dict[str, Any], path: Path) -> None:
        """Draw time and cost of all plans, and the front of those that no other one beats.

        Args:
            account: what :meth:`account` returned.
            path: the PNG file to write.
        """
        from autotune.report.png_figures import draw_run_costs

        unit = account["chosen"]["currency"] or "device-hours"
        name = "cost" if account["chosen"]["currency"] else "device_hours"
        points = [[(one["seconds"] / 86_400, one[name]) for one in account[group]] for group in ("runs", "front")]
        draw_run_costs(points[0], points[1], unit, path)

    def _availability(self, plan: Estimate) -> Availability | None:
        from autotune.cost_model.cluster.failures import availability

        if self.reliability is None:
            return None
        return availability(plan.layout.devices, plan.machine.per_node, self.reliability)

    def _fares(self, plan: Estimate) -> dict[str, Any]:
        found = self._availability(plan)
        assert found is not None
        return {"devices": plan.layout.devices, **found.to_json()}

    def _cost(self, plan: Estimate) -> RunCost:
        from autotune.cost_model.cluster.run_cost import run_cost

        assert self.tokens is not None
        found = self._availability(plan)
        return run_cost(
            plan,
            self.tokens,
            price=self.price,
            watts=self.watts,
            grams_per_kwh=self.grams_per_kwh,
            goodput=1.0 if found is None else max(found.goodput, 1e-9),
        )

    def _choose(self, rows: Sequence[tuple[Estimate, RunCost]]) -> tuple[Estimate, RunCost]:
        """Return the cheapest plan within the time, or the fastest within the cost; the fastest if neither is given."""
        within_s, most = self.within_s, self.most
        allowed = [
            row
            for row in rows
            if (within_s is None or row[1].seconds <= within_s) and (most is None or _price(row[1]) <= most.amount)
        ]
        if not allowed:
            quick, cheap = min(one.seconds for _, one in rows), min(_price(one) for _, one in rows)
            unit = "device-hours" if self.price is None else self.price.currency
            raise InputError(
                "no plan is within the given time and cost",
                where="--within" if within_s is not None else "--within-cost",
                allowed=f"at least {quick / 86_400:.3g} days and {cheap:,.4g} {unit}, or other --devices",
            )
        if within_s is not None:
            return min(allowed, key=lambda row: _price(row[1]))
        return min(allowed, key=lambda row: row[1].seconds)

    def show(self, account: dict[str, Any], named: str, console: Console) -> None:
        """Print the costs of the chosen plan, and how it fares with failures.

        Args:
            account: what :meth:`account` returned.
            named: the chosen plan in words.
            console: where to print.
        """
        if "chosen" in account:
            one = account["chosen"]
            parts = [f"{one['seconds'] / 86_400:.3g} days", f"{one['device_hours']:,.0f} device-hours"]
            if one["cost"] is not None:
                parts.append(f"{one['cost']:,.0f} {one['currency']}")
            parts.append(f"{one['energy_j'] / 3.6e9:,.1f} MWh ({one['energy_source']})")
            if one["grams"] is not None:
                parts.append(f"{one['grams'] / 1e6:,.2f} t of CO2e")
            text = f"The run of {self.tokens:,.0f} tokens on {one['devices']} devices ({named}), estimated: "
            console.print(text + ", ".join(parts) + ".", soft_wrap=True)
        for one in account.get("failures", ()):
            console.print(
                f"{one['devices']} devices fail every {one['mean_time_between_failures_s'] / 3600:.3g} h (estimated): "
                f"snapshots every {one['interval_s'] / 60:.3g} min keep {one['goodput']:.1%} of the time as progress; "
                f"{one['spare_nodes']} spare nodes.",
                soft_wrap=True,
            )


def _price(cost: RunCost) -> float:
    """Return the money of a run, or its device-hours if there is no price."""
    return cost.device_hours if cost.cost is None else cost.cost


def _row(plan: Estimate, cost: RunCost) -> dict[str, Any]:
    from autotune.cli.plan_devices import described

    return {"devices": plan.layout.devices, "plan": described(plan), **cost.to_json()}
