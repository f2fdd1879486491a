"""`gpufn profile`: its tables and files. A profile of a running worker is in tests/e2e/test_exec.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway

_KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 2_000_000, "pid": 0, "tid": 7}
_TRACE = gzip.compress(json.dumps({"traceEvents": [_KERNEL]}).encode())


@pytest.mark.parametrize(
    ("options", "file"),
    [((), "embed.pt.trace.json.gz"), (("--format", "speedscope"), "embed.speedscope.json"),
     (("--format", "folded"), "embed.folded.txt")],
)  # fmt: skip
def test_a_profile_of_a_gpu_is_a_trace_or_a_flame_graph(
    gateway: StubGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    gateway.on("POST /v1/functions/embed/profile", _TRACE, x_gpufn_worker="w-1")
    shown = json.loads(command("profile", "embed", "--gpu", "--json", *options).stdout)
    assert (shown["file"], shown["top"]) == (file, [{"name": "gemm", "events": 1, "seconds": 2.0}])
    written = Path(file).read_bytes()
    if not options:
        assert written == _TRACE
    elif file.endswith(".json"):
        (profile,) = json.loads(written)["profiles"]
        assert (profile["unit"], profile["weights"]) == ("seconds", [2.0])
    else:
        assert written == b"GPU;gemm 2000000\n"


def test_memory_of_the_platform_is_not_in_the_table(gateway: StubGateway) -> None:
    stacks = b"(gpufn itself) 4194304\nembed.py:3;embed.py:6 1048576\n"
    gateway.on("POST /v1/functions/embed/profile", stacks, x_gpufn_worker="w-1")
    shown = json.loads(command("profile", "embed", "--memory", "--json").stdout)
    assert (shown["bytes"], shown["platform_bytes"]) == (1 << 20, 4 << 20)
    assert [row["frame"] for row in shown["top"]] == ["embed.py:6"]
    assert "4 MiB of gpufn itself" in command("profile", "embed", "--memory").stdout
