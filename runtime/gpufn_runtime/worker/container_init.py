"""First process (init) of a container, and the container's only worker.

1. fork at once, while there is almost nothing to copy. The parent acts as init: it reaps orphans, forwards signals, and
   exits as the worker exits
2. the child imports the modules that the agent names, connects to the agent, sends TemplateReady, and waits, usually
   frozen
3. a ForkRequest turns the child into the worker, which then runs like one that started cold (`lifecycle`). If the agent
   disconnects, the child exits
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from typing import NoReturn

import msgspec

from gpufn_core.protocol.launch import CONTROL_SOCKET, EXIT_SIGNALLED, EXIT_START_FAILED, ForkRequest, TemplateReady

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_READ_BYTES = 1 << 16


def run_container(modules: list[str]) -> NoReturn:
    worker = os.fork()
    if worker == 0:
        try:
            os.setsid()
            _wait_and_work(modules)
        except BaseException:
            traceback.print_exc()
        os._exit(EXIT_START_FAILED)
    _run_init(worker)


def _run_init(worker: int) -> NoReturn:
    """Run as init. When this process exits, the kernel kills all processes that the worker left."""

    def forward(signum: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signum)

    for name in _FORWARDED:
        signal.signal(name, forward)
    while True:
        pid, status = os.wait()
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else EXIT_SIGNALLED - code)


def _wait_and_work(modules: list[str]) -> None:
    from gpufn_runtime.worker import lifecycle, template  # noqa: PLC0415  (not needed by init)
    from gpufn_runtime.worker.arguments import loader  # noqa: PLC0415  (not needed by init)

    missing = template.import_all(modules)
    template.prepare_decoders()
    loaded = {*modules, *loader.third_party.newly_loaded()}.difference(missing)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.connect(CONTROL_SOCKET)
        agent.sendall(msgspec.json.encode(TemplateReady(tuple(sorted(loaded)), missing)) + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            data = agent.recv(_READ_BYTES)
            if not data:
                os._exit(0)
            line += data
    request = msgspec.json.decode(line, type=ForkRequest)
    output = os.open(request.output, os.O_RDWR)  # O_RDWR, so that writing never fails without a reader
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    os.close(output)
    os.environ.update(request.env)
    lifecycle.run_worker(request.config)
