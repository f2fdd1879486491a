"""Memory of processes and of the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpufn_builder.processes.memory import available_bytes, held

MIB = 1 << 20
_CHILD = "x = bytearray(64 << 20); print(flush=True); input()"
_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_CHILD!r}])"


def test_the_memory_of_a_process_includes_its_descendants() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        parent.stdout.readline()
        assert held(parent.pid).resident_bytes > held(parent.pid).allocated_bytes > 64 * MIB
        parent.stdin.close()
    assert held(parent.pid) == (0, 0), "it has ended"


def test_the_memory_of_the_host_and_of_the_container_both_limit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert available_bytes(tmp_path, tmp_path) == 4000 << 10
    for name, text in {
        "memory.max": str(3000 << 10),
        "memory.current": str(2000 << 10),
        "memory.stat": f"anon 1\ninactive_file {500 << 10}\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path, tmp_path) == 1500 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path) == 4000 << 10
    assert available_bytes(tmp_path / "none", tmp_path) is None
