"""A misbehaving candidate process does not affect the build that started it."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

import msgspec
import pytest

from gpufn_builder import identity
from gpufn_builder.checks.inaccurate_output import InaccurateOutput
from gpufn_builder.identity import Target
from gpufn_builder.processes import output_tail, process
from gpufn_builder.processes.candidates import run_candidate
from gpufn_builder.processes.process import ChildProcess, environment, without_repetitions
from gpufn_builder.processes.process_messages import CandidateRequest, CandidateResult, MeasurePlan, ProgressUpdate
from gpufn_core.domain.devices.engine import Backend, BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Tolerance
from tests.builder import misbehaving
from tests.e2e.small_disk import small_disk

PROCESS = "tests.builder.misbehaving"
SPEC = ModelSpec(parameter="net", files=(ModelFile("m.onnx", "a" * 64, 1),))


def _request(folder: Path, do: str, memory_limit_bytes: int | None = None) -> CandidateRequest:
    made = identity.identity(SPEC, Target("cpu", ""), Backend.ORT_CPU, {})
    made.flags.clear()
    made.flags["do"] = do
    return CandidateRequest(
        identity=made,
        model="m.onnx",
        inputs=(),
        outputs=(),
        profiles=(),
        tolerance=Tolerance(),
        batched=False,
        cases={},
        measured="",
        folder=str(folder / "engine"),
        caches="",
        memory_limit_bytes=memory_limit_bytes,
        measuring=MeasurePlan(),
    )


def _environ() -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    return environment(os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])})


def _run(folder: Path, do: str, *, timeout_s: float = 60.0, **limits: int) -> CandidateResult:
    updates: list[ProgressUpdate] = []
    result = run_candidate(
        _request(folder, do, **limits),
        folder,
        _environ(),
        timeout_s=timeout_s,
        on_progress=updates.append,
        process=PROCESS,
    )
    assert updates == [ProgressUpdate(BuildStage.COMPILE, 0.25, "a detail")]
    return result


def test_the_result_returns_including_infinities(tmp_path: Path) -> None:
    assert _run(tmp_path, "end well") == misbehaving.RESULT


def test_a_refusal_names_the_node(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"^the shape") as failure:
        _run(tmp_path, "refuse")
    assert (failure.value.stage, failure.value.node) == ("compile", "conv1")


def test_an_output_too_far_from_the_reference_is_returned_with_its_case(tmp_path: Path) -> None:
    with pytest.raises(InaccurateOutput) as failure:
        _run(tmp_path, "be inaccurate")
    assert (failure.value.stage, failure.value.node, failure.value.case) == ("verify", "y", "sample 3")


@pytest.mark.parametrize(
    ("do", "stage", "message"),
    [
        ("raise", "compile", "onnxruntime-cpu ended with code 1: ValueError: not so"),
        ("crash", "compile", "onnxruntime-cpu was killed by SIGSEGV"),
        ("leave", "compile", "onnxruntime-cpu ended with code 7: left"),
        ("leave without a word", "compile", "onnxruntime-cpu ended without a result"),
        ("be killed", "compile", "onnxruntime-cpu was killed by SIGKILL"),
        ("crash while measuring", "measure", "onnxruntime-cpu was killed by SIGSEGV"),
        ("say nonsense", "compile", "onnxruntime-cpu sent an invalid message"),
        ("say the same for ever", "compile", "onnxruntime-cpu sent an invalid message"),
        ("fail as the bus does", "compile", "not so"),
        ("leave nonsense", "compile", "onnxruntime-cpu left a result that cannot be read"),
        ("leave a pipe", "compile", "onnxruntime-cpu left a result that cannot be read"),
        ("leave a link", "compile", "onnxruntime-cpu left a result that cannot be read"),
        ("leave too much", "compile", "onnxruntime-cpu left a result that cannot be read"),
        ("leave somebody behind", "compile", "onnxruntime-cpu ended without a result"),
    ],
)
def test_the_build_reports_how_and_at_which_stage_a_candidate_ended(
    tmp_path: Path, do: str, stage: str, message: str
) -> None:
    with pytest.raises(BuildFailed) as failure:
        run_candidate(
            _request(tmp_path, do),
            tmp_path,
            _environ(),
            timeout_s=60,
            on_progress=lambda updates: None,
            process=PROCESS,
        )
    assert (failure.value.stage, failure.value.message) == (stage, message)


def test_endless_output_fills_no_disk_and_its_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_tail, "_MAX_BYTES", 1 << 20)
    with pytest.raises(BuildFailed, match=r"onnxruntime-cpu .*code 1: ValueError: the last words") as failure:
        _run(tmp_path, "print without end")
    assert failure.value.log.endswith("ValueError: the last words")


def test_the_last_message_is_kept(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed) as failure:
        _run(tmp_path, "raise")
    first, second, *_ = failure.value.log.splitlines()
    assert first.endswith("before the crash")
    assert second.startswith("Traceback")
    assert failure.value.log.endswith("ValueError: not so")


def test_a_candidate_beyond_its_memory_limit_ends_with_that_reason(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"onnxruntime-cpu .*memory.* 1 GiB"):
        _run(tmp_path, "eat memory", memory_limit_bytes=1 << 30)


@pytest.mark.parametrize(
    ("do", "words"),
    [("store without end", "GPUFN_BUILD_DISK"), ("eat memory in many processes", "memory than its limit of 200 MiB")],
)
def test_the_joint_usage_of_its_processes_is_limited(tmp_path: Path, do: str, words: str) -> None:
    (tmp_path / "engine").mkdir()
    request = msgspec.structs.replace(_request(tmp_path, do, 200 << 20), disk_limit_bytes=16 << 20)
    work = process.ChildProcess(PROCESS, request, tmp_path, _environ(), name="the build", writes_to=[tmp_path])
    with pytest.raises(BuildFailed, match=words):
        work.wait(lambda update: None, CandidateResult, 60)


def test_a_full_disk_is_reported_though_output_cannot_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path, mebibytes=1) as disk, pytest.raises(BuildFailed) as failure:
        _run(disk, "fill the disk")
    message = "the builder's disk is full: free some space and build again"
    assert (failure.value.stage, failure.value.message) == ("compile", message)


def test_a_hanging_candidate_is_ended(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"onnxruntime-cpu made no progress for 3 s .*--build-timeout") as failure:
        _run(tmp_path, "hang", timeout_s=3)
    assert failure.value.stage == "compile"
    assert not Path(f"/proc/{(tmp_path / 'engine').read_text()}").exists()


def test_output_is_progress_and_is_passed_on_as_progress(tmp_path: Path) -> None:
    updates: list[ProgressUpdate] = []

    def note(update: ProgressUpdate) -> None:
        updates.append(update)
        if len(updates) == 2:
            (tmp_path / "engine").touch()

    request = _request(tmp_path, "print and wait")
    run_candidate(request, tmp_path, _environ(), timeout_s=60, on_progress=note, process=PROCESS)
    assert len(updates) >= 2, "the process may print once more before it sees the file"
    assert set(updates) == {ProgressUpdate(BuildStage.COMPILE, 0.25, "a detail")}


def test_output_alone_is_progress_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a process that printed forever kept its slot for a day."""
    monkeypatch.setattr(process, "_OUTPUT_COUNTS_S", 0.5)
    with pytest.raises(BuildFailed, match=r"made no progress for 1 s .*--build-timeout"):
        run_candidate(
            _request(tmp_path, "print for ever"),
            tmp_path,
            _environ(),
            timeout_s=1,
            on_progress=lambda update: None,
            process=PROCESS,
        )


def test_the_same_progress_is_sent_again_before_any_timeout_and_not_more_often() -> None:
    sent: list[tuple[float, str]] = []
    times = iter([100.0, 100.125, 100.25, 100.375])
    now = 0.0

    def clock() -> float:
        nonlocal now
        now = next(times)
        return now

    report_progress = without_repetitions(lambda update: sent.append((now, update.detail)), clock)
    for detail in ("one", "one", "one", "other"):
        report_progress(BuildStage.MEASURE, 0.5, detail)
    assert sent == [(100.0, "one"), (100.25, "one"), (100.375, "other")]


def test_a_pause_is_not_time_without_progress(tmp_path: Path) -> None:
    work = ChildProcess(PROCESS, _request(tmp_path, "hang"), tmp_path, _environ(), name="it")
    states: list[str] = []

    def on_held(held_bytes: int) -> None:
        """Each call is a poll of at most the timeout."""
        states.append(Path(f"/proc/{work._process.pid}/stat").read_text().rpartition(")")[2].split()[0])
        if len(states) == 4:
            work.resume()

    work.pause()
    with pytest.raises(BuildFailed, match="made no progress"):
        work.wait(lambda update: None, CandidateResult, timeout_s=0.2, on_held=on_held)
    assert states[1:4] == ["T"] * 3
    assert len(states) > 4


def test_a_cancelled_candidate_ends_at_once(tmp_path: Path) -> None:
    work = ChildProcess(PROCESS, _request(tmp_path, "hang"), tmp_path, _environ(), name="it")
    begun = threading.Event()
    ended: list[BuildFailed] = []

    def wait() -> None:
        try:
            work.wait(lambda updates: begun.set(), CandidateResult, timeout_s=60)
        except BuildFailed as failure:
            ended.append(failure)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(30)
    work.end()
    thread.join(30)
    work.end()  # no effect after the end
    assert [failure.message.rpartition(" ")[2] for failure in ended] == ["SIGKILL"]


def test_its_environment_has_no_secrets_and_one_gpu_at_most() -> None:
    given = {"PATH": "/bin", "GPUFN_NATS_URL": "nats://builder:secret@h", "AWS_SECRET_ACCESS_KEY": "x"}
    assert environment(given) == {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "ORT_DISABLE_TELEMETRY": "1",
        "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent/mps",
    }  # fmt: skip
    assert environment({}, gpu="GPU-1")["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            work = ChildProcess(PROCESS, _request(tmp_path, "hang"), tmp_path, _environ(), name="it")
            os.write(writer, b"%d" % work._process.pid)
        finally:
            os._exit(0)
    pidfd = os.pidfd_open(int(os.read(reader, 32)))
    os.waitpid(parent, 0)
    try:
        assert select.select([pidfd], [], [], 30)[0]
    finally:
        for descriptor in (pidfd, reader, writer):
            os.close(descriptor)
