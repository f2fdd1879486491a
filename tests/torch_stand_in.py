"""A package in the place of torch, with the parts of its profiler that workers use.

Tests give it a GPU with `torch.cuda.has_gpu = True`, and faults with the other attributes of `torch.cuda`.
"""

from __future__ import annotations

from pathlib import Path

_SOURCES = {
    "__init__.py": """
import contextlib
import types

__version__ = "0.0"


class cuda:
    has_gpu = False
    memory = [0, 100]  # by device
    current = 0
    capturing = iter(())
    kernels = []  # launched, with the device of each
    nvtx = types.SimpleNamespace(range=lambda name: contextlib.nullcontext())
    graph = types.SimpleNamespace(default_capture_stream=None)

    @classmethod
    def is_available(cls):
        return cls.has_gpu

    is_initialized = is_available

    @classmethod
    def device_count(cls):
        return len(cls.memory)

    @classmethod
    def memory_reserved(cls, device):
        return cls.memory[device]

    @classmethod
    @contextlib.contextmanager
    def device(cls, device):
        before, cls.current = cls.current, device
        yield
        cls.current = before

    @classmethod
    def _sleep(cls, cycles):
        cls.kernels.append(cls.current)

    @classmethod
    def current_stream(cls):
        return types.SimpleNamespace(synchronize=lambda: None)

    @classmethod
    def stream(cls, stream):
        return contextlib.nullcontext()

    @classmethod
    def is_current_stream_capturing(cls):
        return next(cls.capturing, False)
""",
    "autograd/__init__.py": "",
    "autograd/profiler.py": """
_is_profiler_enabled = False


class profile:
    def __init__(self):
        self.entered, self.kineto_results = False, None

    def _prepare_trace(self):
        self.entered = True

    def stop(self):
        self.kineto_results = []
""",
    "profiler.py": """
import contextlib
import enum
import json
import os

import torch
from torch.autograd import profiler as autograd_profiler

ranges = []
ProfilerActivity = enum.Enum("ProfilerActivity", "CPU CUDA")
supported = set(ProfilerActivity)
records_kernels = True


def supported_activities():
    return supported


class profile:
    def __init__(self, *, activities):
        self.activities = activities
        self.profiler = autograd_profiler.profile()

    def start(self):
        ranges.clear()
        torch.cuda.kernels.clear()
        self.profiler._prepare_trace()
        autograd_profiler._is_profiler_enabled = True
        os.environ["TEARDOWN_CUPTI"] = "0"  # as with CUDA graphs of inductor

    def stop(self):
        self.profiler.stop()
        autograd_profiler._is_profiler_enabled = False

    def export_chrome_trace(self, path):
        events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5.0}]
        events += [{"ph": "X", "cat": "user_annotation", "name": name, "ts": 0, "dur": 9.0} for name in ranges]
        if records_kernels and ProfilerActivity.CUDA in self.activities:
            events += [{"ph": "X", "cat": "kernel", "name": "spin", "ts": 0, "dur": 1.0} for _ in torch.cuda.kernels]
        with open(path, "w") as file:
            json.dump({"traceEvents": events}, file)


@contextlib.contextmanager
def record_function(name):
    ranges.append(name)
    yield
""",
}


def write(folder: Path) -> None:
    """Make the package `torch` in a folder."""
    for name, source in _SOURCES.items():
        file = folder / "torch" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source.lstrip())
