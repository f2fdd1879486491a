"""What CUPTI answers when a trace has no kernel, with a library of its name."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from gpufn_runtime.worker.gpu import cupti

# The functions return these numbers, in the variable `answers`, and count what is left enabled.
_SOURCE = """
int answers[2], left;

int cuptiActivityEnable(int kind) { if (!answers[0]) left++; return answers[0]; }
int cuptiActivityDisable(int kind) { left--; return 0; }
int cuptiSubscribe(void **subscriber, void (*callback)(void), void *data) {
    *subscriber = &left;
    if (!callback) return 1;
    if (!answers[1]) left++;
    return answers[1];
}
int cuptiUnsubscribe(void *subscriber) { if (subscriber == &left) left--; return 0; }
int cuptiGetResultString(int result, const char **text) {
    if (result == 35) *text = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES";
    else if (result == 39) *text = "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED";
    else if (result == 11) *text = "CUPTI_ERROR_API_NOT_IMPLEMENTED";
    else return 1;
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc to compile a libcupti with")
    file = tmp_path_factory.mktemp("cupti") / "libcupti.so.12"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
    subprocess.run(command, input=_SOURCE, text=True, check=True)
    return file


@pytest.mark.parametrize(
    ("enable", "subscribe", "words"),
    [
        (35, 0, ["CUPTI_ERROR_INSUFFICIENT_PRIVILEGES", "NVreg_RestrictProfilingToAdminUsers=0"]),
        (0, 39, ["CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED", "Nsight"]),
        (11, 0, ["CUPTI_ERROR_API_NOT_IMPLEMENTED", "documentation"]),
        (999, 0, ["error 999"]),
        (0, 0, ["no error", "new worker"]),
    ],
)
def test_its_error_has_a_remedy_and_nothing_stays_enabled(
    library: Path, monkeypatch: pytest.MonkeyPatch, enable: int, subscribe: int, words: list[str]
) -> None:
    loaded = ctypes.CDLL(str(library))
    (ctypes.c_int * 2).in_dll(loaded, "answers")[:] = [enable, subscribe]
    monkeypatch.setattr(cupti, "_loaded", lambda: [f"7f0-7f1 r-xp 00000000 08:01 9   {library}\n"])
    answer = cupti.why_nothing_is_recorded()
    assert [word for word in words if word not in answer] == []
    assert ctypes.c_int.in_dll(loaded, "left").value == 0


def test_a_library_that_is_missing_or_of_another_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti, "_loaded", list)
    assert "not loaded" in cupti.why_nothing_is_recorded()
    monkeypatch.setattr(cupti, "_loaded", lambda: [f"7f0-7f1 r-xp 00000000 08:01 9 {tmp_path}/libcupti.so.12\n"])
    assert f"{tmp_path}/libcupti.so.12" in cupti.why_nothing_is_recorded()
