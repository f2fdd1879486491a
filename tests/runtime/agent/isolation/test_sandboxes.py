from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufn_core.home import Home
from gpufn_core.protocol.launch import MpsLimits, WorkerConfig
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.isolation import Isolation, Network
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.sandbox.layout import is_inside
from gpufn_runtime.agent.isolation.sandboxes import Folder, Sandboxes
from gpufn_runtime.agent.settings import folders

HOME = Home(Path("/srv/gpufn"))
SANDBOXES = Sandboxes(
    HOME, ("/srv/python",), folders=[Folder("/data"), Folder("/scratch", True)], cgroups=Path("/sys/fs/cgroup/g")
)


def config(*, mps: MpsLimits | None = None, **options: Any) -> WorkerConfig:
    return WorkerConfig(
        worker="w-1",
        function="f",
        revision=1,
        spec=FunctionSpec(name="f", entry=EntryPoint("m", "f"), methods=(MethodSpec(),), **options),
        bundle_dir="/srv/gpufn/cache/bundles/b",
        socket="/srv/gpufn/run/w/w-1/s",
        shared_bodies="/dev/shm/gpufn-0-x/w-1",
        launched_at=0.0,
        engines={"net": ("/srv/gpufn/cache/engines/e",)},
        weights=("/srv/gpufn/cache/weights/v/model",),
        memory_bytes=1 << 30,
        mps=mps,
    )


def test_a_worker_sees_its_own_files_of_the_home_only() -> None:
    sandbox = SANDBOXES.worker(config())
    assert sandbox is not None
    assert sandbox.readable == (
        "/srv/gpufn/run/w/w-1",
        "/srv/gpufn/cache/bundles/b",
        "/srv/gpufn/cache/engines/e",
        "/srv/gpufn/cache/weights/v/model",
    )
    assert sandbox.writable == ("/scratch", "/srv/gpufn/run/w/w-1/tmp", "/dev/shm/gpufn-0-x/w-1")
    assert sandbox.shared == ("/srv/python", "/data")
    assert "/srv/gpufn" in sandbox.hidden
    assert sandbox.memory_bytes == 1 << 29


@pytest.mark.parametrize(
    "path", [HOME.nats, HOME.master_key, HOME.up_file, HOME.logs, HOME.builds, HOME.fast_path_socket]
)
@pytest.mark.parametrize(
    "sandbox", [SANDBOXES.worker(config()), SANDBOXES.template(HOME.run / "t", network=Network.FULL)]
)
def test_no_sandbox_shows_credentials_logs_or_the_platforms_sockets(path: Path, sandbox: Any) -> None:
    shown = (*sandbox.shared, *sandbox.readable, *sandbox.writable)
    assert not any(is_inside(str(path), folder) for folder in shown)


def test_a_template_sees_the_files_that_its_workers_need() -> None:
    template, worker = SANDBOXES.template(HOME.run / "t", network=Network.NONE), SANDBOXES.worker(config())
    assert worker is not None
    assert (template.is_template, template.network, template.shared) == (True, False, worker.shared)
    shown = (*template.readable, *template.writable, "/dev/shm")
    for path in (*worker.readable, *worker.writable):
        assert any(is_inside(path, folder) for folder in shown), path


def test_a_function_without_a_network_or_a_sandbox() -> None:
    offline = SANDBOXES.worker(config(network=Network.NONE))
    assert offline is not None
    assert offline.network is False
    assert SANDBOXES.worker(config(isolation=Isolation.PROCESS)) is None


def test_an_mps_client_shares_memory_with_the_daemon() -> None:
    sandbox = SANDBOXES.worker(config(mps=MpsLimits(1 << 30, 50)))
    assert sandbox is not None
    assert sandbox.shares_memory
    assert str(HOME.mps) in sandbox.writable


@pytest.mark.parametrize("text", ["data", "/data,scratch:rw"])
def test_folders_are_absolute(text: str) -> None:
    with pytest.raises(InvalidSetting):
        folders(text)
