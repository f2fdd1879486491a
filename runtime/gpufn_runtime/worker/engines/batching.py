"""Rules for the inputs that an engine accepts, and for joining several calls into one run by rows. Pure.

A row is an index of the first dimension of every input and output, if the manifest has `batched`. Calls are joined if
the rest of their shapes is equal, up to `max_batch` rows. A call with more rows than a run accepts is split into parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.model_spec import ShapeProfile, TensorSpec
from gpufn_runtime.worker.engines.base import Array, Arrays
from gpufn_runtime.worker.engines.tensors import default_of, described, dtype_of

T = TypeVar("T")
_Shapes = tuple[tuple[int, ...], ...]


class Fitted(NamedTuple):
    """The validated inputs of one call, in the manifest's order.

    `rows` is None if the engine is not batched. Calls with equal `rest`, the shapes without rows, can share a run;
    `most_rows` is the limit of one run with these shapes.
    """

    inputs: Arrays
    rows: int | None
    rest: _Shapes
    most_rows: int


class Batching:
    """The rules of one engine."""

    def __init__(self, manifest: EngineManifest) -> None:
        self._inputs = {spec.name: spec for spec in manifest.inputs}
        self._defaults = {spec.name: value for spec in manifest.inputs if (value := default_of(spec)) is not None}
        self._profiles = manifest.profiles
        self._batched = manifest.batched
        self._max_batch = manifest.max_batch
        self._known: dict[_Shapes, list[tuple[int, int]]] = {}  # rest → minimum and maximum rows per profile

    def fit(self, inputs: Mapping[str, Array]) -> Fitted:
        """Validate inputs. Raises InvalidInput, which names the faulty input: unknown, missing, a wrong dtype or rank,
        a shape that no profile accepts, or a BOOL with bytes other than 0 and 1."""
        if self._defaults:
            inputs = {**self._defaults, **inputs}
        self._check_names(inputs)
        ordered = {name: inputs[name] for name in self._inputs}
        for name, spec in self._inputs.items():
            _check(spec, ordered[name], rows_are_free=self._batched)
        if not self._batched:
            self._check_profiles({name: array.shape for name, array in ordered.items()})
            return Fitted(ordered, None, (), 0)
        rows = self._rows(ordered)
        rest = tuple(array.shape[1:] for array in ordered.values())
        max_rows = self._most_rows(rest, rows)
        if max_rows is None:
            self._refuse({name: array.shape for name, array in ordered.items()})
        if rows > max_rows and not any(array.size for array in ordered.values()):
            name = next(iter(ordered))
            raise InvalidInput(f"{name}: {rows} rows without elements, but a run takes {max_rows}", field=name)
        return Fitted(ordered, rows, rest, max_rows)

    def take(self, first: T, waiting: deque[T], fitted: Callable[[T], Fitted]) -> list[T]:
        """Return `first` and the calls that can share its run, in order; removes them from `waiting`."""
        leader = fitted(first)
        if leader.rows is None:
            return [first]
        limit = min(leader.most_rows, self._max_batch)
        room = limit - leader.rows
        group, skipped = [first], []
        while waiting and room > 0:
            item = waiting.popleft()
            candidate = fitted(item)
            if candidate.rest == leader.rest and candidate.rows is not None and candidate.rows <= room:
                group.append(item)
                room -= candidate.rows
            else:
                skipped.append(item)
        waiting.extendleft(reversed(skipped))
        return group

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._inputs:
                raise InvalidInput(f"{name}: the model has no such input; it takes {self._takes()}", field=name)
        for name in self._inputs:
            if name not in names:
                raise InvalidInput(f"{name}: missing; the model takes {self._takes()}", field=name)

    def _takes(self) -> str:
        return ", ".join(map(described, self._inputs.values())) or "nothing"

    def _rows(self, inputs: Arrays) -> int:
        counts: dict[str, int] = {name: array.shape[0] for name, array in inputs.items()}
        first, rows = next(iter(counts.items()))
        for name, count in counts.items():
            if count != rows:
                raise InvalidInput(
                    f"{name}: {count} rows, but {first} has {rows}: all inputs must have the same number", field=name
                )
        if rows == 0:
            raise InvalidInput(f"{first}: there are no rows", field=first)
        return rows

    def _most_rows(self, rest: _Shapes, rows: int) -> int | None:
        """Return the maximum rows of one run, from the profile that needs the fewest equal runs for `rows`. All runs of
        a call, shared or not, use that limit. None if no profile fits."""
        candidates = [
            (runs, -high)
            for low, high in self._bounds(rest, rows)
            for runs in [-(-rows // max(high, 1))]
            if low <= rows // runs and rows <= runs * high
        ]
        return -min(candidates)[1] if candidates else None

    def _bounds(self, rest: _Shapes, rows: int) -> list[tuple[int, int]]:
        if (known := self._known.get(rest)) is not None:
            return known
        if not self._profiles:
            return [(1, self._max_batch)]
        shapes = {name: (rows, *sizes) for name, sizes in zip(self._inputs, rest, strict=True)}
        bounds = [
            (max((r.min[0] for r in ranges), default=1), min((r.max[0] for r in ranges), default=self._max_batch))
            for profile in self._profiles
            if _accepts(profile, shapes, True)
            for ranges in [[profile.inputs[name] for name in shapes if name in profile.inputs]]
        ]
        if not bounds:
            self._refuse(shapes, but_rows=True)
        if len(self._known) < 1024:  # shapes come from clients
            self._known[rest] = bounds
        return bounds

    def _check_profiles(self, shapes: dict[str, tuple[int, ...]]) -> None:
        if self._profiles and not any(_accepts(profile, shapes) for profile in self._profiles):
            self._refuse(shapes)

    def _refuse(self, shapes: dict[str, tuple[int, ...]], *, but_rows: bool = False) -> NoReturn:
        """Raise InvalidInput for the first input that no profile accepts, else for the first that is in a profile."""
        names = [name for name in shapes if any(name in profile.inputs for profile in self._profiles)]
        alone = [name for name in names if not any(_accepts(p, {name: shapes[name]}, but_rows) for p in self._profiles)]
        name = (alone or names)[0]
        ranges = "; ".join(str(profile.inputs[name]) for profile in self._profiles if name in profile.inputs)
        suffix = "" if alone else " with the shapes of the other inputs"
        raise InvalidInput(f"{name}: the engine accepts {ranges}, not {list(shapes[name])}{suffix}", field=name)


def join(calls: Sequence[Fitted]) -> Fitted:
    """Join calls that `take` grouped into one."""
    first = calls[0]
    if len(calls) == 1:
        return first
    inputs = {name: np.concatenate([call.inputs[name] for call in calls]) for name in first.inputs}
    return first._replace(inputs=inputs, rows=sum(call.rows or 0 for call in calls))


def parts(call: Fitted) -> list[Arrays]:
    """Return the inputs of the runs that `call` needs: several of nearly equal size if it exceeds `most_rows`."""
    if call.rows is None or call.rows <= call.most_rows:
        return [call.inputs]
    count = -(-call.rows // call.most_rows)
    pieces = {name: np.array_split(array, count) for name, array in call.inputs.items()}
    return [{name: pieces[name][index] for name in pieces} for index in range(count)]


def whole(outputs: Sequence[Arrays]) -> Arrays:
    """Join the outputs of all `parts`."""
    if len(outputs) == 1:
        return outputs[0]
    return {name: np.concatenate([part[name] for part in outputs]) for name in outputs[0]}


def split(outputs: Arrays, calls: Sequence[Fitted]) -> list[Arrays]:
    """Split the outputs of a run of `join(calls)` by call, into views. Raises ValueError if the number of rows is
    wrong, so that no call gets another call's rows."""
    if len(calls) == 1:
        return [outputs]
    rows = [call.rows or 0 for call in calls]
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != sum(rows):
            raise ValueError(f"the engine returned {name} with shape {list(array.shape)} for {sum(rows)} rows")
    ends: list[int] = np.cumsum(rows).tolist()
    return [
        {name: array[end - count : end] for name, array in outputs.items()}
        for end, count in zip(ends, rows, strict=True)
    ]


def _check(spec: TensorSpec, array: Array, *, rows_are_free: bool) -> None:
    if array.dtype != dtype_of(spec.datatype):
        raise InvalidInput(f"{spec.name}: the model takes {described(spec)}, not {array.dtype}", field=spec.name)
    skipped = 1 if rows_are_free else 0
    same_rank = array.ndim == len(spec.shape)
    if not same_rank or any(
        expected not in (-1, size) for expected, size in zip(spec.shape[skipped:], array.shape[skipped:], strict=True)
    ):
        raise InvalidInput(f"{spec.name}: the model takes {described(spec)}, not {list(array.shape)}", field=spec.name)
    if spec.datatype == "BOOL":
        _check_bytes(spec, array)


def _check_bytes(spec: TensorSpec, array: Array) -> None:
    """Check BOOL bytes: kernels calculate with them, and a byte of 2 would make them read out of bounds."""
    largest = int(array.view(np.uint8).max(initial=0))
    if largest > 1:
        raise InvalidInput(
            f"{spec.name}: an element of a BOOL tensor must be the byte 0 or 1, not {largest}", field=spec.name
        )


def _accepts(profile: ShapeProfile, shapes: Mapping[str, tuple[int, ...]], but_rows: bool = False) -> bool:
    for name, shape in shapes.items():
        allowed = profile.inputs.get(name)
        if allowed is not None and not allowed.accepts((*allowed.min[:1], *shape[1:]) if but_rows else shape):
            return False
    return True
