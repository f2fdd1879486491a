"""``python -m gpufn_gateway``: the gateway process. `composition` builds its objects.

Startup   settings → connect to NATS and check the server → streams and buckets → registry → caller → application and
          background tasks → listen, and print the URL to stdout
Shutdown  1. stop listening and finish requests in flight (`stopping`)   2. the controller releases its lease
          3. ticks and watches stop   4. the NATS connection is closed
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys

import uvloop

from gpufn_core.errors import BusUnavailable, PlatformError
from gpufn_core.home import Home
from gpufn_core.weights.credentials import OF_AWS
from gpufn_gateway.auth.access import NotProtected
from gpufn_gateway.composition.application import application, http2_tunnel
from gpufn_gateway.composition.background import background_tasks
from gpufn_gateway.composition.parts import Parts
from gpufn_gateway.composition.services import open_with_retry
from gpufn_gateway.graceful_shutdown import GracefulShutdown
from gpufn_gateway.http import request_id
from gpufn_gateway.http.connection.certificate import Certificate
from gpufn_gateway.http.connection.server import Server, listen
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.process import fd_limit, grace_period
from gpufn_platform.process.proc_hardening import hide_environment
from gpufn_platform.process.settings import EXIT_CONFIGURATION, InvalidSetting
from gpufn_platform.process.watchdog import notify_watchdog
from gpufn_platform.secrets.master_key import KEY

log = logging.getLogger("gpufn_gateway")


async def main(settings: GatewaySettings) -> None:
    notify_watchdog()
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    async with contextlib.AsyncExitStack() as stack:
        services = await open_with_retry(settings, stack)
        parts = Parts(services, certificate)
        listener = listen(settings)
        stack.callback(listener.close)
        shutdown = GracefulShutdown(
            services.caller,
            grace_s=lambda: grace_period.grace_s(Home.from_env(), settings.grace_s),
            requests_timeout_s=settings.shutdown_timeout_s,
        )
        app = application(parts)
        http2 = http2_tunnel(app, services)
        if http2 is not None:
            stack.push_async_callback(http2.close)
        server = Server(app, settings, shutdown, certificate, http2)
        for name, task in background_tasks(parts, server):
            stack.push_async_callback(_cancel, asyncio.create_task(task, name=name))
        stack.push_async_callback(_cancel, asyncio.create_task(server.announce(listener), name="announce"))
        await server.serve([listener])


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def run() -> int:
    gc.freeze()  # neither later collections nor the exit visit the imported modules, which takes 0.05 to 0.1 s
    try:
        settings = GatewaySettings.from_env()
        hide_environment("GPUFN_NATS_URL", KEY, *OF_AWS)
        fd_limit.raise_to_hard_limit()
        lines = logging.StreamHandler(sys.stderr)
        lines.addFilter(request_id.add_to_record)
        logging.basicConfig(
            level=settings.log_level,
            handlers=[lines],
            format="%(asctime)s %(levelname)s %(name)s %(message)s%(request)s",
        )
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs a warning for each malformed form
        uvloop.run(main(settings))
    except BusUnavailable as error:
        log.error("%s", error)
        return 1
    except (InvalidSetting, NotProtected, PlatformError) as error:
        sys.stderr.write(f"{error}\n")  # the supervisor shows the last line of a process
        return EXIT_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(run())
