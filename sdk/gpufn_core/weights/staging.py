"""Copies of files to a GPU through pinned buffers: threads read the next chunks while the GPU copies the last ones.

Each thread makes, fills and pins its own buffers, so that one thread pins while others read. A buffer is pinned after
its first read, when its pages exist. The first reads need no GPU: they run while CUDA starts and allocates. The buffers
serve all files of a load. They are released after the load, while the caller continues.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from gpufn_core.weights.host_memory import host_memory

_THREADS: Final = 12
_CHUNK_BYTES: Final = 4 << 20
_BUFFERS: Final = 2  # per thread: it fills one while the GPU copies from the other


class Plan(NamedTuple):
    """`chunk_bytes` is the size of a buffer, of which each thread has `buffers`."""

    threads: int = _THREADS
    chunk_bytes: int = _CHUNK_BYTES
    buffers: int = _BUFFERS
    huge_pages: bool = True

    @classmethod
    def default(cls, threads: int | None) -> Plan:
        return cls(threads or min(_THREADS, len(os.sched_getaffinity(0))))


class Source(NamedTuple):
    """The data of an open file: `size` bytes from `start` on."""

    file: int
    start: int
    size: int

    def read(self, buffer: memoryview, begin: int) -> None:
        """Fill a buffer with the data from `begin` on. Raises OSError, ValueError."""
        offset = self.start + begin
        while buffer:
            count = os.preadv(self.file, [buffer], offset)
            if not count:
                raise ValueError(f"it ended at byte {offset:,} while it was read")
            buffer, offset = buffer[count:], offset + count


class Staging:
    """The threads and buffers of one load. `torch` is the module. `on_phase` receives the name of each phase when it
    ends, from any thread: "allocated", then "read", "pinned" and "copied" of each thread's first chunk, "filled" at the
    end of a file, and "released"."""

    def __init__(
        self, torch: Any, device: Any, plan: Plan, on_phase: Callable[[str], object] = lambda phase: None
    ) -> None:
        self._torch = torch
        self._device = device
        self._on_gpu = torch.device(device).type == "cuda"
        self._plan = plan
        self._on_phase = on_phase
        self._pool = ThreadPoolExecutor(plan.threads)
        self._lanes = [_Lane(torch, plan, on_phase) for _ in range(plan.threads)]

    def load(self, source: Source) -> Any:
        """Return the data as a tensor of bytes on the device. Raises the first error of a thread, when all have
        ended."""
        if not source.size:
            return self._torch.empty(0, dtype=self._torch.uint8, device=self._device)
        chunks = deque(range(0, source.size, self._plan.chunk_bytes))
        block: Future[Any] = Future()
        fill = _Lane.fill if self._on_gpu else _Lane.fill_on_host
        work = [self._pool.submit(fill, lane, block, source, chunks) for lane in self._lanes[: len(chunks)]]
        try:
            block.set_result(self._allocate(source.size))
        except BaseException as error:
            block.set_exception(error)
        for each in work:
            each.exception()  # waits
        result = block.result()
        for each in work:
            each.result()
        self._on_phase("filled")
        return result

    def close(self) -> None:
        """Release the buffers, in the background."""
        self._pool.submit(self._release)
        self._pool.shutdown(wait=False)

    def _allocate(self, size: int) -> Any:
        block = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        if self._on_gpu:  # its memory may be in use by earlier kernels of this stream
            self._torch.cuda.current_stream(block.device).synchronize()
        self._on_phase("allocated")
        return block

    def _release(self) -> None:
        for lane in self._lanes:
            lane.release()
        self._on_phase("released")


class _Lane:
    """The buffers and the stream of one thread."""

    def __init__(self, torch: Any, plan: Plan, on_phase: Callable[[str], object]) -> None:
        self._torch = torch
        self._plan = plan
        self._on_phase = on_phase
        self._buffers: list[_Buffer] = []
        self._stream: Any = None

    def fill(self, block: Future[Any], source: Source, chunks: deque[int]) -> None:
        """Copy chunks to the GPU until none remains."""
        try:
            self._copy_chunks(block, source, chunks)
        finally:
            if self._stream is not None:
                self._stream.synchronize()

    def _copy_chunks(self, block: Future[Any], source: Source, chunks: deque[int]) -> None:
        for number, (begin, end) in enumerate(_remaining(chunks, source.size, self._plan.chunk_bytes)):
            buffer = self._buffer(number % self._plan.buffers)
            buffer.wait()
            source.read(buffer.view[: end - begin], begin)
            self._report(number, "read")
            target = block.result()[begin:end]
            if self._stream is None:
                self._stream = self._torch.cuda.Stream(target.device)
            buffer.pin()
            self._report(number, "pinned")
            buffer.copy_to(target, self._stream)
            self._report(number, "copied")

    def fill_on_host(self, block: Future[Any], source: Source, chunks: deque[int]) -> None:
        view = memoryview(block.result().numpy())
        for begin, end in _remaining(chunks, source.size, self._plan.chunk_bytes):
            source.read(view[begin:end], begin)

    def release(self) -> None:
        while self._buffers:
            self._buffers.pop().release()

    def _buffer(self, number: int) -> _Buffer:
        if number == len(self._buffers):
            self._buffers.append(_Buffer(self._torch, self._plan))
        return self._buffers[number]

    def _report(self, number: int, phase: str) -> None:
        if not number:
            self._on_phase(phase)


class _Buffer:
    """Host memory. It is pinned in place, because torch's own pinned memory is never freed. If pinning fails, copies
    are slower."""

    def __init__(self, torch: Any, plan: Plan) -> None:
        self._torch = torch
        self._memory = host_memory(plan.chunk_bytes, huge_pages=plan.huge_pages)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self._was_pinned: bool | None = None
        self._copied: Any = None

    def wait(self) -> None:
        """Wait until the GPU has copied the content."""
        if self._copied is not None:
            self._copied.synchronize()

    def pin(self) -> None:
        if self._was_pinned is None:
            address, size = self._tensor.data_ptr(), self._tensor.numel()
            self._was_pinned = not int(self._torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def copy_to(self, target: Any, stream: Any) -> None:
        if self._copied is None:
            self._copied = self._torch.cuda.Event()
        with self._torch.cuda.stream(stream):
            target.copy_(self._tensor[: target.numel()], non_blocking=True)
            self._copied.record(stream)

    def release(self) -> None:
        if self._was_pinned:
            self._torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())


def _remaining(starts: deque[int], size: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the chunks that no thread has begun, as (first byte, end)."""
    with contextlib.suppress(IndexError):  # `popleft` is atomic
        while True:
            begin = starts.popleft()
            yield begin, min(begin + chunk_bytes, size)
