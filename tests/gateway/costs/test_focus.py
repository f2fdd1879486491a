"""The CSV of costs against the rules of FOCUS 1.2.

The rules come from the columns' pages in the specification, version 1.2. The validator of FOCUS 1.0 was run by hand.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from gpufn.client.views.figures import CostView
from gpufn_gateway.costs.focus import FOCUS_COLUMNS, focus_csv

ROWS = (
    CostView(
        day="2026-12-31", team="t", app="prod/a", function="prod/a/f", key="k1", calls=12, gpu_used_s=1800.0,
        gpu_idle_s=60.0, cpu_s=7200.0, used=0.4, idle=0.1, cpu=0.06, unused=0.02, total=0.58, joules=1e5, co2_g=3.0,
    ),
    CostView(
        day="2026-12-30", app="prod/a", function="prod/a/f", key="k2", calls=2, cpu_s=360.0, cpu=0.003, total=0.003
    ),
    CostView(day="2026-12-30", function="legacy", key="k2", calls=3),
    CostView(day="2026-02-01", gpu_idle_s=86400.0, unused=20.0, total=20.0),
)  # fmt: skip


def written(*rows: CostView, currency: str | None = "EUR") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(focus_csv(map(msgspec.structs.asdict, rows), currency))))


def is_text(value: str) -> bool:
    return bool(value.strip())


def is_json(value: str) -> bool:
    """A serialized object, whose values are plain."""
    return all(isinstance(each, str | int | float | bool | None) for each in dict(json.loads(value)).values())


def matching(pattern: str) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(pattern, value) is not None


is_number = matching(r"-?\d+(\.\d+)?(E-?\d+)?")
is_time = matching(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
is_unit = matching(r"[A-Z]\w+(-(Years|Months|Days|Hours|Minutes|Seconds))?")


class Rule(NamedTuple):
    fits: Callable[[str], bool]
    may_be_null: bool = False
    is_mandatory: bool = True


RULES = {
    "BilledCost": Rule(is_number),
    "BillingAccountId": Rule(is_text),
    "BillingAccountName": Rule(is_text, may_be_null=True),
    "BillingCurrency": Rule(matching("[A-Z]{3}")),
    "BillingPeriodEnd": Rule(is_time),
    "BillingPeriodStart": Rule(is_time),
    "ChargeCategory": Rule(matching("Usage|Purchase|Tax|Credit|Adjustment")),
    "ChargeClass": Rule(matching("Correction"), may_be_null=True),
    "ChargeDescription": Rule(is_text, may_be_null=True),
    "ChargeFrequency": Rule(matching("One-Time|Recurring|Usage-Based"), is_mandatory=False),
    "ChargePeriodEnd": Rule(is_time),
    "ChargePeriodStart": Rule(is_time),
    "ConsumedQuantity": Rule(is_number, may_be_null=True, is_mandatory=False),
    "ConsumedUnit": Rule(is_unit, may_be_null=True, is_mandatory=False),
    "ContractedCost": Rule(is_number),
    "EffectiveCost": Rule(is_number),
    "InvoiceIssuerName": Rule(is_text),
    "ListCost": Rule(is_number),
    "PricingCategory": Rule(matching("Standard|Dynamic|Committed|Other"), may_be_null=True, is_mandatory=False),
    "PricingQuantity": Rule(is_number, may_be_null=True),
    "PricingUnit": Rule(is_unit, may_be_null=True),
    "ProviderName": Rule(is_text),
    "PublisherName": Rule(is_text),
    "ResourceId": Rule(is_text, may_be_null=True, is_mandatory=False),
    "ResourceName": Rule(is_text, may_be_null=True, is_mandatory=False),
    "ResourceType": Rule(is_text, may_be_null=True, is_mandatory=False),
    "ServiceCategory": Rule(matching("AI and Machine Learning")),
    "ServiceName": Rule(is_text),
    "SubAccountId": Rule(is_text, may_be_null=True, is_mandatory=False),
    "SubAccountName": Rule(is_text, may_be_null=True, is_mandatory=False),
    "Tags": Rule(is_json, may_be_null=True, is_mandatory=False),
}


def test_the_columns_are_the_mandatory_ones_and_further_ones_of_focus_and_then_our_own() -> None:
    mandatory = {name for name, rule in RULES.items() if rule.is_mandatory}
    assert len(mandatory) == 21  # all of FOCUS 1.2
    assert mandatory <= set(FOCUS_COLUMNS)
    own = [name for name in FOCUS_COLUMNS if name not in RULES]
    assert all(name.startswith("x_") for name in own)
    assert list(FOCUS_COLUMNS) == [*sorted(RULES), *own]


@pytest.mark.parametrize("name", RULES)
def test_each_value_has_the_form_of_its_column(name: str) -> None:
    rule = RULES[name]
    for row in written(*ROWS):
        value = row[name]
        assert rule.may_be_null if value == "" else rule.fits(value), value


def test_values_that_depend_on_each_other() -> None:
    for row in written(*ROWS):
        assert (row["ChargeCategory"], row["ChargeClass"]) == ("Usage", "")
        # A usage that is no correction has a quantity, and a quantity has a unit.
        assert all(row[f"{kind}{part}"] for kind in ("Consumed", "Pricing") for part in ("Quantity", "Unit"))
        assert (row["ResourceType"] == "") == (row["ResourceId"] == "")
        assert not row["ResourceName"] or row["ResourceId"]
        assert row["ResourceName"] != row["ResourceId"] or not row["ResourceId"]
        assert (row["SubAccountName"] == "") == (row["SubAccountId"] == "")
        assert row["BillingPeriodStart"] <= row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
        assert all(key.startswith("gpufn/") and value for key, value in json.loads(row["Tags"] or "{}").items())


def test_gpu_and_cpu_time_are_rows_of_their_own_and_calls_count_once() -> None:
    rows = written(*ROWS)
    assert [(row["ConsumedQuantity"], row["ConsumedUnit"], row["BilledCost"], row["x_Calls"]) for row in rows] == [
        ("0.516667", "GPU-Hours", "0.520000", "12"),
        ("2.000000", "Core-Hours", "0.060000", ""),
        ("0.100000", "Core-Hours", "0.003000", "2"),
        ("0.000000", "Core-Hours", "0.000000", "3"),
        ("24.000000", "GPU-Hours", "20.000000", "0"),
    ]
    assert sum(float(row["BilledCost"]) for row in rows) == pytest.approx(sum(row.total for row in ROWS))


def test_a_month_ends_with_the_next_one() -> None:
    (row, *_) = written(*ROWS)
    assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == ("2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z")


def test_without_prices_the_currency_is_the_code_for_none() -> None:
    assert {row["BillingCurrency"] for row in written(*ROWS, currency=None)} == {"XXX"}


def test_a_name_cannot_be_a_formula() -> None:
    (row,) = written(CostView(day="2026-12-31", function="=1+1"))
    assert row["ResourceId"] == "'=1+1"
