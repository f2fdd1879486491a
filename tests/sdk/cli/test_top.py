"""Output of `gpufn top` and `gpufn nodes` for a node with GPUs."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner
from rich.console import Console

from gpufn.cli import app
from gpufn.cli.operate.top import screen
from tests.sdk.conftest import StubGateway

GIB = 1 << 30
NODE: dict[str, Any] = {
    "node": "n1",
    "sent_at": 100.0,
    "facts": {"driver": "595.91.07", "cuda": "13.1", "mps": "v2"},
    "devices": [
        {"uuid": "cpu", "type": "cpu", "kind": "EPYC", "memory_bytes": 8 * GIB, "cores": 4.0},
        {"uuid": "GPU-11111111-2222", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 * GIB},
        {
            "uuid": "GPU-2", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 * GIB, "health": "failed",
            "health_reason": "gpu is lost",
        },
    ],
    "metrics": [
        {
            "uuid": "GPU-11111111-2222", "utilisation": 0.5, "memory_used_bytes": 6 * GIB,
            "temperature_c": 61, "power_w": 60.4,
            "processes": [[7, GIB, None], [9, 2 * GIB, None]],
        }
    ],
    "processes": [
        {
            "worker": "w-1", "function": "embed", "revision": 2, "pid": 7, "started_at": 40.0, "resident_bytes": GIB,
            "share": {"gpus": ["GPU-11111111-2222"], "mode": "mps", "vram_bytes": 6 * GIB, "sm_percent": 25},
            "gpu_bytes": {"GPU-11111111-2222": 3 * GIB},
        },
        {"worker": "w-2", "function": "hello", "revision": 1, "pid": 8, "started_at": 90.0, "resident_bytes": GIB,
         "share": {"memory_bytes": 4 * GIB}},
    ],
}  # fmt: skip


def _drawn(*nodes: dict[str, Any], width: int = 140) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(screen(list(nodes), 100.0, width))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_each_device_has_its_bars_and_its_workers() -> None:
    assert _drawn(NODE) == [
        "n1 driver 595.91.07, CUDA 13.1, MPS v2",
        "EPYC, 4 cores ━━━━━─────────────── 25% 2 GiB of 8 GiB",
        "hello@1 w-2 ━━━━━─────────────── 25% 1 GiB of 4 GiB for 10 s",
        "NVIDIA L4, GPU-11111111 ━━━━━━━━━━────────── 50% ━━━━━─────────────── 25% 6 GiB of 24 GiB 61 °C 60 W",
        "embed@2 w-1 ━━━━━━━━━━────────── 50% 3 GiB of 6 GiB mps, 25 % for 60 s",
        "NVIDIA L4, GPU-2 - - - of 24 GiB failed: gpu is lost",
    ]


def test_a_narrow_terminal_has_shorter_bars_and_still_a_line_for_each() -> None:
    assert _drawn(NODE, width=80) == [
        "n1 driver 595.91.07, CUDA 13.1, MPS v2",
        "EPYC ━──── 25% 2 GiB",
        "hello@1 ━──── 25% 1 GiB for 10 s",
        "NVIDIA L4 ━━─── 50% ━──── 25% 6 GiB 61 °C 60 W",
        "embed@2 ━━─── 50% 3 GiB mps, 25 % for 60 s",
        "NVIDIA L4 - - - failed: gpu is lost",
    ]


def test_in_a_very_narrow_one_columns_go_before_names_do() -> None:
    assert _drawn(NODE, width=60)[1:] == [
        "EPYC 25% 2 GiB",
        "hello@1 25% 1 GiB for 10 s",
        "NVIDIA L4 50% 25% 6 GiB 61 °C 60 W",
        "embed@2 50% 3 GiB mps, 25 % for 60 s",
        "NVIDIA L4 - - - failed: gpu is lost",
    ]
    assert _drawn(NODE, width=40)[1:] == [
        "EPYC 25% 2 GiB",
        "hello@1 25% 1 GiB for 10 s",
        "NVIDIA L4 50% 25% 6 GiB",
        "embed@2 50% 3 GiB for 60 s",
        "NVIDIA L4 - - - failed: gpu…",
    ]
    assert _drawn(NODE, width=30)[2:] == [
        "EPYC 25%",
        "hello@1 25% for 10 s",
        "NVIDIA L4 50% 25%",
        "embed@2 50% for 60 s",
        "NVIDIA L4 - - failed: …",
    ]


def test_a_process_of_a_gang_is_shown_with_its_rank() -> None:
    ranked = NODE | {"processes": [each | {"rank": 1} for each in NODE["processes"]]}
    assert [line.split(" w-")[0] for line in _drawn(ranked) if " w-" in line] == ["hello@1 rank 1", "embed@2 rank 1"]


def test_no_node_reports() -> None:
    assert "no node" in _drawn()[0]


def test_in_a_pipe_it_looks_once(gateway: StubGateway) -> None:
    gateway.on("GET /v1/nodes", {"nodes": [NODE]})
    result = CliRunner().invoke(app, ["top"])
    assert result.exit_code == 0
    assert "embed@2" in result.stdout
    assert len(gateway.requests) == 1


def test_the_list_of_nodes_shows_use_and_faults(gateway: StubGateway) -> None:
    gateway.on("GET /v1/nodes", {"nodes": [NODE]})
    lines = [" ".join(line.split()) for line in CliRunner().invoke(app, ["nodes"]).stdout.splitlines()]
    assert [line.split(" ago ")[-1].removeprefix("- ") for line in lines[1:]] == [
        "healthy",
        "healthy",
        "failed: gpu is lost",
    ]
    assert lines[2].startswith("n1 NVIDIA L4, GPU-11111111 24 GiB 6 GiB 60 W 1 ")
