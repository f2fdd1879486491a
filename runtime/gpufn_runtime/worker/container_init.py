"""The first process of a container, and the one worker in it.

1. fork at once, while there is next to nothing to copy: the parent does what the first process of a system has to,
   which is to reap orphans, pass signals on, and end as the worker ends
2. the child imports what the agent names, connects to it, says TemplateReady, and waits, paused as a rule
3. a ForkRequest makes it the worker; it lives as one that started cold (`lifecycle`). Else it ends with the agent
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

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_READ_BYTES = 1 << 16


def live(modules: list[str]) -> NoReturn:
    worker = os.fork()
    if worker == 0:
        try:
            os.setsid()
            _wait_and_work(modules)
        except BaseException:
            traceback.print_exc()
        os._exit(EXIT_START_FAILED)
    _be_first(worker)


def _be_first(worker: int) -> NoReturn:
    """When it ends, the kernel ends all that the worker left."""

    def pass_on(signum: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signum)

    for name in _PASSED_ON:
        signal.signal(name, pass_on)
    while True:
        pid, status = os.wait()
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else EXIT_SIGNALLED - code)


def _wait_and_work(modules: list[str]) -> None:
    from gpufn_runtime.worker import lifecycle, template  # noqa: PLC0415  (the first process does without)
    from gpufn_runtime.worker.arguments import loader  # noqa: PLC0415  (the first process does without)

    missing = template.import_all(modules)
    template.rehearse()
    loaded = {*modules, *loader.third_party.look()}.difference(missing)
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
    output = os.open(request.output, os.O_RDWR)  # for reading too, so that it never breaks when its reader is gone
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    os.close(output)
    os.environ.update(request.env)
    lifecycle.run_worker(request.config)
