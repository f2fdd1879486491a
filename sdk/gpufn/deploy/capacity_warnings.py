"""What a function needs and no node has: its calls would wait, and nothing else would tell who deploys it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpufn_core.spec.resources import Resources


def what_no_node_has(resources: Resources, nodes: Iterable[dict[str, Any]], *, in_container: bool = False) -> str:
    """In words, and empty when some node could hold a worker, or none has reported yet.

    >>> node = {"devices": [{"type": "cpu", "kind": "EPYC", "memory_bytes": 8 << 30}]}
    >>> what_no_node_has(Resources(gpu=("L4",)), [node])
    "no node has the GPU 'L4'"
    >>> gpu = {"type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30}
    >>> what_no_node_has(Resources(gpu=("L4",), gpu_count=2), [{"devices": [gpu]}])
    "no node has 2 of the GPU 'L4'"
    >>> from gpufn_core.domain.device import Share
    >>> what_no_node_has(Resources(gpu=("any",), share=Share.MPS, vram_bytes=40 << 30), [{"devices": [gpu]}])
    'no GPU has 40 GiB of memory, the largest has 24 GiB'
    >>> what_no_node_has(Resources(memory_bytes=16 << 30), [node])
    'no node has 16 GiB of memory, the largest has 8 GiB'
    """
    nodes = list(nodes)
    devices = [device for node in nodes for device in node.get("devices", [])]
    if not devices:
        return ""
    troubles = [node.get("container_trouble", "") for node in nodes]
    if in_container and all(troubles):
        return f"no node starts the containers that its image needs ({troubles[0]})"
    if lacking := _lacking_gpus(resources, nodes):
        return lacking
    pools = [device for device in devices if device.get("type") == "cpu"]
    memory = max((device.get("memory_bytes", 0) for device in pools), default=0)
    if resources.memory_bytes is not None and pools and resources.memory_bytes > memory:
        return f"no node has {_gib(resources.memory_bytes)} of memory, the largest has {_gib(memory)}"
    cores = max((device.get("cores", 0.0) for device in pools), default=0.0)
    if cores and resources.cpu > cores:
        return f"no node has {resources.cpu:g} cores, the largest has {cores:g}"
    return ""


def _lacking_gpus(resources: Resources, nodes: Iterable[dict[str, Any]]) -> str:
    if not resources.gpu:
        return ""
    named = "a GPU" if "any" in resources.gpu else f"the GPU {' or '.join(map(repr, resources.gpu))}"
    wanted = [kind.lower() for kind in resources.gpu]
    of_kind = [
        [
            device
            for device in node.get("devices", [])
            if device.get("type") == "gpu" and any(kind == "any" or kind in device["kind"].lower() for kind in wanted)
        ]
        for node in nodes
    ]
    most = max(map(len, of_kind), default=0)
    if not most:
        return f"no node has {named}"
    if most < resources.gpu_count:
        several = "GPUs" if "any" in resources.gpu else f"of {named}"
        return f"no node has {resources.gpu_count} {several}"
    vram = max(device.get("memory_bytes", 0) for found in of_kind for device in found)
    if resources.vram_bytes is not None and resources.vram_bytes > vram:
        return f"no GPU has {_gib(resources.vram_bytes)} of memory, the largest has {_gib(vram)}"
    return ""


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.3g} GiB"
