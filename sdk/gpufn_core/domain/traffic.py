"""A split of a function's calls between its revisions, and the one decision about a call: `choose`. Pure.

A call's key is a point in [0, 100), and the weights divide that range in the order of the revisions. So equal keys go
to the same revision, and with two revisions a larger weight only moves calls towards the revision that gets it.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final

import msgspec

from gpufn_core.errors import InvalidInput

MAX_REVISIONS: Final = 10  # with weights, headers and a mirror together
MAX_HEADER_RULES: Final = 20
MAX_RETURN_RULES: Final = 10
MIN_WINDOW_S: Final = 5.0
MAX_WINDOW_S: Final = 3600.0
MAX_MIN_CALLS: Final = 1_000_000
WHOLE: Final = 100  # percent
NO_HEADERS: Final[Mapping[bytes, bytes]] = {}

# Names that only the client chooses: a split must not contain a credential.
HEADER_NAME: Final = re.compile(r"x-(?!gpufn-)[a-z0-9-]{1,62}")
HEADER_VALUE: Final = re.compile(r"[!-~](?:[ -~]{0,198}[!-~])?")
RETURN_RULE: Final = re.compile(r"(errors|p50|p99)\s*>\s*(\d{1,6}(?:\.\d{1,6})?)\s*(%|x)")


class HeaderRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls with this value of the header `name`, in lower case, go to `revision`."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    value: Annotated[str, msgspec.Meta(max_length=200)]
    revision: int

    def matches(self, headers: Mapping[bytes, bytes]) -> bool:
        return headers.get(self.name.encode()) == self.value.encode()


class Mirror(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`percent` of the calls that a client waits for are copied to `revision`. Two numbers are equal if they differ by
    at most `tolerance`, relative to the larger one."""

    revision: int
    percent: Annotated[float, msgspec.Meta(gt=0, le=WHOLE)] = WHOLE
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1e-5


class Measure(enum.StrEnum):
    ERRORS = "errors"
    P50 = "p50"
    P99 = "p99"


class ReturnRule(msgspec.Struct, frozen=True):
    """A limit for each revision beside the serving one. For ERRORS, `limit` is a share of the calls; for a duration,
    how many times longer it may be than for the serving revision."""

    measure: Measure
    limit: float

    def __str__(self) -> str:
        """
        >>> str(ReturnRule(Measure.ERRORS, 0.02)), str(ReturnRule(Measure.P99, 1.5))
        ('errors>2%', 'p99>1.5x')
        """
        limit = f"{self.limit * 100:g}%" if self.measure is Measure.ERRORS else f"{self.limit:g}x"
        return f"{self.measure}>{limit}"


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """`weights` are in percent, by revision in ascending order. The calls of the last `window_s` seconds are compared
    with `return_if`, if a revision has at least `min_calls`. `before` is the split that an automatic return restores;
    None: all calls go to the serving revision."""

    weights: dict[int, int]
    set_at: float  # unix seconds
    headers: tuple[HeaderRule, ...] = ()
    mirror: Mirror | None = None
    return_if: tuple[ReturnRule, ...] = ()
    window_s: float = 60.0
    min_calls: int = 50
    before: Split | None = None

    @property
    def called(self) -> tuple[int, ...]:
        """The revisions that get calls, copies included."""
        others = {rule.revision for rule in self.headers}
        if self.mirror is not None:
            others.add(self.mirror.revision)
        return tuple(sorted(others.union(number for number, weight in self.weights.items() if weight)))

    def weight_of(self, revision: int) -> int:
        return self.weights.get(revision, 0)

    def describe(self) -> str:
        """
        >>> Split(weights={1: 90, 2: 10}, set_at=0.0).describe()
        '1=90, 2=10'
        """
        return ", ".join(f"{number}={weight}" for number, weight in self.weights.items())


class Returned(msgspec.Struct, frozen=True, kw_only=True):
    """An automatic return: the split that it ended, as text, and why."""

    at: float  # unix seconds
    reason: str
    revision: int
    weights: str


class Comparison(enum.StrEnum):
    """The copy of a call, compared with the call."""

    EQUAL = "equal"
    DIFFERENT = "different"
    FAILED = "failed"  # the copy failed, and the call did not
    SKIPPED = "skipped"  # too many copies at once, or a body that is too large


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A call whose copy ended otherwise: the first place in the result, and both values there, or both errors."""

    at: float  # unix seconds
    invocation: str
    comparison: Comparison
    path: str
    answer: str
    copy: str


class MirroredCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call and its copy, on `revision`. `took_s` and `copy_took_s` are run times."""

    function: str
    split_at: float
    revision: int
    comparison: Comparison
    took_s: float = 0.0
    copy_took_s: float = 0.0
    difference: Difference | None = None


def choose(split: Split, key: bytes, headers: Mapping[bytes, bytes] = NO_HEADERS) -> int:
    """Return the revision for a call: by the first rule whose header it has, else by its key.

    >>> split = Split(weights={1: 90, 2: 10}, set_at=0.0, headers=(HeaderRule("x-canary", "1", 2),))
    >>> choose(split, b"a"), choose(split, b"a", {b"x-canary": b"1"})
    (1, 2)
    """
    for rule in split.headers:
        if rule.matches(headers):
            return rule.revision
    point = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) * WHOLE >> 64
    for number, weight in split.weights.items():
        point -= weight
        if point < 0:
            return number
    raise AssertionError("the weights of a split add up to 100")


def is_routing(field: bytes) -> bool:
    """Return whether a header in lower case may choose a revision."""
    return field.startswith(b"x-") and not field.startswith(b"x-gpufn-")


def checked_weights(weights: Mapping[int, int]) -> dict[int, int]:
    """Return the weights in the order of the revisions. Raises InvalidInput.

    >>> checked_weights({2: 10, 1: 90})
    {1: 90, 2: 10}
    """
    if not weights:
        raise InvalidInput("a split needs the weight of at least one revision, such as 1=90,2=10", field="weights")
    for number, weight in weights.items():
        if not 0 <= weight <= WHOLE:
            raise InvalidInput(
                f"the weight of revision {number} must be 0 to 100 percent, not {weight}", field="weights"
            )
    if (total := sum(weights.values())) != WHOLE:
        raise InvalidInput(f"the weights must add up to 100, not {total}", field="weights")
    return dict(sorted(weights.items()))


def checked_headers(rules: Iterable[HeaderRule]) -> tuple[HeaderRule, ...]:
    """Return the rules with names in lower case. Raises InvalidInput."""
    lowered = tuple(msgspec.structs.replace(rule, name=rule.name.lower()) for rule in rules)
    if len(lowered) > MAX_HEADER_RULES:
        raise InvalidInput(f"a split has at most {MAX_HEADER_RULES} rules for headers", field="headers")
    for rule in lowered:
        if not HEADER_NAME.fullmatch(rule.name):
            raise InvalidInput(
                f"the header {rule.name[:64]!r} cannot choose a revision: use a name that begins with 'x-', and not "
                "with 'x-gpufn-'",
                field="headers",
            )
        if not HEADER_VALUE.fullmatch(rule.value):
            raise InvalidInput("the value of a header must have 1 to 200 printable characters", field="headers")
    seen = [(rule.name, rule.value) for rule in lowered]
    if (double := next((each for each in seen if seen.count(each) > 1), None)) is not None:
        raise InvalidInput(f"{double[0]}={double[1]} is given twice", field="headers")
    return lowered


def parse_return_rules(texts: Collection[str]) -> tuple[ReturnRule, ...]:
    """Parse rules such as ``errors>2%`` and ``p99>1.5x``. Raises InvalidInput.

    >>> parse_return_rules(["errors>2%", "p99 > 1.5x"])[1].limit
    1.5
    """
    if len(texts) > MAX_RETURN_RULES:
        raise InvalidInput(f"a split has at most {MAX_RETURN_RULES} rules for its return", field="return_if")
    return tuple(map(_return_rule, texts))


def _return_rule(text: str) -> ReturnRule:
    match = RETURN_RULE.fullmatch(text.strip().lower())
    if match is None or (match[1] == Measure.ERRORS) is not (match[3] == "%"):
        raise InvalidInput(
            f"{text[:60]!r} is no rule for a return: write errors>2% or p99>1.5x (p50 works too)", field="return_if"
        )
    measure, number = Measure(match[1]), float(match[2])
    if measure is Measure.ERRORS and number > WHOLE:
        raise InvalidInput("the limit of errors must be at most 100%", field="return_if")
    if measure is not Measure.ERRORS and number < 1:
        raise InvalidInput(f"the factor of {measure} must be at least 1", field="return_if")
    return ReturnRule(measure, number / WHOLE if measure is Measure.ERRORS else number)
