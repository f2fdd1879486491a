"""What `invoke`, `submit` and `result` share: arguments as they are typed, and results as they are shown."""

from __future__ import annotations

import errno
import mimetypes
import os
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from gpufn.cli.terminal.escape import visible
from gpufn.cli.terminal.output import WrongUsage, duration, print_json, say
from gpufn.cli.terminal.suggestions import as_json
from gpufn_core.encoding import media
from gpufn_core.errors import GpufnError, InvalidInput, UnsupportedMediaType
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.client.views import RawResult

Arguments = Annotated[str | None, typer.Argument(help="Its arguments as a JSON object; @FILE is a file, - stdin.")]
Data = Annotated[str | None, typer.Option("--data", "-d", help="As ARGUMENTS.")]
File = Annotated[
    Path | None, typer.Option(help="Send this file as it is, for a parameter of bytes; ARGUMENTS are the others.")
]
Class = Annotated[
    Priority | None, typer.Option("--priority", help="Its class, in place of the function's; hi needs a key that may.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to this file.")]


class Body(NamedTuple):
    """What a call sends. `query` has the arguments beside a file, as in a URL."""

    data: bytes
    content_type: str
    query: str = ""


def body_of(arguments: str | None, data: str | None, file: Path | None) -> Body:
    if arguments is not None and data is not None:
        raise typer.BadParameter("give one of ARGUMENTS and --data")
    text = arguments if arguments is not None else data
    if file is not None:
        content_type = mimetypes.guess_type(file.name)[0] or media.BYTES
        # JSON in a --file is meant for the parameter of bytes all the same.
        kind = content_type if content_type not in (media.JSON, media.MSGPACK) else media.BYTES
        return Body(_read(file), kind, "" if text is None else _query(_object(text)))
    return Body(b"{}" if text is None else _object(text), media.JSON)


def _query(arguments: bytes) -> str:
    """Each argument as JSON; text as it is, since a query has no quotes."""
    fields = msgspec.json.decode(arguments, type=dict[str, Any])
    texts = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode() for name, value in fields.items()
    }
    return urllib.parse.urlencode(texts)


def _object(text: str) -> bytes:
    """The JSON object that was typed, or that the file or stdin has. Raises WrongUsage."""
    if text in ("-", "@-"):
        body = sys.stdin.buffer.read()
    elif text.startswith("@"):
        body = _read(Path(text[1:]))
    else:
        body = os.fsencode(text)
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        if meant := as_json([text]):
            raise WrongUsage(f"the arguments are a JSON object: {meant}") from error
        raise WrongUsage(f"""the arguments are a JSON object such as '{{"x": 1}}': {error}""") from error
    return body


def check_output(output: Path | None) -> None:
    """Before the work: the result of a call that nobody submitted is lost when it cannot be written, and a build is
    long."""
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        number = errno.EISDIR if output.is_dir() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(output))


def show(answer: RawResult, output: Path | None, *, json: bool) -> None:
    answer = _readable(answer)
    kind = answer.content_type.partition(";")[0]
    if output:
        output.write_bytes(answer.body)
    if json and output:
        print_json({"invocation": answer.invocation, "timings_ms": answer.timings, "output": str(output)})
    elif json:
        value = msgspec.Raw(answer.body) if kind == media.JSON else answer.body  # bytes become base64
        print_json({"invocation": answer.invocation, "timings_ms": answer.timings, "result": value})
    elif output:
        say(f"{len(answer.body)} bytes of {answer.content_type} in {output}", err=True)
    else:
        _print(answer, kind)


def _readable(answer: RawResult) -> RawResult:
    """What was submitted from Python is kept in the SDK's encoding: as JSON, or bytes, where it can be that."""
    if answer.content_type not in (media.NATIVE, media.PICKLED):
        return answer
    from gpufn_core.encoding import values  # noqa: PLC0415

    try:
        value = values.decode_value(answer.content_type, answer.body)
        content_type, body = values.encode_result(value, media.JSON)
    except GpufnError as error:
        raise UnsupportedMediaType(
            f"the result can be read in Python only: gpufn.Call.from_id({answer.invocation!r}).result()"
        ) from error
    return msgspec.structs.replace(answer, content_type=content_type, body=body)


def _print(answer: RawResult, kind: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.buffer.write(answer.body + (b"\n" if kind == media.JSON else b""))
        sys.stdout.buffer.flush()
    elif kind == media.JSON:
        print_json(msgspec.Raw(answer.body))
    elif kind.startswith("text/"):
        sys.stdout.write(visible(answer.body.decode(errors="replace")))
        sys.stdout.flush()
    else:
        raise InvalidInput(f"the result is {len(answer.body)} bytes of {kind}: write it to a file with --output FILE")
    if sys.stderr.isatty() and answer.timings:
        say("  ".join(f"{phase} {duration(ms / 1000)}" for phase, ms in answer.timings.items()), err=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WrongUsage(f"cannot read {path}: {error.strerror}") from error
