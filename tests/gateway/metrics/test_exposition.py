"""Formats, bounds and names of `/metrics`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import ColdStart
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway.metrics import families as bounds
from gpufn_gateway.metrics import telemetry as telemetry_module
from gpufn_gateway.metrics.call_stats import MAX_CODES, OTHER, CallStats
from gpufn_gateway.metrics.catalogue import SERIES, Kind
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.formats.protobuf import Protobuf
from gpufn_gateway.metrics.formats.text import OpenMetrics, Text
from gpufn_gateway.metrics.telemetry import MAX_FUNCTIONS, OTHER_FUNCTIONS, Telemetry
from gpufn_gateway.monitoring import dashboards, rules

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def _reply(kind: OutcomeKind = OutcomeKind.SUCCEEDED) -> ResultReply:
    return ResultReply("01hz", kind, None, "", 1, 1, 0.5, 0.25, cold_start=ColdStart(load_s=1.0))


def _telemetry() -> Telemetry:
    telemetry = Telemetry(lambda: 2)
    telemetry.of("f").count_end(_reply(), 0.7, 1_000.0, TRACE)
    telemetry.of("f").count_end(_reply(OutcomeKind.LOST), 0.03, 1_001.0)
    return telemetry


async def test_a_client_that_accepts_openmetrics_gets_it_with_exemplars() -> None:
    body, content_type = await _telemetry().scrape(OPENMETRICS)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    families = {family.name: family for family in parse_openmetrics(body.decode())}  # type: ignore[no-untyped-call]
    (bucket,) = [each for each in families["gpufn_call_seconds"].samples if each.labels.get("le") == "1.0"]
    assert bucket.exemplar is not None
    assert (bucket.exemplar.value, float(str(bucket.exemplar.timestamp))) == (0.7, 1_000.0)
    assert bucket.exemplar.labels == {
        "invocation": "01hz", "trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331",
    }  # fmt: skip
    assert families["gpufn_call_seconds"].unit == "seconds"
    (untraced,) = [each for each in families["gpufn_call_seconds"].samples if each.labels.get("le") == "0.05"]
    assert untraced.exemplar is not None
    assert untraced.exemplar.labels == {"invocation": "01hz"}


async def test_an_exemplar_has_at_most_128_characters_and_no_negative_duration() -> None:
    telemetry = Telemetry(lambda: 0)
    # A long id, and a clock that was set back meanwhile.
    telemetry.of("f").count_end(msgspec.structs.replace(_reply(), invocation="0" * 500), -1.0, 1_000.0, TRACE)
    body, _ = await telemetry.scrape(OPENMETRICS)
    families = {family.name: family for family in parse_openmetrics(body.decode())}  # type: ignore[no-untyped-call]
    latency = families["gpufn_call_seconds"].samples
    assert [each.value for each in latency if each.name == "gpufn_call_seconds_sum"] == [0.0]
    (exemplar,) = [each.exemplar for each in latency if each.exemplar is not None]
    assert exemplar.value == 0.0
    assert sum(len(name) + len(value) for name, value in exemplar.labels.items()) <= 128
    assert len(exemplar.labels) == 3


def test_labels_have_at_most_200_characters() -> None:
    for form in (Text(), Protobuf()):
        families = Families(form)
        families.add("gpufn_node_up", 1, "\N{FACE WITH TEARS OF JOY}" * 300)
        assert families.exposition().decode(errors="replace").count("\N{FACE WITH TEARS OF JOY}") == 200


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", "application/openmetrics-text;version=2.0.0", "\x00,;=,;"])
async def test_other_clients_get_the_text_format(accept: str) -> None:
    body, content_type = await _telemetry().scrape(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    samples = {each.name for family in parse_text(body.decode()) for each in family.samples}
    assert {"gpufn_calls_total", "gpufn_call_seconds_bucket", "gpufn_cold_start_seconds_total"} <= samples
    assert b"# {" not in body


def test_functions_beyond_the_bound_are_exposed_together() -> None:
    telemetry = Telemetry(lambda: 0)

    def exposed() -> dict[str, float]:
        families = Families()
        for fill in telemetry.snapshots():
            fill(families)
        return {each.labels["function"]: each.value for each in _samples(families, "gpufn_refusals_total")}

    for number in range(MAX_FUNCTIONS + 50):
        telemetry.of(f"f{number}").count_refusal("capacity")
    shown = exposed()
    assert (len(shown), shown[OTHER_FUNCTIONS], shown["f0"]) == (MAX_FUNCTIONS + 1, 50, 1)
    assert telemetry.of("f1040").refusals == {"capacity": 1}, "it is counted by itself"
    telemetry.forget("f1040")
    telemetry.forget("f0")
    telemetry.of("later").count_refusal("capacity")  # it gets the place
    shown = exposed()
    assert (shown[OTHER_FUNCTIONS], shown["later"], "f0" in shown) == (50, 1, False)


def test_a_function_that_is_deleted_during_a_scrape_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a counter that was too high once looked like a restart of the gateway after it."""
    monkeypatch.setattr(telemetry_module, "MAX_FUNCTIONS", 0)
    telemetry = _telemetry()
    fill, families = telemetry.snapshot(), Families(Text())
    telemetry.forget("f")
    fill(families)
    assert (
        f'gpufn_calls_total{{function="{OTHER_FUNCTIONS}",outcome="succeeded"}} 1.0' in families.exposition().decode()
    )


def test_a_copy_of_counters_does_not_change_with_them() -> None:
    stats = CallStats()
    stats.count_end(_reply(), 0.5, 1_000.0)
    copy = stats.copy()
    stats.count_end(_reply(OutcomeKind.LOST), 2.0, 1_000.0)
    stats.count_refusal("late")
    stats.count_webhook("delivered")
    assert [copy.latency.count, copy.queue.count, copy.run.count, copy.cold_starts, len(copy.exemplars)] == [1] * 5
    assert (sum(copy.outcomes.values()), dict(copy.refusals), dict(copy.webhooks)) == (1, {}, {})
    assert copy.phase_seconds["load"] == 1.0


def test_codes_beyond_the_bound_count_together() -> None:
    stats = CallStats()
    for number in range(MAX_CODES + 30):
        stats.count_refusal(f"code{number}")
        stats.count_failure(f"code{number}")
    assert (len(stats.refusals), stats.refusals[OTHER]) == (MAX_CODES + 1, 30)
    assert len(stats.outcomes) == MAX_CODES + 1


def test_samples_beyond_the_bound_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_SAMPLES", 10)
    families = Families()
    for number in range(12):
        families.add("gpufn_node_up", 1, "x" * 10_000 + str(number))
    samples = _samples(families, "gpufn_node_up")
    assert (len(samples), families.dropped, len(samples[0].labels["node"])) == (10, 2, bounds.MAX_LABEL_CHARS)


def test_hostile_labels_are_escaped() -> None:
    hostile = 'a"} 1\n# EOF\nevil{x="\\'
    for form, parse in ((Text(), parse_text), (OpenMetrics(), parse_openmetrics)):
        families = Families(form)
        families.add("gpufn_node_up", 1, hostile)
        (metric,) = parse(families.exposition().decode())
        assert [(each.name, each.labels, each.value) for each in metric.samples] == [
            ("gpufn_node_up", {"node": hostile}, 1.0)
        ]


def test_names_follow_the_conventions_of_prometheus() -> None:
    units = {"seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz"}
    for series in SERIES.values():
        assert not series.name.endswith("_total"), series
        if series.name.startswith("gpufn_") and series.unit in units and not series.name.endswith("_per_second"):
            assert series.name.endswith(f"_{series.unit}"), series
        assert series.kind is not Kind.UNKNOWN or series.name.startswith("DCGM_"), series


def test_rules_and_dashboards_name_only_series_of_the_catalogue() -> None:
    import re

    names = {each.exposed_name for each in SERIES.values()}
    names |= {
        f"{each.name}_{end}"
        for each in SERIES.values()
        if each.kind is Kind.HISTOGRAM
        for end in ("bucket", "count", "sum")
    }
    recorded = {each.name for each in rules.RECORDED}
    queries = [each.expression for each in rules.RECORDED] + [each.expression for each in rules.ALERTS]
    queries += [query for board in dashboards.DASHBOARDS for panel in board.panels for query, _ in panel.queries]
    for query in queries:
        assert set(re.findall(r"(?:gpufn|DCGM)[a-zA-Z0-9_:]+", query.replace("GPUFN_", ""))) <= names | recorded, query


def _samples(families: Families, name: str) -> list[Any]:
    parsed = parse_text(families.exposition().decode())
    return [sample for metric in parsed for sample in metric.samples if sample.name == name]
