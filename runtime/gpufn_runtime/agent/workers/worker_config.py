"""Configuration of a worker: its config, limits and environment, from its Revision and its device share."""

from __future__ import annotations

import os
import sys

import msgspec

from gpufn_core.domain.devices.device import NO_MPS, Device
from gpufn_core.domain.devices.engine import CPU_KIND
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import Assignment
from gpufn_core.home import Home
from gpufn_core.protocol.launch import MountedVolume, MpsLimits, NetworkNamespace, WorkerConfig
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.isolation import AS_PROCESS
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.isolation.sandboxes import Sandboxes
from gpufn_runtime.agent.launchers.base import LaunchOrder
from gpufn_runtime.agent.launchers.containers.sandbox import Limits
from gpufn_runtime.agent.mps.base import Joining
from gpufn_runtime.agent.workers.cgroups import MemoryGroup
from gpufn_runtime.agent.workers.environment import container_environment, container_limits, worker_environment
from gpufn_runtime.agent.workers.worker_folder import WorkerFolder

# An image with this node's version of Python, because pickles need the same version.
_CONTAINER = ImageSpec(python="{}.{}".format(*sys.version_info))
_MEMORY_PART = 4  # the default memory limit is the node's memory divided by this


class WorkerConfigs:
    """Builds worker configs. `default_image` is used by functions without an image; None runs them as processes.
    `open_files` is the limit of file descriptors. A process ends when `supervisor_fifo` has no writer left. Without
    `sandboxes` processes are not confined."""

    def __init__(
        self,
        home: Home,
        devices: DeviceWatch,
        default_image: ImageSpec | None,
        open_files: int | None,
        supervisor_fifo: str,
        *,
        sandboxes: Sandboxes | None = None,
    ) -> None:
        self._home = home
        self._devices = devices
        self._default_image = default_image
        self._open_files = open_files
        self._supervisor_fifo = supervisor_fifo
        self._sandboxes = sandboxes
        self._default_memory = devices.pool.memory_bytes // _MEMORY_PART

    def image(self, spec: FunctionSpec) -> ImageSpec | None:
        """Return the image of the function's containers, or None if its workers are processes."""
        if spec.isolation in AS_PROCESS:
            return None
        if spec.in_container:
            return spec.image or _CONTAINER
        return self._default_image and (spec.image or self._default_image)

    def environment(self, spec: FunctionSpec) -> ImageSpec | None:
        """Return the image that is an environment of the function's processes; None if it has none."""
        return spec.image if self.image(spec) is None else None

    def memory_bytes(self, spec: FunctionSpec) -> int:
        return spec.resources.memory_bytes or self._default_memory

    def limits(self, spec: FunctionSpec) -> Limits:
        return container_limits(spec, self.memory_bytes(spec))

    def kind(self, assignment: Assignment) -> str:
        """Return the DeviceKind whose engines the worker runs."""
        return next((gpu.kind for gpu in self._gpus(assignment)), CPU_KIND)

    def config(
        self,
        record: WorkerRecord,
        revision: Revision,
        bundle: str,
        engines: dict[str, tuple[str, ...]],
        weights: tuple[str, ...],
        *,
        volumes: tuple[MountedVolume, ...] = (),
        launched_at: float,
        group: MemoryGroup | None,
        python: Environment | None,
        egress: NetworkNamespace | None = None,
    ) -> WorkerConfig:
        memory_bytes, has_secrets = self.memory_bytes(revision.spec), bool(revision.spec.secrets)
        config = WorkerConfig(
            worker=record.worker,
            function=record.function,
            revision=record.revision,
            spec=revision.spec,
            bundle_dir=bundle,
            engines=engines,
            weights=weights,
            volumes=volumes,
            socket=os.fspath(self._home.worker_socket(record.worker)),
            secrets_socket=os.fspath(WorkerFolder(self._home.worker(record.worker)).secrets) if has_secrets else "",
            shared_bodies=os.fspath(self._home.shared_bodies / record.worker),
            launched_at=launched_at,
            mps=self._mps_limits(record),
            memory_bytes=memory_bytes,
            memory_limit_bytes=memory_bytes if group is None else None,
            open_files=self._open_files,
            supervisor_fifo=self._supervisor_fifo,
            parameters={} if revision.variant is None else revision.variant.parameters,
            is_terminal=revision.variant is not None and revision.variant.is_terminal,
            gang=record.assignment.gang if record.assignment is not None else None,
            cgroup_procs=() if group is None else (os.fspath(group.join_file),),
        )
        if self._sandboxes is None or self.image(revision.spec) is not None:
            return config
        return msgspec.structs.replace(config, sandbox=self._sandboxes.worker(config, python, egress))

    def launch_order(
        self,
        config: WorkerConfig,
        folder: WorkerFolder,
        assignment: Assignment,
        *,
        joining: Joining,
        modules: frozenset[str],
        python: Environment | None,
    ) -> LaunchOrder:
        """Return the launch order. `joining` makes the worker a client of a shared GPU; `modules` are its imports;
        `python` is its environment."""
        spec, gpus = config.spec, assignment.share.gpus
        image = self.image(spec)
        if image:
            variables = container_environment(spec, gpus)
        else:
            variables = worker_environment(
                spec, folder.scratch, gpus, is_sandboxed=config.sandbox is not None, python=python
            )
        return LaunchOrder(
            worker=config.worker,
            folder=folder.path,
            config=folder.config,
            output=folder.output,
            environment={**NO_MPS, **joining.environment, **variables},
            worker_config=config,
            modules=modules,
            domain=assignment.share.trust_domain,
            image=image,
            python=python,
            gpus=gpus,
            mps=joining.mounts,
        )

    def _mps_limits(self, record: WorkerRecord) -> MpsLimits | None:
        if record.assignment is None or not record.shares_by_mps:
            return None
        share = record.assignment.share
        multiprocessors = next((gpu.multiprocessors for gpu in self._gpus(record.assignment)), 0)
        return MpsLimits(share.vram_bytes, share.sm_percent, multiprocessors)

    def _gpus(self, assignment: Assignment) -> list[Device]:
        return [gpu for gpu in self._devices.gpus if gpu.uuid in assignment.share.gpus]
