"""Costs as CSV with the columns of FOCUS 1.2, the format of cost tools. Pure.

A row has one quantity, so the GPU time and the CPU time of a function, key and day are two rows. An empty field
is null.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

COLUMNS: Final = ("day", "team", "app", "function", "key")  # of each row
_PROVIDER: Final = "gpufn"
_TAGS: Final = "gpufn/"  # prefix of tags that the provider sets
_HOUR_S: Final = 3600.0
_NO_CURRENCY: Final = "XXX"  # ISO 4217
# All mandatory columns, those about consumption and resources, and ours with x_.
FOCUS_COLUMNS: Final = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart",
    "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost",
    "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ResourceId", "ResourceName",
    "ResourceType", "ServiceCategory", "ServiceName", "SubAccountId", "SubAccountName", "Tags", "x_Calls", "x_CO2Grams",
    "x_Joules",
)  # fmt: skip


class _Charge(NamedTuple):
    what: str
    quantity: float
    unit: str
    cost: float


def focus_csv(costs: Iterable[Mapping[str, Any]], currency: str | None) -> str:
    """Return the costs of days, functions and keys. Each has COLUMNS, the fields of a `Cost`, and its `total`.

    The calls, energy and CO2 of each are in its first row only, so that sums are right.
    """
    output = io.StringIO()
    writer = csv.DictWriter(output, FOCUS_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for cost in costs:
        for number, charge in enumerate(_charges(cost)):
            row = _row(cost, charge, currency or _NO_CURRENCY) | (_own(cost) if number == 0 else {})
            writer.writerow({name: _plain(value) for name, value in row.items() if value is not None})
    return output.getvalue()


def _charges(cost: Mapping[str, Any]) -> Iterator[_Charge]:
    function = cost["function"]
    gpu_s, of_gpu = cost["gpu_used_s"] + cost["gpu_idle_s"], cost["used"] + cost["idle"] + cost["unused"]
    has_gpu = bool(gpu_s or of_gpu)
    if has_gpu:
        what = f"GPU time of {function}" if function else "GPU time that no worker held"
        yield _Charge(what, gpu_s / _HOUR_S, "GPU-Hours", of_gpu)
    if cost["cpu_s"] or cost["cpu"] or not has_gpu:
        yield _Charge(f"CPU time of {function}", cost["cpu_s"] / _HOUR_S, "Core-Hours", cost["cpu"])


def _row(cost: Mapping[str, Any], charge: _Charge, currency: str) -> dict[str, Any]:
    day = datetime.date.fromisoformat(cost["day"])
    month = day.replace(day=1)
    costs = dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), f"{charge.cost:.6f}")
    function = cost["function"]
    name = function.rpartition("/")[2]
    return {
        **costs,
        "BillingAccountId": _PROVIDER,
        "BillingAccountName": _PROVIDER,
        "BillingCurrency": currency,
        "BillingPeriodStart": _midnight(month),
        "BillingPeriodEnd": _midnight((month + datetime.timedelta(days=32)).replace(day=1)),
        "ChargeCategory": "Usage",
        "ChargeDescription": charge.what,
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _midnight(day),
        "ChargePeriodEnd": _midnight(day + datetime.timedelta(days=1)),
        "ConsumedQuantity": f"{charge.quantity:.6f}",
        "ConsumedUnit": charge.unit,
        "InvoiceIssuerName": _PROVIDER,
        "PricingCategory": "Standard",
        "PricingQuantity": f"{charge.quantity:.6f}",
        "PricingUnit": charge.unit,
        "ProviderName": _PROVIDER,
        "PublisherName": _PROVIDER,
        "ResourceId": function or None,
        "ResourceName": name if name != function else None,  # a name must not repeat the id
        "ResourceType": "Function" if function else None,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": _PROVIDER,
        "SubAccountId": cost["team"] or None,
        "SubAccountName": cost["team"] or None,
        "Tags": _tags(app=cost["app"], key=cost["key"], team=cost["team"]),
    }


def _own(cost: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "x_Calls": cost["calls"],
        "x_CO2Grams": None if cost["co2_g"] is None else f"{cost['co2_g']:.3f}",
        "x_Joules": None if cost["joules"] is None else f"{cost['joules']:.1f}",
    }


def _tags(**tags: str) -> str | None:
    return json.dumps({_TAGS + name: value for name, value in tags.items() if value}) if any(tags.values()) else None


def _midnight(day: datetime.date) -> str:
    return f"{day.isoformat()}T00:00:00Z"


def _plain(value: Any) -> Any:
    """Keep a spreadsheet from running a text as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
