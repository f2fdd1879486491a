"""What `gpufn deploy` and `Client.deploy` do with one function.

1. ask what there is; the same code and spec as the revision that serves: nothing to do
2. say what no node has: its calls would wait, and nothing else would tell
3. upload the bundle, make the revision
4. wait until calls go to it: while a worker of the old revision is warm, they stay there until the new one has its own
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from gpufn._views import FunctionView, RevisionView
from gpufn.errors import Conflict, Forbidden, FunctionNotFound, FunctionStartFailed
from gpufn.ids import Digest
from gpufn.spec import FunctionSpec, Resources, spec_from_json

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_STAYS = "calls stay with the old one"  # the gateway's words in `reason`, followed by ": " and the error of the start


class Deployment(msgspec.Struct, frozen=True):
    """`is_new` False: nothing had changed."""

    view: FunctionView
    is_new: bool
    lacking: str = ""


class Api(Protocol):
    """What is asked of a Client."""

    def function(self, name: str) -> FunctionView: ...
    def revisions(self, name: str) -> list[RevisionView]: ...
    def nodes(self) -> list[dict[str, Any]]: ...
    def put_bundle(self, digest: Digest, data: bytes) -> bool: ...
    def create_revision(self, spec: FunctionSpec, bundle: Digest) -> FunctionView: ...


def deploy(api: Api, spec: FunctionSpec, digest: Digest, data: bytes, *, force: bool = False) -> Deployment:
    """Steps 1 to 3. `force`: a new revision even when nothing changed."""
    before = None if force else _serving_alone(api, spec.name)
    if before is not None and _is_same(api, before, spec, digest):
        return Deployment(before, is_new=False)
    lacking = ""
    with contextlib.suppress(Forbidden):  # a key that may only deploy
        lacking = what_no_node_has(spec.resources, api.nodes())
    api.put_bundle(digest, data)
    return Deployment(api.create_revision(spec, digest), is_new=True, lacking=lacking)


def wait_until_it_serves(
    api: Api,
    view: FunctionView,
    timeout_s: float,
    *,
    told: Callable[[str], None] = lambda reason: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FunctionView:
    """Step 4. `told` gets the reason for the wait, each time it is another one.

    Raises FunctionStartFailed when the new revision's workers do not start, Conflict when another one took its place,
    and TimeoutError.
    """
    name, wanted = view.name, view.active
    give_up, pause_s, last = clock() + timeout_s, _FIRST_PAUSE_S, ""
    while view.serving != wanted:
        if view.active != wanted:
            raise Conflict(f"{name}@{wanted} was replaced by {name}@{view.active} before it served")
        about, _, error = view.reason.partition(_STAYS)
        if error and f"revision {wanted}:" in about:
            why = error.removeprefix(": ") or "its workers end before they are ready"
            raise FunctionStartFailed(f"{name}@{wanted} does not start, {name}@{view.serving} still serves: {why}")
        if clock() >= give_up:
            raise TimeoutError(
                f"{name}@{wanted} does not serve after {timeout_s:g} s, {name}@{view.serving} still does: {view.reason}"
            )
        if view.reason != last:
            last = view.reason
            told(last)
        sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        try:
            view = api.function(name)
        except Forbidden:  # a key that may only deploy cannot see it
            return view
    return view


def what_no_node_has(resources: Resources, nodes: Iterable[dict[str, Any]]) -> str:
    """In words, and empty when some node could hold a worker, or none has reported yet.

    >>> node = {"devices": [{"type": "cpu", "kind": "EPYC", "memory_bytes": 8 << 30}]}
    >>> what_no_node_has(Resources(gpu=("L4",)), [node])
    "no node has the GPU 'L4'"
    >>> what_no_node_has(Resources(memory_bytes=16 << 30), [node])
    'no node has 16 GiB of memory, the largest has 8 GiB'
    """
    devices = [device for node in nodes for device in node.get("devices", [])]
    if not devices:
        return ""
    names = [str(device.get("kind", "")).lower() for device in devices if device.get("type") == "gpu"]
    wanted = [kind.lower() for kind in resources.gpu]
    if wanted and not any(kind == "any" or kind in name for kind in wanted for name in names):
        return (
            "no node has a GPU" if "any" in wanted else f"no node has the GPU {' or '.join(map(repr, resources.gpu))}"
        )
    pools = [device for device in devices if device.get("type") == "cpu"]
    memory = max((device.get("memory_bytes", 0) for device in pools), default=0)
    if resources.memory_bytes is not None and pools and resources.memory_bytes > memory:
        return f"no node has {_gib(resources.memory_bytes)} of memory, the largest has {_gib(memory)}"
    cores = max((device.get("cores", 0.0) for device in pools), default=0.0)
    if cores and resources.cpu > cores:
        return f"no node has {resources.cpu:g} cores, the largest has {cores:g}"
    return ""


def _serving_alone(api: Api, name: str) -> FunctionView | None:
    """What there is, when its active revision serves: one that does not start is worth another try."""
    try:
        view = api.function(name)
    except (FunctionNotFound, Forbidden):
        return None
    return view if view.active == view.serving and view.start_error is None else None


def _is_same(api: Api, view: FunctionView, spec: FunctionSpec, digest: Digest) -> bool:
    active = next((each for each in api.revisions(view.name) if each.number == view.active), None)
    if active is None or active.bundle != digest or not view.spec:
        return False
    return spec_from_json(view.spec) == spec_from_json(msgspec.json.encode(spec))


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.3g} GiB"
