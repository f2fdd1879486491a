"""`gpufn nodes ls`, `drain`, `undrain`."""

from __future__ import annotations

from typing import Any

import click

from gpufn.cli.terminal.command import Argument, Group, connect, json_option
from gpufn.cli.terminal.output import ago, print_json, print_table, say, say_or_json, size
from gpufn_core.domain import clock_skew

_UUID_LENGTH = 12  # the prefix GPU-5a1b7e0c distinguishes the GPUs of a node


app = Group("nodes", help="List the nodes and their devices, and drain them.")

_node_argument = click.argument("node", cls=Argument, help="Name of the node.")


@app.command("ls")
@json_option
def list_nodes(json: bool) -> None:
    """List the nodes and their devices."""
    with connect() as client:
        reports = client.nodes()
        silent = client.silent_nodes()
    if json:
        print_json([*reports, *({"node": each["node"], "devices": [], "drained": each} for each in silent)])
        return
    print_table(
        ("node", "device", "memory", "in use", "power", "workers", "reported", "score", "state"),
        [
            *(_row(node, device) for node in reports for device in node.get("devices", [])),
            *((each["node"], *["-"] * 7, "drained, does not report") for each in silent),
        ],
        empty="no node has reported: is an agent running?",
    )
    for node in reports:
        skew_s = node.get("clock_skew_s")
        if clock_skew.is_skewed(skew_s):
            say(f"the clock of node {node['node']} is {clock_skew.describe(skew_s)}: {clock_skew.REMEDY}")
        if drained := node.get("drained"):
            count = len(node.get("processes", ()))
            workers = f"{count} worker{'s' if count != 1 else ''} left"
            say(f"node {node['node']} is drained since {ago(drained['since'])}: {workers}")
        for advice in () if drained else drain_advice(node):
            say(advice)
        for notice in (node.get("facts") or {}).get("power_limit_notices", ()):
            say(f"node {node['node']}: {notice}")
    for each in silent:
        say(
            f"node {each['node']} was drained {ago(each['since'])} and does not report: "
            f"`gpufn nodes undrain {each['node']}` ends the drain"
        )


@app.command()
@_node_argument
@json_option
def drain(node: str, json: bool) -> None:
    """Let a node accept no new workers. Its workers finish their calls, and others start on other nodes.

    The node stays drained after restarts of all processes, until `gpufn nodes undrain`.
    """
    with connect() as client:
        client.drain_node(node)
    say_or_json(f"{node} is drained: `gpufn nodes` shows how many workers it has", {"drained": node}, json=json)


@app.command()
@_node_argument
@json_option
def undrain(node: str, json: bool) -> None:
    """Let a drained node accept workers again."""
    with connect() as client:
        client.undrain_node(node)
    say_or_json(f"{node} accepts workers", {"undrained": node}, json=json)


def _row(node: dict[str, Any], device: dict[str, Any]) -> tuple[Any, ...]:
    metrics = metrics_of(node, device)
    used = metrics.get("memory_used_bytes")
    return (
        node["node"],
        device_name(device),
        size(device.get("memory_bytes")),
        size(used) if used is not None else "-",
        power_of(metrics) or "-",
        len(workers_on(node, device)),
        ago(node["sent_at"]),
        score_of(node, device),
        f"drained, {state_of(device)}" if node.get("drained") else state_of(device),
    )


def score_of(node: dict[str, Any], device: dict[str, Any]) -> str:
    """Format the health score of a GPU, or of the node for its CPU pool. Older gateways send none.

    >>> score_of({"score": {"value": 0.75}}, {"type": "cpu", "uuid": "c"}), score_of({}, {"type": "gpu", "uuid": "g"})
    ('0.75', '-')
    """
    score = (node.get("gpu_scores") or {}).get(device["uuid"]) if device.get("type") == "gpu" else node.get("score")
    return "-" if score is None else f"{score['value']:.2f}"


def drain_advice(node: dict[str, Any]) -> list[str]:
    """Return the advice to drain the node or some of its GPUs, with the reasons.

    >>> drain_advice({"node": "n1", "score": {"value": 0.3, "drain": True, "reasons": ["5 of 5 starts failed"]}})
    ['drain node n1: 5 of 5 starts failed']
    """
    scores = [(f"node {node['node']}", node.get("score") or {})]
    scores += [
        (f"{uuid[:_UUID_LENGTH]} of node {node['node']}", each) for uuid, each in (node.get("gpu_scores") or {}).items()
    ]
    return [f"drain {name}: {', '.join(score['reasons'])}" for name, score in scores if score.get("drain")]


def metrics_of(node: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a device, or {} if the node does not report any."""
    return next((each for each in node.get("metrics", []) if each["uuid"] == device["uuid"]), {})


def power_of(metrics: dict[str, Any]) -> str:
    """Format the power of a GPU, such as ``72 W``; empty if unknown."""
    watts = metrics.get("power_w")
    return "" if watts is None else f"{watts:.0f} W"


def workers_on(node: dict[str, Any], device: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the processes with a share of a GPU; for a CPU pool, all processes of the node."""
    processes: list[dict[str, Any]] = node.get("processes", [])
    if device.get("type") != "gpu":
        return processes
    return [each for each in processes if device["uuid"] in ((each.get("share") or {}).get("gpus") or ())]


def state_of(device: dict[str, Any]) -> str:
    health, reason = device.get("health", "healthy"), device.get("health_reason", "")
    return f"{health}: {reason}" if reason else str(health)


def device_name(device: dict[str, Any]) -> str:
    """Return a device's model, with a GPU's uuid prefix or a CPU pool's number of cores."""
    if device.get("type") == "gpu":
        return f"{device.get('kind')}, {device['uuid'][:_UUID_LENGTH]}"
    cores = f", {device['cores']:g} cores" if device.get("cores") else ""
    return f"{device.get('kind')}{cores}"
