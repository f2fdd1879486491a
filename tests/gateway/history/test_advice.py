"""Advice: what the figures of the history lead to, and its route on a real bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn.cli.functions.history import sparkline
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import Batch, FunctionSpec, ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.history.advice import RecordedUse, advise, replay
from gpufn_gateway.history.blocks import HOUR, MINUTE, encode_blocks, subject_of
from gpufn_gateway.history.collector import OVERVIEW
from gpufn_gateway.history.fields import Field, Point, Points
from gpufn_platform.bus.storage import streams
from tests.gateway.conftest import spec_of
from tests.gateway.whole import DIGEST, Whole, gateway_on

_USE = RecordedUse(calls=1000, memory_max=6 << 30)


def spec(min_workers: int = 0, batch: Batch | None = None, **resources: Any) -> FunctionSpec:
    return spec_of(
        resources=msgspec.structs.replace(Resources(memory_bytes=8 << 30), **resources),
        scaling=ScalingPolicy(min_workers=min_workers, max_workers=8, idle_timeout_s=600.0),
        batch=batch,
    )


@pytest.mark.parametrize(
    ("asked", "seen", "told"),
    [
        (spec(), {}, []),
        (spec(), {"memory_max": 1 << 30}, [("memory", "1344Mi")]),
        (spec(memory_bytes=6 << 30), {"memory_max": 5.9 * 2**30}, [("memory", "7872Mi")]),
        (spec(memory_bytes=None), {}, []),
        (spec(gpu=("L4",)), {"gpu_held_s": 1000.0, "gpu_used_s": 900.0}, [("gpu", "")]),
        (
            spec(gpu=("L4",)),
            {"gpu_held_s": 1000.0, "gpu_used_s": 100.0, "gpu_memory_max": 2 << 30},
            [("share", "'mps', vram='2688Mi'")],
        ),
        (spec(min_workers=3), {"busy_by_minute": (30.0, 61.0)}, [("min_workers", "2")]),
        (spec(min_workers=1), {"busy_by_minute": (30.0,)}, []),
        (spec(min_workers=2), {"busy_by_minute": (0.0,)}, [("min_workers", "0")]),
        (spec(), {"calls_by_minute": (1.0, 1.0, *[0.0] * 60, 1.0)}, [("idle_timeout", "60")]),
        (spec(), {"calls_by_minute": (1.0, *[0.0] * 8, 1.0)}, []),
        (spec(batch=Batch(32)), {"batches": {1: 900.0, 2: 90.0, 4: 10.0}}, [("batch", "Batch(max_size=4)")]),
        (spec(batch=Batch(32)), {"batches": {1: 1000.0}}, [("batch", "None")]),
        (spec(batch=Batch(32)), {"batches": {1: 900.0, 32: 100.0}}, []),
        (spec(batch=Batch(32)), {"batches": {1: 9.0}}, []),
        (spec(), {"batches": {1: 1000.0}}, []),
        (spec(min_workers=3), {"calls": 5, "busy_by_minute": (0.0,)}, []),
    ],
)
def test_each_finding_has_its_option_and_value(
    asked: FunctionSpec, seen: dict[str, Any], told: list[tuple[str, str]]
) -> None:
    found = advise(asked, msgspec.structs.replace(_USE, **seen), None)
    assert [(each.option, each.value) for each in found] == told


def test_the_min_workers_in_force_counts() -> None:
    seen = msgspec.structs.replace(_USE, busy_by_minute=(1.0,))
    assert [each.value for each in advise(spec(), seen, 4)] == ["1"]


def test_only_the_number_of_workers_is_set_without_a_deploy() -> None:
    seen = RecordedUse(calls=1000, memory_max=1 << 30, busy_by_minute=(1.0,))
    found = {each.option: each.scale for each in advise(spec(min_workers=3), seen, None)}
    assert found == {"memory": {}, "min_workers": {"min_workers": 1}}


async def test_the_route_reads_the_history_and_its_advice_can_be_followed(nats: Any, tmp_path: Path) -> None:
    name = "prod/advice/embed"
    asked = msgspec.structs.replace(spec(min_workers=4, batch=Batch(16)), name=name)
    async with gateway_on(nats, history=tmp_path / "history") as gateway:
        await streams.purge(gateway.bus, subjects.HISTORY, subjects.HISTORY_FILTER)
        await gateway.deploys.deploy(asked, DIGEST, DeployOptions(check=False))
        point: Point = {
            Field.CALLS: 200,
            Field.RUN_MS: 90_000,
            Field.MEMORY_MAX_MIB: 512,
            Field.BATCHES: {1: 150, 2: 50},
        }
        for step, age_s in ((MINUTE, 600), (HOUR, 7200)):
            await _store(gateway, step, age_s, {f"function:{name}": point, OVERVIEW: {Field.SECONDS: step}})
        await gateway.recorder.store()
        found = (await gateway.http.get(f"/v1/functions/{name}/advice")).json()
        followed = next(each["scale"] for each in found["advice"] if each["scale"])
        scaled = await gateway.http.post(f"/v1/functions/{name}/scale", json=followed)
        await gateway.http.delete(f"/v1/functions/{name}")
    values = {each["option"]: each["value"] for each in found["advice"]}
    assert values == {"memory": "704Mi", "min_workers": "2", "idle_timeout": "60", "batch": "Batch(max_size=2)"}
    assert (found["seen"]["calls"], found["seen"]["batches"]) == (200, {"1": 150, "2": 50})
    assert (followed, scaled.json()["min_workers"]) == ({"min_workers": 2}, 2)


async def _store(gateway: Whole, step: int, age_s: int, points: Points) -> None:
    slot = (int(gateway.clock.time()) - age_s) // step
    for payload in encode_blocks(step, slot, "gw", points):
        await gateway.bus.publish_stored(subject_of(step), payload)


def test_a_longer_timeout_never_has_more_cold_starts_nor_less_worker_time() -> None:
    curve = replay([1, 0, 0, 0, 2, 0, 1, *[0] * 30, 5, 0], 45.0)
    assert [each.cold_starts for each in curve] == sorted((each.cold_starts for each in curve), reverse=True)
    assert [each.worker_s for each in curve] == sorted(each.worker_s for each in curve)
    assert not any(each.is_current for each in curve)
    assert replay([0, 0], 60.0) == []


def test_a_sparkline_shows_gaps_and_survives_zeros() -> None:
    assert (sparkline([0, 1, None, 8, 4]), sparkline([0.0, None]), sparkline([])) == ("▁▁ █▄", "▁ ", "")
