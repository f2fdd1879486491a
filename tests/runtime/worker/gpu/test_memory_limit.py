"""A worker's share of GPU memory in libraries that take a fraction of the whole GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpufn_runtime.worker.gpu import memory_limit

GIB = 1 << 30
_TORCH = """
fractions, queued = [], []
_lazy_call = queued.append
set_per_process_memory_fraction = fractions.append
"""
_APPLY = "from gpufn_runtime.worker.gpu import memory_limit; memory_limit.apply(8 << 30, 80 << 30)"
_LOOK = """
import sys, torch.cuda
assert torch.cuda.fractions == [], "to set it now would initialize CUDA"
for call in torch.cuda.queued:
    call()
assert torch.cuda.fractions == [0.1], torch.cuda.fractions
assert type(torch.cuda.__spec__.loader).__name__ == "SourceFileLoader"
assert not any("Torch" in type(finder).__name__ for finder in sys.meta_path)
"""


@pytest.mark.parametrize("order", [f"import torch.cuda; {_APPLY}", _APPLY], ids=["from a template", "imported later"])
def test_torch_uses_no_more_than_the_share(tmp_path: Path, order: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "cuda.py").write_text(_TORCH)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))}
    subprocess.run([sys.executable, "-c", f"{order}\n{_LOOK}"], env=environ, check=True, timeout=60)


def test_other_libraries_have_variables_which_the_function_may_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    environ = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
    memory_limit.apply(10 * GIB, 81 * GIB, environ)
    assert environ == {
        "GPUFN_GPU_MEMORY_FRACTION": "0.1234",  # rounded down
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
