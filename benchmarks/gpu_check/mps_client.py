"""An MPS client that executes commands from stdin, one per line, and answers each with a line of JSON. It uses libcuda
only, so that no other library affects the result.

look      report what this process sees
fits N    report whether N bytes can be allocated
memory    report the free and the total memory, as libraries see it
hold N    allocate N bytes and keep them
fault     launch a kernel that writes to an invalid address
check     report whether all previous work has succeeded; in a corrupted context, nothing does
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any, Final

from gpufn_runtime.worker.gpu.cuda_driver import Driver, DriverError

_PTX: Final = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fault() { .reg .b64 %a; .reg .b32 %b; mov.u64 %a, 16; mov.u32 %b, 0; st.global.u32 [%a], %b; ret; }
"""


class Client:
    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        self._driver = Driver(self._library)
        self._driver.open()

    def answer(self, word: str, *arguments: str) -> Any:
        match word:
            case "look":
                return {
                    "is_client": self._driver.is_client(),
                    "multiprocessors": self._driver.multiprocessors(),
                    "free_bytes": self._driver.free_bytes(),
                }
            case "fits":
                return self._driver.can_allocate(int(arguments[0]))
            case "memory":
                return {"free_bytes": self._driver.free_bytes(), "total_bytes": self._driver.total_bytes()}
            case "hold":
                self._call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(int(arguments[0])))
                return "held"
            case "fault":
                module, function = ctypes.c_void_p(), ctypes.c_void_p()
                self._call("cuModuleLoadData", ctypes.byref(module), _PTX)
                self._call("cuModuleGetFunction", ctypes.byref(function), module, b"fault")
                self._call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        self._call("cuCtxSynchronize")
        return "well"

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise DriverError(name, code)


def main() -> None:
    client: Client | None = None
    for line in sys.stdin:
        try:
            client = client or Client()
            answer = client.answer(*line.split())
        except (DriverError, AttributeError, OSError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
