"""The node's devices as they are now: found once, then sampled each second in a thread of their own.

A sick driver may hold a call for ever. So nobody waits for the thread: what it says is taken when it comes, and when it
has said nothing for `_SILENT_S`, its GPUs are degraded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable

import msgspec

from gpufn_core.domain.device import Device, DeviceLink, DeviceType, Health, NodeFacts
from gpufn_core.domain.device_metrics import DeviceMetrics, GpuProcess
from gpufn_platform.process.clock import Clock
from gpufn_runtime.agent.devices.base import Inventory, Sample, Trouble
from gpufn_runtime.agent.devices.health import HealthRecord, describe

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_SILENT_S = 10.0
_REST_S = 5.0  # until another start is tried on a node that could start nothing


class DeviceWatch:
    """`facts` finds out what the node's software can do, given whether there are GPUs; `also_ill` tells what others
    know of one: its MPS daemon's trouble."""

    def __init__(
        self,
        inventory: Inventory,
        clock: Clock,
        *,
        facts: Callable[[bool], NodeFacts] = lambda has_gpus: NodeFacts(),
        also_ill: Callable[[str], Trouble | None] = lambda uuid: None,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._inventory = inventory
        self._clock = clock
        self._also_ill = also_ill
        self._period_s = period_s
        found = inventory.find()
        self._found = found.devices
        self.links: tuple[DeviceLink, ...] = found.links
        self.facts = msgspec.structs.replace(facts(bool(self.gpus)), driver=found.driver, cuda=found.cuda)
        self._records = {device.uuid: HealthRecord() for device in self.gpus}
        self._sampled_at = 0.0
        self._rests = ("", 0.0)  # why no process can be started here, and until when that counts
        self._is_stopped = False
        self._is_due = threading.Event()
        self._processes: dict[tuple[str, int], GpuProcess] = {}  # by GPU and pid
        self.begun = 0  # samples; `seen` is the last one that came
        self.seen = 0
        self._tell: Callable[[tuple[DeviceMetrics, ...]], None] = lambda metrics: None
        self._sampled: Callable[[], None] = lambda: None

    @property
    def pool(self) -> Device:
        return next(device for device in self._found if device.type is DeviceType.CPU)

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self._found if device.type is DeviceType.GPU)

    def devices(self, now: float) -> tuple[Device, ...]:
        """With their health at `now`, in monotonic seconds."""
        return tuple(self._with_health(device, now) for device in self._found)

    def rest(self, reason: str) -> None:
        """Take nothing new for a while: what is started here fails, whatever it is."""
        self._rests = reason, self._clock.monotonic() + _REST_S

    def start(
        self, tell: Callable[[tuple[DeviceMetrics, ...]], None], sampled: Callable[[], None] = lambda: None
    ) -> None:
        """`tell` gets the metrics of each sample; after each, of which all is known then, `sampled` is called."""
        self._tell, self._sampled = tell, sampled
        self._sampled_at = self._clock.monotonic()
        if self._records:
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._sample, args=(loop,), name="gpufn-devices", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped = True
        self._is_due.set()

    def hurry(self) -> None:
        """A sample as soon as can be."""
        self._is_due.set()

    def held_by(self, pids: Iterable[int], gpus: Iterable[str]) -> dict[str, int]:
        """Bytes of each GPU that these processes have, by the last sample; without those of which it does not tell."""
        pids = tuple(pids)
        held: dict[str, int] = {}
        for uuid in gpus:
            for pid in pids:
                process = self._processes.get((uuid, pid))
                if process is not None and process.memory_bytes is not None:
                    held[uuid] = held.get(uuid, 0) + process.memory_bytes
        return held

    def busy_by(self, pids: Iterable[int], gpus: Iterable[str]) -> float | None:
        """How many of the GPUs these processes kept busy, 0.5 for one half of the time, by the last sample; None when
        it does not tell."""
        pids = tuple(pids)
        found = [each for uuid in gpus for pid in pids if (each := self._processes.get((uuid, pid))) is not None]
        told = [each.utilisation for each in found if each.utilisation is not None]
        return sum(told) if told else None

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._is_due.wait(self._period_s)
            self._is_due.clear()
            if self._is_stopped:
                return
            self.begun += 1
            sample = self._inventory.sample()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._came, self.begun, sample)

    def _came(self, number: int, sample: Sample) -> None:
        self.take(sample)
        self.seen = number
        self._sampled()

    def take(self, sample: Sample) -> None:
        now = self._sampled_at = self._clock.monotonic()
        metrics = {each.uuid: each for each in sample.metrics}
        self._processes = {(each.uuid, process.pid): process for each in sample.metrics for process in each.processes}
        for uuid, xid in sample.xids:
            log.warning("%s: %s", uuid, describe(xid))
            for device in self.gpus:
                if uuid in (device.uuid, device.parent):
                    self._records[device.uuid].on_xid(xid, now)
        for uuid, record in self._records.items():
            record.on_sample(metrics.get(uuid), sample.troubles.get(uuid), now)
        if metrics:
            told = (
                msgspec.structs.replace(each, xids=dict(record.xids)) if (record := self._records[uuid]).xids else each
                for uuid, each in metrics.items()
            )
            self._tell(tuple(told))

    def _with_health(self, device: Device, now: float) -> Device:
        record = self._records.get(device.uuid)
        if record is None:
            reason, until = self._rests
            return _ill(device, Health.DEGRADED, reason) if now < until else device
        health, reason = record.judge(now)
        if health is not Health.FAILED and (trouble := self._also_ill(device.uuid)) is not None:
            health, reason = trouble.health, trouble.reason
        if health is Health.HEALTHY and self._sampled_at and now - self._sampled_at > _SILENT_S:
            health, reason = Health.DEGRADED, f"the driver has not answered for {_SILENT_S:g} s"
        return device if health is Health.HEALTHY else _ill(device, health, reason)


def _ill(device: Device, health: Health, reason: str) -> Device:
    return msgspec.structs.replace(device, health=health, health_reason=reason)
