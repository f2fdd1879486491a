"""Warnings about requirements that no node meets: the function's calls would wait without an error. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpufn_core.domain.package_needs import PackageNeeds
from gpufn_core.spec.isolation import OWN_NETWORK, OWN_RUNTIME
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.units import format_bytes


def unmet_requirement(
    resources: Resources,
    nodes: Iterable[dict[str, Any]],
    *,
    in_container: bool = False,
    needs: Iterable[str] = (),
    packages: PackageNeeds | None = None,
) -> str:
    """Describe the requirement that no node meets. Return "" if a node fits a worker, or no node has reported yet.

    >>> node = {"devices": [{"type": "cpu", "kind": "EPYC", "memory_bytes": 8 << 30}]}
    >>> unmet_requirement(Resources(gpu=("L4",)), [node])
    "no node has the GPU 'L4'"
    >>> gpu = {"type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30}
    >>> unmet_requirement(Resources(gpu=("L4",), gpu_count=2), [{"devices": [gpu]}])
    "no node has 2 of the GPU 'L4'"
    >>> from gpufn_core.domain.devices.device import Share
    >>> unmet_requirement(Resources(gpu=("any",), share=Share.MPS, vram_bytes=40 << 30), [{"devices": [gpu]}])
    'no GPU has 40 GiB of memory, the largest has 24 GiB'
    >>> unmet_requirement(Resources(memory_bytes=16 << 30), [node])
    'no node has 16 GiB of memory, the largest has 8 GiB'
    >>> unmet_requirement(Resources(gpu=("L4",), nodes=2), [{"devices": [gpu]}, node])
    'a worker needs 2 nodes at the same time, and 1 of the 2 nodes can run a part of it'
    """
    nodes = list(nodes)
    for need in OWN_RUNTIME.intersection(needs) if in_container else needs:
        troubles = [node.get("isolation_trouble", {}).get(need, "") for node in nodes]
        if nodes and all(troubles):
            option = "network" if need in OWN_NETWORK else "isolation"
            return f"no node offers {option}={str(need)!r} ({troubles[0]})"
    troubles = [_package_trouble(packages, node) for node in nodes if not in_container]
    if troubles and all(troubles):
        return f"no node can have the packages ({troubles[0]})"
    return _unmet_by_each(resources, nodes, in_container=in_container) or _unmet_number_of_nodes(resources, nodes)


def _package_trouble(packages: PackageNeeds | None, node: dict[str, Any]) -> str:
    if packages is None or node.get("contains_all"):
        return ""
    cuda = node.get("facts", {}).get("cuda", "")
    return packages.trouble(machine=node.get("machine", ""), pythons=node.get("pythons", ()), cuda=cuda)


def _unmet_number_of_nodes(resources: Resources, nodes: list[dict[str, Any]]) -> str:
    able = sum(not _unmet_by_each(resources, [node]) for node in nodes)
    if able >= resources.nodes or not nodes:
        return ""
    of = f"{able} of the {len(nodes)} nodes can" if len(nodes) > 1 else "one node is up, which can"
    return f"a worker needs {resources.nodes} nodes at the same time, and {of} run a part of it"


def _unmet_by_each(resources: Resources, nodes: list[dict[str, Any]], *, in_container: bool = False) -> str:
    devices = [device for node in nodes for device in node.get("devices", [])]
    if not devices:
        return ""
    problems = [node.get("container_trouble", "") for node in nodes]
    if in_container and all(problems):
        return f"no node can start containers, which its image needs ({problems[0]})"
    if unmet := _unmet_gpu_requirement(resources, nodes, in_container=in_container):
        return unmet
    pools = [device for device in devices if device.get("type") == "cpu"]
    memory = max((device.get("memory_bytes", 0) for device in pools), default=0)
    if resources.memory_bytes is not None and pools and resources.memory_bytes > memory:
        return f"no node has {format_bytes(resources.memory_bytes)} of memory, the largest has {format_bytes(memory)}"
    cores = max((device.get("cores", 0.0) for device in pools), default=0.0)
    if cores and resources.cpu > cores:
        return f"no node has {resources.cpu:g} cores, the largest has {cores:g}"
    return ""


def _unmet_gpu_requirement(resources: Resources, nodes: Iterable[dict[str, Any]], *, in_container: bool) -> str:
    if not resources.gpu:
        return ""
    gpu = "a GPU" if "any" in resources.gpu else f"the GPU {' or '.join(map(repr, resources.gpu))}"
    kinds = [kind.lower() for kind in resources.gpu]

    def matches(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            device
            for device in node.get("devices", [])
            if device.get("type") == "gpu" and any(kind == "any" or kind in device["kind"].lower() for kind in kinds)
        ]

    with_gpus = [node for node in nodes if matches(node)]
    if not with_gpus:
        return f"no node has {gpu}"
    most = max(len(matches(node)) for node in with_gpus)
    if most < resources.gpu_count:
        several = "GPUs" if "any" in resources.gpu else f"of {gpu}"
        return f"no node has {resources.gpu_count} {several}"
    vram = max(device.get("memory_bytes", 0) for node in with_gpus for device in matches(node))
    if resources.vram_bytes is not None and resources.vram_bytes > vram:
        return f"no GPU has {format_bytes(resources.vram_bytes)} of memory, the largest has {format_bytes(vram)}"
    troubles = [node.get("gpu_container_trouble", "") for node in with_gpus]
    if in_container and all(troubles):
        return f"no node with {gpu} can use it in containers, which its image needs ({troubles[0]})"
    return ""
