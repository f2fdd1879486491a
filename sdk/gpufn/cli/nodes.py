"""`gpufn nodes`."""

from __future__ import annotations

from typing import Any

from gpufn.cli._render import Json, ago, print_json, print_table, size


def nodes(json: Json = False) -> None:
    """List the nodes and their devices."""
    from gpufn._client import Client  # noqa: PLC0415

    with Client() as client:
        found = client.nodes()
    if json:
        print_json(found)
        return
    rows = [
        (
            node["node"],
            _device(device),
            size(device.get("memory_bytes")),
            len(node.get("processes", [])),
            ago(node["sent_at"]),
        )
        for node in found
        for device in node.get("devices", [])
    ]
    print_table(("node", "device", "memory", "workers", "reported"), rows, empty="no node reports: does an agent run?")


def _workers(node: dict[str, Any]) -> int:
    return len(node.get("processes", []))


def _device(device: dict[str, Any]) -> str:
    cores = f", {device['cores']:g} cores" if device.get("cores") else ""
    return f"{device.get('kind')}{cores}"
