"""Current state of the node's devices: found once, then sampled each second in a separate thread.

A hanging driver may block a call forever. So nothing waits for the thread: its samples are used when they arrive. After
`_SILENT_S` without a sample, the GPUs are degraded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceType, Health, NodeFacts
from gpufn_core.domain.devices.device_metrics import DeviceMetrics, GpuProcess
from gpufn_platform.process.clock import Clock
from gpufn_runtime.agent.devices.base import HealthCondition, Inventory, Sample
from gpufn_runtime.agent.devices.failed_gpus import FailedGpus
from gpufn_runtime.agent.devices.health import NO_RECOVERY, HealthRecord, describe

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_SILENT_S = 10.0
_FOREIGN_STEP = 256 << 20  # bytes; placement starts over when a report changes
_PAUSE_S = 5.0  # a node that cannot start processes takes no new workers for this time


class DeviceWatch:
    """Devices of this node, and their health. `facts` detects the features of the node's software; its argument is
    whether there are GPUs. `other_trouble` returns a GPU's trouble that NVML does not see: a failure of its MPS daemon.
    `failed_gpus` keeps failures over a restart of the agent. The first sample is taken at once, and may block."""

    def __init__(
        self,
        inventory: Inventory,
        clock: Clock,
        *,
        facts: Callable[[bool], NodeFacts] = lambda has_gpus: NodeFacts(),
        other_trouble: Callable[[str], HealthCondition | None] = lambda uuid: None,
        failed_gpus: FailedGpus | None = None,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._inventory = inventory
        self._clock = clock
        self._other_trouble = other_trouble
        self._period_s = period_s
        result = inventory.find()
        self._devices = result.devices
        self.gpus = tuple(device for device in self._devices if device.type is DeviceType.GPU)
        self.pool = next(device for device in self._devices if device.type is DeviceType.CPU)
        self.links = result.links
        self.facts = msgspec.structs.replace(facts(bool(self.gpus)), driver=result.driver, cuda=result.cuda)
        if self.facts.has_own_pids:
            log.warning(
                "the agent has pids of its own, as in a container without --pid=host: GPU memory and utilisation per "
                "process are unknown"
            )
        self._failed_gpus = failed_gpus or FailedGpus()
        self._failures = self._failed_gpus.load()
        self._restored = set(self._failures)  # until a sample shows whether they are over
        self._records = {device.uuid: HealthRecord(self._failures.get(device.uuid, "")) for device in self.gpus}
        self._sampled_at = 0.0
        self._pause = ("", 0.0)  # why no process can be started here, and the end of the pause
        self._is_stopped = False
        self._wakeup = threading.Event()
        self._processes: dict[tuple[str, int], GpuProcess] = {}  # by GPU uuid and pid
        self.samples_begun = 0  # number of samples begun; `samples_received` is the number of the last one received
        self.samples_received = 0
        self._on_metrics: Callable[[tuple[DeviceMetrics, ...]], None] = lambda metrics: None
        self._on_sample: Callable[[], None] = lambda: None
        self._is_own: Callable[[int], bool] = lambda pid: True
        self._foreign_bytes: dict[str, int] = {}
        if self._records:
            self.apply(inventory.sample())

    def devices(self, now: float) -> tuple[Device, ...]:
        """Return the devices with their health at `now`, in monotonic seconds."""
        return tuple(self._with_health(device, now) for device in self._devices)

    def pause_placements(self, reason: str) -> None:
        """Report the node as degraded for a while: it cannot start processes, or it stops."""
        self._pause = reason, self._clock.monotonic() + _PAUSE_S

    def start(
        self,
        on_metrics: Callable[[tuple[DeviceMetrics, ...]], None],
        on_sample: Callable[[], None] = lambda: None,
        is_own: Callable[[int], bool] = lambda pid: True,
    ) -> None:
        """Start sampling. `on_metrics` receives each sample's metrics; `on_sample` is called after a sample is
        applied. `is_own` returns whether a pid is the platform's."""
        self._on_metrics, self._on_sample, self._is_own = on_metrics, on_sample, is_own
        self._sampled_at = self._clock.monotonic()
        if self._records:
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._sample, args=(loop,), name="gpufn-devices", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped = True
        self._wakeup.set()

    def sample_now(self) -> None:
        """Take the next sample as soon as possible."""
        self._wakeup.set()

    def gpu_bytes_of(self, pids: Iterable[int], gpus: Iterable[str]) -> dict[str, int]:
        """Return the bytes that the processes hold on each GPU, by the last sample. GPUs without a value are
        omitted."""
        pids = tuple(pids)
        held: dict[str, int] = {}
        for uuid in gpus:
            for pid in pids:
                process = self._processes.get((uuid, pid))
                if process is not None and process.memory_bytes is not None:
                    held[uuid] = held.get(uuid, 0) + process.memory_bytes
        return held

    def busy_gpus_of(self, pids: Iterable[int], gpus: Iterable[str]) -> float | None:
        """Return the number of GPUs that the processes kept busy, by the last sample: 0.5 is one GPU for half of the
        time. Returns None if unknown."""
        pids = tuple(pids)
        processes = [
            process for uuid in gpus for pid in pids if (process := self._processes.get((uuid, pid))) is not None
        ]
        utilisations = [process.utilisation for process in processes if process.utilisation is not None]
        return sum(utilisations) if utilisations else None

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._wakeup.wait(self._period_s)
            self._wakeup.clear()
            if self._is_stopped:
                return
            self.samples_begun += 1
            sample = self._inventory.sample()
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._on_sample_done, self.samples_begun, sample)

    def _on_sample_done(self, number: int, sample: Sample) -> None:
        self.apply(sample)
        self.samples_received = number
        self._on_sample()

    def apply(self, sample: Sample) -> None:
        now = self._sampled_at = self._clock.monotonic()
        metrics = {item.uuid: item for item in sample.metrics}
        if not self.facts.has_own_pids:
            self._read_processes(sample.metrics)
        for uuid, xid in sample.xids:
            log.warning("%s: %s", uuid, describe(xid))
            for device in self.gpus:
                if uuid in (device.uuid, device.parent):
                    self._records[device.uuid].on_xid(xid, now)
        for uuid, record in self._records.items():
            record.on_sample(metrics.get(uuid), sample.conditions.get(uuid), now)
        self._update_failures(metrics)
        if metrics:
            with_xids = (
                msgspec.structs.replace(item, xids=dict(record.xids), last_xid=record.last_xid)
                if (record := self._records[uuid]).xids
                else item
                for uuid, item in metrics.items()
            )
            self._on_metrics(tuple(with_xids))

    def _read_processes(self, metrics: Iterable[DeviceMetrics]) -> None:
        self._processes = {(item.uuid, process.pid): process for item in metrics for process in item.processes}
        held: dict[str, int] = {}
        for (uuid, pid), process in self._processes.items():
            if process.memory_bytes and not self._is_own(pid):
                held[uuid] = held.get(uuid, 0) + process.memory_bytes
        self._foreign_bytes = {uuid: -(-count // _FOREIGN_STEP) * _FOREIGN_STEP for uuid, count in held.items()}

    def _update_failures(self, metrics: Mapping[str, DeviceMetrics]) -> None:
        """Drop restored failures for which the driver requests no recovery, and store new ones."""
        for uuid in self._restored & metrics.keys():
            self._restored.remove(uuid)
            if metrics[uuid].recovery_action == NO_RECOVERY:
                log.info("%s has recovered since it failed: %s", uuid, self._records[uuid].failure)
                self._records[uuid].failure = ""
        failures = {uuid: record.failure for uuid, record in self._records.items() if record.failure}
        # A GPU that cannot be read now may be offered again after the next start of the agent.
        failures |= {uuid: reason for uuid, reason in self._failures.items() if uuid not in self._records}
        if failures != self._failures:
            self._failures = failures
            self._failed_gpus.save(failures)

    def _with_health(self, device: Device, now: float) -> Device:
        device = msgspec.structs.replace(device, foreign_bytes=self._foreign_bytes.get(device.uuid, 0))
        record = self._records.get(device.uuid)
        if record is None:
            reason, until = self._pause
            return _with_reason(device, Health.DEGRADED, reason) if now < until else device
        health, reason = record.evaluate(now)
        if health is not Health.FAILED and (trouble := self._other_trouble(device.uuid)) is not None:
            health, reason = trouble.health, trouble.reason
        if health is Health.HEALTHY and self._sampled_at and now - self._sampled_at > _SILENT_S:
            health, reason = Health.DEGRADED, f"the driver has not answered for {_SILENT_S:g} s"
        return device if health is Health.HEALTHY else _with_reason(device, health, reason)


def _with_reason(device: Device, health: Health, reason: str) -> Device:
    return msgspec.structs.replace(device, health=health, health_reason=reason)
