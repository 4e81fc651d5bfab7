"""Time, money, energy and carbon of a whole run, from the estimate of one step; and which plans no other one beats."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from autotune.cost_model.carbon import JOULES_PER_KWH
from autotune.cost_model.cluster.estimate import Estimate
from autotune.errors import InputError

_HOUR_S = 3600.0
_SYMBOLS = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}
_MONEY = re.compile(
    r"([$€£¥])?\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([$€£¥]|[A-Z]{3})?"
)
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMBT]?)", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """An amount of a currency.

    Attributes:
        amount: the amount, above 0.
        currency: ISO code of the currency.
    """

    amount: float
    currency: str

    @classmethod
    def parse(cls, text: str, *, where: str) -> Money:
        """Return an amount from text such as ``2.5USD`` or ``$2.50``.

        Args:
            text: the amount.
            where: the option, for errors.

        Raises:
            InputError: if there is no currency, or no amount above 0.
        """
        found = _MONEY.fullmatch(text.strip())
        amount = float(found[2].replace(",", "")) if found else 0.0
        if found is None or amount <= 0 or (found[1] and found[3]):
            raise InputError(f"is {text!r}", where=where, allowed="an amount with its currency, as in 2.5USD or $2.5")
        sign = found[1] or found[3]
        if not sign:
            raise InputError(f"{text!r} has no currency", where=where, allowed=f"as in {amount:g}USD or {amount:g}EUR")
        return cls(amount=amount, currency=_SYMBOLS.get(sign, sign))


def parse_tokens(text: str, *, where: str = "--tokens") -> float:
    """Return a number of tokens from text such as ``1T``, ``300B`` or ``2000000``.

    Raises:
        InputError: if it is not a number above 0.
    """
    found = _AMOUNT.fullmatch(text.strip())
    value = float(found[1]) * _SCALE[found[2].lower()] if found else 0.0
    if not 0 < value < 1e18:
        raise InputError(f"is {text!r}", where=where, allowed="a number of tokens, as in 300B or 1T")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """What a run of a number of tokens takes under one plan; estimated.

    Attributes:
        seconds: seconds of training, failures and snapshots included if their goodput is known.
        device_hours: hours of all devices.
        cost: money for the devices; ``None`` without a price.
        currency: of the cost.
        energy_j: energy of all devices.
        energy_source: where the power comes from: ``estimated:given`` or ``estimated:tdp``.
        grams: grams of CO2 equivalents; ``None`` without an intensity.
    """

    seconds: float
    device_hours: float
    cost: float | None
    currency: str | None
    energy_j: float
    energy_source: str
    grams: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the costs as a JSON object."""
        return {"estimated": True, **asdict(self)}


def run_cost(
    estimate: Estimate,
    tokens: float,
    *,
    price: Money | None = None,
    watts: float | None = None,
    grams_per_kwh: float | None = None,
    goodput: float = 1.0,
) -> RunCost:
    """Return the costs of a run.

    Args:
        estimate: the plan.
        tokens: tokens of the run.
        price: money for one device and hour.
        watts: mean power of one device, its share of the node included; the device's power limit if left out.
        grams_per_kwh: mean carbon intensity of the grid.
        goodput: share of the time in which the run makes progress.
    """
    seconds = tokens / estimate.tokens_per_s / goodput
    hours = seconds / _HOUR_S * estimate.layout.devices
    energy = (watts or estimate.machine.watts) * seconds * estimate.layout.devices
    return RunCost(
        seconds=seconds,
        device_hours=hours,
        cost=None if price is None else price.amount * hours,
        currency=None if price is None else price.currency,
        energy_j=energy,
        energy_source="estimated:tdp" if watts is None else "estimated:given",
        grams=None if grams_per_kwh is None else energy / JOULES_PER_KWH * grams_per_kwh,
    )


def front(items: Sequence[_T], *costs: Callable[[_T], float]) -> list[_T]:
    """Return the items that no other one equals or beats in all costs and beats in one, by the first cost.

    Args:
        items: the items.
        costs: functions of an item; less is better.
    """
    valued = [(tuple(cost(one) for cost in costs), one) for one in items]
    kept = [
        (values, one)
        for values, one in valued
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) and other != values for other, _ in valued)
    ]
    return [one for _, one in sorted(kept, key=lambda pair: pair[0])]
