"""One build as the service runs it: reuses existing engines, builds and publishes the missing ones.

1. Check the signature of the deploy, before anything reads the model.
2. Compute the EngineKey of each candidate and look up its engine.
3. For the missing ones fetch the model's files and run the build process (`pipeline`), under a lease per engine.
4. Publish the engines that passed, order them (`backend_choice`), and write a report.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from gpufn_builder import backend_choice, identity
from gpufn_builder.identity import Target
from gpufn_builder.measurement_pause import MeasurementPauses
from gpufn_builder.processes.process import ChildProcess, disk_error, environment
from gpufn_builder.processes.process_messages import (
    MODEL,
    PUBLISH_BEGINS,
    SAMPLES,
    THOROUGH,
    BuildRequest,
    BuildResult,
    MeasurePlan,
    ProgressUpdate,
)
from gpufn_builder.processes.sandboxes import BuildSandboxes
from gpufn_builder.report import page
from gpufn_builder.report.report import BuildReport, CandidateRow, StageRow, engine_row
from gpufn_builder.result_check import check
from gpufn_builder.store import Store
from gpufn_core.domain.devices.engine import Backend, Build, BuildStage, BuildState, EngineIdentity, EngineManifest
from gpufn_core.errors import BuildFailed, ErrorInfo, UntrustedDeploy
from gpufn_platform.process.clock import Clock
from gpufn_platform.signing.signatures import Signatures

PROCESS: Final = "gpufn_builder.processes.build_process"
_GRACE_S: Final = 5.0  # the build process also knows the timeout, and continues after a candidate without progress
TIMEOUT_S: Final = 600.0
_THREADS: Final = 1024

OnProgress = Callable[[ProgressUpdate], None]
OnHeld = Callable[[int], None]  # bytes


class BuildOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a build: fields of its record."""

    engines: tuple[str, ...] = ()
    cached: bool = False
    error: ErrorInfo | None = None
    remarks: tuple[str, ...] = ()
    report: str = ""
    page: str = ""

    @property
    def state(self) -> BuildState:
        return BuildState.FAILED if self.error else BuildState.SUCCEEDED


class BuildExecutor:
    def __init__(
        self,
        store: Store,
        *,
        signatures: Signatures,
        folder: Path,
        caches: Path,
        environ: Mapping[str, str],
        clock: Clock,
        memory_limit_bytes: int,
        disk_limit_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
        measuring: MeasurePlan = THOROUGH,
        process: str = PROCESS,
        sandboxes: BuildSandboxes | None = None,
    ) -> None:
        """Without `sandboxes` build processes are not confined."""
        self._store = store
        self._signatures = signatures
        self._folder = folder
        self._caches = caches
        self._environ = environ
        self._clock = clock
        self._memory_limit_bytes = memory_limit_bytes
        self._disk_limit_bytes = disk_limit_bytes
        self._timeout_s = timeout_s
        self._measuring = measuring
        self._process = process
        self._sandboxes = sandboxes
        self._pauses = MeasurementPauses()
        # Each build has a thread that waits for its process. The default pool has few threads, and others need them.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="build")

    def sweep(self) -> None:
        """Remove the folders of builds that an earlier process left."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run(
        self, build: Build, target: Target, on_progress: OnProgress, on_held: OnHeld | None = None
    ) -> BuildOutcome:
        """Run a build. If the model cannot be built, the outcome has the error. Raises BusUnavailable. Cancelling stops
        the build process. `on_held` receives the memory that its processes hold, from another thread."""
        run = _ActiveBuild(build, target, on_held)
        began, started_at = self._clock.monotonic(), self._clock.time()
        try:
            await self._signatures.verify_build(build)
            await self._find_or_build(run, on_progress)
            run.check()
        except (BuildFailed, UntrustedDeploy) as error:
            run.error = error.info()
        report = run.report(started_at, self._clock.monotonic() - began)
        outcome = BuildOutcome(engines=run.passed(), cached=not run.compiled, error=run.error, remarks=run.remarks())
        try:
            return msgspec.structs.replace(
                outcome,
                report=await self._store.put_report(msgspec.json.encode(report)),
                page=await self._store.put_report(page.render(report).encode()),
            )
        except BuildFailed as error:  # the disk may be full; the engines, if any, are published anyway
            return outcome if outcome.engines or outcome.error else msgspec.structs.replace(outcome, error=error.info())

    async def _find_or_build(self, run: _ActiveBuild, on_progress: OnProgress) -> None:
        if await self._look_up(run):
            return
        waiting = ProgressUpdate(BuildStage.COMPILE, 0.0, "waiting for another build of the same model")
        async with self._store.exclusive(run.missing[0].key, run.build.id, lambda: on_progress(waiting)):
            if not await self._look_up(run):
                await self._build(run, on_progress)

    async def _look_up(self, run: _ActiveBuild) -> bool:
        """Add the engines that already exist to `run`. Return whether none is missing."""
        for candidate in run.missing:
            if (manifest := await self._store.find(candidate.key)) is not None:
                run.add_engine(manifest, engine_row(manifest, found=True))
        return not run.missing

    async def _build(self, run: _ActiveBuild, on_progress: OnProgress) -> None:
        folder = self._folder / run.build.id
        run.compiled = True
        try:
            await asyncio.to_thread(_make_empty, folder)
            spec = run.build.model
            await self._store.fetch(spec.files, folder / MODEL)
            await self._store.fetch([spec.samples] if spec.samples else [], folder / SAMPLES)
            request = self._request(run, folder)
            result = await self._in_process(run, request, folder, on_progress)
            for engine in result.engines:
                await asyncio.to_thread(check, engine, request.candidates, folder)
            run.stages, run.error = result.stages, result.error
            rows = {row.backend: row for row in result.candidates}
            run.rows |= {row.backend: row for row in result.candidates if not row.passed}
            began = self._clock.monotonic()
            for engine in result.engines:
                on_progress(ProgressUpdate(BuildStage.PUBLISH, PUBLISH_BEGINS, str(engine.manifest.backend)))
                manifest = await self._store.publish(engine.manifest, Path(engine.folder))
                run.add_engine(manifest, rows.get(manifest.backend, engine_row(manifest, found=True)))
            if result.engines:
                manifests = [engine.manifest for engine in result.engines]
                engines = ", ".join(f"{manifest.key[:12]} ({manifest.backend})" for manifest in manifests)
                run.stages = (*run.stages, StageRow(BuildStage.PUBLISH, self._clock.monotonic() - began, engines))
        except OSError as error:
            raise disk_error(error, BuildStage.INGEST) from error
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    def _request(self, run: _ActiveBuild, folder: Path) -> BuildRequest:
        spec = run.build.model
        return BuildRequest(
            build=run.build.id,
            spec=spec,
            target=run.target,
            candidates=tuple(run.missing),
            folder=str(folder),
            caches=str(self._caches),
            timeout_s=spec.build_timeout_s or self._timeout_s,
            memory_limit_bytes=min(spec.memory_limit_bytes or self._memory_limit_bytes, self._memory_limit_bytes),
            disk_limit_bytes=self._disk_limit_bytes,
            measuring=self._measuring,
        )

    async def _in_process(
        self, run: _ActiveBuild, request: BuildRequest, folder: Path, on_progress: OnProgress
    ) -> BuildResult:
        loop = asyncio.get_running_loop()
        environ = environment(self._environ, gpu=request.target.uuid)
        sandbox = None
        if self._sandboxes is not None:
            self._caches.mkdir(parents=True, exist_ok=True)  # to be seen in the sandbox
            sandbox = self._sandboxes.build(folder, self._caches, has_gpu=request.target.is_gpu)
        writes_to = (folder, self._caches)
        work = ChildProcess(
            self._process, request, folder, environ, name="the build", sandbox=sandbox, writes_to=writes_to
        )

        with self._pauses.add(run.name, work, on_progress) as process:

            def report_progress(progress: ProgressUpdate) -> None:
                loop.call_soon_threadsafe(process.on_progress, progress)

            def wait() -> BuildResult:
                return work.wait(report_progress, BuildResult, request.timeout_s, grace_s=_GRACE_S, on_held=run.on_held)

            waiting = loop.run_in_executor(self._threads, wait)
            try:
                return await asyncio.shield(waiting)
            except asyncio.CancelledError:
                work.end()
                with contextlib.suppress(BuildFailed):
                    await waiting
                raise


class _ActiveBuild:
    """The state of a build in progress: its candidates, their engines, and a report row for each."""

    def __init__(self, build: Build, target: Target, on_held: OnHeld | None) -> None:
        self.build = build
        self.target = target
        self.on_held = on_held
        self.compiled = False
        self.error: ErrorInfo | None = None
        self.stages: tuple[StageRow, ...] = ()
        self._manifests: dict[Backend, EngineManifest] = {}
        self.rows: dict[Backend, CandidateRow] = {}
        self._chain = identity.chain(build.model, target)
        self.missing: list[EngineIdentity] = []
        for backend in self._chain:
            if (versions := identity.installed().get(backend)) is None:
                self.rows[backend] = CandidateRow(backend=backend, reason="it is not installed here")
            else:
                self.missing.append(identity.identity(build.model, target, backend, versions))

    @property
    def name(self) -> str:
        model = self.build.model.files[0].name
        return f"{model} of {self.build.function}" if self.build.function else model

    def add_engine(self, manifest: EngineManifest, row: CandidateRow) -> None:
        """Add an existing engine."""
        self.missing = [each for each in self.missing if each.key != manifest.key]
        self._manifests[manifest.backend] = manifest
        self.rows[manifest.backend] = row

    def passed(self) -> tuple[str, ...]:
        """Return the EngineKeys, the best first."""
        if self.error is not None:
            return ()
        return tuple(self._manifests[backend].key for backend in self._ranked())

    def _ranked(self) -> tuple[Backend, ...]:
        passed = [backend for backend in self._chain if backend in self._manifests]
        return backend_choice.ranked({backend: self._manifests[backend].latency for backend in passed})

    def _ranked_rows(self) -> tuple[CandidateRow, ...]:
        """Return the rows in the order of the chain, and those with an engine among themselves the best first."""
        best = iter(self._ranked())
        order = (next(best) if backend in self._manifests else backend for backend in self._chain)
        return tuple(self.rows[backend] for backend in order if backend in self.rows)

    def remarks(self) -> tuple[str, ...]:
        """Return the remarks on the best engine."""
        passed = self.passed()
        return next((each.remarks for each in self._manifests.values() if each.key in passed[:1]), ())

    def check(self) -> None:
        """Raise BuildFailed if no engine exists and there is no other error. If all candidates were refused, the error
        names each with its reason."""
        if self._manifests:
            self.error = None  # an existing engine suffices, even if a better one could not be built
        elif self.error is None:
            raise BuildFailed(self._no_engine_reason(), stage=BuildStage.COMPILE)
        elif len(self._chain) > 1 and self.rows.keys() >= set(self._chain):
            self.error = msgspec.structs.replace(self.error, message=self._no_engine_reason())

    def _no_engine_reason(self) -> str:
        reasons = "; ".join(f"{backend}: {self.rows[backend].reason}" for backend in self._chain)
        text = f"no engine can be built for {self.target.kind}: {reasons}"
        if self.target.is_gpu and not self.build.model.allow_cpu:
            text += ". To compute on the CPU of a node with a GPU, set allow_cpu=True (--allow-cpu)"
        return text

    def report(self, started_at: float, seconds: float) -> BuildReport:
        spec, order = self.build.model, self._ranked()
        first = self._manifests[order[0]] if order else None
        return BuildReport(
            build=self.build.id,
            model=spec.files[0].name,
            files=spec.files,
            precision=spec.precision,
            tolerance=spec.accepted(first.arithmetic if first else spec.precision),
            device=self.target.kind,
            compute_capability=self.target.compute_capability,
            driver=self.target.driver,
            state=BuildState.FAILED if self.error else BuildState.SUCCEEDED,
            started_at=started_at,
            seconds=seconds,
            inputs=first.inputs if first else (),
            outputs=first.outputs if first else (),
            profiles=first.profiles if first else spec.profiles,
            batched=first.batched if first else False,
            why_alone=first.why_alone if first else "",
            max_batch=spec.max_batch,
            stages=self.stages,
            candidates=self._ranked_rows(),
            error=self.error,
        )


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for inner in (MODEL, SAMPLES):
        (folder / inner).mkdir(parents=True)
