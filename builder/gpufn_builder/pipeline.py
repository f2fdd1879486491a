"""The work of a build process, without NATS: from a folder with a model's files to engines that passed.

    ingest → normalise → reference → transform → (compile → verify → measure) for each candidate

Each stage reports progress and adds a row to the report. The work starts in an empty folder, so a retried build repeats
the same work. The next stage, publish, needs NATS and is part of `build_job`.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from gpufn_builder.checks import golden, samples
from gpufn_builder.checks.inaccurate_output import InaccurateOutput
from gpufn_builder.checks.reference import observe, run_reference
from gpufn_builder.checks.rounding import rounding_floors
from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.steps import OnStep
from gpufn_builder.onnx_model.ingest import IngestLimits, ingest
from gpufn_builder.onnx_model.normalise import NormalModel, normalise
from gpufn_builder.onnx_model.profiles import resolve_profiles
from gpufn_builder.onnx_model.tensors import Arrays, describe_tensor
from gpufn_builder.precision.conversion import listed
from gpufn_builder.precision.engine_layers import Converted, EngineLayers
from gpufn_builder.precision.transform import TransformedModel, transform
from gpufn_builder.processes.candidates import RunCandidate, run_candidate
from gpufn_builder.processes.process import ReportProgress
from gpufn_builder.processes.process_messages import (
    MODEL,
    PUBLISH_BEGINS,
    SAMPLES,
    BuildRequest,
    BuildResult,
    BuiltEngine,
    CandidateRequest,
    CandidateResult,
    ProgressUpdate,
    one_line,
)
from gpufn_builder.report.report import CandidateRow, StageRow, engine_row, failed_row
from gpufn_core.domain.devices.engine import GOLDEN_FILE, BuildStage, EngineIdentity, EngineManifest
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ModelFile, Precision, ShapeProfile, TensorSpec, Tolerance, coarser
from gpufn_core.spec.units import format_bytes

# Progress of the whole build at the start of each stage. The candidates share the range from compile to publish.
BEGIN: Final = {
    BuildStage.INGEST: 0.02,
    BuildStage.NORMALISE: 0.04,
    BuildStage.REFERENCE: 0.07,
    BuildStage.TRANSFORM: 0.13,
    BuildStage.COMPILE: 0.20,
}
_SEED: Final = 20


@dataclass(frozen=True)
class Prepared:
    """The common input of all candidates. `cases` and `measured` are files written by `golden`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    batched: bool
    draws_random_numbers: bool
    arithmetic: Precision
    tolerance: Tolerance | None  # None: engines are not verified
    cases: dict[str, str]
    rounding_floors: tuple[dict[str, float], ...]
    measured: str
    remarks: tuple[str, ...]
    converted: Converted


class Pipeline:
    def __init__(
        self,
        request: BuildRequest,
        report_progress: ReportProgress,
        *,
        environ: Mapping[str, str],
        clock: Callable[[], float],
        now: Callable[[], float],
        run_candidate: RunCandidate = run_candidate,
    ) -> None:
        self._request = request
        self._spec = request.spec
        self._folder = Path(request.folder)
        self._report_progress = report_progress
        self._environ = environ
        self._clock = clock
        self._now = now
        self._run_candidate = run_candidate
        self._stages: list[StageRow] = []
        self._candidates: list[CandidateRow] = []

    def run(self) -> BuildResult:
        engines: tuple[BuiltEngine, ...] = ()
        info = None
        try:
            engines = self._compile_all(self._prepare())
        except BuildFailed as error:
            info = error.info()
        return BuildResult(engines=engines, stages=tuple(self._stages), candidates=tuple(self._candidates), error=info)

    def _prepare(self) -> Prepared:
        with self._stage(BuildStage.INGEST) as notes:
            source = ingest(self._folder / MODEL, self._spec, IngestLimits())
            notes.append(f"{source.nodes} nodes; {_files(self._spec.files)}")
        with self._stage(BuildStage.NORMALISE) as notes:
            model = normalise(source, self._folder_for("normal"), set_seeds=self._spec.verify)
            notes.append(_signature(model))
        with self._stage(BuildStage.REFERENCE) as notes:
            user_samples = self._samples(model)
            model = replace(model, batched=model.batched and samples.have_rows(user_samples))
            shapes = samples.sample_shapes(user_samples)
            profiles = resolve_profiles(model.inputs, self._spec, shapes, batched=model.batched)
            generated = samples.generate(model.inputs, profiles, _SEED, model.index_limits)
            cases = user_samples or generated
            on_step = self._steps_of(BuildStage.REFERENCE)
            reference = run_reference(model, cases, on_step, verify=self._spec.verify)
            model = observe(model, reference)
            notes.append(f"{len(cases)} {'samples' if user_samples else 'generated cases'}: {_listed(cases)}")
            notes.extend(f"{name} takes {ranged}" for profile in profiles for name, ranged in profile.inputs.items())
            arithmetic = coarser(self._spec.precision, model.arithmetic)
            tolerance = self._spec.accepted(arithmetic) if self._spec.verify else None
            floors = (
                rounding_floors(model, cases, reference, on_step) if tolerance and tolerance.limits_elements else []
            )
        on_gpu, on_cpu = (
            any(identity.backend.on_gpu is wanted for identity in self._request.candidates) for wanted in (True, False)
        )
        with self._stage(BuildStage.TRANSFORM) as notes:
            transformed = transform(
                model,
                self._spec.precision,
                cases,
                reference=reference,
                tolerance=tolerance,
                into=self._folder_for("transformed"),
                on_gpu=on_gpu,
                on_cpu=on_cpu,
                on_step=self._steps_of(BuildStage.TRANSFORM),
            )
            notes.append(transformed.summary)
            if transformed.kept:
                notes.append(f"kept in fp32 for accuracy: {', '.join(transformed.kept)}")
        return Prepared(
            inputs=model.inputs,
            outputs=model.outputs,
            profiles=profiles,
            batched=model.batched,
            draws_random_numbers=bool(model.random_nodes),
            arithmetic=arithmetic,
            tolerance=tolerance,
            rounding_floors=tuple(floors),
            cases=self._save_cases(cases, reference),
            measured=self._save_measured(cases, generated, profiles, batched=model.batched),
            remarks=self._remarks(model, transformed),
            converted=Converted(
                model,
                transformed,
                self._spec.precision,
                tolerance,
                {case.name: case for case in cases},
                on_gpu=on_gpu,
                on_cpu=on_cpu,
            ),
        )

    def _remarks(self, model: NormalModel, transformed: TransformedModel) -> tuple[str, ...]:
        remarks = []
        if transformed.kept:
            remarks.append(f"kept in fp32: {listed(transformed.kept)}; {transformed.first_difference}")
        if not self._spec.verify:
            remarks.append("not verified against the reference")
        if model.random_nodes:
            seeds = "with a seed" if self._spec.verify else "without a seed"
            remarks.append(f"draws random numbers {seeds}: {listed(model.random_nodes)}")
        return tuple(map(one_line, remarks))  # the model chooses the names of its nodes

    def _steps_of(self, stage: BuildStage) -> OnStep:
        return partial(self._report_progress, stage, BEGIN[stage])

    def _folder_for(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder

    def _samples(self, model: NormalModel) -> list[Case]:
        if self._spec.samples is None:
            return []
        return samples.read_samples(self._folder / SAMPLES / self._spec.samples.name, model.inputs)

    def _save_cases(self, cases: Sequence[Case], reference: Sequence[Arrays]) -> dict[str, str]:
        folder = self._folder_for("cases")
        saved = {}
        for index, (case, outputs) in enumerate(zip(cases, reference, strict=True)):
            path = folder / f"{index}.npz"
            golden.save(path, case.inputs, outputs)
            saved[case.name] = str(path)
        return saved

    def _save_measured(
        self, cases: Sequence[Case], generated: Sequence[Case], profiles: Sequence[ShapeProfile], *, batched: bool
    ) -> str:
        """Save a case with the shapes that the first profile is tuned for. It is made from the user's samples, if there
        are any, because generated inputs may make no sense to the model."""
        tuned = {name: ranged.opt for name, ranged in profiles[0].inputs.items()} if profiles else {}

        def is_tuned(case: Case) -> bool:
            return all(case.inputs[name].shape == shape for name, shape in tuned.items())

        case = (
            next(filter(is_tuned, cases), None)
            or samples.stretch(cases, tuned, batched=batched)
            or next(filter(is_tuned, generated))
        )
        path = self._folder / "measured.npz"
        golden.save(path, case.inputs, {})
        return str(path)

    def _compile_all(self, prepared: Prepared) -> tuple[BuiltEngine, ...]:
        """Compile all candidates. Raises BuildFailed if none passes: the error of the first."""
        engines = []
        failures: list[BuildFailed] = []
        seconds = dict.fromkeys((BuildStage.COMPILE, BuildStage.VERIFY, BuildStage.MEASURE), 0.0)
        span = (PUBLISH_BEGINS - BEGIN[BuildStage.COMPILE]) / len(self._request.candidates)
        for index, identity in enumerate(self._request.candidates):
            begin = BEGIN[BuildStage.COMPILE] + index * span
            try:
                result, engine = self._compile(identity, prepared, begin, span)
            except BuildFailed as error:
                failures.append(error)
                self._candidates.append(failed_row(identity, error.info()))
                continue
            engines.append(engine)
            row = engine_row(
                engine.manifest,
                seconds=result.seconds,
                outputs=result.outputs,
                quantiles_s=result.quantiles_s,
                nodes=result.nodes,
                notes=result.notes,
            )
            self._candidates.append(row)
            for stage in seconds:
                seconds[stage] += result.seconds.get(stage, 0.0)
        summary = f"{len(engines)} of {len(self._request.candidates)} candidates"
        self._stages.extend(StageRow(stage, spent, summary) for stage, spent in seconds.items())
        if not engines:
            raise failures[0]
        return tuple(engines)

    def _compile(
        self, identity: EngineIdentity, prepared: Prepared, begin: float, span: float
    ) -> tuple[CandidateResult, BuiltEngine]:
        """Compile one candidate. If the engine is not accurate enough, compile it again with more layers in fp32.
        Raises BuildFailed."""
        folder = self._folder / identity.backend
        numbers = itertools.count(1)

        def pass_on(progress: ProgressUpdate) -> None:
            detail = f"{identity.backend}: {progress.detail}" if progress.detail else str(identity.backend)
            self._report_progress(progress.stage, begin + progress.progress * span, detail)

        def run(request: CandidateRequest) -> CandidateResult:
            shutil.rmtree(request.folder, ignore_errors=True)
            return self._run_candidate(
                request, folder, self._environ, timeout_s=self._request.timeout_s, on_progress=pass_on
            )

        def run_engine(path: Path, outputs: Sequence[TensorSpec], case: Case) -> Arrays:
            values = folder / f"values-{next(numbers)}"
            request = self._candidate(identity, prepared, path, values)
            cases = {case.name: prepared.cases[case.name]}
            run(
                msgspec.structs.replace(
                    request, outputs=tuple(outputs), cases=cases, tolerance=None, batched=False, measuring=None
                )
            )
            try:
                return golden.load(values / GOLDEN_FILE, (), outputs)[1]
            except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
                message = f"the values of the engine cannot be read: {error}"
                raise BuildFailed(message, stage=BuildStage.VERIFY) from error
            finally:
                shutil.rmtree(values, ignore_errors=True)

        layers = EngineLayers(
            prepared.converted,
            self._folder / "transformed" / identity.backend,
            run_engine,
            for_gpu=identity.backend.on_gpu,
            on_step=lambda step: self._report_progress(BuildStage.VERIFY, begin, f"{identity.backend}: {step}"),
        )
        engine = folder / "engine"
        while True:
            request = self._candidate(identity, prepared, layers.path, engine)
            try:
                result = run(request)
            except InaccurateOutput as failure:
                if request.draws_other_numbers or not layers.keep_more(failure):
                    raise layers.explained(failure) from failure
                continue
            remarks = (*prepared.remarks, one_line(layers.remark)) if layers.remark else prepared.remarks
            return result, BuiltEngine(self._manifest(identity, prepared, result, engine, remarks), str(engine))

    def _candidate(self, identity: EngineIdentity, prepared: Prepared, model: Path, into: Path) -> CandidateRequest:
        return CandidateRequest(
            identity=identity,
            model=str(model),
            inputs=prepared.inputs,
            outputs=prepared.outputs,
            profiles=prepared.profiles,
            tolerance=prepared.tolerance,
            batched=prepared.batched,
            cases=prepared.cases,
            rounding_floors=prepared.rounding_floors,
            draws_other_numbers=prepared.draws_random_numbers and identity.backend.on_gpu,
            measured=prepared.measured,
            folder=str(into),
            caches=self._request.caches,
            memory_limit_bytes=self._request.memory_limit_bytes,
            disk_limit_bytes=self._request.disk_limit_bytes,
            measuring=self._request.measuring,
        )

    def _manifest(
        self,
        identity: EngineIdentity,
        prepared: Prepared,
        result: CandidateResult,
        folder: Path,
        remarks: tuple[str, ...],
    ) -> EngineManifest:
        return EngineManifest(
            key=identity.key,
            identity=identity,
            model=self._spec.files[0].name,
            inputs=prepared.inputs,
            outputs=prepared.outputs,
            profiles=prepared.profiles,
            batched=not result.why_alone,
            why_alone=result.why_alone,
            remarks=remarks,
            max_batch=self._spec.max_batch,
            files=tuple(_file(folder / name) for name in result.files),
            settings=result.settings,
            accuracy=result.accuracy,
            latency=result.latency,
            built_at=self._now(),
            arithmetic=prepared.arithmetic,
            driver=self._request.target.driver if identity.backend.on_gpu else "",
            gpu_nodes=result.gpu_nodes,
            cpu_nodes=result.cpu_nodes,
        )

    @contextmanager
    def _stage(self, stage: BuildStage) -> Iterator[list[str]]:
        """Add a row to the report, with the notes that are added to the list, or the error."""
        self._report_progress(stage, BEGIN[stage], "")
        began = self._clock()
        notes: list[str] = []
        try:
            yield notes
        except BuildFailed as error:
            notes = [error.message]
            raise
        finally:
            self._stages.append(StageRow(stage, self._clock() - began, "; ".join(notes)))


def _file(path: Path) -> ModelFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ModelFile(path.name, digest, path.stat().st_size)


def _files(files: Sequence[ModelFile]) -> str:
    return f"{len(files)} file{'s' if len(files) > 1 else ''}, {format_bytes(sum(file.size for file in files))}"


def _signature(model: NormalModel) -> str:
    inputs = ", ".join(map(describe_tensor, model.inputs)) or "nothing"
    outputs = ", ".join(map(describe_tensor, model.outputs))
    return f"{inputs} → {outputs}"


def _listed(cases: Sequence[Case]) -> str:
    limit = 6
    names = ", ".join(case.name for case in cases[:limit])
    return f"{names}, …" if len(cases) > limit else names
