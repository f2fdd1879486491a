"""Which connection to a worker's socket is accepted, and the validation of its frames."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.ids import digest_of
from gpufn_core.protocol import frames
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_runtime.runner.core.machine import ACK_WAIT_S
from gpufn_runtime.runner.workers import worker_socket
from gpufn_runtime.runner.workers.worker_link import WorkerLink

SPEC = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),))
REVISION = Revision(function="f", number=1, spec=SPEC, bundle=digest_of(b""), created_at=1.0)
CONTAINER_UID = 1_900_000_001
SUCCEEDED = OutcomeKind.SUCCEEDED
ITEM = bytes(4 << 20)  # more than fits in a socket buffer


def new_link(folder: Path, owner: Mock | None = None) -> WorkerLink:
    return WorkerLink("w-1", REVISION, folder / "s", owner=owner or Mock(), relay=Mock(), created_at=1.0)


async def ended_for(link: WorkerLink, owner: Mock, said: bytes) -> str:
    """Return the reason for which the worker is given up."""
    await link.listen(1.0)
    lost = asyncio.get_running_loop().create_future()
    owner.on_lost.side_effect = lambda _, why, *, runs_on: lost.set_result(why)
    _, writer = await asyncio.open_unix_connection(link.path)
    writer.write(said)
    try:
        async with asyncio.timeout(30):
            why: str = await lost
        return why
    finally:
        writer.close()
        link.close()


async def connected(folder: Path, owner: int, running: int = 0) -> WorkerLink:
    """Connect as a worker that was ready to the socket in a folder that belongs to `owner`; return the link."""
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


def test_attempts_of_an_earlier_runner_count_as_leftover_once_the_queue_has_redelivered_them(
    tmp_path: Path,
) -> None:
    link = asyncio.run(connected(tmp_path / "w-1", os.getuid(), running=1))
    assert [link.left_over(1.0 + after_s) for after_s in (ACK_WAIT_S - 1, ACK_WAIT_S + 1)] == [0, 1]


@pytest.mark.parametrize("numbers", [(1, 2), (0,), (-1,), (1 << 53,)])
def test_a_worker_that_claims_impossible_attempts_is_ended(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    owner = Mock()
    unfinished = tuple(frames.Unfinished(number, "i", "", 0.0) for number in numbers)
    hello = frames.encode(frames.Hello(PROTOCOL, "w-1", was_ready=True, unfinished=unfinished))
    assert "protocol" in asyncio.run(ended_for(new_link(tmp_path / "w-1", owner), owner, hello))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_link_that_is_closed_while_it_begins_to_listen_leaves_nothing(tmp_path: Path, *, is_cancelled: bool) -> None:
    async def closed_at_once() -> None:
        link = new_link(tmp_path / "w-1")
        listening = asyncio.ensure_future(link.listen(1.0))
        await asyncio.sleep(0)
        if is_cancelled:
            listening.cancel()
        link.close()
        link.remove_socket()
        await asyncio.wait([listening])

    asyncio.run(closed_at_once())
    assert not (tmp_path / "w-1").exists()


def test_a_folder_with_another_users_files_stays_without_the_socket(tmp_path: Path) -> None:
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


def test_a_worker_is_ready_once(tmp_path: Path) -> None:
    """Each Ready causes a report of the whole node: a worker that sent nothing else slowed down other calls."""
    owner = Mock()
    ready = frames.encode(frames.Hello(PROTOCOL, "w-1")) + frames.encode(frames.Ready(0.1, 0.1)) * 3
    why = asyncio.run(ended_for(new_link(tmp_path / "w-1", owner), owner, ready))
    assert "protocol" in why
    assert "ready" in why
    owner.on_ready.assert_called_once()


def test_repeated_drain_messages_of_a_worker_count_once(tmp_path: Path) -> None:
    owner = Mock()
    link = new_link(tmp_path / "w-1", owner)
    owner.on_draining.side_effect = lambda _: link.drain()
    draining = frames.encode(frames.Draining()) * 3 + b"\xff" * 8
    asyncio.run(ended_for(link, owner, frames.encode(frames.Hello(PROTOCOL, "w-1")) + draining))
    owner.on_draining.assert_called_once()


def test_a_worker_that_reads_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replies that it does not read would fill the runner's memory."""
    monkeypatch.setattr(worker_socket, "_MAX_UNREAD_BYTES", 1 << 20)
    owner = Mock()
    link = new_link(tmp_path / "w-1", owner)

    def answer(_: WorkerLink) -> None:
        link.send(frames.Answer(1, SUCCEEDED, None, ""), ITEM)
        asyncio.get_running_loop().call_soon(answer, link)  # after the write

    owner.on_ready.side_effect = answer
    greeted = frames.encode(frames.Hello(PROTOCOL, "w-1")) + frames.encode(frames.Ready(0.1, 0.1))
    assert asyncio.run(ended_for(link, owner, greeted)).endswith("MiB")


def test_no_connection_is_accepted_after_the_worker(tmp_path: Path) -> None:
    """Each attempt cost a line in the runner's log and an open file descriptor."""

    async def connect_twice() -> None:
        owner = Mock()
        link = new_link(tmp_path / "w-1", owner)
        await link.listen(1.0)
        said = asyncio.get_running_loop().create_future()
        owner.on_ready.side_effect = said.set_result
        _, writer = await asyncio.open_unix_connection(link.path)
        writer.write(frames.encode(frames.Hello(PROTOCOL, "w-1")) + frames.encode(frames.Ready(0.1, 0.1)))
        try:
            async with asyncio.timeout(30):
                await said
            with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
                await asyncio.open_unix_connection(link.path)
        finally:
            writer.close()
            link.close()

    asyncio.run(connect_twice())
