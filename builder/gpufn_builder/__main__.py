"""The builder's process: reads settings, connects to NATS, and runs a Builder until SIGTERM."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from functools import partial

from gpufn_builder.build_job import BuildExecutor
from gpufn_builder.build_slots import BuildSlots
from gpufn_builder.loop import Builder
from gpufn_builder.memory_history import MemoryHistory
from gpufn_builder.processes.sandboxes import BuildSandboxes
from gpufn_builder.settings import BuilderSettings
from gpufn_builder.store import Store
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.node_claim import claim_node
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import KeyValue, stream_of
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.process.node_process import run, run_until_signaled
from gpufn_platform.sandbox import policy
from gpufn_platform.sandbox.host_paths import behind_links, own_python_folders, system_secrets
from gpufn_platform.sandbox.support import Support, probe
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import Signatures

log = logging.getLogger("gpufn.builder")

_BUS_RETRY_FOR_S = 5.0  # NATS may be restarting together with this process
_BUCKETS = (subjects.BUILDS, subjects.ENGINES, subjects.LEASES, subjects.SIGNING)
_STORES = (subjects.MODEL_FILES, subjects.ENGINE_FILES)


async def serve(settings: BuilderSettings, support: Support) -> None:
    tls = BusTls.from_env(os.environ)
    bus = await Bus.connect(settings.nats_url, name=f"builder {settings.node}", tls=tls, retry_for_s=_BUS_RETRY_FOR_S)
    clock = SystemClock()
    signatures = Signatures(KeyValue(bus, subjects.SIGNING), LocalTrust.from_env(os.environ))
    try:
        await claim_node(bus, "builder", settings.node, settings.home)
        await streams.wait_for(bus, (subjects.BUILD, *map(stream_of, _BUCKETS), *map(object_store.stream_of, _STORES)))
        await signatures.start()
        executor = BuildExecutor(
            Store(
                bus,
                KeyValue(bus, subjects.ENGINES),
                KeyValue(bus, subjects.LEASES),
                clock,
                retry_for_s=settings.retry_for_s,
            ),
            signatures=signatures,
            folder=settings.home.builds,
            caches=settings.home.tuning,
            environ=os.environ,
            clock=clock,
            memory_limit_bytes=settings.memory_limit_bytes,
            disk_limit_bytes=settings.disk_limit_bytes,
            timeout_s=settings.timeout_s,
            measuring=settings.measuring,
            sandboxes=_sandboxes(settings, support),
        )
        builder = Builder(
            bus,
            builds=KeyValue(bus, subjects.BUILDS),
            executor=executor,
            slots=BuildSlots(
                most=settings.builds,
                limit_bytes=settings.memory_limit_bytes,
                history=MemoryHistory(settings.home.cache / "build-memory.json"),
            ),
            node=settings.node,
            clock=clock,
        )
        log.info("builds for node %s", settings.node)
        await run_until_signaled(builder.run(), "builder")
    finally:
        signatures.stop()
        await bus.close()


def _sandboxes(settings: BuilderSettings, support: Support) -> BuildSandboxes | None:
    """Return None if build processes are not confined."""
    log.log(
        logging.INFO if policy.is_complete(settings.isolation, support) else logging.WARNING,
        "build processes run %s",
        policy.describe(settings.isolation, support),
    )
    if settings.isolation is policy.Isolation.OFF:
        return None
    return BuildSandboxes(
        settings.home,
        own_python_folders((), os.environ),
        private=(*system_secrets(), *behind_links(settings.home.root, settings.home.run)),
        namespaces=not support.namespaces,
    )


def main() -> int:
    os.umask(0o077)  # for our compiler processes too
    support = probe()  # a process that hides its environment cannot create a user namespace

    def read(environ: Mapping[str, str]) -> BuilderSettings:
        settings = BuilderSettings.from_env(environ)
        policy.check(settings.isolation, support)
        return settings

    return run("builder", read, partial(serve, support=support))


if __name__ == "__main__":
    sys.exit(main())
