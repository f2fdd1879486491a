"""Entry into a sandbox: namespaces, capabilities, Landlock, seccomp, in this order.

A worker that is forked from a template enters its own sandbox inside the template's. So the template keeps the right
to create namespaces, and Landlock must not limit its files if there are namespaces: that would forbid mounts.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
from collections.abc import Callable
from typing import NamedTuple

from gpufn_core.protocol.launch import NetworkNamespace, Sandbox
from gpufn_platform.sandbox import layout, namespaces, seccomp, system_calls
from gpufn_platform.sandbox.descendants import go_on_in_child
from gpufn_platform.sandbox.landlock import Ruleset
from gpufn_platform.sandbox.layout import Rule
from gpufn_platform.sandbox.pid_namespace import PidNamespace, go_on_inside

_CAP_SETFCAP = 31
_OWN_NETWORK = "/proc/self/ns/net"
_NONE: frozenset[int] = frozenset()
_NO_RULES: frozenset[Rule] = frozenset()
# Processes and threads of one worker. The kernel counts them per user namespace, but does not limit root's, whose
# workers have a cgroup for that.
MAX_PROCESSES = 4096


class _Prepared(NamedTuple):
    root: namespaces.Root
    ruleset: Ruleset
    rules: frozenset[Rule]  # those in `ruleset`


_prepared: list[_Prepared] = []
_entered: list[PidNamespace] = []  # the PID namespace that this process has entered, without a sandbox so far


def prepare(template: Sandbox) -> None:
    """Perform the steps common to all sandboxes in the sandbox of `template`, in a process that will enter one of them.
    It takes most of the time of an entry. Raises OSError."""
    if template.namespaces:
        common = layout.common(template)
        root, ruleset = namespaces.Root(), Ruleset()
        own = layout.own_paths(common, _list("/dev"), _pid_in_proc())
        root.add(layout.mounts(common, own), common.memory_bytes)
        root.make_folders((*template.readable, *template.writable))
        rules = layout.rules(common, own, _list, _real)
        ruleset.allow(rules, root.place)
        system_calls.bound_capabilities(_NONE)
        _prepared.append(_Prepared(root, ruleset, frozenset(rules)))


def enter_pid_namespace(sandbox: Sandbox, report: Callable[[int], object]) -> None:
    """Go on in a child process in a PID namespace, before this process enters `sandbox`. `report` receives the child's
    number outside. Workers that are forked from a template are inside already. Raises OSError."""
    _use_rights_of_user(sandbox)
    _entered.append(go_on_inside(report, network=sandbox.network))


def enter(sandbox: Sandbox) -> PidNamespace | None:
    """Confine this process, which must have one thread. Return the PID namespace for the workers of a template. Raises
    OSError."""
    if not (sandbox.network or sandbox.namespaces):
        raise OSError(errno.EPERM, "a process without a network needs namespaces")
    _use_rights_of_user(sandbox)
    has_mounts_ahead = sandbox.is_template and sandbox.namespaces
    # Root needs this capability to map its own id in a further namespace. It means nothing outside of ours.
    keep = frozenset({_CAP_SETFCAP}) if has_mounts_ahead and os.geteuid() == 0 else _NONE
    machine = os.uname().machine
    seccomp.program(machine, may_set_up=False)  # cached: a template makes it for its workers
    program = seccomp.program(machine, may_set_up=has_mounts_ahead)
    prepared = _prepared.pop() if sandbox.namespaces and _prepared else None
    of_workers: PidNamespace | None = None
    if sandbox.namespaces:
        proc = _entered.pop().proc if _entered else None
        root = namespaces.Root(proc=proc, is_command=sandbox.is_command) if prepared is None else prepared.root
        if sandbox.is_template and sandbox.own_pids:
            # Before parts of the machine's /proc are hidden: the kernel allows a second one only while all is visible.
            of_workers = PidNamespace(network=sandbox.network)
            root.show_to_workers(of_workers.proc)
    elif sandbox.is_command:
        go_on_in_child(is_in_namespace=False)
    own = layout.own_paths(sandbox, _list("/dev"), _pid_in_proc())
    added: list[layout.Mount] = []
    if sandbox.namespaces:
        root.limit_memory(sandbox.memory_bytes)
        added = layout.mounts(sandbox, own, root.kinds)
        root.add(added, sandbox.memory_bytes)
        root.move_in(network=sandbox.network, shares_memory=sandbox.shares_memory)
        if not sandbox.is_template:
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    if prepared is None:
        system_calls.bound_capabilities(keep)
    system_calls.drop_capabilities(keep)
    system_calls.set_no_new_privileges()
    ruleset = Ruleset(limits_files=not has_mounts_ahead) if prepared is None else prepared.ruleset
    present = _NO_RULES if prepared is None else prepared.rules
    covered = layout.as_prefixes(mount.path for mount in added)
    ruleset.allow(
        (path, access)
        for path, access in layout.rules(sandbox, own, _list, _real)
        if (path, access) not in present or (path + "/").startswith(covered)
    )
    ruleset.restrict()
    if program:
        system_calls.set_seccomp_filter(program)
    return of_workers


def _use_rights_of_user(sandbox: Sandbox) -> None:
    """Do what root may do only before it enters a user namespace. Workers inherit it from their template."""
    if sandbox.namespace is not None:
        _join(sandbox.namespace)
    if sandbox.gpus:  # fast networks lock the memory that they transfer
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _join(namespace: NetworkNamespace) -> None:
    """Enter the network namespace. A process that is forked from a template is inside."""
    if os.stat(_OWN_NETWORK).st_ino != namespace.inode:
        system_calls.enter_network_namespace(namespace.path)
    if os.stat(_OWN_NETWORK).st_ino != namespace.inode:
        raise OSError(errno.ESTALE, "the network namespace was replaced", namespace.path)


def _pid_in_proc() -> int:
    """Return the number of this process in /proc, which is not `os.getpid()` if /proc is of an outer PID namespace."""
    return int(os.readlink("/proc/self"))


_real = functools.cache(os.path.realpath)  # a template has resolved most paths of its workers


@functools.cache
def _list(folder: str) -> tuple[str, ...]:
    """Return the names in a folder, without links: a rule for a link would allow its target, which may be or contain a
    hidden folder. A template has listed the folders that its workers, inside its sandbox, cannot list."""
    try:
        with os.scandir(folder) as entries:
            return tuple(entry.name for entry in entries if not entry.is_symlink())
    except OSError:
        return ()
