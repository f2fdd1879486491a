"""Messages from an agent to the worker processes that it starts, and to the template processes that it forks them from.

A cold worker is ``python -m gpufn_runtime.worker CONFIG``. A template is ``python -m gpufn_runtime.worker --template``
with its modules as arguments. It reads one JSON ForkRequest per line from standard input and writes one ForkReply per
line to standard output. An empty line, which has no reply, allows it to fork one worker ahead whenever it is idle.

In a container it is ``python -m gpufn_runtime.worker --contained`` with the modules. It imports them, connects to
CONTROL_SOCKET, sends TemplateReady, and becomes the worker of the single ForkRequest that it receives there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn_core.domain.worker import Gang
from gpufn_core.spec.function_spec import FunctionSpec


class MpsLimits(msgspec.Struct, frozen=True):
    """Limits that a worker proves to be in effect before it is READY. `multiprocessors` of the GPU; 0 means unknown."""

    vram_bytes: int
    sm_percent: int
    multiprocessors: int = 0


class BuildLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of a command that makes an environment. `cgroup_procs` is a file to write 0 to; without one, each process
    has `memory_bytes`. A file holds at most `file_bytes`."""

    cgroup_procs: str = ""
    memory_bytes: int = 0
    file_bytes: int = 0


class NetworkNamespace(msgspec.Struct, frozen=True):
    """A network namespace of the node that a process enters: its file, and that file's number, by which a process finds
    out whether it is inside already. There `own_resolv_conf` is shown at the path `resolv_conf`."""

    path: str
    inode: int
    resolv_conf: str
    own_resolv_conf: str


class Sandbox(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files and devices of a process that runs user code, in addition to the system's files
    (`gpufn_platform.sandbox`).

    Paths are absolute. `shared` ones are readable in all sandboxes of the node. `hidden` paths may be inside readable
    ones; readable and writable ones may be inside hidden ones. Each file system in memory, such as /tmp, holds
    `memory_bytes`. With `shares_memory` the process sees the host's /dev/shm, as MPS requires. Without `namespaces` the
    kernel only refuses the other files, instead of hiding them. With `own_pids` the process is in a PID namespace;
    a template is not, but its workers are. A command ends together with all processes that it has started. Workers are
    forked from a template, and enter their own sandbox inside its."""

    shared: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    memory_bytes: int = 64 << 20
    network: bool = True
    namespace: NetworkNamespace | None = None  # None: the network of the process that started this one
    gpus: bool = False  # with the devices of GPUs and of fast networks
    shares_memory: bool = False
    namespaces: bool = True
    own_pids: bool = False
    is_command: bool = False
    is_template: bool = False


class MountedVolume(msgspec.Struct, frozen=True):
    """A version of a volume on the node, which a worker reads. `name` is as the function declares it, `digest` the
    digest of the tree."""

    name: str
    path: str
    version: int
    digest: str


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `config.json`, which the agent writes to the worker's folder before the process starts."""

    worker: str
    function: str
    revision: int
    spec: FunctionSpec
    bundle_dir: str  # the unpacked bundle, read-only, shared between workers
    socket: str  # the runner listens on it
    shared_bodies: str = ""  # folder of large bodies that this worker reads and writes
    launched_at: float  # unix seconds
    engines: dict[str, tuple[str, ...]] = {}  # parameter of a model → folders of its engines, the best first
    secrets_socket: str = ""  # the worker connects to it once, and receives its secrets from the agent
    weights: tuple[str, ...] = ()  # the path of each of the spec's weights, a folder or a file
    volumes: tuple[MountedVolume, ...] = ()
    mps: MpsLimits | None = None  # set if the worker shares its GPU by MPS
    is_terminal: bool = False  # the worker runs one command instead of the function's code
    memory_bytes: int | None = None  # memory that the worker may use, however that is enforced
    memory_limit_bytes: int | None = None  # limit that the process sets on itself where no cgroup enforces one
    supervisor_fifo: str = ""  # the worker exits when no process holds it open for writing
    open_files: int | None = None  # soft limit to restore: the worker inherits the agent's limit, which was raised
    sandbox: Sandbox | None = None  # the process enters it before it loads code
    parameters: dict[str, Any] = {}  # of the class's constructor, if the worker is one of a variant
    gang: Gang | None = None  # set if the worker has a process on each of several nodes
    cgroup_procs: tuple[str, ...] = ()  # cgroup.procs files; the process writes 0 (itself) to them before it loads code

    @property
    def start_by(self) -> float:
        """When the worker must be ready, in unix seconds."""
        return self.launched_at + self.spec.startup_timeout_s


class ForkRequest(msgspec.Struct, frozen=True):
    config: str  # path of config.json
    output: str  # path of the FIFO that becomes standard output and error
    env: dict[str, str]


class ForkReply(msgspec.Struct, frozen=True):
    """`pid` of the new worker, which is not a child of the template; or `error` if none was forked."""

    pid: int = 0
    error: str = ""


class TemplateReady(msgspec.Struct, frozen=True):
    """The first line of a template: its loaded modules, or the reason why it must not be forked and the module whose
    import caused that."""

    modules: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    resident_bytes: int = 0
    error: str = ""
    refused_module: str = ""


class CudaProof(msgspec.Struct, frozen=True):
    """Whether CUDA works on a GPU: why not, or an empty string."""

    trouble: str = ""


MAX_LINE_BYTES = 1 << 20  # limit of a line that a template, or a process in a container, sends to its agent

# Environment variables of these processes.
SANDBOX_VARIABLE = "GPUFN_SANDBOX"  # template, command: its Sandbox as JSON
ENV_VARIABLE = "GPUFN_TEMPLATE_ENV"  # template: the variables to set inside the sandbox, as JSON
LIMITS_VARIABLE = "GPUFN_LIMITS"  # command: its BuildLimits as JSON
PID_VARIABLE = "GPUFN_PID_FD"  # worker that moves into a PID namespace: the descriptor to which it writes its new pid
PROVE_CUDA = "--prove-cuda"
CONTAINED = "--contained"
WITHIN = "--within"
CONFINED = "--confined"
IN_CONTAINER = "/gpufn"  # the folder that has all files of gpufn in a container
CONTROL_NAME = "a"  # name of the socket in the worker's folder; the agent listens on it
CONTROL_SOCKET = f"{IN_CONTAINER}/worker/{CONTROL_NAME}"

# Exit codes that the worker itself produces, as opposed to user code.
EXIT_START_FAILED = 3
EXIT_LINK_LOST = 4
EXIT_GPU_FAULT = 5  # the worker's GPU or the node's driver failed
EXIT_GANG_LOST = 6  # another rank of its gang ended
EXIT_SIGNALLED = 128  # plus the number of the signal that ended a contained worker, as in a shell

# A new worker tries to connect to its runner for this long. The runner learns of the assignment when the agent does.
CONNECT_S = 10.0
EXIT_HOOKS_S = 30.0  # all `@exit` methods of a worker together
RECONNECT_S = 30.0  # a worker that lost its runner tries to reconnect for this long; runners restart within seconds
LAST_CALL_S = 30.0  # then its running calls get this long to end before the worker exits
