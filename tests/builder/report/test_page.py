"""The report's page: complete, escaped and self-contained."""

from __future__ import annotations

import html.parser
import re
from typing import Any

import msgspec

from gpufn_builder.report import page
from gpufn_builder.report.report import BuildReport, CandidateRow, OutputRow, StageRow
from gpufn_core.domain.devices.engine import Accuracy, Backend, BuildStage, BuildState, Latency
from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.model_spec import ModelFile, Precision, ShapeProfile, ShapeRange, TensorSpec, Tolerance

_STAGES = {BuildStage.COMPILE: 41.5, BuildStage.VERIFY: 0.9, BuildStage.MEASURE: 3.4}
_FOUND = {
    BuildStage.INGEST: "53 nodes; 2 files, 44.65 MiB",
    BuildStage.NORMALISE: "images FP32[-1,3,224,224] → logits FP32[-1,1000]",
    BuildStage.REFERENCE: "3 generated cases: min shapes, opt shapes, max shapes",
    BuildStage.TRANSFORM: "53 nodes in fp16",
    BuildStage.COMPILE: "2 of 2 candidates",
    BuildStage.VERIFY: "2 of 2 candidates",
    BuildStage.MEASURE: "2 of 2 candidates",
    BuildStage.PUBLISH: "0a3f91c2d8e4 (tensorrt), 5b11f0a9c7d2 (onnxruntime-cpu)",
}


def _row(backend: Backend, scale_s: float, **fields: Any) -> CandidateRow:
    return CandidateRow(
        backend=backend,
        key="0a3f91c2d8e4" + 52 * "0",
        seconds=_STAGES,
        size=24_100_000,
        accuracy=Accuracy(1.2e-2, 8.4e-4, 0.999999),
        latency=Latency(scale_s, scale_s * 1.08, scale_s * 1.31, 1 / scale_s, settled=True),
        quantiles_s=tuple(scale_s * (0.93 + 0.07 * (part / 50) ** 2 + 0.3 * (part / 100) ** 40) for part in range(101)),
        versions={"tensorrt": "tensorrt-cu13-bindings 11.4.0"},
        flags={"builder_optimization_level": "3", "tf32": "0"},
        settings={"intra_op_threads": 4},
        outputs=tuple(
            OutputRow(f"{point} shapes", "logits", "float16", (batch, 1000), 0.012, 0.004, 8.4e-4, 0.999999, 1.0, 0)
            for point, batch in (("min", 1), ("opt", 8), ("max", 32))
        ),
        **fields,
    )


REPORT = BuildReport(
    build="01m7z8r6vakve45hxpvkbz2ftg",
    model="resnet18.onnx",
    files=(ModelFile("resnet18.onnx", "a" * 64, 120_000), ModelFile("resnet18.onnx.data", "b" * 64, 46_700_000)),
    precision=Precision.FP16,
    tolerance=Tolerance(rel_l2=5e-3, cosine=0.9995),
    device="NVIDIA L4",
    compute_capability="8.9",
    driver="580.65.06",
    state=BuildState.SUCCEEDED,
    started_at=1_795_000_000.0,
    seconds=58.2,
    inputs=(TensorSpec("images", "FP32", (-1, 3, 224, 224)),),
    outputs=(TensorSpec("logits", "FP32", (-1, 1000)),),
    profiles=(ShapeProfile({"images": ShapeRange((1, 3, 224, 224), (8, 3, 224, 224), (32, 3, 224, 224))}),),
    batched=True,
    max_batch=32,
    stages=tuple(StageRow(stage, _STAGES.get(stage, 0.8), _FOUND[stage]) for stage in BuildStage),
    candidates=(
        _row(
            Backend.TENSORRT, 0.00112, gpu_nodes=31, nodes={"Convolution on TensorRT": 20, "Reformat on TensorRT": 11}
        ),
        CandidateRow(backend=Backend.ORT_CUDA, reason="it is not installed here"),
        _row(
            Backend.ORT_CPU,
            0.0031,
            cpu_nodes=49,
            nodes={"Conv on CPUExecutionProvider": 20, "Relu on CPUExecutionProvider": 29},
            notes=("1 thread: 8.1 ms", "2 threads: 4.4 ms", "4 threads: 3.1 ms"),
        ),
    ),
)
FAILED = msgspec.structs.replace(
    REPORT,
    state=BuildState.FAILED,
    stages=REPORT.stages[:4],
    candidates=(
        CandidateRow(backend=Backend.TENSORRT, key="0" * 64, reason="compile: no kernel for NonZero", log="[E] at 3"),
    ),
    error=ErrorInfo(
        "build_failed", "no kernel for NonZero", stage="compile", node="mask/NonZero", traceback="[E] at 3"
    ),
)


class _Reader(html.parser.HTMLParser):
    """Collects tags with attributes, their balance, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data.strip()


def test_a_page_has_all_data_of_the_report() -> None:
    read = _Reader(page.render(REPORT))
    assert read.open == []
    for expected in (
        "resnet18.onnx", "succeeded", "fp16 on NVIDIA L4 · 8.9", "1.12 ms", "893", "it is not installed here",
        "[1, 3, 224, 224] to [32, 3, 224, 224], tuned for [8, 3, 224, 224]", "rel. L2 ≤ 0.005, cosine ≥ 0.9995",
        "TensorRT: 20 Convolution, 11 Reformat", "4 threads: 3.1 ms", "publish", "580.65.06", "b" * 64,
    ):  # fmt: skip
        assert expected in read.text, expected
    assert len([tag for tag, _ in read.tags if tag == "polyline"]) == 2


def test_a_plot_with_few_slow_runs_is_in_powers_of_ten() -> None:
    row = msgspec.structs.replace(_row(Backend.ORT_CPU, 65e-6), latency=Latency(65e-6, 120e-6, 8.8e-3, 1e4, True))
    read = _Reader(page.render(msgspec.structs.replace(REPORT, candidates=(row,))))
    assert "10 µs100 µs1 ms10 ms" in read.text
    assert "01 ms2 ms" not in read.text


def test_a_page_shows_the_shapes_of_every_profile() -> None:
    profiles = tuple(ShapeProfile({"images": ShapeRange((1, 3), (rows, 3), (rows, 3))}) for rows in (4, 16))
    page_ = page.render(msgspec.structs.replace(REPORT, profiles=profiles))
    assert "[1, 3] to [4, 3], tuned for [4, 3]; [1, 3] to [16, 3], tuned for [16, 3]" in page_


def test_a_failed_build_shows_the_reason_first() -> None:
    read = _Reader(page.render(FAILED))
    assert read.text.index("NonZero") < read.text.index("Candidates")
    assert "compile · node mask/NonZero" in read.text
    assert "[E] at 3" in read.text
    assert "polyline" not in {tag for tag, _ in read.tags}


def test_a_build_that_failed_before_its_candidates_shows_no_reason_for_them() -> None:
    read = _Reader(page.render(msgspec.structs.replace(FAILED, candidates=())))
    assert "No candidates" in read.text


def test_a_page_needs_nothing_from_outside() -> None:
    source = page.render(REPORT) + page.render(FAILED)
    assert {tag for tag, _ in _Reader(source).tags} & {"script", "link", "img", "iframe", "object", "base"} == set()
    assert re.findall(r"https?:|url\(|@import|\bsrc=|\bhref=|\bon\w+=", source) == []


def test_every_text_of_a_report_is_escaped() -> None:
    mark = "<script>alert('1')</script>\"&"
    source = page.render(_marked(REPORT, mark))
    assert "<script" not in source
    texts = source.count("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&#34;&amp;")
    assert texts > 20
    assert source.count("alert") == texts
    assert _Reader(source).open == []
    _Reader(page.render(_marked(FAILED, mark)))


def _marked(value: Any, mark: str) -> Any:
    """Return `value` with every text replaced, except the values of our own enums."""
    if isinstance(value, msgspec.Struct):
        fields = {name: _marked(getattr(value, name), mark) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields) if not isinstance(value, ModelFile) else value
    if isinstance(value, tuple):
        return tuple(_marked(each, mark) for each in value)
    if isinstance(value, dict):
        return {_marked(key, mark): _marked(each, mark) for key, each in value.items()}
    return mark if type(value) is str else value


def test_a_report_travels_as_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=BuildReport) == REPORT
