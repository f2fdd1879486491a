from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_check.checks import containers, engines
from gpu_check.findings import Finding
from gpu_check.machine import CannotRun, Gpu, Machine
from gpu_check.platform import CallFailed

MACHINE = Machine(
    gpus=(Gpu("GPU-x", "x", 80 << 30, "9.0"),),
    programs={"docker": "/usr/bin/docker", "nvidia-cuda-mps-control": "/usr/bin/nvidia-cuda-mps-control"},
)
ANSWER = {"multiprocessors": 132, "free_bytes": 3 << 30, "total_bytes": 80 << 30, "is_client": True}
ANSWER |= {"allocates": True, "in_container": True}


def _check(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], node: dict[str, str] | None = None) -> Finding:
    def invoke(name: str) -> Any:
        answer = answers.get(name, ANSWER)
        if isinstance(answer, Exception):
            raise answer
        return answer

    platform = SimpleNamespace(
        get=lambda path: {"nodes": [node or {}]}, deploy=lambda source: None, invoke=invoke, gpufn=lambda *_: ""
    )
    monkeypatch.setattr(containers, "up", lambda machine, **environ: contextlib.nullcontext(platform))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return containers.gpu_container(MACHINE)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, []),
        ({"is_client": False}, ["gpu-check-part"]),
        ({"free_bytes": 79 << 30}, ["gpu-check-part"]),
        ({"in_container": False, "allocates": False}, ["gpu-check-part", "gpu-check-part"]),
    ],
)
def test_a_worker_in_a_container_has_its_share(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], wrong: list[str]
) -> None:
    finding = _check(monkeypatch, {"gpu-check-part": ANSWER | change})
    assert [each.partition(":")[0] for each in finding.wrong] == wrong
    assert [row[0] for row in finding.tables[0].rows] == ["gpu-check-whole", "gpu-check-part"]


def test_a_machine_without_containers_for_gpus_cannot_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for trouble in ({"container_trouble": "no Docker"}, {"gpu_container_trouble": "no hook"}):
        with pytest.raises(CannotRun, match=next(iter(trouble.values()))):
            _check(monkeypatch, {}, trouble)
    with pytest.raises(CannotRun, match="no network"):
        _check(monkeypatch, {"gpu-check-whole": CallFailed("502 build_failed: no network")})


@pytest.mark.parametrize(
    ("packages", "gpus", "backend"),
    [
        ({"tensorrt": "11.4"}, MACHINE.gpus, "tensorrt"),
        ({}, MACHINE.gpus, "onnxruntime-cuda"),
        ({"tensorrt": "11.4"}, (), "onnxruntime-cpu"),
    ],
)
def test_engines_of_less_precision_are_built_by_the_best_compiler(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], gpus: tuple[Gpu, ...], backend: str
) -> None:
    monkeypatch.setattr(Machine, "need_module", lambda self, name: None)
    monkeypatch.setattr(engines, "_built_and_served", lambda machine, *choice: Finding(summary=",".join(choice)))
    machine = Machine(gpus=gpus, packages=packages)
    assert engines.fp16_engine(machine).summary == f"{backend},fp16"
    assert engines.int8_engine(machine).summary == f"{backend},int8"
