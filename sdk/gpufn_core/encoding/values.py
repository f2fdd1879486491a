"""Encoding of Python values as bytes: the bodies of calls and results.

| content type | used by | encoding |
|---|---|---|
| `application/json` | any client | JSON: arrays become lists, datetimes text, bytes base64, NaN and infinities text |
| `application/msgpack` | any client | the same structure, with bytes unchanged |
| `application/vnd.gpufn.msgpack` | SDK, worker | Python values: tuples, sets, arrays, dataclasses, tables |
| `application/vnd.gpufn.pickle` | SDK, worker | the same, plus pickles; read only if allowed |
| anything else | any client | bytes |

In JSON and msgpack a value of numpy, pydantic or torch becomes its content. None of these libraries is imported for
that: their values exist only if they are loaded. `gpufn_core.encoding.native` has the SDK's encoding.
"""

from __future__ import annotations

import collections.abc
import functools
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from gpufn_core.encoding import media, native
from gpufn_core.errors import InvalidInput, ResultNotEncodable, UnsupportedMediaType
from gpufn_core.protocol.limits import INLINE_BYTES, REQUEST_BYTES

_MAX_PATH = 12  # the depth to which `_locate` searches
# Ends of the messages that reject a pickle.
NO_PICKLES = ": send plain values, or deploy the function with @gpu_function(pickle=True)"
OTHER_TYPE = f": it is read from a body of the content type {media.PICKLED} only"


class Encoded(NamedTuple):
    """A result in its final form, independent of the formats that the caller accepts. The body is the concatenation of
    its parts."""

    content_type: str
    parts: tuple[bytes | memoryview, ...]


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any], *, may_pickle: bool = False) -> bytes:
    """Encode a call in the SDK's encoding; `call_type` returns its content type. Raises InvalidInput, which names the
    argument that cannot be sent.

    With `may_pickle`, an argument that the encoding does not support is pickled.

    >>> decode_call(encode_call((1, (2, 3)), {"top": {4}}))
    ([1, (2, 3)], {'top': {4}})
    """
    value = {"args": list(args), "kwargs": kwargs}
    try:
        body = native.encode(value, may_pickle=may_pickle)
    except Exception as error:
        path, culprit = _locate(value, functools.partial(native.encode, may_pickle=may_pickle))
        name = path.removeprefix(".kwargs.").removeprefix(".")
        message = f"{name}: {_describe(culprit)} cannot be sent: {error}{_remedy(culprit, error, 'send')}"
        raise InvalidInput(message, field=name) from error
    if len(body) > REQUEST_BYTES:
        raise InvalidInput(
            f"the arguments take {len(body):,} bytes, more than the {REQUEST_BYTES:,} of one call: "
            "store them where the function can read them, and send their location"
        )
    return body


def call_type(body: bytes) -> str:
    """Return the content type of an encoded call.

    >>> call_type(encode_call((1,), {})), call_type(encode_call((len, print), {}, may_pickle=True))
    ('application/vnd.gpufn.msgpack', 'application/vnd.gpufn.pickle')
    """
    return media.PICKLED if isinstance(body, native.Pickled) else media.NATIVE


def decode_call(
    body: bytes | memoryview,
    *,
    allow_pickle: bool = False,
    find: native.FindClass | None = None,
    make: native.MakeInstance | None = None,
    remedy: str = NO_PICKLES,
) -> tuple[list[Any], dict[str, Any]]:
    """Decode arguments in the SDK's encoding. A record whose class `find` does not return decodes to its fields."""
    value = native.decode(body, allow_pickle=allow_pickle, find=find, make=make, remedy=remedy)
    if not isinstance(value, dict):
        raise InvalidInput("a call must be a map with 'args' and 'kwargs'")
    args, kwargs = value.get("args", []), value.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise InvalidInput("a call's 'args' must be an array and its 'kwargs' a map with text keys")
    return args, kwargs


def encode_result(
    value: Any, accept: str, *, limit_bytes: int = INLINE_BYTES, what: str = "result", may_pickle: bool = False
) -> tuple[str, bytes]:
    """Encode `value` for a caller that accepts `accept`; return content type and body. Raises ResultNotEncodable, which
    names the part that cannot be encoded and calls the value `what`.

    >>> encode_result({"labels": ("cat", "dog")}, "application/json")
    ('application/json', b'{"labels":["cat","dog"]}')
    """
    kind, parts = encode_parts(value, accept, limit_bytes=limit_bytes, what=what, may_pickle=may_pickle)
    return kind, b"".join(parts)


def encode_parts(
    value: Any, accept: str, *, limit_bytes: int, what: str = "result", may_pickle: bool = False
) -> Encoded:
    """Same as `encode_result`, but without copying large parts into one block.

    With `may_pickle`, a value that the encoding does not support is pickled for a Python caller, as `media.PICKLED`.
    """
    if isinstance(value, Encoded):
        _check_size(sum(map(len, value.parts)), limit_bytes, what)
        return value
    kind = _choose_type(accept)
    if kind == media.JSON and isinstance(value, (bytes, bytearray, memoryview)):
        kind, body = media.BYTES, bytes(value)
    else:
        encode = _PICKLES if may_pickle and kind == media.NATIVE else _ENCODERS[kind]
        try:
            body = encode(value)
        except RecursionError as error:
            raise ResultNotEncodable(f"the {what} contains itself, or is nested too deeply to be sent") from error
        except Exception as error:
            path, culprit = _locate(value, encode)
            where = f"the {what}{path and f' at {path}'}"
            raise ResultNotEncodable(
                f"{where} is {_describe(culprit)}, which cannot be sent as {kind}: {error}"
                f"{_remedy(culprit, error, 'return')}"
            ) from error
        if isinstance(body, native.Pickled):
            kind = media.PICKLED
    _check_size(len(body), limit_bytes, what)
    return Encoded(kind, (body,))


def _check_size(size: int, limit_bytes: int, what: str) -> None:
    if size > limit_bytes:
        raise ResultNotEncodable(
            f"the {what} takes {size:,} bytes, more than the {limit_bytes:,} of one call: "
            "store it and return where it is, or yield it in parts"
        )


def decode_value(
    content_type: str, body: bytes, *, allow_pickle: bool = False, find: native.FindClass | None = None
) -> Any:
    """Decode a result or an item for a Python caller. A record whose class `find` does not return decodes to its
    fields.

    A pickle is read only with `allow_pickle`. Raises InvalidInput.

    >>> decode_value(*encode_result((1, {2}), media.NATIVE))
    (1, {2})
    """
    kind = media.media_type(content_type)
    if kind == media.JSON:
        return msgspec.json.decode(body) if body else None
    if kind == media.MSGPACK:
        return msgspec.msgpack.decode(body)
    if kind == media.NATIVE:
        return native.decode(body, find=find, remedy=OTHER_TYPE if allow_pickle else _NO_TRUST)
    if kind == media.PICKLED:
        return native.decode(body, allow_pickle=allow_pickle, find=find, remedy=_NO_TRUST)
    return body


_NO_TRUST = (
    ": have the function return plain values, or, if you trust it, pass trust_results=True to Client(...) or "
    "f.options(...)"
)


# --- JSON and msgpack: for any client --------------------------------------------------------------------------------


def _choose_type(accept: str) -> str:
    for part in accept.split(","):
        kind = media.media_type(part) if part.strip() else media.JSON
        if kind == media.PICKLED:
            return media.NATIVE  # `encode_parts` decides which of the two it is
        if kind in _ENCODERS:
            return kind
    return media.JSON


def number_word(number: float) -> str:
    """Return the text for a number that JSON does not have, as in protobuf's JSON mapping.

    >>> [number_word(each) for each in (math.nan, math.inf, -math.inf)]
    ['NaN', 'Infinity', '-Infinity']
    """
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _json_body(value: Any) -> bytes:
    body = _encode_json(value)
    if b"null" not in body:  # msgspec writes null for NaN and the infinities
        return body
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_to_json_types)
    return _encode_json(_with_number_words(plain)) if _has_nonfinite(plain) else body


def _has_nonfinite(value: Any) -> bool:
    if type(value) is float:
        return not math.isfinite(value)
    if type(value) is dict:
        return any(map(_has_nonfinite, value.values()))
    return type(value) in (list, tuple) and any(map(_has_nonfinite, value))


def _with_number_words(value: Any) -> Any:
    if type(value) is float:
        return value if math.isfinite(value) else number_word(value)
    if type(value) is dict:
        return {key: _with_number_words(item) for key, item in value.items()}
    return [_with_number_words(item) for item in value] if type(value) in (list, tuple) else value


def _to_json_types(value: Any) -> Any:  # noqa: PLR0911  (a table of types)
    """Convert `value` to types that JSON has; TypeError if there is no obvious way. (msgspec's enc_hook.)"""
    if type(value) in (list, tuple, dict, set, frozenset):  # JSON has these, so this one is a key
        raise TypeError("a key of a map must be text or a number")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.ndarray):
            return value.tolist()
        if isinstance(value, numpy.generic):
            item = value.item()
            if not isinstance(item, numpy.generic):
                return item
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if native.is_pydantic(type(value)):
        return value.model_dump(by_alias=True)
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    if isinstance(value, (collections.abc.Sequence, collections.abc.Set, collections.abc.ValuesView)):
        return list(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{native.type_name(type(value))} has no JSON form")


# --- error messages --------------------------------------------------------------------------------------------------


def _describe(value: Any) -> str:
    name = native.type_name(type(value))
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _remedy(value: Any, error: Exception, verb: str) -> str:
    """Suggest how to turn a coroutine or an iterator into a value, or how to allow pickles. `verb`: send or return."""
    if isinstance(value, Awaitable):
        return "; await it"
    if isinstance(value, AsyncIterator):
        return "; make a list of it: [item async for item in ...]"
    if isinstance(value, Iterator):
        return "; make a list of it"
    if isinstance(error, native.NoForm):
        return f"; {verb} plain values, or deploy the function with @gpu_function(pickle=True)"
    return ""


def _locate(value: Any, encode: Callable[[Any], bytes]) -> tuple[str, Any]:
    """Find the part of `value` that `encode` fails on; return its path and the part."""
    path = ""
    for _ in range(_MAX_PATH):
        for step, item in _children(value):
            try:
                encode(item)
            except Exception:
                path, value = path + step, item
                break
        else:
            break
    return path, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield (f".{key}" if isinstance(key, str) else f"[{key!r}]"), item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    else:
        for name, item in native.fields_of(value) or ():
            yield f".{name}", item


_encode_json = msgspec.json.Encoder(enc_hook=_to_json_types).encode
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    media.JSON: _json_body,
    media.MSGPACK: msgspec.msgpack.Encoder(enc_hook=_to_json_types).encode,
    media.NATIVE: native.encode,
}


_PICKLES = functools.partial(native.encode, may_pickle=True)


def unsupported(content_type: str) -> UnsupportedMediaType:
    """Return the error for a body that is neither JSON nor msgpack if no parameter takes bytes."""
    return UnsupportedMediaType(
        f"{content_type!r} is not accepted: "
        f"send {media.JSON} or {media.MSGPACK}, or give the function a bytes parameter"
    )
