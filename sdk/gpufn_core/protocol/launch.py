"""What an Agent tells the worker process that it starts, and the standby template that it forks workers from.

A cold worker is ``python -m gpufn_runtime.worker CONFIG``; a template is ``python -m gpufn_runtime.worker --template``
with its modules as arguments and takes one JSON ForkRequest per line on standard input, answering one ForkReply per
line on standard output. An empty line, which is not answered, allows it to fork one worker ahead whenever it is idle.

In a container it is ``python -m gpufn_runtime.worker --contained`` with the modules: it imports them, connects to
CONTROL_SOCKET, says TemplateReady, and becomes the worker of the one ForkRequest that it is sent there.
"""

from __future__ import annotations

import msgspec

from gpufn_core.spec.function_spec import FunctionSpec


class MpsLimits(msgspec.Struct, frozen=True):
    """What a worker proves that it is held to, before it is READY. `multiprocessors` of the GPU, 0 when unknown."""

    vram_bytes: int
    sm_percent: int
    multiprocessors: int = 0


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the agent to `config.json` in the worker's folder, before the process starts."""

    worker: str
    function: str
    revision: int
    spec: FunctionSpec
    bundle_dir: str  # the unpacked bundle, read-only, shared between workers
    socket: str  # the runner listens here
    parcels: str = ""  # folder of the large bodies that are this worker's to read, and where it writes its own
    launched_at: float  # unix seconds
    engines: dict[str, tuple[str, ...]] = {}  # a model's parameter → folders of its engines, the best first
    mps: MpsLimits | None = None  # it shares its GPU by MPS
    memory_bytes: int | None = None  # what it may use, whatever holds it to that
    memory_limit_bytes: int | None = None  # for the process to set on itself where no cgroup holds it
    supervisor_fifo: str = ""  # the worker ends when nobody holds it open for writing any more
    open_files: int | None = None  # at first; its node's agent, which it has its limits from, allows itself all
    cgroup_procs: tuple[str, ...] = ()  # files that the process writes 0, itself, to before it loads anything


class ForkRequest(msgspec.Struct, frozen=True):
    config: str  # path of config.json
    output: str  # path of the FIFO that becomes standard output and error
    env: dict[str, str]


class ForkReply(msgspec.Struct, frozen=True):
    """`pid` of the new worker, which is no child of the template; or why there is none."""

    pid: int = 0
    error: str = ""


class TemplateReady(msgspec.Struct, frozen=True):
    """The template's first line: what it has in memory, or why it must not be forked from."""

    modules: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    resident_bytes: int = 0
    error: str = ""


LONGEST_LINE_BYTES = 1 << 20  # of what a template, or a container's process, says to its agent

CONTAINED = "--contained"
IN_CONTAINER = "/gpufn"  # all that a container has of us is below it
CONTROL_NAME = "a"  # in the worker's folder; the agent listens
CONTROL_SOCKET = f"{IN_CONTAINER}/worker/{CONTROL_NAME}"

# The worker's exit codes that are not the user's.
EXIT_START_FAILED = 3
EXIT_LINK_LOST = 4
EXIT_SIGNALLED = 128  # above it, as a shell tells it: the signal that ended a contained worker

CONNECT_S = 10.0  # a new worker looks for its runner, which hears of the assignment when the agent does, for so long
RECONNECT_S = 30.0  # and one whose runner has gone for that: its supervisor starts it again within seconds
LAST_CALL_S = 30.0  # after that, calls that still run have so long to end before the worker ends itself
