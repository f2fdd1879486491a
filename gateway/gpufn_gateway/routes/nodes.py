"""Routes of nodes: list them, drain one, and end its drain."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.devices.device import DeviceType
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.errors import Conflict
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import NodeDrain
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.auth.scopes import ADMIN, READ
from gpufn_gateway.buckets import decode_node_drain
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.nodes.health_score import Score
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import json_response, principal_of, route
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.process.clock import Clock


class _Node(NodeReport, frozen=True):
    """A NodeReport with the metrics of its GPUs, the health scores of the node and of its GPUs by uuid, and its
    drain."""

    metrics: tuple[DeviceMetrics, ...] = ()
    score: Score | None = None
    gpu_scores: dict[str, Score] = {}  # noqa: RUF012  msgspec copies it
    drained: NodeDrain | None = None


@dataclass(kw_only=True, eq=False)
class NodeRoutes:
    registry: Registry
    drains: KeyValue
    clock: Clock

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/nodes", self.index, READ),
            route("PUT", "/v1/nodes/{node}/drain", self.drain, ADMIN),
            route("DELETE", "/v1/nodes/{node}/drain", self.undrain, ADMIN),
        ]

    async def index(self, request: Request) -> Response:
        """Return the nodes that report, and the drains of nodes that do not, which only `undrain` ends."""
        nodes = [
            _Node(
                **msgspec.structs.asdict(report),
                metrics=self.registry.device_reports.of(report.node),
                score=self.registry.trends.of_node(report),
                gpu_scores={
                    device.uuid: self.registry.trends.of_gpu(report.node, device)
                    for device in report.devices
                    if device.type is DeviceType.GPU
                },
                drained=self.registry.drains.get(report.node),
            )
            for report in self.registry.live_nodes()
        ]
        return json_response({"nodes": nodes, "not_reporting": self.registry.silent_drains()})

    async def drain(self, request: Request) -> Response:
        """Let a node accept no new workers. The drain of a drained node stands as it is. Raises RouteError for a node
        that does not report."""
        node = self._known(request)

        def drained(stored: Entry | None) -> bytes:
            if stored is not None:
                return stored.value
            return encode(NodeDrain(node=node, since=self.clock.time(), by=principal_of(request).id))

        entry = await self.drains.change(node, drained)
        return json_response(decode_node_drain(entry.value))

    async def undrain(self, request: Request) -> Response:
        """End the drain of a node, also of one that no longer reports. Raises RouteError, Conflict."""
        node = request.path_params["node"]
        if node not in self.registry.drains:
            raise Conflict(f"The node {self._known(request)} is not drained.")
        await self.drains.delete(node)
        return Response(status_code=204)

    def _known(self, request: Request) -> str:
        """Return the node in the path."""
        node: str = request.path_params["node"]
        if node not in self.registry.drains and all(report.node != node for report in self.registry.live_nodes()):
            raise RouteError(404, f"No node {node[:100]!r} reports: see `gpufn nodes`.")
        return node
