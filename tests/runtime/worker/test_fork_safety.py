"""Imports that forbid forks, in processes of their own. A torch and a libcuda that behave as the real ones do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_TORCH = """
import os
_bad = False
def is_available():
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
        init()
    return True
def init():
    os.register_at_fork(after_in_child=_poison)
def _poison():
    global _bad
    _bad = True
def _is_in_bad_fork():
    return _bad
"""
_LIBCUDA = """
static int initialized;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return initialized ? 0 : 3; }
"""
_LOAD_CUDA = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1')\n"
_LOOK = "from gpufn_runtime.worker import fork_safety; print(fork_safety.reason_not_to_fork(probe_timeout_s={}))"
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _reason(folder: Path, source: str, environ: dict[str, str], *, timeout_s: float = 30.0) -> str:
    """Return the reason that a process reports after it ran `source`."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": os.fspath(folder), **environ}
    environ["PYTHONPATH"] = os.pathsep.join((os.fspath(folder), environ["PYTHONPATH"]))
    command = [sys.executable, "-c", f"{source}\n{_LOOK.format(timeout_s)}"]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.parametrize(
    ("source", "environ", "fact"),
    [
        ("import torch.cuda", {}, ""),
        ("import torch.cuda; torch.cuda.is_available()", {}, "torch"),
        ("import torch.cuda; torch.cuda.is_available()", _NVML, ""),
        ("import torch.cuda; torch.cuda.init()", _NVML, "torch"),
        ("import torch.cuda; torch.cuda.is_available()", _NO_GPU, ""),  # no GPU function forks from it
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", {}, "1 threads"),
    ],
)
def test_a_torch_that_has_counted_gpus_with_cuda_forbids_forks(
    tmp_path: Path, source: str, environ: dict[str, str], fact: str
) -> None:
    """Regression: every worker of a GPU function with bitsandbytes failed with "Cannot re-initialize CUDA in forked
    subprocess". No thread and no open file of its template shows that."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "cuda.py").write_text(_TORCH)
    reason = _reason(tmp_path, source, environ)
    assert fact in reason
    assert bool(fact) == bool(reason)


def _compile_libcuda(folder: Path) -> None:
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc to compile a libcuda with")
    (folder / "cuda.c").write_text(_LIBCUDA)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)


@pytest.mark.parametrize(
    ("source", "environ", "fact"),
    [("", {}, ""), ("cuda.cuInit(0)", {}, "initialized CUDA"), ("cuda.cuInit(0)", _NO_GPU, "")],
)
def test_a_driver_that_was_initialized_forbids_forks(
    tmp_path: Path, source: str, environ: dict[str, str], fact: str
) -> None:
    _compile_libcuda(tmp_path)
    reason = _reason(tmp_path, _LOAD_CUDA + source, environ)
    assert fact in reason
    assert bool(fact) == bool(reason)


@pytest.mark.parametrize(("handler", "fact"), [("time.sleep(60)", "hangs"), ("os.abort()", "crashes")])
def test_a_process_whose_children_do_not_work_forbids_forks(tmp_path: Path, handler: str, fact: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "cuda.py").write_text("def _is_in_bad_fork(): ...")
    source = f"import os, time, torch.cuda; os.register_at_fork(after_in_child=lambda: {handler})"
    assert fact in _reason(tmp_path, source, {}, timeout_s=0.5 if fact == "hangs" else 30.0)


_STARTS_A_THREAD = """
import threading
def run():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
        comm.write("cuda00001800007")
    named.set()
    threading.Event().wait()
named = threading.Event()
threading.Thread(target=run, daemon=True).start()
named.wait()
"""


@pytest.mark.parametrize(("source", "fact"), [("", ""), ("cuda.cuInit(0)", "initialized CUDA")])
def test_the_thread_of_a_driver_that_only_nvml_uses_does_not_forbid_forks(
    tmp_path: Path, source: str, fact: str
) -> None:
    """Regression, seen on an H100 with driver 580: `torch.cuda.is_available()` at import excluded the module from the
    template, because NVML had loaded libcuda, which starts a thread."""
    _compile_libcuda(tmp_path)
    reason = _reason(tmp_path, _LOAD_CUDA + source + _STARTS_A_THREAD, {})
    assert fact in reason
    assert bool(fact) == bool(reason)
