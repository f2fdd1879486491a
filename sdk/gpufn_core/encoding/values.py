"""Python values ↔ bytes: what calls and results look like on their way.

| content type | who speaks it | what it keeps |
|---|---|---|
| `application/json` | anybody | JSON: arrays become lists, datetimes text, bytes base64, NaN and infinities text |
| `application/msgpack` | anybody | the same map, with bytes as they are |
| `application/vnd.gpufn.msgpack` | the SDK, the worker | Python values: tuples, sets, arrays, dataclasses, tables |
| `application/vnd.gpufn.pickle` | the SDK, the worker | the same, and pickles; read only where that is allowed |
| anything else | anybody | bytes |

In JSON and msgpack a value of numpy, pydantic or torch becomes what it holds; none of them is imported for it: one of
theirs exists only when they are loaded. The SDK's encoding is `gpufn_core.encoding.native`.
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

_MAX_PATH = 12  # how deep `_locate` looks
# The ends of a pickle's refusal.
NO_PICKLES = ": send plain values, or deploy the function with @gpu_function(pickle=True)"
OTHER_TYPE = f": it is read from a body of the content type {media.PICKLED} only"


class Encoded(NamedTuple):
    """A result in its final form, whatever its caller accepts. The body is its parts, one after the other."""

    content_type: str
    parts: tuple[bytes | memoryview, ...]


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any], *, may_pickle: bool = False) -> bytes:
    """A call in the SDK's encoding, for `call_type`. InvalidInput names the argument that cannot be sent.

    With `may_pickle` an argument without a form of its own is pickled.

    >>> decode_call(encode_call((1, (2, 3)), {"top": {4}}))
    ([1, (2, 3)], {'top': {4}})
    """
    value = {"args": list(args), "kwargs": kwargs}
    try:
        body = native.encode(value, may_pickle=may_pickle)
    except Exception as error:
        path, culprit = _locate(value, functools.partial(native.encode, may_pickle=may_pickle))
        name = path.removeprefix(".kwargs.").removeprefix(".")
        said = f"{name}: {_described(culprit)} cannot be sent: {error}{_remedy(culprit, error, 'send')}"
        raise InvalidInput(said, field=name) from error
    if len(body) > REQUEST_BYTES:
        raise InvalidInput(
            f"the arguments take {len(body):,} bytes, more than the {REQUEST_BYTES:,} of one call: "
            "store them where the function can read them, and send where that is"
        )
    return body


def call_type(body: bytes) -> str:
    """The content type of an encoded call.

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
    """Arguments in the SDK's encoding; of a class that `find` does not return, its fields."""
    value = native.decode(body, allow_pickle=allow_pickle, find=find, make=make, remedy=remedy)
    if not isinstance(value, dict):
        raise InvalidInput("a call is a map with 'args' and 'kwargs'")
    args, kwargs = value.get("args", []), value.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise InvalidInput("a call's 'args' is an array and its 'kwargs' a map from names")
    return args, kwargs


def encode_result(
    value: Any, accept: str, *, limit_bytes: int = INLINE_BYTES, what: str = "result", may_pickle: bool = False
) -> tuple[str, bytes]:
    """`value` for a caller that accepts `accept`: content type and body. ResultNotEncodable says what is in the way,
    and calls the value `what`.

    >>> encode_result({"labels": ("cat", "dog")}, "application/json")
    ('application/json', b'{"labels":["cat","dog"]}')
    """
    kind, parts = encode_parts(value, accept, limit_bytes=limit_bytes, what=what, may_pickle=may_pickle)
    return kind, b"".join(parts)


def encode_parts(
    value: Any, accept: str, *, limit_bytes: int, what: str = "result", may_pickle: bool = False
) -> Encoded:
    """As `encode_result`, and nothing large is copied to make one block of the body.

    With `may_pickle`, a value without a form of its own is pickled for a caller in Python, as `media.PICKLED`.
    """
    if isinstance(value, Encoded):
        _check_size(sum(map(len, value.parts)), limit_bytes, what)
        return value
    kind = _chosen(accept)
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
                f"{where} is {_described(culprit)}, which cannot be sent as {kind}: {error}"
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
    """The value of a result or an item, for a caller in Python; of a class that `find` does not return, its fields.

    A pickle is read with `allow_pickle` only. Raises InvalidInput.

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


# --- JSON and msgpack: for anybody -----------------------------------------------------------------------------------


def _chosen(accept: str) -> str:
    for part in accept.split(","):
        kind = media.media_type(part) if part.strip() else media.JSON
        if kind == media.PICKLED:
            return media.NATIVE  # `encode_parts` says which of the two it is
        if kind in _ENCODERS:
            return kind
    return media.JSON


def number_word(number: float) -> str:
    """Return the text for a number that JSON lacks, as the JSON mapping of protobuf writes it.

    >>> [number_word(each) for each in (math.nan, math.inf, -math.inf)]
    ['NaN', 'Infinity', '-Infinity']
    """
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _json_body(value: Any) -> bytes:
    body = _encode_json(value)
    if b"null" not in body:  # msgspec writes null for NaN and the infinities
        return body
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_simpler)
    return _encode_json(_worded(plain)) if _has_nonfinite(plain) else body


def _has_nonfinite(value: Any) -> bool:
    if type(value) is float:
        return not math.isfinite(value)
    if type(value) is dict:
        return any(map(_has_nonfinite, value.values()))
    return type(value) in (list, tuple) and any(map(_has_nonfinite, value))


def _worded(value: Any) -> Any:
    if type(value) is float:
        return value if math.isfinite(value) else number_word(value)
    if type(value) is dict:
        return {key: _worded(item) for key, item in value.items()}
    return [_worded(item) for item in value] if type(value) in (list, tuple) else value


def _simpler(value: Any) -> Any:  # noqa: PLR0911  (a table of types)
    """`value` in types that JSON has; TypeError when there is no obvious way. (msgspec's enc_hook.)"""
    if type(value) in (list, tuple, dict, set, frozenset):  # JSON has these: we are asked because it stands for a key
        raise TypeError("a key of a map has to be text or a number")
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


# --- saying what is wrong --------------------------------------------------------------------------------------------


def _described(value: Any) -> str:
    name = native.type_name(type(value))
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _remedy(value: Any, error: Exception, verb: str) -> str:
    """How to `verb` it: how to make a value of a coroutine or an iterator, or that pickles need an option."""
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
    """Where in `value` the part is that `encode` fails on, as a path, and that part."""
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


_encode_json = msgspec.json.Encoder(enc_hook=_simpler).encode
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    media.JSON: _json_body,
    media.MSGPACK: msgspec.msgpack.Encoder(enc_hook=_simpler).encode,
    media.NATIVE: native.encode,
}


_PICKLES = functools.partial(native.encode, may_pickle=True)


def unsupported(content_type: str) -> UnsupportedMediaType:
    """The refusal of a body that is neither JSON nor msgpack where no parameter takes bytes."""
    return UnsupportedMediaType(
        f"{content_type!r} is not accepted: "
        f"send {media.JSON} or {media.MSGPACK}, or give the function a bytes parameter"
    )
