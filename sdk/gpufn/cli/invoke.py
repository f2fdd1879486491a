"""`gpufn invoke NAME`."""

from __future__ import annotations

import contextlib
import mimetypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gpufn.cli._render import Json, duration, print_json, say, step
from gpufn.errors import Forbidden, InvalidInput
from gpufn.spec import FunctionSpec, spec_from_json

if TYPE_CHECKING:
    from gpufn._client import Client
    from gpufn._views import Answer

_JSON = "application/json"


def invoke(  # noqa: PLR0917  Typer passes them by name
    name: Annotated[str, typer.Argument(help="The function, or FUNCTION.METHOD for a class.")],
    arguments: Annotated[str | None, typer.Argument(help="Its arguments as a JSON object.")] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", help="As ARGUMENTS; @FILE is a file, @- stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Send this file as it is, for a parameter of bytes.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to this file.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds.", min=0.001)] = None,
    json: Json = False,
) -> None:
    """Call a function and print its result.

    A generator's items are printed as they come, one per line. With --json the result comes with its invocation's id
    and timings.
    """
    from gpufn._client import Client  # noqa: PLC0415

    body, content_type = _body(arguments, data, file)
    with Client() as client:
        if _streams(client, name):
            with contextlib.ExitStack() as stack:
                out = stack.enter_context(output.open("wb")) if output else sys.stdout.buffer
                for item in client.stream_json(name, body, content_type, timeout_s=timeout):
                    out.write(msgspec.json.encode(item) + b"\n")
                    out.flush()
            return
        with step(f"Calling {name}"):
            answer = client.invoke_raw(name, body, content_type, timeout_s=timeout)
    if json:
        print_json({"invocation": answer.invocation, "timings_ms": answer.timings, "result": _value(answer)})
    elif output:
        output.write_bytes(answer.body)
        say(f"{len(answer.body)} bytes of {answer.content_type} in {output}", err=True)
    else:
        _print(answer)


def _body(arguments: str | None, data: str | None, file: Path | None) -> tuple[bytes, str]:
    if sum(given is not None for given in (arguments, data, file)) > 1:
        raise typer.BadParameter("give one of ARGUMENTS, --data and --file")
    if file is not None:
        content_type = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        # JSON in a --file is meant for the parameter of bytes all the same.
        return _read(file), "application/octet-stream" if content_type == _JSON else content_type
    text = arguments if arguments is not None else data
    if text is None:
        return b"{}", _JSON
    if text.startswith("@"):
        body = sys.stdin.buffer.read() if text == "@-" else _read(Path(text[1:]))
    else:
        body = os.fsencode(text)
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"""the arguments are a JSON object such as '{{"x": 1}}': {error}""") from error
    return body, _JSON


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def _streams(client: Client, name: str) -> bool:
    function, _, method = name.partition(".")
    try:
        spec: FunctionSpec = spec_from_json(client.function(function).spec)
    except Forbidden:  # a key that may only invoke
        return False
    found = spec.method(method)
    return found is not None and found.kind.streams


def _value(answer: Answer) -> object:
    kind = answer.content_type.partition(";")[0]
    return msgspec.Raw(answer.body) if kind == _JSON else answer.body  # bytes become base64


def _print(answer: Answer) -> None:
    kind = answer.content_type.partition(";")[0]
    if kind == _JSON:
        say((msgspec.json.format(answer.body, indent=2) if sys.stdout.isatty() else answer.body).decode())
    elif sys.stdout.isatty() and not kind.startswith("text/"):
        raise InvalidInput(f"the result is {len(answer.body)} bytes of {kind}: write it to a file with --output FILE")
    else:
        sys.stdout.buffer.write(answer.body)
        sys.stdout.buffer.flush()
    if sys.stderr.isatty() and answer.timings:
        say("  ".join(f"{phase} {duration(ms / 1000)}" for phase, ms in answer.timings.items()), err=True)
