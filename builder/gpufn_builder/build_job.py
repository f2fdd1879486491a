"""One Build as the service runs it: what was built before is looked up, what is missing is built and published.

1. the EngineKey of each candidate, and the engines that there are under them
2. for the others: the model's files, and a process that builds (`pipeline`), while nobody else builds the same
3. what passed is published, and told in a report
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from gpufn_builder import identity
from gpufn_builder.identity import Target
from gpufn_builder.processes.process import Work, disk_failed, environment
from gpufn_builder.processes.process_messages import (
    MODEL,
    PUBLISH_BEGINS,
    SAMPLES,
    THOROUGH,
    BuildRequest,
    BuildResult,
    MeasurePlan,
    Told,
)
from gpufn_builder.report import page
from gpufn_builder.report.report import BuildReport, CandidateRow, StageRow, failed_row, found_row
from gpufn_builder.result_check import check
from gpufn_builder.store import Store
from gpufn_core.domain.engine import Backend, Build, BuildStage, BuildState, EngineIdentity, EngineManifest
from gpufn_core.errors import BuildFailed, ErrorInfo
from gpufn_platform.process.clock import Clock

PROCESS: Final = "gpufn_builder.processes.build_process"
_GRACE_S: Final = 5.0  # the build's own process knows `max_build_s` as well, and says more when a candidate is over it

OnTold = Callable[[Told], None]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a Build ended: the fields of its record."""

    engines: tuple[str, ...] = ()
    cached: bool = False
    error: ErrorInfo | None = None
    report: str = ""
    page: str = ""

    @property
    def state(self) -> BuildState:
        return BuildState.FAILED if self.error else BuildState.SUCCEEDED


class Building:
    def __init__(
        self,
        store: Store,
        *,
        folder: Path,
        caches: Path,
        environ: Mapping[str, str],
        clock: Clock,
        memory_limit_bytes: int,
        measuring: MeasurePlan = THOROUGH,
        process: str = PROCESS,
    ) -> None:
        self._store = store
        self._folder = folder
        self._caches = caches
        self._environ = environ
        self._clock = clock
        self._memory_limit_bytes = memory_limit_bytes
        self._measuring = measuring
        self._process = process

    def sweep(self) -> None:
        """Remove what builds left that did not end with us."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self, build: Build, target: Target, on_told: OnTold) -> Ended:
        """A model that cannot be built is an Ended with its error. Raises BusUnavailable; cancelling ends all of it."""
        run = _Run(build, target)
        began, started_at = self._clock.monotonic(), self._clock.time()
        try:
            await self._find_or_build(run, on_told)
            run.check()
        except BuildFailed as error:
            run.error = error.info()
        report = run.report(started_at, self._clock.monotonic() - began)
        ended = Ended(engines=run.passed(), cached=not run.compiled, error=run.error)
        try:
            return msgspec.structs.replace(
                ended,
                report=await self._store.put_report(msgspec.json.encode(report)),
                page=await self._store.put_report(page.render(report).encode()),
            )
        except BuildFailed as error:  # a disk that is full: the engines, if any, are there all the same
            return ended if ended.engines or ended.error else msgspec.structs.replace(ended, error=error.info())

    async def _find_or_build(self, run: _Run, on_told: OnTold) -> None:
        if await self._look_up(run):
            return
        waiting = Told(BuildStage.COMPILE, 0.0, "waits for another build of the same model")
        async with self._store.alone(run.missing[0].key, run.build.id, lambda: on_told(waiting)):
            if not await self._look_up(run):
                await self._build(run, on_told)

    async def _look_up(self, run: _Run) -> bool:
        """Whether every candidate's engine is there."""
        for candidate in run.missing:
            if (manifest := await self._store.find(candidate.key)) is not None:
                run.take(manifest, found_row(manifest))
        return not run.missing

    async def _build(self, run: _Run, on_told: OnTold) -> None:
        folder = self._folder / run.build.id
        run.compiled = True
        try:
            await asyncio.to_thread(_make_empty, folder)
            spec = run.build.model
            await self._store.fetch(spec.files, folder / MODEL)
            await self._store.fetch([spec.samples] if spec.samples else [], folder / SAMPLES)
            request = self._request(run, folder)
            result = await self._in_process(request, folder, on_told)
            for made in result.engines:
                await asyncio.to_thread(check, made, request.candidates, folder)
            run.stages, run.error = result.stages, result.error
            rows = {row.backend: row for row in result.candidates}
            run.reject(rows)
            began = self._clock.monotonic()
            for made in result.engines:
                on_told(Told(BuildStage.PUBLISH, PUBLISH_BEGINS, str(made.manifest.backend)))
                manifest = await self._store.publish(made.manifest, Path(made.folder))
                run.take(manifest, rows.get(manifest.backend, found_row(manifest)))
            if result.engines:
                found = ", ".join(f"{made.manifest.key[:12]} ({made.manifest.backend})" for made in result.engines)
                run.stages = (*run.stages, StageRow(BuildStage.PUBLISH, self._clock.monotonic() - began, found))
        except OSError as error:
            raise disk_failed(error, BuildStage.INGEST) from error
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    def _request(self, run: _Run, folder: Path) -> BuildRequest:
        spec = run.build.model
        return BuildRequest(
            build=run.build.id,
            spec=spec,
            target=run.target,
            candidates=tuple(run.missing),
            folder=str(folder),
            caches=str(self._caches),
            memory_limit_bytes=min(spec.memory_limit_bytes or self._memory_limit_bytes, self._memory_limit_bytes),
            measuring=self._measuring,
        )

    async def _in_process(self, request: BuildRequest, folder: Path, on_told: OnTold) -> BuildResult:
        loop = asyncio.get_running_loop()
        environ = environment(self._environ, gpu=request.target.uuid)
        work = Work.start(self._process, request, folder, environ, name="the build")

        def hear(told: Told) -> None:
            loop.call_soon_threadsafe(on_told, told)

        waiting = asyncio.create_task(
            asyncio.to_thread(work.wait, hear, BuildResult, request.spec.max_build_s, grace_s=_GRACE_S)
        )
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            work.end()
            with contextlib.suppress(BuildFailed):
                await waiting
            raise


class _Run:
    """One Build on its way: its candidates, the engines that there are, and a row for each."""

    def __init__(self, build: Build, target: Target) -> None:
        self.build = build
        self.target = target
        self.compiled = False
        self.error: ErrorInfo | None = None
        self.stages: tuple[StageRow, ...] = ()
        self._inexact: BuildFailed | None = None
        self._manifests: dict[Backend, EngineManifest] = {}
        self._rows: dict[Backend, CandidateRow] = {}
        self._chain = identity.chain(build.model, target)
        self.missing: list[EngineIdentity] = []
        for backend in self._chain:
            if (versions := identity.installed().get(backend)) is None:
                self._rows[backend] = CandidateRow(backend=backend, reason="it is not installed here")
            else:
                self.missing.append(identity.identity(build.model, target, backend, versions))

    def take(self, manifest: EngineManifest, row: CandidateRow) -> None:
        """An engine that there is; one that is less exact than this Build asks for is none."""
        self.missing = [each for each in self.missing if each.key != manifest.key]
        beyond = manifest.accuracy.beyond(self.build.model.accepted(manifest.arithmetic))
        if not beyond:
            self._manifests[manifest.backend] = manifest
            self._rows[manifest.backend] = row
        else:
            said = f"the engine that was built before is less exact than asked for: {beyond}"
            self._inexact = BuildFailed(said, stage=BuildStage.VERIFY)
            self._rows[manifest.backend] = failed_row(manifest.identity, self._inexact.info())

    def reject(self, rows: Mapping[Backend, CandidateRow]) -> None:
        """Rows of candidates that did not pass."""
        self._rows |= {backend: row for backend, row in rows.items() if not row.passed}

    def passed(self) -> tuple[str, ...]:
        """EngineKeys, the best first."""
        if self.error is not None:
            return ()
        return tuple(self._manifests[backend].key for backend in self._chain if backend in self._manifests)

    def check(self) -> None:
        """Raises BuildFailed when nothing passed, and nothing else says why."""
        if self._manifests:
            self.error = None  # what there is will do, though something better could not be built
        elif self.error is None:
            raise self._inexact or BuildFailed(self._why_none(), stage=BuildStage.COMPILE)

    def _why_none(self) -> str:
        if not self._chain:
            return f"the model requires a GPU, and this is a build for {self.target.kind}"
        reasons = "; ".join(f"{row.backend}: {row.reason}" for row in self._rows.values())
        return f"no engine can be built for {self.target.kind}: {reasons}"

    def report(self, started_at: float, seconds: float) -> BuildReport:
        spec, engines = self.build.model, list(self._manifests.values())
        first = engines[0] if engines else None
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
            candidates=tuple(self._rows[backend] for backend in self._chain if backend in self._rows),
            error=self.error,
        )


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for inner in (MODEL, SAMPLES):
        (folder / inner).mkdir(parents=True)
