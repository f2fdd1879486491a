from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpufn_core.protocol.launch import NetworkNamespace, Sandbox
from gpufn_platform.sandbox import layout
from gpufn_platform.sandbox.layout import Access, Kind, Mount

HOME = "/var/lib/gpufn"
NAMESPACE = NetworkNamespace("/run/netns/x", 7, "/run/resolv.conf", "/srv/run/resolv.conf")
OWN = ["/dev/null", "/proc/7"]
SANDBOX = Sandbox(
    shared=("/srv/python",), readable=(f"{HOME}/cache/a",), writable=(f"{HOME}/run/w/1/tmp",), hidden=(HOME,)
)


def kinds_of(mounts: Iterable[Mount]) -> dict[str, Kind]:
    return {mount.path: mount.kind for mount in mounts}


def kind_of(path: str, sandbox: Sandbox = SANDBOX) -> Kind | None:
    return kinds_of(layout.mounts(sandbox, ["/dev/null"])).get(path)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/usr", Kind.READ_ONLY),
        ("/srv/python", Kind.READ_ONLY),
        (f"{HOME}/run/w/1/tmp", Kind.WRITABLE),
        ("/dev/null", Kind.WRITABLE),
        ("/proc/sys", Kind.READ_ONLY),
        ("/etc/shadow", Kind.HIDDEN),
        ("/tmp", Kind.MEMORY),
        ("/dev/shm", Kind.MEMORY),
        (HOME, None),
        ("/root", None),
        ("/home", None),
    ],
)
def test_a_sandbox_has_only_the_needed_paths(path: str, kind: Kind | None) -> None:
    assert kind_of(path) == kind


def test_a_hidden_folder_inside_a_readable_one_is_hidden() -> None:
    assert kind_of(HOME, Sandbox(shared=("/var",), hidden=(HOME,))) is Kind.HIDDEN


def test_a_path_that_is_both_listed_and_hidden_is_visible() -> None:
    assert kind_of(HOME, Sandbox(shared=("/var",), writable=(HOME,), hidden=(HOME,))) is Kind.WRITABLE


def test_a_worker_that_shares_memory_sees_the_hosts() -> None:
    assert kind_of("/dev/shm", Sandbox(shares_memory=True)) is Kind.WRITABLE


@pytest.mark.parametrize(
    ("sandbox", "shown"),
    [
        (Sandbox(), True),
        (Sandbox(network=False), False),
        (Sandbox(namespace=NAMESPACE), False),
    ],
)
def test_the_sockets_of_resolvers_are_shown_with_the_nodes_network_only(sandbox: Sandbox, shown: bool) -> None:
    """Regression: a worker with network="none" sent data away as names that systemd-resolved looked up for it."""
    assert (kind_of("/run/systemd/resolve", sandbox) is Kind.READ_ONLY) == shown


def test_a_worker_in_a_namespace_of_the_node_has_the_resolvers_of_that() -> None:
    assert Mount("/run/resolv.conf", Kind.READ_ONLY, "/srv/run/resolv.conf") in layout.mounts(
        Sandbox(namespace=NAMESPACE), []
    )


def test_each_mount_follows_the_mounts_that_contain_it() -> None:
    paths = [mount.path for mount in layout.mounts(SANDBOX, [])]
    for place, path in enumerate(paths):
        assert not any(layout.is_inside(earlier, path) for earlier in paths[:place])


def test_all_mounts_of_a_template_that_its_workers_share_are_theirs_too() -> None:
    template = Sandbox(shared=SANDBOX.shared, writable=("/x",), gpus=True, is_template=True)
    common = layout.common(template)
    mounts, rules = layout.mounts(common, OWN), layout.rules(common, OWN, lambda _: [], str)
    assert Mount("/srv/python", Kind.READ_ONLY) in mounts
    assert ("/tmp", Access.ALL) in rules
    assert set(mounts) <= set(layout.mounts(SANDBOX, OWN))
    assert set(rules) <= set(layout.rules(SANDBOX, OWN, lambda _: [], str))


@pytest.mark.parametrize(
    ("name", "gpus", "is_there"),
    [
        ("null", False, True),
        ("nvidia0", True, True),
        ("nvidia-uvm", True, True),
        ("nvidia0", False, False),
        ("sda", True, False),
        ("mem", True, False),
    ],
)
def test_a_sandbox_with_gpus_has_only_devices_for_computation(name: str, gpus: bool, is_there: bool) -> None:
    assert (f"/dev/{name}" in layout.own_paths(Sandbox(gpus=gpus), [name], 7)) == is_there


@pytest.mark.parametrize(("is_template", "entries"), [(False, "/proc/7"), (True, "/proc")])
def test_a_worker_may_write_to_its_own_entries_in_proc_only(is_template: bool, entries: str) -> None:
    own = layout.own_paths(Sandbox(is_template=is_template), [], 7)
    kinds = kinds_of(layout.mounts(Sandbox(), own))
    assert (own, kinds[entries], kinds["/proc/sys"]) == ([entries], Kind.WRITABLE, Kind.READ_ONLY)


def test_without_namespaces_the_paths_beside_a_hidden_one_are_allowed_one_by_one() -> None:
    folders = {"/opt": ["home", "a"], "/etc": ["hosts", "shadow"]}
    sandbox = Sandbox(hidden=("/opt/home",), writable=("/opt/home/tmp",), namespaces=False)
    rules = layout.rules(sandbox, [], lambda path: folders.get(path, []), str)
    allowed = {path for path, _ in rules}
    assert {"/opt/a", "/etc/hosts", "/usr"} <= allowed
    assert allowed.isdisjoint({"/", "/opt", "/opt/home", "/etc", "/etc/shadow", "/tmp"})
    assert ("/opt/home/tmp", Access.ALL) in rules
    assert ("/dev/shm", Access.BY_NAME) in rules


def test_only_new_mounts_and_covered_ones_are_added() -> None:
    template = Sandbox(shared=("/srv/python",), hidden=("/srv/a/secret",))
    worker = Sandbox(shared=("/srv/python", "/srv/a/python"), readable=("/srv/a",), hidden=template.hidden)
    present = kinds_of(layout.mounts(template, OWN))
    with_python = present | {"/srv/a/python": Kind.READ_ONLY}
    assert layout.mounts(template, OWN, present) == []
    for kinds in (present, with_python):
        assert layout.mounts(worker, OWN, kinds) == [
            Mount("/srv/a", Kind.READ_ONLY),
            Mount("/srv/a/python", Kind.READ_ONLY),
            Mount("/srv/a/secret", Kind.HIDDEN),
        ]


def test_a_worker_that_shares_memory_replaces_the_file_system_in_memory() -> None:
    present = kinds_of(layout.mounts(Sandbox(), OWN))
    assert layout.mounts(Sandbox(shares_memory=True), OWN, present) == [Mount("/dev/shm", Kind.WRITABLE)]


def test_landlock_allows_the_devices_of_a_root_of_its_own_by_their_folder() -> None:
    rules = dict(layout.rules(SANDBOX, ["/dev/null", "/dev/pts", "/proc/7"], lambda _: [], str))
    assert rules["/"] is Access.READ
    assert {path for path, access in rules.items() if access is Access.ALL} == {
        *("/dev", "/proc/7", "/tmp", "/var/tmp"),
        *SANDBOX.writable,
    }
