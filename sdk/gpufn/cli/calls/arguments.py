"""Arguments and results of calls on the command line, for `invoke`, `submit` and `result`."""

from __future__ import annotations

import errno
import mimetypes
import os
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from gpufn.cli.terminal.command import PATH, Argument, options_together
from gpufn.cli.terminal.escape import visible
from gpufn.cli.terminal.output import WrongUsage, duration, print_json, say
from gpufn.cli.terminal.suggestions import as_json
from gpufn_core.encoding import media
from gpufn_core.errors import GpufnError, InvalidInput, UnsupportedMediaType
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.client.views.calls import RawResult

body_options = options_together(
    click.argument(
        "arguments",
        cls=Argument,
        required=False,
        help="Arguments as a JSON object; @FILE reads a file, - reads standard input.",
    ),
    click.option("--data", "-d", help="Arguments, as ARGUMENTS."),
    click.option("--file", type=PATH, help="File whose bytes are one parameter; ARGUMENTS has the other parameters."),
)
priority_option = click.option(
    "--priority",
    type=click.Choice([priority.value for priority in Priority]),
    callback=lambda context, param, value: None if value is None else Priority(value),
    help="Priority class. Default: the function's. hi needs a key with the scope hi.",
)
output_option = click.option("--output", "-o", type=PATH, help="File for the result.")


class Body(NamedTuple):
    """The body of a call. `query` has the arguments beside a file, as a URL query string."""

    data: bytes
    content_type: str
    query: str = ""


def body_of(arguments: str | None, data: str | None, file: Path | None) -> Body:
    """Return the body that the `body_options` of a command describe."""
    if arguments is not None and data is not None:
        raise click.BadParameter("pass either ARGUMENTS or --data")
    text = arguments if arguments is not None else data
    if file is not None:
        content_type = mimetypes.guess_type(file.name)[0] or media.BYTES
        # A JSON --file is the bytes of one parameter too, not the arguments.
        kind = content_type if content_type not in (media.JSON, media.MSGPACK) else media.BYTES
        return Body(_read(file), kind, "" if text is None else _query(_object(text)))
    return Body(b"{}" if text is None else _object(text), media.JSON)


def _query(arguments: bytes) -> str:
    """Encode each argument as JSON, except strings, which have no quotes in a query."""
    fields = msgspec.json.decode(arguments, type=dict[str, Any])
    texts = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode() for name, value in fields.items()
    }
    return urllib.parse.urlencode(texts)


def _object(text: str) -> bytes:
    """Return the JSON object in the argument, the file or standard input. Raises WrongUsage."""
    if text in ("-", "@-"):
        body = sys.stdin.buffer.read()
    elif text.startswith("@"):
        body = _read(Path(text[1:]))
    else:
        body = os.fsencode(text)
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        if corrected := as_json([text]):
            raise WrongUsage(f"the arguments must be a JSON object: {corrected}") from error
        raise WrongUsage(f"""the arguments must be a JSON object such as '{{"x": 1}}': {error}""") from error
    return body


def check_output(output: Path | None) -> None:
    """Raises OSError if the output file cannot be created.

    Checked before the work: an invoke's result would be lost, and a build takes long.
    """
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        number = errno.EISDIR if output.is_dir() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(output))


def show(result: RawResult, output: Path | None, *, json: bool) -> None:
    result = _as_json_or_bytes(result)
    kind = result.content_type.partition(";")[0]
    if output:
        output.write_bytes(result.body)
    if json and output:
        print_json({"invocation": result.invocation, "timings_ms": result.timings, "output": str(output)})
    elif json:
        value = msgspec.Raw(result.body) if kind == media.JSON else result.body  # bytes become base64
        print_json({"invocation": result.invocation, "timings_ms": result.timings, "result": value})
    elif output:
        say(f"wrote {len(result.body)} bytes of {result.content_type} to {output}", err=True)
    else:
        _print(result, kind)


def _as_json_or_bytes(result: RawResult) -> RawResult:
    """Convert the result of a call submitted from Python, which is stored in the SDK's encoding."""
    if result.content_type not in (media.NATIVE, media.PICKLED):
        return result
    from gpufn_core.encoding import values  # noqa: PLC0415

    try:
        value = values.decode_value(result.content_type, result.body)
        content_type, body = values.encode_result(value, media.JSON)
    except GpufnError as error:
        raise UnsupportedMediaType(
            f"the result can only be read in Python: gpufn.Call.from_id({result.invocation!r}).result()"
        ) from error
    return msgspec.structs.replace(result, content_type=content_type, body=body)


def _print(result: RawResult, kind: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.buffer.write(result.body + (b"\n" if kind == media.JSON else b""))
        sys.stdout.buffer.flush()
    elif kind == media.JSON:
        print_json(msgspec.Raw(result.body))
    elif kind.startswith("text/"):
        sys.stdout.write(visible(result.body.decode(errors="replace")))
        sys.stdout.flush()
    else:
        raise InvalidInput(f"the result is {len(result.body)} bytes of {kind}: write it to a file with --output FILE")
    if sys.stderr.isatty() and result.timings:
        say("  ".join(f"{phase} {duration(ms / 1000)}" for phase, ms in result.timings.items()), err=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WrongUsage(f"cannot read {path}: {error.strerror}") from error
