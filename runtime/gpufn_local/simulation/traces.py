"""Generation of a trace: `functions(load, rng)`, and the calls of each, `calls(functions, load, rng)`."""

from __future__ import annotations

import math
import random

import msgspec

_SERVICE_S = (0.05, 2.0)  # range of the mean service time of a function; log-uniform, like memory
_SPREAD = 0.25  # of the service times of one function: sigma of the logarithm
_MEMORY_GIB = (1.0, 12.0)
_START_S = 0.8  # start of a process with its imports
_LOAD_GIB_PER_S = 2.0  # weights from disk to the GPU
_RESUME_S = 0.1  # resume of a parked worker
_COPY_GIB_PER_S = 10.0  # host memory to the GPU
_ON_S, _OFF_S = 10.0, 50.0  # mean periods of a bursty function


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The load on the GPU. Call rates are proportional to 1 / rank ** zipf. Together the calls keep the GPU busy for
    `busy` of its time, without cold starts. If `bursty`, a function gets calls for 10 s, then none for 50 s.
    """

    functions: int = 24
    seconds: float = 600.0
    zipf: float = 1.5
    busy: float = 0.4
    bursty: bool = False
    seed: int = 1


class Function(msgspec.Struct, frozen=True):
    name: str
    calls_per_s: float
    service_s: float
    memory_gib: float

    @property
    def cold_start_s(self) -> float:
        return _START_S + self.memory_gib / _LOAD_GIB_PER_S

    @property
    def resume_s(self) -> float:
        return _RESUME_S + self.memory_gib / _COPY_GIB_PER_S

    @property
    def saved_s(self) -> float:
        """Seconds that a resume saves compared with a cold start."""
        return self.cold_start_s - self.resume_s


class Call(msgspec.Struct, frozen=True, eq=False):
    function: Function
    at: float
    service_s: float


def functions(load: Load, rng: random.Random) -> list[Function]:
    """Return the functions, the most frequent first."""
    shares = [1 / rank**load.zipf for rank in range(1, load.functions + 1)]
    services = [_log_uniform(rng, *_SERVICE_S) for _ in shares]
    per_share = load.busy / sum(share * service_s for share, service_s in zip(shares, services, strict=True))
    result = []
    for number, (share, service_s) in enumerate(zip(shares, services, strict=True), 1):
        result.append(Function(f"f{number}", share * per_share, service_s, _log_uniform(rng, *_MEMORY_GIB)))
    return result


def calls(of: list[Function], load: Load, rng: random.Random) -> list[Call]:
    """Return the calls in order of arrival."""
    trace = []
    for function in of:
        times = _bursts(function, load, rng) if load.bursty else _poisson(function.calls_per_s, 0.0, load.seconds, rng)
        for at in times:  # the mean of the lognormal is the function's service time
            factor = rng.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
            trace.append(Call(function, at, function.service_s * factor))
    return sorted(trace, key=lambda call: call.at)


def _poisson(per_s: float, begin: float, end: float, rng: random.Random) -> list[float]:
    times = []
    at = begin + rng.expovariate(per_s)
    while at < end:
        times.append(at)
        at += rng.expovariate(per_s)
    return times


def _bursts(function: Function, load: Load, rng: random.Random) -> list[float]:
    """On average, as many calls as without bursts."""
    per_s = function.calls_per_s * (_ON_S + _OFF_S) / _ON_S
    times: list[float] = []
    at = -rng.uniform(0.0, _ON_S + _OFF_S)
    while at < load.seconds:
        on_s = rng.expovariate(1 / _ON_S)
        times += [time for time in _poisson(per_s, at, min(at + on_s, load.seconds), rng) if time >= 0]
        at += on_s + rng.expovariate(1 / _OFF_S)
    return times


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
