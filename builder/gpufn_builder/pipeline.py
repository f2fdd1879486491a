"""One build, without the bus: a folder with a model's files in, engines that passed out. Runs in a process of its own.

    ingest → normalise → reference → transform → (compile → verify → measure) for each candidate

Each stage tells how far it is and leaves a row for the report. It begins in an empty folder, so a build that is run
again does the same again. What follows, publish, needs the bus and is the service's (`building`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from gpufn_builder.checks import golden, samples
from gpufn_builder.checks.reference import observe, run_reference
from gpufn_builder.checks.samples import Case
from gpufn_builder.onnx_model.ingest import IngestLimits, ingest
from gpufn_builder.onnx_model.normalise import NormalModel, normalise
from gpufn_builder.onnx_model.profiles import resolve_profiles
from gpufn_builder.onnx_model.tensors import Arrays, described
from gpufn_builder.precision.transform import transform
from gpufn_builder.processes.candidates import RunCandidate, run_candidate
from gpufn_builder.processes.process import Tell
from gpufn_builder.processes.process_messages import (
    MODEL,
    PUBLISH_BEGINS,
    SAMPLES,
    BuildRequest,
    BuildResult,
    CandidateRequest,
    CandidateResult,
    MadeEngine,
    Told,
)
from gpufn_builder.report.markup import size
from gpufn_builder.report.report import CandidateRow, StageRow, failed_row
from gpufn_core.domain.engine import BuildStage, EngineIdentity, EngineManifest
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ModelFile, Precision, ShapeProfile, TensorSpec, coarser

# Of the whole build's progress: where each stage begins. The candidates share what is from compile to publish.
BEGIN: Final = {
    BuildStage.INGEST: 0.02,
    BuildStage.NORMALISE: 0.04,
    BuildStage.REFERENCE: 0.07,
    BuildStage.TRANSFORM: 0.13,
    BuildStage.COMPILE: 0.20,
}
_SEED: Final = 20


class Prepared(msgspec.Struct, frozen=True):
    """What all candidates start from. `cases` and `measured` are files as `golden` writes them."""

    model: Path
    cpu_model: Path  # the same for a backend that lacks operators of the asked precision
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    batched: bool
    arithmetic: Precision
    cases: dict[str, str]
    measured: str


class Pipeline:
    def __init__(
        self,
        request: BuildRequest,
        tell: Tell,
        *,
        environ: Mapping[str, str],
        clock: Callable[[], float],
        now: Callable[[], float],
        run_candidate: RunCandidate = run_candidate,
    ) -> None:
        self._request = request
        self._spec = request.spec
        self._folder = Path(request.folder)
        self._tell = tell
        self._environ = environ
        self._clock = clock
        self._now = now
        self._run_candidate = run_candidate
        self._must_end_at = clock() + request.spec.max_build_s
        self._stages: list[StageRow] = []
        self._candidates: list[CandidateRow] = []

    def run(self) -> BuildResult:
        try:
            engines = self._compile_all(self._prepare())
        except BuildFailed as error:
            return BuildResult(stages=tuple(self._stages), candidates=tuple(self._candidates), error=error.info())
        return BuildResult(engines=engines, stages=tuple(self._stages), candidates=tuple(self._candidates))

    # --- once for all candidates --------------------------------------------------------------------------------------

    def _prepare(self) -> Prepared:
        with self._stage(BuildStage.INGEST) as found:
            source = ingest(self._folder / MODEL, self._spec, IngestLimits())
            found.append(f"{source.nodes} nodes; {_files(self._spec.files)}")
        with self._stage(BuildStage.NORMALISE) as found:
            model = normalise(source, self._folder_for("normal"))
            found.append(_signature(model))
        with self._stage(BuildStage.REFERENCE) as found:
            given = self._samples(model)
            model = replace(model, batched=model.batched and samples.have_rows(given))
            profiles = resolve_profiles(model.inputs, self._spec, samples.sample_shapes(given), batched=model.batched)
            generated = samples.generate(model.inputs, profiles, _SEED)
            cases = given or generated
            reference = run_reference(model, cases)
            model = observe(model, reference)
            found.append(f"{len(cases)} {'samples' if given else 'generated cases'}: {_listed(cases)}")
            found.extend(f"{name} takes {ranged}" for profile in profiles for name, ranged in profile.inputs.items())
        arithmetic = coarser(self._spec.precision, model.arithmetic)
        with self._stage(BuildStage.TRANSFORM) as found:
            transformed = transform(
                model,
                self._spec.precision,
                cases,
                reference=reference,
                tolerance=self._spec.accepted(arithmetic),
                into=self._folder_for("transformed"),
            )
            found.append(transformed.found)
        return Prepared(
            model=transformed.path,
            cpu_model=transformed.cpu_path,
            inputs=model.inputs,
            outputs=model.outputs,
            profiles=profiles,
            batched=model.batched,
            arithmetic=arithmetic,
            cases=self._saved(cases, reference),
            measured=self._measured(cases, generated, profiles, batched=model.batched),
        )

    def _folder_for(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder

    def _samples(self, model: NormalModel) -> list[Case]:
        if self._spec.samples is None:
            return []
        return samples.read_samples(self._folder / SAMPLES / self._spec.samples.name, model.inputs)

    def _saved(self, cases: Sequence[Case], reference: Sequence[Arrays]) -> dict[str, str]:
        folder = self._folder_for("cases")
        saved = {}
        for index, (case, outputs) in enumerate(zip(cases, reference, strict=True)):
            path = folder / f"{index}.npz"
            golden.save(path, case.inputs, outputs)
            saved[case.name] = str(path)
        return saved

    def _measured(
        self, cases: Sequence[Case], generated: Sequence[Case], profiles: Sequence[ShapeProfile], *, batched: bool
    ) -> str:
        """A case with the shapes that the first profile is tuned for. Of what is in the user's samples, where there are
        such: of generated inputs it is not known whether they make sense to the model."""
        tuned = {name: ranged.opt for name, ranged in profiles[0].inputs.items()} if profiles else {}

        def is_tuned(case: Case) -> bool:
            return all(case.inputs[name].shape == shape for name, shape in tuned.items())

        case = (
            next(filter(is_tuned, cases), None)
            or samples.stretched(cases, tuned, batched=batched)
            or next(filter(is_tuned, generated))
        )
        path = self._folder / "measured.npz"
        golden.save(path, case.inputs, {})
        return str(path)

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _compile_all(self, prepared: Prepared) -> tuple[MadeEngine, ...]:
        """Raises BuildFailed when none passes: the failure itself of the only one, or what became of each."""
        made = []
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
            made.append(engine)
            self._candidates.append(_passed_row(engine.manifest, result))
            for stage in seconds:
                seconds[stage] += result.seconds.get(stage, 0.0)
        found = f"{len(made)} of {len(self._request.candidates)} candidates"
        self._stages.extend(StageRow(stage, spent, found) for stage, spent in seconds.items())
        if not made:
            raise _none_passed(self._candidates, failures)
        return tuple(made)

    def _compile(
        self, identity: EngineIdentity, prepared: Prepared, begin: float, span: float
    ) -> tuple[CandidateResult, MadeEngine]:
        folder = self._folder / identity.backend
        engine = folder / "engine"
        request = CandidateRequest(
            identity=identity,
            model=str(prepared.model if identity.backend.on_gpu else prepared.cpu_model),
            inputs=prepared.inputs,
            outputs=prepared.outputs,
            profiles=prepared.profiles,
            tolerance=self._spec.accepted(prepared.arithmetic),
            batched=prepared.batched,
            cases=prepared.cases,
            measured=prepared.measured,
            folder=str(engine),
            caches=self._request.caches,
            memory_limit_bytes=self._request.memory_limit_bytes,
            measuring=self._request.measuring,
        )

        def pass_on(told: Told) -> None:
            detail = f"{identity.backend}: {told.detail}" if told.detail else str(identity.backend)
            self._tell(told.stage, begin + told.progress * span, detail)

        result = self._run_candidate(
            request,
            folder,
            self._environ,
            timeout_s=max(1.0, self._must_end_at - self._clock()),
            on_told=pass_on,
        )
        return result, MadeEngine(self._manifest(identity, prepared, result, engine), str(engine))

    def _manifest(
        self, identity: EngineIdentity, prepared: Prepared, result: CandidateResult, folder: Path
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
        """Its row in the report: what is put into the list, or why it failed."""
        self._tell(stage, BEGIN[stage], "")
        began = self._clock()
        found: list[str] = []
        try:
            yield found
        except BuildFailed as error:
            found = [error.message]
            raise
        finally:
            self._stages.append(StageRow(stage, self._clock() - began, "; ".join(found)))


def _passed_row(manifest: EngineManifest, result: CandidateResult) -> CandidateRow:
    identity = manifest.identity
    return CandidateRow(
        backend=identity.backend,
        key=manifest.key,
        seconds=result.seconds,
        size=manifest.size,
        settings=result.settings,
        flags=identity.flags,
        versions=identity.versions,
        accuracy=result.accuracy,
        outputs=result.outputs,
        latency=result.latency,
        quantiles_s=result.quantiles_s,
        gpu_nodes=result.gpu_nodes,
        cpu_nodes=result.cpu_nodes,
        nodes=result.nodes,
        notes=result.notes,
    )


def _none_passed(rows: Sequence[CandidateRow], failures: Sequence[BuildFailed]) -> BuildFailed:
    first = failures[0]
    if len(failures) == 1:
        return first
    each = "; ".join(f"{row.backend} ({row.reason})" for row in rows)
    return BuildFailed(f"no candidate passed: {each}", stage=first.stage, node=first.node, log=first.log)


def _file(path: Path) -> ModelFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ModelFile(path.name, digest, path.stat().st_size)


def _files(files: Sequence[ModelFile]) -> str:
    return f"{len(files)} file{'s' if len(files) > 1 else ''}, {size(sum(file.size for file in files))}"


def _signature(model: NormalModel) -> str:
    takes = ", ".join(map(described, model.inputs)) or "nothing"
    gives = ", ".join(map(described, model.outputs))
    return f"{takes} → {gives}"


def _listed(cases: Sequence[Case]) -> str:
    most = 6
    names = ", ".join(case.name for case in cases[:most])
    return f"{names}, …" if len(cases) > most else names
