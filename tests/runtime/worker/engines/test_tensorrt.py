"""The order in which TensorRT's session does things, recorded from stand-ins of `tensorrt` and of the CUDA runtime.

The stand-in keeps device memory in this process and negates every input, so that the outputs are right only when each
copy is the right one, in the right direction, at the right time.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpufn_core.domain.devices.engine import Backend
from gpufn_core.inference.cudart import CudaError
from gpufn_runtime.worker.engines.tensorrt import EngineRefused, TensorRTSession
from tests.runtime.worker.engines.engines import manifest, profile, rows, tensor

_FLOAT_BYTES = 4


class FakeCuda:
    """Streams execute their commands when they are synchronized; a graph consists of the commands that were
    captured."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.memory: dict[int, Any] = {}
        self.queue: list[Any] = []
        self.captured: list[Any] | None = None
        self.graphs: dict[int, list[Any]] = {}
        self.destroyed: list[int] = []
        self.streams = 0
        self.cannot_capture = False
        self.is_full = False

    def allocate(self, size: int) -> int:
        if self.is_full:
            raise CudaError("cudaMalloc: out of memory")
        block = (ctypes.c_ubyte * size)()
        self.memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    allocate_pinned = allocate

    def free(self, address: int) -> None:
        del self.memory[address]

    free_pinned = free

    def stream(self) -> int:
        self.streams += 1
        return self.streams

    def destroy_stream(self, stream: int) -> None:
        self.streams -= 1

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self.calls.append(f"copy {size}")
        self.put(lambda: ctypes.memmove(to, source, size))

    def put(self, work: Any) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def synchronize(self, stream: int) -> None:
        self.calls.append("synchronize")
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        self.calls.append("capture")
        graphs: list[int] = []
        captured: list[Any] = []
        self.captured = captured
        try:
            yield graphs
        finally:
            self.captured = None
        if self.cannot_capture:
            raise CudaError("cudaStreamEndCapture: operation would make the legacy stream depend on a capturing one")
        self.graphs[len(self.graphs) + 1] = captured
        graphs.append(len(self.graphs))

    def launch(self, graph: int, stream: int) -> None:
        self.calls.append("launch")
        self.queue.extend(self.graphs[graph])

    def destroy_graph(self, graph: int) -> None:
        self.destroyed.append(graph)


class FakeContext:
    def __init__(self, trt: FakeTrt) -> None:
        self._trt = trt
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.active_optimization_profile = -1 if trt.contexts else 0
        self._allocators: dict[str, Any] = {}
        trt.contexts += 1

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self._allocators[name] = allocator
        return not self._trt.refuses_allocators

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._trt.calls.append(f"profile {index}")
        if self._trt.cannot_select == "raises":
            raise RuntimeError("Error in set optimization profile async.")
        if self._trt.cannot_select:
            return False
        self.active_optimization_profile = index
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._trt.calls.append(f"shape {name} {list(shape)}")
        assert self.active_optimization_profile >= 0
        low, _, high = self._trt.engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        self._shapes[name] = shape
        return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 2) if self._trt.unknown_output else self._shapes["x"]

    def get_max_output_size(self, name: str) -> int:
        rows, columns = self._shapes["x"]
        return (self._trt.most_rows - rows) * columns * _FLOAT_BYTES if self._trt.most_rows else -1

    def execute_async_v3(self, stream: int) -> bool:
        self._trt.calls.append("execute")
        if self._trt.cannot_run:
            self._trt.logger.log("error", "out of memory")
            return False
        if self._trt.unknown_output:
            return self._execute_data_dependent()
        count = int(np.prod(self._shapes["x"]))
        source, to = ((ctypes.c_float * count).from_address(self._addresses[name]) for name in ("x", "y"))
        self._trt.cuda.put(lambda: np.negative(source, out=np.ctypeslib.as_array(to)))
        return True

    def _execute_data_dependent(self) -> bool:
        """Write the rows whose first element is positive. TensorRT waits for the data, then requests the memory."""
        assert self._trt.cuda.captured is None, "a run that waits for the data cannot be captured"
        self._trt.cuda.synchronize(1)
        rows, columns = self._shapes["x"]
        source = (ctypes.c_float * (rows * columns)).from_address(self._addresses["x"])
        array = np.ctypeslib.as_array(source).reshape(rows, columns)
        kept = -array[array[:, 0] > 0]
        address = self._allocators["y"].reallocate_output_async("y", 0, kept.nbytes, 256, 1)
        if not address:
            return False
        ctypes.memmove(address, kept.ctypes.data, kept.nbytes)
        if not self._trt.never_notifies:
            self._allocators["y"].notify_shape("y", kept.shape)
        return True


class FakeTrt:
    """The part of the module that the session uses, with an engine of one input and one output."""

    ILogger = type("ILogger", (), {"Severity": SimpleNamespace(ERROR="error", INTERNAL_ERROR="internal")})
    IOutputAllocator = type("IOutputAllocator", (), {})
    TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
    TensorLocation = SimpleNamespace(DEVICE="device", HOST="host")

    def __init__(self, *, profiles: Sequence[Sequence[Sequence[int]]] = (((1, 2), (2, 2), (4, 2)),)) -> None:
        self.calls: list[str] = []
        self.cuda = FakeCuda(self.calls)
        self.contexts = 0
        self.most_rows = 0  # if set, an output needs fewer bytes the more rows the input has
        self.refuses_allocators = self.never_notifies = False
        self.cannot_load = self.cannot_run = self.unknown_output = False
        self.cannot_select = ""  # how TensorRT reports it
        self.names = ["x", "y"]
        self.location = "device"
        self.engine = SimpleNamespace(
            num_optimization_profiles=len(profiles),
            num_io_tensors=2,
            get_tensor_name=lambda index: self.names[index],
            get_tensor_mode=lambda name: "input" if name == "x" else "output",
            get_tensor_location=lambda name: self.location,
            get_tensor_profile_shape=lambda name, index: profiles[index],
            create_execution_context=lambda: FakeContext(self),
        )

    def init_libnvinfer_plugins(self, logger: Any, namespace: str) -> None:
        self.logger = logger

    def Runtime(self, logger: Any) -> Any:  # noqa: N802  as TensorRT has it
        return SimpleNamespace(deserialize_cuda_engine=self._deserialise)

    def _deserialise(self, plan: bytes) -> Any:
        self.calls.append(f"deserialise {plan.decode()}")
        if self.cannot_load:
            self.logger.log("warning", "not this one")
            self.logger.log("error", "the engine plan file is of another version")
            return None
        return self.engine


def _open(trt: FakeTrt, slots: int = 1) -> TensorRTSession:
    made = manifest(backend=Backend.TENSORRT, profiles=[profile(x=((1, 2), (2, 2), (4, 2)))])
    session = TensorRTSession(trt, trt.cuda, made, lambda: b"plan", slots=slots)  # type: ignore[arg-type]
    trt.calls.clear()
    return session


_ENQUEUE = ["copy 16", "execute", "copy 16"]


def test_a_first_run_is_enqueued_a_second_one_captured_and_a_third_one_launched() -> None:
    trt = FakeTrt()
    session = _open(trt)
    for value, calls in (
        (1, ["shape x [2, 2]", *_ENQUEUE, "synchronize"]),
        (2, ["capture", *_ENQUEUE, "launch", "synchronize"]),
        (3, ["launch", "synchronize"]),
    ):
        assert session.run({"x": rows(value, value)})["y"].tolist() == [[-value, -value]] * 2
        assert trt.calls == calls
        trt.calls.clear()


def test_other_shapes_end_the_graph_for_it_is_good_for_one_state_of_its_context() -> None:
    trt = FakeTrt()
    session = _open(trt)
    for values in ([1, 2], [3, 4], [5], [6, 7]):
        assert session.run({"x": rows(*values)})["y"][:, 0].tolist() == [-value for value in values]
    assert trt.cuda.destroyed == [1]
    assert trt.calls.count("capture") == 1
    assert trt.calls[-5:] == ["shape x [2, 2]", *_ENQUEUE, "synchronize"]


def test_an_engine_that_cannot_be_captured_runs_without_a_graph() -> None:
    trt = FakeTrt()
    trt.cuda.cannot_capture = True
    session = _open(trt)
    for value in (1, 2, 3):
        assert session.run({"x": rows(value, value)})["y"][0, 0] == -value
    assert trt.calls.count("capture") == 1


def test_outputs_are_the_callers_own() -> None:
    session = _open(FakeTrt())
    first = session.run({"x": rows(1)})["y"]
    session.run({"x": rows(2)})
    assert first.tolist() == [[-1, -1]]


def test_the_profile_that_accepts_the_shapes_is_used_and_kept_while_it_does() -> None:
    trt = FakeTrt(profiles=[((1, 2), (1, 2), (2, 2)), ((2, 2), (4, 2), (4, 2))])
    session = _open(trt)
    session.run({"x": rows(1)})
    session.run({"x": rows(1, 2)})
    session.run({"x": rows(1, 2, 3)})
    session.run({"x": rows(1, 2)})
    assert [call for call in trt.calls if call.startswith(("profile", "shape"))] == [
        "profile 0", "shape x [1, 2]", "shape x [2, 2]", "profile 1", "shape x [3, 2]", "shape x [2, 2]",
    ]  # fmt: skip
    with pytest.raises(EngineRefused, match=r"profile.*\[\[5, 2\]\]"):
        session.run({"x": rows(*range(5))})


def test_each_slot_has_a_context_and_a_stream_and_threads_share_them() -> None:
    trt = FakeTrt()
    session = _open(trt, slots=2)
    assert (session.parallel, trt.cuda.streams, trt.contexts) == (2, 2, 2)
    with session._slot(((1, 2),)) as one, session._slot(((1, 2),)) as other:
        assert one is not other
        came = threading.Event()

        def take() -> None:
            with session._slot(((1, 2),)):
                came.set()

        thread = threading.Thread(target=take)
        thread.start()
        assert not came.is_set()
    thread.join(20)
    assert came.is_set()


def test_a_slot_that_has_the_shapes_already_is_preferred() -> None:
    trt = FakeTrt()
    session = _open(trt, slots=2)
    session.run({"x": rows(1)})
    session.run({"x": rows(1, 2)})
    with session._slot(((1, 2),)):
        pass
    trt.calls.clear()
    session.run({"x": rows(1)})
    assert not [call for call in trt.calls if call.startswith("shape")]


def test_warming_up_leaves_every_slot_with_a_graph() -> None:
    trt = FakeTrt()
    session = _open(trt, slots=2)
    session.warm_up({"x": rows(0)})
    assert trt.calls.count("capture") == 2
    trt.calls.clear()
    with session._slot(((1, 2),)):
        session.run({"x": rows(1)})
    assert trt.calls == ["launch", "synchronize"]


def test_a_failed_run_includes_the_error_of_tensorrt_and_frees_the_slot() -> None:
    trt = FakeTrt()
    session = _open(trt)
    trt.cannot_run = True
    with pytest.raises(EngineRefused, match=r"TensorRT.*out of memory"):
        session.run({"x": rows(1)})
    trt.cannot_run = False
    trt.cuda.queue.clear()
    assert session.run({"x": rows(1)})["y"].tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cannot_load": True}, "TensorRT cannot load the engine: the engine plan file is of another version"),
        ({"names": ["x", "z"]}, "the engine has the tensors x, z, but its manifest names others"),
        ({"location": "host"}, "x is a shape tensor"),
        ({"unknown_output": True, "refuses_allocators": True}, "an allocator for y"),
    ],
)
def test_an_unsupported_engine_is_refused_and_leaves_no_memory(change: dict[str, Any], message: str) -> None:
    trt = FakeTrt()
    vars(trt).update(change)
    with pytest.raises(EngineRefused, match=message):
        _open(trt)
    assert (trt.cuda.memory, trt.cuda.streams) == ({}, 0)


def test_an_output_that_grows_while_the_input_shrinks_gets_a_larger_buffer() -> None:
    """Regression: buffers had the size for the largest inputs, and TensorRT wrote beyond their ends."""
    trt = FakeTrt()
    trt.most_rows = 6
    session = _open(trt)
    for count in (4, 1, 2):
        session.run({"x": np.zeros((count, 2), np.float32)})
        largest = max(len(block) for block in trt.cuda.memory.values())
        assert largest >= (6 - count) * 2 * _FLOAT_BYTES, "TensorRT may write so much"
    session.close()
    assert trt.cuda.memory == {}


def test_an_output_keeps_its_buffer_if_there_is_no_memory_for_a_larger_one() -> None:
    """Regression: it was freed first, and the next run wrote to its address."""
    trt = FakeTrt()
    trt.most_rows = 6
    session = _open(trt)
    trt.cuda.is_full = True
    for _ in range(2):
        with pytest.raises(CudaError):
            session.run({"x": np.zeros((1, 2), np.float32)})
    trt.cuda.is_full = False
    assert session.run({"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[-1.0, -1.0]]
    session.close()
    assert trt.cuda.memory == {}


@pytest.mark.parametrize("how", ["raises", "returns False"])
def test_a_profile_that_cannot_be_selected_is_refused_with_the_message_of_the_log(how: str) -> None:
    two = (((1, 2), (2, 2), (4, 2)), ((5, 2), (6, 2), (8, 2)))
    trt = FakeTrt(profiles=two)
    session = _open(trt)
    trt.cannot_select = how
    trt.logger.log("error", "the stream is of another device")
    shape = (6, 2) if session._slots[0]._profile == 0 else (1, 2)
    with pytest.raises(EngineRefused, match=r"select profile.*another device"):
        session.run({"x": np.zeros(shape, np.float32)})


def test_closing_frees_everything() -> None:
    trt = FakeTrt()
    session = _open(trt, slots=2)
    session.run({"x": rows(1)})
    session.run({"x": rows(1)})
    session.close()
    assert (trt.cuda.memory, trt.cuda.streams, trt.cuda.destroyed) == ({}, 0, [1])


def test_a_parked_engine_has_nothing_on_the_device_and_resumes_from_the_plan_in_memory() -> None:
    trt = FakeTrt()
    session = _open(trt, slots=2)
    session.run({"x": rows(1)})
    session.park()
    assert (trt.cuda.memory, trt.cuda.streams) == ({}, 0)
    session._read_plan = lambda: pytest.fail("the plan is read from the disk again")
    trt.calls.clear()
    session.resume()
    assert trt.calls[0] == "deserialise plan"
    assert (trt.cuda.streams, session.run({"x": rows(3)})["y"].tolist()) == (2, [[-3, -3]])


def test_half_floats_use_two_bytes_an_element() -> None:
    trt = FakeTrt()
    specs = [tensor("x", "FP16", -1, 2)], [tensor("y", "FP16", -1, 2)]
    session = TensorRTSession(trt, trt.cuda, manifest(*specs, backend=Backend.TENSORRT), lambda: b"plan", slots=1)  # type: ignore[arg-type]
    trt.cannot_run = True
    with pytest.raises(EngineRefused):
        session.run({"x": np.zeros((4, 2), np.float16)})
    assert "copy 16" in trt.calls


def test_an_output_whose_shape_depends_on_the_data_is_as_large_as_each_run_makes_it() -> None:
    trt = FakeTrt()
    trt.unknown_output = True
    session = _open(trt)
    for values in ([1, -1, 2], [1, -1, 2], [-1, -1], [5], [1, 2, 3, 4], [1, -1, 2]):
        expected = [[-value, -value] for value in values if value > 0]
        output = session.run({"x": rows(*values)})["y"]
        assert (output.tolist(), output.shape) == (expected, (len(expected), 2))
    assert "capture" not in trt.calls
    session.close()
    assert trt.cuda.memory == {}


def test_an_output_without_memory_fails_its_run_only() -> None:
    trt = FakeTrt()
    trt.unknown_output = True
    session = _open(trt)
    trt.cuda.is_full = True
    with pytest.raises(CudaError):
        session.run({"x": rows(1)})
    trt.cuda.is_full = False
    assert session.run({"x": rows(1)})["y"].tolist() == [[-1, -1]]
    trt.never_notifies = True
    with pytest.raises(EngineRefused):
        session.run({"x": rows(1)})
