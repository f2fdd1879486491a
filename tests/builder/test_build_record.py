"""The owner of a build: by compare-and-set, until the build ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_builder.build_record import AlreadyEnded, BuildRecord, TakenOver, claimed, must_stop, owned
from gpufn_core.domain.devices.engine import Build, BuildState
from gpufn_core.errors import BuildNotFound
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_platform.bus.storage.key_value import KeyValue

BUILD = Build(
    id="b", model=ModelSpec(parameter="net", files=(ModelFile("m.onnx", "a" * 64, 1),)), device="cpu", created_at=1.0
)
ENDED = [BuildState.SUCCEEDED, BuildState.FAILED, BuildState.CANCELLED]


def build(state: BuildState = BuildState.BUILDING, **fields: Any) -> Build:
    return msgspec.structs.replace(BUILD, state=state, **fields)


@pytest.mark.parametrize(
    ("before", "deaths"),
    [
        (build(BuildState.PENDING), 0),
        (build(BuildState.PENDING, deaths=2), 2),
        (build(builder="other/1"), 1),
        (build(builder="other/1", deaths=2), 3),
        (build(builder="me/1", deaths=2), 2),  # the same process: the id was redelivered
        (build(), 0),  # from a builder without a name
    ],
)
def test_a_builder_that_had_a_build_and_never_gave_it_back_counts_as_dead(before: Build, deaths: int) -> None:
    after = claimed(before, "me/1", now=5.0)
    assert (after.state, after.builder, after.deaths, after.started_at) == (BuildState.BUILDING, "me/1", deaths, 5.0)


def test_a_build_is_its_last_builders_only() -> None:
    assert owned(build(builder="me/1"), "me/1") == build(builder="me/1")
    with pytest.raises(TakenOver, match=r"me/1 .*build b: .*other/1"):
        owned(build(builder="other/1"), "me/1")


@pytest.mark.parametrize("state", ENDED)
def test_an_ended_build_has_no_owner(state: BuildState) -> None:
    with pytest.raises(AlreadyEnded, match=f"build b .*: {state}"):
        owned(build(state, builder="me/1"), "me/1")
    with pytest.raises(AlreadyEnded):
        claimed(build(state), "me/1", now=5.0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (build(builder="me/1"), False),
        (build(builder="me/1", cancel=True), True),
        (build(builder="other/1"), True),
        (build(BuildState.CANCELLED, builder="me/1"), True),
    ],
)
def test_a_builder_has_nothing_to_do_for_cancelled_ended_or_foreign_builds(seen: Build, expected: bool) -> None:
    assert must_stop(seen, "me/1") is expected


async def _builds(connect: Any, nats: Any, build: Build) -> KeyValue:
    """The bucket with a builder's permissions; a gateway has created it."""
    await KeyValue.open(await connect(nats), subjects.BUILDS)
    builds = KeyValue(await connect(nats, "builder"), subjects.BUILDS)
    await builds.create(build.id, encode(build))
    return builds


async def _stored(builds: KeyValue, build_id: str) -> Build:
    entry = await builds.get(build_id)
    assert entry is not None
    return msgspec.msgpack.decode(entry.value, type=Build)


async def test_the_older_builder_changes_nothing_of_the_newer_ones(connect: Any, nats: Any) -> None:
    asked = build(BuildState.PENDING, id=new_ulid())
    builds = await _builds(connect, nats, asked)
    older = await BuildRecord.claim(builds, asked.id, "a/1", now=2.0)
    newer = await BuildRecord.claim(builds, asked.id, "b/1", now=3.0)
    await newer.change(progress=0.5)
    for fields in ({"state": BuildState.FAILED}, {"progress": 0.1}, {"state": BuildState.PENDING, "builder": ""}):
        with pytest.raises(TakenOver):
            await older.change(**fields)
    assert await _stored(builds, asked.id) == newer.build
    assert (newer.build.builder, newer.build.progress, newer.build.deaths) == ("b/1", 0.5, 1)
    await older.decrement_deaths()
    await newer.change(state=BuildState.SUCCEEDED, engines=("e",))
    ended = await _stored(builds, asked.id)
    assert (ended.state, ended.engines, ended.deaths) == (BuildState.SUCCEEDED, ("e",), 0)
    with pytest.raises(AlreadyEnded):
        await older.decrement_deaths()
    for record in (older, newer):
        with pytest.raises(AlreadyEnded):
            await record.change(state=BuildState.BUILDING)
    assert await _stored(builds, asked.id) == ended


async def test_a_released_build_counts_no_death(connect: Any, nats: Any) -> None:
    asked = build(BuildState.PENDING, id=new_ulid())
    builds = await _builds(connect, nats, asked)
    for name in ("a/1", "b/1"):
        record = await BuildRecord.claim(builds, asked.id, name, now=2.0)
        assert (record.build.deaths, record.build.builder) == (0, name)
        await record.release("its builder stopped")
        assert (record.build.state, record.build.detail) == (BuildState.PENDING, "its builder stopped")
    record = await BuildRecord.claim(builds, asked.id, "c/1", now=2.0)
    await builds.delete(asked.id)
    with pytest.raises(BuildNotFound):
        await record.change(progress=0.1)
    with pytest.raises(BuildNotFound):
        await BuildRecord.claim(builds, asked.id, "c/1", now=2.0)


async def test_a_claim_keeps_a_cancellation(connect: Any, nats: Any) -> None:
    asked = build(BuildState.PENDING, id=new_ulid())
    builds = await _builds(connect, nats, asked)
    record = await BuildRecord.claim(builds, asked.id, "a/1", now=2.0)
    await builds.put(asked.id, encode(msgspec.structs.replace(record.build, cancel=True)))
    await record.change(progress=0.5)
    stored = await _stored(builds, asked.id)
    assert (stored.cancel, stored.progress) == (True, 0.5)


async def test_releasing_a_build_of_another_builder_reports_that_it_lives(connect: Any, nats: Any) -> None:
    asked = build(BuildState.PENDING, id=new_ulid())
    builds = await _builds(connect, nats, asked)
    older = await BuildRecord.claim(builds, asked.id, "a/1", now=2.0)
    await BuildRecord.claim(builds, asked.id, "b/1", now=3.0)
    with pytest.raises(TakenOver):
        await older.release("the bus was away")
    stored = await _stored(builds, asked.id)
    assert (stored.state, stored.builder, stored.deaths) == (BuildState.BUILDING, "b/1", 0)
