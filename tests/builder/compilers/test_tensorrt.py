"""The TensorRT compiler's calls of the API, and its handling of return values that are easily overlooked.

A fake replaces TensorRT; test_tensorrt_names.py checks that its names are real.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpufn_builder.compilers.base import CompileJob
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ShapeProfile, ShapeRange, TensorSpec

ERROR, INFO = "error", "info"
RANGE = ShapeRange((1, 3), (4, 3), (8, 3))


class ParserError:
    def __init__(self, code: str, node: str, operator: str, desc: str) -> None:
        self._told = (types.SimpleNamespace(name=code), node, operator, desc)

    def code(self) -> Any:
        return self._told[0]

    def node_name(self) -> str:
        return str(self._told[1])

    def node_operator(self) -> str:
        return str(self._told[2])

    def desc(self) -> str:
        return str(self._told[3])


class Script:
    """The outcome of the next build; `calls` records the API calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.parses = True
        self.errors: list[ParserError] = []
        self.profile = 0
        self.accepts_timings = True
        self.has_context = True
        self.selects_profiles = True
        self.raises = True
        self.takes_addresses = True
        self.most_bytes = -1  # that TensorRT may write to an output
        self.plan: bytes | None = b"plan"
        self.logs: list[tuple[str, str]] = []
        self.loads = True
        self.output_shape: tuple[int, ...] = (4, 3)
        self.data_shape: tuple[int, ...] | None = None  # shape of an output that depends on the data
        self.allocator: Any = None
        self.accepts_allocators = True
        self.given = 0  # the address of that output

    def set_allocator(self, name: str, allocator: Any) -> bool:
        self.allocator = allocator
        return self.accepts_allocators

    def execute(self, stream: int) -> bool:
        if self.data_shape is not None:
            size = int(np.prod(self.data_shape)) * 4
            self.given = self.allocator.reallocate_output_async("y", 0, size, 256, stream)
            self.allocator.notify_shape("y", self.data_shape)
        return True

    def select_profile(self) -> bool:
        """Raise as the real bindings do, unless the test wants a result."""
        if not self.selects_profiles and self.raises:
            raise RuntimeError("Error in set optimization profile async.")
        return self.selects_profiles

    def called(self, name: str) -> list[list[Any]]:
        return [list(call[1:]) for call in self.calls if call[0] == name]


class Recorder:
    """Records every call; a method of the script returns the result."""

    def __init__(self, script: Script, **answers: Any) -> None:
        self.__dict__["_script"] = script
        self.__dict__["_answers"] = answers

    def __getattr__(self, name: str) -> Any:
        answer = self._answers.get(name)
        if name in self._answers and not callable(answer):
            return answer

        def call(*arguments: Any, **named: Any) -> Any:
            self._script.calls.append((name, *arguments, *named.values()))
            return answer(*arguments) if callable(answer) else None

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        self._script.calls.append((f"{name} =", value))


def _stand_in(script: Script) -> Any:
    class ILogger:
        Severity = types.SimpleNamespace(ERROR=ERROR, INTERNAL_ERROR="internal", INFO=INFO)

    class Base: ...

    def builder(log: Any) -> Recorder:
        def build(network: Any, config: Any) -> bytes | None:
            for severity, message in script.logs:
                log.log(severity, message)
            return script.plan

        cache = Recorder(script, serialize=lambda: b"timings")
        config = Recorder(
            script,
            add_optimization_profile=lambda profile: script.profile,
            create_timing_cache=lambda data: None if data == b"damaged" else f"cache of {data!r}",
            get_timing_cache=lambda: cache,
            set_timing_cache=lambda *_: script.accepts_timings,
        )
        return Recorder(
            script,
            create_network=lambda flags: None,
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: Recorder(script),
            build_serialized_network=build,
        )

    def parser(network: Any, log: Any) -> Recorder:
        return Recorder(
            script,
            parse_from_file=lambda path: script.parses,
            num_errors=len(script.errors),
            get_error=lambda index: script.errors[index],
        )

    inspector = Recorder(script, get_engine_information=lambda kind: '{"Layers": [{"LayerType": "Gemm"}, {}]}')
    context = Recorder(
        script,
        set_input_shape=lambda name, shape: True,
        set_optimization_profile_async=lambda index, stream: script.select_profile(),
        infer_shapes=list,
        set_tensor_address=lambda name, address: script.takes_addresses,
        get_tensor_shape=lambda name: script.output_shape,
        get_max_output_size=lambda name: script.most_bytes,
        set_output_allocator=script.set_allocator,
        execute_async_v3=script.execute,
    )
    engine = Recorder(
        script,
        num_layers=2,
        device_memory_size_v2=4096,
        create_engine_inspector=lambda: inspector,
        create_execution_context=lambda: context if script.has_context else None,
    )
    return types.SimpleNamespace(
        __name__="tensorrt",
        __version__="11.4.0",
        ILogger=ILogger,
        IOutputAllocator=Base,
        IProgressMonitor=Base,
        Builder=builder,
        OnnxParser=parser,
        Runtime=lambda log: Recorder(script, deserialize_cuda_engine=lambda plan: engine if script.loads else None),
        init_libnvinfer_plugins=lambda log, namespace: True,
        NetworkDefinitionCreationFlag=types.SimpleNamespace(STRONGLY_TYPED=1),
        ProfilingVerbosity=types.SimpleNamespace(DETAILED="detailed"),
        MemoryPoolType=types.SimpleNamespace(WORKSPACE="workspace"),
        BuilderFlag=types.SimpleNamespace(TF32="tf32"),
        LayerInformationFormat=types.SimpleNamespace(JSON="json"),
    )


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def module(script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "tensorrt", _stand_in(script))
    name = "gpufn_builder.compilers.tensorrt"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def _job(folder: Path, **flags: str) -> CompileJob:
    return CompileJob(
        model=folder / "model.onnx",
        inputs=(TensorSpec("x", "FP32", (-1, 3)),),
        outputs=(TensorSpec("y", "FP32", (-1, 3)),),
        profiles=(ShapeProfile({"x": RANGE}),),
        flags={"builder_optimization_level": "3", "tf32": "0", "workspace_bytes": "4096"} | flags,
        device="NVIDIA L4",
        golden={"x": np.zeros((4, 3), np.float32)},
        folder=folder,
        caches=folder / "tuning",
    )


def _compile(module: Any, folder: Path, **flags: str) -> Any:
    return module.TensorRT().compile(_job(folder, **flags), lambda progress, detail: None)


def test_a_plan_is_built_by_the_flags(module: Any, script: Script, tmp_path: Path) -> None:
    compiled = _compile(module, tmp_path)
    assert (compiled.files, compiled.gpu_nodes, compiled.cpu_nodes) == (("engine.plan",), 2, 0)
    assert compiled.nodes == {"Gemm on TensorRT": 1, "layer on TensorRT": 1}
    assert (tmp_path / "engine.plan").read_bytes() == b"plan"
    assert script.called("create_network") == [[2]]
    assert script.called("builder_optimization_level =") == [[3]]
    assert script.called("set_shape") == [["x", RANGE.min, RANGE.opt, RANGE.max]]
    assert (script.called("clear_flag"), script.called("set_flag")) == ([["tf32"]], [])
    assert script.called("set_memory_pool_limit") == [["workspace", 4096]]
    assert compiled.settings == {"device_memory_bytes": 4096}


def test_timings_of_another_gpu_are_replaced_by_none(module: Any, script: Script, tmp_path: Path) -> None:
    _compile(module, tmp_path)
    script.accepts_timings = False
    script.calls.clear()
    assert _compile(module, tmp_path).files == ("engine.plan",)
    assert script.called("set_timing_cache") == [["cache of b'timings'", False], ["cache of b''", False]]


def test_tf32_is_on_only_on_request(module: Any, script: Script, tmp_path: Path) -> None:
    _compile(module, tmp_path, tf32="1")
    assert (script.called("clear_flag"), script.called("set_flag")) == ([], [["tf32"]])


def test_timings_are_kept_for_the_next_build(module: Any, script: Script, tmp_path: Path) -> None:
    _compile(module, tmp_path)
    _compile(module, tmp_path)
    assert script.called("set_timing_cache") == [["cache of b''", False], ["cache of b'timings'", False]]
    assert [path.name for path in (tmp_path / "tuning").iterdir()] == ["tensorrt-11.4.0-nvidia-l4.timing"]


@pytest.mark.parametrize("unreadable", [False, True], ids=["damaged", "unreadable"])
def test_timings_that_are_of_no_use_fail_no_build(
    module: Any, script: Script, tmp_path: Path, *, unreadable: bool
) -> None:
    kept = tmp_path / "tuning" / "tensorrt-11.4.0-nvidia-l4.timing"
    if unreadable:
        kept.mkdir(parents=True)  # because root can read any file
    else:
        kept.parent.mkdir()
        kept.write_bytes(b"damaged")
    assert _compile(module, tmp_path).files == ("engine.plan",)
    assert script.called("set_timing_cache") == [["cache of b''", False]]
    assert list(kept.parent.iterdir()) == [kept]


def test_an_error_of_the_parser_names_the_node(module: Any, script: Script, tmp_path: Path) -> None:
    script.parses = False
    script.errors = [ParserError("UNSUPPORTED_NODE", "mask", "NonZero", "no plugin"), ParserError("X", "n", "", "d")]
    with pytest.raises(BuildFailed) as failure:
        _compile(module, tmp_path)
    assert failure.value.message.endswith(": UNSUPPORTED_NODE (NonZero): no plugin")
    assert (failure.value.stage, failure.value.node) == ("compile", "mask")
    assert failure.value.log.splitlines() == ["UNSUPPORTED_NODE mask: no plugin", "X n: d"]


def test_a_refused_profile_is_reported(module: Any, script: Script, tmp_path: Path) -> None:
    script.profile = -1
    with pytest.raises(BuildFailed, match=r" x: \[1, 3\] to \[8, 3\], tuned for \[4, 3\]$"):
        _compile(module, tmp_path)


def test_the_error_of_a_build_without_a_plan_comes_from_the_log(module: Any, script: Script, tmp_path: Path) -> None:
    script.plan = None
    script.logs = [(INFO, "started"), (ERROR, "node [name: conv1] has no tactic"), (ERROR, "gave up")]
    with pytest.raises(BuildFailed) as failure:
        _compile(module, tmp_path)
    assert failure.value.message.endswith(": node [name: conv1] has no tactic; gave up")
    assert (failure.value.node, failure.value.log) == ("conv1", "node [name: conv1] has no tactic\ngave up")
    assert not (tmp_path / "engine.plan").exists()


def test_a_plan_that_does_not_load_again_is_no_engine(module: Any, script: Script, tmp_path: Path) -> None:
    script.loads = False
    with pytest.raises(BuildFailed, match="cannot load"):
        _compile(module, tmp_path)


def test_progress_is_that_of_the_outermost_phase_and_never_raises(module: Any) -> None:
    updates: list[tuple[float, str]] = []

    def tell(progress: float, detail: str) -> None:
        updates.append((progress, detail))
        if progress > 0.5:
            raise OSError("nobody listens")

    monitor = module._Monitor(tell)
    monitor.phase_start("Building", None, 4)
    monitor.phase_start("Tactics", "Building", 100)
    steps = [("Tactics", 50), ("Building", 0), ("Building", 3), ("never begun", 1)]
    answers = [monitor.step_complete(*step) for step in steps]
    monitor.phase_finish("Tactics")
    assert updates == [(0.25, "Building"), (1.0, "Building")]
    assert answers == [True] * 4


@pytest.fixture
def cuda(module: Any, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = itertools.count(1)
    made = Recorder(script, allocate=lambda size: next(addresses), stream=lambda: 7)
    monkeypatch.setattr(module, "Cuda", lambda: made)


@pytest.mark.usefixtures("cuda")
def test_an_engine_runs_between_copies_both_ways(module: Any, script: Script, tmp_path: Path) -> None:
    compiled = _compile(module, tmp_path)
    with closing(module.TensorRT().load(_job(tmp_path), compiled)) as engine:
        outputs = engine.run({"x": np.zeros((4, 3), np.float32)})
    assert {name: (array.shape, array.dtype) for name, array in outputs.items()} == {"y": ((4, 3), np.float32)}
    assert script.called("set_tensor_address") == [["x", 1], ["y", 2]]
    ran = [call[0] for call in script.calls if call[0] in ("copy", "execute_async_v3", "synchronize")]
    assert ran == ["copy", "execute_async_v3", "copy", "synchronize"]
    assert {tuple(call[-2:]) for call in script.called("copy")} == {(48, 7)}, "twelve floats, on its stream"
    assert script.called("free") == [[2], [1]]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "fails", [("has_context",), ("selects_profiles",), ("selects_profiles", "raises"), ("takes_addresses",)]
)
def test_an_engine_that_cannot_run_is_reported(
    module: Any, script: Script, tmp_path: Path, fails: tuple[str, ...]
) -> None:
    compiled = _compile(module, tmp_path)
    for name in fails:
        setattr(script, name, False)
    with pytest.raises(BuildFailed) as it, closing(module.TensorRT().load(_job(tmp_path), compiled)) as engine:
        engine.run({"x": np.zeros((4, 3), np.float32)})
    assert it.value.stage == "verify"


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("most_bytes", "allocated"), [(-1, 48), (64, 64)])
def test_an_output_has_the_memory_that_tensorrt_may_write(
    module: Any, script: Script, tmp_path: Path, most_bytes: int, allocated: int
) -> None:
    compiled = _compile(module, tmp_path)
    script.most_bytes = most_bytes
    with closing(module.TensorRT().load(_job(tmp_path), compiled)) as engine:
        assert engine.run({"x": np.zeros((4, 3), np.float32)})["y"].nbytes == 48
    assert script.called("allocate") == [[48], [allocated]]


@pytest.mark.usefixtures("cuda")
def test_an_output_whose_shape_depends_on_the_data_is_allocated_during_the_run(
    module: Any, script: Script, tmp_path: Path
) -> None:
    compiled = _compile(module, tmp_path)
    script.output_shape = (-1, 3)
    inputs = {"x": np.zeros((4, 3), np.float32)}
    with closing(module.TensorRT().load(_job(tmp_path), compiled)) as engine:
        for count in (2, 1, 0, 4):
            script.data_shape = (count, 3)
            assert engine.run(inputs)["y"].shape == (count, 3)
            assert script.called("copy")[-1][1:] == [script.given, count * 3 * 4, 7]
        script.data_shape = None
        with pytest.raises(BuildFailed) as it:
            engine.run(inputs)
        assert (it.value.stage, "y" in it.value.message) == ("verify", True)
    allocated = len(script.called("allocate"))
    assert len(script.called("free")) == allocated, "all memory is freed"
    script.accepts_allocators = False
    with pytest.raises(BuildFailed), closing(module.TensorRT().load(_job(tmp_path), compiled)) as engine:
        engine.run(inputs)
