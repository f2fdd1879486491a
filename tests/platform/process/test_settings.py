"""Environment settings of every process of a node."""

from __future__ import annotations

import re
import socket

import pytest

from gpufn_platform.process.settings import InvalidSetting, bus_url, node_name, size, yes_or_no


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("GPU_Box-7.example.org", "gpu-box-7"),
        ("x" * 60, "x" * 40),
        ("x" * 39 + "_y", "x" * 39),
        ("...", "local"),
    ],
)
def test_a_node_is_named_after_its_host(host: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert node_name({}) == name
    assert node_name({"GPUFN_NODE": name}) == name, "one process passes it to another"


@pytest.mark.parametrize("name", ["A node", "gpu.box", "x" * 41, "*"])
def test_a_name_that_is_no_token_of_a_subject_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^GPUFN_NODE={re.escape(repr(name))} .* 40 "):
        node_name({"GPUFN_NODE": name})


def test_the_bus_is_named() -> None:
    assert bus_url({"GPUFN_NATS_URL": "nats://h"}) == "nats://h"
    with pytest.raises(InvalidSetting, match=r"^GPUFN_NATS_URL .* set"):
        bus_url({"GPUFN_NATS_URL": ""})
    with pytest.raises(InvalidSetting, match=r"^GPUFN_NATS_URL: 'h:1' "):
        bus_url({"GPUFN_NATS_URL": "h:1"})


@pytest.mark.parametrize(("text", "means"), [("yes", True), ("Yes", True), ("true", True), ("1", True), ("on", True)])
def test_yes_and_no_have_several_spellings(text: str, means: bool) -> None:
    assert yes_or_no("GPUFN_X", text) is means
    opposite = {"yes": "no", "Yes": "No", "true": "FALSE", "1": "0", "on": "off"}[text]
    assert yes_or_no("GPUFN_X", opposite) is not means


def test_a_value_other_than_yes_or_no_names_the_variable() -> None:
    with pytest.raises(InvalidSetting, match=r"^GPUFN_X='perhaps': .* yes or no"):
        yes_or_no("GPUFN_X", "perhaps")


def test_a_size_is_a_number_of_bytes_or_a_quantity() -> None:
    assert (size("GPUFN_X", "1000"), size("GPUFN_X", "64Mi"), size("GPUFN_X", " 2 GB")) == (1000, 64 << 20, 2 * 10**9)
    with pytest.raises(InvalidSetting, match=r"^GPUFN_X: 'much' .* '512Mi'"):
        size("GPUFN_X", "much")
