"""Whose connection to a worker's socket is taken for the worker's, and what it says then."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpufn.ids import digest_of
from gpufn.protocol import frames
from gpufn.protocol.codec import PROTOCOL
from gpufn.revision import Revision
from gpufn.spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_runtime.runner.intake import ACK_WAIT_S
from gpufn_runtime.runner.worker_link import WorkerLink

SPEC = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),))
REVISION = Revision(function="f", number=1, spec=SPEC, bundle=digest_of(b""), created_at=1.0)
CONTAINER_UID = 1_900_000_001


def new_link(folder: Path) -> WorkerLink:
    return WorkerLink("w-1", REVISION, folder / "s", queue=Mock(), owner=Mock(), relay=Mock(), created_at=1.0)


async def connected(folder: Path, owner: int, running: int = 0) -> WorkerLink:
    """After a connection of ours, of a worker that was ready, to the socket in a folder that belongs to `owner`."""
    link = new_link(folder)
    await link.listen(1.0)
    os.chown(folder, owner, owner)
    try:
        reader, writer = await asyncio.open_unix_connection(folder / "s")
        writer.write(frames.encode(frames.Hello(PROTOCOL, "w-1", True, running)))
        async with asyncio.timeout(30):
            while not link.was_ready:
                reading = asyncio.ensure_future(reader.read(1))
                done, _ = await asyncio.wait([reading], timeout=0.01)
                reading.cancel()
                if done:
                    break
        writer.close()
        return link
    finally:
        link.close()


def test_a_worker_is_of_the_user_that_owns_its_folder(tmp_path: Path) -> None:
    assert asyncio.run(connected(tmp_path / "w-1", os.getuid())).was_ready


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")
def test_the_platform_s_own_user_is_not_taken_for_a_worker_in_a_container(tmp_path: Path) -> None:
    assert not asyncio.run(connected(tmp_path / "w-1", CONTAINER_UID)).was_ready


def test_what_an_earlier_runner_left_running_counts_as_left_over_once_the_queue_has_given_it_out_again(
    tmp_path: Path,
) -> None:
    link = asyncio.run(connected(tmp_path / "w-1", os.getuid(), running=1))
    assert [link.left_over(1.0 + after_s) for after_s in (ACK_WAIT_S - 1, ACK_WAIT_S + 1)] == [0, 1]


def test_a_link_that_is_closed_while_it_begins_to_listen_leaves_nothing(tmp_path: Path) -> None:
    async def closed_at_once() -> None:
        link = new_link(tmp_path / "w-1")
        listening = asyncio.ensure_future(link.listen(1.0))
        await asyncio.sleep(0)
        link.close()
        link.remove_socket()
        await listening

    asyncio.run(closed_at_once())
    assert not (tmp_path / "w-1").exists()


def test_a_folder_that_is_somebody_elses_too_stays_without_the_socket(tmp_path: Path) -> None:
    folder = tmp_path / "w-1"

    async def ended() -> None:
        link = new_link(folder)
        await link.listen(1.0)
        (folder / "config.json").write_text("{}")
        link.close()
        link.remove_socket()
        link.remove_socket()

    asyncio.run(ended())
    assert [path.name for path in folder.iterdir()] == ["config.json"]
