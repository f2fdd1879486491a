"""Requirements of a worker on a node: resources, an acceptable kind of GPU, and abilities of the node. Pure."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.engine import CPU_KIND
from gpufn_core.domain.package_needs import PackageNeeds, package_needs
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.team import Team, domain_of
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.isolation import AS_PROCESS, OWN_RUNTIME
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.placement.gpus import matching_gpus

UNSTATED_MEMORY_BYTES = 128 << 20  # reserved for a function that does not state its memory
_ROUNDING = 1e-9  # ten shares of 0.1 core are one core


class Requirements(msgspec.Struct, frozen=True):
    """All that placement reads of a revision. Revisions with equal Requirements fit the same nodes. `engine_kinds` are
    the DeviceKinds with engines, None for a function without models. `team` owns the function."""

    resources: Resources
    engine_kinds: frozenset[str] | None = None
    in_container: bool = False
    team: Team | None = None
    needs: frozenset[str] = frozenset()  # `FunctionSpec.node_needs`
    packages: PackageNeeds | None = None

    @classmethod
    def from_revision(cls, revision: Revision, team: Team | None = None) -> Requirements:
        spec = revision.spec
        return cls(spec.resources, revision.device_kinds, spec.in_container, team, spec.node_needs, package_needs(spec))

    @property
    def domain(self) -> str:
        return domain_of(self.resources.trust_domain, self.team)

    @property
    def any_size_key(self) -> Hashable:
        """A key that is equal for all that differ in sizes and trust domains only."""
        wants, of_node = self.resources, (self.in_container, self.needs, self.packages)
        return wants.gpu, wants.share, wants.gpu_count, wants.nodes, self.engine_kinds, of_node

    def request(self, kind: str | None) -> Request:
        return Request(self.resources, self.engine_kinds, self.in_container, self.team, self.needs, self.packages, kind)


class Request(Requirements, frozen=True):
    """Requirements with one `kind` of GPU; None for a function without a GPU."""

    kind: str | None = None

    def is_contained(self, report: NodeReport) -> bool:
        return self.in_container or (report.contains_all and self.needs.isdisjoint(AS_PROCESS))

    def isolation_trouble(self, report: NodeReport) -> str:
        """Return why the node does not offer the isolation; "" if it does."""
        needs = self.needs & OWN_RUNTIME if self.is_contained(report) else self.needs
        return next((trouble for need in sorted(needs) if (trouble := report.isolation_trouble.get(need))), "")

    def package_trouble(self, report: NodeReport) -> str:
        """Return why the node cannot make the environment of the packages; "" if it can. An image of a container has a
        Python of its own."""
        if self.packages is None or self.is_contained(report):
            return ""
        return self.packages.trouble(machine=report.machine, pythons=report.pythons, cuda=report.facts.cuda)

    @property
    def memory_bytes(self) -> int:
        return self.resources.memory_bytes or UNSTATED_MEMORY_BYTES

    @property
    def offer_key(self) -> tuple[object, ...]:
        """A key: requests with the same key look at the same GPUs, and differ in sizes and trust domains only."""
        wants, of_node = self.resources, (self.in_container, self.needs, self.packages)
        return self.kind, self.engine_kinds, of_node, wants.share, wants.gpu_count

    def gpus(self, report: NodeReport) -> tuple[Device, ...]:
        """Return the GPUs of the kind that have engines."""
        if self.kind is None:
            return ()
        gpus = matching_gpus(self.resources, self.kind, gpus_of(report))
        return gpus if self.engine_kinds is None else tuple(gpu for gpu in gpus if gpu.kind in self.engine_kinds)

    def can_run_on(self, report: NodeReport) -> bool:
        """Return whether the node is able to run it, however full it is, GPUs aside."""
        if self.is_contained(report) and (report.container_trouble or (self.kind and report.gpu_container_trouble)):
            return False
        if report.isolation_trouble and self.isolation_trouble(report):
            return False
        if self.packages is not None and self.package_trouble(report):
            return False
        return self.kind is not None or self.engine_kinds is None or CPU_KIND in self.engine_kinds


def why_no_gang(report: NodeReport) -> str:
    """Return why the node cannot run a process of a gang; "" if it can."""
    if report.contains_all:
        return "its workers run in containers, which other nodes cannot reach"
    return "" if report.address else "it reports no address (GPUFN_NODE_ADDRESS sets one)"


def has_cores(free: float, wanted: float) -> bool:
    return wanted <= free + _ROUNDING


def cpu_pool(report: NodeReport) -> Device | None:
    return next((device for device in report.devices if device.type is DeviceType.CPU), None)


def gpus_of(report: NodeReport) -> tuple[Device, ...]:
    return tuple(device for device in report.devices if device.type is DeviceType.GPU)
