"""Batches: the lines of a file as submitted calls with the priority `low`.

A batch has a record. Its results are written to files when a client looks at it after all calls have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable
from typing import Annotated, Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding.msgspec_errors import parse_validation_error
from gpufn_core.errors import Conflict, GpufnError, InvalidInput, InvocationNotFound, PayloadTooLarge
from gpufn_core.protocol.records import ClientBatch, ClientFile
from gpufn_gateway.arguments.json_body import decode_json
from gpufn_gateway.protocols.openai import batch_lines
from gpufn_gateway.protocols.openai.batch_lines import ENDPOINTS, BatchCall, Endpoint, Line
from gpufn_gateway.protocols.openai.files import PREFIX as FILE_PREFIX
from gpufn_gateway.protocols.openai.files import FileRoutes
from gpufn_gateway.protocols.openai.models import named
from gpufn_gateway.protocols.platform import CallOptions, Platform, json_of
from gpufn_gateway.routes.requests import json_response, principal_of, route

T = TypeVar("T")

_PREFIX: Final = "batch_"  # prefix of ids
_WINDOW: Final = "24h"
_AT_ONCE: Final = 50
_CONTENT_TYPE: Final = "application/jsonl"
MAX_RESULTS_BYTES: Final = 256 << 20  # per batch, in memory until they are written
_calls: Final = msgspec.json.Decoder(list[BatchCall])


_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=batch_lines.MAX_TEXT_CHARS)]


class _NewBatch(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None


class BatchRoutes:
    def __init__(self, platform: Platform, files: FileRoutes, prefix: str) -> None:
        self._platform = platform
        self._files = files
        self._path = f"{prefix}/batches"
        self._ending = asyncio.Lock()  # the results of one batch at a time are in memory

    def routes(self) -> list[Route]:
        one = f"{self._path}/{{id}}"
        return [
            route("POST", self._path, self.create),
            route("GET", self._path, self.all, scans=True),
            route("GET", one, self.show, scans=True),
            route("POST", f"{one}/cancel", self.cancel),
        ]

    async def create(self, request: Request) -> Response:
        """Check all lines, submit their calls, and store the batch. Nothing is submitted if a line is not valid."""
        new = _parse(await self._platform.body(request))
        file = await self._files.find(new.input_file_id, request)
        lines = batch_lines.read(await self._platform.files.read(file), new.endpoint)
        endpoint = ENDPOINTS[new.endpoint]
        ready = [self._checked(number, line, endpoint, request) for number, line in enumerate(lines, 1)]
        await self._platform.files.check_room(principal_of(request).owner)  # before a call starts
        submitted: list[str] = []
        try:
            calls = await self._submit(ready, submitted, request)
            batch = await self._platform.files.create_batch(
                principal_of(request).owner,
                msgspec.json.encode(calls),
                endpoint=new.endpoint,
                input_file=file.id,
                metadata=new.metadata or {},
                total=len(calls),
            )
        except BaseException:  # such as a full queue: without the batch, the results would be useless
            await self._cancel_calls(submitted, request)
            raise
        return json_response(_view(batch))

    def _checked(self, number: int, line: Line, endpoint: Endpoint, request: Request) -> tuple[BatchCall, str, bytes]:
        """Return the call of a line, its function, and its arguments. Raises InvalidInput, FunctionNotFound."""
        model = line.fields["model"]
        target = named(self._platform, model, endpoint.serves, request)
        try:
            arguments = endpoint.arguments(line.fields)
            target.signature.check(arguments)
        except InvalidInput as error:
            raise batch_lines.at_line(number, error.message) from None
        is_base64 = line.fields.get("encoding_format") == "base64"
        return BatchCall(line.custom_id, model, is_base64), target.path, arguments

    async def _submit(
        self, ready: list[tuple[BatchCall, str, bytes]], submitted: list[str], request: Request
    ) -> list[BatchCall]:
        """Submit the calls, and add their ids to `submitted`."""

        async def submit(call: BatchCall, function: str, arguments: bytes) -> BatchCall:
            record = await self._platform.submit(function, arguments, request, CallOptions(priority="low"))
            submitted.append(record.id)
            return msgspec.structs.replace(call, call=record.id)

        return await _some_at_once(submit(*each) for each in ready)

    async def all(self, request: Request) -> Response:
        """List the batches as they were when a client last looked at them."""
        data = [_view(batch) for batch in await self._platform.files.batches(principal_of(request).owner)]
        return json_response({"object": "list", "data": data, "has_more": False})

    async def show(self, request: Request) -> Response:
        return json_response(_view(await self._read(request)))

    async def cancel(self, request: Request) -> Response:
        batch = await self._read(request)
        if not batch.is_ended:
            calls = await self._calls_of(batch)
            batch = await self._platform.files.change_batch(batch, is_cancelled=True)
            await self._cancel_calls([call.call for call in calls], request)
            batch = await self._finished(batch, request)
        return json_response(_view(batch))

    async def _cancel_calls(self, calls: list[str], request: Request) -> None:
        async def cancel(call: str) -> None:
            with contextlib.suppress(GpufnError):
                await self._platform.cancel(call, request)

        await _some_at_once(cancel(call) for call in calls)

    async def _read(self, request: Request) -> ClientBatch:
        id_ = str(request.path_params["id"]).removeprefix(_PREFIX)
        batch = await self._platform.files.find_batch(principal_of(request).owner, id_)
        return batch if batch.is_ended else await self._finished(batch, request)

    async def _finished(self, batch: ClientBatch, request: Request) -> ClientBatch:
        """Count the calls that have ended. After the last one, write the files with their results."""
        calls = await self._calls_of(batch)
        states = await _some_at_once(self._state(call.call, request) for call in calls)
        completed = states.count(InvocationState.SUCCEEDED)
        failed = sum(state.ended for state in states) - completed
        if completed + failed < batch.total:
            return msgspec.structs.replace(batch, completed=completed, failed=failed)
        async with self._ending:
            latest = await self._platform.files.find_batch(batch.owner, batch.id)
            return latest if latest.is_ended else await self._end(latest, calls, request)

    async def _state(self, call: str, request: Request) -> InvocationState:
        try:
            return (await self._platform.record(call, request)).state
        except InvocationNotFound:  # it is no longer kept
            return InvocationState.EXPIRED

    async def _end(self, batch: ClientBatch, calls: list[BatchCall], request: Request) -> ClientBatch:
        """Write the files with the results, which are read one after the other."""
        results = batch_lines.ResultFiles(MAX_RESULTS_BYTES)
        for call in calls:
            results.add(call, await self._line(call, ENDPOINTS[batch.endpoint], request))
        written: list[ClientFile] = []
        try:
            output = await self._write(batch, "output", results.output, written)
            errors = await self._write(batch, "error", results.errors, written)
        except BaseException:
            await self._remove(written)
            raise
        try:
            return await self._platform.files.change_batch(
                batch,
                is_ended=True,
                output_file=output,
                error_file=errors,
                completed=results.completed,
                failed=results.failed,
            )
        except Conflict:  # another gateway has just done it, or a client has cancelled the batch
            await self._remove(written)
            return await self._platform.files.find_batch(batch.owner, batch.id)

    async def _line(self, call: BatchCall, endpoint: Endpoint, request: Request) -> dict[str, Any]:
        try:
            record, outcome = await self._platform.outcome(call.call, request)
        except InvocationNotFound:
            return batch_lines.ended_line(call, None, None, endpoint)
        except PayloadTooLarge as error:
            return batch_lines.refused_line(call, error)
        return batch_lines.ended_line(call, record, None if outcome is None else bytes(json_of(outcome)), endpoint)

    async def _write(self, batch: ClientBatch, kind: str, data: bytearray, written: list[ClientFile]) -> str:
        """Store lines as a file, add it to `written`, and return its id; "" without lines."""
        if not data:
            return ""
        name = f"{_PREFIX}{batch.id}_{kind}.jsonl"
        view = memoryview(data)
        file = await self._platform.files.create(batch.owner, name, _CONTENT_TYPE, view, purpose="batch_output")
        written.append(file)
        return file.id

    async def _remove(self, files: list[ClientFile]) -> None:
        for file in files:
            with contextlib.suppress(GpufnError):
                await self._platform.files.remove(file)

    async def _calls_of(self, batch: ClientBatch) -> list[BatchCall]:
        return _calls.decode(await self._platform.files.read_bytes(batch.calls))


async def _some_at_once(jobs: Iterable[Awaitable[T]]) -> list[T]:
    """Await the jobs, a limited number at a time; return their results in order. Raises the first exception, after all
    jobs have ended."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def run(job: Awaitable[T]) -> T:
        async with limit:
            return await job

    results = await asyncio.gather(*map(run, jobs), return_exceptions=True)
    if (error := next((result for result in results if isinstance(result, BaseException)), None)) is not None:
        raise error
    return results  # type: ignore[return-value]


def _parse(body: bytes) -> _NewBatch:
    """Raises InvalidInput with the field."""
    try:
        new = decode_json(body, _NewBatch)
    except msgspec.ValidationError as error:
        found = parse_validation_error(str(error))
        raise InvalidInput(f"{found.path or 'the body'}: {found.text}", field=found.path or None) from None
    if new.endpoint not in ENDPOINTS:
        raise InvalidInput(f"endpoint must be one of {', '.join(ENDPOINTS)}", field="endpoint")
    if new.completion_window != _WINDOW:
        raise InvalidInput(f"completion_window must be {_WINDOW}", field="completion_window")
    return new


def _view(batch: ClientBatch) -> dict[str, Any]:
    status = "cancelling" if batch.is_cancelled else "in_progress"
    if batch.is_ended:
        status = "cancelled" if batch.is_cancelled else "completed"
    return {
        "id": f"{_PREFIX}{batch.id}",
        "object": "batch",
        "endpoint": batch.endpoint,
        "input_file_id": f"{FILE_PREFIX}{batch.input_file}",
        "completion_window": _WINDOW,
        "status": status,
        "created_at": int(batch.created_at),
        "in_progress_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        "output_file_id": f"{FILE_PREFIX}{batch.output_file}" if batch.output_file else None,
        "error_file_id": f"{FILE_PREFIX}{batch.error_file}" if batch.error_file else None,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }
